//! Models with an untied head, for servers that reload an embedding but not the head tied to it.

use std::sync::Arc;

use tch::Tensor;

use super::{Layout, ModelConfig, Weights};

impl ModelConfig {
    /// Unties the head.
    pub fn untied(&self) -> Self {
        ModelConfig { tied: self.tied && !self.shares_embedding(), ..self.clone() }
    }
}

impl Weights {
    /// Copies these weights of `config` and adds the embedding of `head_of` as an untied head: a
    /// model of [`ModelConfig::untied`]. Adapters are merged. A head that is not tied stays.
    pub fn untied(&self, config: &ModelConfig, head_of: &Weights) -> Self {
        let _guard = tch::no_grad_guard();
        let whole = self.merged();
        if !config.shares_embedding() {
            return whole;
        }
        let layout = Layout::new(&config.untied());
        let range = head_of.layout.embedding();
        let head = head_of.flat.detach().narrow(0, range.start as i64, range.len() as i64).to_device(whole.flat.device());
        // Heads come last, so that bodies have equal layouts.
        let flat = Tensor::cat(&[whole.flat.detach(), head.to_kind(whole.flat.kind())], 0);
        Weights::new(Arc::new(layout), flat)
    }
}
