//! Several engines in a simulation. They share all sequences evenly and work in step. An engine that
//! fails leaves its sequences to the others, which read their tokens again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use rollflow::engine::Load;
use rollflow::engine::sampling::uniform;

use super::cluster::{Cluster, Outage, sharing};
use crate::profile::DecodeTimes;

/// Separates the draws of failures from those of completions.
const FAILURES: u64 = 0xFA11;

/// Engines of a cluster while time passes.
pub struct Engines {
    times: DecodeTimes,
    /// Mean tokens of a sequence in flight.
    context: f64,
    cluster: Cluster,
    seed: u64,
    draws: u64,
    /// Number of engines that work.
    alive: usize,
    /// Moments when absent engines return.
    returns: BinaryHeap<Reverse<Duration>>,
    next_failure: Option<Duration>,
    /// Outages to come, the last first.
    outages: Vec<Outage>,
}

impl Engines {
    /// All engines of `cluster` at second 0. One alone takes `times`; a sequence in flight has
    /// `context` tokens on average.
    pub fn new(cluster: &Cluster, times: DecodeTimes, context: f64, seed: u64) -> Self {
        let mut outages = cluster.outages.clone();
        outages.sort_by(|a, b| b.at.total_cmp(&a.at));
        let (cluster, alive) = (cluster.clone(), cluster.engines);
        let returns = BinaryHeap::new();
        let mut engines = Engines { times, context, cluster, seed, draws: 0, alive, returns, next_failure: None, outages };
        engines.draw_failure(Duration::ZERO);
        engines
    }

    /// Duration of a step that begins now, with the load of all engines together.
    pub fn step(&mut self, now: Duration, load: Load) -> Duration {
        let (before, lost) = (self.alive, self.pass_to(now));
        let share = 1.0 / self.alive.max(1) as f64;
        // Tokens of the sequences that were on lost engines.
        let again = lost as f64 / before.max(1) as f64 * load.rows as f64 * self.context;
        let work = self.times.step(load, share) + self.times.prefill * again * share;
        let work = work * sharing(self.alive.max(1), self.cluster.engine_devices);
        // Without engines, the work waits for the first that returns.
        let first = self.returns.peek().filter(|_| self.alive == 0).map_or(now, |Reverse(at)| *at);
        seconds(work) + first.saturating_sub(now)
    }

    /// Applies everything that happens until `now`. Returns the number of engines that failed.
    fn pass_to(&mut self, now: Duration) -> usize {
        let mut lost = 0;
        loop {
            let back = self.returns.peek().map(|Reverse(at)| *at);
            let outage = self.outages.last().map(|outage| seconds(outage.at));
            let Some(at) = [back, outage, self.next_failure].into_iter().flatten().min().filter(|at| *at <= now) else {
                return lost;
            };
            if back == Some(at) {
                self.returns.pop();
                self.alive += 1;
            } else if let Some(outage) = self.outages.pop_if(|_| outage == Some(at)) {
                lost += self.lose(outage.engines, at + seconds(outage.seconds));
            } else {
                lost += self.lose(1, at + seconds(self.cluster.absence));
            }
            self.draw_failure(at);
        }
    }

    fn lose(&mut self, engines: usize, until: Duration) -> usize {
        let lost = engines.min(self.alive);
        self.alive -= lost;
        self.returns.extend((0..lost).map(|_| Reverse(until)));
        lost
    }

    /// Draws the next failure after `now`. All engines that work are equally likely to fail, at any
    /// time, so a draw is as good after other events as before.
    fn draw_failure(&mut self, now: Duration) {
        let per_second = self.cluster.failures / 3600.0 * self.alive as f64;
        self.draws += 1;
        let drawn = 1.0 - uniform(self.seed ^ FAILURES, self.draws, 0, 0);
        self.next_failure = (per_second > 0.0).then(|| now + seconds(-drawn.ln() / per_second));
    }
}

/// A century at most, so that sums do not overflow.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.min(3.2e9)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: DecodeTimes = DecodeTimes { pass: 1e-3, row: 1e-4, prefill: 1e-5 };

    fn load(rows: usize) -> Load {
        Load { passes: 1, rows, ..Load::default() }
    }

    fn outage(at: f64, engines: usize, seconds: f64) -> Cluster {
        Cluster { engines: 2 * engines, outages: vec![Outage { at, engines, seconds }], ..Cluster::default() }
    }

    #[test]
    fn engines_divide_the_rows_and_share_devices() {
        let step = |cluster: &Cluster| Engines::new(cluster, TIMES, 10.0, 1).step(Duration::ZERO, load(64)).as_secs_f64();
        let one = step(&Cluster::default());
        let four = step(&Cluster { engines: 4, ..Cluster::default() });
        let shared = step(&Cluster { engines: 4, engine_devices: Some(2), ..Cluster::default() });
        assert!((one - 7.4e-3).abs() < 1e-9 && (four - 2.6e-3).abs() < 1e-9 && (shared - 5.2e-3).abs() < 1e-9);
    }

    #[test]
    fn engines_are_away_as_long_and_as_often_as_given() {
        let cluster = Cluster { engines: 100, failures: 6.0, absence: 60.0, ..Cluster::default() };
        let mut engines = Engines::new(&cluster, TIMES, 10.0, 7);
        let mut away = 0;
        for second in 0..36_000 {
            engines.pass_to(Duration::from_secs(second));
            away += 100 - engines.alive;
        }
        // 6 an hour for a minute each: a share of 0.1 / 1.1 of the time.
        let share = away as f64 / 36_000.0 / 100.0;
        assert!((share - 0.1 / 1.1).abs() < 0.01, "{share}");
    }

    #[test]
    fn a_lost_rack_s_sequences_are_read_again_by_the_rest_until_it_returns() {
        let mut engines = Engines::new(&outage(10.0, 4, 5.0), TIMES, 100.0, 7);
        let mut at = |second: u64| engines.step(Duration::from_secs(second), load(64)).as_secs_f64();
        let (before, lost, without, after) = (at(9), at(10), at(12), at(15));
        assert!((before - 1.8e-3).abs() < 1e-9 && (without - 2.6e-3).abs() < 1e-9 && before == after);
        // 32 sequences of 100 tokens, by four engines.
        assert!((lost - without - 32.0 * 100.0 * 1e-5 / 4.0).abs() < 1e-9, "{lost}");
    }

    #[test]
    fn without_engines_the_work_waits_for_the_first_that_returns() {
        let mut all = outage(1.0, 1, 30.0);
        all.engines = 1;
        let waited = Engines::new(&all, TIMES, 0.0, 7).step(Duration::from_secs(2), load(0));
        assert!((waited.as_secs_f64() - 29.001).abs() < 1e-6, "{waited:?}");
    }
}
