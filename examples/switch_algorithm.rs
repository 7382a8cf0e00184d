//! Another algorithm from a step on: GRPO first, then DAPO's wider upper clip and token mean at a lower learning rate.
//!
//! `Trainer::per_step` takes a function of the step's number. Nothing else in the graph changes, and nothing stops for it: completions that are in
//! flight are trained by the algorithm of the step that takes them. A resumed run does the same, since the step's number decides.
//!
//!     cargo run --release --example switch_algorithm

use std::sync::Arc;

use rollflow::algo::Advantage;
use rollflow::data::DataBuffer;
use rollflow::model::ModelConfig;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::stages::train::StepConfig;
use rollflow::train::Algorithm;

const SEED: u64 = 7;
const STEPS: u64 = 30;
const DAPO_FROM: u64 = 16;
const GROUPS_PER_STEP: usize = 8;

/// How this step is trained.
fn algorithm(step: u64) -> StepConfig {
    let dapo = step >= DAPO_FROM;
    let high = if dapo { 0.28 } else { 0.2 };
    let loss = Grpo { epsilon_high: high, ..Grpo::default() };
    StepConfig {
        advantages: Some(Arc::new(Advantage::default())),
        algorithm: Some(Arc::new(Algorithm::new(loss))),
        aggregation: if dapo { Aggregation::TokenMean } else { Aggregation::SeqMeanTokenMean },
        schedule: Some(Schedule::constant(if dapo { 2e-3 } else { 4e-3 })),
        // Written down with what was measured.
        settings: [("setting_clip_high".to_owned(), high)].into(),
        ..StepConfig::default()
    }
}

/// The share of the completion that is digits.
fn digits(sample: &Sample) -> f64 {
    let digits = sample.response.chars().filter(char::is_ascii_digit).count();
    digits as f64 / sample.response.chars().count().max(1) as f64
}

fn main() -> anyhow::Result<()> {
    let tokenizer = Tokenizer::characters("0123456789 abcdefghijklmnopqrstuvwxyz:", 42)?;
    let policy = Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, SEED)?;
    let backend = policy.backend(LocalConfig::new(Grpo::default(), Schedule::constant(0.0)))?;

    let mut flow = Flow::new("switch").max_staleness(1);
    let prompts = Prompts::new(DataBuffer::new(["a number:", "my phone:", "pi:", "the year:"], SEED)?);
    let prompts = flow.source("prompts", prompts);
    let generator = Generator::local(&policy).group_size(8).max_new_tokens(12);
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(digits));
    let kept = flow.stage("filter", scored, Filter::by(filters::nonzero_std));
    let batches = flow.stage("batch", kept, Batcher::groups(GROUPS_PER_STEP));
    let trainer = Trainer::new(backend).per_step(|step| Ok(algorithm(step))).steps(STEPS);
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::default());

    let metrics = Metrics::new();
    let served = metrics.serve("127.0.0.1:0", &flow)?;
    println!("metrics for Prometheus: http://{}/metrics", served.address());
    let log = RunLog::new(&metrics).logger(|step: u64, row: &StepMetrics| {
        if step.is_multiple_of(5) {
            let of = |name: &str| row.get(name).copied().unwrap_or(f64::NAN);
            println!("step {step}: reward {:.3}, upper clip {}", of("reward_mean"), of("setting_clip_high"));
        }
    });
    flow.sink("log", synced, log);

    println!("\n{}", flow.run(Until::finished())?);
    Ok(())
}
