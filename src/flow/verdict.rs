//! Bottleneck of a run and the setting that moves it, in one line (law F4).

use std::cmp::Ordering;
use std::fmt;

use super::clock::State;
use super::report::{Report, StageReport};

/// Smallest share of the run that is a bottleneck.
const WORTH_NAMING: f64 = 0.05;

/// Share of the run from which on a busy stage is the bottleneck, however long others wait.
const SATURATED: f64 = 0.8;

/// Limit of a run: a stage and the state that it was in.
#[derive(Clone, Copy, Debug)]
struct Limit<'a> {
    stage: &'a StageReport,
    state: State,
    /// Share of the whole run: a source that ends immediately is no bottleneck.
    share: f64,
}

impl Report {
    /// Bottleneck so far, in a few words: `generate busy 93%`.
    pub fn limit(&self) -> Option<String> {
        self.find_limit().map(|limit| limit.to_string())
    }

    /// Bottleneck and the setting that moves it, in one line.
    pub fn bottleneck(&self) -> String {
        if self.stages.is_empty() {
            return "interrupted before it began".into();
        }
        let Some(Limit { stage, state, share }) = self.find_limit() else {
            return "bottleneck: none; the stages were hardly busy, so larger items or longer edges would help".into();
        };
        let (name, share) = (&stage.name, percent(share));
        match state {
            State::Credit => {
                let busy = percent(self.most(&[State::Busy]).map_or(0.0, |busiest| busiest.share));
                format!(
                    "bottleneck: admission ({name} waited {share} for credit; nothing was busy more than {busy}): raise its window"
                )
            }
            State::Weights => {
                format!("bottleneck: weights ({name} waited {share} for them): publish sooner, or let it run on older ones")
            }
            _ => {
                let idlest = self.idlest(stage).map(|idle| format!("; {idle}")).unwrap_or_default();
                format!("bottleneck: {name} (busy {share}{idlest}): {}", stage.advice)
            }
        }
    }

    /// Finds the limit: the busiest stage, unless it was unsaturated and another waited longer for
    /// admission or weights. Starved and blocked stages wait for others, so they are never the limit.
    fn find_limit(&self) -> Option<Limit<'_>> {
        let busiest = self.most(&[State::Busy]);
        if busiest.is_some_and(|limit| limit.share >= SATURATED) {
            return busiest;
        }
        self.most(&[State::Credit, State::Weights, State::Busy]).filter(|limit| limit.share >= WORTH_NAMING)
    }

    /// Returns the stage that spent most of the run in one of these states.
    fn most(&self, states: &[State]) -> Option<Limit<'_>> {
        states.iter().flat_map(|&state| self.stages.iter().map(move |stage| self.limit_of(stage, state))).max_by(Limit::cmp)
    }

    /// Returns the stage, except `busy`, that waited longest for another.
    fn idlest(&self, busy: &StageReport) -> Option<Limit<'_>> {
        let others = self.stages.iter().filter(|stage| stage.name != busy.name);
        let waits = others.flat_map(|stage| [State::Starved, State::Blocked].map(|state| self.limit_of(stage, state)));
        waits.max_by(Limit::cmp).filter(|idle| idle.share >= WORTH_NAMING)
    }

    /// Share of the run, without the time for which a stage was held. What the others computed meanwhile
    /// counts as if they had done so afterwards.
    fn limit_of<'a>(&self, stage: &'a StageReport, state: State) -> Limit<'a> {
        let (spent, held) = (per_worker(stage, state), self.held());
        let spent = if state == State::Busy { spent } else { (spent - held).max(0.0) };
        Limit { stage, state, share: spent / (self.wall as f64 - held).max(1.0) }
    }

    /// Longest time, in nanoseconds, for which a stage was held from outside the graph, as by a pause. Only a
    /// stage with an input can be held: a source waits for admission in the same state.
    fn held(&self) -> f64 {
        let held = self.stages.iter().filter(|stage| self.edges.iter().any(|edge| edge.to == stage.name));
        held.map(|stage| per_worker(stage, State::Credit)).fold(0.0, f64::max)
    }
}

/// Mean time of a worker in `state`, in nanoseconds.
fn per_worker(stage: &StageReport, state: State) -> f64 {
    stage.time().of(state) as f64 / stage.workers.len().max(1) as f64
}

impl Limit<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.share.total_cmp(&other.share)
    }
}

impl fmt::Display for Limit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.stage.name, self.state.name(), percent(self.share))
    }
}

fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share.min(1.0))
}
