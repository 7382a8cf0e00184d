//! The same model with an output head of its own, for servers that reload an embedding and leave the head that shares it.

use std::sync::Arc;

use tch::Tensor;

use super::{Layout, ModelConfig, Weights};

impl ModelConfig {
    /// The shape with a head of its own; the same where it has one.
    pub fn untied(&self) -> Self {
        ModelConfig { tied: self.tied && !self.shares_embedding(), ..self.clone() }
    }
}

impl Weights {
    /// These weights, of `config`, with a copy of `head_of`'s embedding as their head, which is theirs where both are the same: a model of
    /// [`ModelConfig::untied`]. Adapters are merged. Where the head is no embedding, it stays.
    pub fn untied(&self, config: &ModelConfig, head_of: &Weights) -> Self {
        let _guard = tch::no_grad_guard();
        let whole = self.merged();
        if !config.shares_embedding() {
            return whole;
        }
        let layout = Layout::new(&config.untied());
        let range = head_of.layout.embedding();
        let head = head_of.flat.detach().narrow(0, range.start as i64, range.len() as i64).to_device(whole.flat.device());
        // Heads come last, so that the bodies lie alike.
        let flat = Tensor::cat(&[whole.flat.detach(), head.to_kind(whole.flat.kind())], 0);
        Weights::new(Arc::new(layout), flat)
    }
}
