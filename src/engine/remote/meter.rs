//! Metrics of each engine.

use std::time::Duration;

use super::Fault;
use super::handle::EngineState;
use crate::data::Version;
use crate::observe::{Metric, Metrics};

/// Metrics of the engines, by place.
pub(super) struct Meter {
    metrics: Metrics,
    names: Vec<String>,
}

impl Meter {
    /// Begins the series of engines with these names at zero.
    pub(super) fn new(metrics: &Metrics, names: impl Iterator<Item = String>) -> Self {
        use Metric::{EngineFirstToken, EngineInFlight, EngineLimit, EngineRequests, EngineTokens};
        let names: Vec<String> = names.collect();
        for name in &names {
            let series = [EngineRequests, EngineTokens, EngineFirstToken, EngineInFlight, EngineLimit];
            series.into_iter().for_each(|metric| metrics.begin(metric, &[name]));
        }
        Meter { metrics: metrics.clone(), names }
    }

    pub(super) fn request(&self, place: usize) {
        self.metrics.add(Metric::EngineRequests, &[&self.names[place]], 1.0);
    }

    /// Counts tokens, and observes the time to a request's first token.
    pub(super) fn tokens(&self, place: usize, tokens: usize, waited: Option<Duration>) {
        self.metrics.add(Metric::EngineTokens, &[&self.names[place]], tokens as f64);
        if let Some(waited) = waited {
            self.metrics.observe(Metric::EngineFirstToken, &[&self.names[place]], waited.as_secs_f64());
        }
    }

    pub(super) fn room(&self, place: usize, in_flight: usize, limit: usize) {
        self.metrics.set(Metric::EngineInFlight, &[&self.names[place]], in_flight as f64);
        self.metrics.set(Metric::EngineLimit, &[&self.names[place]], limit as f64);
    }

    pub(super) fn error(&self, place: usize, fault: &Fault) {
        self.metrics.add(Metric::EngineErrors, &[&self.names[place], fault.kind()], 1.0);
    }

    pub(super) fn stands(&self, place: usize, state: EngineState, served: Option<Version>) {
        let name = self.names[place].as_str();
        for (each, word) in [(EngineState::Serving, "serving"), (EngineState::Behind, "behind"), (EngineState::Lost, "lost")] {
            self.metrics.set(Metric::EngineState, &[name, word], f64::from(u8::from(each == state)));
        }
        if let Some(version) = served {
            self.metrics.set(Metric::EngineVersion, &[name], version as f64);
        }
    }
}
