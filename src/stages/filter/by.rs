//! Filter stage: keeps or drops whole groups (law D2) by a function of the group.

use crate::settings::declare::choices;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use crate::algo::filters::{GroupFilter, Verdict};
use crate::data::Scored;
use crate::flow::{Io, RunContext, Stage, StageError, caught};
use crate::rollout::Admission;

/// Stage that marks dropped groups with a reason. They travel to the batcher, which returns their
/// places, so as many prompts enter again, and lists them in the batch (law D4).
pub struct Filter {
    filter: Box<dyn Fn(&crate::data::Group) -> Verdict + Send>,
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
        /// rejected groups are trained on and counted, until one passes again. Groups dropped before the filter cannot be trained on; as many of those in a row still end the run.
        "keep" => Keep,
    }
}

/// Error of a filter that dropped too many groups in a row.
#[derive(Clone, Debug, Default, thiserror::Error, PartialEq, Eq)]
#[error("the filter dropped {dropped} groups in a row ({}): there is nothing left to train on; if the task is learned, train fewer steps, \
         else loosen the filter or look at the rewards", by_reason(.reasons))]
struct Exhausted {
    dropped: u64,
    /// Groups by reason.
    reasons: BTreeMap<String, u64>,
}

/// Error of a filter that panicked.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("the filter panicked on group {group}: {message}")]
pub struct FilterPanicked {
    /// Id of the group.
    pub group: u64,
    /// Message of the panic.
    pub message: String,
}

fn by_reason(reasons: &BTreeMap<String, u64>) -> String {
    reasons.iter().map(|(reason, groups)| format!("{reason}: {groups}")).collect::<Vec<_>>().join(", ")
}

impl Filter {
    /// Keeps the groups that `filter` keeps. [`crate::algo::filters`] has ready ones and
    /// combinators.
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
        let mut in_a_row = Exhausted::default();
        let mut sparing = false;
        while let Some(scored) = io.recv()? {
            // A group dropped earlier is not filtered, because its samples may lack rewards; it counts as rejected.
            let before = scored.dropped().map(|reason| Cow::Owned(reason.to_owned()));
            let group = scored.group();
            let judge = || caught(|| (self.filter)(group)).map_err(|message| FilterPanicked { group: group.id(), message });
            let verdict = before.clone().map_or_else(judge, |reason| Ok(Verdict::Drop(reason)))?;
            let Verdict::Drop(reason) = verdict else {
                (in_a_row, sparing) = (Exhausted::default(), false);
                io.send(scored)?;
                continue;
            };
            if sparing && before.is_none() {
                in_a_row = Exhausted::default();
                io.send(scored.spare())?;
                continue;
            }
            in_a_row.dropped += 1;
            *in_a_row.reasons.entry(reason.to_string()).or_default() += 1;
            if in_a_row.dropped >= patience {
                if sparing || self.fallback == Fallback::Error {
                    return Err(in_a_row.into());
                }
                tracing::warn!("{in_a_row}; training on what it rejects until a group passes again");
                (in_a_row, sparing) = (Exhausted::default(), true);
            }
            io.send(scored.drop_for(reason))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter")
    }
}
