//! The local backend: it learns, answers in order, keeps its state through a checkpoint, and names what is broken.

use std::path::Path;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt;
use rollflow::algo::{
    Aggregation, CrossEntropy, Decay, Grpo, Importance, Level, Loss, LossError, LossInputs, LossOutput, OffPolicy, Proximal,
    Schedule,
};
use rollflow::data::Sample;
use rollflow::model::{ModelConfig, Weights};
use rollflow::train::{
    AdamW, DecayScope, LocalBackend, LocalConfig, LrScale, NonFinitePolicy, SaveCheckpoint, SftConfig, TrainBatch, TrainError,
    TrainingBackend, collate, run_sft_training,
};
use tch::Tensor;

fn sft() -> LocalConfig {
    LocalConfig { threads: Some(1), ..LocalConfig::new(CrossEntropy, Schedule::constant(0.01)) }
}

fn backend(config: LocalConfig) -> LocalBackend {
    LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(1)).unwrap()
}

fn batch() -> Arc<TrainBatch> {
    Arc::new(collate(&crate::tiny::counting(), Aggregation::TokenMean).unwrap())
}

fn flat(backend: &LocalBackend) -> Tensor {
    backend.snapshot().wait().unwrap().weights.read().flat
}

fn rollouts() -> Vec<Sample> {
    crate::tiny::rollouts(&[(2, 3), (1, 5), (4, 2)], 3)
}

#[test]
fn supervised_loss_falls_on_a_toy_set() {
    let backend = backend(sft());
    let config = SftConfig { num_steps: 60, batch_size: 10, ..SftConfig::default() };
    let mut seen = Vec::new();
    let steps = run_sft_training(&backend, &crate::tiny::counting(), &config, |step, _| seen.push(step)).unwrap();
    assert_eq!(seen, (1..=60).collect::<Vec<u64>>());
    let loss = |at: usize| steps[at]["loss"];
    assert!(loss(0) > 2.0 && loss(59) < 0.3 * loss(0), "{} {}", loss(0), loss(59));
    assert_eq!(steps[59]["perplexity_tokens"], loss(59).exp(), "R176: e to the mean negative log-likelihood");
}

/// As in transformers, whose embedding has the padding token as `padding_idx`.
#[test]
fn the_padding_token_s_row_of_the_embedding_learns_nothing_from_inputs() {
    let config = ModelConfig { tied: false, pad_token_id: Some(5), ..crate::tiny::model() };
    for gradient_checkpointing in [false, true] {
        let weights = Weights::random(&config, 1);
        let before = weights.flat.copy();
        let training = LocalConfig { gradient_checkpointing, adamw: AdamW { weight_decay: 0.0, ..sft().adamw }, ..sft() };
        let backend = LocalBackend::new(training, config.clone(), weights).unwrap();
        backend.forward_backward(batch()).wait().unwrap();
        backend.optim_step().wait().unwrap();
        let row = |of: &Tensor, token: i64| of.narrow(0, token * config.hidden_size as i64, config.hidden_size as i64);
        let after = flat(&backend);
        let moved: Vec<i64> = (2..14).filter(|token| row(&after, *token) != row(&before, *token)).collect();
        assert_eq!(moved, [2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13], "the embedding is the first matrix");
    }
}

#[test]
fn reinforcement_raises_the_probability_of_what_was_rewarded() {
    let backend = backend(LocalConfig { loss: Arc::new(Grpo::default()), ..sft() });
    let mut samples = rollouts();
    let log_probs = |samples: &[Sample]| {
        let batch = collate(samples, Aggregation::SeqMeanTokenMean).unwrap();
        backend.forward_backward(Arc::new(batch)).wait().unwrap()
    };
    samples.iter_mut().enumerate().for_each(|(i, sample)| sample.advantage = Some(if i == 0 { 1.0 } else { 0.0 }));
    let before = log_probs(&samples[..1]);
    backend.optim_step().wait().unwrap();
    let after = log_probs(&samples[..1]);
    assert!(after.gap.ratio() > before.gap.ratio());
    assert!(before.gap.mean() > 0.0 && before.gap.max() >= before.gap.mean() && before.gap.tokens == 3);
}

/// Decoupled PPO: with several updates from one batch, ratios are taken against the trainer as it was before the first, and importance
/// weights span from there to the policy that sampled, whatever the weights have become since.
#[test]
fn the_proximal_policy_stays_where_it_was_before_the_first_update() {
    let seen: Arc<Mutex<Vec<[Vec<f64>; 3]>>> = Arc::default();
    let noted = seen.clone();
    let loss = move |inputs: &LossInputs| {
        let column = |values: Option<&[f64]>| values.unwrap().to_vec();
        noted.lock().unwrap().push([inputs.log_probs.to_vec(), column(inputs.proximal), column(inputs.importance)]);
        Grpo::default().evaluate(inputs)
    };
    let weigh = Some(Importance::truncated(Level::Token, 1e6));
    let off_policy = OffPolicy { proximal: Proximal::Recompute, weigh, reject: Vec::new() };
    let backend = backend(LocalConfig { loss: Arc::new(loss), off_policy, ..sft() });
    let batch = collate(&rollouts(), Aggregation::TokenMean).unwrap();
    let behaviour: Vec<f64> = batch.sequences.iter().flat_map(|sequence| sequence.behaviour.clone().unwrap()).collect();
    let scores = backend.score(Arc::new(batch.clone())).wait().unwrap();
    let scored = Arc::new(batch.clone().with_proximal(scores.clone()));
    for _ in 0..2 {
        backend.forward_backward(scored.clone()).wait().unwrap();
        backend.optim_step().wait().unwrap();
    }
    // Without a score of its own, a batch's next update counts as its first.
    backend.forward_backward(Arc::new(batch)).wait().unwrap();
    let seen = seen.lock().unwrap();
    let (scores, [first, second, fresh]) = (scores.concat(), <&[_; 3]>::try_from(seen.as_slice()).unwrap());
    let [own, proximal, importance] = first;
    assert_eq!((own, proximal), (&scores, &scores), "the first update's own pass is the score");
    assert!(second[0] != scores && second[1] == scores && &second[2] == importance);
    assert_eq!(fresh[0], fresh[1]);
    for ((weight, p), b) in importance.iter().zip(proximal).zip(&behaviour) {
        assert!((weight - (p - b).exp()).abs() < 1e-9);
    }
}

#[test]
fn commands_run_in_the_order_they_were_submitted() {
    let backend = backend(sft());
    let futures: Vec<_> = (0..3).map(|_| (backend.forward_backward(batch()), backend.optim_step())).collect();
    let version = backend.snapshot();
    assert_eq!(version.wait().unwrap().step, 3);
    let mut answers = futures.iter().map(|(forward, update)| (forward.clone().now_or_never(), update.clone().now_or_never()));
    assert!(answers.all(|(forward, update)| forward.is_some() && update.is_some()));
    let steps: Vec<u64> = futures.iter().map(|(_, update)| update.wait().unwrap().step).collect();
    assert_eq!(steps, [1, 2, 3]);
    let losses: Vec<f64> = futures.iter().map(|(forward, _)| forward.wait().unwrap().loss).collect();
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]));
    assert_eq!(futures[0].1.wait().unwrap(), futures[0].1.wait().unwrap());
}

#[tokio::test]
async fn answers_can_be_awaited() {
    let backend = backend(sft());
    let forward = backend.forward_backward(batch());
    let update = backend.optim_step();
    assert_eq!(update.clone().await.unwrap().step, 1);
    assert_eq!(update.await.unwrap().step, 1);
    assert!(forward.await.unwrap().loss > 0.0);
}

#[test]
fn the_rate_follows_its_schedule_and_both_norms_are_reported() {
    let schedule = Schedule { lr: 0.1, decay: Decay::Linear, warmup_steps: 2, total_steps: 6, floor: 0.0 };
    let backend = backend(LocalConfig { schedule, max_grad_norm: Some(0.01), ..sft() });
    for step in 0..6 {
        assert_eq!(backend.state().lr, schedule.at(step));
        backend.forward_backward(batch()).wait().unwrap();
        let update = backend.optim_step().wait().unwrap();
        assert_eq!((update.lr, update.step), (schedule.at(step), step + 1));
        assert!(update.grad_norm > 0.01 && (update.grad_norm_clipped - 0.01).abs() < 1e-6);
    }
}

#[test]
fn a_custom_loss_trains() {
    let likelihood = |inputs: &LossInputs| {
        let loss = -inputs.log_probs.iter().sum::<f64>();
        Ok(LossOutput { loss, grad: vec![-1.0; inputs.log_probs.len()], ..LossOutput::default() })
    };
    let backend = backend(LocalConfig { loss: Arc::new(likelihood), ..sft() });
    let step = |_| {
        let seen = backend.forward_backward(batch()).wait().unwrap();
        backend.optim_step().wait().unwrap();
        seen.loss
    };
    let losses: Vec<f64> = (0..5).map(step).collect();
    assert!(losses[4] < losses[0]);
}

/// Notes the advantages that it sees, and pulls at each token by its own.
struct Noting(Arc<Mutex<Vec<Vec<f64>>>>);

impl Loss for Noting {
    fn whole_batch(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        self.0.lock().unwrap().push(inputs.advantages.to_vec());
        Ok(LossOutput { grad: inputs.advantages.to_vec(), ..LossOutput::default() })
    }
}

/// Such a loss may compare neighbours, as pairs are. Sequences without an advantage are computed last.
#[test]
fn a_loss_over_the_whole_batch_sees_the_batch_s_own_order_however_it_is_cut() {
    let mut samples = crate::tiny::rollouts(&[(2, 3), (1, 5), (4, 2), (3, 3)], 3);
    for (at, sample) in samples.iter_mut().enumerate() {
        sample.advantage = Some(if at % 3 == 1 { 0.0 } else { 1.0 + at as f64 });
    }
    let batch = Arc::new(collate(&samples, Aggregation::SeqMeanTokenMean).unwrap());
    let own: Vec<f64> = batch.sequences.iter().flat_map(|sequence| sequence.advantages.clone()).collect();
    let norm = |micro_batch_tokens: usize| {
        let seen = Arc::default();
        let backend = backend(LocalConfig { loss: Arc::new(Noting(Arc::clone(&seen))), micro_batch_tokens, ..sft() });
        let passed = backend.forward_backward(batch.clone()).wait().unwrap();
        assert_eq!(seen.lock().unwrap()[..], *std::slice::from_ref(&own), "{} parts", passed.micro_batches);
        (passed.micro_batches, backend.optim_step().wait().unwrap().grad_norm)
    };
    let ((_, whole), (parts, cut)) = (norm(1000), norm(8));
    assert!(parts > 3 && (whole - cut).abs() < 1e-5 * whole, "{parts} parts: {cut}, {whole}");
}

#[test]
fn a_failed_command_poisons_the_backend_with_the_first_cause() {
    let backend = backend(sft());
    assert!(matches!(backend.optim_step().wait(), Err(TrainError::NoGradient)));
    let refused = backend.forward_backward(batch()).wait().unwrap_err();
    assert!(matches!(&refused, TrainError::Poisoned(cause) if matches!(**cause, TrainError::NoGradient)), "{refused}");
    assert!(matches!(backend.state().poisoned, Some(TrainError::NoGradient)));
    let again = backend.snapshot().wait().unwrap_err();
    assert_eq!(again.to_string(), refused.to_string());
    // What was learned before can still be saved.
    let folder = tempfile::tempdir().unwrap();
    let request = SaveCheckpoint { run_folder: folder.path().into(), step: 0, ..SaveCheckpoint::default() };
    assert!(backend.save_checkpoint(request).wait().unwrap().join("metadata.json").exists());
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error_and_not_a_crash() {
    let backend = backend(sft());
    let batch = collate(&[Sample::supervised(&[999], &[1])], Aggregation::TokenMean).unwrap();
    assert!(matches!(backend.forward_backward(Arc::new(batch)).wait(), Err(TrainError::Tensor(_))));
}

#[test]
fn a_missing_advantage_is_named_with_its_sample() {
    let backend = backend(LocalConfig { loss: Arc::new(Grpo::default()), ..sft() });
    let mut samples = rollouts();
    samples[1].advantage = None;
    let batch = collate(&samples, Aggregation::TokenMean).unwrap();
    let error = backend.forward_backward(Arc::new(batch)).wait().unwrap_err();
    assert_eq!(error.to_string(), "the loss is not finite; it comes from sample 1 of group 0 (it has no advantage)");
}

/// Weights whose forward pass is fine and whose gradient is not.
fn poison_one_weight(weights: Weights, name: &str) -> Weights {
    let entry = weights.layout.find(name).unwrap();
    drop(weights.flat.narrow(0, entry.offset as i64, 1).fill_(f64::NAN));
    weights
}

#[test]
fn non_finite_numbers_stop_by_default_and_are_named() {
    let weights = poison_one_weight(crate::tiny::weights(1), "model.layers.1.mlp.down_proj.weight");
    let backend = LocalBackend::new(sft(), crate::tiny::model(), weights).unwrap();
    let error = backend.forward_backward(batch()).wait().unwrap_err();
    let TrainError::NonFinite("the loss", names) = &error else { panic!("{error}") };
    assert_eq!(names[0], "sample 0 of group 0 (the model's log-probabilities)");
    assert_eq!(names.last().unwrap(), "5 more");

    let endless =
        |inputs: &LossInputs| Ok(LossOutput { loss: 1.0, grad: vec![1e38; inputs.log_probs.len()], ..LossOutput::default() });
    let backend = self::backend(LocalConfig { loss: Arc::new(endless), ..sft() });
    backend.forward_backward(batch()).wait().unwrap();
    let error = backend.optim_step().wait().unwrap_err();
    let TrainError::NonFinite("the gradient", names) = &error else { panic!("{error}") };
    assert!(names.iter().any(|name| name.starts_with("model.")), "{names:?}");
}

#[test]
fn a_step_can_be_skipped_instead() {
    let backend = backend(LocalConfig { loss: Arc::new(Grpo::default()), non_finite: NonFinitePolicy::Skip, ..sft() });
    let before = flat(&backend);
    let mut bad = rollouts();
    bad[0].advantage = None;
    for samples in [&bad, &rollouts()] {
        let batch = collate(samples, Aggregation::TokenMean).unwrap();
        let seen = backend.forward_backward(Arc::new(batch)).wait().unwrap();
        assert_eq!(seen.skipped.is_some(), samples[0].advantage.is_none());
    }
    let update = backend.optim_step().wait().unwrap();
    assert!(update.step == 0 && update.grad_norm.is_nan() && update.grad_norm_clipped.is_nan());
    assert!(update.skipped.unwrap().contains("sample 0 of group 0"));
    assert_eq!(flat(&backend), before);
    let good = collate(&rollouts(), Aggregation::TokenMean).unwrap();
    backend.forward_backward(Arc::new(good)).wait().unwrap();
    assert_eq!(backend.optim_step().wait().unwrap().step, 1);
    assert_ne!(flat(&backend), before);
}

#[test]
fn training_continues_from_a_checkpoint_bit_for_bit() {
    let run = |backend: &LocalBackend, steps: usize| {
        for _ in 0..steps {
            backend.forward_backward(batch());
            backend.optim_step().wait().unwrap();
        }
    };
    let config = LocalConfig {
        adamw: AdamW { weight_decay: 0.01, amsgrad: true, ..AdamW::default() },
        schedule: Schedule { lr: 0.01, decay: Decay::Cosine, warmup_steps: 2, total_steps: 12, floor: 0.1 },
        companions: vec![("tokenizer.json".into(), b"{}".to_vec())],
        ..sft()
    };
    let folder = tempfile::tempdir().unwrap();
    let first = backend(config.clone());
    run(&first, 3);
    let version = first.snapshot().wait().unwrap().version;
    let metrics = [("loss".to_owned(), 0.5)].into();
    let saved = first
        .save_checkpoint(SaveCheckpoint { run_folder: folder.path().into(), step: 3, metrics, ..Default::default() })
        .wait()
        .unwrap();
    assert_eq!(saved, folder.path().join("checkpoints/step_000003"));
    assert_eq!(std::fs::read(saved.join("tokenizer.json")).unwrap(), b"{}");
    run(&first, 4);

    let second = LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(99)).unwrap();
    let metadata = second.load_checkpoint(&saved).wait().unwrap();
    assert_eq!((metadata.step, metadata.weight_version, metadata.metrics["loss"]), (3, version, 0.5));
    assert_eq!((second.state().step, second.state().weight_version), (3, version));
    run(&second, 4);
    assert_eq!(flat(&second), flat(&first));
}

/// With a gradient that moves nothing, what is left of an update is its decay.
#[test]
fn decay_shrinks_matrices_alone_unless_all_tensors_are_asked_for() {
    for decay in [DecayScope::Matrices, DecayScope::All] {
        let adamw = AdamW { weight_decay: 0.5, epsilon: 1e12, ..AdamW::default() };
        let lr_scale = LrScale { embeddings: 0.5, ..LrScale::default() };
        let backend = backend(LocalConfig { adamw, decay, lr_scale, schedule: Schedule::constant(0.1), ..sft() });
        let before = backend.current().wait().unwrap().weights.read();
        backend.forward_backward(batch());
        backend.optim_step().wait().unwrap();
        let after = backend.current().wait().unwrap().weights.read();
        for entry in before.layout.entries() {
            let part = |of: &Weights| of.flat.narrow(0, entry.offset as i64, entry.len() as i64);
            let kept = match (entry.shape.len(), decay) {
                (1, DecayScope::Matrices) => 1.0,
                _ if entry.name.contains("embed_tokens") => 0.975,
                _ => 0.95,
            };
            assert!(part(&after).allclose(&(part(&before) * kept), 1e-5, 1e-8, false), "{decay:?}: {}", entry.name);
        }
    }
}

#[test]
fn a_rate_for_what_the_model_has_not_and_a_resume_with_other_groups_are_refused() {
    let of = |lr_scale| LocalConfig { lr_scale, ..sft() };
    let start = |config| LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(1));
    let error = start(of(LrScale { score_head: 10.0, ..LrScale::default() })).err().unwrap().to_string();
    assert!(error.contains("lr_scale.score_head"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let request = SaveCheckpoint { run_folder: folder.path().into(), ..SaveCheckpoint::default() };
    let saved = start(sft()).unwrap().save_checkpoint(request).wait().unwrap();
    let other = start(of(LrScale { embeddings: 0.1, ..LrScale::default() })).unwrap();
    let error = other.load_checkpoint(&saved).wait().unwrap_err().to_string();
    assert!(error.contains("lr_scale") && error.contains("0.1"), "{error}");
}

#[test]
fn versions_count_publishes_and_survive_a_resume() {
    let first = backend(sft());
    let versions: Vec<u64> = (0..3).map(|_| first.snapshot().wait().unwrap().version).collect();
    assert_eq!(versions, [1, 2, 3]);
    let folder = tempfile::tempdir().unwrap();
    let saved =
        first.save_checkpoint(SaveCheckpoint { run_folder: folder.path().into(), ..SaveCheckpoint::default() }).wait().unwrap();
    let second = backend(sft());
    second.load_checkpoint(&saved).wait().unwrap();
    assert_eq!(second.snapshot().wait().unwrap().version, 4);
}

#[test]
fn a_snapshot_does_not_move_with_training() {
    let backend = backend(sft());
    let snapshot = backend.snapshot().wait().unwrap();
    let before = snapshot.weights.read().flat.copy();
    backend.forward_backward(batch());
    backend.optim_step().wait().unwrap();
    assert_eq!(snapshot.weights.read().flat, before);
    assert_ne!(flat(&backend), before);
    backend.load_weights(snapshot.weights).wait().unwrap();
    assert_eq!(flat(&backend), before);
    let state = backend.state();
    assert_eq!((state.parameters, state.dtype, state.device.as_str(), state.step), (before.numel(), "float32", "cpu", 1));
}

/// R116, of a model that can be counted by hand.
#[test]
fn the_state_tells_how_many_numbers_are_trained_in_which_precision_and_where() {
    let (vocab, hidden, intermediate, head, layers) = (16, 16, 32, 8, 2);
    let q_and_o = (hidden + 1) * hidden + hidden * hidden;
    let k_and_v = 2 * (hidden + 1) * head;
    let layer = q_and_o + k_and_v + 3 * hidden * intermediate + 2 * hidden;
    let backend = backend(sft());
    let state = backend.state();
    assert_eq!(state.parameters, vocab * hidden + layers * layer + hidden, "embeddings that are the head too, layers, last norm");
    assert_eq!((state.dtype, state.device.as_str()), ("float32", "cpu"));
    assert_eq!((flat(&backend).kind(), flat(&backend).device()), (tch::Kind::Float, tch::Device::Cpu), "it tells the truth");
}

#[test]
fn weights_of_another_model_are_refused_with_the_tensors_named() {
    let mut other = crate::tiny::model();
    other.intermediate_size = 64;
    let backend = backend(sft());
    let error = backend.load_weights(Arc::new(Weights::random(&other, 1).freeze())).wait().unwrap_err();
    assert!(error.to_string().contains("model.layers.0.mlp.gate_proj.weight ([32, 16] here, [64, 16] there)"), "{error}");
}

#[test]
fn a_damaged_checkpoint_is_refused_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let first = backend(sft());
    first.forward_backward(batch());
    first.optim_step().wait().unwrap();
    let saved =
        first.save_checkpoint(SaveCheckpoint { run_folder: folder.path().into(), step: 1, ..Default::default() }).wait().unwrap();
    std::fs::write(saved.join("optimizer.safetensors"), "cut").unwrap();
    let second = backend(sft());
    let error = second.load_checkpoint(&saved).wait().unwrap_err();
    assert!(error.to_string().contains("optimizer.safetensors: 3 bytes"), "{error}");
    assert_eq!(second.state().step, 0);
    assert!(second.load_checkpoint(Path::new("/nonexistent")).wait().is_err());
}
