//! The loss that spreads tokens over experts, against transformers (scripts/golden_router_loss.py).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::Sample;
use rollflow::model::{Lora, ModelConfig, Weights, load_hf};
use rollflow::train::{ForwardBackward, LocalBackend, LocalConfig, TrainBatch, TrainingBackend, collate, collate_part};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    rows: Vec<Vec<u32>>,
    models: BTreeMap<String, Vec<Expected>>,
}

#[derive(Deserialize)]
struct Expected {
    coef: f64,
    loss: f64,
    router_loss: f64,
    grad_norm: f64,
}

fn golden() -> Golden {
    serde_json::from_str(&std::fs::read_to_string("tests/golden/router_loss.json").unwrap()).unwrap()
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

#[test]
fn a_model_without_experts_has_no_such_loss() {
    let (config, weights) = model("qwen2_tied");
    let Err(refused) = LocalBackend::new(with(0.1), config, weights) else { panic!("it was accepted") };
    assert!(refused.to_string().contains("mixture of experts"), "{refused}");
}
