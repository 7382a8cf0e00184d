//! Every decision of the loop as a closure: what an answer earns, which groups are trained on, what an advantage is, what the loss is, how fast
//! it is learned and what is written down. The stages stay the same: `custom_stage` has one of your own, and `by_hand` calls the same functions
//! without a graph.
//!
//!     cargo run --release --example custom_everything

use rollflow::algo::filters::{GroupFilter, Verdict};
use rollflow::algo::rewards::{Aggregator, Parts};
use rollflow::algo::{AdvantageError, LossError, LossInputs, LossOutput, ScoredGroup};
use rollflow::data::DataBuffer;
use rollflow::model::ModelConfig;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;

const SEED: u64 = 7;
const GROUPS_PER_STEP: usize = 8;

/// Two objectives, each visible by itself: digits, and not too many of the same.
fn reward() -> Parts {
    let distinct = |sample: &Sample| {
        let seen: std::collections::HashSet<char> = sample.response.chars().collect();
        seen.len() as f64 / sample.response.chars().count().max(1) as f64
    };
    let digits = |sample: &Sample| {
        let digits = sample.response.chars().filter(char::is_ascii_digit).count();
        digits as f64 / sample.response.chars().count().max(1) as f64
    };
    Parts::new(Aggregator::weighted([1.0, 0.2])).part("digits", digits).part("distinct", distinct)
}

/// Groups with a success, or at least with different completions.
fn worth_it(group: &Group) -> Verdict {
    let rewards = group.rewards();
    Verdict::keep_if(rewards.iter().any(|reward| *reward != rewards[0]), "all_the_same")
}

/// How far a reward is above the median of its group.
fn above_median(groups: &[ScoredGroup]) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let of = |group: &ScoredGroup| {
        let mut sorted = group.rewards.to_vec();
        sorted.sort_by(f64::total_cmp);
        group.rewards.iter().map(|reward| reward - sorted[sorted.len() / 2]).collect()
    };
    Ok(groups.iter().map(of).collect())
}

/// A log-probability weighed by its advantage, and no ratio: the derivative is derived by hand, and no tensor is touched.
fn reinforce(inputs: &LossInputs) -> Result<LossOutput, LossError> {
    let grad: Vec<f64> = inputs.advantages.iter().zip(inputs.weights).map(|(advantage, weight)| -advantage * weight).collect();
    let loss = grad.iter().zip(inputs.log_probs).map(|(slope, log_prob)| slope * log_prob).sum();
    Ok(LossOutput::new(loss, grad))
}

fn main() -> anyhow::Result<()> {
    let tokenizer = Tokenizer::characters("0123456789 abcdefghijklmnopqrstuvwxyz:", 42)?;
    let policy = Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, SEED)?;
    let prompts = Prompts::new(DataBuffer::new(["a number:", "my phone:", "pi:", "the year:"], SEED)?);
    let backend = policy.backend(LocalConfig::new(reinforce, Schedule::constant(3e-3)))?;

    let log = RunLog::new(&Metrics::new()).logger(|step: u64, row: &StepMetrics| {
        if step.is_multiple_of(5) {
            println!("step {step}: reward {:.3}", row.get("reward_mean").copied().unwrap_or(f64::NAN));
        }
    });

    let mut flow = Flow::new("custom").max_staleness(1);
    let prompts = flow.source("prompts", prompts);
    let generator = Generator::local(&policy).group_size(8).max_new_tokens(8);
    let groups = flow.stage("generate", prompts, generator);
    let parts = reward();
    let scored = flow.stage("reward", groups, Reward::each(move |sample: &Sample| parts.reward(sample)));
    let kept = flow.stage("filter", scored, Filter::by(worth_it.and(filters::min_reward(0.0)?)));
    let batches = flow.stage("batch", kept, Batcher::groups(GROUPS_PER_STEP));
    let trainer = Trainer::new(backend).advantages(above_median).aggregation(Aggregation::TokenMean).steps(20);
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::default());
    flow.sink("log", synced, log);

    let report = flow.run(Until::finished())?;
    println!("\n{report}");
    Ok(())
}
