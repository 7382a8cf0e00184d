//! Base weights in 4 bits under adapters (QLoRA), against bitsandbytes, transformers and PEFT (scripts/golden_bitsandbytes.py).

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::{Sample, Tokenizer};
use rollflow::engine::{LocalEngine, Request, SamplingParams, TokenEngine};
use rollflow::model::{
    Compute, Decoder, Dtype, Lora, ModelConfig, Packed, Weights, check_folder, export_hf, load_hf, load_hf_for,
    load_hf_in_4_bits, save_hf,
};
use rollflow::train::{LocalBackend, LocalConfig, TrainingBackend, collate};
use serde::Deserialize;
use tch::{Kind, Tensor};

#[derive(Deserialize)]
struct Golden {
    rows: Vec<Vec<u32>>,
    loss: f64,
}

const FOLDERS: [&str; 2] = ["qwen2", "qwen2_plain_scales"];

fn folder(name: &str) -> std::path::PathBuf {
    Path::new("tests/golden/bitsandbytes").join(name)
}

fn golden(name: &str) -> (Golden, HashMap<String, Tensor>) {
    let text = std::fs::read_to_string(folder(name).join("golden.json")).unwrap();
    let expected = Tensor::read_safetensors(folder(name).join("expected.safetensors")).unwrap();
    (serde_json::from_str(&text).unwrap(), expected.into_iter().collect())
}

pub fn far(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

pub fn logits(config: &ModelConfig, weights: &Weights, row: &[u32]) -> Tensor {
    let decoder = Decoder::new(config, weights.layout.clone());
    let views = decoder.views_of(weights);
    let _guard = tch::no_grad_guard();
    decoder.logits(&views, &decoder.hidden(&views, &Packed::new([row])))
}

#[test]
fn a_folder_of_bitsandbytes_stays_in_4_bits_and_gives_the_logits_of_transformers() {
    for name in FOLDERS {
        let (golden, expected) = golden(name);
        check_folder(&folder(name)).unwrap();
        let (config, weights) = load_hf(&folder(name)).unwrap();
        assert!(weights.is_quantised());
        for (at, row) in golden.rows.iter().enumerate() {
            let gap = far(&logits(&config, &weights, row), &expected[&format!("logits.{at}")]);
            assert!(gap < 2e-4, "{name}, row {at}: {gap}");
        }
        // Saved, it is a whole model of the same numbers, which says nothing of 4 bits.
        let saved = tempfile::tempdir().unwrap();
        save_hf(saved.path(), &config, &weights).unwrap();
        let (config, whole) = load_hf(saved.path()).unwrap();
        assert!(!whole.is_quantised() && far(&logits(&config, &whole, &golden.rows[0]), &expected["logits.0"]) < 2e-4);
    }
}

fn backend(config: &ModelConfig, weights: &Weights, compute: Compute) -> LocalBackend {
    let config_of = LocalConfig { compute, max_grad_norm: None, ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-2)) };
    LocalBackend::new(config_of, config.clone(), weights.copy()).unwrap()
}

fn batch(rows: &[Vec<u32>]) -> Arc<rollflow::train::TrainBatch> {
    let samples: Vec<Sample> = rows.iter().map(|row| Sample::supervised(&row[..1], &row[1..])).collect();
    Arc::new(collate(&samples, Aggregation::TokenMean).unwrap())
}

#[test]
fn loss_and_gradient_of_adapters_over_4_bits_are_those_of_peft() {
    for name in FOLDERS {
        let (golden, expected) = golden(name);
        let (config, weights) = load_hf(&folder(name).join("adapters")).unwrap();
        assert!(weights.is_quantised() && weights.adapter.is_some());
        let gradients = expected.iter().filter(|(name, _)| name.starts_with("gradient."));
        let squares: f64 = gradients.map(|(_, of)| of.square().sum(Kind::Double).double_value(&[])).sum();
        let mut devices = vec![(Compute::default(), 1e-4)];
        devices.extend(Compute::cuda(0, Dtype::Bf16).check().ok().map(|()| (Compute::cuda(0, Dtype::Bf16), 0.05)));
        for (compute, tolerance) in devices {
            let trainer = backend(&config, &weights, compute);
            let loss = trainer.forward_backward(batch(&golden.rows)).wait().unwrap().loss;
            assert!((loss - golden.loss).abs() < tolerance * golden.loss, "{name}: loss {loss}, expected {}", golden.loss);
            let norm = trainer.optim_step().wait().unwrap().grad_norm;
            let expected = squares.sqrt();
            assert!((norm - expected).abs() < tolerance * expected, "{name}: gradient {norm}, expected {expected}");
        }
    }
}

#[test]
fn a_folder_of_bitsandbytes_is_exported_whole_with_and_without_adapters() {
    for name in FOLDERS {
        for source in [folder(name), folder(name).join("adapters")] {
            let exported = tempfile::tempdir().unwrap();
            export_hf(&source, None, exported.path(), Dtype::F32, None).unwrap();
            let ((_, whole), (_, expected)) = (load_hf(exported.path()).unwrap(), load_hf(&source).unwrap());
            assert!(!whole.is_quantised() && whole.adapter.is_none());
            assert!(far(&whole.flat, &expected.merged().flat) < 1e-6, "{}", source.display());
        }
    }
}

/// What is trained over 4 bits is what is trained over the numbers that they stand for, and its generator agrees.
#[test]
fn n5_training_over_4_bits_is_training_over_the_rounded_weights() {
    let config = ModelConfig { vocab_size: 64, ..crate::tiny::model() };
    let stored = Weights::random(&config, 3).quantised();
    let lora = || Lora::new(4, 8.0, &[Lora::ALL]).unwrap();
    let rows: Vec<Vec<u32>> = (1..6).map(|of| (0..4 + of).map(|at| (of * 7 + at * 11) % 60).collect()).collect();
    let train = |weights: &Weights| {
        let trainer = backend(&config, weights, Compute::default());
        let losses: Vec<f64> = (0..20)
            .map(|_| {
                let loss = trainer.forward_backward(batch(&rows)).wait().unwrap().loss;
                trainer.optim_step().wait().unwrap();
                loss
            })
            .collect();
        (losses, trainer.current().wait().unwrap().weights.read())
    };
    let (losses, trained) = train(&stored.adapted(&config, lora(), 5));
    let (expected, _) = train(&stored.merged().adapted(&config, lora(), 5));
    assert!(losses[19] < losses[0] - 0.05, "{losses:?}");
    for (found, expected) in losses.iter().zip(&expected) {
        assert!((found - expected).abs() < 1e-4, "{losses:?}, expected {expected:?}");
    }
    // A generator over the weights that the trainer publishes says what the merged model says.
    let generate = |weights: &Weights| {
        let decoder = Decoder::new(&config, weights.layout.clone());
        let tokenizer = Arc::new(Tokenizer::characters("0123456789", config.vocab_size).unwrap());
        let mut engine = LocalEngine::new(decoder, tokenizer, 4, 7);
        engine.set_weights(1, weights);
        let params = Arc::new(SamplingParams { max_new_tokens: 12, ignore_eos: true, ..Default::default() });
        engine.submit(Request::new(0, [5u32, 8, 33], 4, params)).unwrap();
        engine.run().unwrap().into_iter().map(|answer| answer.tokens).collect::<Vec<_>>()
    };
    assert_eq!(generate(&trained), generate(&trained.merged()));
}

/// Dense, in shards, with experts one by one and of gpt-oss, delta nets, and already in 4 bits under adapters.
#[test]
fn a_folder_read_into_4_bits_is_the_folder_read_and_then_quantised() {
    let models = ["llama_tied", "qwen2_untied_sharded", "olmoe", "qwen3_moe", "gpt_oss", "qwen3_5_moe", "phi3"];
    let folders = models.map(|name| Path::new("tests/golden/models").join(name)).into_iter();
    for folder in folders.chain([folder("qwen2").join("adapters")]) {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let (config, weights) = load_hf_in_4_bits(&folder, dtype).unwrap();
            let (expected_config, expected) = load_hf_for(&folder, dtype).unwrap();
            let expected = expected.quantised();
            assert!(config == expected_config && weights.is_quantised(), "{}", folder.display());
            assert!(weights.flat == expected.flat && weights.merged().flat == expected.merged().flat, "{}", folder.display());
        }
    }
}

#[test]
fn weights_in_4_bits_are_not_trained_without_adapters() {
    let config = crate::tiny::model();
    let config_of = LocalConfig::new(CrossEntropy, Schedule::constant(1e-2));
    let error = LocalBackend::new(config_of, config.clone(), Weights::random(&config, 3).quantised()).err().unwrap();
    assert!(error.to_string().contains("add adapters"), "{error}");
}

/// On disk, damaged in every part: an error that names the tensor, never numbers.
#[test]
fn damaged_4_bits_are_refused_by_name() {
    let source = std::fs::read(folder("qwen2").join("model.safetensors")).unwrap();
    for (from, to) in [
        (&br#""blocksize": 64"#[..], &br#""blocksize": 32"#[..]),
        (br#""nested_blocksize": 256"#, br#""nested_blocksize":   0"#),
        (br#""shape": [64, 64]"#, br#""shape": [64, 65]"#),
        (br#"k_proj.weight.nested_absmax"#, br#"k_proj.weight.nested_absmay"#),
    ] {
        let at = source.windows(from.len()).position(|bytes| bytes == from).unwrap();
        let mut bytes = source.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        let damaged = tempfile::tempdir().unwrap();
        std::fs::write(damaged.path().join("model.safetensors"), bytes).unwrap();
        std::fs::copy(folder("qwen2").join("config.json"), damaged.path().join("config.json")).unwrap();
        let error = load_hf_for(damaged.path(), Dtype::F32).err().unwrap().to_string();
        assert!(error.contains("_proj.weight"), "{error}");
    }
}
