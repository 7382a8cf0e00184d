//! Metrics of each engine.

use std::time::Duration;

use super::Fault;
use super::handle::EngineState;
use crate::data::Version;
use crate::observe::{Metric, Metrics, Series};

/// Metrics of the engines, by place.
pub(super) struct Meter {
    metrics: Metrics,
    rows: Vec<Row>,
}

/// Series of one engine that change at every step.
struct Row {
    name: String,
    requests: Series,
    tokens: Series,
    first_token: Series,
    in_flight: Series,
    limit: Series,
}

impl Meter {
    pub(super) fn new(metrics: &Metrics, names: impl Iterator<Item = String>) -> Self {
        let row = |name: String| {
            let of = |metric| metrics.series(metric, &[name.as_str()]);
            Row {
                requests: of(Metric::EngineRequests),
                tokens: of(Metric::EngineTokens),
                first_token: of(Metric::EngineFirstToken),
                in_flight: of(Metric::EngineInFlight),
                limit: of(Metric::EngineLimit),
                name,
            }
        };
        Meter { metrics: metrics.clone(), rows: names.map(row).collect() }
    }

    pub(super) fn request(&self, place: usize) {
        self.rows[place].requests.add(1.0);
    }

    /// Counts tokens, and observes the time to a request's first token.
    pub(super) fn tokens(&self, place: usize, tokens: usize, waited: Option<Duration>) {
        self.rows[place].tokens.add(tokens as f64);
        if let Some(waited) = waited {
            self.rows[place].first_token.observe(waited.as_secs_f64());
        }
    }

    pub(super) fn room(&self, place: usize, in_flight: usize, limit: usize) {
        self.rows[place].in_flight.set(in_flight as f64);
        self.rows[place].limit.set(limit as f64);
    }

    pub(super) fn error(&self, place: usize, fault: &Fault) {
        self.metrics.add(Metric::EngineErrors, &[self.rows[place].name.as_str(), fault.kind()], 1.0);
    }

    pub(super) fn stands(&self, place: usize, state: EngineState, served: Option<Version>) {
        let name = self.rows[place].name.as_str();
        for (each, word) in [(EngineState::Serving, "serving"), (EngineState::Behind, "behind"), (EngineState::Lost, "lost")] {
            self.metrics.set(Metric::EngineState, &[name, word], f64::from(u8::from(each == state)));
        }
        if let Some(version) = served {
            self.metrics.set(Metric::EngineVersion, &[name], version as f64);
        }
    }
}
