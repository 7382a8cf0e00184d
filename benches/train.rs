//! One training step on one thread, and where it goes: 64 sequences of 19 tokens, of which 16 are trained, through a model of
//! hidden size 128 and 4 layers.
//!
//! `cargo bench --bench train`
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use rollflow::algo::{Aggregation, Grpo, Schedule};
use rollflow::data::{Prompt, Sample};
use rollflow::model::{Decoder, ModelConfig, Packed, Weights};
use rollflow::train::{AdamW, LocalBackend, LocalConfig, TrainBatch, TrainingBackend, collate, norm};
use serde_json::json;
use tch::Kind;

fn model() -> ModelConfig {
    let config = json!({
        "model_type": "qwen2", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu", "initializer_range": 0.02, "eos_token_id": 1,
    });
    ModelConfig::from_json(Path::new("config.json"), config.as_object().expect("an object")).expect("a valid model")
}

fn samples() -> Vec<Sample> {
    let rollout = |n: u64| {
        let prompt = Prompt { ordinal: n / 8, ..Prompt::default() };
        let mut sample = Sample::begin(&prompt, (n % 8) as u32, &[5, (n % 10) as u32 + 2, 9]);
        (0..16).for_each(|t| sample.push(((n * 7 + t * 3) % 60) as u32 + 2, -4.1, 1));
        sample.advantage = Some((n % 8) as f64 / 4.0 - 1.0);
        sample
    };
    (0..64).map(rollout).collect()
}

fn batch() -> TrainBatch {
    collate(&samples(), Aggregation::TokenMean).expect("valid samples")
}

fn backend() -> LocalBackend {
    let config = LocalConfig { threads: Some(1), ..LocalConfig::new(Grpo::default(), Schedule::constant(1e-5)) };
    LocalBackend::new(config, model(), Weights::random(&model(), 0)).expect("a thread")
}

fn step(c: &mut Criterion) {
    tch::set_num_threads(1);
    let (backend, batch) = (backend(), Arc::new(batch()));
    c.bench_function("step", |b| {
        b.iter(|| {
            backend.forward_backward(batch.clone());
            backend.optim_step().wait().expect("a step")
        });
    });
}

fn parts(c: &mut Criterion) {
    tch::set_num_threads(1);
    let model = model();
    let weights = Weights::random(&model, 0);
    let decoder = Decoder::new(&model, weights.layout.clone());
    let samples = samples();
    let packed = Packed::new(samples.iter().map(|sample| &sample.tokens[..]));
    let flat = weights.flat.copy().set_requires_grad(true);
    c.bench_function("collate", |b| b.iter(batch));
    c.bench_function("forward", |b| b.iter(|| decoder.hidden(&decoder.views(&flat), &packed)));
    c.bench_function("forward and backward", |b| {
        b.iter(|| {
            let sum = decoder.hidden(&decoder.views(&flat), &packed).sum(Kind::Float);
            tch::Tensor::run_backward(&[sum], &[&flat], false, false)
        });
    });
    c.bench_function("publish", |b| b.iter(|| weights.freeze()));

    let n = weights.layout.total();
    let (mut params, grad, mut mean, mut square) = (vec![0.1f32; n], vec![0.01f32; n], vec![0f32; n], vec![0f32; n]);
    c.bench_function("gradient norm", |b| b.iter(|| norm(black_box(&grad))));
    c.bench_function("adamw", |b| {
        b.iter(|| {
            let moments = [&mut mean[..], &mut square, &mut []];
            AdamW::default().update(10, 1e-5, 1.0, &mut params, black_box(&grad), moments);
        });
    });
}

criterion_group!(benches, step, parts);
criterion_main!(benches);
