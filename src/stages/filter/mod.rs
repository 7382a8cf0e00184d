//! Filter stage: keeps or drops whole groups (law D2) by a function of the group.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::algo::filters::{GroupFilter, Verdict};
use crate::data::{Group, Scored};
use crate::flow::{Io, RunContext, Stage, StageError, caught};
use crate::rollout::Admission;
use crate::settings::declare::choices;

/// Stage that marks dropped groups with a reason. They travel to the batcher, which returns their
/// places, so as many prompts enter again, and lists them in the batch (law D4).
pub struct Filter {
    filter: Box<dyn Fn(&Group) -> Verdict + Send>,
    patience: Option<u64>,
    fallback: Fallback,
    admission: Option<Admission>,
}

/// Default patience, in batches of the flow's batcher.
const PATIENCE_BATCHES: u64 = 64;
/// Default patience in groups, in a flow without admission.
const PATIENCE_GROUPS: u64 = 2048;

choices! {
    /// Policy for a filter that rejects everything.
    pub enum Fallback {
        /// the run ends with an error that lists the reasons.
        "error" => Error,
        /// rejected groups are trained on and counted, until one passes again. Groups dropped before
        /// the filter cannot be trained on; as many of those in a row still end the run.
        "keep" => Keep,
    }
}

impl Filter {
    /// Keeps the groups that `filter` keeps. [`crate::algo::filters`] has ready ones and
    /// combinators. A panic ends the run and names the group.
    pub fn by(filter: impl GroupFilter) -> Self {
        Filter { filter: Box::new(filter), patience: None, fallback: Fallback::default(), admission: None }
    }

    /// Ends the run with an error after `groups` dropped groups in a row (at least 1), those that
    /// earlier stages dropped included. Default: 64 batches of the flow's batcher, or 2,048 groups
    /// in a flow without admission.
    pub fn patience(self, groups: u64) -> Self {
        Filter { patience: Some(groups.max(1)), ..self }
    }

    /// Policy when the patience is exhausted. Default: an error.
    pub fn fallback(self, fallback: Fallback) -> Self {
        Filter { fallback, ..self }
    }
}

/// Message of a filter that dropped so many groups in a row, by reason.
fn exhausted(dropped: &BTreeMap<String, u64>) -> String {
    let by_reason: Vec<String> = dropped.iter().map(|(reason, groups)| format!("{reason}: {groups}")).collect();
    format!(
        "the filter dropped {} groups in a row ({}): there is nothing left to train on; if the task is learned, train fewer steps, \
         else loosen the filter or look at the rewards",
        dropped.values().sum::<u64>(),
        by_reason.join(", ")
    )
}

impl Stage for Filter {
    type In = Scored;
    type Out = Scored;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
    }

    fn run(&mut self, io: &mut Io<Scored, Scored>) -> Result<(), StageError> {
        let per_batch = self.admission.as_ref().and_then(Admission::groups_per_batch);
        let default = per_batch.map_or(PATIENCE_GROUPS, |groups| PATIENCE_BATCHES.saturating_mul(groups));
        let patience = self.patience.unwrap_or(default);
        // A run that was interrupted while the filter kept what it rejected continues so (law C2).
        let resumes = self.fallback == Fallback::Keep && self.admission.as_ref().is_some_and(Admission::has_spared);
        let report = |sparing| self.admission.iter().for_each(|admission| admission.spares(sparing));
        let (mut in_a_row, mut sparing) = (BTreeMap::new(), resumes);
        while let Some(scored) = io.recv()? {
            let (group, before) = (scored.group(), scored.dropped().map(str::to_owned));
            let can_spare = sparing && before.is_none();
            let panicked = |message| StageError::new(format!("the filter panicked on group {}: {message}", group.id()));
            // A group dropped earlier is not filtered, because its samples may lack rewards; it counts as rejected.
            let verdict = match before {
                Some(reason) => Verdict::Drop(Cow::Owned(reason)),
                None => caught(|| (self.filter)(group)).map_err(panicked)?,
            };
            let reason = match verdict {
                Verdict::Drop(reason) if !can_spare => reason,
                verdict => {
                    in_a_row.clear();
                    sparing = can_spare && !verdict.kept();
                    report(sparing);
                    io.send(if sparing { scored.spare() } else { scored })?;
                    continue;
                }
            };
            *in_a_row.entry(reason.to_string()).or_default() += 1;
            if in_a_row.values().sum::<u64>() >= patience {
                let message = exhausted(&in_a_row);
                if sparing || self.fallback == Fallback::Error {
                    return Err(StageError::new(message));
                }
                tracing::warn!("{message}; training on what it rejects until a group passes again");
                in_a_row.clear();
                sparing = true;
                report(sparing);
            }
            io.send(scored.drop_for(reason))?;
        }
        Ok(())
    }
}
