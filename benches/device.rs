//! What a model does on a device: tokens generated and trained a second, alone and at the same time, the share of the device's limits that is, and memory.
//!
//! `cargo bench --bench device -- [DEVICE] [FORMAT] [SIZE] [ANSWERS] [LENGTH]`, as in `cuda bf16 half-billion 128`; `cpu f32 tiny 32` unless told otherwise.
//! SIZE: `tiny`, `half-billion`, `one-and-a-half`; `seven-lora`, whose adapters alone are trained; `seven-qlora`, over a base in 4 bits; `mixture` of 64
//! experts, a billion parameters in all; `seven-mixture`, of which adapters are trained; or `delta-net` and `small-delta-net`, in three of four layers. A model with random
//! weights answers ANSWERS prompts of 256 tokens with up to LENGTH each (512; 32 and 64 where it is tiny), ragged; the answers are learned, three steps of
//! all of them; then more are generated while the trainer goes on.
//!
//! Limits. Of generation, for each step of all sequences: the longer of reading weights, keys and values once, and of two operations a parameter and sequence,
//! at the rates of a large copy and of square products, measured first. Of training: six operations a parameter and token, or four where only adapters are
//! trained, at the rate of those products. Of a mixture's experts, a step reads those that its sequences need if routers choose evenly, and a token is
//! multiplied by its own. States of delta nets are read and written. Attention's own operations and the reading of prompts are left out.

mod arguments;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, bail};
use rollflow::algo::{Aggregation, Grpo, Schedule};
use rollflow::data::{Prompt, Sample, Tokenizer};
use rollflow::engine::{Finished, LocalEngine, Request, SamplingParams, TokenEngine};
use rollflow::model::{
    Compute, Decoder, ExpertLayer, Experts, Family, GatedDelta, Layout, Lora, ModelConfig, Weights, gpu_memory,
};
use rollflow::train::{LocalBackend, LocalConfig, TrainingBackend, collate};
use tch::{Device, Kind, Tensor};

use arguments::Arguments;

/// A model's shape, and the lengths of prompts and answers.
struct Size {
    model: ModelConfig,
    lora: bool,
    /// Whether the trainer's base is in 4 bits.
    quantised: bool,
    prompt: usize,
    answer: usize,
    /// The edge of the square products that it is held against.
    edge: i64,
}

/// What a device reaches.
struct Reach {
    operations: f64,
    bytes: f64,
}

fn main() -> Result<()> {
    let args = Arguments::read();
    let compute = args.compute()?;
    let tokenizer = Arc::new(Tokenizer::characters("0123456789", 64)?);
    let mut size = size(args.get(2, "tiny"), &tokenizer)?;
    let answers: u64 = args.number(3, 32)?;
    size.answer = args.number(4, size.answer)?;
    let weights = drawn(&size, compute)?;
    let parameters = weights.layout.total() as f64;
    println!("{:.3} billion parameters, {} on {}", parameters / 1e9, args.get(1, "f32"), compute.device_name());

    let reach = Reach { operations: products(compute, size.edge), bytes: copies(compute) };
    println!("products of {0} × {0}   {1:.2} TFLOP/s, copies {2:.0} GB/s", size.edge, reach.operations / 1e12, reach.bytes / 1e9);
    let mut generator = Generator::new(&size, &weights, &tokenizer, compute, answers);
    // A device's first operations compile, allocate and record.
    let (first, seconds) = generator.ask(size.answer)?;
    println!("at first    {:.0} tokens/s", tokens_of(&(first, seconds)));
    let (_, reading) = generator.ask(1)?;
    let (finished, seconds) = generator.ask(size.answer)?;
    let tokens: usize = finished.iter().map(|answer| answer.tokens.len()).sum();
    let alone = tokens as f64 / seconds;
    let share = 100.0 * least_seconds(&size, &finished, compute, &reach) / (seconds - reading);
    println!("generated   {alone:.0} tokens/s; without the prompts, {share:.1} % of the limit");
    println!("prompts     {:.0} tokens/s", (answers as usize * size.prompt) as f64 / reading);
    tell_memory(compute);

    let (batch, tokens) = batch(&size, &finished)?;
    let backend = trainer(&size, weights, compute)?;
    let step = || -> Result<()> {
        backend.forward_backward(batch.clone());
        backend.optim_step().wait()?;
        Ok(())
    };
    step()?;
    let started = Instant::now();
    (0..3).try_for_each(|_| step())?;
    let rate = 3.0 * tokens as f64 / started.elapsed().as_secs_f64();
    let operations = if size.lora { 4.0 } else { 6.0 } * multiplied(&size.model, 1.0) * rate;
    println!("trained     {rate:.0} tokens/s, {:.1} % of the limit", 100.0 * operations / reach.operations);
    tell_memory(compute);

    let done = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let trained = scope.spawn(|| -> Result<f64, String> {
            let started = Instant::now();
            let mut steps = 0;
            while !done.load(Ordering::Acquire) {
                step().map_err(|error| error.to_string())?;
                steps += 1;
            }
            Ok((steps * tokens) as f64 / started.elapsed().as_secs_f64())
        });
        let asked = generator.ask(size.answer);
        done.store(true, Ordering::Release);
        let trained = trained.join().map_err(|_| anyhow::anyhow!("the trainer's thread ended"))?.map_err(anyhow::Error::msg)?;
        let generated = tokens_of(&asked?);
        println!(
            "together    generated {generated:.0} tokens/s, {:.0} % of alone; trained {trained:.0}, {:.0} %",
            100.0 * generated / alone,
            100.0 * trained / rate
        );
        Ok(())
    })
}

fn tokens_of((finished, seconds): &(Vec<Finished>, f64)) -> f64 {
    finished.iter().map(|answer| answer.tokens.len()).sum::<usize>() as f64 / seconds
}

fn size(name: &str, tokenizer: &Tokenizer) -> Result<Size> {
    let small = |hidden, layers| ModelConfig::small(tokenizer, hidden, layers);
    let tiny = Size { model: small(128, 4), lora: false, quantised: false, prompt: 32, answer: 64, edge: 1024 };
    // The shapes of Qwen2.5.
    let qwen = |layers: usize, hidden: usize, intermediate_size: usize, [heads, kv_heads]: [usize; 2]| {
        let (vocab_size, head_dim) = (151_936, hidden / heads);
        let (qkv_bias, family) = (true, Family::Qwen2);
        let wide =
            ModelConfig { vocab_size, intermediate_size, heads, kv_heads, head_dim, qkv_bias, family, ..small(hidden, layers) };
        let model = ModelConfig { max_positions: 32_768, rope_theta: 1e6, ..wide };
        Size { model, lora: false, quantised: false, prompt: 256, answer: 512, edge: 8192 }
    };
    // Qwen3-MoE's layers. `mixture` is small enough that all of it is trained; `seven-mixture` has the sizes of OLMoE's layers.
    let mixture = |layers: usize, hidden: usize, width: usize| {
        let experts = Experts {
            count: 64,
            per_token: 8,
            width,
            normalized: true,
            dense_layers: Vec::new(),
            shared: None,
            layer: ExpertLayer::SwiGlu,
        };
        let size = qwen(layers, hidden, width, [hidden / 128; 2]);
        let model = ModelConfig { family: Family::Qwen3Moe, experts: Some(experts), qkv_bias: false, ..size.model };
        Size { model, ..size }
    };
    // Layers as Qwen3.5 has them, of sizes that were not taken from one of its models.
    let delta_net = |heads: usize, layers: usize, size: Size| {
        let layers = (0..layers).filter(|layer| layer % 4 != 3).collect();
        let delta = GatedDelta { layers, key_heads: heads, value_heads: heads, key_dim: 128, value_dim: 128, kernel: 4 };
        let shape = ModelConfig { head_dim: 256, rotated: 0.25, qkv_bias: false, family: Family::Qwen35, ..size.model };
        Size { model: ModelConfig { delta: Some(delta), ..shape }, ..size }
    };
    let small_net = || {
        let size = qwen(4, 512, 1536, [2, 1]);
        let model = ModelConfig { vocab_size: tokenizer.vocab_size(), ..size.model };
        Size { model, prompt: 32, edge: 1024, ..size }
    };
    let adapters = |size: Size| Size { lora: true, model: ModelConfig { tied: false, ..size.model }, ..size };
    Ok(match name {
        "tiny" => tiny,
        "half-billion" => qwen(24, 896, 4864, [14, 2]),
        "one-and-a-half" => qwen(28, 1536, 8960, [12, 2]),
        "seven-lora" => adapters(qwen(28, 3584, 18_944, [28, 4])),
        "seven-qlora" => Size { quantised: true, ..adapters(qwen(28, 3584, 18_944, [28, 4])) },
        "mixture" => mixture(12, 1024, 512),
        "seven-mixture" => adapters(mixture(16, 2048, 1024)),
        "delta-net" => delta_net(16, 24, qwen(24, 1024, 3584, [8, 2])),
        "small-delta-net" => delta_net(8, 4, small_net()),
        other => bail!(
            "{other}: give tiny, half-billion, one-and-a-half, seven-lora, seven-qlora, mixture, seven-mixture, delta-net or small-delta-net"
        ),
    })
}

/// Random weights: on a GPU drawn there, for a processor takes minutes for billions.
fn drawn(size: &Size, compute: Compute) -> Result<Weights> {
    let weights = match compute.device {
        Device::Cpu => Weights::random(&size.model, 0),
        device => {
            let layout = Layout::new(&size.model);
            let kind = if size.lora { compute.dtype.kind() } else { Kind::Float };
            let flat = Tensor::randn([layout.total() as i64], (kind, device)).g_mul_scalar_(0.02);
            for norm in layout.entries().iter().filter(|entry| entry.name.ends_with("norm.weight")) {
                let range = norm.range();
                let _ones = flat.narrow(0, range.start as i64, range.len() as i64).fill_(1.0);
            }
            Weights::new(Arc::new(layout), flat)
        }
    };
    Ok(if size.lora { weights.adapted(&size.model, Lora::new(16, 32.0, &[Lora::ALL])?, 1) } else { weights })
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

/// Bytes a second that a copy within the device's memory reads and writes.
fn copies(compute: Compute) -> f64 {
    let numbers = if compute.device == Device::Cpu { 1 << 26 } else { 1i64 << 30 };
    let from = Tensor::ones([numbers], (Kind::Int8, compute.device));
    let mut to = from.zeros_like();
    let mut round = |times: i32| {
        let started = Instant::now();
        (0..times).for_each(|_| to.copy_(&from));
        to.int64_value(&[0]);
        2.0 * f64::from(times) * numbers as f64 / started.elapsed().as_secs_f64()
    };
    round(3);
    round(20)
}

struct Generator<'a> {
    size: &'a Size,
    engine: LocalEngine,
    weights: Weights,
    answers: u64,
    version: u64,
}

impl<'a> Generator<'a> {
    /// The weights are on the device.
    fn new(size: &'a Size, weights: &Weights, tokenizer: &Arc<Tokenizer>, compute: Compute, answers: u64) -> Self {
        let decoder = Decoder::new(&size.model, weights.layout.clone());
        let engine = LocalEngine::new(decoder, tokenizer.clone(), answers as usize, 1).computing(compute);
        // Merged, as a trainer publishes them.
        let weights = if size.lora { weights.without_adapter().on(compute) } else { weights.on(compute) };
        Generator { size, engine, weights, answers, version: 0 }
    }

    /// Answers of up to `longest` tokens, and seconds.
    fn ask(&mut self, longest: usize) -> Result<(Vec<Finished>, f64)> {
        let params = SamplingParams { ignore_eos: true, ..SamplingParams::default() };
        self.version += 1;
        let started = Instant::now();
        self.engine.set_weights(self.version, &self.weights);
        for ordinal in 0..self.answers {
            let params = Arc::new(SamplingParams { max_new_tokens: length(longest, ordinal), ..params.clone() });
            let prompt: Vec<u32> = (0..self.size.prompt as u64).map(|at| ((ordinal * 7 + at * 13) % 60) as u32).collect();
            self.engine.submit(Request::new(ordinal, prompt, 1, params))?;
        }
        Ok((self.engine.run()?, started.elapsed().as_secs_f64()))
    }
}

/// Tokens of an answer: as ragged as rollouts are, from an eighth of `longest` on, and one of 16 to the end.
fn length(longest: usize, ordinal: u64) -> usize {
    let (share, whole) = (ordinal * 37 % 100, ordinal.is_multiple_of(16));
    if whole { longest } else { (longest * (12 + 88 * share as usize / 100)).div_ceil(100).max(1) }
}

/// Parameters that a step of so many sequences reads, where routers choose experts evenly. A tied embedding is the head's matrix, and of an untied one a
/// token reads a row. Of one sequence: those that each token is multiplied by.
fn multiplied(model: &ModelConfig, sequences: f64) -> f64 {
    let read_by_rows = if model.tied { 0 } else { model.vocab_size * model.hidden_size };
    let all = (Layout::new(model).total() - read_by_rows) as f64;
    let Some(experts) = &model.experts else { return all };
    let of_experts = (3 * experts.count * experts.width * model.hidden_size * model.layers()) as f64;
    let unused = (1.0 - experts.per_token as f64 / experts.count as f64).powf(sequences);
    all - of_experts * unused
}

/// Seconds that the limits allow for these answers.
fn least_seconds(size: &Size, finished: &[Finished], compute: Compute, reach: &Reach) -> f64 {
    let model = &size.model;
    let width = compute.dtype.kind().elt_size_in_bytes() as f64;
    let computed = multiplied(model, 1.0);
    let nets = model.delta.as_ref();
    let layers = model.layers() - nets.map_or(0, |of| of.layers.len());
    let position = (2 * layers * model.kv_heads * model.head_dim) as f64;
    // Read and written, in f32.
    let state = nets.map_or(0.0, |of| (8 * of.layers.len() * of.state_sizes()[1]) as f64);
    let longest = finished.iter().map(|answer| answer.tokens.len()).max().unwrap_or(0);
    let step = |at: usize| {
        let live = finished.iter().filter(|answer| answer.tokens.len() > at).count() as f64;
        let bytes = width * (multiplied(model, live) + live * (size.prompt + at) as f64 * position) + live * state;
        (bytes / reach.bytes).max(2.0 * computed * live / reach.operations)
    };
    (1..longest).map(step).sum()
}

/// A batch of all answers, and its tokens.
fn batch(size: &Size, answers: &[Finished]) -> Result<(Arc<rollflow::train::TrainBatch>, usize)> {
    let sample = |finished: &Finished| {
        let prompt = Prompt { ordinal: finished.ordinal, ..Prompt::default() };
        let mut sample = Sample::begin(&prompt, 0, &vec![5; size.prompt]);
        finished.tokens.iter().zip(&finished.log_probs).for_each(|(token, log_prob)| sample.push(*token, *log_prob, 1));
        sample.advantage = Some(if finished.ordinal.is_multiple_of(2) { 1.0 } else { -1.0 });
        sample
    };
    let samples: Vec<Sample> = answers.iter().map(sample).collect();
    let tokens = samples.iter().map(|sample| sample.tokens.len()).sum();
    Ok((Arc::new(collate(&samples, Aggregation::TokenMean)?), tokens))
}

fn trainer(size: &Size, weights: Weights, compute: Compute) -> Result<LocalBackend> {
    let started = Instant::now();
    let weights = if size.quantised { weights.quantised() } else { weights };
    if size.quantised {
        println!("in 4 bits   after {:.0} s", started.elapsed().as_secs_f64());
    }
    let config = LocalConfig {
        compute,
        micro_batch_tokens: 8192.max(size.prompt + size.answer),
        gradient_checkpointing: size.lora,
        ..LocalConfig::new(Grpo::default(), Schedule::constant(1e-6))
    };
    Ok(LocalBackend::new(config, size.model.clone(), weights)?)
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
