//! What a GPU computes in 16 bits, by its own kernels (R112): where there is one, or its stand-in.

use std::path::Path;
use std::sync::Arc;

use rollflow::algo::{Aggregation, PolicyLoss, Schedule};
use rollflow::data::{Prompt, Sample, Tokenizer};
use rollflow::engine::{Finished, LocalEngine, OnNewWeights, Request, SamplingParams, TokenEngine};
use rollflow::model::{Compute, Decoder, Dtype, Lora, ModelConfig, Packed, Weights, load_hf};
use rollflow::train::{
    LocalBackend, LocalConfig, MasterFormat, MomentFormat, RouterReplay, TrainBatch, TrainingBackend, collate,
};

use tch::{Device, Kind, Tensor};

use crate::stand_in::{counts, replays};

/// All golden models, where there is a GPU.
fn golden_on_a_gpu() -> Vec<(String, ModelConfig, Weights)> {
    if Compute::cuda(0, Dtype::Bf16).check().is_err() {
        assert!(std::env::var_os("ROLLFLOW_REQUIRE_GPU").is_none(), "ROLLFLOW_REQUIRE_GPU is set, and there is none");
        eprintln!("skipped: libtorch finds no CUDA device here");
        return Vec::new();
    }
    let folders = std::fs::read_dir("tests/golden/models").unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = folders.filter(|path| path.is_dir()).collect();
    folders.sort();
    let load = |folder: std::path::PathBuf| {
        let (config, weights) = load_hf(&folder).unwrap();
        let longest = config.contexts().map(|(_, longest)| longest);
        let config = config.within(longest).unwrap();
        (folder.file_name().unwrap().to_string_lossy().into_owned(), config, weights)
    };
    folders.into_iter().map(load).collect()
}

fn backend(model: &ModelConfig, weights: &Weights, compute: Compute, gradient_checkpointing: bool) -> LocalBackend {
    let loss = PolicyLoss { entropy_coef: 0.01, ..PolicyLoss::default() };
    let config = LocalConfig {
        compute,
        gradient_checkpointing,
        temperature: 0.9,
        max_grad_norm: None,
        ..LocalConfig::new(loss, Schedule::constant(1e-3))
    };
    LocalBackend::new(config, model.clone(), weights.copy()).unwrap()
}

/// An engine with the tokenizer of a golden model. Callers set its weights.
fn engine(name: &str, model: &ModelConfig, weights: &Weights, slots: usize, compute: Compute) -> LocalEngine {
    let tokenizer = Tokenizer::from_dir(&Path::new("tests/golden/models").join(name)).unwrap();
    LocalEngine::new(Decoder::new(model, weights.layout.clone()), Arc::new(tokenizer), slots, 7).computing(compute)
}

/// A completion as a trainer scores it, and the engine's log-probabilities.
fn scored(prompt: &[u32], answer: &Finished) -> (Sample, Vec<f32>) {
    (Sample::supervised(prompt, &answer.tokens), answer.log_probs.clone())
}

/// The worst and the mean gap between log-probabilities of an engine and of its trainer.
fn gaps(trainer: &LocalBackend, answers: impl IntoIterator<Item = (Sample, Vec<f32>)>) -> (f64, f64) {
    let (samples, generated): (Vec<Sample>, Vec<Vec<f32>>) = answers.into_iter().unzip();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
    let of_trainer = trainer.score(batch).wait().unwrap().concat();
    let gaps = generated.concat().into_iter().zip(&of_trainer).map(|(a, b)| (f64::from(a) - b).abs());
    (gaps.clone().fold(0.0, f64::max), gaps.sum::<f64>() / of_trainer.len() as f64)
}

/// Two groups of answers to one prompt each, and another, of different lengths.
fn batch(vocabulary: usize) -> Arc<TrainBatch> {
    let token = |n: usize, at: usize| ((n * 31 + at * 17 + at * at) % vocabulary) as u32;
    let sample = |(ordinal, index): (u64, usize)| {
        let prompt: Vec<u32> = (0..9 + 2 * ordinal as usize).map(|at| token(ordinal as usize, at)).collect();
        let mut sample = Sample::begin(&Prompt { ordinal, ..Prompt::default() }, index as u32, &prompt);
        (0..3 + 7 * index).for_each(|at| sample.push(token(20 + index, at), -3.0, 1));
        sample.advantage = Some(if index % 2 == 0 { 1.0 } else { -0.5 });
        sample
    };
    let samples: Vec<Sample> = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 3), (2, 1)].into_iter().map(sample).collect();
    Arc::new(collate(&samples, Aggregation::TokenMean).unwrap())
}

/// A bound on what rounding does to a delta net's state is five times that of attention, as in `precision`.
fn tolerance(model: &ModelConfig) -> f64 {
    if model.delta.is_some() { 5.0 } else { 1.0 }
}

/// Law N3. Prompts are computed once for the answers of a group, at any length and with any window.
#[test]
fn a_step_in_bf16_on_a_gpu_is_that_in_f32_on_the_host_within_its_rounding() {
    for (name, model, weights) in golden_on_a_gpu() {
        let step = |compute, checkpointing| {
            let backend = backend(&model, &weights, compute, checkpointing);
            let batch = batch(model.vocab_size);
            let log_probs = backend.score(batch.clone()).wait().unwrap().concat();
            let seen = backend.forward_backward(batch).wait().unwrap();
            (log_probs, seen.loss, backend.optim_step().wait().unwrap().grad_norm)
        };
        let host = step(Compute::default(), false);
        for checkpointing in [false, true] {
            let device = step(Compute::cuda(0, Dtype::Bf16), checkpointing);
            let gaps = host.0.iter().zip(&device.0).map(|(a, b)| (a - b).abs());
            let (worst, mean) = (gaps.clone().fold(0.0, f64::max), gaps.sum::<f64>() / host.0.len() as f64);
            let norms = (device.2 - host.2).abs() / host.2;
            println!("{name}: log-probabilities {worst:.4} at most, {mean:.4} on average; gradient's norm {norms:.4}");
            // Experts are chosen by numbers that rounding may swap.
            let far = if model.experts.is_some() { 4.0 } else { tolerance(&model) };
            assert!(worst > 0.0 && worst < 0.3 * far && mean < 0.05 * far, "{name}: {worst}, {mean}");
            assert!(norms < 0.05 * far, "{name}: {} for {}", device.2, host.2);
        }
    }
}

/// Law N3. Those of all experts of a layer are two more products.
#[test]
fn adapters_of_experts_in_bf16_on_a_gpu_train_as_in_f32_on_the_host() {
    for (name, model, weights) in golden_on_a_gpu().into_iter().filter(|(_, model, _)| model.experts.is_some()) {
        let lora = Lora::new(8, 16.0, &[Lora::ALL, Lora::EXPERTS, Lora::ROUTERS]).unwrap();
        let mut weights = weights.adapted(&model, lora, 3);
        tch::manual_seed(4);
        let flat = weights.trained_mut();
        *flat = &*flat + flat.randn_like() * 0.02;
        let step = |compute, checkpointing| {
            let backend = backend(&model, &weights, compute, checkpointing);
            let batch = batch(model.vocab_size);
            let log_probs = backend.score(batch.clone()).wait().unwrap().concat();
            backend.forward_backward(batch).wait().unwrap();
            (log_probs, backend.optim_step().wait().unwrap().grad_norm)
        };
        let host = step(Compute::default(), false);
        for checkpointing in [false, true] {
            let device = step(Compute::cuda(0, Dtype::Bf16), checkpointing);
            let mean = host.0.iter().zip(&device.0).map(|(a, b)| (a - b).abs()).sum::<f64>() / host.0.len() as f64;
            let norms = (device.1 - host.1).abs() / host.1;
            println!("{name}: log-probabilities {mean:.4} on average; gradient's norm {norms:.4}");
            let most = if model.delta.is_some() { 0.1 } else { 0.05 };
            assert!(mean > 0.0 && mean < most && norms < 0.1, "{name}: {mean}, {norms}");
        }
    }
}

/// Moments and layers' inputs come back as they went; 8 bits round moments, and bf16 parameters.
#[test]
fn what_waits_on_the_host_changes_no_step_on_a_gpu_and_fewer_bits_hardly_any() {
    for (name, model, weights) in golden_on_a_gpu().into_iter().take(2) {
        let batch = batch(model.vocab_size);
        let trained = |masters, moments, activations_on_host| {
            let config = LocalConfig {
                compute: Compute::cuda(0, Dtype::Bf16),
                gradient_checkpointing: true,
                masters,
                moments,
                activations_on_host,
                ..LocalConfig::new(PolicyLoss::default(), Schedule::constant(1e-3))
            };
            let backend = LocalBackend::new(config, model.clone(), weights.copy()).unwrap();
            for _ in 0..3 {
                backend.forward_backward(batch.clone()).wait().unwrap();
                backend.optim_step().wait().unwrap();
            }
            let current = backend.current().wait().unwrap();
            current.weights.read().flat.to_device(Device::Cpu).to_kind(Kind::Float)
        };
        let plain = trained(MasterFormat::F32, MomentFormat::F32, false);
        assert!(trained(MasterFormat::F32, MomentFormat::Host, true) == plain, "{name}");
        let length = |of: Tensor| of.norm().double_value(&[]);
        let moved = length(weights.flat.to_device(Device::Cpu) - &plain);
        let gap = length(trained(MasterFormat::F32, MomentFormat::EightBit, false) - &plain);
        assert!(gap < 0.1 * moved, "{name}: moved by {moved}, in 8 bits {gap} away");
        let gap = length(trained(MasterFormat::Bf16, MomentFormat::F32, false) - &plain);
        let rounded = plain.norm().double_value(&[]) / 256.0;
        assert!(gap < 2.0 * rounded, "{name}: moved by {moved}, in bf16 {gap} away, rounded by {rounded}");
    }
}

/// Law N3: what is generated, slot by slot, has the log-probabilities that the trainer finds.
#[test]
fn a_generator_in_bf16_on_a_gpu_agrees_with_its_trainer() {
    for (name, model, weights) in golden_on_a_gpu() {
        let compute = Compute::cuda(0, Dtype::Bf16);
        let mut engine = engine(&name, &model, &weights, 4, compute);
        engine.set_weights(1, &weights);
        let prompts = [vec![5u32, 8, 33], (0..30).map(|at| (at * 7 % 60) as u32).collect()];
        for (ordinal, prompt) in prompts.iter().enumerate() {
            let greedy = if ordinal == 0 { 0.9 } else { 0.0 };
            let params =
                SamplingParams { max_new_tokens: 20 + 9 * ordinal, temperature: greedy, ignore_eos: true, ..Default::default() };
            engine.submit(Request::new(ordinal as u64, prompt.clone(), 3, Arc::new(params))).unwrap();
        }
        let answers = engine.run().unwrap();
        assert_eq!(answers.len(), 6);
        let sampled = answers.iter().filter(|answer| answer.ordinal == 0).map(|answer| scored(&prompts[0], answer));
        let (worst, mean) = gaps(&backend(&model, &weights, compute, false), sampled);
        println!("{name}: {worst:.4} at most, {mean:.4} on average");
        let far = if model.experts.is_some() { 4.0 } else { tolerance(&model) };
        assert!(worst < 0.3 * far && mean < 0.05 * far, "{name}: {worst}, {mean}");
    }
}

/// Law N3. Recorded steps write each token's experts, too: the trainer's, but for those that rounding swaps.
#[test]
fn experts_of_a_generator_in_bf16_on_a_gpu_are_those_of_its_trainer() {
    for (name, model, weights) in golden_on_a_gpu().into_iter().filter(|(_, model, _)| model.experts.is_some()) {
        let compute = Compute::cuda(0, Dtype::Bf16);
        let mut engine = engine(&name, &model, &weights, 6, compute).recording_routes(true);
        engine.set_weights(1, &weights);
        let prompt = [5u32, 8, 33];
        for ordinal in 0..6 {
            let params = SamplingParams { max_new_tokens: 9 + 4 * ordinal as usize, ignore_eos: true, ..Default::default() };
            engine.submit(Request::new(ordinal, prompt, 1, Arc::new(params))).unwrap();
        }
        let samples = engine.run().unwrap().into_iter().map(|answer| {
            let mut sample = Sample::supervised(&prompt, &answer.tokens);
            sample.advantage = Some(1.0);
            sample.routes = answer.routes;
            assert!(sample.routes.is_some(), "{name}");
            sample
        });
        let samples: Vec<Sample> = samples.collect();
        let config = LocalConfig {
            compute,
            router_replay: RouterReplay::Measure,
            ..LocalConfig::new(PolicyLoss::default(), Schedule::constant(1e-3))
        };
        let trainer = LocalBackend::new(config, model.clone(), weights.copy()).unwrap();
        let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
        let seen = trainer.forward_backward(batch).wait().unwrap().router_mismatch;
        println!("{name}: {} of {} experts differ", seen.other, seen.all);
        assert!(seen.all > 100 && seen.other * 20 < seen.all, "{name}: {seen:?}");
    }
}

/// A second turn computes only what is new: rounding differs, and nothing else.
#[test]
fn turns_in_bf16_on_a_gpu_agree_with_their_trainer() {
    let models = golden_on_a_gpu();
    for (name, model, weights) in models.iter().filter(|(_, model, _)| model.delta.is_none()) {
        let compute = Compute::cuda(0, Dtype::Bf16);
        let mut engine = engine(name, model, weights, 4, compute).remembering(8);
        engine.set_weights(1, weights);
        let params = Arc::new(SamplingParams { max_new_tokens: 12, temperature: 0.9, ignore_eos: true, ..Default::default() });
        let mut texts: Vec<Vec<u32>> = [[5u32, 8, 33].repeat(4), (0..20).map(|at| (at % 7) as u32).collect()].into();
        let (mut reused, mut all) = (0, Vec::new());
        for turn in 0..2 {
            for (of, text) in (0..).zip(&texts) {
                engine.submit(Request::new(2 * turn + of, text.clone(), 1, params.clone())).unwrap();
            }
            while !engine.is_idle() {
                for answer in engine.step().unwrap() {
                    let text = &mut texts[(answer.ordinal % 2) as usize];
                    all.push(scored(text, &answer));
                    text.extend(answer.tokens.iter().copied().chain([9, 4, 11]));
                }
                reused += engine.load().reused;
            }
        }
        assert!(reused >= 12 + 20 + 2 * 11, "{name}: {reused} reused");
        let (worst, mean) = gaps(&backend(model, weights, compute, false), all);
        println!("{name}: {worst:.4} at most, {mean:.4} on average; {reused} reused");
        let far = if model.experts.is_some() { 4.0 } else { tolerance(model) };
        assert!(worst < 0.3 * far && mean < 0.05 * far, "{name}: {worst}, {mean}");
    }
}

/// Law V5: samples that finish under older weights lie next to those of newer ones, whose keys a recorded step must not touch.
#[test]
fn versions_next_to_each_other_agree_with_their_trainers_on_a_gpu() {
    let compute = Compute::cuda(0, Dtype::Bf16);
    let Some((name, model, old)) = golden_on_a_gpu().into_iter().find(|(name, ..)| name == "qwen2_tied") else { return };
    let new = Weights::random(&model, 9);
    let mut engine = engine(&name, &model, &old, 8, compute).on_new_weights(OnNewWeights::Finish);
    let prompt = [5u32, 8, 33];
    let params = Arc::new(SamplingParams { max_new_tokens: 24, temperature: 0.9, ignore_eos: true, ..Default::default() });
    let mut answers = Vec::new();
    for (version, weights) in [(1, &old), (2, &new)] {
        engine.set_weights(version, weights);
        // Three: slots of a graph are rounded up to four.
        engine.submit(Request::new(version, prompt, 3, params.clone())).unwrap();
        (0..4).for_each(|_| answers.extend(engine.step().unwrap()));
    }
    answers.extend(engine.run().unwrap());
    for (version, weights) in [(1, &old), (2, &new)] {
        let own = answers.iter().filter(|answer| answer.ordinal == version).map(|answer| scored(&prompt, answer));
        assert_eq!(own.clone().count(), 3);
        let (worst, _) = gaps(&backend(&model, weights, compute, false), own);
        println!("version {version}: {worst:.4} at most");
        assert!(worst < 0.1, "version {version}: {worst}");
    }
}

/// Law N2: samples that wait while the cache is full, with a recorded step at work, are those of their trainer.
#[test]
fn samples_that_wait_for_memory_on_a_gpu_agree_with_their_trainer() {
    let compute = Compute::cuda(0, Dtype::Bf16);
    let Some((name, model, weights)) = golden_on_a_gpu().into_iter().find(|(name, ..)| name == "qwen2_tied") else { return };
    let mut engine = engine(&name, &model, &weights, 4, compute).cache_tokens(Some(5 * 32));
    engine.set_weights(1, &weights);
    let params = Arc::new(SamplingParams { max_new_tokens: 90, temperature: 0.9, ignore_eos: true, ..Default::default() });
    let prompt = [5u32, 8, 33];
    engine.submit(Request::new(0, prompt, 6, params)).unwrap();
    let (mut answers, mut waited) = (Vec::new(), 0);
    while !engine.is_idle() {
        answers.extend(engine.step().unwrap());
        waited += engine.load().preempted;
    }
    assert!(answers.len() == 6 && waited > 0, "{waited} waited");
    let samples = answers.iter().map(|answer| scored(&prompt, answer));
    let (worst, _) = gaps(&backend(&model, &weights, compute, false), samples);
    println!("{waited} waited, {worst:.4} at most");
    assert!(worst < 0.1, "{worst}");
}

/// A sequence whose numbers are not finite leaves them in the pages of a slot, where a shorter one follows.
#[test]
fn what_a_sequence_left_that_is_not_finite_reaches_no_later_one_on_a_gpu() {
    let compute = Compute::cuda(0, Dtype::F32);
    let Some((_, model, weights)) = golden_on_a_gpu().into_iter().find(|(name, ..)| name == "qwen2_tied") else { return };
    let decoder = Decoder::new(&model, weights.layout.clone());
    let weights = weights.on(compute);
    let broken = Weights::new(weights.layout.clone(), &weights.flat * f64::NAN);
    let [views, broken] = [&weights, &broken].map(|weights| decoder.views_of(weights));
    let tokens: Vec<u32> = (0..70).map(|at| at * 7 % 60).collect();
    let step = |is_left: bool| {
        let mut cache = decoder.cache(2, 96, compute);
        if is_left {
            let _logits = decoder.prefill(&broken, &Packed::new([&tokens[..]]), &mut cache, &[0]);
        }
        let _logits = decoder.prefill(&views, &Packed::new([&tokens[..3], &tokens[..50]]), &mut cache, &[0, 1]);
        decoder.decode(&views, 0, &[5, 9], &[3, 50], &mut cache).to_device(Device::Cpu)
    };
    let clean = step(false);
    assert!(clean.sum(Kind::Float).double_value(&[]).is_finite());
    assert!(step(true).equal(&clean));
}

/// Laws V1 and V5: a step is at work already when samples end, others take their slots, and weights change. Every token is
/// of its sample and of the version that it names.
#[test]
fn steps_that_run_ahead_draw_each_samples_tokens_and_none_of_weights_that_went_on_a_gpu() {
    let compute = Compute::cuda(0, Dtype::Bf16);
    let Some((name, model, old)) = golden_on_a_gpu().into_iter().find(|(name, ..)| name == "qwen2_tied") else { return };
    let all = [old, Weights::random(&model, 9), Weights::random(&model, 10)];
    let mut engine = engine(&name, &model, &all[0], 3, compute).on_new_weights(OnNewWeights::Recompute);
    let prompt = |of: u64| [5u32, 8, 33 + of as u32];
    let longest = |of: u64| 1 + (7 * of as usize) % 23;
    for of in 0..10 {
        let params = SamplingParams { max_new_tokens: longest(of), temperature: 0.9, ignore_eos: true, ..Default::default() };
        engine.submit(Request::new(of, prompt(of), 1, Arc::new(params))).unwrap();
    }
    let mut answers = Vec::new();
    for version in 1.. {
        engine.set_weights(version, &all[version as usize % 3]);
        (0..9).for_each(|_| answers.extend(engine.step().unwrap()));
        if engine.is_idle() {
            break;
        }
    }
    let samples: Vec<Sample> = answers.iter().map(|answer| Sample::supervised(&prompt(answer.ordinal), &answer.tokens)).collect();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
    let of_trainers = all.each_ref().map(|weights| backend(&model, weights, compute, false).score(batch.clone()).wait().unwrap());
    let mut changed = 0;
    for (at, answer) in answers.iter().enumerate() {
        assert_eq!(answer.tokens.len(), longest(answer.ordinal));
        let versions: Vec<u64> = answer.versions.iter().flat_map(|(version, len)| vec![version.unwrap(); len]).collect();
        changed += usize::from(versions.first() != versions.last());
        for (token, (log_prob, version)) in answer.log_probs.iter().zip(versions).enumerate() {
            let gap = (f64::from(*log_prob) - of_trainers[version as usize % 3][at][token]).abs();
            assert!(gap < 0.1, "sample {}, token {token} of version {version}: {gap}", answer.ordinal);
        }
    }
    assert!(answers.len() == 10 && changed > 2, "{changed} of {} answers have two versions", answers.len());
}

/// The device whose kernels are counted, which no other test has.
const COUNTED: usize = 3;

/// Small kernels are bound by how fast a host starts them, and a host that waits starts none.
#[test]
fn a_decoding_step_starts_few_kernels_and_waits_once_and_a_micro_batch_twice_at_most() {
    if Compute::cuda(COUNTED, Dtype::Bf16).check().is_err() || counts(COUNTED).is_none() {
        return eprintln!("skipped: only the stand-in of a GPU counts kernels");
    }
    for name in
        ["qwen2_tied", "qwen3_tied", "llama_tied", "qwen3_moe", "qwen3_5_text", "qwen3_5_long", "qwen3_5_moe", "gpt_oss_grouped"]
    {
        let (model, weights) = load_hf(&Path::new("tests/golden/models").join(name)).unwrap();
        let mut engine = engine(name, &model, &weights, 4, Compute::cuda(COUNTED, Dtype::Bf16));
        engine.set_weights(1, &weights);
        let params = Arc::new(SamplingParams { max_new_tokens: 12, ignore_eos: true, ..Default::default() });
        engine.submit(Request::new(0, [5u32, 8, 33], 4, params)).unwrap();
        engine.step().unwrap();
        // The stand-in's norm is four operations, a GPU's one.
        let most = 20 * model.layers() as u64 + 12;
        for step in 1..8 {
            let (before, replayed) = (counts(COUNTED).unwrap(), replays());
            engine.step().unwrap();
            let after = counts(COUNTED).unwrap();
            assert!(step == 1 || replays() > replayed, "{name}: step {step} is not a recorded one");
            let (kernels, waits) = (after.0 - before.0, after.1 - before.1);
            println!("{name}, step {step}: {kernels} kernels, {waits} waits");
            assert!(waits == 1, "{name}: {waits} waits");
            // The first one is computed, recorded and replayed.
            let most = if step == 1 { 3 * most } else { most };
            assert!(kernels <= most, "{name}: {kernels} kernels of a step, at most {most}");
        }

        let trainer = backend(&model, &weights, Compute::cuda(COUNTED, Dtype::Bf16), false);
        let before = counts(COUNTED).unwrap();
        trainer.forward_backward(batch(model.vocab_size)).wait().unwrap();
        let after = counts(COUNTED).unwrap();
        let (kernels, waits) = (after.0 - before.0, after.1 - before.1);
        println!("{name}, a micro-batch: {kernels} kernels, {waits} waits");
        assert!(waits <= 2, "{name}: {waits} waits of a micro-batch");
    }
}
