//! Models that give one number: what transformers computes with its sequence classifiers, and training them under the laws that hold for
//! language models (N1, N4, C1).
//!
//! `scripts/golden_scores.py` makes the folders in `tests/golden/scores`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rollflow::algo::{Aggregation, BradleyTerry, Loss, LossInputs, LossOutput, Schedule};
use rollflow::model::{Decoder, ModelConfig, Packed, Weights, load_hf, save_hf};
use rollflow::train::{
    AdamW, DecayScope, LocalBackend, LocalConfig, SaveCheckpoint, TrainBatch, TrainSequence, TrainingBackend, collate,
};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = fs::read_dir("tests/golden/scores").unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert_eq!(folders.len(), 4, "one for each family");
    folders
}

fn golden(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("golden/golden.json")).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn tokens(value: &Value) -> Vec<i64> {
    numbers(value).into_iter().map(|token| token as i64).collect()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

#[track_caller]
fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 2e-5 * (1.0 + expected.abs()), "{what}: {found}, expected {expected}");
    }
}

/// A batch that asks for the scores at `rows` of each sequence.
fn asking(sequences: Vec<(Vec<i64>, Vec<usize>)>) -> TrainBatch {
    let batch_tokens = sequences.iter().map(|(_, rows)| rows.len()).sum();
    let sequence = |(at, (inputs, rows)): (usize, (Vec<i64>, Vec<usize>))| TrainSequence {
        group: at as u64,
        targets: vec![0; rows.len()],
        weights: vec![1.0 / batch_tokens as f64; rows.len()],
        versions: vec![None; rows.len()],
        advantages: vec![f64::NAN; rows.len()],
        inputs,
        rows,
        ..TrainSequence::default()
    };
    TrainBatch { sequences: sequences.into_iter().enumerate().map(sequence).collect(), batch_tokens, ..TrainBatch::default() }
}

#[test]
fn scores_are_those_of_transformers_at_every_token() {
    for folder in folders() {
        let (golden, (config, weights)) = (golden(&folder), load_hf(&folder).unwrap());
        assert!(config.scores);
        let sequences = list(&golden["sequences"]).iter().map(tokens).map(|ids| (ids.clone(), (0..ids.len()).collect()));
        let backend =
            LocalBackend::new(LocalConfig::new(BradleyTerry::default(), Schedule::constant(0.0)), config, weights).unwrap();
        let scores = backend.score(Arc::new(asking(sequences.collect()))).wait().unwrap();
        for (found, expected) in scores.iter().zip(list(&golden["every"])) {
            assert_near(&folder.display().to_string(), found, &numbers(expected));
        }
        // The text's own score is read off its last token that is no padding, 0 here: `score_sample` asks for that.
        for ((scores, pooled), ids) in scores.iter().zip(numbers(&golden["pooled"])).zip(list(&golden["sequences"])) {
            let last = tokens(ids).iter().rposition(|token| *token != 0).unwrap();
            assert_near("pooled", &scores[last..=last], &[pooled]);
        }
    }
}

#[test]
fn pairs_train_it_as_pytorch_does() {
    for folder in folders() {
        let (golden, (config, weights)) = (golden(&folder), load_hf(&folder).unwrap());
        let of = |key: &str| golden["optimizer"][key].as_f64().unwrap();
        let adamw = AdamW { epsilon: of("eps"), weight_decay: of("weight_decay"), ..AdamW::default() };
        let local = LocalConfig {
            adamw,
            // `torch.optim.AdamW(model.parameters())`.
            decay: DecayScope::All,
            max_grad_norm: Some(of("clip_norm")),
            // Parts every pair.
            micro_batch_tokens: 1,
            ..LocalConfig::new(BradleyTerry::default(), Schedule::constant(of("lr")))
        };
        let backend = LocalBackend::new(local, config, weights).unwrap();
        let answers = list(&golden["pairs"]).iter().flat_map(list).map(tokens);
        let batch = Arc::new(asking(answers.map(|ids| (ids.clone(), vec![ids.len() - 1])).collect()));
        for expected in list(&golden["steps"]) {
            let scores = backend.score(batch.clone()).wait().unwrap().concat();
            assert_near("scores", &scores, &numbers(&expected["scores"]));
            let seen = backend.forward_backward(batch.clone()).wait().unwrap();
            assert_near("loss", &[seen.loss], &[expected["loss"].as_f64().unwrap()]);
            let norm = backend.optim_step().wait().unwrap().grad_norm;
            assert_near("gradient", &[norm], &[expected["grad_norm"].as_f64().unwrap()]);
        }
        let after = backend.snapshot().wait().unwrap().weights.read();
        let expected = Tensor::read_safetensors(folder.join("golden/expected.safetensors")).unwrap();
        assert_eq!(expected.len(), after.layout.entries().len(), "every parameter is compared");
        for (name, expected) in expected {
            let entry = after.layout.find(&name).unwrap();
            let found = after.flat.narrow(0, entry.offset as i64, entry.len() as i64);
            assert!(found.allclose(&expected.view([-1]), 1e-4, 2e-6, false), "{}: {name} after three steps", folder.display());
        }
    }
}

#[test]
fn a_folder_of_a_score_model_is_written_as_it_was_read() {
    for folder in folders() {
        let (config, weights) = load_hf(&folder).unwrap();
        let copy = tempfile::tempdir().unwrap();
        save_hf(copy.path(), &config, &weights).unwrap();
        let json = |folder: &Path| -> Value { serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap() };
        let (was, is) = (json(&folder), json(copy.path()));
        for key in ["architectures", "id2label", "label2id", "model_type", "tie_word_embeddings", "pad_token_id"] {
            assert_eq!(was[key], is[key], "{key}");
        }
        let (again, copied) = load_hf(copy.path()).unwrap();
        assert!(again == config && copied.flat == weights.flat && copied.layout == weights.layout);
    }
}

/// A copy of a golden folder with other keys in its `config.json`.
fn changed(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let from = Path::new("tests/golden/scores/llama");
    fs::copy(from.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    change(config.as_object_mut().unwrap());
    fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    copy
}

#[test]
fn a_classifier_of_several_labels_and_a_head_that_is_not_the_configured_one_are_refused_by_name() {
    let error = |folder: tempfile::TempDir| load_hf(folder.path()).unwrap_err().to_string();
    let three = error(changed(|config| drop(config.insert("id2label".into(), json!({"0": "a", "1": "b", "2": "c"})))));
    assert!(three.contains("`id2label` = ") && three.contains("one label"), "{three}");
    let five = error(changed(|config| {
        config.remove("id2label");
        config.insert("num_labels".into(), json!(5));
    }));
    assert!(five.contains("`num_labels` = 5"), "{five}");
    let two = error(changed(|config| drop(config.remove("id2label"))));
    assert!(two.contains("`id2label` is missing"), "{two}");

    let words = error(changed(|config| drop(config.insert("architectures".into(), json!(["LlamaForCausalLM"])))));
    assert!(words.contains("missing (1): lm_head.weight") && words.contains("unexpected (1): score.weight"), "{words}");
}

#[test]
fn a_language_model_lends_its_body_to_a_score() {
    for tied in [true, false] {
        let config = ModelConfig { tied, ..crate::tiny::model() };
        let weights = Weights::random(&config, 1);
        let scoring = config.scoring();
        let (zero, drawn) = (weights.scoring(&config, None), weights.scoring(&config, Some(7)));
        let body = zero.layout.find("score.weight").unwrap().offset as i64;
        for scored in [&zero, &drawn] {
            assert!(
                scored.flat.narrow(0, 0, body) == weights.flat.narrow(0, 0, body)
                    && scored.layout.find("lm_head.weight").is_none()
            );
        }
        assert!(drawn.flat.narrow(0, body, 16).abs().min().double_value(&[]) > 0.0);
        assert!(drawn.flat == weights.scoring(&config, Some(7)).flat && drawn.flat != weights.scoring(&config, Some(8)).flat);
        let local = LocalConfig::new(BradleyTerry::default(), Schedule::constant(0.0));
        let backend = LocalBackend::new(local, scoring, zero).unwrap();
        let scores = backend.score(Arc::new(asking(vec![(vec![3, 1, 4], vec![0, 1, 2])]))).wait().unwrap();
        assert_eq!(scores, [[0.0; 3]]);
    }
}

fn score_model(seed: u64) -> (ModelConfig, Weights) {
    let config = crate::tiny::model().scoring();
    let weights = Weights::random(&config, seed);
    (config, weights)
}

/// A critic's loss in its simplest form: half the weighted square distance of each score from its token's advantage.
fn regression(inputs: &LossInputs) -> LossOutput {
    let off = |at: usize| inputs.log_probs[at] - inputs.advantages[at];
    let tokens = 0..inputs.log_probs.len();
    let loss = tokens.clone().map(|at| 0.5 * inputs.weights[at] * off(at).powi(2)).sum();
    LossOutput { loss, grad: tokens.map(|at| inputs.weights[at] * off(at)).collect(), ..LossOutput::default() }
}

/// Whose updates are −gradient: with β₁ = β₂ = 0, huge ε and no clipping.
fn reads_gradients(loss: impl Loss + 'static) -> LocalConfig {
    let adamw = AdamW { beta1: 0.0, beta2: 0.0, epsilon: 1e6, ..AdamW::default() };
    LocalConfig { adamw, max_grad_norm: None, threads: Some(1), ..LocalConfig::new(loss, Schedule::constant(1e6)) }
}

fn learn(config: LocalConfig, batch: &TrainBatch) -> (f64, Tensor) {
    let (model, before) = score_model(5);
    let backend = LocalBackend::new(config, model, before.copy()).unwrap();
    let seen = backend.forward_backward(Arc::new(batch.clone())).wait().unwrap();
    assert_eq!(seen.gap.tokens, 0, "a score is compared with no log-probability");
    backend.optim_step().wait().unwrap();
    (seen.loss, before.flat - backend.snapshot().wait().unwrap().weights.read().flat)
}

/// A score belongs to the row that predicts the token: the state before it.
#[test]
fn scores_and_gradients_are_those_of_the_rows_that_predict_trained_tokens() {
    let samples = crate::tiny::rollouts(&[(2, 3), (1, 5), (4, 1)], 9);
    let batch = collate(&samples, Aggregation::TokenMean).unwrap();
    let (config, weights) = score_model(5);
    let flat = weights.copy().flat.set_requires_grad(true);
    let decoder = Decoder::new(&config, weights.layout.clone());
    let views = decoder.views(&flat);
    let mut expected = Tensor::from(0.0);
    for (sample, sequence) in samples.iter().zip(&batch.sequences) {
        let scores = decoder.logits(&views, &decoder.hidden(&views, &Packed::new([&sample.tokens[..]]))).squeeze_dim(1);
        let first = (sample.tokens.len() - sample.response_length()) as i64 - 1;
        let off = scores.narrow(0, first, sample.response_length() as i64) - sample.advantage.unwrap();
        expected += off.square().sum(Kind::Float) * 0.5 * sequence.weights[0];
    }
    let gradient = Tensor::run_backward(&[&expected], &[&flat], false, false).remove(0);
    let loss = |inputs: &LossInputs| Ok(regression(inputs));
    for micro_batch_tokens in [1000, 6, 1] {
        let (found, moved) = learn(LocalConfig { micro_batch_tokens, ..reads_gradients(loss) }, &batch);
        assert!((found - expected.double_value(&[])).abs() < 1e-5, "{found}");
        assert!(moved.allclose(&gradient, 1e-3, 1e-5, false), "law N1, micro-batches of {micro_batch_tokens}");
    }
}

/// By central differences of the loss along single weights of the head and of the body.
#[test]
fn gradients_equal_finite_differences() {
    let batch = collate(&crate::tiny::rollouts(&[(2, 3), (1, 5)], 4), Aggregation::SeqMeanTokenMean).unwrap();
    let loss = |inputs: &LossInputs| Ok(regression(inputs));
    let (_, gradient) = learn(reads_gradients(loss), &batch);
    let (config, weights) = score_model(5);
    let at = |name: &str, further: usize| weights.layout.find(name).unwrap().offset + further;
    for place in
        [at("score.weight", 3), at("score.weight", 9), at("model.norm.weight", 2), at("model.layers.0.mlp.down_proj.weight", 40)]
    {
        let value = |by: f64| {
            let moved = weights.copy();
            drop(moved.flat.narrow(0, place as i64, 1).g_add_scalar_(by));
            let backend = LocalBackend::new(reads_gradients(loss), config.clone(), moved).unwrap();
            backend.forward_backward(Arc::new(batch.clone())).wait().unwrap().loss
        };
        let (slope, found) = ((value(1e-2) - value(-1e-2)) / 2e-2, gradient.double_value(&[place as i64]));
        assert!((slope - found).abs() < 2e-3 * (1.0 + found.abs()), "weight {place}: {found}, by differences {slope}");
    }
}

/// Law C1.
#[test]
fn its_checkpoint_is_a_classifiers_folder_and_goes_on_to_the_bit() {
    let run = tempfile::tempdir().unwrap();
    let batch = Arc::new(asking((0..4).map(|n| (vec![n, n + 1, n + 2], vec![2])).collect()));
    let start = || {
        let (config, weights) = score_model(5);
        let local = LocalConfig { threads: Some(1), ..LocalConfig::new(BradleyTerry::default(), Schedule::constant(0.01)) };
        LocalBackend::new(local, config, weights).unwrap()
    };
    let step = |backend: &LocalBackend| {
        backend.forward_backward(batch.clone());
        backend.optim_step().wait().unwrap();
    };
    let first = start();
    step(&first);
    let request = SaveCheckpoint { run_folder: run.path().into(), step: 1, ..SaveCheckpoint::default() };
    let folder = first.save_checkpoint(request).wait().unwrap();
    step(&first);
    let second = start();
    second.load_checkpoint(&folder).wait().unwrap();
    step(&second);
    let flat = |backend: &LocalBackend| backend.snapshot().wait().unwrap().weights.read().flat;
    assert!(flat(&first) == flat(&second));
    let (config, _) = load_hf(&folder).unwrap();
    assert_eq!(config.to_json()["architectures"], json!(["Qwen2ForSequenceClassification"]));
}

/// Law N4.
#[test]
fn a_score_that_is_not_finite_stops_training_and_names_its_sample() {
    let (config, weights) = score_model(5);
    drop(weights.flat.narrow(0, weights.layout.find("score.weight").unwrap().offset as i64, 1).fill_(f64::NAN));
    let local = LocalConfig { threads: Some(1), ..LocalConfig::new(BradleyTerry::default(), Schedule::constant(0.01)) };
    let backend = LocalBackend::new(local, config, weights).unwrap();
    let error = backend.forward_backward(Arc::new(asking(vec![(vec![1], vec![0]), (vec![2], vec![0])]))).wait().unwrap_err();
    let expected = "the loss is not finite; it comes from sample 0 of group 0 (the model's scores), sample 0 of group 1 (the model's scores)";
    assert_eq!(error.to_string(), expected);
    assert!(backend.optim_step().wait().unwrap_err().to_string().contains("an earlier command failed"));
}
