//! Bottleneck of a run and the setting that moves it, in one line (law F4). A pure function of a
//! snapshot.

use super::clock::State;
use super::report::{Snapshot, StageReport};

/// Smallest share of the run that is a bottleneck.
const WORTH_NAMING: f64 = 0.05;

/// Share of the run from which on a busy stage is the bottleneck, however long others wait.
const SATURATED: f64 = 0.8;

/// Limit of a run: a stage and the state it was in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit<'a> {
    stage: &'a StageReport,
    state: State,
    /// Share of the whole run: a source that ends immediately is no bottleneck.
    share: f64,
}

/// Finds the limit: the busiest stage, unless it was unsaturated and another waited longer for
/// admission or weights. Starved and blocked stages wait for others, so they are never the limit.
pub(crate) fn limit(snapshot: &Snapshot) -> Option<Limit<'_>> {
    let busiest = most(snapshot, State::Busy);
    if busiest.is_some_and(|limit| limit.share >= SATURATED) {
        return busiest;
    }
    let waits = [State::Credit, State::Weights].map(|state| most(snapshot, state));
    let all = waits.into_iter().chain([busiest]).flatten();
    all.max_by(|a, b| a.share.total_cmp(&b.share)).filter(|limit| limit.share >= WORTH_NAMING)
}

/// Formats the bottleneck in a few words: `generate busy 93%`.
pub(crate) fn in_short(snapshot: &Snapshot) -> Option<String> {
    limit(snapshot).map(|Limit { stage, state, share }| format!("{} {} {}", stage.name, state.name(), percent(share)))
}

/// Formats the bottleneck and the change that moves it, in a sentence.
pub(crate) fn verdict(snapshot: &Snapshot) -> String {
    let Some(Limit { stage, state, share }) = limit(snapshot) else {
        return "bottleneck: none; the stages were hardly busy, so larger items or longer edges would help".into();
    };
    let (name, share) = (&stage.name, percent(share));
    match state {
        State::Credit => {
            let busy = percent(most(snapshot, State::Busy).map_or(0.0, |busiest| busiest.share));
            format!(
                "bottleneck: admission ({name} waited {share} for credit; nothing was busy more than {busy}): raise its window"
            )
        }
        State::Weights => {
            format!("bottleneck: weights ({name} waited {share} for them): publish sooner, or let it run on older ones")
        }
        _ => {
            let idlest = idlest(snapshot, stage)
                .map(|idle| format!("; {} {} {}", idle.stage.name, idle.state.name(), percent(idle.share)));
            format!("bottleneck: {name} (busy {share}{}): give it more {}", idlest.unwrap_or_default(), stage.knob)
        }
    }
}

/// Returns the stage that spent most of the run in this state.
fn most(snapshot: &Snapshot, state: State) -> Option<Limit<'_>> {
    let limits = snapshot.stages.iter().map(|stage| Limit { stage, state, share: share(snapshot, stage, state) });
    limits.max_by(|a, b| a.share.total_cmp(&b.share))
}

/// Returns the stage, except `busy`, that waited longest for another.
fn idlest<'a>(snapshot: &'a Snapshot, busy: &StageReport) -> Option<Limit<'a>> {
    let others = snapshot.stages.iter().filter(|stage| stage.name != busy.name);
    let waits = others.flat_map(|stage| {
        [State::Starved, State::Blocked].map(|state| Limit { stage, state, share: share(snapshot, stage, state) })
    });
    waits.max_by(|a, b| a.share.total_cmp(&b.share)).filter(|idle| idle.share >= WORTH_NAMING)
}

fn share(snapshot: &Snapshot, stage: &StageReport, state: State) -> f64 {
    stage.time().of(state) as f64 / stage.workers.len().max(1) as f64 / snapshot.wall.max(1) as f64
}

fn percent(share: f64) -> String {
    format!("{:.0}%", 100.0 * share.min(1.0))
}
