//! A shape for models that start from nothing.

use super::{Dtype, Factors, Family, Head, ModelConfig, RopeScaling};
use crate::data::Tokenizer;

impl ModelConfig {
    /// A small Llama for `tokenizer`, for experiments: tied, four query heads, two key heads,
    /// feed-forward layers of three times the width. `hidden` must be a multiple of 8.
    pub fn small(tokenizer: &Tokenizer, hidden: usize, layers: usize) -> Self {
        ModelConfig {
            eos_token_ids: tokenizer.eos_token_ids().to_vec(),
            pad_token_id: tokenizer.pad_token_id(),
            ..ModelConfig::small_of(tokenizer.vocab_size(), hidden, layers)
        }
    }

    /// A small Llama with `vocab_size` tokens and no end token.
    pub(crate) fn small_of(vocab_size: usize, hidden: usize, layers: usize) -> Self {
        ModelConfig {
            family: Family::Llama,
            head: Head::LanguageModel,
            vocab_size,
            hidden_size: hidden,
            intermediate_size: 3 * hidden,
            heads: 4,
            kv_heads: 2,
            head_dim: hidden / 4,
            max_positions: 2048,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            windows: vec![None; layers],
            unrotated: Vec::new(),
            factors: Factors::ONE,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            tied: true,
            initializer_range: 0.02,
            dtype: Dtype::F32,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
            other: Default::default(),
        }
    }
}
