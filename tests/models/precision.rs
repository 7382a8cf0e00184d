//! Formats of computation (R112) and gradient checkpointing: what they may change, and what they must not.

use std::path::Path;
use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, PolicyLoss, Schedule};
use rollflow::data::{Sample, Tokenizer};
use rollflow::engine::{LocalEngine, Request, SamplingParams, TokenEngine};
use rollflow::model::{Compute, Decoder, Dtype, Lora, ModelConfig, Packed, Weights, load_hf};
use rollflow::train::{AdamW, LocalBackend, LocalConfig, SaveCheckpoint, TrainBatch, TrainingBackend, collate};
use tch::{Device, Kind, Tensor};

const HALVES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

/// Largest difference that a format's rounding makes to a logit of the golden models, whose logits are within ±12.
fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 1e-4,
        Dtype::Bf16 => 0.15,
        Dtype::F16 => 0.02,
    }
}

fn golden(name: &str) -> (ModelConfig, Weights) {
    load_hf(&Path::new("tests/golden/models").join(name)).unwrap()
}

fn every_golden() -> Vec<(String, ModelConfig, Weights)> {
    let folders = std::fs::read_dir("tests/golden/models").unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<String> =
        folders.filter(|path| path.is_dir()).map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    names.sort();
    let load = |name: String| {
        let (config, weights) = golden(&name);
        (name, config, weights)
    };
    names.into_iter().map(load).collect()
}

fn config(dtype: Dtype) -> LocalConfig {
    let compute = Compute::cpu(dtype);
    LocalConfig { threads: Some(1), compute, ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-3)) }
}

fn batch(vocab: usize) -> Arc<TrainBatch> {
    let sample = |n: u32| {
        let token = |at: u32| (n * 31 + at * 17 + at * at) % vocab as u32;
        Sample::supervised(&[token(0), token(1)], &(2..9 + n).map(token).collect::<Vec<u32>>())
    };
    Arc::new(collate(&(0..6).map(sample).collect::<Vec<_>>(), Aggregation::TokenMean).unwrap())
}

fn masters(backend: &LocalBackend) -> Tensor {
    backend.current().wait().unwrap().weights.read().flat
}

fn largest(gap: &Tensor) -> f64 {
    gap.abs().max().double_value(&[])
}

#[test]
fn logits_in_half_precision_are_those_of_full_precision_within_its_rounding() {
    let _guard = tch::no_grad_guard();
    for (name, config, weights) in every_golden() {
        let decoder = Decoder::new(&config, weights.layout.clone());
        let sequences = [[3u32, 9, 17, 4, 90, 33, 2].as_slice(), &[7, 8]];
        let packed = Packed::new(sequences);
        let logits = |dtype: Dtype| {
            let views = decoder.views(&weights.flat.to_kind(dtype.kind()));
            let logits = decoder.logits(&views, &decoder.hidden(&views, &packed));
            assert_eq!(logits.kind(), Kind::Float, "{name}: logits are not rounded");
            logits
        };
        let exact = logits(Dtype::F32);
        for dtype in HALVES {
            let gap = largest(&(logits(dtype) - &exact));
            // A delta net's state takes rounding along: transformers 5.23 differs by 0.67 from itself in bf16.
            let tolerance = if config.delta.is_some() { 5.0 } else { 1.0 } * tolerance(dtype);
            assert!(gap > 0.0 && gap < tolerance, "{name} in {}: {gap}", dtype.name());
        }
    }
}

#[test]
fn loss_and_gradient_in_half_precision_are_those_of_full_precision_within_its_rounding() {
    for name in ["qwen3_tied", "llama_tied", "olmo2"] {
        let (model, weights) = golden(name);
        let batch = batch(model.vocab_size);
        let seen = |dtype| {
            let backend = LocalBackend::new(config(dtype), model.clone(), weights.copy()).unwrap();
            let seen = backend.forward_backward(batch.clone()).wait().unwrap();
            (seen, backend.optim_step().wait().unwrap().grad_norm)
        };
        let exact = seen(Dtype::F32);
        for (dtype, relative) in [(Dtype::Bf16, 0.02), (Dtype::F16, 0.003)] {
            let found = seen(dtype);
            for (what, found, exact) in
                [("loss", found.0.loss, exact.0.loss), ("norm", found.1, exact.1), ("entropy", found.0.entropy, exact.0.entropy)]
            {
                let gap = (found - exact).abs() / exact;
                assert!(gap > 0.0 && gap < relative, "{name}, {what} in {}: {found}, {exact}", dtype.name());
            }
        }
    }
}

/// A mean over very many tokens has derivatives that f16 alone would round to nothing.
#[test]
fn gradients_of_tiny_losses_survive_f16() {
    let (model, weights) = golden("qwen3_tied");
    let norm = |dtype, factor: f64| {
        let mut batch = (*batch(model.vocab_size)).clone();
        batch.sequences.iter_mut().for_each(|sequence| sequence.weights.iter_mut().for_each(|weight| *weight *= factor));
        let backend = LocalBackend::new(config(dtype), model.clone(), weights.copy()).unwrap();
        backend.forward_backward(Arc::new(batch)).wait().unwrap();
        backend.optim_step().wait().unwrap().grad_norm / factor
    };
    let exact = norm(Dtype::F32, 1.0);
    let tiny = norm(Dtype::F16, 1e-9);
    assert!((tiny / exact - 1.0).abs() < 0.003, "{tiny} {exact}");
}

/// The loss that spreads tokens over experts has the larger derivatives here, and overflows f16 by the other's scale.
#[test]
fn gradients_of_the_experts_loss_survive_f16_next_to_those_of_a_tiny_loss() {
    let (model, weights) = golden("qwen3_moe");
    for gradient_checkpointing in [false, true] {
        let norm = |dtype| {
            let mut batch = (*batch(model.vocab_size)).clone();
            batch.sequences.iter_mut().for_each(|sequence| sequence.weights.iter_mut().for_each(|weight| *weight *= 1e-9));
            let config = LocalConfig { router_loss: 1.0, gradient_checkpointing, ..config(dtype) };
            let backend = LocalBackend::new(config, model.clone(), weights.copy()).unwrap();
            backend.forward_backward(Arc::new(batch)).wait().unwrap();
            backend.optim_step().wait().unwrap().grad_norm
        };
        let (exact, found) = (norm(Dtype::F32), norm(Dtype::F16));
        assert!(exact > 1e-4 && (found / exact - 1.0).abs() < 0.1, "{found} {exact}");
    }
}

/// A norm's gradient is a sum over tokens: 8192 alike are beyond f16. The last norm and the head after it are scaled against each other, so that the
/// function stays and this norm's gradient grows.
#[test]
fn a_gradient_that_overflows_f16_is_computed_again_with_a_lower_scale() {
    let model = ModelConfig { tied: false, ..crate::tiny::model() };
    let weights = Weights::random(&model, 5).on(Compute::cpu(Dtype::F16)).on(Compute::cpu(Dtype::F32));
    for (name, factor) in [("model.norm.weight", 2f64.powi(-10)), ("lm_head.weight", 2f64.powi(10))] {
        let entry = weights.layout.find(name).unwrap();
        let _scaled = weights.flat.narrow(0, entry.offset as i64, entry.len() as i64).g_mul_scalar_(factor);
    }
    let tokens: Vec<u32> = (0..33).map(|at| [2, 5, 3, 5, 7, 2][at % 6]).collect();
    let samples: Vec<Sample> = (0..256).map(|_| Sample::supervised(&tokens[..1], &tokens[1..])).collect();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
    for gradient_checkpointing in [false, true] {
        let norm = |dtype| {
            let config = LocalConfig { gradient_checkpointing, ..config(dtype) };
            let backend = LocalBackend::new(config, model.clone(), weights.copy()).unwrap();
            // The second is added to the first.
            backend.forward_backward(batch.clone()).wait().unwrap();
            backend.forward_backward(batch.clone()).wait().unwrap();
            backend.optim_step().wait().unwrap().grad_norm
        };
        let (exact, found) = (norm(Dtype::F32), norm(Dtype::F16));
        // Of the loss that is scaled to slopes of 1: twice the mean over 8192 tokens.
        assert!(exact * 8192.0 / 2.0 > 4.0 * 65504.0, "it would not overflow: {exact}");
        assert!((found / exact - 1.0).abs() < 0.02, "{found} {exact}");
    }
}

#[test]
fn masters_keep_what_half_precision_would_lose() {
    let (model, weights) = golden("qwen2_tied");
    for dtype in HALVES {
        let config = LocalConfig { loss: Arc::new(CrossEntropy), schedule: Schedule::constant(1e-6), ..config(dtype) };
        let backend = LocalBackend::new(config, model.clone(), weights.copy()).unwrap();
        for _ in 0..20 {
            backend.forward_backward(batch(model.vocab_size)).wait().unwrap();
            backend.optim_step().wait().unwrap();
        }
        let after = masters(&backend);
        assert_eq!(after.kind(), Kind::Float);
        let moved = largest(&(&after - &weights.flat));
        assert!(moved > 1e-5 && moved < 3e-5, "twenty steps of 1e-6: {moved}");
        // One such step is less than half a unit in the last place of most weights.
        let same = after.to_kind(dtype.kind()).eq_tensor(&weights.flat.to_kind(dtype.kind()));
        assert!(same.to_kind(Kind::Float).mean(None).double_value(&[]) > 0.5);
    }
}

/// Whatever the checkpoint's own format, training goes on from the f32 parameters.
#[test]
fn rounded_publishing_gives_the_masters_in_the_format_that_is_computed_with() {
    for (dtype, merge) in [(Dtype::Bf16, true), (Dtype::F16, true), (Dtype::F32, true), (Dtype::Bf16, false)] {
        for lora in [None, Some(Lora::new(4, 8.0, &[Lora::ALL]).unwrap())] {
            let (model, weights) = golden("llama_tied");
            let weights = lora.iter().fold(weights, |weights, lora| weights.adapted(&model, lora.clone(), 7));
            let published = |publish_rounded| {
                let config = LocalConfig { publish_rounded, merge, ..config(dtype) };
                let backend = LocalBackend::new(config, model.clone(), weights.share()).unwrap();
                for _ in 0..3 {
                    backend.forward_backward(batch(model.vocab_size));
                    backend.optim_step().wait().unwrap();
                }
                backend.snapshot().wait().unwrap().weights.read()
            };
            let (rounded, exact) = (published(true), published(false));
            let of_own = lora.is_none() || merge;
            assert_eq!(rounded.flat.kind() == dtype.kind(), of_own || dtype == Dtype::F32, "{dtype:?}");
            let compute = Compute::cpu(dtype);
            assert!(
                rounded.on(compute).flat.equal(&exact.on(compute).flat),
                "{dtype:?}: generators compute with the same numbers"
            );
        }
    }
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one_in_every_format() {
    let (model, weights) = golden("qwen2_tied");
    for (dtype, save_dtype) in
        [(Dtype::Bf16, None), (Dtype::Bf16, Some(Dtype::Bf16)), (Dtype::F16, Some(Dtype::F16)), (Dtype::F32, Some(Dtype::Bf16))]
    {
        let begin = || LocalBackend::new(LocalConfig { save_dtype, ..config(dtype) }, model.clone(), weights.copy()).unwrap();
        let train = |backend: &LocalBackend| {
            for _ in 0..3 {
                backend.forward_backward(batch(model.vocab_size)).wait().unwrap();
                backend.optim_step().wait().unwrap();
            }
        };
        let (first, second, run) = (begin(), begin(), tempfile::tempdir().unwrap());
        train(&first);
        let request = SaveCheckpoint { run_folder: run.path().into(), step: 3, ..Default::default() };
        let folder = first.save_checkpoint(request).wait().unwrap();
        let (saved, rounded) = load_hf(&folder).unwrap();
        assert_eq!(saved.dtype, save_dtype.unwrap_or(model.dtype));
        assert_eq!(rounded.flat == masters(&first), saved.dtype == Dtype::F32);
        second.load_checkpoint(&folder).wait().unwrap();
        assert!(masters(&second) == masters(&first), "{save_dtype:?}");
        train(&first);
        train(&second);
        assert!(masters(&second) == masters(&first), "{save_dtype:?}");
    }
}

/// A folder whose format is computed with is held as it is: whoever trains on it, all of it or adapters over it, learns what he would from f32.
#[test]
fn weights_in_their_own_format_are_trained_as_in_f32() {
    let (model, weights) = golden("qwen2_tied");
    let half = weights.on(Compute::cpu(Dtype::Bf16));
    let exact = half.on(Compute::cpu(Dtype::F32));
    assert_eq!((half.flat.kind(), exact.flat.kind()), (Kind::BFloat16, Kind::Float));
    let lora = Lora::new(4, 8.0, &[Lora::ALL]).unwrap();
    let trained = |weights: Weights| {
        let backend = LocalBackend::new(config(Dtype::Bf16), model.clone(), weights).unwrap();
        for _ in 0..3 {
            backend.forward_backward(batch(model.vocab_size)).wait().unwrap();
            backend.optim_step().wait().unwrap();
        }
        backend.current().wait().unwrap().weights.read()
    };
    assert!(trained(half.share()).flat == trained(exact.share()).flat);
    let [over_half, over_exact] = [&half, &exact].map(|base| trained(base.adapted(&model, lora.clone(), 3)));
    // Adapters are published merged, or apart from what they lie over.
    let same = |one: &Tensor, other: &Tensor| one.to_kind(Kind::BFloat16) == other.to_kind(Kind::BFloat16);
    assert!(same(&over_half.merged().flat, &over_exact.merged().flat));
    assert!(!same(&over_half.merged().flat, &half.flat), "they learned something");
}

/// Log-probabilities of the same sampled tokens: by the generator and by the trainer in `dtype`, and by the trainer in f32.
struct Compared {
    generator: Vec<f64>,
    trainer: Vec<f64>,
    exact: Vec<f64>,
}

impl Compared {
    fn of(name: &str, (model, weights): (&ModelConfig, &Weights), dtype: Dtype) -> Self {
        let tokenizer = Arc::new(Tokenizer::from_dir(&Path::new("tests/golden/models").join(name)).unwrap());
        let decoder = Decoder::new(model, weights.layout.clone());
        let mut engine = LocalEngine::new(decoder, tokenizer, 4, 7).computing(Compute::cpu(dtype));
        engine.set_weights(1, weights);
        let params = Arc::new(SamplingParams { max_new_tokens: 24, ignore_eos: true, ..Default::default() });
        let prompt = [5u32, 80, 33];
        engine.submit(Request::new(0, prompt, 4, params)).unwrap();
        let answers = engine.run().unwrap();
        let samples: Vec<Sample> = answers.iter().map(|answer| Sample::supervised(&prompt, &answer.tokens)).collect();
        let score = |dtype| {
            let backend = LocalBackend::new(config(dtype), model.clone(), weights.copy()).unwrap();
            backend.score(Arc::new(collate(&samples, Aggregation::TokenMean).unwrap())).wait().unwrap().concat()
        };
        let generator = answers.iter().flat_map(|answer| answer.log_probs.iter().map(|value| f64::from(*value))).collect();
        Compared { generator, trainer: score(dtype), exact: score(Dtype::F32) }
    }
}

fn worst(one: &[f64], other: &[f64]) -> f64 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max)
}

fn mean_gap(one: &[f64], other: &[f64]) -> f64 {
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).sum::<f64>() / one.len() as f64
}

/// Law N3 in every format: generator and trainer round alike, so that they agree far better than either with f32.
#[test]
fn generator_and_trainer_agree_in_half_precision() {
    let (model, weights) = golden("qwen3_tied");
    for dtype in HALVES {
        let Compared { generator, trainer, .. } = Compared::of("qwen3_tied", (&model, &weights), dtype);
        let worst = worst(&generator, &trainer);
        assert!(worst < tolerance(dtype), "{}: {worst}", dtype.name());
    }
}

/// Law N5. Qwen2's biases of keys put scores in the hundreds, where a unit in the last place of bf16 is 1: rounded before the softmax, they make
/// another policy of the same weights. What is left is the rounding of what is stored, which the trainer's attention has too.
#[test]
fn generator_s_attention_scores_are_not_rounded_before_the_softmax() {
    for name in ["qwen2_tied", "qwen2_untied_sharded"] {
        let (model, weights) = golden(name);
        for entry in weights.layout.entries().iter().filter(|entry| entry.name.ends_with("k_proj.bias")) {
            let _scaled = weights.flat.narrow(0, entry.offset as i64, entry.len() as i64).g_mul_scalar_(100.0);
        }
        // The weights themselves are rounded for all three.
        let weights = weights.on(Compute::cpu(Dtype::Bf16)).on(Compute::cpu(Dtype::F32));
        let Compared { generator, trainer, exact } = Compared::of(name, (&model, &weights), Dtype::Bf16);
        let (own, of_trainer) = (mean_gap(&generator, &exact), mean_gap(&trainer, &exact));
        let between = mean_gap(&generator, &trainer);
        println!("{name}: generator to f32 {own:.4}, trainer to f32 {of_trainer:.4}, both {between:.4}");
        // A processor without products in bf16 rounds none of their operands: then all three are nearly equal.
        let order = 1e-5;
        assert!(own < 1.3 * of_trainer + order, "{name}: {own} from f32, the trainer {of_trainer}");
        // Keys are rounded where they are stored, alike in both. With rounded scores this is 1.2 times the trainer's, without 0.6.
        assert!(between < 0.9 * of_trainer + order, "{name}: {between} apart, the trainer {of_trainer} from f32");
    }
}

/// Law N5: a word that is read thousands of times learns from all of them. Summed in bf16, a gradient stops growing at 256 of its increments.
#[test]
fn an_embedding_s_gradient_is_summed_in_f32() {
    let model = ModelConfig { vocab_size: 4, tied: false, ..crate::tiny::model() };
    let weights = Weights::random(&model, 5).on(Compute::cpu(Dtype::Bf16)).on(Compute::cpu(Dtype::F32));
    let tokens: Vec<u32> = (0..32).map(|at| [0, 1, 2, 1, 3, 0][at % 6]).collect();
    let samples: Vec<Sample> = (0..256).map(|_| Sample::supervised(&tokens[..1], &tokens[1..])).collect();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
    let gradient = |dtype, gradient_checkpointing| {
        // A step of it is the gradient itself.
        let adamw = AdamW { beta1: 0.0, beta2: 0.0, epsilon: 1e6, ..AdamW::default() };
        let (schedule, micro_batch_tokens) = (Schedule::constant(1e6), 1 << 14);
        let plain = config(dtype);
        let config = LocalConfig { adamw, schedule, micro_batch_tokens, gradient_checkpointing, max_grad_norm: None, ..plain };
        let backend = LocalBackend::new(config, model.clone(), weights.copy()).unwrap();
        backend.forward_backward(batch.clone()).wait().unwrap();
        backend.optim_step().wait().unwrap();
        let embedding = weights.layout.entries()[0].range();
        (&weights.flat - masters(&backend)).narrow(0, embedding.start as i64, embedding.len() as i64)
    };
    let exact = gradient(Dtype::F32, false);
    for gradient_checkpointing in [false, true] {
        let found = gradient(Dtype::Bf16, gradient_checkpointing);
        let gap = (&found - &exact).norm().double_value(&[]) / exact.norm().double_value(&[]);
        println!("gradient of the embedding: {gap:.4} of its norm");
        assert!(gap < 0.1, "{gap} of its norm");
    }
}

/// The same operations in the same order: not a bit of it differs in f32.
#[test]
fn gradients_with_layers_computed_anew_are_those_without_to_the_bit() {
    for (name, model, weights) in every_golden() {
        let batch = batch(model.vocab_size);
        let step = |gradient_checkpointing, micro_batch_tokens| {
            let config = LocalConfig { gradient_checkpointing, micro_batch_tokens, ..config(Dtype::F32) };
            let backend = LocalBackend::new(config, model.clone(), weights.copy()).unwrap();
            let seen = backend.forward_backward(batch.clone()).wait().unwrap();
            let norm = backend.optim_step().wait().unwrap().grad_norm;
            (seen.loss, norm, masters(&backend))
        };
        for micro_batch_tokens in [16, 1000] {
            let (plain, anew) = (step(false, micro_batch_tokens), step(true, micro_batch_tokens));
            assert!(anew == plain, "{name}: {} {}", anew.1, plain.1);
        }
    }
}

/// The same where prompts are shared between answers (fused attention), for scores, and in half precision.
#[test]
fn layers_computed_anew_change_nothing_under_shared_prompts_scores_and_halves() {
    let samples = crate::tiny::rollouts(&[(6, 3), (6, 5), (4, 2), (4, 7)], 3);
    let batch = Arc::new(collate(&samples, Aggregation::SeqMeanTokenMean).unwrap());
    let untied = ModelConfig { tied: false, ..crate::tiny::model() };
    for (model, dtype) in [(crate::tiny::model(), Dtype::F32), (untied, Dtype::F32), (crate::tiny::model(), Dtype::Bf16)] {
        let step = |gradient_checkpointing| {
            let loss = Arc::new(PolicyLoss { entropy_coef: 0.1, ..PolicyLoss::default() });
            let config = LocalConfig { gradient_checkpointing, loss, ..config(dtype) };
            let backend = LocalBackend::new(config, model.clone(), Weights::random(&model, 3)).unwrap();
            backend.forward_backward(batch.clone()).wait().unwrap();
            backend.optim_step().wait().unwrap();
            masters(&backend)
        };
        let gap = largest(&(step(true) - step(false)));
        assert!(gap == 0.0, "{}: {gap}", dtype.name());
    }
}

/// R112: the same step on a GPU. Held where there is one; a machine without says so.
#[test]
fn a_step_on_cuda_is_that_on_the_cpu() {
    if !tch::Cuda::is_available() {
        assert!(
            std::env::var_os("ROLLFLOW_REQUIRE_GPU").is_none(),
            "ROLLFLOW_REQUIRE_GPU is set, and libtorch finds no CUDA device"
        );
        eprintln!("skipped: libtorch finds no CUDA device here");
        return;
    }
    let (model, weights) = golden("qwen3_tied");
    let step = |compute| {
        let backend = LocalBackend::new(LocalConfig { compute, ..config(Dtype::F32) }, model.clone(), weights.copy()).unwrap();
        let seen = backend.forward_backward(batch(model.vocab_size)).wait().unwrap();
        let norm = backend.optim_step().wait().unwrap().grad_norm;
        (seen.loss, norm, masters(&backend).to_device(Device::Cpu))
    };
    let (host, device) = (step(Compute::default()), step(Compute::cuda(0, Dtype::F32)));
    assert!((host.0 - device.0).abs() < 1e-4 && (host.1 - device.1).abs() < 1e-3 * host.1);
    assert!(largest(&(host.2 - device.2)) < 2.1e-3, "at most the sign of a step of 1e-3");
}

/// R112: a device that isn't there is refused with what there is.
#[test]
fn a_device_that_is_not_there_is_refused_with_what_was_found() {
    let compute = Compute::cuda(99, Dtype::F32);
    let error = compute.check().unwrap_err().to_string();
    assert!(error.starts_with("cuda:99 is not there: ") && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    let config = LocalConfig { compute, ..config(Dtype::F32) };
    assert!(LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(1)).is_err());
}
