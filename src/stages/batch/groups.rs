//! Batches of whole groups, each ordered by id (laws D2, D6), none of them older than law V2 allows.
//!
//! With over-sampling a batch takes the groups that finish first among the oldest few, and what it leaves keeps its turn for the next: late
//! groups, which are those with long answers, hold nobody up and are not lost. The bound on staleness limits for how long: a batch that would
//! leave more of them behind than can be trained in time waits for them, or lets them expire, as [`OnStale`] says. It can't wait for ever,
//! since admission lets in no more groups than the versions until then train ([`Pace`](crate::rollout::Pace)).
//!
//! In a synchronous run nothing can stay for the next version. There over-sampling widens the round: once all its groups were judged, steps
//! take the oldest kept ones, whichever finished first (law V3), and the rest is dropped with the reason *surplus*. That spares a second
//! round where a filter drops groups; it does not spare waiting for long completions.

use crate::data::{Batch, Scored};
use crate::flow::{Io, RunContext, Stage, StageError};
use crate::rollout::Admission;
use crate::stages::train::OnStale;

use super::draft::Draft;

/// Collects `size` groups into a batch. Dropped groups are remembered in it and do not count. A rest that fills no batch is not trained:
/// it is what the last step left over.
#[derive(Clone, Debug)]
pub struct Batcher {
    size: usize,
    choice: Option<usize>,
    admission: Option<Admission>,
    on_stale: OnStale,
    part: Option<usize>,
}

impl Batcher {
    /// The groups that finish first, `size` (at least 1) at a time.
    pub fn groups(size: usize) -> Self {
        Batcher { size: size.max(1), choice: None, admission: None, on_stale: OnStale::default(), part: None }
    }

    /// The first to finish among the oldest [`over_sampled`] groups that are in no batch yet; the others stay for the next batch, oldest first.
    /// It takes a source whose ordinals are the groups' ids, and an admission that lets that many in. In a synchronous run the oldest kept
    /// groups of a round are taken when all of it was judged, and the others are dropped as [`SURPLUS`](crate::rollout::SURPLUS).
    pub fn over_sample(self, factor: f64) -> Self {
        Batcher { choice: Some(over_sampled(self.size, factor)), ..self }
    }

    /// Strictly by id, without a gap, so that what a batch holds depends on no timing: over-sampling by 1. A group that finishes early waits
    /// for those before it; what waits is bounded by the source's window.
    pub fn in_order(self) -> Self {
        self.over_sample(1.0)
    }

    /// Sends what is certain to be in a batch ahead of the rest, `groups` (at least 1) or more at a time, so that a trainer which is free learns
    /// from it meanwhile ([`Batch::more`]). Only batches in order have parts, where nothing expires; others are sent whole.
    pub fn in_parts(self, groups: usize) -> Self {
        Batcher { part: Some(groups), ..self }
    }

    /// What becomes of groups that would be older than that bound: they are waited for in time, or expire with the reason *stale* and give
    /// their places back; to mask old tokens is the trainer's part. Tell the trainer the same.
    pub fn on_stale(self, on_stale: OnStale) -> Self {
        Batcher { on_stale, ..self }
    }
}

/// Groups that a batch of `groups` chooses from: ⌈factor · groups⌉, whole groups, and at least the batch itself.
pub fn over_sampled(groups: usize, factor: f64) -> usize {
    // 1.1 × 10 is a little more than 11 in binary, but is meant to be 11.
    let exact = groups as f64 * factor;
    let nearest = exact.round();
    let whole = if (exact - nearest).abs() < 1e-6 { nearest } else { exact.ceil() };
    (whole as usize).max(groups)
}

impl Stage for Batcher {
    type In = Scored;
    type Out = Batch;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        if let Some(admission) = &self.admission {
            admission.batches_of(self.size as u64, self.choice.unwrap_or(self.size) as u64);
        }
    }

    fn run(&mut self, io: &mut Io<Scored, Batch>) -> Result<(), StageError> {
        let draft = Draft::new(self.size, self.choice, self.admission.clone(), self.on_stale);
        let mut draft = match self.part {
            Some(least) => draft.in_parts(least),
            None => draft,
        };
        while let Some(scored) = io.recv()? {
            draft.arrive(scored);
            while let Some(batch) = draft.close() {
                io.send(batch)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_sampling_rounds_up_to_whole_groups() {
        let cases = [(32, 1.5, 48), (32, 1.0, 32), (10, 1.1, 11), (3, 1.5, 5), (1, 1.01, 2), (7, 0.5, 7)];
        for (groups, factor, chosen_from) in cases {
            assert_eq!(over_sampled(groups, factor), chosen_from, "{groups} × {factor}");
        }
    }
}
