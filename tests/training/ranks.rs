//! Law N1 over ranks: a step does not depend on how many processes share it. What goes wrong on one rank ends all.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rollflow::algo::{
    Aggregation, BradleyTerry, CrossEntropy, Grpo, Importance, Level, Loss, OffPolicy, PolicyLoss, Proximal, Schedule, ValueLoss,
};
use rollflow::data::Sample;
use rollflow::model::{Compute, Dtype, FrozenWeights, Lora, ModelConfig};
use rollflow::ranks::{Member, Order, RankError, Ranks, Shard, Store};
use rollflow::train::{AdamW, ForwardBackward, LocalBackend, LocalConfig, OptimStep, TrainError, TrainingBackend, collate};
use tch::Tensor;

use crate::rank_threads::{each, following, free_port, led, led_copies, place, settings, shared};

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

/// Pairs of answers with a score each.
fn ranked(step: u64) -> Vec<Sample> {
    let mut samples = rollouts(step);
    samples.truncate(8);
    for sample in &mut samples {
        let last = sample.loss_mask.len() - 1;
        sample.loss_mask[..last].fill(0.0);
    }
    samples
}

/// What a few steps report, and the trained numbers after them.
fn learn(case: &Case, config: LocalConfig, steps: u64) -> (Vec<(ForwardBackward, OptimStep)>, Tensor) {
    let config = LocalConfig { merge: false, ..config };
    let backend = LocalBackend::new(config, case.model.clone(), case.weights.read()).unwrap();
    let seen = (0..steps).map(|step| {
        let batch = collate(&(case.samples)(step), Aggregation::TokenMean).unwrap();
        let batch = match step % 2 {
            0 => batch,
            // The loss's centre is the policy before the step, as with several updates.
            _ => {
                let scores = backend.score(Arc::new(batch.clone())).wait().unwrap();
                batch.with_proximal(scores)
            }
        };
        // Some updates have two batches, which halve the gradient between them.
        let halves = if step % 4 == 3 { 2 } else { 1 };
        let batch = Arc::new(batch.scaled(1.0 / f64::from(halves)));
        (1..halves).for_each(|_| drop(backend.forward_backward(batch.clone()).wait().unwrap()));
        let seen = backend.forward_backward(batch).wait().unwrap();
        (seen, backend.optim_step().wait().unwrap())
    });
    let seen = seen.collect();
    let weights = backend.snapshot().wait().unwrap().weights.read();
    (seen, weights.trained().1.copy())
}

pub fn distance(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).norm().double_value(&[]) / b.norm().double_value(&[])
}

/// A kind of training.
struct Case {
    name: &'static str,
    config: LocalConfig,
    model: ModelConfig,
    weights: FrozenWeights,
    samples: fn(u64) -> Vec<Sample>,
    /// Relative distance from one process: of f32, or of 16 bits that are rounded after each step.
    tolerance: f64,
}

fn cases() -> Vec<Case> {
    let (model, weights) = (crate::tiny::model(), crate::tiny::weights(5).freeze());
    let of = |name, loss: Arc<dyn Loss>| Case {
        name,
        config: config(loss, OffPolicy::default()),
        model: model.clone(),
        weights: weights.read().freeze(),
        samples: rollouts,
        tolerance: 1e-5,
    };
    let grpo = |name| of(name, Arc::new(Grpo::default()));
    let scoring = |case: Case| Case { model: model.scoring(), weights: weights.read().scoring(&model, Some(4)).freeze(), ..case };
    let rounded =
        |case: Case| Case { config: LocalConfig { compute: Compute::cpu(Dtype::Bf16), ..case.config }, tolerance: 2e-2, ..case };
    let again = |case: Case| Case { config: LocalConfig { gradient_checkpointing: true, ..case.config }, ..case };
    let normalized = Importance { normalize: true, ..Importance::masked(Level::Token, 0.2, 4.0) };
    let off_policy = OffPolicy { proximal: Proximal::LogLinear, weigh: Some(normalized), reject: Vec::new() };
    // These two see the whole batch at once, as pairs do.
    let top_entropy = PolicyLoss { top_entropy: 0.6, entropy_coef: 0.1, ..PolicyLoss::default() };
    let corrected = grpo("normalised importance weights");
    let critic = || Arc::new(ValueLoss { clip: Some(0.5) });
    let pairs = |name| Case { samples: ranked, ..scoring(of(name, Arc::new(BradleyTerry { center: 0.1 }))) };
    let adapted = weights.read().adapted(&model, Lora::new(2, 4.0, &[Lora::ALL]).unwrap(), 3).freeze();
    let adapters = |name| Case { weights: adapted.read().freeze(), ..grpo(name) };
    let untied = weights.read().untied(&model, &crate::tiny::weights(7)).freeze();
    let in_4_bits = weights.read().quantised().adapted(&model, Lora::new(2, 4.0, &[Lora::ALL]).unwrap(), 3).freeze();
    vec![
        of("supervised", Arc::new(CrossEntropy)),
        grpo("GRPO"),
        of("the tokens of highest entropy", Arc::new(top_entropy)),
        Case { config: LocalConfig { off_policy, ..corrected.config }, ..corrected },
        adapters("adapters"),
        Case { weights: in_4_bits, ..grpo("adapters over 4 bits") },
        scoring(of("a critic", critic())),
        pairs("a reward model"),
        Case { model: model.untied(), weights: untied, ..grpo("an untied head") },
        rounded(grpo("bf16 with f32 masters")),
        again(grpo("gradient checkpointing")),
        rounded(again(grpo("bf16 and gradient checkpointing"))),
        rounded(again(adapters("adapters in bf16 and gradient checkpointing"))),
        rounded(scoring(of("a critic in bf16", critic()))),
        again(pairs("a reward model and gradient checkpointing")),
    ]
}

#[test]
fn n1_losses_gradients_and_weights_are_the_same_for_each_number_of_ranks_and_copies() {
    for (at, case) in cases().iter().enumerate() {
        // Long for the common ones.
        let long = ["supervised", "GRPO", "adapters", "a critic"].contains(&case.name);
        let (alone, expected) = learn(case, case.config.clone(), if long { 30 } else { 5 });
        for (which, shard) in Shard::ALL.iter().enumerate() {
            if *shard == Shard::Parameters && case.weights.read().adapter.is_some() {
                continue;
            }
            // Each case with each division. Only the first is long.
            let size = 2 + (at + which) % 3;
            let meshes = match (shard, at % 3) {
                (Shard::Nothing, _) => vec![[1, size]],
                (_, 0) => vec![[1, size], [3, 2]],
                (_, 1) => vec![[1, size], [2, 2]],
                _ => vec![[1, size], [2, 1]],
            };
            for mesh in meshes {
                let steps = if long && which == at % 3 && mesh[0] == 1 { 30 } else { 5 };
                let name = format!("{}, divided: {}, copies and parts: {mesh:?}", case.name, shard.word());
                let ((seen, found), ended) =
                    led_copies(mesh, *shard, || case.config.clone(), |config| learn(case, config, steps));
                assert!(ended.iter().all(Result::is_ok), "{name}: {ended:?}");
                if steps == alone.len() as u64 {
                    assert!(distance(&found, &expected) < case.tolerance, "{name}: {}", distance(&found, &expected));
                }
                same_steps(&name, &seen, &alone, case.tolerance);
            }
        }
    }
}

fn same_steps(name: &str, seen: &[(ForwardBackward, OptimStep)], alone: &[(ForwardBackward, OptimStep)], tolerance: f64) {
    for (step, ((seen, update), (alone, update_alone))) in seen.iter().zip(alone).enumerate() {
        let near = |a: f64, b: f64| (a - b).abs() < tolerance * (1.0 + b.abs());
        let place = format!("{name}, step {step}");
        assert!(
            near(seen.loss, alone.loss) && near(update.grad_norm, update_alone.grad_norm),
            "{place}: {seen:?}, alone {alone:?}"
        );
        assert!(near(seen.entropy, alone.entropy) && near(seen.gap.mean(), alone.gap.mean()), "{place}");
        assert_eq!(
            (seen.tokens, seen.input_tokens, seen.saved_tokens),
            (alone.tokens, alone.input_tokens, alone.saved_tokens),
            "{place}"
        );
    }
}

#[test]
fn ranks_repeat_to_the_bit() {
    let case = cases().remove(1);
    for (shard, mesh) in Shard::ALL.iter().flat_map(|shard| [(*shard, [1, 3]), (*shard, [2, 2])]) {
        let [first, second] = [0, 1].map(|_| led_copies(mesh, shard, || case.config.clone(), |config| learn(&case, config, 8)).0);
        assert_eq!(first.0, second.0);
        assert_eq!(first.1, second.1);
    }
}

#[test]
fn ranks_that_copies_cannot_share_are_refused_before_they_meet() {
    let uneven = Ranks { replicas: 2, ..settings() };
    let refused = Member::join(place(0, 3, free_port()), &uneven, "", BTreeMap::new(), None).map(drop).unwrap_err();
    assert_eq!(refused, RankError::Mesh { size: 3, copies: 2 });
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

#[test]
fn n1_ranks_with_unlike_numbers_of_threads_train_each_sequence_once() {
    let case = cases().remove(1);
    let (alone, expected) = learn(&case, case.config.clone(), 5);
    for shard in [Shard::Nothing, Shard::Gradients] {
        let rank = AtomicUsize::new(0);
        let threads = || Some(1 + 2 * rank.fetch_add(1, Ordering::Relaxed));
        let config = || LocalConfig { threads: threads(), ..case.config.clone() };
        let ((seen, found), ended) = led(2, shard, config, |config| learn(&case, config, 5));
        assert!(ended.iter().all(Result::is_ok), "{}: {ended:?}", shard.word());
        assert!(distance(&found, &expected) < case.tolerance, "{}: {}", shard.word(), distance(&found, &expected));
        same_steps(shard.word(), &seen, &alone, case.tolerance);
    }
}

#[test]
fn a_pass_that_fails_on_one_rank_ends_all_with_its_name_and_its_reason() {
    let (model, weights) = (crate::tiny::model(), crate::tiny::weights(5).freeze());
    let config = || config(Arc::new(Grpo::default()), OffPolicy::default());
    for shard in [Shard::Gradients, Shard::Parameters] {
        let (text, ended) = led(2, shard, config, |config| {
            let backend = LocalBackend::new(config, model.clone(), weights.read()).unwrap();
            let mut batch = collate(&rollouts(0), Aggregation::TokenMean).unwrap();
            // No model has this token. In the last micro-batch, which is not rank 0's.
            batch.sequences.last_mut().unwrap().inputs.fill(1 << 20);
            backend.forward_backward(Arc::new(batch)).wait().unwrap_err().to_string()
        });
        assert!(text.contains("rank 1 on ") && text.contains("index out of range"), "{}: {text}", shard.word());
        assert!(ended.iter().all(Result::is_err), "{}: {ended:?}", shard.word());
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
            Member::join(place(rank, 2, port), &settings(), recipes[rank], models(sums[rank]), None).map(drop).unwrap_err()
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
    let error = Member::join(place(0, 2, port), &settings(), "", BTreeMap::new(), None).map(drop).unwrap_err();
    assert_eq!(error, RankError::Port(port), "{error}");
    let short = Ranks { start_timeout: 0.5, ..settings() };
    let error = Member::join(place(0, 3, free_port()), &short, "", BTreeMap::new(), None).map(drop).unwrap_err().to_string();
    assert!(error.contains("of 3 ranks, 1, 2 did not start within 0.5 seconds"), "{error}");
}

#[test]
fn a_rank_that_starts_again_before_the_others_have_ended_joins_the_next_start() {
    let port = free_port();
    let join = |rank| Member::join(place(rank, 2, port), &settings(), "", BTreeMap::new(), None).unwrap();
    std::thread::scope(|scope| {
        let (first, second) = (scope.spawn(move || join(0)), join(1));
        let first = first.join().unwrap();
        let again = scope.spawn(move || join(1));
        let store = Store::open("127.0.0.1", port, false, "rollflow/", std::time::Duration::from_secs(60)).unwrap();
        while store.get("started/1").unwrap().as_deref() == Some(b"1") {
            assert!(!again.is_finished());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        second.end(0);
        first.end(0);
        drop((store, second, first));
        let next = scope.spawn(move || join(0));
        let [next, again] = [next, again].map(|rank| rank.join().unwrap());
        again.end(0);
        next.end(0);
    });
}
