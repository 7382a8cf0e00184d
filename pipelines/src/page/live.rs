//! The `live` event: a run at one moment, as its process sends it to readers of its page.

use std::collections::BTreeMap;

use rollflow::flow::Report;
use rollflow::observe::{FlowActivity, Metric, Metrics};
use serde::{Deserialize, Serialize};

use crate::run::observed::Observed;

/// A running run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LiveEvent {
    /// Times of stages and fill of edges since the event before.
    pub flow: FlowActivity,
    /// Newest weight version by role.
    pub versions: BTreeMap<String, f64>,
    /// Steps of the run, those before a resume included.
    pub step: u64,
    /// Steps of this process.
    pub steps: Option<f64>,
    /// Tokens that this process generated.
    pub generated_tokens: Option<f64>,
    /// Token ledger.
    pub tokens: BTreeMap<String, f64>,
    /// Prompt ledger.
    pub prompts: BTreeMap<String, f64>,
    /// Servers that generate, if the run has any.
    pub engines: Vec<EngineActivity>,
    /// Trained samples by how many versions their oldest token lagged.
    pub staleness: Vec<(u64, u64)>,
    /// True during a pause; absent if the page gives no orders.
    pub paused: Option<bool>,
}

/// A server that generates.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct EngineActivity {
    pub name: String,
    pub state: String,
    pub version: Option<f64>,
    pub in_flight: Option<f64>,
    pub tokens: Option<f64>,
}

impl LiveEvent {
    /// The run at this moment; `before` is the report of the event before.
    pub fn of(observed: &Observed, before: Option<&Report>, now: &Report, steerable: bool) -> Self {
        let metrics = &observed.metrics;
        let by_label = |metric| -> BTreeMap<String, f64> {
            metrics.series(metric).into_iter().filter_map(|(labels, value)| Some((labels.into_iter().next()?, value))).collect()
        };
        let steps = observed.total(Metric::Steps, &[]);
        LiveEvent {
            flow: FlowActivity::between(before, now),
            versions: by_label(Metric::WeightVersion),
            step: observed.taken() + steps as u64,
            steps: Some(steps),
            generated_tokens: Some(observed.total(Metric::GeneratedTokens, &[])),
            tokens: by_label(Metric::LedgerTokens),
            prompts: by_label(Metric::LedgerPrompts),
            engines: engines(metrics),
            staleness: observed.staleness(),
            paused: steerable.then(|| observed.orders.is_paused()),
        }
    }
}

fn engines(metrics: &Metrics) -> Vec<EngineActivity> {
    let mut states = BTreeMap::new();
    for (labels, value) in metrics.series(Metric::EngineState) {
        if let [engine, state] = labels.as_slice()
            && value > 0.0
        {
            states.insert(engine.clone(), state.clone());
        }
    }
    let engine = |(name, state): (String, String)| {
        let of = |metric| metrics.newest(metric, &[&name]);
        let (version, in_flight) = (of(Metric::EngineVersion), of(Metric::EngineInFlight));
        EngineActivity { version, in_flight, tokens: of(Metric::EngineTokens), name, state }
    };
    states.into_iter().map(engine).collect()
}
