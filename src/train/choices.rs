//! Choices of the local trainer that recipes name, also where it is not built.

use crate::settings::declare::choices;

choices! {
    /// Tensors that weight decay shrinks.
    pub enum DecayScope {
        /// matrices alone, embeddings and adapters included; norms and biases keep their size. transformers' and TRL's trainers do the same.
        "matrices" => Matrices,
        /// every tensor, as `torch.optim.AdamW` does with `model.parameters()`.
        "all" => All,
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
