//! What a model does on a device: tokens generated and trained a second, the share of the device's matrix products that is, and the memory it takes.
//!
//! `cargo bench --bench device -- [DEVICE] [FORMAT] [SIZE] [ANSWERS]`, as in `cuda bf16 half-billion 128`; `cpu f32 tiny 32` unless told otherwise. A model with
//! random weights answers ANSWERS prompts of 256 tokens with 512 each, or 32 with 64 where it is tiny; then the answers are learned, three steps of all of them.
//! Products: two operations a parameter and token for generating, six for training, attention left out; against square products of one size.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rollflow::algo::{Aggregation, Grpo, Schedule};
use rollflow::data::{Prompt, Sample, Tokenizer};
use rollflow::engine::{Finished, LocalEngine, Request, SamplingParams, TokenEngine};
use rollflow::model::{Compute, Decoder, Dtype, ModelConfig, Weights, gpu_memory};
use rollflow::recipe::DeviceName;
use rollflow::train::{LocalBackend, LocalConfig, TrainingBackend, collate};
use tch::{Device, Tensor};

/// A model's shape, and the lengths of prompts and answers.
struct Size {
    model: ModelConfig,
    prompt: usize,
    answer: usize,
    /// The edge of the square products that it is held against.
    edge: i64,
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let arg = |at: usize, default: &'static str| args.get(at).map_or(default, String::as_str);
    let dtype = match arg(1, "f32") {
        "f32" => Dtype::F32,
        "bf16" => Dtype::Bf16,
        "f16" => Dtype::F16,
        other => bail!("{other}: give f32, bf16 or f16"),
    };
    let compute = match arg(0, "cpu").parse().map_err(anyhow::Error::msg)? {
        DeviceName::Cpu => Compute::cpu(dtype),
        DeviceName::Cuda(index) => Compute::cuda(index, dtype),
    };
    compute.check()?;
    let tokenizer = Arc::new(Tokenizer::characters("0123456789", 64)?);
    let size = size(arg(2, "tiny"), &tokenizer)?;
    let answers: u64 = arg(3, "32").parse().context("ANSWERS is a number")?;
    let weights = Weights::random(&size.model, 0);
    let parameters = weights.layout.total() as f64;
    println!("{:.3} billion parameters, {} on {}", parameters / 1e9, arg(1, "f32"), compute.device_name());

    let reach = products(compute, size.edge);
    println!("products of {0} × {0}   {1:.2} TFLOP/s", size.edge, reach / 1e12);
    let of_reach = |operations: f64, rate: f64| 100.0 * operations * parameters * rate / reach;
    let (finished, rate) = generate(&size, &weights, &tokenizer, compute, answers)?;
    println!("generated   {rate:.0} tokens/s, {:.1} % of that", of_reach(2.0, rate));
    tell_memory(compute);
    let rate = train(&size, weights, compute, &finished)?;
    println!("trained     {rate:.0} tokens/s, {:.1} % of that", of_reach(6.0, rate));
    tell_memory(compute);
    Ok(())
}

fn size(name: &str, tokenizer: &Tokenizer) -> Result<Size> {
    let small = |hidden, layers| ModelConfig::small(tokenizer, hidden, layers);
    Ok(match name {
        "tiny" => Size { model: small(128, 4), prompt: 32, answer: 64, edge: 1024 },
        // The shape of Qwen2.5-0.5B.
        "half-billion" => {
            let model = ModelConfig {
                vocab_size: 151_936,
                intermediate_size: 4864,
                heads: 14,
                kv_heads: 2,
                head_dim: 64,
                qkv_bias: true,
                family: rollflow::model::Family::Qwen2,
                ..small(896, 24)
            };
            Size { model, prompt: 256, answer: 512, edge: 8192 }
        }
        other => bail!("{other}: give tiny or half-billion"),
    })
}

/// Operations a second in products of square matrices.
fn products(compute: Compute, edge: i64) -> f64 {
    let (a, b) = (Tensor::randn([edge, edge], compute.options()), Tensor::randn([edge, edge], compute.options()));
    let round = |times: i32| {
        let started = Instant::now();
        let mut product = a.shallow_clone();
        (0..times).for_each(|_| product = a.matmul(&b));
        // Reading a number waits for the device.
        product.double_value(&[0, 0]);
        f64::from(times) / started.elapsed().as_secs_f64()
    };
    round(3);
    2.0 * (edge as f64).powi(3) * round(20)
}

/// Answers, and tokens of answers a second, the reading of prompts included. The weights are on the device.
fn generate(
    size: &Size,
    weights: &Weights,
    tokenizer: &Arc<Tokenizer>,
    compute: Compute,
    answers: u64,
) -> Result<(Vec<Finished>, f64)> {
    let decoder = Decoder::new(&size.model, weights.layout.clone());
    let mut engine = LocalEngine::new(decoder, tokenizer.clone(), answers as usize, 1).computing(compute);
    let weights = weights.on(compute);
    let mut ask = |answer: usize, version: u64| -> Result<_> {
        let params = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
        let started = Instant::now();
        engine.set_weights(version, &weights);
        for ordinal in 0..answers {
            let params = Arc::new(SamplingParams { max_new_tokens: length(answer, ordinal), ..params.clone() });
            let prompt: Vec<u32> = (0..size.prompt as u64).map(|at| ((ordinal * 7 + at * 13) % 60) as u32).collect();
            engine.submit(Request::new(ordinal, prompt, 1, params))?;
        }
        Ok((engine.run()?, started.elapsed().as_secs_f64()))
    };
    // A device's first operations compile and allocate.
    ask(4, 1)?;
    let (finished, seconds) = ask(size.answer, 2)?;
    let tokens: usize = finished.iter().map(|answer| answer.tokens.len()).sum();
    Ok((finished, tokens as f64 / seconds))
}

/// Tokens of an answer: as ragged as rollouts are, from an eighth of `longest` on, and one of 16 to the end.
fn length(longest: usize, ordinal: u64) -> usize {
    let (share, whole) = (ordinal * 37 % 100, ordinal.is_multiple_of(16));
    if whole { longest } else { (longest * (12 + 88 * share as usize / 100)).div_ceil(100).max(1) }
}

/// Tokens of prompts and answers a second, over steps after the first.
fn train(size: &Size, weights: Weights, compute: Compute, answers: &[Finished]) -> Result<f64> {
    let sample = |finished: &Finished| {
        let prompt = Prompt { ordinal: finished.ordinal, ..Prompt::default() };
        let mut sample = Sample::begin(&prompt, 0, &vec![5; size.prompt]);
        finished.tokens.iter().zip(&finished.log_probs).for_each(|(token, log_prob)| sample.push(*token, *log_prob, 1));
        sample.advantage = Some(if finished.ordinal.is_multiple_of(2) { 1.0 } else { -1.0 });
        sample
    };
    let samples: Vec<Sample> = answers.iter().map(sample).collect();
    let tokens: usize = samples.iter().map(|sample| sample.tokens.len()).sum();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean)?);
    let config = LocalConfig {
        compute,
        micro_batch_tokens: 16 * (size.prompt + size.answer),
        ..LocalConfig::new(Grpo::default(), Schedule::constant(1e-6))
    };
    let backend = LocalBackend::new(config, size.model.clone(), weights)?;
    let step = || -> Result<()> {
        backend.forward_backward(batch.clone());
        backend.optim_step().wait()?;
        Ok(())
    };
    step()?;
    let started = Instant::now();
    (0..3).try_for_each(|_| step())?;
    Ok(3.0 * tokens as f64 / started.elapsed().as_secs_f64())
}

/// What the process holds: of a GPU, all that libtorch has ever taken, since it gives nothing back.
fn tell_memory(compute: Compute) {
    let used = match compute.device {
        Device::Cuda(index) => gpu_memory(index).map(|memory| memory.total - memory.free),
        _ => std::fs::read_to_string("/proc/self/status").ok().and_then(|status| {
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
            Some(1024 * peak.trim().trim_end_matches(" kB").parse::<u64>().ok()?)
        }),
    };
    if let Some(used) = used {
        println!("  memory    {:.2} GiB", used as f64 / f64::from(1 << 30));
    }
}
