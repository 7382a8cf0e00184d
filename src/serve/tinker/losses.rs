//! The protocol's losses: sums over tokens, whose normalisation is the client's.
//!
//! | name | loss of a token |
//! | --- | --- |
//! | `cross_entropy` | −w·θ; of several targets per token, the sum over them |
//! | `importance_sampling` | −exp(θ − q)·A |
//! | `ppo` | −min(ρA, clip(ρ)A), ρ = exp(θ − q) |
//! | `cispo` | −sg(clip(ρ))·θ·A |
//! | `dro` | −(θA − β/2·(θ − q)²) |
//!
//! θ is the log-probability under the trained weights, q the sampler's (`logprobs`), A
//! `advantages`, w `weights`.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use rollflow_tinker::message::{Datum, PassOutput, Tensor};

use crate::algo::{Loss, LossError, LossInputs, LossOutput};
use crate::serve::generate::MOST_TOP;
use crate::train::{ForwardBackward, TeacherColumn, TrainBatch, TrainSequence};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    CrossEntropy,
    ImportanceSampling,
    Ppo { low: f64, high: f64 },
    Cispo { low: f64, high: f64 },
    Dro { beta: f64 },
}

/// A loss that keeps the log-probability and the loss of every token that it sees.
pub(super) struct TinkerLoss {
    kind: Kind,
    /// By the token's number in the pass.
    seen: Mutex<Vec<[f32; 2]>>,
    /// Targets per token, and the log-probability of each.
    several: Option<(usize, Mutex<Vec<f32>>)>,
}

impl TinkerLoss {
    /// The loss of this name, for a pass over `tokens` tokens.
    ///
    /// # Errors
    /// An unknown name, or an unknown number of the configuration.
    pub fn new(name: &str, config: &BTreeMap<String, f64>, tokens: usize) -> Result<Self, String> {
        let keys: &[&str] = match name {
            "ppo" | "cispo" => &["clip_low_threshold", "clip_high_threshold"],
            "dro" => &["beta"],
            _ => &[],
        };
        if let Some(unknown) = config.keys().find(|key| !keys.contains(&key.as_str())) {
            return Err(format!("the loss {name:?} has no setting {unknown:?}; it has {}", keys.join(", ")));
        }
        let of = |key: &str, default: f64| config.get(key).copied().unwrap_or(default);
        let (low, high) = (of("clip_low_threshold", 0.8), of("clip_high_threshold", 1.2));
        if let Some((key, _)) = config.iter().find(|(_, value)| value.is_nan()) {
            return Err(format!("the setting {key:?} of the loss {name:?} is not a number"));
        }
        if low > high {
            return Err(format!("clip_low_threshold is {low}, above clip_high_threshold, {high}"));
        }
        let kind = match name {
            "cross_entropy" => Kind::CrossEntropy,
            "importance_sampling" => Kind::ImportanceSampling,
            "ppo" => Kind::Ppo { low, high },
            "cispo" => Kind::Cispo { low, high },
            "dro" => Kind::Dro { beta: of("beta", 0.05) },
            other => {
                return Err(format!(
                    "the loss {other:?} is not known; there are cross_entropy, importance_sampling, ppo, cispo and dro"
                ));
            }
        };
        Ok(TinkerLoss { kind, seen: Mutex::new(vec![[0.0; 2]; tokens]), several: None })
    }

    /// The same with `k` weighted targets per token, if `k` is above 1.
    ///
    /// # Errors
    /// The loss has one target per token.
    pub fn targets(self, k: usize) -> Result<Self, String> {
        if k == 1 {
            return Ok(self);
        }
        if self.kind != Kind::CrossEntropy {
            return Err(format!("the loss {:?} has one target per token, and these data have {k}", self.name()));
        }
        let places = self.seen.lock().len() * k;
        Ok(TinkerLoss { several: Some((k, Mutex::new(vec![0.0; places]))), ..self })
    }

    /// Value and derivative of a token.
    fn term(&self, theta: f64, sampler: f64, advantage: f64, weight: f64) -> (f64, f64) {
        let ratio = (theta - sampler).exp();
        match self.kind {
            Kind::CrossEntropy => (-weight * theta, -weight),
            Kind::ImportanceSampling => (-ratio * advantage, -ratio * advantage),
            Kind::Ppo { low, high } => {
                let (free, clipped) = (ratio * advantage, ratio.clamp(low, high) * advantage);
                // Where both are equal the ratio is within its bounds.
                if free <= clipped { (-free, -free) } else { (-clipped, 0.0) }
            }
            Kind::Cispo { low, high } => {
                let weight = ratio.clamp(low, high) * advantage;
                (-weight * theta, -weight)
            }
            Kind::Dro { beta } => {
                let drift = theta - sampler;
                (-(theta * advantage - beta / 2.0 * drift * drift), -(advantage - beta * drift))
            }
        }
    }

    /// The answer to the pass over these sequences.
    pub fn output(&self, batch: &TrainBatch) -> PassOutput {
        let seen = self.seen.lock();
        let mut start = 0;
        let of = |sequence: &TrainSequence| {
            let places = start..start + sequence.rows.len();
            let own = &seen[places.clone()];
            start = places.end;
            let column = |at: usize| Tensor::Floats(own.iter().map(|values| values[at]).collect());
            let log_probs = match &self.several {
                None => column(0),
                Some((k, all)) => {
                    Tensor::Rows(*k, Box::new(Tensor::Floats(all.lock()[places.start * k..places.end * k].to_vec())))
                }
            };
            BTreeMap::from([("logprobs".to_owned(), log_probs), ("elementwise_loss".to_owned(), column(1))])
        };
        let outputs = batch.sequences.iter().map(of).collect();
        let sum = seen.iter().map(|[_, loss]| f64::from(*loss)).sum();
        PassOutput {
            loss_fn_output_type: "ArrayRecord".to_owned(),
            loss_fn_outputs: outputs,
            metrics: BTreeMap::from([("loss:sum".to_owned(), sum)]),
        }
    }

    /// The result of a pass over the tokens that count in metrics. `done` is that of all tokens, with scores.
    pub fn counted(&self, batch: &TrainBatch, done: ForwardBackward) -> ForwardBackward {
        let seen = self.seen.lock();
        let mut counted = ForwardBackward { input_tokens: done.input_tokens, ..ForwardBackward::default() };
        for scores in &done.scores {
            let whole = &batch.sequences[scores.group as usize];
            let mut own = TrainSequence { group: whole.group, ..TrainSequence::default() };
            let (mut behaviour, mut log_probs) = (Vec::new(), Vec::new());
            for at in (0..whole.rows.len()).filter(|at| counts(whole, *at)) {
                own.rows.push(whole.rows[at]);
                own.targets.push(whole.targets[at]);
                own.versions.push(whole.versions[at]);
                behaviour.extend(whole.behaviour.as_ref().map(|sampler| sampler[at]));
                log_probs.push(f64::from(scores.log_probs[at]));
                counted.entropy += scores.entropies.get(at).map_or(f64::NAN, |entropy| f64::from(*entropy));
                let number = whole.reference.as_ref().map_or(0.0, |numbers| numbers[at]);
                counted.loss += f64::from(seen[number as usize][1]);
            }
            own.behaviour = whole.behaviour.as_ref().map(|_| behaviour);
            counted.tokens += log_probs.len();
            let one = TrainBatch { sequences: vec![own], ..TrainBatch::default() };
            counted.gap.merge(&one.gap(&[0], &log_probs));
        }
        counted.entropy /= counted.tokens.max(1) as f64;
        counted
    }

    /// Keeps log-probabilities of a forward pass over the `nth` targets, with the loss at each.
    pub fn keep(&self, batch: &TrainBatch, scores: &[Vec<f64>], nth: usize) {
        let mut seen = self.seen.lock();
        let mut at = 0;
        if let Some((k, all)) = &self.several {
            let mut all = all.lock();
            for (sequence, scores) in batch.sequences.iter().zip(scores) {
                let weights = sequence.teacher.iter().flat_map(|targets| targets.log_probs.iter().skip(nth).step_by(*k));
                for (theta, weight) in scores.iter().zip(weights) {
                    all[at * k + nth] = *theta as f32;
                    let sum = if nth == 0 { 0.0 } else { seen[at][1] };
                    seen[at] = [*theta as f32, sum - if *weight == 0.0 { 0.0 } else { (theta * weight) as f32 }];
                    at += 1;
                }
            }
            return;
        }
        for (sequence, scores) in batch.sequences.iter().zip(scores) {
            for (t, theta) in scores.iter().enumerate() {
                let sampler = sequence.behaviour.as_ref().map_or(*theta, |sampler| sampler[t]);
                let (value, _) = self.term(*theta, sampler, sequence.advantages[t], sequence.weights[t]);
                seen[at] = [*theta as f32, value as f32];
                at += 1;
            }
        }
    }
}

impl Loss for TinkerLoss {
    fn name(&self) -> &str {
        match self.kind {
            Kind::CrossEntropy => "cross_entropy",
            Kind::ImportanceSampling => "importance_sampling",
            Kind::Ppo { .. } => "ppo",
            Kind::Cispo { .. } => "cispo",
            Kind::Dro { .. } => "dro",
        }
    }

    fn is_sum(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let mut seen = self.seen.lock();
        let numbers = inputs.needed_reference(self.name(), "the number of each token")?;
        if let Some((k, all)) = &self.several {
            let of = inputs.teacher.ok_or_else(|| LossError::Custom("the targets of each token are missing".to_owned()))?;
            let (mut loss, mut all) = (0.0, all.lock());
            for ((number, own), weights) in numbers.iter().zip(of.policy.chunks(*k)).zip(of.teacher.chunks(*k)) {
                let number = *number as usize;
                let value = -own
                    .iter()
                    .zip(weights)
                    .filter(|(_, weight)| **weight != 0.0)
                    .map(|(theta, weight)| theta * weight)
                    .sum::<f64>();
                all[number * k..(number + 1) * k].iter_mut().zip(own).for_each(|(to, theta)| *to = *theta as f32);
                seen[number] = [own[0] as f32, value as f32];
                loss += value;
            }
            let mut output = LossOutput::new(loss, vec![0.0; inputs.log_probs.len()]);
            output.teacher_grad = Some(of.teacher.iter().map(|weight| -weight).collect());
            return Ok(output);
        }
        let sampler = inputs.behaviour.unwrap_or(inputs.log_probs);
        let (mut loss, mut grad) = (0.0, Vec::with_capacity(inputs.log_probs.len()));
        for (t, theta) in inputs.log_probs.iter().enumerate() {
            let (value, slope) = self.term(*theta, sampler[t], inputs.advantages[t], inputs.weights[t]);
            seen[numbers[t] as usize] = [*theta as f32, value as f32];
            loss += value;
            grad.push(slope);
        }
        Ok(LossOutput::new(loss, grad))
    }
}

/// Returns true if a token counts in metrics: it has a weight, and it is not of a prompt, whose tokens
/// clients send with a log-probability and an advantage of 0.
fn counts(sequence: &TrainSequence, at: usize) -> bool {
    let has_weight = match &sequence.teacher {
        Some(TeacherColumn { k, log_probs, .. }) => log_probs[at * k..(at + 1) * k].iter().any(|weight| *weight != 0.0),
        None => sequence.weights[at] != 0.0,
    };
    let is_prompt = sequence.behaviour.as_ref().is_some_and(|sampler| sampler[at] == 0.0) && sequence.advantages[at] == 0.0;
    has_weight && !is_prompt
}

/// Columns of a datum. Only cross-entropy reads the last.
const COLUMNS: &[&str] = &["target_tokens", "logprobs", "advantages", "weights"];

/// The sequences of a pass, for a model of `vocabulary` tokens that reads at most `context`.
///
/// # Errors
/// What is wrong with which datum.
pub(super) fn batch(data: &[Datum], loss: &str, vocabulary: usize, context: usize) -> Result<TrainBatch, String> {
    let mut sequences = Vec::with_capacity(data.len());
    let (mut number, mut several) = (0, None);
    for (at, datum) in data.iter().enumerate() {
        let wrong = |why: String| format!("datum {at}: {why}");
        let inputs = datum.model_input.tokens();
        let inputs =
            inputs.map_err(|kind| wrong(format!("a piece of its input is of kind {kind:?}; only text is understood")))?;
        let missing = |name: &str| wrong(format!("`{name}` is missing in its loss_fn_inputs, which the loss {loss:?} needs"));
        let column = |name: &str| datum.loss_fn_inputs.get(name);
        let targets = column("target_tokens").ok_or_else(|| missing("target_tokens"))?;
        let targets = targets.ints().ok_or_else(|| wrong("`target_tokens` are not integers".to_owned()))?;
        if inputs.is_empty() || inputs.len() > context {
            return Err(wrong(format!("its input has {} tokens; 1 to {context} are possible", inputs.len())));
        }
        let k = column("target_tokens").map_or(1, Tensor::columns);
        // Each takes a pass.
        let most = vocabulary.min(MOST_TOP as usize);
        if k > most {
            return Err(wrong(format!("`target_tokens` has {k} entries per token; at most {most} are possible")));
        }
        let columns = if loss == "cross_entropy" { COLUMNS } else { &COLUMNS[..3] };
        for (name, tensor) in &datum.loss_fn_inputs {
            if !columns.contains(&name.as_str()) {
                return Err(wrong(format!("the loss {loss:?} does not read `{name}`; it reads {}", columns.join(", "))));
            }
            if tensor.len() != inputs.len() {
                return Err(wrong(format!("`{name}` has {} entries for {} tokens of input", tensor.len(), inputs.len())));
            }
            if tensor.columns() != k {
                return Err(wrong(format!("`{name}` has {} entries per token, and `target_tokens` has {k}", tensor.columns())));
            }
        }
        if *several.get_or_insert(k) != k {
            return Err(wrong(format!("it has {k} targets per token, and the first datum another number")));
        }
        let beyond = |token: &&i64| usize::try_from(**token).map_or(true, |token| token >= vocabulary);
        if let Some(token) = inputs.iter().chain(&targets).find(beyond) {
            return Err(wrong(format!("token {token} is beyond the vocabulary of {vocabulary}")));
        }
        let floats = |name: &str| column(name).map(|tensor| tensor.floats().into_iter().map(f64::from).collect::<Vec<f64>>());
        let behaviour = floats("logprobs");
        let advantages = floats("advantages");
        if loss != "cross_entropy" {
            behaviour.as_ref().ok_or_else(|| missing("logprobs"))?;
            advantages.as_ref().ok_or_else(|| missing("advantages"))?;
        }
        let numbers =
            [&behaviour, &advantages, &floats("weights")].into_iter().flatten().flatten().any(|value| !value.is_finite());
        if numbers {
            return Err(wrong("a number of its loss_fn_inputs is not finite".to_owned()));
        }
        let len = inputs.len();
        let mut weights = floats("weights").unwrap_or_else(|| vec![1.0; len * k]);
        // Several targets travel as a teacher's tokens do, with their weights as the numbers.
        let (mut first, mut teacher) = (targets, None);
        if k > 1 {
            let ids = std::mem::take(&mut first);
            first = ids.iter().step_by(k).copied().collect();
            teacher = Some(TeacherColumn { k, ids, log_probs: std::mem::replace(&mut weights, vec![1.0; len]) });
        }
        sequences.push(TrainSequence {
            group: at as u64,
            rows: (0..len).collect(),
            weights,
            teacher,
            behaviour,
            versions: vec![None; len],
            reference: Some((number..number + len).map(|number| number as f64).collect()),
            advantages: advantages.unwrap_or_else(|| vec![1.0; len]),
            inputs,
            targets: first,
            ..TrainSequence::default()
        });
        number += len;
    }
    if number == 0 {
        return Err("the pass has no data".to_owned());
    }
    Ok(TrainBatch { sequences, batch_tokens: number, scored: true, ..TrainBatch::default() })
}

/// The batch with the `nth` of several targets per token as its only one.
pub(super) fn nth_targets(batch: &TrainBatch, nth: usize) -> TrainBatch {
    let mut batch = batch.clone();
    for sequence in &mut batch.sequences {
        if let Some(targets) = sequence.teacher.take() {
            sequence.targets = targets.ids.into_iter().skip(nth).step_by(targets.k).collect();
        }
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_derivative_of_each_loss_is_that_of_its_value(
            theta in -4.0_f64..0.0, sampler in -4.0_f64..0.0, advantage in -2.0_f64..2.0, weight in -2.0_f64..2.0,
        ) {
            for name in ["cross_entropy", "importance_sampling", "ppo", "dro"] {
                let loss = TinkerLoss::new(name, &BTreeMap::new(), 1).unwrap();
                let (h, value) = (1e-6, |theta: f64| loss.term(theta, sampler, advantage, weight).0);
                let numeric = (value(theta + h) - value(theta - h)) / (2.0 * h);
                let (_, slope) = loss.term(theta, sampler, advantage, weight);
                let ratio = (theta - sampler).exp();
                // ppo has a kink at its bounds.
                prop_assume!([0.8, 1.2].iter().all(|bound: &f64| (ratio - bound).abs() > 1e-4));
                prop_assert!((numeric - slope).abs() < 1e-5 * (1.0 + slope.abs()), "{name}: {numeric} {slope}");
            }
        }
    }

    #[test]
    fn a_setting_that_a_loss_does_not_have_or_cannot_use_is_named() {
        let config = BTreeMap::from([("clip".to_owned(), 0.2)]);
        let error = TinkerLoss::new("ppo", &config, 1).err().unwrap();
        assert!(error.contains("clip_low_threshold") && error.contains("\"clip\""), "{error}");
        assert!(TinkerLoss::new("gspo", &BTreeMap::new(), 1).err().unwrap().contains("cispo"));
        for (low, why) in [(1.3, "above clip_high_threshold"), (f64::NAN, "not a number")] {
            let config = BTreeMap::from([("clip_low_threshold".to_owned(), low)]);
            assert!(TinkerLoss::new("ppo", &config, 1).err().unwrap().contains(why), "{low}");
        }
    }

    #[test]
    fn a_wrong_datum_is_named_with_what_is_wrong() {
        let datum = |inputs: Vec<(&'static str, Tensor)>| Datum::new(vec![1, 2], inputs);
        let of = |datum: Datum, loss: &str| batch(&[datum], loss, 8, 16).unwrap_err();
        let targets = || ("target_tokens", Tensor::Ints(vec![2, 3]));
        assert!(of(datum(vec![]), "cross_entropy").contains("`target_tokens` is missing"));
        assert!(of(datum(vec![targets()]), "ppo").contains("`logprobs` is missing"));
        assert!(of(datum(vec![("target_tokens", Tensor::Ints(vec![2, 9]))]), "cross_entropy").contains("token 9"));
        let wide = Tensor::Rows(9, Box::new(Tensor::Ints(vec![0; 18])));
        assert!(of(datum(vec![("target_tokens", wide)]), "cross_entropy").contains("has 9 entries per token; at most 8"));
        let short = vec![targets(), ("weights", Tensor::Floats(vec![1.0]))];
        assert!(of(datum(short), "cross_entropy").contains("`weights` has 1 entries for 2 tokens"));
        let nan = vec![targets(), ("weights", Tensor::Floats(vec![f32::NAN, 1.0]))];
        assert!(of(datum(nan), "cross_entropy").contains("not finite"));
        let ones = || Tensor::Floats(vec![1.0; 2]);
        for (ignored, loss) in [("weights", "ppo"), ("mask", "cispo"), ("mask", "cross_entropy")] {
            let own = vec![targets(), ("logprobs", ones()), ("advantages", ones()), (ignored, ones())];
            let error = of(datum(own), loss);
            assert!(error.contains(&format!("does not read `{ignored}`")), "{error}");
        }
    }
}
