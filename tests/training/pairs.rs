//! Online DPO: pairs made from rollouts teach a policy that is held to a frozen one.
//!
//! Seeded and synchronous (law V3), so that a run is the same every time on one machine; margins allow for another one's rounding.

use std::sync::{Arc, Mutex};

use rollflow::algo::rewards::exact_match;
use rollflow::algo::{PairLoss, PairOf, Preference, best_against_worst, token_kl};
use rollflow::data::Pair;
use rollflow::data::arithmetic;
use rollflow::model::FrozenWeights;
use rollflow::model::ModelConfig;
use rollflow::observe::Metric;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::stages::pairs::{NO_PAIR, Pairing};
use rollflow::train::SftConfig;
use rollflow::train::run_sft_training;
use rollflow::train::{Scorer, TrainBatch, collate};

const SEED: u64 = 3;
const GROUPS: usize = 32;

/// Right about some sums, after a warm-up.
fn policy() -> Policy {
    let tokenizer = Tokenizer::characters("0123456789+=", 16).unwrap();
    let policy = Policy::random(ModelConfig::small(&tokenizer, 128, 2), tokenizer, SEED).unwrap();
    let config = LocalConfig { threads: Some(1), ..LocalConfig::new(CrossEntropy, Schedule::constant(2e-3)) };
    let backend = policy.backend(config).unwrap();
    let samples = policy.supervised(&arithmetic::addition(1)).unwrap();
    let config = SftConfig { num_steps: 40, batch_size: 64, ..SftConfig::default() };
    run_sft_training(&backend, &samples, &config, |_, _| {}).unwrap();
    policy.with_weights(backend.snapshot().wait().unwrap().weights)
}

/// Every step's row, and what was trained in it.
type Seen = Vec<(StepMetrics, Batch)>;

fn learn(loss: Preference, select: fn(&Group) -> Vec<PairOf>, steps: u64) -> Seen {
    let (policy, pairing) = (policy(), Pairing::by(select));
    let (publisher, published) = weights();
    let admission = Admission::max_staleness(0, GROUPS);
    // Small parts, so that pairs would be torn if they could be.
    let config = LocalConfig { threads: Some(1), micro_batch_tokens: 256, ..LocalConfig::new(loss, Schedule::constant(5e-4)) };
    let generator = Generator::local(&policy).weights(published).group_size(8).max_new_tokens(3).slots(256).seed(SEED);
    let trainer = Trainer::new(policy.backend(config.clone()).unwrap())
        .configure(|config| config.pairs = Some(pairing.clone()))
        .steps(steps);
    let reward = |sample: &Sample| match sample.status {
        Status::Completed => exact_match(&sample.response, sample.answer().unwrap()),
        _ => 0.0,
    };
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let look = seen.clone();
    let mut flow = Flow::new("pairs").admission(&admission);
    let prompts = flow.source("prompts", Prompts::addition(1, SEED).unwrap());
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(reward));
    let paired = flow.stage("pairs", scored, pairing.clone());
    let scored = flow.stage("reference", paired, Reference::local(&policy, config));
    let batches = flow.stage("batch", scored, Batcher::groups(GROUPS));
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::to(publisher));
    flow.sink("look", synced, move |step: Trained<FrozenWeights>| {
        if step.step > 0 {
            assert_eq!(step.totals.as_ref().unwrap().imbalance(), (0, 0), "law D4");
            look.lock().unwrap().push((rollflow::stages::sink::step_row(&step), step.batch));
        }
    });
    flow.run(Until::finished()).unwrap();
    std::mem::take(&mut *seen.lock().unwrap())
}

/// The mean of a metric over the first and the last five steps.
fn first_and_last(seen: &Seen, metric: Metric) -> (f64, f64) {
    let mean = |rows: &[(StepMetrics, Batch)]| rows.iter().map(|(row, _)| row[metric.key()]).sum::<f64>() / rows.len() as f64;
    (mean(&seen[..5]), mean(&seen[seen.len() - 5..]))
}

#[test]
fn r167_what_was_chosen_is_preferred_ever_more_and_the_reward_rises() {
    let loss = Preference { beta: 0.1, ..Preference::default() };
    let seen = learn(loss, best_against_worst, 130);
    let [accuracy, margin, reward] =
        [Metric::PairAccuracy, Metric::PairMargin, Metric::RewardMean].map(|metric| first_and_last(&seen, metric));
    println!("accuracy {accuracy:?}, margin {margin:?}, reward {reward:?}");
    assert!(accuracy.1 > accuracy.0 + 0.15 && accuracy.1 > 0.7, "{accuracy:?}");
    assert!(margin.1 > margin.0 + 0.05 && margin.1 > 0.0, "{margin:?}");
    assert!(reward.1 > reward.0 + 0.05, "{reward:?}");
    let first = seen[0].0[Metric::Loss.key()];
    assert!((first - 2f64.ln()).abs() < 1e-4, "the policy begins as its reference: {first}");
}

/// Law D2: whole groups, of which two answers are trained on; laws D4 and D1: all others stay and are counted.
#[test]
fn r166_of_a_group_two_answers_are_trained_on_and_ties_are_dropped_with_their_reason() {
    let seen = learn(Preference::default(), best_against_worst, 3);
    for (_, batch) in &seen {
        assert_eq!(batch.groups.len(), GROUPS);
        for group in &batch.groups {
            let learned: Vec<usize> = (0..8).filter(|&at| group.samples[at].learned() > 0).collect();
            let pair = best_against_worst(group)[0];
            let (first, second) = (pair.chosen.min(pair.rejected), pair.chosen.max(pair.rejected));
            assert_eq!(learned, [first, second]);
            let scored = |sample: &Sample| token_kl(sample, &|_: f64, _: f64| (0.0, 0.0)).is_some();
            assert!(group.samples.iter().all(scored) && group.samples[pair.chosen].ref_log_probs.iter().any(|own| *own < 0.0));
        }
        assert!(batch.dropped.iter().all(|dropped| dropped.reason == NO_PAIR));
    }
    assert!(seen.iter().any(|(_, batch)| !batch.dropped.is_empty()), "a policy that is hardly ever right ties often");
}

/// Right and wrong answers to the same sums, as the policy itself scores them.
fn preferences(policy: &Policy, config: LocalConfig) -> TrainBatch {
    let wrong = |pair: &Pair| Pair { completion: "7".to_owned(), ..pair.clone() };
    let right: Vec<_> = arithmetic::addition(1).into_iter().filter(|pair| pair.completion.len() == 2).take(24).collect();
    let both: Vec<_> = right.iter().flat_map(|pair| [pair.clone(), wrong(pair)]).collect();
    let mut samples = policy.supervised(&both).unwrap();
    Scorer::new(config, policy.config().clone()).annotate(&policy.frozen(), &mut samples, Default::default()).unwrap();
    TrainBatch { pairs: true, ..collate(&samples, Aggregation::SeqMeanTokenMean).unwrap() }
}

/// Also of losses that see the whole batch; law N1: however it is cut.
#[test]
fn r167_chosen_answers_gain_on_rejected_ones_however_the_batch_is_cut() {
    let policy = policy();
    for term in [PairLoss::Sigmoid, PairLoss::Ipo, PairLoss::AotUnpaired] {
        let learn = |micro_batch_tokens| {
            let loss = Preference::of(term);
            let config = LocalConfig::new(loss, Schedule::constant(5e-4));
            let config = LocalConfig { threads: Some(1), micro_batch_tokens, ..config };
            let batch = Arc::new(preferences(&policy, config.clone()));
            let backend = policy.backend(config).unwrap();
            let chosen = || {
                let scores = backend.score(batch.clone()).wait().unwrap();
                scores.iter().step_by(2).flatten().sum::<f64>()
            };
            let before = chosen();
            let step = |_| {
                let seen = backend.forward_backward(batch.clone()).wait().unwrap();
                backend.optim_step().wait().unwrap();
                (seen.loss, (seen.metrics.pairs.accuracy(), seen.metrics.pairs.margin()))
            };
            ((0..15).map(step).collect::<Vec<_>>(), chosen() - before)
        };
        let ((steps, gain), (cut, _)) = (learn(1 << 14), learn(64));
        let [(first, _), (last, (accuracy, margin))] = [steps[0], steps[14]];
        // IPO asks for a certain margin, whichever side gives way.
        let rises = gain > 0.0 || term == PairLoss::Ipo;
        assert!(last < first && accuracy > 0.95 && margin > 0.02 && rises, "{term:?}: {steps:?}, {gain}");
        for ((whole, (_, margin)), (parts, (_, other))) in steps.iter().zip(&cut) {
            assert!((whole - parts).abs() < 1e-3 * whole.abs() && (margin - other).abs() < 1e-3, "{term:?}: {whole} {parts}");
        }
    }
}
