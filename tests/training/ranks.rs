//! Law N1 over ranks: a step does not depend on how many processes share it. What goes wrong on one rank ends all.

use std::collections::BTreeMap;
use std::sync::Arc;

use rollflow::algo::{
    Aggregation, CrossEntropy, Grpo, Importance, Level, Loss, OffPolicy, PolicyLoss, Proximal, Schedule, ValueLoss,
};
use rollflow::data::Sample;
use rollflow::model::{FrozenWeights, Lora, ModelConfig};
use rollflow::ranks::{Member, Order, RankError, Ranks, Shard};
use rollflow::train::{AdamW, ForwardBackward, LocalBackend, LocalConfig, TrainError, TrainingBackend, collate};
use tch::Tensor;

use crate::rank_threads::{each, following, free_port, led, place, settings, shared};

pub fn config(loss: Arc<dyn Loss>, off_policy: OffPolicy) -> LocalConfig {
    let local = LocalConfig::new(CrossEntropy, Schedule::constant(1e-2));
    // With a large ε an update is linear in the gradient, and rounding is not amplified.
    let adamw = AdamW { epsilon: 1e-3, ..AdamW::default() };
    LocalConfig { loss, off_policy, adamw, threads: Some(1), micro_batch_tokens: 24, ..local }
}

/// Rollouts of a step; their number is no multiple of every number of ranks.
pub fn rollouts(step: u64) -> Vec<Sample> {
    let shapes: Vec<(usize, usize)> =
        (0..9).map(|at| (1 + (at * 7 + step as usize) % 4, 1 + (at * 5 + step as usize) % 6)).collect();
    crate::tiny::rollouts(&shapes, step)
}

/// What a few steps report, and the trained numbers after them.
fn learn(config: LocalConfig, model: &ModelConfig, weights: &FrozenWeights, steps: u64) -> (Vec<ForwardBackward>, Tensor) {
    let backend = LocalBackend::new(LocalConfig { merge: false, ..config }, model.clone(), weights.read()).unwrap();
    let seen = (0..steps).map(|step| {
        let batch = collate(&rollouts(step), Aggregation::TokenMean).unwrap();
        let batch = match step % 2 {
            0 => batch,
            // The loss's centre is the policy before the step, as with several updates.
            _ => {
                let scores = backend.score(Arc::new(batch.clone())).wait().unwrap();
                batch.with_proximal(scores)
            }
        };
        let seen = backend.forward_backward(Arc::new(batch)).wait().unwrap();
        backend.optim_step().wait().unwrap();
        seen
    });
    let seen = seen.collect();
    let weights = backend.snapshot().wait().unwrap().weights.read();
    (seen, weights.trained().1.copy())
}

pub fn distance(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).norm().double_value(&[]) / b.norm().double_value(&[])
}

#[test]
fn n1_losses_gradients_and_weights_are_the_same_for_each_number_of_ranks() {
    let (model, weights) = (crate::tiny::model(), crate::tiny::weights(5).freeze());
    let normalized = Importance { normalize: true, ..Importance::masked(Level::Token, 0.2, 4.0) };
    let corrected = OffPolicy { proximal: Proximal::LogLinear, weigh: Some(normalized), reject: Vec::new() };
    // The third and fourth see the whole batch at once.
    let top_entropy = PolicyLoss { top_entropy: 0.6, entropy_coef: 0.1, ..PolicyLoss::default() };
    let adapted = weights.read().adapted(&model, Lora::new(2, 4.0, &[Lora::ALL]).unwrap(), 3).freeze();
    let (scoring, critic) = (model.scoring(), weights.read().scoring(&model, Some(4)).freeze());
    let (untied, with_head) = (model.untied(), weights.read().untied(&model, &crate::tiny::weights(7)).freeze());
    let plain = OffPolicy::default;
    type Case<'a> = (&'a str, Arc<dyn Loss>, OffPolicy, &'a ModelConfig, &'a FrozenWeights);
    let cases: [Case; 7] = [
        ("supervised", Arc::new(CrossEntropy), plain(), &model, &weights),
        ("GRPO", Arc::new(Grpo::default()), plain(), &model, &weights),
        ("the tokens of highest entropy", Arc::new(top_entropy), plain(), &model, &weights),
        ("normalised importance weights", Arc::new(Grpo::default()), corrected, &model, &weights),
        ("adapters", Arc::new(Grpo::default()), plain(), &model, &adapted),
        ("a critic", Arc::new(ValueLoss { clip: Some(0.5) }), plain(), &scoring, &critic),
        ("an untied head", Arc::new(Grpo::default()), plain(), &untied, &with_head),
    ];
    for (case, (name, loss, off_policy, model, weights)) in cases.into_iter().enumerate() {
        // Long for the common ones.
        let steps = if ["supervised", "GRPO", "adapters", "a critic"].contains(&name) { 50 } else { 5 };
        let config = || config(loss.clone(), off_policy.clone());
        let (alone, expected) = learn(config(), model, weights, steps);
        for size in 2..=4 {
            // Each case with each division.
            let shard = match Shard::ALL[(case + size) % 3] {
                Shard::Parameters if weights.read().adapter.is_some() => Shard::Nothing,
                shard => shard,
            };
            let name = &format!("{name}, divided: {}", shard.word());
            let ((seen, found), ended) = led(size, shard, config, |config| learn(config, model, weights, steps));
            assert!(ended.iter().all(Result::is_ok), "{name}: {ended:?}");
            assert!(distance(&found, &expected) < 1e-5, "{name}, {size} ranks: {}", distance(&found, &expected));
            for (step, (seen, alone)) in seen.iter().zip(&alone).enumerate() {
                let near = |a: f64, b: f64| (a - b).abs() < 1e-5 * (1.0 + b.abs());
                let place = format!("{name}, {size} ranks, step {step}");
                assert!(
                    near(seen.loss, alone.loss) && near(seen.grad_norm, alone.grad_norm),
                    "{place}: {seen:?}, alone {alone:?}"
                );
                assert!(near(seen.entropy, alone.entropy) && near(seen.gap.mean(), alone.gap.mean()), "{place}");
                assert_eq!(
                    (seen.tokens, seen.input_tokens, seen.saved_tokens),
                    (alone.tokens, alone.input_tokens, alone.saved_tokens)
                );
            }
        }
    }
}

#[test]
fn ranks_repeat_to_the_bit() {
    let (model, weights) = (crate::tiny::model(), crate::tiny::weights(5).freeze());
    let config = || config(Arc::new(Grpo::default()), OffPolicy::default());
    for shard in Shard::ALL {
        let [first, second] = [0, 1].map(|_| led(3, *shard, config, |config| learn(config, &model, &weights, 8)).0);
        assert_eq!(first.0, second.0);
        assert_eq!(first.1, second.1);
    }
}

#[test]
fn a_number_that_is_not_finite_on_one_rank_ends_the_step_on_all_and_names_the_rank_and_the_sample() {
    let (model, weights) = (crate::tiny::model(), crate::tiny::weights(5).freeze());
    let config = || config(Arc::new(Grpo::default()), OffPolicy::default());
    for shard in Shard::ALL {
        let (error, ended) = led(2, *shard, config, |config| {
            let backend = LocalBackend::new(config, model.clone(), weights.read()).unwrap();
            let mut batch = collate(&rollouts(0), Aggregation::TokenMean).unwrap();
            // In the last micro-batch, which is not rank 0's.
            batch.sequences.last_mut().unwrap().weights.fill(f64::NAN);
            let error = backend.forward_backward(Arc::new(batch)).wait().unwrap_err();
            let after = backend.optim_step().wait().unwrap_err();
            assert!(matches!(after, TrainError::Poisoned(_)), "{after}");
            error
        });
        let text = error.to_string();
        assert!(text.contains("rank 1 on ") && text.contains("sample 0 of group 4"), "{text}");
        assert!(ended.iter().all(Result::is_ok), "the others end in order: {ended:?}");
    }
}

/// How rank 0 and rank 1 end while rank 2, which was ordered to follow, does `instead`.
fn without_rank_2(settings: Ranks, instead: impl Fn(&Member, u64) + Sync) -> [String; 2] {
    let (model, weights) = (crate::tiny::model(), crate::tiny::weights(5).freeze());
    let results = each(3, &settings, |member| {
        let member = member.unwrap();
        let config = config(Arc::new(CrossEntropy), OffPolicy::default());
        if member.rank() == 0 {
            let train = || -> Result<(), Box<dyn std::error::Error>> {
                let backend = LocalBackend::new(shared(config, &member, Shard::Nothing), model.clone(), weights.read())?;
                let batch = Arc::new(collate(&rollouts(0), Aggregation::TokenMean)?);
                loop {
                    backend.forward_backward(batch.clone()).wait()?;
                }
            };
            return Some(train().unwrap_err().to_string());
        }
        let Order::Follow(_, number) = member.order().unwrap() else { panic!("an order to follow") };
        if member.rank() == 1 {
            return Some(following(config, &member, number).unwrap_err().to_string());
        }
        instead(&member, number);
        while member.lost().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        None
    });
    let mut texts = results.into_iter().flatten();
    std::array::from_fn(|_| texts.next().unwrap())
}

#[test]
fn a_rank_that_fails_ends_the_others_with_its_name_and_its_reason() {
    for text in without_rank_2(settings(), |member, _| member.fail("its disk is full")) {
        assert!(text.contains("rank 2 on ") && text.contains("its disk is full"), "{text}");
    }
}

#[test]
fn a_rank_that_hangs_ends_the_others_with_its_name() {
    let impatient = Ranks { exchange_timeout: 3.0, ..settings() };
    let held = parking_lot::Mutex::new(Vec::new());
    let joins = |member: &Member, number| held.lock().push(member.group(number).unwrap());
    for text in without_rank_2(impatient, joins) {
        assert!(text.contains("rank 2 on ") && text.contains("hangs"), "{text}");
    }
}

#[test]
fn ranks_that_differ_are_refused_before_the_run_with_the_difference() {
    let recipes = ["[train]\nlr = 0.1\n", "[train]\nlr = 0.2\n"];
    // A rank may lack a model, as the second does the critic's.
    let models = |sum: u32| BTreeMap::from([("model.path".to_owned(), sum), (format!("critic.path of {sum}"), sum)]);
    let cases: [([&str; 2], [u32; 2], &[&str]); 2] = [
        (recipes, [1, 1], &["rank 1 on ", "[train] lr = 0.2", "rank 0 has [train] lr = 0.1"]),
        ([recipes[0]; 2], [1, 2], &["rank 1 on ", "another model at model.path", "00000002", "rank 0's is 00000001"]),
    ];
    for (recipes, sums, parts) in cases {
        let port = free_port();
        let join = |rank: usize| {
            Member::join(place(rank, 2, port), &settings(), recipes[rank], models(sums[rank])).map(drop).unwrap_err()
        };
        let errors: Vec<RankError> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2).map(|rank| scope.spawn(move || join(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(errors[0], errors[1], "all ranks say the same");
        let text = errors[0].to_string();
        for part in parts {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }
}

#[test]
fn a_port_in_use_and_a_rank_that_never_starts_are_named() {
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Member::join(place(0, 2, port), &settings(), "", BTreeMap::new()).map(drop).unwrap_err();
    assert_eq!(error, RankError::Port(port), "{error}");
    let short = Ranks { start_timeout: 0.5, ..settings() };
    let error = Member::join(place(0, 3, free_port()), &short, "", BTreeMap::new()).map(drop).unwrap_err().to_string();
    assert!(error.contains("of 3 ranks, 1, 2 did not start within 0.5 seconds"), "{error}");
}
