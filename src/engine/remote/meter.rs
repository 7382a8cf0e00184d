//! Metrics of each engine.

use std::time::Duration;

use super::Fault;
use super::handle::EngineState;
use crate::data::Version;
use crate::observe::{Metric, Metrics};

/// States and their names.
const STATES: [(EngineState, &str); 4] = [
    (EngineState::Serving, "serving"),
    (EngineState::Behind, "behind"),
    (EngineState::Lost, "lost"),
    (EngineState::Leaving, "leaving"),
];

/// Metrics of the engines, by name.
pub(super) struct Meter(Metrics);

impl Meter {
    pub(super) fn new(metrics: &Metrics) -> Self {
        Meter(metrics.clone())
    }

    /// Begins the series of an engine at zero.
    fn begin(&self, name: &str) {
        use Metric::{EngineFirstToken, EngineInFlight, EngineLimit, EngineRequests, EngineTokens};
        let series = [EngineRequests, EngineTokens, EngineFirstToken, EngineInFlight, EngineLimit];
        series.into_iter().for_each(|metric| self.0.begin(metric, &[name]));
    }

    /// Ends the series of an engine that left.
    pub(super) fn left(&self, name: &str) {
        self.0.end("engine", name);
    }

    pub(super) fn request(&self, name: &str) {
        self.0.add(Metric::EngineRequests, &[name], 1.0);
    }

    /// Counts tokens, and observes the time to a request's first token.
    pub(super) fn tokens(&self, name: &str, tokens: usize, waited: Option<Duration>) {
        self.0.add(Metric::EngineTokens, &[name], tokens as f64);
        if let Some(waited) = waited {
            self.0.observe(Metric::EngineFirstToken, &[name], waited.as_secs_f64());
        }
    }

    pub(super) fn room(&self, name: &str, in_flight: usize, limit: usize) {
        self.0.set(Metric::EngineInFlight, &[name], in_flight as f64);
        self.0.set(Metric::EngineLimit, &[name], limit as f64);
    }

    pub(super) fn error(&self, name: &str, fault: &Fault) {
        self.0.add(Metric::EngineErrors, &[name, fault.kind()], 1.0);
    }

    /// Counts a completion of an attempt that another had replaced.
    pub(super) fn duplicate(&self, name: &str) {
        self.0.add(Metric::EngineDuplicates, &[name], 1.0);
    }

    /// Counts a sample that continues elsewhere because the engine was slow.
    pub(super) fn moved(&self, name: &str) {
        self.0.add(Metric::EngineMoved, &[name], 1.0);
    }

    /// Observes a phase of a weight sync.
    pub(super) fn sync_phase(&self, name: &str, phase: &str, time: Duration) {
        self.0.observe(Metric::EngineSync, &[name, phase], time.as_secs_f64());
    }

    /// Sets the number of engines in each state.
    pub(super) fn count(&self, states: impl Iterator<Item = EngineState>) {
        let mut counts = STATES.map(|(state, word)| (state, word, 0.0));
        for state in states {
            counts.iter_mut().filter(|(each, ..)| *each == state).for_each(|(_, _, count)| *count += 1.0);
        }
        counts.iter().for_each(|(_, word, count)| self.0.set(Metric::Engines, &[word], *count));
    }

    pub(super) fn stands(&self, name: &str, state: EngineState, served: Option<Version>) {
        self.begin(name);
        for (each, word) in STATES {
            self.0.set(Metric::EngineState, &[name, word], f64::from(u8::from(each == state)));
        }
        if let Some(version) = served {
            self.0.set(Metric::EngineVersion, &[name], version as f64);
        }
    }
}
