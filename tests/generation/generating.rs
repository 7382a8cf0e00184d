//! A small model in an engine, and what is asked of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use rollflow::data::Tokenizer;
use rollflow::engine::{Finished, LocalEngine, Request, SamplingParams};
use rollflow::model::{Decoder, Family, GatedDelta, Layout, ModelConfig, Packed, Weights, log_probs_and_entropy};
use tch::Tensor;

pub fn config(family: Family, window: Option<usize>) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size: 64,
        intermediate_size: 48,
        max_positions: 128,
        windows: vec![None, window],
        qkv_bias: family == Family::Qwen2,
        initializer_range: 0.3,
        eos_token_ids: vec![1],
        pad_token_id: Some(0),
        ..ModelConfig::small(&tokenizer(), 32, 2)
    }
}

pub fn families() -> [ModelConfig; 4] {
    [config(Family::Qwen2, None), config(Family::Qwen3, None), config(Family::Mistral, Some(5)), nets()]
}

/// A model whose first layer has a state instead of keys and values.
pub fn nets() -> ModelConfig {
    let delta = GatedDelta { layers: vec![0], key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, kernel: 4 };
    // A state takes rounding along, the more so the larger weights are.
    ModelConfig { delta: Some(delta), initializer_range: 0.1, ..config(Family::Qwen35, None) }
}

pub fn decoder(config: &ModelConfig) -> Decoder {
    // Tests run side by side, and teams of threads on the same cores spin against each other.
    tch::set_num_threads(1);
    Decoder::new(config, Arc::new(Layout::new(config)))
}

pub fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::characters("0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n", 64).unwrap())
}

pub fn engine(config: &ModelConfig, slots: usize) -> LocalEngine {
    let mut engine = LocalEngine::new(decoder(config), tokenizer(), slots, 11);
    engine.set_weights(1, &Weights::random(config, 5));
    engine
}

pub fn params(max_new_tokens: usize) -> SamplingParams {
    SamplingParams { max_new_tokens, ..Default::default() }
}

/// Penalties that change most samples.
pub fn penalised(params: SamplingParams) -> SamplingParams {
    let logit_bias = [(9, 3.0), (10, -3.0)].into();
    SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.4, frequency_penalty: 0.2, logit_bias, ..params }
}

/// Prompt `ordinal`, of a length and of tokens of its own.
pub fn request(ordinal: u64, samples: u32, params: &SamplingParams) -> Request {
    let len = 1 + (ordinal as usize * 3) % 7;
    let tokens: Vec<u32> = (0..len).map(|at| 4 + ((ordinal as usize * 5 + at * 11) % 50) as u32).collect();
    Request::new(ordinal, tokens, samples, Arc::new(params.clone()))
}

pub type ByKey = BTreeMap<(u64, u32), Finished>;

pub fn by_key(finished: Vec<Finished>) -> ByKey {
    let count = finished.len();
    let map: ByKey = finished.into_iter().map(|finished| ((finished.ordinal, finished.index), finished)).collect();
    assert_eq!(map.len(), count, "no sample ends twice");
    map
}

pub fn assert_same(what: &str, found: &ByKey, expected: &ByKey) {
    assert!(found.keys().eq(expected.keys()), "{what}: other samples");
    for (key, expected) in expected {
        let found = &found[key];
        assert_eq!((&found.tokens, &found.finish), (&expected.tokens, &expected.finish), "{what}: sample {key:?}");
        for (found, expected) in found.log_probs.iter().zip(&expected.log_probs) {
            assert!((found - expected).abs() < 1e-4, "{what}: sample {key:?}: log-probability {found}, expected {expected}");
        }
    }
}

/// Log-probabilities of an answer's tokens by one forward pass over all of it, at a temperature.
pub fn rescored(config: &ModelConfig, weights: &Weights, prompt: &[u32], answer: &[u32], temperature: f64) -> Vec<f32> {
    let tokens = [prompt, answer].concat();
    let decoder = decoder(config);
    let views = decoder.views(&weights.flat);
    let hidden = decoder.hidden(&views, &Packed::new([&tokens[..tokens.len() - 1]]));
    let rows = hidden.narrow(0, prompt.len() as i64 - 1, answer.len() as i64);
    let targets: Vec<i64> = answer.iter().map(|&token| i64::from(token)).collect();
    let (log_probs, _) = log_probs_and_entropy(&decoder.logits(&views, &rows), &Tensor::from_slice(&targets), temperature);
    log_probs.try_into().unwrap()
}
