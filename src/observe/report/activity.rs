//! Activity of a running flow between two moments, for a page that shows it live.

use serde::{Deserialize, Serialize};

use super::StageShares;
use crate::flow::{Capacity, EdgeReport, Report, StageReport, State, Times};

/// Activity of a flow between two reports.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FlowActivity {
    /// Seconds from the flow's begin to the later report.
    pub seconds: f64,
    /// Bottleneck of the flow so far, and the setting that moves it.
    pub bottleneck: String,
    /// Shares of each stage's time between the reports; a stage that has ended has its last shares.
    pub stages: Vec<StageShares>,
    /// Edges, in the order of the graph.
    pub edges: Vec<EdgeActivity>,
}

/// Contents and throughput of one edge.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EdgeActivity {
    /// Producer.
    pub from: String,
    /// Consumer.
    pub to: String,
    /// Items that wait on the edge at the later report.
    pub items: u64,
    /// Tokens of these items.
    pub tokens: u64,
    /// Most items and tokens that the edge holds.
    pub capacity: Capacity,
    /// Items that entered per second between the reports.
    pub items_per_second: f64,
    /// Tokens that entered per second between the reports.
    pub tokens_per_second: f64,
}

impl FlowActivity {
    /// Activity from `before` to `now`, two reports of one flow; from its begin if there is no earlier
    /// one.
    pub fn between(before: Option<&Report>, now: &Report) -> Self {
        let seconds = (now.wall - before.map_or(0, |before| before.wall.min(now.wall))) as f64 / 1e9;
        let stages = now.stages.iter().enumerate().map(|(at, stage)| shares(before.and_then(|it| it.stages.get(at)), stage));
        let edges = now.edges.iter().enumerate().map(|(at, edge)| {
            let rate = |of: fn(&EdgeReport) -> u64| {
                let earlier = before.and_then(|it| it.edges.get(at)).map_or(0, of);
                if seconds > 0.0 { of(edge).saturating_sub(earlier) as f64 / seconds } else { 0.0 }
            };
            EdgeActivity {
                from: edge.from.clone(),
                to: edge.to.clone(),
                items: edge.depth_items,
                tokens: edge.depth_tokens,
                capacity: edge.capacity,
                items_per_second: rate(|edge| edge.sent),
                tokens_per_second: rate(|edge| edge.tokens_sent),
            }
        });
        FlowActivity {
            seconds: now.wall as f64 / 1e9,
            bottleneck: now.bottleneck(),
            stages: stages.collect(),
            edges: edges.collect(),
        }
    }
}

fn shares(before: Option<&StageReport>, now: &StageReport) -> StageShares {
    let whole = StageShares::of(now);
    let (earlier, time) = (before.map_or_else(Times::default, StageReport::time), now.time());
    let passed = |state| time.of(state).saturating_sub(earlier.of(state)) as f64;
    let sum: f64 = State::ALL.into_iter().map(passed).sum();
    if sum == 0.0 {
        return whole;
    }
    let shares = State::ALL.into_iter().map(|state| (state.name().to_owned(), passed(state) / sum)).collect();
    StageShares { shares, ..whole }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Ended;

    fn at(second: u64, busy: u64, tokens_sent: u64) -> Report {
        let mut time = Times::default();
        time.wall = second * 1_000_000_000;
        time.add(State::Busy, busy * 1_000_000_000);
        time.add(State::Starved, (second - busy) * 1_000_000_000);
        let (name, advice, workers) = ("train".to_owned(), String::new(), vec![time]);
        let stage = StageReport { name, advice, workers, items_in: 0, items_out: 0, tokens_in: 0, tokens_out: 0 };
        let edge = EdgeReport {
            from: "batch".into(),
            to: "train".into(),
            capacity: Capacity::items(4),
            sent: tokens_sent / 10,
            tokens_sent,
            received: 0,
            depth_items: 2,
            depth_tokens: 20,
            credit_out: 0,
        };
        let (flow, stages, edges) = ("test".to_owned(), vec![stage], vec![edge]);
        Report { ended: Ended::Running, wall: second * 1_000_000_000, flow, stages, edges, warnings: Vec::new() }
    }

    #[test]
    fn shares_and_rates_are_those_of_the_time_between_the_reports() {
        let (early, late) = (at(8, 0, 100), at(10, 1, 300));
        let now = FlowActivity::between(Some(&early), &late);
        assert_eq!((now.stages[0].shares["busy"], now.stages[0].shares["starved"]), (0.5, 0.5));
        assert_eq!((now.edges[0].tokens_per_second, now.edges[0].items_per_second), (100.0, 10.0));
        let begun = FlowActivity::between(None, &late);
        assert_eq!((begun.stages[0].shares["busy"], begun.edges[0].tokens_per_second), (0.1, 30.0));
        let still = FlowActivity::between(Some(&late), &late);
        assert_eq!((still.stages[0].shares["busy"], still.edges[0].tokens_per_second), (0.1, 0.0));
    }
}
