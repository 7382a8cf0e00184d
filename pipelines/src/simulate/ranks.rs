//! Times of a trainer of several ranks: computation is divided among them, and they exchange
//! gradients, parameters, or both, as `ranks.shard` says.
//!
//! Exchanges are rings. To gather numbers of which each rank has a part, or to sum numbers of which
//! each keeps a part, a rank sends (n - 1) / n of them; to sum what all keep, twice as many. Sums and
//! masters are f32, parameters that are gathered for a pass have the format of `model.dtype`.
//!
//! On CPUs an exchange takes time of the cores that compute, in addition to that of the links.

use rollflow::ranks::Shard;
use rollflow::recipe::Plan;

use super::cluster::{Cluster, sharing};
use crate::profile::ItemTimes;

/// Bytes of a gradient's or a master's number.
const F32: f64 = 4.0;

/// Numbers of a piece that ranks exchange when each keeps a part of the moments.
const PIECE: f64 = (1 << 22) as f64;

/// Core-seconds of a rank on a CPU for each byte that it sends, which another receives: copies, sums and
/// TCP over loopback. `scripts/exchange_cost.py` measures it: 0.89 to 1.05 ns of 2 ranks.
const BYTE_COST: f64 = 1e-9;

/// Core-seconds of a rank on a CPU for each exchange of a piece: ranks wait for the last one, and threads
/// for their turns. Fitted to the runs with `"parameters"` of `scripts/scaling.py` on two idle cores.
const MEETING_COST: f64 = 2e-3;

/// A trainer of several ranks.
pub struct Trainer {
    /// Times of a trainer of one.
    one: ItemTimes,
    cluster: Cluster,
    shard: Shard,
    /// Bytes of a number that passes compute with.
    computed: f64,
    micro_batch_tokens: f64,
    /// Factor by which layers that are computed again in the backward pass lengthen a pass.
    again: f64,
}

/// Seconds of an update or of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seconds {
    /// All of it.
    pub all: f64,
    /// The part in which ranks only wait for an exchange.
    pub exchange: f64,
}

impl Trainer {
    /// The trainer of `plan` on `cluster`; `one` are the times of a single rank.
    pub fn new(one: ItemTimes, cluster: &Cluster, plan: &Plan) -> Self {
        let (optimization, shard) = (&plan.train.optimization, plan.ranks.shard);
        // Forward and backward pass are three forward passes of work; a fourth computes layers again.
        let again = if shard == Shard::Parameters && !optimization.gradient_checkpointing { 4.0 / 3.0 } else { 1.0 };
        let computed = plan.model.precision().bytes() as f64;
        Trainer {
            one,
            cluster: cluster.clone(),
            shard,
            computed,
            micro_batch_tokens: optimization.micro_batch_tokens.max(1) as f64,
            again,
        }
    }

    /// Seconds of an optimizer step, with the sum of the gradients where it is made once.
    pub fn update(&self) -> Seconds {
        let compute = self.one.item * sharing(self.cluster.ranks, self.cluster.rank_devices);
        let parts = self.cluster.ranks as f64;
        match self.shard {
            _ if self.alone() => Seconds { all: self.one.item, exchange: 0.0 },
            Shard::Nothing => {
                let exchange = 2.0 * self.exchange(F32, 1.0).all();
                Seconds { all: compute + exchange, exchange }
            }
            Shard::Optimizer | Shard::Gradients => {
                let exchanges = if self.shard == Shard::Optimizer { 2.0 } else { 1.0 };
                let exchange = exchanges * self.exchange(F32, self.pieces()).all();
                Seconds { all: compute / parts + exchange, exchange }
            }
            Shard::Parameters => Seconds { all: compute / parts, exchange: 0.0 },
        }
    }

    /// Seconds of forward and backward passes over so many tokens, with what ranks exchange in each.
    pub fn pass(&self, tokens: usize) -> Seconds {
        let (ranks, tokens) = (self.cluster.ranks as f64, tokens as f64);
        let compute = self.one.token * tokens * sharing(self.cluster.ranks, self.cluster.rank_devices) / ranks;
        // Every rank passes equally often.
        let passes = (tokens / self.micro_batch_tokens / ranks).ceil();
        match self.shard {
            _ if self.alone() => Seconds { all: self.one.token * tokens, exchange: 0.0 },
            Shard::Nothing | Shard::Optimizer => Seconds { all: compute, exchange: 0.0 },
            Shard::Gradients => {
                let exchange = passes * self.exchange(F32, self.pieces()).all();
                Seconds { all: compute + exchange, exchange }
            }
            Shard::Parameters => {
                // Links gather the next layer while one computes; cores do not.
                let units = self.cluster.layers as f64 + 2.0;
                let Exchange { links, cores } = self.exchange(self.computed, units);
                let (gathers, others) = (passes * 2.0 * links, passes * (2.0 * cores + self.exchange(F32, units).all()));
                let compute = compute * self.again;
                Seconds { all: compute.max(gathers) + others, exchange: (gathers - compute).max(0.0) + others }
            }
        }
    }

    fn alone(&self) -> bool {
        self.cluster.ranks == 1
    }

    fn pieces(&self) -> f64 {
        (self.cluster.parameters / PIECE).ceil().max(1.0)
    }

    /// Exchange in which each rank sends (n - 1) / n of the numbers, `bytes` each, in so many pieces.
    fn exchange(&self, bytes: f64, pieces: f64) -> Exchange {
        let others = self.cluster.ranks as f64 - 1.0;
        let sent = self.cluster.parameters * bytes * others / self.cluster.ranks as f64;
        let of_rank = if self.cluster.cpus { sent * BYTE_COST + pieces * MEETING_COST } else { 0.0 };
        Exchange {
            links: sent / self.cluster.ring() + self.cluster.latency * others * pieces,
            cores: of_rank * sharing(self.cluster.ranks, self.cluster.rank_devices),
        }
    }
}

/// Seconds of an exchange.
struct Exchange {
    /// Time of the links.
    links: f64,
    /// Time of the cores that ranks compute on.
    cores: f64,
}

impl Exchange {
    fn all(&self) -> f64 {
        self.links + self.cores
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: ItemTimes = ItemTimes { item: 3.0, token: 1e-3 };

    fn trainer(cluster: &Cluster, sets: &[&str]) -> Trainer {
        let text = "pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\n";
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let plan = rollflow::recipe::parse("ranks.toml", text, &sets).unwrap_or_else(|error| panic!("{error}"));
        Trainer::new(ONE, cluster, &plan)
    }

    fn near(found: Seconds, all: f64, exchange: f64) {
        assert!((found.all - all).abs() < 1e-9 && (found.exchange - exchange).abs() < 1e-9, "{found:?}: {all}, {exchange}");
    }

    #[test]
    fn ranks_divide_the_passes_and_exchange_what_their_division_needs() {
        // A sum sends 2 × 3/4 × 400 MB at 1 GB/s: 0.6 s.
        let four = Cluster { ranks: 4, parameters: 1e8, link: Some(1e9), ..Cluster::default() };
        let shard = |shard: &str| trainer(&four, &[&format!("ranks.shard=\"{shard}\""), "train.micro_batch_tokens=500"]);
        near(trainer(&Cluster::default(), &[]).pass(4000), 4.0, 0.0);
        near(trainer(&Cluster::default(), &[]).update(), 3.0, 0.0);
        near(shard("nothing").pass(4000), 1.0, 0.0);
        near(shard("nothing").update(), 3.0 + 0.6, 0.6);
        near(shard("optimizer").pass(4000), 1.0, 0.0);
        near(shard("optimizer").update(), 0.75 + 0.6, 0.6);
        // Two micro-batches each.
        near(shard("gradients").pass(4000), 1.0 + 0.6, 0.6);
        near(shard("gradients").update(), 0.75 + 0.3, 0.3);
        // Gathers of 1.2 s hide 4/3 s of computation, sums do not.
        near(shard("parameters").pass(4000), 4.0 / 3.0 + 0.6, 0.6);
        near(shard("parameters").update(), 0.75, 0.0);
        let slow = Cluster { link: Some(5e8), ..four.clone() };
        let slow = trainer(&slow, &["ranks.shard=\"parameters\"", "train.micro_batch_tokens=500"]);
        near(slow.pass(4000), 2.4 + 1.2, 2.4 - 4.0 / 3.0 + 1.2);
    }

    /// 2 ranks send 200 MB each in a gather: 0.2 s of their cores, and 2 ms for each of 4 pieces.
    #[test]
    fn exchanges_on_cpus_take_time_of_the_cores_that_compute() {
        let two = Cluster { ranks: 2, parameters: 1e8, layers: 2, cpus: true, ..Cluster::default() };
        let sets = ["ranks.shard=\"parameters\"", "train.micro_batch_tokens=500"];
        // Four micro-batches each: two gathers and a sum.
        let exchange = 4.0 * 3.0 * (0.2 + 4.0 * 0.002);
        near(trainer(&two, &sets).pass(4000), 2.0 * 4.0 / 3.0 + exchange, exchange);
        near(trainer(&two, &[]).update(), 3.0 + 0.404, 0.404);
        // One core for both.
        let shared = Cluster { rank_devices: Some(1), ..two.clone() };
        near(trainer(&shared, &sets).pass(4000), 2.0 * (2.0 * 4.0 / 3.0 + exchange), 2.0 * exchange);
        let gpus = Cluster { cpus: false, ..two };
        near(trainer(&gpus, &sets).pass(4000), 2.0 * 4.0 / 3.0, 0.0);
    }

    #[test]
    fn ranks_of_a_host_use_its_own_link_and_share_its_devices() {
        let host = Cluster {
            ranks: 4,
            ranks_per_host: 4,
            parameters: 1e8,
            link: Some(1e9),
            local_link: Some(1e10),
            ..Cluster::default()
        };
        near(trainer(&host, &[]).update(), 3.0 + 0.06, 0.06);
        near(trainer(&Cluster { ranks_per_host: 2, ..host.clone() }, &[]).update(), 3.0 + 0.6, 0.6);
        near(trainer(&Cluster { rank_devices: Some(2), ..host.clone() }, &[]).pass(4000), 2.0, 0.0);
        near(trainer(&Cluster { rank_devices: Some(2), ..host.clone() }, &[]).update(), 6.0 + 0.06, 0.06);
        // Three messages to reach the others, twice.
        near(trainer(&Cluster { latency: 0.01, ..host }, &[]).update(), 3.0 + 0.12, 0.12);
    }
}
