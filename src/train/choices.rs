//! Settings of the local trainer that recipes name, also without the feature `torch`.

use serde::{Deserialize, Serialize};

use crate::settings::declare::{choices, section};
use crate::settings::setting::NOT_NEGATIVE;

choices! {
    /// Tensors that weight decay shrinks.
    pub enum DecayScope {
        /// all but norms and biases, embeddings and adapters included. transformers' and TRL's trainers do the
        /// same.
        "matrices" => Matrices,
        /// every tensor, as `torch.optim.AdamW` does with `model.parameters()`.
        "all" => All,
    }
}

choices! {
    /// Format of AdamW's moments. Checkpoints have them in f32.
    pub enum MomentFormat {
        /// f32, on the trainer's device: 8 bytes a parameter.
        "f32" => F32,
        /// 8 bits with a scale for 256 numbers (Dettmers et al., 2021): 2 bytes a parameter.
        "8-bit" => EightBit,
        /// f32 in the host's memory, from where a GPU fetches them in pieces at each update.
        "host" => Host,
    }
}

choices! {
    /// Format of the parameters that AdamW updates.
    pub enum MasterFormat {
        /// f32, and a copy to compute with where `model.dtype` is another.
        "f32" => F32,
        /// bf16, which is computed with, too: 4 bytes a parameter less. An update is rounded up or down at random, so
        /// that its mean is exact (Zamirai et al., 2020).
        "bf16" => Bf16,
    }
}

choices! {
    /// Policy for a step whose loss or gradient is not finite (law N4).
    pub enum NonFinitePolicy {
        /// the run ends and names the sample or tensor.
        "stop" => Stop,
        /// the step is skipped and counted.
        "skip" => Skip,
    }
}

choices! {
    /// Use of the experts that computed a sample's tokens in the generator, for a mixture of experts: Ma et al.,
    /// 2025, "rollout routing replay".
    pub enum RouterReplay {
        /// the trainer's routers choose, and nothing is compared.
        "off" => Off,
        /// the trainer's routers choose, and `rollflow_router_mismatch_ratio` is the share of the generator's experts
        /// that they do not choose.
        "measure" => Measure,
        /// the generator's experts compute each token, weighed by the trainer's routers.
        /// `rollflow_router_mismatch_ratio` is the share that these would not have chosen.
        "follow" => Follow,
    }
}

section! {
    /// Factors of the learning rate for parts of the model; a part with factor 0 is not trained. A
    /// factor for a part that the model does not have is an error.
    #[derive(Copy, Serialize, Deserialize)]
    pub struct LrScale {
        /// Token embeddings, and the output head if it is tied to them.
        embeddings: f64 = 1.0, NOT_NEGATIVE;
        /// Output head that is not tied.
        head: f64 = 1.0, NOT_NEGATIVE;
        /// Adapters (`[lora]`).
        adapters: f64 = 1.0, NOT_NEGATIVE;
        /// Score head: reward models and critics.
        score_head: f64 = 1.0, NOT_NEGATIVE;
    }
}
