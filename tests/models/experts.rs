//! The loss that spreads tokens over experts, and experts that a generator chose, against transformers (scripts/golden_routers.py).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::{ANY_EXPERT, Routes, Sample};
use rollflow::model::{Lora, ModelConfig, Weights, load_hf};
use rollflow::train::{
    ForwardBackward, LocalBackend, LocalConfig, RouterReplay, TrainBatch, TrainingBackend, collate, collate_part,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    rows: Vec<Vec<u32>>,
    models: BTreeMap<String, Vec<Expected>>,
    replayed: BTreeMap<String, Replayed>,
}

#[derive(Deserialize)]
struct Replayed {
    layers: usize,
    per_token: usize,
    /// Of each row.
    experts: Vec<Vec<u16>>,
    loss: f64,
    grad_norm: f64,
}

impl Replayed {
    fn samples(&self, rows: &[Vec<u32>]) -> Vec<Sample> {
        let sample = |(row, experts): (&Vec<u32>, &Vec<u16>)| Sample {
            routes: Some(Routes { layers: self.layers, per_token: self.per_token, experts: experts.clone() }),
            ..Sample::supervised(&row[..1], &row[1..])
        };
        rows.iter().zip(&self.experts).map(sample).collect()
    }
}

#[derive(Deserialize)]
struct Expected {
    coef: f64,
    loss: f64,
    router_loss: f64,
    grad_norm: f64,
}

fn golden() -> Golden {
    serde_json::from_str(&std::fs::read_to_string("tests/golden/routers.json").unwrap()).unwrap()
}

fn model(name: &str) -> (ModelConfig, Weights) {
    load_hf(&Path::new("tests/golden/models").join(name)).unwrap()
}

fn batch(rows: &[Vec<u32>]) -> Arc<TrainBatch> {
    let samples: Vec<Sample> = rows.iter().map(|row| Sample::supervised(&row[..1], &row[1..])).collect();
    Arc::new(collate(&samples, Aggregation::TokenMean).unwrap())
}

/// One step by a trainer with the loss's weight: what it saw, the gradient's norm, and the numbers after it.
fn step((config, weights): (&ModelConfig, &Weights), of: LocalConfig, batch: Arc<TrainBatch>) -> (ForwardBackward, f64, Weights) {
    let trainer = LocalBackend::new(of, config.clone(), weights.copy()).unwrap();
    let seen = trainer.forward_backward(batch).wait().unwrap();
    let norm = trainer.optim_step().wait().unwrap().grad_norm;
    (seen, norm, trainer.current().wait().unwrap().weights.read())
}

fn with(router_loss: f64) -> LocalConfig {
    LocalConfig { router_loss, max_grad_norm: None, ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-3)) }
}

#[test]
fn loss_and_gradient_with_the_experts_loss_are_those_of_transformers() {
    let golden = golden();
    for (name, expected) in &golden.models {
        let (config, weights) = model(name);
        for Expected { coef, loss, router_loss, grad_norm } in expected {
            for gradient_checkpointing in [false, true] {
                let of = LocalConfig { gradient_checkpointing, ..with(*coef) };
                let (seen, norm, _) = step((&config, &weights), of, batch(&golden.rows));
                let near = |found: f64, expected: f64| (found - expected).abs() <= 1e-4 * expected.abs();
                assert!(near(seen.loss, *loss), "{name}, {coef}: loss {}, expected {loss}", seen.loss);
                assert!(
                    near(seen.router_loss.unwrap_or(0.0), *router_loss),
                    "{name}: {:?}, expected {router_loss}",
                    seen.router_loss
                );
                assert!(near(norm, *grad_norm), "{name}, {coef}: gradient {norm}, expected {grad_norm}");
            }
        }
    }
}

/// Layers that are computed again, and a base without gradient, take the same way.
#[test]
fn the_experts_loss_moves_weights_the_same_way_however_activations_are_held() {
    let (config, weights) = model("qwen3_moe");
    let adapted = weights.adapted(&config, Lora::new(4, 8.0, &[Lora::ALL]).unwrap(), 5);
    for weights in [&weights, &adapted] {
        let trained = [(false, 3.0), (true, 3.0), (false, 0.0)].map(|(gradient_checkpointing, coef)| {
            let of = LocalConfig { gradient_checkpointing, ..with(coef) };
            step((&config, weights), of, batch(&golden().rows)).2
        });
        let far = |other: &Weights| (&trained[0].merged().flat - &other.merged().flat).abs().max().double_value(&[]);
        assert!(far(&trained[1]) < 1e-5 && far(&trained[2]) > 1e-4, "{} and {}", far(&trained[1]), far(&trained[2]));
    }
}

/// Cut into micro-batches, each has its own loss, by its share of the trained tokens.
#[test]
fn micro_batches_weigh_the_experts_loss_by_their_trained_tokens() {
    let (config, weights) = model("olmoe");
    let rows = golden().rows;
    let cut = LocalConfig { micro_batch_tokens: 1, threads: Some(1), ..with(1.0) };
    let (seen, ..) = step((&config, &weights), cut, batch(&rows));
    assert_eq!(seen.micro_batches, rows.len());
    let tokens: usize = rows.iter().map(|row| row.len() - 1).sum();
    let alone = rows.iter().map(|row| {
        let (seen, ..) = step((&config, &weights), with(1.0), batch(std::slice::from_ref(row)));
        seen.router_loss.unwrap() * (row.len() - 1) as f64 / tokens as f64
    });
    let (found, expected) = (seen.router_loss.unwrap(), alone.sum::<f64>());
    assert!((found - expected).abs() < 1e-5 * expected, "{found}, expected {expected}");
}

/// A part of a batch has the weights of its tokens, by whose sum the update is divided (law N1).
#[test]
fn a_part_of_a_batch_weighs_the_experts_loss_as_its_tokens() {
    let (config, weights) = model("qwen3_moe");
    let samples: Vec<Sample> = golden().rows.iter().map(|row| Sample::supervised(&row[..1], &row[1..])).collect();
    let seen_of = |batch| step((&config, &weights), with(0.3), batch).0;
    let whole = seen_of(batch(&golden().rows));
    let (part, weight_sum) = collate_part(&samples, Aggregation::TokenMean).unwrap();
    assert!(weight_sum > 2.0);
    let found = seen_of(Arc::new(part.unwrap())).scaled(1.0 / weight_sum);
    let pairs = [(found.loss, whole.loss), (found.router_loss.unwrap(), whole.router_loss.unwrap())];
    assert!(pairs.iter().all(|(found, expected)| (found - expected).abs() < 1e-6 * expected), "{pairs:?}");
}

fn collated(samples: &[Sample]) -> Arc<TrainBatch> {
    Arc::new(collate(samples, Aggregation::TokenMean).unwrap())
}

fn replaying(router_replay: RouterReplay) -> LocalConfig {
    LocalConfig { router_replay, ..with(0.0) }
}

#[test]
fn loss_and_gradient_with_the_generators_experts_are_those_of_transformers() {
    let golden = golden();
    for (name, expected) in &golden.replayed {
        let (config, weights) = model(name);
        let samples = expected.samples(&golden.rows);
        for gradient_checkpointing in [false, true] {
            let of = LocalConfig { gradient_checkpointing, ..replaying(RouterReplay::Follow) };
            let (seen, norm, _) = step((&config, &weights), of, collated(&samples));
            let near = |found: f64, expected: f64| (found - expected).abs() <= 1e-4 * expected.abs();
            assert!(near(seen.loss, expected.loss), "{name}: loss {}, expected {}", seen.loss, expected.loss);
            assert!(near(norm, expected.grad_norm), "{name}: gradient {norm}, expected {}", expected.grad_norm);
            assert!(seen.router_mismatch.share().unwrap() > 0.2, "{name}: they were drawn by lot");
        }
        // Compared only, they change nothing.
        let [off, measured] = [RouterReplay::Off, RouterReplay::Measure].map(|of| {
            let (seen, norm, _) = step((&config, &weights), replaying(of), collated(&samples));
            (seen.loss, norm, seen.router_mismatch.share())
        });
        assert_eq!((off.0, off.1, off.2), (measured.0, measured.1, None), "{name}");
        assert!(measured.2.unwrap() > 0.2 && (off.0 - expected.loss).abs() > 1e-3, "{name}: {measured:?}");
    }
}

/// Scores, which a loss takes as the policy before its first update, follow the same experts.
#[test]
fn scores_follow_the_generators_experts() {
    let golden = golden();
    let (config, weights) = model("olmoe");
    let expected = &golden.replayed["olmoe"];
    let score = |of| {
        let trainer = LocalBackend::new(replaying(of), config.clone(), weights.copy()).unwrap();
        trainer.score(collated(&expected.samples(&golden.rows))).wait().unwrap().concat()
    };
    let followed = score(RouterReplay::Follow);
    let loss = -followed.iter().sum::<f64>() / followed.len() as f64;
    assert!((loss - expected.loss).abs() < 1e-4, "{loss}, expected {}", expected.loss);
    assert_ne!(followed, score(RouterReplay::Measure));
}

/// A prompt that a group shares is computed once where its experts are the same, and once for each where they are not.
#[test]
fn shared_prompts_follow_the_experts_of_each_sample() {
    let golden = golden();
    let (config, weights) = model("qwen3_moe");
    let of = &golden.replayed["qwen3_moe"];
    let width = of.layers * of.per_token;
    let (prompt, experts) = (&golden.rows[0][..5], &of.experts[0]);
    for (own_experts, known) in [(false, 7), (true, 7), (false, 3)] {
        let sample = |at: usize, group: u64| {
            let mut experts = experts[..known * width].to_vec();
            if own_experts && at == 1 {
                experts[..width].reverse();
            }
            // Answers differ, and so do their experts.
            experts.iter_mut().skip(5 * width).for_each(|expert| *expert = (*expert + at as u16) % 4);
            experts.resize(7 * width, ANY_EXPERT);
            let routes = Some(Routes { layers: of.layers, per_token: of.per_token, experts });
            let answer = [20 + at as u32, 7, 9 + at as u32];
            Sample { group_index: group, index: at as u32, routes, ..Sample::supervised(prompt, &answer) }
        };
        let [shared, apart] = [[0, 0, 0], [0, 1, 2]].map(|groups| {
            let samples: Vec<Sample> = (0..3).map(|at| sample(at, groups[at])).collect();
            let of = LocalConfig { threads: Some(1), ..replaying(RouterReplay::Follow) };
            let (seen, norm, trained) = step((&config, &weights), of, collated(&samples));
            (seen.loss, norm, trained)
        });
        // One step of AdamW, which may move by the rounding of a gradient that is almost 0.
        let far = (&shared.2.flat - &apart.2.flat).abs().mean(tch::Kind::Double).double_value(&[]);
        let gap = (shared.0 - apart.0).abs() + (shared.1 - apart.1).abs();
        assert!(far < 1e-6 && gap < 1e-5, "{own_experts}, {known}: {far} and {gap}");
    }
}

#[test]
fn experts_of_another_model_are_refused_with_the_sample() {
    let golden = golden();
    let (config, weights) = model("qwen3_moe");
    let of = &golden.replayed["qwen3_moe"];
    let refused = |change: fn(&mut Routes), replay| {
        let mut samples = of.samples(&golden.rows);
        samples[1].group_index = 7;
        change(samples[1].routes.as_mut().unwrap());
        let trainer = LocalBackend::new(replaying(replay), config.clone(), weights.copy()).unwrap();
        trainer.forward_backward(collated(&samples)).wait().err().map(|error| error.to_string())
    };
    type Change = fn(&mut Routes);
    let problems: [(Change, &str); 3] = [
        (|routes| routes.layers += 1, "sample 0 of group 7: its routes are of"),
        (|routes| routes.experts[0] = 900, "name expert 900"),
        (|routes| routes.experts.truncate(routes.experts.len() - 1), "which are not"),
    ];
    for (change, expected) in problems {
        let error = refused(change, RouterReplay::Follow).unwrap();
        assert!(error.contains(expected), "{error}: expected {expected:?}");
        assert_eq!(refused(change, RouterReplay::Off), None, "nothing reads them");
    }
}

#[test]
fn a_model_without_experts_has_no_such_loss() {
    let (config, weights) = model("qwen2_tied");
    let Err(refused) = LocalBackend::new(with(0.1), config, weights) else { panic!("it was accepted") };
    assert!(refused.to_string().contains("mixture of experts"), "{refused}");
}
