//! Traces: when sampled groups left each stage, from prompt to optimizer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rollflow::data::{Batch, Group, Prompt, Scored};
use rollflow::flow::{Flow, Message, Port};
use rollflow::stages::train::{Trained, staleness};

/// Groups that are on their way at a time. Of more, the oldest are forgotten.
const OPEN: usize = 4096;

/// Notes when groups pass. Clones share what they note; the default notes nothing.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<Noted>>);

struct Noted {
    /// One group in so many is traced.
    every: u64,
    open: Mutex<BTreeMap<u64, Vec<Mark>>>,
    finished: Box<dyn Fn(Trace) + Send + Sync>,
}

/// A message with groups.
pub trait Grouped: Message {
    /// Numbers of its groups.
    fn groups(&self) -> Vec<u64>;
}

impl Grouped for Prompt {
    fn groups(&self) -> Vec<u64> {
        vec![self.ordinal]
    }
}

impl Grouped for Group {
    fn groups(&self) -> Vec<u64> {
        vec![self.id()]
    }
}

impl Grouped for Scored {
    fn groups(&self) -> Vec<u64> {
        vec![self.group().id()]
    }
}

impl Grouped for Batch {
    fn groups(&self) -> Vec<u64> {
        self.groups.iter().map(Group::id).collect()
    }
}

/// A stage that a group left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// Stage.
    pub stage: &'static str,
    /// Time at which it left.
    pub at: SystemTime,
}

/// The way of a group. Between two marks it waited for the second stage and was in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The group's number.
    pub group: u64,
    /// Stages in the order in which it left them.
    pub marks: Vec<Mark>,
    /// Facts about its end.
    pub facts: Vec<(&'static str, String)>,
}

impl Traces {
    /// Traces one group in `every`, and calls `finished` when it was trained or dropped.
    pub fn new(every: u64, finished: impl Fn(Trace) + Send + Sync + 'static) -> Self {
        Traces(Some(Arc::new(Noted { every: every.max(1), open: Mutex::default(), finished: Box::new(finished) })))
    }

    /// Notes when groups leave `stage`.
    pub fn follow<T: Grouped>(&self, flow: &mut Flow, port: &Port<T>, stage: &'static str) {
        if let Some(noted) = self.0.clone() {
            flow.tap(port, 1, move |item| item.groups().into_iter().for_each(|group| noted.pass(group, stage)));
        }
    }

    /// Ends the traces of the groups of each trained step.
    pub fn end<W: Send + Sync + 'static>(&self, flow: &mut Flow, port: &Port<Trained<W>>) {
        if let Some(noted) = self.0.clone() {
            flow.tap(port, 1, move |step| noted.trained(step));
        }
    }
}

impl Noted {
    fn pass(&self, group: u64, stage: &'static str) {
        if !group.is_multiple_of(self.every) {
            return;
        }
        let mut open = self.open.lock();
        open.entry(group).or_default().push(Mark { stage, at: SystemTime::now() });
        while open.len() > OPEN {
            open.pop_first();
        }
    }

    fn trained<W>(&self, step: &Trained<W>) {
        for group in &step.batch.groups {
            self.pass(group.id(), "train");
            let rewards = group.rewards();
            let tokens: usize = group.samples.iter().map(|sample| sample.generated()).sum();
            let lag = group.samples.iter().filter_map(|sample| staleness(sample, step.version)).max();
            let facts = [
                ("step", Some(step.step.to_string())),
                ("version", Some(step.version.to_string())),
                ("staleness", lag.map(|lag| lag.to_string())),
                ("samples", Some(group.samples.len().to_string())),
                ("generated_tokens", Some(tokens.to_string())),
                ("reward_mean", Some((rewards.iter().sum::<f64>() / rewards.len().max(1) as f64).to_string())),
            ];
            self.finish(group.id(), facts.into_iter().filter_map(|(name, fact)| Some((name, fact?))).collect());
        }
        for dropped in &step.batch.dropped {
            self.finish(dropped.id, vec![("step", step.step.to_string()), ("dropped", dropped.reason.clone())]);
        }
    }

    fn finish(&self, group: u64, facts: Vec<(&'static str, String)>) {
        let marks = self.open.lock().remove(&group);
        if let Some(marks) = marks {
            (self.finished)(Trace { group, marks, facts });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_every_nth_group_the_way_is_told_once_and_what_never_ends_is_forgotten() {
        let told: Arc<Mutex<Vec<Trace>>> = Arc::default();
        let seen = told.clone();
        let traces = Traces::new(3, move |trace| seen.lock().push(trace)).0.unwrap();
        for group in 0..9 {
            ["prompts", "generate"].into_iter().for_each(|stage| traces.pass(group, stage));
        }
        (0..9).for_each(|group| traces.finish(group, vec![("step", "1".to_owned())]));
        traces.finish(3, Vec::new());
        let told = told.lock();
        assert_eq!(told.iter().map(|trace| trace.group).collect::<Vec<_>>(), [0, 3, 6]);
        assert_eq!(told[1].marks.iter().map(|mark| mark.stage).collect::<Vec<_>>(), ["prompts", "generate"]);
        assert!(told[1].marks[0].at <= told[1].marks[1].at);
        (0..3 * OPEN as u64 + 30).for_each(|group| traces.pass(group, "prompts"));
        assert_eq!(traces.open.lock().len(), OPEN);
    }
}
