//! A reward of your own: any function from a sample to a number.
//!
//! A tiny model with random weights babbles; it is rewarded for digits, and within seconds it writes nothing else. What a reward sees is
//! the whole sample: prompt, response, tokens, status and the prompt's metadata. One that panics or gives NaN is called
//! again, and then costs its group unless `on_failure` says otherwise, as here.
//!
//!     cargo run --release --example custom_reward

use rollflow::data::DataBuffer;
use rollflow::model::ModelConfig;
use rollflow::prelude::*;
use rollflow::stages::reward::OnFailure;

const SEED: u64 = 7;
const GROUPS_PER_STEP: usize = 8;

/// The share of the response that is digits.
fn digits(sample: &Sample) -> f64 {
    let digits = sample.response.chars().filter(char::is_ascii_digit).count();
    digits as f64 / sample.response.chars().count().max(1) as f64
}

fn main() -> anyhow::Result<()> {
    let tokenizer = Tokenizer::characters("0123456789 abcdefghijklmnopqrstuvwxyz:", 42)?;
    let policy = Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, SEED)?;
    let prompts = Prompts::new(DataBuffer::new(["a number:", "my phone:", "pi:", "the year:"], SEED)?);

    let backend = policy.backend(LocalConfig::new(Grpo::default(), Schedule::constant(3e-3)))?;
    let log = RunLog::new(&Metrics::new()).logger(log_to_console(5, |line| println!("{line}")));

    let mut flow = Flow::new("digits").max_staleness(1);
    let prompts = flow.source("prompts", prompts);
    let generator = Generator::local(&policy).group_size(8).max_new_tokens(12);
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(digits).on_failure(OnFailure::Zero));
    let batches = flow.stage("batch", scored, Batcher::groups(GROUPS_PER_STEP));
    flow.tap(&batches, 10, |batch: &Batch| {
        for sample in batch.samples().take(2) {
            println!("  {:?} → {:?}", sample.prompt.render(), sample.response);
        }
    });
    let trainer = Trainer::new(backend).advantages(GroupMean::default()).steps(40);
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::default());
    flow.sink("log", synced, log);

    let report = flow.run(Until::finished())?;
    println!("\n{report}");
    Ok(())
}
