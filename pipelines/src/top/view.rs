//! The run on the screen, from files or from a live page. Texts of models, recipes and servers enter
//! through [`line`] and [`lines`] only, which bound them and escape control characters.

use std::collections::{BTreeMap, VecDeque};

use rollflow::observe::logs::Rollout;
use rollflow::observe::{EdgeActivity, StageShares};
use rollflow::util::untrusted;
use serde::Deserialize;

use crate::page::{EngineActivity, LiveEvent};

use super::curve::Curve;
use super::totals::Totals;

/// Samples that are kept.
const SAMPLES: usize = 200;
/// Most stages, edges, engines, curves or ledger parts that are taken from a page.
const PARTS: usize = 500;
/// Longest name or message, in characters.
const NAME: usize = 300;
/// Longest prompt or completion, in characters.
const TEXT: usize = 20_000;

/// Keys of the rates in tables of totals.
pub const RATES: [&str; 2] = ["generated_tokens", "trained_tokens"];

/// A name or message of foreign origin as one line.
pub fn line(text: &str) -> String {
    untrusted::line_of(text, NAME)
}

/// A text of foreign origin as lines.
fn lines(text: &str) -> String {
    untrusted::block_of(text, TEXT).replace('\t', "    ")
}

/// Connection to the page of the run's process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Connection {
    /// The view reads files only.
    #[default]
    Files,
    /// Not established yet.
    Connecting,
    /// The page sends events.
    Connected,
    /// Broken or refused, for this reason; another attempt follows.
    Lost(String),
}

/// A trained sample.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ShownSample {
    pub step: u64,
    pub group: u64,
    pub index: u32,
    /// Part of its rollout, from 0.
    pub part: u32,
    pub status: String,
    pub prompt: String,
    pub response: String,
    pub reward: Option<f64>,
    pub advantage: Option<f64>,
    /// Sampled tokens.
    pub length: u64,
}

impl ShownSample {
    /// The sample of a line of `rollouts.jsonl`.
    pub fn of(rollout: Rollout) -> Self {
        ShownSample {
            step: rollout.step,
            group: rollout.group,
            index: rollout.index,
            part: rollout.part,
            status: format!("{:?}", rollout.status).to_lowercase(),
            prompt: rollout.prompt.render(),
            response: rollout.response,
            reward: rollout.reward,
            advantage: rollout.advantage,
            length: rollout.versions.generated() as u64,
        }
    }

    /// Step, group, place in the group and part.
    pub fn key(&self) -> (u64, u64, u32, u32) {
        (self.step, self.group, self.index, self.part)
    }

    /// Group and place in it, and its part if it is not the first.
    pub fn name(&self) -> String {
        let part = if self.part > 0 { format!(".{}", self.part) } else { String::new() };
        format!("{}/{}{part}", self.group, self.index)
    }
}

/// Contents of the screen.
#[derive(Clone, Debug, Default)]
pub struct RunView {
    pub name: String,
    pub pipeline: String,
    /// State, as in the run's record.
    pub state: String,
    pub step: u64,
    /// Step of the newest event; 0 without a running flow.
    pub live_step: u64,
    /// Steps that the recipe plans.
    pub planned: Option<u64>,
    /// Seconds that processes worked on it.
    pub seconds: f64,
    /// Bottleneck, and the setting that moves it.
    pub bottleneck: String,
    pub stages: Vec<StageShares>,
    /// Edges of the running flow; empty without a page.
    pub edges: Vec<EdgeActivity>,
    /// Newest weight version by role.
    pub versions: BTreeMap<String, f64>,
    /// Token ledger.
    pub tokens: BTreeMap<String, f64>,
    /// Prompt ledger.
    pub prompts: BTreeMap<String, f64>,
    pub engines: Vec<EngineActivity>,
    /// Trained samples by how many versions their oldest token lagged.
    pub staleness: Vec<(u64, u64)>,
    /// Metrics by key.
    pub curves: BTreeMap<String, Curve>,
    /// Generated and trained tokens per second ([`RATES`]).
    pub rates: [Curve; 2],
    /// Facts about the run: a name and a value each.
    pub facts: Vec<(String, String)>,
    /// Samples, the oldest first.
    pub samples: VecDeque<ShownSample>,
    pub connection: Connection,
    /// True during a pause; absent if the page gives no orders.
    pub paused: Option<bool>,
    /// A line that says how to see more.
    pub note: String,
    /// Generated tokens of the last seconds, by which their live rate is computed.
    pub totals: Totals,
    /// Trained tokens after each of the last steps: they grow by whole steps.
    pub trained: Totals,
    /// Trained tokens of the newest event.
    pub trained_tokens: Option<f64>,
    /// If true, `rates` come from `timings.jsonl`, and only the newest value of the first from the page.
    pub has_timings: bool,
}

impl RunView {
    /// Takes a row of metrics into the curves.
    pub fn add_metrics(&mut self, step: u64, row: impl IntoIterator<Item = (String, f64)>) {
        for (key, value) in row {
            self.curves.entry(key).or_default().push(step as f64, value);
        }
    }

    /// Takes a sample. It replaces the one with the same key, because a resume has repeated its step.
    pub fn add_sample(&mut self, sample: ShownSample) {
        let sample = ShownSample {
            status: line(&sample.status),
            prompt: lines(&sample.prompt),
            response: lines(&sample.response),
            ..sample
        };
        match self.samples.iter_mut().find(|known| known.key() == sample.key()) {
            Some(known) => *known = sample,
            None => self.samples.push_back(sample),
        }
        self.samples.drain(..self.samples.len().saturating_sub(SAMPLES));
    }

    /// Takes the facts, which name their subject first.
    pub fn set_facts(&mut self, facts: impl IntoIterator<Item = (String, String)>) {
        self.facts = facts.into_iter().take(PARTS).map(|(name, value)| (line(&name), line(&value))).collect();
    }

    /// Takes the shares of stages.
    pub fn set_stages(&mut self, stages: impl IntoIterator<Item = StageShares>) {
        self.stages = stages.into_iter().take(PARTS).map(|stage| StageShares { name: line(&stage.name), ..stage }).collect();
    }

    /// Takes an event of the run's page.
    pub fn set_live(&mut self, event: LiveEvent) {
        let named = |parts: BTreeMap<String, f64>| -> BTreeMap<String, f64> {
            parts.into_iter().take(PARTS).map(|(name, value)| (line(&name), value)).collect()
        };
        let trained = event.tokens.get("trained").copied();
        if !self.has_timings {
            self.live_step = event.step;
            self.step = self.step.max(event.step);
        }
        self.bottleneck = line(&event.flow.bottleneck);
        self.set_stages(event.flow.stages);
        let edge = |edge: EdgeActivity| EdgeActivity { from: line(&edge.from), to: line(&edge.to), ..edge };
        self.edges = event.flow.edges.into_iter().take(PARTS).map(edge).collect();
        let engine = |it: EngineActivity| EngineActivity { name: line(&it.name), state: line(&it.state), ..it };
        self.engines = event.engines.into_iter().take(PARTS).map(engine).collect();
        [self.versions, self.tokens, self.prompts] = [event.versions, event.tokens, event.prompts].map(named);
        self.staleness = event.staleness.into_iter().take(PARTS).collect();
        self.paused = event.paused;
        let ([generated, trained_tokens], seconds) = (RATES, event.flow.seconds);
        self.totals.push(seconds, event.generated_tokens.map(|total| (generated.to_owned(), total)).into_iter().collect());
        match self.totals.rate(generated) {
            Some(rate) if self.has_timings => self.rates[0].last = Some(rate),
            Some(rate) => self.rates[0].push(seconds, rate),
            None => {}
        }
        // The first event may be in the middle of a step.
        if let Some(total) = trained.filter(|_| self.trained_tokens.is_some() && self.trained_tokens != trained) {
            self.trained.push(seconds, BTreeMap::from([(trained_tokens.to_owned(), total)]));
        }
        self.trained_tokens = trained;
        if let Some(rate) = self.trained.step_rate(trained_tokens, seconds).filter(|_| !self.has_timings) {
            self.rates[1].push(seconds, rate);
        }
    }

    /// Drops what only a running flow has.
    pub fn end_live(&mut self) {
        (self.edges, self.paused, self.live_step) = (Vec::new(), None, 0);
        (self.trained, self.trained_tokens) = (Totals::default(), None);
    }

    /// Reason why an order would not reach the run, and what to do.
    pub fn without_orders(&self) -> Option<&'static str> {
        match (&self.connection, self.paused) {
            (Connection::Connected, Some(_)) => None,
            (Connection::Connected, None) => Some(
                "orders need a token: start the run with observe.page_token_env = \"NAME\" and --page, and give --token-env NAME here",
            ),
            (Connection::Files, _) => {
                Some("orders need the run's page: start the run with --page 127.0.0.1:7860 and observe.page_token_env = \"NAME\"")
            }
            _ => Some("orders need the run's page, which is not connected"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rollflow::observe::FlowActivity;

    #[test]
    fn trained_tokens_per_second_are_steady_where_a_step_takes_a_minute() {
        for has_timings in [false, true] {
            let mut view = RunView { has_timings, ..RunView::default() };
            view.rates[1].push(1.0, 12.5);
            let show = |view: &mut RunView, second: u32, trained: u32| {
                let flow = FlowActivity { seconds: second.into(), ..FlowActivity::default() };
                let tokens = BTreeMap::from([("trained".to_owned(), trained.into())]);
                view.set_live(LiveEvent { flow, tokens, ..LiveEvent::default() });
                view.rates[1].last
            };
            for second in 30..600_u32 {
                let expected = if has_timings || second < 120 { 12.5 } else { 500.0 / 60.0 };
                assert_eq!(show(&mut view, second, second / 60 * 500), Some(expected), "second {second}");
            }
            let late = if has_timings { 12.5 } else { 500.0 / 120.0 };
            assert_eq!(show(&mut view, 660, 4500), Some(late), "the running step has taken two minutes");
            view.end_live();
            assert_eq!([show(&mut view, 700, 9000), show(&mut view, 720, 9500)], [Some(late); 2], "no step of a new process yet");
        }
    }
}
