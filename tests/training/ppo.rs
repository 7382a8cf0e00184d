//! PPO's step: what policy and critic are given to learn, in which updates (laws N1, D2), what a warm-up leaves alone, and that it goes on after a
//! checkpoint to the bit (laws C1, C2).

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::support::backend::Counting;
use proptest::prelude::*;
use rollflow::algo::{ComparedToken, Decay, KlForm, LogProbGap, LossInputs, LossOutput, ValueLoss};
use rollflow::flow::from_iter;
use rollflow::model::{FrozenWeights, ModelConfig, Weights};
use rollflow::prelude::*;
use rollflow::stages::sink::step_row;
use rollflow::stages::train::{Critic, Resumed, RewardKl, StepConfig};
use rollflow::train::checkpoint;
use rollflow::train::{ForwardBackward, NonFinitePolicy, TrainBatch, TrainSequence, TrainingBackend};

/// Groups of two answers with rewards, log-probabilities of a reference, and a masked token in the middle of long ones.
fn batch(shapes: &[(usize, usize)], seed: u64) -> Batch {
    let mut samples = crate::tiny::rollouts(shapes, seed);
    for (at, sample) in samples.iter_mut().enumerate() {
        sample.reward = Some((seed as f64 + at as f64 * 1.7).sin());
        sample.advantage = None;
        sample.ref_log_probs = sample.log_probs.iter().map(|log_prob| log_prob * 0.9).collect();
        let tokens = sample.tokens.len();
        if sample.response_length() > 3 {
            sample.loss_mask[tokens - 2] = 0.0;
        }
    }
    let group = |pair: &[Sample]| {
        let prompt = Prompt { ordinal: pair[0].group_index, ..Prompt::default() };
        Group { samples: pair.to_vec(), prompt: Arc::new(prompt), ..Group::default() }
    };
    Batch { groups: samples.chunks(2).map(group).collect(), ..Batch::default() }
}

/// Steps over these batches.
fn steps<B: TrainingBackend + 'static>(sent: Vec<Batch>, trainer: Trainer<B>) -> Result<Vec<Trained<B::Weights>>, String> {
    let trained = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&trained);
    let mut flow = Flow::new("ppo");
    let batches = flow.source("batches", from_iter(sent));
    let steps = flow.stage("train", batches, trainer);
    flow.sink("seen", steps, move |step: Trained<B::Weights>| seen.lock().unwrap().push(step));
    flow.run(Until::finished()).map_err(|error| format!("{error:#}"))?;
    Ok(std::mem::take(&mut *trained.lock().unwrap()).split_off(1))
}

type Learned = Arc<Mutex<Vec<TrainBatch>>>;

/// A value for every token, unlike its neighbours'.
fn value(sequence: &TrainSequence, row: usize) -> f64 {
    (sequence.group as f64 * 3.1 + f64::from(sequence.index) * 1.3 + row as f64 * 0.7).cos()
}

/// Writes down what it is given to learn.
fn noting(values: bool) -> (Counting, Learned) {
    let learned = Learned::default();
    let notes = learned.clone();
    let forward = Box::new(move |batch: &TrainBatch, _: &_| {
        notes.lock().unwrap().push(batch.clone());
        ForwardBackward { loss: 0.5, ..ForwardBackward::default() }
    });
    let own = |sequence: &TrainSequence| sequence.rows.iter().map(|row| value(sequence, *row)).collect();
    let backend = Counting { forward, ..Counting::default() };
    let scores = Box::new(move |batch: &TrainBatch| batch.sequences.iter().map(own).collect());
    (if values { Counting { scores, ..backend } } else { backend }, learned)
}

/// What policy and critic learn of one batch.
fn learn(
    sent: Batch,
    of_critic: impl Fn(Critic<Counting>) -> Critic<Counting>,
    of_trainer: impl Fn(Trainer<Counting>) -> Trainer<Counting>,
) -> (Trained<u64>, Vec<TrainBatch>, Vec<TrainBatch>) {
    let ((policy, by_policy), (critic, by_critic)) = (noting(false), noting(true));
    let trainer = of_trainer(Trainer::new(policy)).critic(of_critic(Critic::new(critic)));
    let step = steps(vec![sent], trainer).unwrap().remove(0);
    let take = |learned: Learned| std::mem::take(&mut *learned.lock().unwrap());
    (step, take(by_policy), take(by_critic))
}

/// By the sums that define it: `A_t = Σ (γλ)^k δ_{t+k}`, `δ_t = r_t + γ V_{t+1} − V_t`.
fn plain_gae(rewards: &[f64], values: &[f64], gamma: f64, lambda: f64) -> Vec<f64> {
    let value = |t: usize| values.get(t).copied().unwrap_or(0.0);
    let delta = |t: usize| rewards[t] + gamma * value(t + 1) - value(t);
    let from = |t: usize| (t..rewards.len()).map(|k| (gamma * lambda).powi((k - t) as i32) * delta(k)).sum();
    (0..rewards.len()).map(from).collect()
}

#[track_caller]
fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6 * (1.0 + expected.abs()), "{what}: {found}, expected {expected}");
    }
}

fn shapes() -> impl Strategy<Value = Vec<(usize, usize)>> {
    prop::collection::vec((1_usize..4, 1_usize..7), 4..12).prop_map(|shapes| shapes[..shapes.len() / 2 * 2].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn the_policy_learns_advantages_over_values_and_the_critic_the_returns(
        shapes in shapes(), seed in 0u64..1000, gamma in 0.5f64..1.0, lambda in 0.0f64..1.0, white in any::<bool>(), coef in 0.0f64..0.5,
    ) {
        let sent = batch(&shapes, seed);
        let (step, policy, critic) = learn(
            sent.clone(),
            |critic| Critic { gamma, lambda, whiten: white, ..critic },
            |trainer| trainer.configure(|config| config.reward_kl = Some(Arc::new(RewardKl::new(coef, KlForm::K1)))),
        );
        prop_assert_eq!((policy.len(), critic.len()), (1, 1));
        let (mut advantages, mut all_values) = (Vec::new(), Vec::new());
        for (sample, (policy, critic)) in sent.samples().zip(policy[0].sequences.iter().zip(&critic[0].sequences)) {
            let trained: Vec<usize> = (1..sample.tokens.len()).filter(|t| sample.loss_mask[*t] > 0.0).collect();
            let distance = |t: &usize| f64::from(sample.log_probs[*t]) - f64::from(sample.ref_log_probs[*t]);
            let mut rewards: Vec<f64> = trained.iter().map(|t| -coef * distance(t)).collect();
            *rewards.last_mut().unwrap() += sample.reward.unwrap();
            let values: Vec<f64> = trained.iter().map(|t| value(policy, t - 1)).collect();
            let expected = plain_gae(&rewards, &values, gamma, lambda);
            let returns: Vec<f64> = expected.iter().zip(&values).map(|(advantage, value)| advantage + value).collect();
            assert_near("returns", &critic.advantages, &returns);
            assert_near("old values", critic.behaviour.as_ref().unwrap(), &values);
            prop_assert_eq!((&policy.rows, &policy.weights, &policy.proximal), (&critic.rows, &critic.weights, &None));
            prop_assert_eq!(policy.behaviour.as_ref().unwrap()[0], f64::from(sample.log_probs[trained[0]]), "the policy keeps its own");
            advantages.extend(expected);
            all_values.extend(values);
        }
        if white && advantages.len() > 1 {
            let n = advantages.len() as f64;
            let mean = advantages.iter().sum::<f64>() / n;
            let variance = advantages.iter().map(|advantage| (advantage - mean).powi(2)).sum::<f64>() / (n - 1.0);
            advantages.iter_mut().for_each(|advantage| *advantage = (*advantage - mean) / (variance + 1e-8).sqrt());
        }
        let found: Vec<f64> = policy[0].sequences.iter().flat_map(|sequence| sequence.advantages.clone()).collect();
        assert_near("advantages", &found, &advantages);
        let seen = step.critic.unwrap();
        assert_near("mean value", &[seen.value], &[all_values.iter().sum::<f64>() / all_values.len() as f64]);
        prop_assert_eq!((seen.loss, step.kl_cost.unwrap().coef), (0.5, coef));
    }

    /// Law N1 within a minibatch, law D2 over them.
    #[test]
    fn every_pass_meets_every_group_once_with_the_whole_batchs_advantages_and_its_own_denominators(
        shapes in shapes(), seed in 0u64..1000, passes in 1u64..4, cut in 2usize..5,
    ) {
        let sent = batch(&shapes, seed);
        let (_, whole, _) = learn(sent.clone(), |critic| critic, |trainer| trainer);
        let of = |batch: &TrainBatch| batch.sequences.iter().map(|sequence| ((sequence.group, sequence.index), sequence.advantages.clone())).collect::<Vec<_>>();
        let run = || learn(sent.clone(), |critic| critic, |trainer| {
            trainer.configure(|config| {
                (config.ppo_epochs, config.score_first) = (passes, true);
                (config.minibatches, config.minibatch_seed) = (cut, seed);
            })
        });
        let (step, policy, critic) = run();
        let count = cut.min(sent.groups.len());
        prop_assert_eq!((policy.len(), critic.len()), (passes as usize * count, passes as usize * count));
        prop_assert_eq!(step.optim.step, passes * count as u64);
        for pass in policy.chunks(count) {
            let mut met: Vec<_> = pass.iter().flat_map(of).collect();
            met.sort_by_key(|(id, _)| *id);
            prop_assert_eq!(met, of(&whole[0]));
        }
        for (policy, critic) in policy.iter().zip(&critic) {
            let ids = |batch: &TrainBatch| batch.sequences.iter().map(|sequence| (sequence.group, sequence.index)).collect::<Vec<_>>();
            prop_assert_eq!(ids(policy), ids(critic));
            let weight: f64 = policy.sequences.iter().flat_map(|sequence| &sequence.weights).sum();
            prop_assert!((weight - 1.0).abs() < 1e-9, "a mean over the minibatch's own tokens");
            prop_assert!(policy.sequences.iter().all(|sequence| sequence.proximal.is_some()), "scored before the first update");
        }
        let ids = |batches: &[TrainBatch]| batches.iter().map(of).collect::<Vec<_>>();
        prop_assert_eq!(ids(&run().1), ids(&policy), "law C2: drawn by the seed and the step alone");
    }
}

#[test]
fn a_batch_in_parts_is_valued_whole() {
    let sent = batch(&[(2, 3), (1, 4), (3, 2), (2, 5)], 3);
    let mut rest = sent.clone();
    let first = Batch { groups: rest.groups.drain(..1).collect(), more: true, ..Batch::default() };
    let ((policy, learned), (critic, _)) = (noting(false), noting(true));
    steps(vec![first, rest], Trainer::new(policy).critic(Critic::new(critic))).unwrap();
    let found = learned.lock().unwrap().remove(0);
    let whole = learn(sent, |critic| critic, |trainer| trainer).1.remove(0);
    assert_eq!((found.sequences, found.batch_tokens, found.version), (whole.sequences, whole.batch_tokens, whole.version));
}

/// Law N4.
#[test]
fn a_value_or_a_reward_that_is_no_number_ends_the_run_and_is_named() {
    let scores = |batch: &TrainBatch| batch.sequences.iter().map(|sequence| vec![f64::NAN; sequence.rows.len()]).collect();
    let broken = Counting { scores: Box::new(scores), ..Counting::default() };
    let sent = batch(&[(1, 2), (1, 2)], 1);
    let error = steps(vec![sent.clone()], Trainer::new(Counting::default()).critic(Critic::new(broken))).unwrap_err();
    assert!(error.contains("sample 0 of group 0: its critic's value is NaN"), "{error}");
    let mut unscored = sent;
    unscored.groups[0].samples[1].reward = None;
    let error = steps(vec![unscored], Trainer::new(noting(false).0).critic(Critic::new(noting(true).0))).unwrap_err();
    assert!(error.contains("sample 1 of group 0: its reward is NaN"), "{error}");
}

const SHAPES: [(usize, usize); 8] = [(2, 3), (1, 4), (3, 2), (2, 5), (2, 1), (1, 6), (4, 2), (1, 1)];

fn local(warm_up: u64) -> Trainer<LocalBackend> {
    let on = |loss: Arc<dyn Loss>| LocalConfig {
        threads: Some(1),
        loss,
        ..LocalConfig::new(Grpo::default(), Schedule::constant(0.01))
    };
    let policy = LocalBackend::new(on(Arc::new(Grpo::default())), crate::tiny::model(), crate::tiny::weights(5)).unwrap();
    let (model, weights) = (crate::tiny::model().scoring(), crate::tiny::weights(5).scoring(&crate::tiny::model(), None));
    let critic = LocalBackend::new(on(Arc::new(ValueLoss { clip: Some(0.2) })), model, weights).unwrap();
    let kl = RewardKl::new(0.1, KlForm::K1).adaptive(0.05, 20.0);
    let trainer = Trainer::new(policy).critic(Critic { lambda: 0.95, warm_up, ..Critic::new(critic) });
    trainer.configure(|config| {
        (config.reward_kl, config.ppo_epochs) = (Some(Arc::new(kl)), 2);
        (config.minibatches, config.minibatch_seed) = (2, 7);
    })
}

fn sent(steps: std::ops::Range<u64>) -> Vec<Batch> {
    steps.map(|step| batch(&SHAPES, step)).collect()
}

fn published(step: &Trained<FrozenWeights>) -> Vec<u32> {
    let flat = step.publish.as_ref().unwrap().weights.read().flat;
    Vec::<f32>::try_from(flat).unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn in_the_warm_up_the_critic_learns_and_the_policy_stays_to_the_bit() {
    let seen = steps(sent(0..4), local(2)).unwrap();
    let start: Vec<u32> = Vec::<f32>::try_from(crate::tiny::weights(5).flat).unwrap().into_iter().map(f32::to_bits).collect();
    for (at, step) in seen.iter().enumerate() {
        assert_eq!(step.publish.as_ref().unwrap().version, at as u64 + 2, "law V1: published all the same");
        assert_eq!(step.critic.as_ref().unwrap().optim.step, 4 * (at as u64 + 1));
        assert_eq!(published(step) == start, at < 2, "step {}", at + 1);
        assert_eq!(step.optim.step, 4 * (at as u64 + 1).saturating_sub(2));
        assert!(step.forward.gap.tokens > 0, "law N3: measured at every step");
    }
    let value = |at: usize| seen[at].critic.as_ref().unwrap().value;
    assert!(value(0) == 0.0 && value(1) != 0.0);
}

#[test]
fn a_critic_that_learns_foresees_more() {
    let same = |steps: u64| (0..steps).map(|_| batch(&SHAPES, 1)).collect::<Vec<_>>();
    let seen = steps(same(40), local(40)).unwrap();
    let explained = |at: usize| seen[at].critic.as_ref().unwrap().explained.unwrap();
    assert!(explained(0).abs() < 1e-9 && explained(39) > 0.8, "{} to {}", explained(0), explained(39));
}

/// Laws C1 and C2.
#[test]
fn a_checkpoint_holds_the_critic_and_a_resumed_run_is_the_run_that_was_not_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    let expected = steps(sent(0..6), local(1).checkpoints(&whole, Some(1))).unwrap();
    steps(sent(0..3), local(1).checkpoints(&cut, None)).unwrap();
    let checkpoint = cut.join("checkpoints/step_000003");
    assert!(!cut.join(".critic.writing").exists());
    let metadata = checkpoint::verify(&checkpoint).unwrap();
    for file in ["critic/model.safetensors", "critic/optimizer.safetensors", "critic/config.json", "progress.json"] {
        assert!(metadata.files.contains_key(file), "{file}");
    }
    let resumed = local(1).checkpoints(&cut, None).resume(&checkpoint, Resumed::read(&checkpoint).unwrap()).unwrap();
    let found = steps(sent(3..6), resumed).unwrap();
    for (found, expected) in found.iter().zip(&expected[3..]) {
        assert_eq!((&found.critic, &found.forward, &found.kl_cost), (&expected.critic, &expected.forward, &expected.kl_cost));
        assert!(published(found) == published(expected), "step {}", expected.step);
    }
    for file in ["model.safetensors", "optimizer.safetensors", "critic/model.safetensors", "critic/optimizer.safetensors"] {
        let read = |run: &Path| std::fs::read(run.join("checkpoints/step_000006").join(file)).unwrap();
        assert!(read(&whole) == read(&cut), "{file}");
    }
}

/// Law C1: a damaged critic is a damaged checkpoint.
#[test]
fn a_changed_byte_of_the_critic_is_found() {
    let folder = tempfile::tempdir().unwrap();
    steps(sent(0..1), local(0).checkpoints(folder.path(), None)).unwrap();
    let checkpoint = folder.path().join("checkpoints/step_000001");
    let path = checkpoint.join("critic/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = checkpoint::verify(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("critic/model.safetensors: its checksum is"), "{error}");
    std::fs::remove_file(&path).unwrap();
    assert!(checkpoint::read_metadata(&checkpoint).is_err());
}

/// Law N4: without an advantage a loss is not a number. The others of the step's updates are made.
#[test]
fn each_update_that_is_skipped_counts_wherever_it_is_in_the_step() {
    for bad in 0..4 {
        let mut sent = batch(&[(2, 3); 8], 1);
        for (at, group) in sent.groups.iter_mut().enumerate() {
            group.samples.iter_mut().for_each(|sample| sample.advantage = (at != bad).then_some(0.5));
        }
        let loss = LocalConfig::new(Grpo::default(), Schedule::constant(1e-3));
        let config = LocalConfig { threads: Some(1), non_finite: NonFinitePolicy::Skip, ..loss };
        let backend = LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(1)).unwrap();
        let trainer = Trainer::new(backend).configure(|config| config.minibatches = 4);
        let step = steps(vec![sent], trainer).unwrap().remove(0);
        assert_eq!(step.updates_skipped, 1);
        assert_eq!(step_row(&step)["updates_skipped"], 1.0);
    }
}

/// Law N4. The policy's updates are made.
#[test]
fn a_critics_updates_that_are_skipped_count_and_their_norm_is_left_out() {
    let endless =
        |inputs: &LossInputs| Ok(LossOutput { loss: f64::NAN, grad: vec![0.0; inputs.log_probs.len()], ..LossOutput::default() });
    let backend = |loss: Arc<dyn Loss>, model: ModelConfig, weights: Weights| {
        let config = LocalConfig {
            threads: Some(1),
            loss,
            non_finite: NonFinitePolicy::Skip,
            ..LocalConfig::new(Grpo::default(), Schedule::constant(1e-3))
        };
        LocalBackend::new(config, model, weights).unwrap()
    };
    let (model, weights) = (crate::tiny::model(), crate::tiny::weights(5));
    let critic = backend(Arc::new(endless), model.scoring(), weights.scoring(&model, None));
    let policy = backend(Arc::new(Grpo::default()), model, weights);
    let trainer = Trainer::new(policy).critic(Critic::new(critic)).configure(|config| config.minibatches = 4);
    let step = steps(vec![batch(&[(2, 3); 8], 1)], trainer).unwrap().remove(0);
    assert_eq!((step.updates_skipped, step.optim.step), (4, 4));
    assert!(!step_row(&step).contains_key("critic_grad_norm"));
}

#[test]
fn rates_of_policy_and_critic_follow_the_steps_through_changes_of_epochs_and_minibatches() {
    let schedule = |updates: u64, steps: u64| {
        let (warmup_steps, total_steps) = (updates, steps * updates);
        Some(Schedule { lr: 1e-3, decay: Decay::Linear, warmup_steps, total_steps, floor: 0.0 })
    };
    let trainer = local(1).per_step(move |step| {
        let (ppo_epochs, minibatches) = if step < 3 { (1, 1) } else { (2, 2) };
        let updates = ppo_epochs * minibatches as u64;
        // The policy rests in the first step.
        let (schedule, critic_schedule) = (schedule(updates, 5), schedule(updates, 6));
        Ok(StepConfig { schedule, critic_schedule, ppo_epochs, minibatches, ..StepConfig::default() })
    });
    let seen = steps(sent(0..5), trainer).unwrap();
    for (at, step) in seen.iter().enumerate() {
        let (updates, steps) = if at < 2 { (1, at as u64) } else { (4, at as u64) };
        let last = |schedule: Option<Schedule>, steps: u64| schedule.unwrap().at(steps * updates + updates - 1);
        assert_eq!(step.critic.as_ref().unwrap().optim.lr, last(schedule(updates, 6), steps), "step {}", step.step);
        if at > 0 {
            assert_eq!(step.optim.lr, last(schedule(updates, 5), steps - 1), "step {}", step.step);
        }
    }
}

/// Laws N3 and N4.
#[test]
fn a_gap_is_checked_in_the_first_minibatch_that_is_not_skipped() {
    let passes = AtomicUsize::new(0);
    let forward = Box::new(move |_: &TrainBatch, _: &_| {
        let mut gap = LogProbGap::default();
        gap.add_sequence(&[ComparedToken { trainer: -5.0, behaviour: -1.0, ..ComparedToken::default() }]);
        let skipped = (passes.fetch_add(1, Ordering::Relaxed) == 0).then(|| "the loss is not finite".to_owned());
        ForwardBackward { gap, skipped, ..ForwardBackward::default() }
    });
    let trainer = Trainer::new(Counting { forward, ..Counting::default() }).configure(|config| config.minibatches = 3);
    let error = steps(vec![batch(&[(2, 3); 8], 1)], trainer).unwrap_err();
    assert!(error.contains("step 1") && error.contains("4.000 nats"), "{error}");
}
