//! That it learns, and that it learns from the reward alone: with the same rewards dealt out to the wrong samples it does not.
//!
//! Seeded and synchronous (law V3), so that a run is the same every time on one machine; margins allow for another one's rounding.

use std::sync::{Arc, Mutex};

use rollflow::algo::rewards::exact_match;
use rollflow::algo::{PolicyLoss, ValueLoss};
use rollflow::data::DataBuffer;
use rollflow::data::arithmetic;
use rollflow::model::ModelConfig;
use rollflow::observe::Metric;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::stages::train::Critic;
use rollflow::train::SftConfig;
use rollflow::train::run_sft_training;

const SEED: u64 = 3;

struct Task {
    policy: Policy,
    prompts: Prompts,
    reward: fn(&Sample) -> f64,
    lr: f64,
    groups: usize,
    new_tokens: usize,
    steps: u64,
    /// One answer to a prompt, and a critic to compare it with.
    critic: bool,
    /// Deals the rewards of a batch out anew before it is trained on.
    shuffled: bool,
}

impl Task {
    /// Mean rewards of all samples, step by step.
    fn learn(self) -> Vec<f64> {
        let (publisher, published) = weights();
        let admission = Admission::max_staleness(0, self.groups);
        // A policy that is sure of itself too early has no siblings to correct it.
        let loss = PolicyLoss { entropy_coef: if self.critic { 0.02 } else { 0.0 }, ..PolicyLoss::default() };
        let config = LocalConfig { threads: Some(1), ..LocalConfig::new(loss, Schedule::constant(self.lr)) };
        let generator = Generator::local(&self.policy)
            .weights(published)
            .group_size(if self.critic { 1 } else { 8 })
            .max_new_tokens(self.new_tokens)
            .slots(256)
            .seed(SEED);
        let trainer = Trainer::new(self.policy.backend(config).unwrap()).steps(self.steps);
        let trainer = if self.critic {
            let value = LocalConfig::new(ValueLoss { clip: Some(0.2) }, Schedule::constant(2.0 * self.lr));
            let critic = self.policy.critic(LocalConfig { threads: Some(1), ..value }).unwrap();
            let trainer = trainer.critic(Critic { warm_up: 3, ..Critic::new(critic) });
            trainer.configure(|config| (config.ppo_epochs, config.minibatches, config.minibatch_seed) = (2, 2, SEED))
        } else {
            trainer.advantages(GroupMean::default())
        };
        let curve: Arc<Mutex<Vec<f64>>> = Arc::default();
        let seen = Arc::clone(&curve);

        let mut flow = Flow::new("learning").admission(&admission);
        let prompts = flow.source("prompts", self.prompts);
        let groups = flow.stage("generate", prompts, generator);
        let scored = flow.stage("reward", groups, Reward::each(self.reward));
        let batches = flow.stage("batch", scored, Batcher::groups(self.groups));
        let batches = flow.stage("deal", batches, map(move |batch| if self.shuffled { deal_anew(batch) } else { batch }));
        let trained = flow.stage("train", batches, trainer);
        let synced = flow.stage("sync", trained, WeightSync::to(publisher));
        let log = RunLog::new(&Metrics::new())
            .logger(move |_: u64, row: &StepMetrics| seen.lock().unwrap().push(row[Metric::RewardMean.key()]));
        flow.sink("log", synced, log);
        flow.run(Until::finished()).unwrap();
        std::mem::take(&mut *curve.lock().unwrap())
    }
}

/// The same rewards, each for the sample that lies 7·(batch + 1) places further: as many are right, but not those that were.
fn deal_anew(mut batch: Batch) -> Batch {
    let mut rewards: Vec<Option<f64>> = batch.samples().map(|sample| sample.reward).collect();
    let number = batch.groups[0].id() as usize / batch.groups.len();
    let by = 7 * (number + 1) % rewards.len();
    rewards.rotate_right(by.max(1));
    let samples = batch.groups.iter_mut().flat_map(|group| &mut group.samples);
    samples.zip(rewards).for_each(|(sample, reward)| sample.reward = reward);
    batch
}

fn policy(characters: &str, vocab: usize, hidden: usize) -> Policy {
    let tokenizer = Tokenizer::characters(characters, vocab).unwrap();
    Policy::random(ModelConfig::small(&tokenizer, hidden, 2), tokenizer, SEED).unwrap()
}

/// Single-digit sums, after a warm-up that leaves most of them to be found.
fn addition(shuffled: bool) -> Task {
    let policy = policy("0123456789+=", 16, 128);
    let config = LocalConfig { threads: Some(1), ..LocalConfig::new(CrossEntropy, Schedule::constant(2e-3)) };
    let backend = policy.backend(config).unwrap();
    let samples = policy.supervised(&arithmetic::split(&arithmetic::addition(1), 1.0, SEED).0).unwrap();
    let config = SftConfig { num_steps: 30, batch_size: 64, ..SftConfig::default() };
    run_sft_training(&backend, &samples, &config, |_, _| {}).unwrap();
    let reward = |sample: &Sample| match sample.status {
        Status::Completed => exact_match(&sample.response, sample.metadata["answer"].as_str().unwrap()),
        _ => 0.0,
    };
    let policy = policy.with_weights(backend.snapshot().wait().unwrap().weights);
    let prompts = Prompts::addition(1, SEED).unwrap();
    Task { policy, prompts, reward, lr: 5e-4, groups: 32, new_tokens: 3, steps: 100, critic: false, shuffled }
}

fn mean(rewards: &[f64]) -> f64 {
    rewards.iter().sum::<f64>() / rewards.len() as f64
}

/// Mean rewards of the first and the last ten steps.
fn first_and_last(curve: &[f64]) -> (f64, f64) {
    (mean(&curve[..10]), mean(&curve[curve.len() - 10..]))
}

#[test]
fn grpo_learns_to_add() {
    let curve = addition(false).learn();
    let (first, last) = first_and_last(&curve);
    println!("first {first:.3}, last {last:.3}");
    assert!(last > first + 0.12, "first {first:.3}, last {last:.3}: {curve:?}");
}

#[test]
fn ppo_learns_to_add_from_one_answer_to_a_prompt() {
    let task = Task { critic: true, groups: 256, steps: 40, ..addition(false) };
    let (first, last) = first_and_last(&task.learn());
    println!("first {first:.3}, last {last:.3}");
    assert!(last > first + 0.12, "first {first:.3}, last {last:.3}");
}

#[test]
fn shuffled_rewards_teach_nothing() {
    let curve = addition(true).learn();
    let (untrained, last) = (curve[0], mean(&curve[curve.len() - 10..]));
    println!("untrained {untrained:.3}, last {last:.3}");
    assert!(last < untrained + 0.06, "untrained {untrained:.3}, last {last:.3}: {curve:?}");
}

#[test]
fn a_toy_reward_is_raised_to_near_its_maximum_from_random_weights() {
    let reward = |sample: &Sample| {
        let digits = sample.response.chars().filter(char::is_ascii_digit).count();
        digits as f64 / sample.response.chars().count().max(1) as f64
    };
    let task = Task {
        policy: policy("0123456789 abcdefghijklmnopqrstuvwxyz:", 42, 32),
        prompts: Prompts::new(DataBuffer::new(["a number:", "pi:"], SEED).unwrap()),
        reward,
        lr: 3e-3,
        groups: 8,
        new_tokens: 8,
        steps: 60,
        critic: false,
        shuffled: false,
    };
    let (first, last) = first_and_last(&task.learn());
    println!("first {first:.3}, last {last:.3}");
    assert!(first < 0.7 && last > 0.9, "first {first:.3}, last {last:.3}");
}
