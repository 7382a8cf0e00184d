//! A model and data small enough for tests that train.
#![allow(dead_code)]

use std::path::Path;

use rollflow::data::Sample;
use rollflow::model::{ModelConfig, Weights};
use serde_json::json;
use tch::{Device, Kind, Tensor};

pub const VOCAB: u32 = 16;

pub fn model() -> ModelConfig {
    let config = json!({
        "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu", "initializer_range": 0.2, "eos_token_id": 1,
    });
    ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap()).unwrap()
}

/// A model whose first layer is a gated delta net.
pub fn nets() -> ModelConfig {
    let config = json!({
        "model_type": "qwen3_5_text", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu", "initializer_range": 0.2, "eos_token_id": 1,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    });
    ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap()).unwrap()
}

pub fn weights(seed: u64) -> Weights {
    Weights::random(&model(), seed)
}

/// Rollouts as a generator would hand them over, with behaviour log-probabilities near nothing in particular.
pub fn rollouts(shapes: &[(usize, usize)], seed: u64) -> Vec<Sample> {
    let mut state = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut draw = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut token = move || draw(u64::from(VOCAB)) as u32;
    let sample = |(index, &(prompt, answer)): (usize, &(usize, usize))| {
        let mut sample = Sample { group_index: index as u64 / 2, index: index as u32 % 2, ..Sample::default() };
        sample.tokens = (0..prompt + answer).map(|_| token()).collect();
        sample.loss_mask = [vec![0.0; prompt], vec![1.0; answer]].concat();
        sample.log_probs = [vec![0.0; prompt], (0..answer).map(|_| -2.0 - token() as f32 / 10.0).collect()].concat();
        sample.versions.extend(None, prompt);
        sample.versions.extend(Some(1), answer);
        sample.advantage = Some(f64::from(token()) / 8.0 - 1.0);
        sample
    };
    shapes.iter().enumerate().map(sample).collect()
}

/// Numbers between −1 and 1, the same for the same seed: the library's own generator belongs to all tests of a program, which run at the same time.
pub fn noise(like: &Tensor, seed: u64) -> Tensor {
    let at = Tensor::arange(like.numel() as i64, (Kind::Double, Device::Cpu)) * 12.9898 + (seed as f64 + 1.0) * 78.233;
    (at.sin() * 43758.5453).frac().to_kind(Kind::Float).view_as(like)
}

/// "Count on": after token n comes n + 1.
pub fn counting() -> Vec<Sample> {
    (2..12).map(|n| Sample::supervised(&[n], &[n + 1, n + 2, n + 3, 1])).collect()
}
