//! `[lora]`: training of adapters in the place of the weights.

use crate::settings::declare::{choices, section};
use crate::settings::setting::{Limit, POSITIVE};

const RANK: Limit<usize> = Limit { text: "1 to 65536", holds: |rank| (1..=65536).contains(rank) };
const TARGETS: Limit<Vec<Target>> = Limit { text: "at least one", holds: |targets| !targets.is_empty() };

section! {
    /// Low-rank adapters: `W + alpha / rank · B·A`, of which A and B alone are trained. Gradient, optimizer and checkpoints shrink to their size.
    /// The run's seed draws A; B is 0 at first. A reward model's head is trained beside
    /// them as a whole.
    pub struct Lora {
        /// Rows of A and columns of B.
        rank: usize = 16, RANK;
        /// Their product counts `alpha / rank` times.
        alpha: f64 = 32.0, POSITIVE;
        /// What gets adapters.
        targets: Vec<Target> = vec![Target::AllLinear], TARGETS;
        /// How they reach the generator.
        sync: AdapterSync = AdapterSync::default();
    }
}

choices! {
    /// A projection, by the name that transformers and PEFT give it.
    pub enum Target {
        /// all of them.
        "all-linear" => AllLinear,
        /// queries.
        "q_proj" => Q,
        /// keys.
        "k_proj" => K,
        /// values.
        "v_proj" => V,
        /// attention's output.
        "o_proj" => O,
        /// the feed-forward layer's gate.
        "gate_proj" => Gate,
        /// what it gates.
        "up_proj" => Up,
        /// its output.
        "down_proj" => Down,
        /// queries, keys and values, in models that hold them as one: `phi3`.
        "qkv_proj" => Qkv,
        /// gate and what it gates, in the same models.
        "gate_up_proj" => GateUp,
    }
}

choices! {
    /// How adapters reach the generator.
    pub enum AdapterSync {
        /// in a copy of the weights that they are merged into: generates as fast as without adapters, and takes that copy's memory.
        "merged" => Merged,
        /// by themselves, over the weights that the trainer has: a publish copies adapters only, and every token is computed with two more thin
        /// products for each group of projections. Servers are given adapters beside those that they have, and requests name theirs.
        "adapter" => Adapter,
    }
}
