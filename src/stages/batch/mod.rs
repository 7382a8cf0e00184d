//! Batches of whole groups, each ordered by id (laws D2, D6), none of them older than law V2
//! allows.
//!
//! With over-sampling a batch takes the groups that finish first among the oldest few; the others
//! keep their turn for the next batch, so late groups, which have long completions, delay no batch
//! and are not lost. A batch that would leave more groups than can be trained in time waits for
//! them, or lets them expire, by [`OnStale`]. The wait ends, because admission admits no more groups
//! than the versions until then train ([`Pace`](crate::rollout::Pace)).
//!
//! In a synchronous run no group can stay for the next version. There over-sampling widens the
//! round: once all its groups have arrived, steps take the oldest kept ones (law V3), and the rest
//! is dropped with the reason *surplus*. That saves a second round when a filter drops groups, but
//! no wait for long completions.

mod draft;

use draft::Draft;

use crate::data::{Batch, Scored};
use crate::flow::{Io, RunContext, Signal, Stage, StageError};
use crate::rollout::Admission;
use crate::stages::train::OnStale;

/// Stage that collects groups into batches. A batch also lists the groups dropped meanwhile, which
/// do not count. An incomplete last batch is not trained.
///
/// Needs a source whose ordinals, from 0 without a gap, are the groups' ids.
#[derive(Clone, Debug)]
pub struct Batcher {
    size: usize,
    /// Number of groups that a batch chooses from.
    choice: usize,
    admission: Option<Admission>,
    on_stale: OnStale,
    part: Option<usize>,
}

/// Default of [`Batcher::over_sample`], and of recipes.
pub(crate) const OVERSAMPLING_FACTOR: f64 = 1.0;

impl Batcher {
    /// Batches of `size` groups, at least 1, in the order of their ids, so that a batch does not
    /// depend on timing. A group that finishes early waits for those before it; the source's window
    /// bounds their number.
    pub fn groups(size: usize) -> Self {
        let size = size.max(1);
        let choice = over_sampled(size, OVERSAMPLING_FACTOR);
        Batcher { size, choice, admission: None, on_stale: OnStale::default(), part: None }
    }

    /// Chooses each batch among the oldest [`over_sampled`] groups: the first to finish. The others
    /// stay for the next batch. Default: 1, the oldest groups.
    ///
    /// Needs an admission that admits that many. A synchronous run takes the oldest kept groups of a
    /// complete round, and drops the others as [`SURPLUS`](crate::rollout::SURPLUS).
    pub fn over_sample(self, factor: f64) -> Self {
        Batcher { choice: over_sampled(self.size, factor), ..self }
    }

    /// Sends certain groups of a batch early, at least `groups` (1 or more) at a time, so that a
    /// free trainer computes on them ([`Batch::more`]). Only batches in order that don't expire
    /// have parts; others are sent whole.
    pub fn in_parts(self, groups: usize) -> Self {
        Batcher { part: Some(groups), ..self }
    }

    /// Policy for groups that would exceed the bound on staleness: the batcher waits for them in
    /// time, or drops them as *stale*, which returns their places. The trainer masks old tokens.
    /// Give the trainer the same policy.
    pub fn on_stale(self, on_stale: OnStale) -> Self {
        Batcher { on_stale, ..self }
    }
}

/// Returns the number of groups that a batch chooses from: ⌈factor · groups⌉, at least the batch
/// itself.
pub fn over_sampled(groups: usize, factor: f64) -> usize {
    // 1.1 × 10 is slightly more than 11 in binary, and means 11.
    let exact = groups as f64 * factor;
    let nearest = exact.round();
    let whole = if (exact - nearest).abs() < 1e-6 { nearest } else { exact.ceil() };
    (whole as usize).max(groups)
}

/// A group that others wait for and that did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{waiting} finished groups were not trained, because group {missing} did not arrive: the ordinals of a source start at 0 \
     and have no gap, and groups are dropped by `Filter` or `Scored::drop_for`, which let the batcher know"
)]
struct MissingGroup {
    /// Id of the group.
    missing: u64,
    /// Finished groups that wait for it.
    waiting: usize,
}

/// A group with the id of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("group {0} came twice, or was trained or dropped before: no two prompts may have one `Prompt::ordinal`")]
struct Repeated(u64);

impl Batcher {
    /// Collects batches until the input ends. Returns the group without which they could not continue.
    fn collect(&self, io: &mut Io<Scored, Batch>) -> Result<Option<MissingGroup>, StageError> {
        let mut draft = Draft::new(self);
        while let Some(scored) = io.recv()? {
            draft.arrive(scored).map_err(StageError::new)?;
            while let Some(batch) = draft.close() {
                io.send(batch)?;
            }
        }
        // A run that is stopped or fails leaves groups in flight.
        Ok(draft.awaited().filter(|_| io.signal() == Signal::Run || io.is_stalled()))
    }
}

impl Stage for Batcher {
    type In = Scored;
    type Out = Batch;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        if let Some(admission) = &self.admission {
            admission.batches_of(self.size as u64, self.choice as u64);
        }
    }

    fn run(&mut self, io: &mut Io<Scored, Batch>) -> Result<(), StageError> {
        self.collect(io)?.map_or(Ok(()), |missing| Err(StageError::new(missing)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::data::{Group, Prompt};
    use crate::flow::{Flow, RunError, Until, Window, from_iter};

    fn scored(id: u64) -> Scored {
        let prompt = Arc::new(Prompt { ordinal: id, ..Prompt::default() });
        Scored::new(Group { prompt, ..Group::default() }).unwrap()
    }

    /// The error of a run with batches of `size` groups, of these ids.
    fn run_of(ids: impl IntoIterator<Item = u64>, size: usize, window: u64) -> RunError {
        let mut flow = Flow::new("gap");
        flow.stall_timeout(Duration::ZERO);
        let ids: Vec<u64> = ids.into_iter().collect();
        let source = from_iter(ids.into_iter().map(scored)).with(move |spec| spec.window(Window::new(window)));
        let groups = flow.source("groups", source);
        let batches = flow.stage("batch", groups, Batcher::groups(size));
        flow.sink("seen", batches, |_: Batch| {});
        flow.run(Until::finished()).unwrap_err()
    }

    #[test]
    fn f7_a_stalled_run_names_the_group_that_did_not_arrive() {
        for (ids, size, window, text) in [
            (1..9, 1, 2, "2 finished groups were not trained, because group 0 did not arrive"),
            (1..9, 4, 3, "3 finished groups were not trained, because group 0 did not arrive"),
        ] {
            let error = run_of(ids, size, window);
            assert!(matches!(error, RunError::Stalled { .. }) && error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn f3_a_source_that_ends_before_a_group_arrived_is_an_error() {
        for (ids, size, text) in [
            ((1..9).collect::<Vec<_>>(), 1, "8 finished groups were not trained, because group 0 did not arrive"),
            (vec![0, 1, 3], 4, "1 finished groups were not trained, because group 2 did not arrive"),
        ] {
            let error = run_of(ids, size, 100);
            assert!(matches!(error, RunError::Failed { .. }) && error.to_string().contains(text), "{error}");
        }
    }

    /// Law D4: a group replaces no other.
    #[test]
    fn a_group_that_comes_twice_ends_the_run_wherever_the_first_is() {
        let in_the_choice = vec![0, 0];
        let batched = vec![0, 1, 2, 3, 1];
        let early = vec![5, 5];
        for ids in [in_the_choice, batched, early] {
            let (twice, size) = (ids[ids.len() - 1], 2);
            let error = run_of(ids, size, 100).to_string();
            assert!(error.contains(&format!("group {twice} came twice, or was trained or dropped before")), "{error}");
        }
    }

    #[test]
    fn groups_that_wait_for_one_that_did_not_arrive_are_known() {
        let batcher = Batcher::groups(2);
        let mut draft = Draft::new(&batcher);
        draft.arrive(scored(1)).unwrap();
        assert_eq!((draft.close(), draft.awaited()), (None, Some(MissingGroup { missing: 0, waiting: 1 })));
        [2, 3].into_iter().for_each(|id| draft.arrive(scored(id)).unwrap());
        assert_eq!((draft.close(), draft.awaited()), (None, Some(MissingGroup { missing: 0, waiting: 3 })));
        draft.arrive(scored(0)).unwrap();
        assert!(draft.close().is_some() && draft.close().is_some());
        assert_eq!(draft.awaited(), None);
    }

    #[test]
    fn over_sampling_rounds_up_to_whole_groups() {
        let cases = [(32, 1.5, 48), (32, 1.0, 32), (10, 1.1, 11), (3, 1.5, 5), (1, 1.01, 2), (7, 0.5, 7)];
        for (groups, factor, chosen_from) in cases {
            assert_eq!(over_sampled(groups, factor), chosen_from, "{groups} × {factor}");
        }
    }
}
