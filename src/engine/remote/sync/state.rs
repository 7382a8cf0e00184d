//! Phases of one engine's sync and their failures: a pure state machine.
//!
//! ```text
//! pause → load → label → check → (flush) → resume → probe → done
//!   ↑ wrong weights in check or probe load once more      any other failure retries its phase
//! ```
//!
//! The probe follows the resume, because a paused server answers nothing. Until the probe succeeds,
//! no version is committed; if it fails, tokens sampled since the resume are discarded.
//!
//! An adapter needs no pause, because no request names it before its probe: load → check → probe.

/// Phase of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Pauses the engine.
    Pause,
    /// Loads the weights.
    Load,
    /// Labels the weights.
    Label,
    /// Reads label and checksums back.
    Check,
    /// Clears the cache of finished work.
    Flush,
    /// Resumes the engine.
    Resume,
    /// Compares log-probabilities with the trainer's.
    Probe,
}

impl Phase {
    /// Name of the phase.
    pub fn word(self) -> &'static str {
        match self {
            Phase::Pause => "pause",
            Phase::Load => "load",
            Phase::Label => "label",
            Phase::Check => "check",
            Phase::Flush => "flush",
            Phase::Resume => "resume",
            Phase::Probe => "probe",
        }
    }
}

/// Kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Retried in the same phase.
    Passing,
    /// Other weights than the given ones: loaded again.
    WrongWeights,
    /// Not retried.
    Lasting,
}

/// Next action of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Runs this phase.
    Do(Phase),
    /// Ends: the engine holds the weights.
    Done,
    /// Ends: the engine is isolated, because its weights are unknown.
    Isolated(Phase),
}

/// State machine of one engine's sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WeightSyncState {
    /// All phases, in order.
    steps: &'static [Phase],
    next: Next,
    retries: u32,
}

impl WeightSyncState {
    /// Starts a sync of whole weights. `retries` counts over all phases.
    pub fn new(flushes: bool, retries: u32) -> Self {
        use Phase::{Check, Flush, Label, Load, Pause, Probe, Resume};
        let steps: &[Phase] = match flushes {
            true => &[Pause, Load, Label, Check, Flush, Resume, Probe],
            false => &[Pause, Load, Label, Check, Resume, Probe],
        };
        WeightSyncState { steps, next: Next::Do(Phase::Pause), retries }
    }

    /// Starts a sync of an adapter.
    pub fn of_adapter(retries: u32) -> Self {
        WeightSyncState { steps: &[Phase::Load, Phase::Check, Phase::Probe], next: Next::Do(Phase::Load), retries }
    }

    /// Next action.
    pub fn next(&self) -> Next {
        self.next
    }

    /// Records that the current phase succeeded.
    pub fn passed(&mut self) {
        let Next::Do(phase) = self.next else { return };
        let behind = self.steps.iter().skip_while(|step| **step != phase).nth(1);
        self.next = behind.map_or(Next::Done, |step| Next::Do(*step));
    }

    /// Records that the current phase failed.
    pub fn failed(&mut self, how: Failure) {
        let Next::Do(phase) = self.next else { return };
        if how == Failure::Lasting || self.retries == 0 {
            self.next = Next::Isolated(phase);
            return;
        }
        self.retries -= 1;
        self.next = Next::Do(if how == Failure::WrongWeights { self.steps[0] } else { phase });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn walk(mut state: WeightSyncState, mut fails: impl FnMut(Phase) -> Option<Failure>) -> (Vec<Phase>, Next) {
        let mut done = Vec::new();
        while let Next::Do(phase) = state.next() {
            done.push(phase);
            match fails(phase) {
                None => state.passed(),
                Some(how) => state.failed(how),
            }
        }
        (done, state.next())
    }

    #[test]
    fn nothing_goes_on_before_its_weights_are_loaded_and_named_and_nothing_is_held_before_a_probe() {
        use Phase::*;
        assert_eq!(walk(WeightSyncState::new(false, 0), |_| None), (vec![Pause, Load, Label, Check, Resume, Probe], Next::Done));
        assert_eq!(
            walk(WeightSyncState::new(true, 0), |_| None),
            (vec![Pause, Load, Label, Check, Flush, Resume, Probe], Next::Done)
        );
        assert_eq!(walk(WeightSyncState::of_adapter(0), |_| None), (vec![Load, Check, Probe], Next::Done));
    }

    #[test]
    fn wrong_weights_are_loaded_again_and_other_failures_tried_again_where_they_were() {
        use Phase::*;
        let once = |at: Phase, how| {
            let mut left = 1;
            move |phase: Phase| (phase == at && std::mem::take(&mut left) > 0).then_some(how)
        };
        let (done, end) = walk(WeightSyncState::new(false, 1), once(Probe, Failure::WrongWeights));
        assert_eq!((&done[5..7], end), (&[Probe, Pause][..], Next::Done));
        let (done, end) = walk(WeightSyncState::new(false, 1), once(Load, Failure::Passing));
        assert_eq!((&done[..4], end), (&[Pause, Load, Load, Label][..], Next::Done));
        assert_eq!(walk(WeightSyncState::new(false, 9), once(Load, Failure::Lasting)), (vec![Pause, Load], Next::Isolated(Load)));
    }

    proptest! {
        #[test]
        fn every_course_ends(draws in proptest::collection::vec(0u8..5, 200), retries in 0u32..6, flushes: bool) {
            let mut draws = draws.into_iter();
            let (done, end) = walk(WeightSyncState::new(flushes, retries), |_| match draws.next() {
                Some(0) => Some(Failure::Passing),
                Some(1) => Some(Failure::WrongWeights),
                Some(2) => Some(Failure::Lasting),
                _ => None,
            });
            prop_assert!(done.len() <= 7 * (retries as usize + 1));
            prop_assert_eq!(end == Next::Done, done.last() == Some(&Phase::Probe) && !matches!(end, Next::Isolated(_)));
        }
    }
}
