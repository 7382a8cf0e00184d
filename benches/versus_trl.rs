//! Steps and trained tokens a second of whole GRPO and SFT runs, as one JSON line, to be held against TRL by `scripts/versus_trl.sh`.
//!
//! `cargo bench --bench versus_trl -- grpo|grpo_sync|sft [MODEL_DIR] [STEPS] [ROWS LENGTH]`. The work is that of `benches/trl_side.py`: GRPO takes
//! 8 prompts × 8 samples of at most 16 new tokens, with a staleness of at most one version (`grpo`) or none (`grpo_sync`). SFT takes the sequences of `data.jsonl` in the model's folder, packed by best fit into rows of LENGTH tokens, of
//! which a step takes ROWS (64 rows of 64 tokens unless told otherwise). Without a folder, a fresh model of hidden size 128 and 4 layers, and ragged
//! sequences.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rollflow::data::packing::{OverlongPolicy, Packing, pack};
use rollflow::data::{Tokenizer, arithmetic};
use rollflow::flow::Report;
use rollflow::model::{FrozenWeights, ModelConfig};
use rollflow::prelude::*;
use rollflow::rollout::Admission;

/// Steps left out of the timing, or a fifth of them if there are few.
const WARM_UP: u64 = 10;

fn warm_up(steps: u64) -> u64 {
    WARM_UP.min(steps / 5)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let policy = match args.get(1).filter(|dir| !dir.is_empty()) {
        Some(dir) => Policy::load(PathBuf::from(dir))?,
        None => fresh()?,
    };
    let steps = args.get(2).map_or(Ok(200), |steps| steps.parse()).context("STEPS is a number")?;
    match args.first().map(String::as_str) {
        None | Some("grpo") => grpo(&policy, steps, 1),
        Some("grpo_sync") => grpo(&policy, steps, 0),
        Some("sft") => {
            let size = |at: usize| args.get(at).map_or(Ok(64), |size| size.parse()).context("ROWS and LENGTH are numbers");
            sft(&policy, args.get(1).filter(|dir| !dir.is_empty()), steps, (size(3)?, size(4)?))
        }
        Some(other) => bail!("{other}: give grpo, grpo_sync or sft"),
    }
}

/// With a `staleness` of 1 generation overlaps training: one thread generates, two train, and the system shares the cores among them.
fn grpo(policy: &Policy, steps: u64, staleness: u64) -> Result<()> {
    let admission = Admission::new(8, 8 * (1 + staleness), Some(8 * steps)).bounded(staleness);
    let backend =
        policy.backend(LocalConfig { threads: Some(2), ..LocalConfig::new(Grpo::default(), Schedule::constant(1e-4)) })?;
    let clock = Clock::default();

    let mut flow = Flow::new("grpo").admission(&admission);
    let prompts = flow.source("prompts", Prompts::addition(1, 0)?);
    let groups = flow.stage("generate", prompts, Generator::local(policy).group_size(8).max_new_tokens(16));
    let scored = flow.stage("reward", groups, Reward::each(first_digit));
    let batches = flow.stage("batch", scored, Batcher::groups(8));
    let trainer = Trainer::new(backend).advantages(GroupMean::default()).aggregation(Aggregation::SeqMeanTokenMean);
    let trained = flow.stage("train", batches, trainer.steps(steps));
    let synced = flow.stage("sync", trained, WeightSync::default());
    flow.sink("time", synced, clock.sink());
    let report = flow.run(Until::finished())?;
    clock.print("grpo", steps, &report);
    Ok(())
}

/// 1.0 for the right sum, 0.1 for a digit to begin with: TRL's side earns the same.
fn first_digit(sample: &Sample) -> f64 {
    let answer = sample.answer().unwrap_or_default();
    match sample.response.chars().next() {
        _ if sample.response.trim() == answer => 1.0,
        Some(first) if first.is_ascii_digit() => 0.1,
        _ => 0.0,
    }
}

/// Training alone, on two threads.
fn sft(policy: &Policy, folder: Option<&String>, steps: u64, (rows, length): (usize, usize)) -> Result<()> {
    let sequences = match folder {
        Some(folder) => sequences(&PathBuf::from(folder).join("data.jsonl"))?,
        None => drawn(policy.config().vocab_size as u64, length as u64),
    };
    let samples = sequences.into_iter().map(|tokens| Sample::supervised(&tokens[..1], &tokens[1..]));
    let packed = pack(samples.collect(), length, Packing::BestFit, OverlongPolicy::Truncate).teaching();
    let packed = arithmetic::split(&packed.rows, 1.0, 0).0;
    let backend = policy.backend(LocalConfig { threads: Some(2), ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-3)) })?;
    let clock = Clock::default();

    let mut flow = Flow::new("sft");
    let batches = flow.source("samples", Supervised::grouped("SFT", packed, rows, steps)?);
    let trained = flow.stage("train", batches, Trainer::new(backend).steps(steps).sync_every(u64::MAX).threads(2));
    flow.sink("time", trained, clock.sink());
    let report = flow.run(Until::finished())?;
    clock.print("sft", steps, &report);
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

/// When each step ended, and how many tokens were trained by then.
#[derive(Clone, Default)]
struct Clock(Arc<Mutex<Vec<(Instant, usize)>>>);

impl Clock {
    fn sink(&self) -> impl FnMut(Trained<FrozenWeights>) + Send + 'static {
        let ends = self.0.clone();
        move |step| {
            let mut ends = ends.lock().expect("nobody panics with it");
            let before = ends.last().map_or(0, |(_, tokens)| *tokens);
            ends.push((Instant::now(), before + step.forward.tokens));
        }
    }

    fn print(&self, what: &str, steps: u64, report: &Report) {
        let ends = self.0.lock().expect("nobody panics with it");
        let warm_up = warm_up(steps) as usize;
        let (first, last) = (ends[warm_up], ends[ends.len() - 1]);
        let (seconds, counted) = ((last.0 - first.0).as_secs_f64(), ends.len() - 1 - warm_up);
        eprintln!("{report}");
        println!(
            "{{\"what\": \"{what}\", \"steps_per_s\": {:.3}, \"s_per_step\": {:.4}, \"trained_tokens_per_s\": {:.0}}}",
            counted as f64 / seconds,
            seconds / counted as f64,
            (last.1 - first.1) as f64 / seconds,
        );
    }
}

fn fresh() -> Result<Policy> {
    let tokenizer = Tokenizer::characters("0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n", 64)?;
    Ok(Policy::random(ModelConfig::small(&tokenizer, 128, 4), tokenizer, 0)?)
}
