//! `[lora]`: training of adapters instead of all weights.

use crate::settings::declare::{choices, section};
use crate::settings::setting::{Limit, POSITIVE};

const RANK: Limit<usize> = Limit { text: "1 to 65536", holds: |rank| (1..=65536).contains(rank) };
const TARGETS: Limit<Vec<Target>> = Limit { text: "at least one", holds: |targets| !targets.is_empty() };

section! {
    /// Low-rank adapters (LoRA): `W + alpha / rank · B·A`, of which only A and B are trained.
    /// Gradient, optimizer and checkpoints shrink to their size. The run's seed draws A; B starts
    /// at 0. A reward model's score head is trained in full alongside them.
    pub struct Lora {
        /// Rank: rows of A and columns of B.
        rank: usize = 16, RANK;
        /// Numerator of the scale `alpha / rank`.
        alpha: f64 = 32.0, POSITIVE;
        /// Projections that get adapters.
        targets: Vec<Target> = vec![Target::AllLinear], TARGETS;
        /// Form in which adapters reach the generator. Left out: `"merged"`, and `"adapter"` over 4 bits.
        sync: Option<AdapterSync> = None;
        /// Format of the weights that the adapters are trained over.
        base: BaseFormat = BaseFormat::default();
    }
}

impl Lora {
    /// Returns the words of the projections that get adapters; `all-linear` stands for all.
    pub fn target_words(&self) -> Vec<&'static str> {
        self.targets.iter().map(|target| target.word()).collect()
    }

    /// Returns true if the generator gets adapters merged into a copy of the weights.
    pub fn merges(&self) -> bool {
        self.sync.map_or(self.base == BaseFormat::Stored, |sync| sync == AdapterSync::Merged)
    }
}

choices! {
    /// Format of the weights below adapters.
    pub enum BaseFormat {
        /// as the folder has them, or in f32.
        "stored" => Stored,
        /// in 4 bits (QLoRA): the matrices of the layers take half a byte a number, and a layer's numbers
        /// are computed whenever it is used. Experts that a folder has in MXFP4 stay so. Trained with gradient
        /// checkpointing.
        "nf4" => Nf4,
    }
}

choices! {
    /// A projection, by its name in transformers and PEFT.
    pub enum Target {
        /// all of them, but for experts and routers.
        "all-linear" => AllLinear,
        /// all projections of the experts of a mixture, each expert by itself: gate and up, which are one matrix,
        /// with twice the rank, as in PEFT.
        "experts" => Experts,
        /// the routers of a mixture. PEFT's `all-linear` of a mixture is `all-linear`, `experts` and `routers`; of
        /// Qwen3.5's it is `all-linear`.
        "routers" => Routers,
        /// queries.
        "q_proj" => Q,
        /// keys.
        "k_proj" => K,
        /// values.
        "v_proj" => V,
        /// the attention's output.
        "o_proj" => O,
        /// the feed-forward layer's gate.
        "gate_proj" => Gate,
        /// the feed-forward layer's up projection.
        "up_proj" => Up,
        /// the feed-forward layer's down projection.
        "down_proj" => Down,
        /// queries, keys and values, in models that store them as one: `phi3`.
        "qkv_proj" => Qkv,
        /// gate and up projection, in the same models.
        "gate_up_proj" => GateUp,
        /// a gated delta net's queries, keys and values: `qwen3_5_text`.
        "in_proj_qkv" => DeltaQkv,
        /// its gates.
        "in_proj_z" => DeltaGate,
        /// the shares that its tokens write.
        "in_proj_b" => DeltaShare,
        /// its decays.
        "in_proj_a" => DeltaDecay,
        /// its output.
        "out_proj" => DeltaOutput,
        /// the gate of a mixture's expert of every token.
        "shared_expert_gate" => SharedGate,
    }
}

choices! {
    /// Form in which adapters reach the generator.
    pub enum AdapterSync {
        /// merged into a copy of the weights: as fast as without adapters, for that copy's memory.
        "merged" => Merged,
        /// as adapters over the trainer's weights: a publish copies adapters only, and every token
        /// costs two more thin products per group of projections. Servers load each version as a
        /// new adapter, and requests name it.
        "adapter" => Adapter,
    }
}
