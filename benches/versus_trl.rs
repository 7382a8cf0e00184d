//! Steps and trained tokens a second of whole GRPO and SFT runs, as one JSON line, to be held against TRL by `scripts/versus_trl.sh`.
//!
//! `cargo bench --bench versus_trl -- grpo|grpo_sync|sft [MODEL] [STEPS] [LENGTH] [ROWS]`. The work is that of `benches/trl_side.py`: GRPO takes 8 prompts × 8
//! samples of at most LENGTH new tokens (16 unless told otherwise), with a staleness of at most one version (`grpo`) or none (`grpo_sync`). SFT takes the
//! sequences of `data.jsonl` in the model's folder, packed by best fit into rows of LENGTH tokens (64), of which a step takes ROWS (64). MODEL is a folder, or a
//! fresh model: `tiny`, or `mid` with 28 million parameters, which then trains on ragged sequences. `MODEL@bf16` computes in bf16.
//!
//! `matrix_share` is the run's share of the machine's matrix rate: two operations a parameter and generated token and six a trained one, the head's for
//! sampled tokens alone, against products of 1024 × 1024 on all cores, the better of before and after the run. Attention's own operations are left out.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rollflow::data::packing::{OverlongPolicy, Packing, pack};
use rollflow::data::{Tokenizer, arithmetic};
use rollflow::flow::Report;
use rollflow::model::{Compute, Dtype, FrozenWeights, Layout, ModelConfig};
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use tch::Tensor;

/// Steps left out of the timing, or a fifth of them if there are few.
const WARM_UP: u64 = 10;

fn warm_up(steps: u64) -> u64 {
    WARM_UP.min(steps / 5)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let arg = |at: usize, default: &'static str| args.get(at).map_or(default, String::as_str);
    let number = |at: usize, default: &'static str| {
        arg(at, default).parse::<usize>().with_context(|| format!("{}: STEPS, LENGTH and ROWS are numbers", arg(at, default)))
    };
    let (model, format) = arg(1, "tiny").split_once('@').unwrap_or((arg(1, "tiny"), "f32"));
    let dtype =
        Dtype::ALL.iter().copied().find(|dtype| dtype.word() == format).with_context(|| format!("{format}: no format"))?;
    let (policy, folder) = match model {
        "tiny" => (fresh(64, 128, 4)?, None),
        "mid" => (fresh(8192, 512, 8)?, None),
        folder => (Policy::load(PathBuf::from(folder))?, Some(folder)),
    };
    let policy = policy.computing(Compute::cpu(dtype));
    let steps = number(2, "200")? as u64;
    match arg(0, "grpo") {
        "grpo" => grpo(&policy, steps, 1, number(3, "16")?),
        "grpo_sync" => grpo(&policy, steps, 0, number(3, "16")?),
        "sft" => sft(&policy, folder, steps, (number(4, "64")?, number(3, "64")?)),
        other => bail!("{other}: give grpo, grpo_sync or sft"),
    }
}

fn backend(policy: &Policy, config: LocalConfig) -> Result<LocalBackend> {
    Ok(policy.backend(LocalConfig { compute: policy.compute(), ..config })?)
}

/// With a `staleness` of 1 generation overlaps training, and the system shares the cores among their threads.
fn grpo(policy: &Policy, steps: u64, staleness: u64, length: usize) -> Result<()> {
    let admission = Admission::new(8, 8 * (1 + staleness), Some(8 * steps)).bounded(staleness);
    let backend = backend(policy, LocalConfig::new(Grpo::default(), Schedule::constant(1e-4)))?;
    let clock = Clock::new(8.0);

    let mut flow = Flow::new("grpo").admission(&admission);
    let prompts = flow.source("prompts", Prompts::addition(1, 0)?);
    let groups = flow.stage("generate", prompts, Generator::local(policy).group_size(8).max_new_tokens(length));
    let scored = flow.stage("reward", groups, Reward::each(first_digit));
    let batches = flow.stage("batch", scored, Batcher::groups(8));
    let trainer = Trainer::new(backend).advantages(GroupMean::default()).aggregation(Aggregation::SeqMeanTokenMean);
    let trained = flow.stage("train", batches, trainer.steps(steps));
    let synced = flow.stage("sync", trained, WeightSync::default());
    flow.sink("time", synced, clock.sink());
    let report = flow.run(Until::finished())?;
    clock.print("grpo", policy.config(), steps, &report);
    Ok(())
}

/// 1.0 for the right sum, 0.1 for a digit to begin with, 0.01 for every second of the other answers: rewards of a group differ, so that all of it
/// is trained on. TRL's side gives the same.
fn first_digit(sample: &Sample) -> f64 {
    let answer = sample.answer().unwrap_or_default();
    match sample.response.chars().next() {
        _ if sample.response.trim() == answer => 1.0,
        Some(first) if first.is_ascii_digit() => 0.1,
        _ => 0.01 * f64::from(sample.index % 2),
    }
}

/// Training alone.
fn sft(policy: &Policy, folder: Option<&str>, steps: u64, (rows, length): (usize, usize)) -> Result<()> {
    let sequences = match folder {
        Some(folder) => sequences(&PathBuf::from(folder).join("data.jsonl"))?,
        None => drawn(policy.config().vocab_size as u64, length as u64),
    };
    let samples = sequences.into_iter().map(|tokens| Sample::supervised(&tokens[..1], &tokens[1..]));
    let packed = pack(samples.collect(), length, Packing::BestFit, OverlongPolicy::Truncate).teaching();
    let packed = arithmetic::split(&packed.rows, 1.0, 0).0;
    let backend = backend(policy, LocalConfig::new(CrossEntropy, Schedule::constant(1e-3)))?;
    let clock = Clock::new(6.0);

    let mut flow = Flow::new("sft");
    let batches = flow.source("samples", Supervised::grouped("SFT", packed, rows, steps)?);
    let trained = flow.stage("train", batches, Trainer::new(backend).steps(steps).sync_every(u64::MAX));
    flow.sink("time", trained, clock.sink());
    let report = flow.run(Until::finished())?;
    clock.print("sft", policy.config(), steps, &report);
    Ok(())
}

/// Token ids, a list a line.
fn sequences(file: &Path) -> Result<Vec<Vec<u32>>> {
    let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

/// Sequences of a quarter of `length` tokens to all of it.
fn drawn(vocabulary: u64, length: u64) -> Vec<Vec<u32>> {
    let draw = |i: u64, below: u64| i.wrapping_mul(6_364_136_223_846_793_005).rotate_left(17) % below;
    let token = |i: u64| (4 + draw(i, vocabulary - 4)) as u32;
    let tokens = |s: u64| length / 4 + draw(s + 1, length - length / 4 + 1);
    (0..8192).map(|s| (0..tokens(s).max(2)).map(|t| token(length * s + t)).collect()).collect()
}

/// When each step ended, and which tokens were read and trained by then.
#[derive(Clone)]
struct Clock {
    ends: Arc<Mutex<Vec<(Instant, usize, usize)>>>,
    /// Operations a parameter and token.
    operations: f64,
    /// The machine's, a second.
    rate: f64,
}

impl Clock {
    fn new(operations: f64) -> Self {
        Clock { ends: Arc::default(), operations, rate: matrix_rate() }
    }

    fn sink(&self) -> impl FnMut(Trained<FrozenWeights>) + Send + 'static {
        let ends = self.ends.clone();
        move |step| {
            let mut ends = ends.lock().expect("no thread panics while it holds the ends");
            let (read, trained) = ends.last().map_or((0, 0), |(_, read, trained)| (*read, *trained));
            ends.push((Instant::now(), read + step.forward.input_tokens, trained + step.forward.tokens));
        }
    }

    fn print(&self, what: &str, model: &ModelConfig, steps: u64, report: &Report) {
        let ends = self.ends.lock().expect("no thread panics while it holds the ends");
        let warm_up = warm_up(steps) as usize;
        let (first, last) = (ends[warm_up], ends[ends.len() - 1]);
        let (seconds, counted) = ((last.0 - first.0).as_secs_f64(), ends.len() - 1 - warm_up);
        let (read, trained) = ((last.1 - first.1) as f64, (last.2 - first.2) as f64);
        let head = (model.vocab_size * model.hidden_size) as f64;
        let layers = Layout::new(model).total() as f64 - if model.tied { head } else { 2.0 * head };
        let rate = self.rate.max(matrix_rate());
        eprintln!("{report}");
        println!(
            "{{\"what\": \"{what}\", \"steps_per_s\": {:.3}, \"s_per_step\": {:.4}, \"trained_tokens_per_s\": {:.0}, \"matrix_share\": {:.3}, \"gflops\": {:.0}}}",
            counted as f64 / seconds,
            seconds / counted as f64,
            trained / seconds,
            self.operations * (layers * read + head * trained) / seconds / rate,
            rate / 1e9,
        );
    }
}

/// Operations a second in products of square matrices, on all cores. The thread that measures ends, and its helpers
/// with it: they would slow the run.
fn matrix_rate() -> f64 {
    let measured = || {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        tch::set_num_threads(cores as i32);
        let edge = 1024;
        let (a, b) = (Tensor::randn([edge, edge], tch::kind::FLOAT_CPU), Tensor::randn([edge, edge], tch::kind::FLOAT_CPU));
        let product = || {
            let started = Instant::now();
            let _product = a.matmul(&b);
            2.0 * (edge as f64).powi(3) / started.elapsed().as_secs_f64()
        };
        let mut rates: Vec<f64> = (0..40).map(|_| product()).collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    std::thread::spawn(measured).join().expect("products of square matrices don't panic")
}

fn fresh(vocabulary: usize, hidden: usize, layers: usize) -> Result<Policy> {
    let tokenizer = Tokenizer::characters("0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n", vocabulary)?;
    Ok(Policy::random(ModelConfig::small(&tokenizer, hidden, layers), tokenizer, 0)?)
}
