//! GRPO with a KL penalty: a frozen copy of the policy scores every sampled token, and the loss is larger the further the policy moves from it.
//!
//! The stage `reference` works alongside generator and trainer. A reward that pulls the policy far away is followed less with a larger coefficient β.
//!
//!     cargo run --release --example kl_reference

use rollflow::algo::{KlForm, with_kl};
use rollflow::data::DataBuffer;
use rollflow::model::ModelConfig;
use rollflow::prelude::*;

const SEED: u64 = 7;
const STEPS: u64 = 20;
const GROUPS_PER_STEP: usize = 8;

/// The share of the completion that is digits.
fn digits(sample: &Sample) -> f64 {
    let digits = sample.response.chars().filter(char::is_ascii_digit).count();
    digits as f64 / sample.response.chars().count().max(1) as f64
}

/// Trains with this coefficient; prints the reward and the distance from the reference as they change.
fn train(beta: f64) -> anyhow::Result<()> {
    println!("\nβ = {beta}");
    let tokenizer = Tokenizer::characters("0123456789 abcdefghijklmnopqrstuvwxyz:", 42)?;
    let policy = Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, SEED)?;
    // The estimate that TRL's GRPO uses, for each token: exp(−d) − 1 + d, where d is the difference of the log-probabilities.
    let loss = with_kl(Grpo::default(), beta, KlForm::K3);
    let backend = policy.backend(LocalConfig::new(loss, Schedule::constant(3e-3)))?;
    // It scores as the trainer does, and trains nothing.
    let reference = Reference::local(&policy, LocalConfig::new(CrossEntropy, Schedule::constant(0.0)));

    let mut flow = Flow::new("kl").max_staleness(1);
    let prompts = Prompts::new(DataBuffer::new(["a number:", "my phone:", "pi:", "the year:"], SEED)?);
    let prompts = flow.source("prompts", prompts);
    let generator = Generator::local(&policy).group_size(8).max_new_tokens(12);
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(digits));
    let referenced = flow.stage("reference", scored, reference);
    let batches = flow.stage("batch", referenced, Batcher::groups(GROUPS_PER_STEP));
    let trainer = Trainer::new(backend).advantages(GroupMean::default()).steps(STEPS);
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::default());
    let log = RunLog::new(&Metrics::new()).each(|step: &Trained<_>| {
        if step.step.is_multiple_of(5) {
            let rewards: Vec<f64> = step.batch.rewards().collect();
            let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
            println!("step {}: reward {mean:.3}, KL {:.4} a token", step.step, step.forward.metrics.kl());
        }
    });
    flow.sink("log", synced, log);
    flow.run(Until::finished())?;
    Ok(())
}

fn main() -> anyhow::Result<()> {
    train(0.01)?;
    train(1.0)
}
