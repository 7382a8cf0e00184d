//! GRPO as a graph, declared from its parts: a tiny model learns to add.
//!
//! The graph reads as the algorithm does: prompts are answered eight times each, answers earn rewards, groups that teach nothing are
//! dropped, the rest is trained on, and new weights flow back to the generator while it already answers the next prompts.
//!
//!     cargo run --release --example grpo_from_scratch

use rollflow::algo::rewards::exact_match;
use rollflow::data::arithmetic;
use rollflow::model::ModelConfig;
use rollflow::observe::Console;
use rollflow::prelude::*;
use rollflow::train::SftConfig;
use rollflow::train::run_sft_training;

const SEED: u64 = 0;
const STEPS: u64 = 150;
const GROUPS_PER_STEP: usize = 32;

fn main() -> anyhow::Result<()> {
    Console::default().install()?;
    let tokenizer = Tokenizer::characters("0123456789+=", 16)?;
    let untrained = Policy::random(ModelConfig::small(&tokenizer, 128, 2), tokenizer, SEED)?;
    let policy = warm_up(&untrained)?;

    let backend = policy.backend(LocalConfig::new(Grpo::default(), Schedule::constant(5e-4)))?;
    let log = RunLog::new(&Metrics::new()).logger(log_to_console(10, |line| tracing::info!("{line}")));

    // Samples are trained at most one weight version after they were sampled.
    let mut flow = Flow::new("grpo").max_staleness(1);
    let prompts = flow.source("prompts", Prompts::addition(1, SEED)?);
    let generator = Generator::local(&policy).group_size(8).max_new_tokens(3);
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(right));
    let kept = flow.stage("filter", scored, Filter::by(filters::nonzero_std));
    let batches = flow.stage("batch", kept, Batcher::groups(GROUPS_PER_STEP));
    let trainer = Trainer::new(backend).advantages(GroupMean::default()).steps(STEPS);
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::default().log_every(10));
    flow.sink("log", synced, log);

    let report = flow.run(Until::finished())?;
    println!("\n{report}");
    Ok(())
}

/// 1 for the right sum, ended by the end-of-text token; else 0.
fn right(sample: &Sample) -> f64 {
    let answer = sample.metadata["answer"].as_str().unwrap_or_default();
    if sample.status == Status::Completed { exact_match(&sample.response, answer) } else { 0.0 }
}

/// A little supervised training first: a policy that is never right has nothing to reinforce.
fn warm_up(policy: &Policy) -> anyhow::Result<Policy> {
    let backend = policy.backend(LocalConfig::new(CrossEntropy, Schedule::constant(2e-3)))?;
    let samples = policy.supervised(&arithmetic::split(&arithmetic::addition(1), 1.0, SEED).0)?;
    let config = SftConfig { num_steps: 30, batch_size: 64, log_every: 10, ..SftConfig::default() };
    run_sft_training(&backend, &samples, &config, |_, _| {})?;
    Ok(policy.with_weights(backend.snapshot().wait()?.weights))
}
