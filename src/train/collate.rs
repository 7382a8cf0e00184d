//! Collates samples into training batches: inputs, targets and weights.
//!
//! Law D5: labels are shifted here and nowhere else: input `x[:-1]`, target `x[1:]`. Law N1: the
//! denominators of weights come from the whole optimizer batch, before any split. Sequences keep
//! their own length, without padding.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::prepare::continues;
use super::{Algorithm, TokenScores, TrainError};
use crate::algo::{
    Aggregation, BatchSize, ComparedToken, LogProbGap, Loss, LossError, LossInputs, LossOutput, OffPolicy, TeacherInputs,
};
use crate::data::packing::{cut_evenly, cut_rectangles};
use crate::data::{Routes, Sample, TopTokens, Version};
use crate::flow::caught;

/// A sample's name in errors.
pub(crate) fn name_of(sample: &Sample) -> String {
    name(sample.group_index, sample.index)
}

fn name(group: u64, index: u32) -> String {
    format!("sample {index} of group {group}")
}

/// A policy's log-probabilities of a teacher's tokens, packed like the teacher's.
#[derive(Clone, Copy, Debug)]
pub struct AtTeacher<'a> {
    /// The log-probabilities.
    pub log_probs: &'a [f64],
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
}

/// One sequence. `rows`, `targets` and every column after them have one entry per trained token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainSequence {
    /// Id of the source sample's group.
    pub group: u64,
    /// Index of the source sample in its group.
    pub index: u32,
    /// Part of the source sample in its rollout.
    pub part: u32,
    /// Input tokens, up to the last position that predicts a trained token.
    pub inputs: Vec<i64>,
    /// Input positions whose next token is trained.
    pub rows: Vec<usize>,
    /// Target token of each row.
    pub targets: Vec<i64>,
    /// Aggregation weights, over the whole optimizer batch's denominator.
    pub weights: Vec<f64>,
    /// Behaviour log-probabilities; `None` where nothing was sampled.
    pub behaviour: Option<Vec<f64>>,
    /// Version that sampled each target; `None` for tokens that no policy sampled.
    pub versions: Vec<Option<Version>>,
    /// The trainer's log-probabilities before the first update on this batch; `None` before the
    /// first update.
    pub proximal: Option<Vec<f64>>,
    /// Log-probabilities under the reference policy; `None` where none scored the sample.
    pub reference: Option<Vec<f64>>,
    /// Distributions of a teacher at each target; `None` where none was given.
    pub teacher: Option<TeacherColumn>,
    /// Advantages. NaN if the sample has none: a loss that reads them reports the sample.
    pub advantages: Vec<f64>,
    /// Divisor of the logits; `None`: the backend's.
    pub temperature: Option<f64>,
    /// Experts that computed the sequence's tokens in the generator; `None` where that is not known.
    pub routes: Option<Routes>,
}

/// A teacher's likeliest tokens at each target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TeacherColumn {
    /// Tokens per target.
    pub k: usize,
    /// Tokens, `k` for each target.
    pub ids: Vec<i64>,
    /// The teacher's log-probabilities of them.
    pub log_probs: Vec<f64>,
}

impl TeacherColumn {
    /// The column at `rows`; `None` if the teacher gave no tokens at one of them.
    fn of(top: &TopTokens, rows: &[usize]) -> Option<Self> {
        let mut column = TeacherColumn { k: top.k, ..TeacherColumn::default() };
        for row in rows {
            let (ids, log_probs) = top.at(row + 1)?;
            column.ids.extend(ids.iter().map(|id| i64::from(*id)));
            column.log_probs.extend(log_probs.iter().map(|log_prob| f64::from(*log_prob)));
        }
        Some(column)
    }
}

/// One optimizer step's sequences, or a part of them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TrainBatch {
    /// The sequences, in the order given.
    pub sequences: Vec<TrainSequence>,
    /// Trained tokens in the whole optimizer batch.
    pub batch_tokens: usize,
    /// Version being trained, which token lags refer to. Default: the newest that sampled a token.
    pub version: Version,
    /// Algorithm; `None`: the backend's.
    #[serde(skip)]
    pub algorithm: Option<Arc<Algorithm>>,
    /// If true, sequences 2i and 2i + 1 form a pair, a chosen answer and a rejected one, that no
    /// cut divides.
    pub pairs: bool,
    /// If true, [`ForwardBackward::scores`](super::ForwardBackward) holds the numbers of every token.
    pub scored: bool,
    /// What the weights were multiplied by ([`TrainBatch::scaled`]); `None`: by nothing.
    #[serde(default)]
    pub factor: Option<f64>,
}

/// Collates a whole optimizer batch. A sample's first token is never a target, so that its mask is
/// ignored.
pub fn collate<S: Borrow<Sample>>(samples: &[S], aggregation: Aggregation) -> Result<TrainBatch, TrainError> {
    collate_in(samples, aggregation, &BatchSize::of(&masks(samples)))
}

/// The masks of targets. The parts of a rollout are one completion, whose masks are joined.
fn masks<S: Borrow<Sample>>(samples: &[S]) -> Vec<Vec<f32>> {
    let targets = |part: &S| part.borrow().loss_mask.iter().skip(1).copied().collect::<Vec<f32>>();
    let rollouts = samples.chunk_by(|before, next| continues(before.borrow(), next.borrow()));
    rollouts.map(|parts| parts.iter().flat_map(targets).collect()).collect()
}

/// Collates a part of a batch of size `batch`, such as a micro-batch or a rank's share. Weights are
/// those in the whole batch (law N1). Tokens are counted like TRL's `num_items_in_batch`. The parts of
/// a rollout ([`Sample::part`]) weigh as one completion, and belong in one call.
pub fn collate_in<S: Borrow<Sample>>(
    samples: &[S],
    aggregation: Aggregation,
    batch: &BatchSize,
) -> Result<TrainBatch, TrainError> {
    let samples: Vec<&Sample> = samples.iter().map(Borrow::borrow).collect();
    for sample in &samples {
        sample.validate()?;
        let bad = |values: &[f32]| values.iter().find(|value| !value.is_finite()).map(|value| f64::from(*value));
        let numbers = [
            ("advantage", sample.advantage.filter(|value| !value.is_finite())),
            ("behaviour log-probability", bad(&sample.log_probs)),
            ("reference log-probability", bad(&sample.ref_log_probs)),
            ("teacher's log-probability", bad(&sample.teacher_log_probs)),
        ];
        if let Some((what, value)) = numbers.into_iter().find_map(|(what, value)| Some((what, value?))) {
            return Err(TrainError::BadSample(name_of(sample), what, value));
        }
    }
    let mut weights = aggregation.token_weights(&masks(&samples), batch).into_iter().flatten();
    let shifted = |sample: &&Sample| {
        let own: Vec<f64> = weights.by_ref().take(sample.loss_mask.len().saturating_sub(1)).collect();
        shift(sample, &own)
    };
    let sequences: Vec<TrainSequence> = samples.iter().map(shifted).collect();
    if sequences.iter().all(|sequence| sequence.rows.is_empty()) {
        return Err(TrainError::NothingToTrain(samples.len()));
    }
    let version = samples.iter().filter_map(|sample| sample.versions.newest()).max().unwrap_or(0);
    Ok(TrainBatch { sequences, batch_tokens: batch.trained, version, ..TrainBatch::default() })
}

/// Collates a part of a batch whose other parts are still unknown, and returns its sum of weights.
///
/// Weights are [`collate`]'s times that sum, so that gradients of parts add up to the batch's
/// gradient times the total of the sums ([`Aggregation::weight_sum`], law N1). `None` if the part has no
/// trained token; its sum of weights counts nevertheless.
pub fn collate_part<S: Borrow<Sample>>(samples: &[S], aggregation: Aggregation) -> Result<(Option<TrainBatch>, f64), TrainError> {
    let weight_sum = aggregation.weight_sum(&masks(samples)).unwrap_or(1.0);
    let batch = match collate(samples, aggregation) {
        Err(TrainError::NothingToTrain(_)) => return Ok((None, weight_sum)),
        batch => batch?,
    };
    Ok((Some(batch.scaled(weight_sum)), weight_sum))
}

/// Shifts labels: row `t` reads token `t` and predicts token `t + 1`, with the mask, weight and
/// log-probability of that token.
fn shift(sample: &Sample, weights: &[f64]) -> TrainSequence {
    let rows: Vec<usize> = (0..weights.len()).filter(|&row| sample.loss_mask[row + 1] > 0.0).collect();
    let read = rows.last().map_or(0, |last| last + 1);
    let column = |values: &[f32]| -> Option<Vec<f64>> {
        (!values.is_empty()).then(|| rows.iter().map(|&row| f64::from(values[row + 1])).collect())
    };
    let mut versions: Vec<Option<Version>> = sample.versions.per_token().collect();
    versions.resize(sample.tokens.len(), None);
    TrainSequence {
        group: sample.group_index,
        index: sample.index,
        part: sample.part,
        inputs: sample.tokens[..read].iter().map(|&token| i64::from(token)).collect(),
        targets: rows.iter().map(|&row| i64::from(sample.tokens[row + 1])).collect(),
        weights: rows.iter().map(|&row| weights[row]).collect(),
        behaviour: column(&sample.log_probs),
        versions: rows.iter().map(|&row| versions[row + 1]).collect(),
        proximal: None,
        reference: column(&sample.ref_log_probs),
        teacher: sample.teacher.as_ref().and_then(|top| TeacherColumn::of(top, &rows)),
        advantages: vec![sample.advantage.unwrap_or(f64::NAN); rows.len()],
        temperature: sample.temperature.map(f64::from),
        routes: sample.routes.clone(),
        rows,
    }
}

impl TrainSequence {
    /// Name in errors.
    pub(crate) fn name(&self) -> String {
        name(self.group, self.index)
    }

    /// Experts that computed the token at a position in the generator; empty if they are not known.
    #[cfg(feature = "torch")]
    pub(crate) fn experts_at(&self, position: usize) -> &[u16] {
        self.routes.as_ref().map_or(&[], |routes| routes.at(position))
    }

    /// Returns true if it has trained tokens and all their advantages are zero.
    pub(crate) fn is_indifferent(&self) -> bool {
        !self.rows.is_empty() && self.advantages.iter().all(|advantage| *advantage == 0.0)
    }
}

impl TrainBatch {
    /// Multiplies the loss and its gradient by `factor`.
    pub fn scaled(mut self, factor: f64) -> Self {
        let weights = self.sequences.iter_mut().flat_map(|sequence| &mut sequence.weights);
        weights.for_each(|weight| *weight *= factor);
        TrainBatch { factor: Some(self.factor.unwrap_or(1.0) * factor), ..self }
    }

    /// The teacher's tokens at all targets of the sequences at `part`, if it gave equally many for each.
    pub(crate) fn teacher_column(&self, part: &[usize]) -> Option<TeacherColumn> {
        let mut whole: Option<TeacherColumn> = None;
        for sequence in part.iter().map(|&at| &self.sequences[at]).filter(|sequence| !sequence.rows.is_empty()) {
            let own = sequence.teacher.as_ref()?;
            let whole = whole.get_or_insert_with(|| TeacherColumn { k: own.k, ..TeacherColumn::default() });
            if whole.k != own.k {
                return None;
            }
            whole.ids.extend(&own.ids);
            whole.log_probs.extend(&own.log_probs);
        }
        whole.filter(|whole| whole.k > 0)
    }

    /// Inputs of the sequences at `part`.
    pub(crate) fn input_tokens(&self, part: &[usize]) -> usize {
        part.iter().map(|&at| self.sequences[at].inputs.len()).sum()
    }

    /// Indices of all sequences.
    pub fn all(&self) -> Vec<usize> {
        (0..self.sequences.len()).collect()
    }

    /// Sets the trainer's log-probabilities from before the first update on this batch, the result
    /// of [`TrainingBackend::score`](super::TrainingBackend::score). For batches with several
    /// updates.
    pub fn with_proximal(mut self, log_probs: Vec<Vec<f64>>) -> Self {
        self.sequences.iter_mut().zip(log_probs).for_each(|(sequence, scored)| sequence.proximal = Some(scored));
        self
    }

    /// Cuts the batch into micro-batches of whole sequences, with at most `max_tokens` inputs each.
    ///
    /// There are at least `least` of them if there are as many sequences, and otherwise as few as
    /// possible, of similar cost: a sequence of `n` inputs costs `cost(n)`. A longer sequence gets
    /// its own micro-batch. Sequences without trained tokens are skipped. A pair counts as one
    /// sequence.
    ///
    /// Sequences with zero advantage come last, in micro-batches of their own. The others, and the
    /// rounding of their gradients, are therefore the same with and without them.
    pub fn micro_batches(&self, max_tokens: usize, least: usize, cost: impl Fn(usize) -> f64) -> Vec<Vec<usize>> {
        let lengths = |places: &Range<usize>| self.sequences[places.clone()].iter().map(|sequence| sequence.inputs.len());
        let cut = |places: Vec<Range<usize>>| {
            let tokens: Vec<usize> = places.iter().map(|places| lengths(places).sum()).collect();
            let costs: Vec<f64> = places.iter().map(|places| lengths(places).map(&cost).sum()).collect();
            let runs = cut_evenly(&tokens, &costs, max_tokens, least);
            runs.into_iter().map(move |run| places[run].iter().flat_map(Clone::clone).collect())
        };
        self.by_indifference().into_iter().flat_map(cut).collect()
    }

    /// [`TrainBatch::micro_batches`] for attention over rectangles, which computes padding, too.
    /// Sequences of similar length go together, the longest first. `max_tokens` includes padding.
    pub fn rectangles(&self, max_tokens: usize, least: usize) -> Vec<Vec<usize>> {
        let longest = |places: &Range<usize>| self.sequences[places.clone()].iter().map(|of| of.inputs.len()).max().unwrap_or(0);
        let cut = |mut places: Vec<Range<usize>>| {
            places.sort_by_key(|places| Reverse(longest(places)));
            let (lengths, each): (Vec<usize>, usize) = (places.iter().map(longest).collect(), self.together());
            let share = lengths.iter().sum::<usize>().div_ceil(least.max(1));
            let runs = cut_rectangles(&lengths, (max_tokens / each).min(share.max(1)));
            // A run keeps the batch's order: a loss may compare neighbours.
            let in_order = |run: Range<usize>| {
                places[run.clone()].sort_by_key(|places| places.start);
                places[run].iter().flat_map(Clone::clone).collect()
            };
            runs.into_iter().map(in_order).collect::<Vec<Vec<usize>>>()
        };
        self.by_indifference().into_iter().flat_map(cut).collect()
    }

    /// Sequences that are never parted: pairs.
    fn together(&self) -> usize {
        if self.pairs { 2 } else { 1 }
    }

    /// Indices of trained sequences: first those with a nonzero advantage.
    fn by_indifference(&self) -> [Vec<Range<usize>>; 2] {
        let together = self.together();
        let places = (0..self.sequences.len()).step_by(together).map(|at| at..(at + together).min(self.sequences.len()));
        let trained = places.filter(|places| self.sequences[places.clone()].iter().any(|sequence| !sequence.rows.is_empty()));
        let (indifferent, others): (Vec<_>, Vec<_>) =
            trained.partition(|places| self.sequences[places.clone()].iter().all(TrainSequence::is_indifferent));
        [others, indifferent]
    }

    /// Trainer against generator, over the sampled tokens of the sequences at `part`. `log_probs` are
    /// the trainer's, packed in that order.
    pub fn gap(&self, part: &[usize], mut log_probs: &[f64]) -> LogProbGap {
        let mut gap = LogProbGap::default();
        for sequence in part.iter().map(|&at| &self.sequences[at]) {
            let own = log_probs.split_off(..sequence.rows.len()).expect("a log-probability for each trained token");
            let compared = |(at, behaviour): (usize, &f64)| ComparedToken {
                group: sequence.group,
                sample: sequence.index,
                position: sequence.rows[at] + 1,
                token: sequence.targets[at],
                lag: self.lag(&sequence.versions[at]),
                trainer: own[at],
                behaviour: *behaviour,
            };
            gap.add_sequence(&sequence.behaviour.iter().flatten().enumerate().map(compared).collect::<Vec<_>>());
        }
        gap
    }

    /// The numbers of every token of the sequences at `part`, from columns packed in that order, if the
    /// batch asks for them. Entropies of a backend that cannot know them are NaN.
    pub(super) fn scores(&self, part: &[usize], mut log_probs: &[f64], mut entropies: &[f64]) -> Vec<TokenScores> {
        let mut scores = Vec::new();
        for sequence in part.iter().map(|&at| &self.sequences[at]).filter(|_| self.scored) {
            let own = |column: &mut &[f64]| -> Vec<f32> {
                let own = column.split_off(..sequence.rows.len()).unwrap_or_default();
                own.iter().map(|value| *value as f32).collect()
            };
            let (log_probs, mut entropies) = (own(&mut log_probs), own(&mut entropies));
            if entropies.iter().any(|entropy| entropy.is_nan()) {
                entropies.clear();
            }
            let positions = sequence.rows.iter().map(|row| row + 1).collect();
            let (group, index, part) = (sequence.group, sequence.index, sequence.part);
            scores.push(TokenScores { group, index, part, positions, log_probs, entropies });
        }
        scores
    }

    /// Token lag; 0 for tokens that no policy sampled.
    fn lag(&self, version: &Option<Version>) -> u64 {
        version.map_or(0, |version| self.version.saturating_sub(version))
    }

    /// Evaluates a loss with its trust region and correction on the sequences at `part`, from their
    /// log-probabilities and entropies, packed in that order, and its log-probabilities of a teacher's
    /// tokens, if it computed them. Tokens that no policy sampled count as
    /// on-policy: their behaviour log-probability is the trainer's.
    pub fn evaluate(
        &self,
        part: &[usize],
        loss: &dyn Loss,
        off_policy: &OffPolicy,
        log_probs: &[f64],
        entropies: &[f64],
        at_teacher: Option<AtTeacher>,
    ) -> Result<LossOutput, LossError> {
        let parts = || part.iter().map(|&at| &self.sequences[at]);
        let (mut sequences, mut start, mut behaviour) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in parts() {
            let place = start.len()..start.len() + sequence.rows.len();
            start.extend_from_slice(sequence.proximal.as_deref().unwrap_or(&log_probs[place.clone()]));
            behaviour.extend_from_slice(sequence.behaviour.as_deref().unwrap_or(&start[place.clone()]));
            sequences.push(place);
        }
        let packed = |column: fn(&TrainSequence) -> &Vec<f64>| parts().flat_map(column).copied().collect::<Vec<f64>>();
        let (advantages, weights) = (packed(|sequence| &sequence.advantages), packed(|sequence| &sequence.weights));
        // All tokens or none, so that no loss mistakes a part for the whole.
        let trained = parts().filter(|sequence| !sequence.rows.is_empty());
        let reference = trained.map(|sequence| sequence.reference.as_deref()).collect::<Option<Vec<_>>>();
        let reference = reference.map(|columns| columns.concat());
        let column = at_teacher.and_then(|_| self.teacher_column(part));
        let lags: Vec<u64> = parts().flat_map(|sequence| &sequence.versions).map(|version| self.lag(version)).collect();
        let anchors = off_policy.anchors(log_probs, &start, &behaviour, &lags, &sequences);
        let inputs = LossInputs {
            log_probs,
            behaviour: Some(&behaviour),
            proximal: anchors.proximal.as_deref(),
            reference: reference.as_deref(),
            importance: anchors.importance.as_deref(),
            kept: anchors.kept.as_deref(),
            log_sum_squares: None,
            teacher: at_teacher.zip(column.as_ref()).map(|(policy, column)| TeacherInputs {
                k: column.k,
                policy: policy.log_probs,
                teacher: &column.log_probs,
                whole: column.k >= policy.vocabulary,
            }),
            entropies,
            advantages: &advantages,
            weights: &weights,
            sequences: &sequences,
            batch_tokens: self.batch_tokens,
        };
        // User-defined losses may panic.
        let panicked = |message| LossError::Custom(format!("the loss `{}` panicked: {message}", loss.name()));
        let output = caught(|| loss.evaluate(&inputs)).map_err(panicked)??;
        let at_teacher = inputs.teacher.map_or(0, |teacher| teacher.policy.len());
        let mut output = output.aligned(loss.name(), log_probs.len(), at_teacher)?;
        output.metrics.correction = anchors.metrics;
        Ok(output)
    }
}

#[cfg(test)]
mod tests;
