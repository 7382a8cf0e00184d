//! Collates samples into training batches: inputs, targets and weights.
//!
//! Law D5: labels are shifted here and nowhere else: input `x[:-1]`, target `x[1:]`. Law N1: the
//! denominators of weights come from the whole optimizer batch, before any split. Sequences keep
//! their own length, without padding.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::algo::{
    AdvantageError, Aggregation, BatchSize, ComparedToken, LogProbGap, Loss, LossError, LossInputs, LossOutput, OffPolicy,
};
use crate::data::packing::{cut_evenly, cut_rectangles};
use crate::data::{DataError, REWARD_LIMIT, Sample, Version};
use crate::flow::caught;
use crate::train::Algorithm;

/// Names a sample in errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleId {
    /// The group's id.
    pub group: u64,
    /// Index in the group.
    pub index: u32,
}

impl SampleId {
    /// A sample's name.
    pub fn of(sample: &Sample) -> Self {
        SampleId { group: sample.group_index, index: sample.index }
    }
}

impl fmt::Display for SampleId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "sample {} of group {}", self.index, self.group)
    }
}

/// One sequence. `rows`, `targets` and every column after them have one entry per trained token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainSequence {
    /// Source sample.
    pub id: SampleId,
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
    /// Advantages. NaN if the sample has none: a loss that reads them reports the sample.
    pub advantages: Vec<f64>,
    /// Divisor of the logits; `None`: the backend's.
    pub temperature: Option<f64>,
}

/// One optimizer step's sequences, or a part of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TrainBatch {
    /// The sequences, in the order given.
    pub sequences: Vec<TrainSequence>,
    /// Trained tokens in the whole optimizer batch.
    pub batch_tokens: usize,
    /// Version being trained, which token lags refer to. Default: the newest that sampled a token.
    pub version: Version,
    /// Algorithm; `None`: the backend's.
    pub algorithm: Option<Arc<Algorithm>>,
    /// If true, sequences 2i and 2i + 1 form a pair.
    pub pairs: bool,
}

impl TrainBatch {
    /// Multiplies the loss and its gradient by `factor`.
    pub fn scaled(mut self, factor: f64) -> Self {
        let weights = self.sequences.iter_mut().flat_map(|sequence| &mut sequence.weights);
        weights.for_each(|weight| *weight *= factor);
        self
    }
}

/// A batch that cannot be trained on.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// A reward that is missing (NaN), not finite or too large (law N4).
    #[error("{id}: its reward is {value}; score it with a finite number of at most {limit:e} either way, or drop its group", limit = REWARD_LIMIT)]
    Reward {
        /// The sample.
        id: SampleId,
        /// NaN if it was never scored.
        value: f64,
    },
    /// Advantages could not be estimated.
    #[error(transparent)]
    Advantage(AdvantageError),
    /// A sample that no reference policy scored.
    #[error(
        "{0} has no log-probabilities of the reference policy, which its reward pays for; let a stage `Reference` score it first"
    )]
    NoReference(SampleId),
    /// Columns of a sample are inconsistent.
    #[error(transparent)]
    Sample(#[from] DataError),
    /// A number that a loss would choke on (law N4).
    #[error("{id}: its {what} is {value}; it must be a finite number")]
    NonFinite {
        /// The sample.
        id: SampleId,
        /// Quantity.
        what: &'static str,
        /// Value.
        value: f64,
    },
    /// No token has a mask above zero.
    #[error(
        "none of {samples} samples has a token to train on; a loss mask above 0 marks them, and the first token never counts"
    )]
    NothingToTrain {
        /// Number of samples.
        samples: usize,
    },
}

/// Collates a whole optimizer batch. A sample's first token is never a target, so that its mask is
/// ignored.
pub fn collate<S: Borrow<Sample>>(samples: &[S], aggregation: Aggregation) -> Result<TrainBatch, BatchError> {
    collate_in(samples, aggregation, &BatchSize::of(&masks(samples)))
}

/// The masks of targets.
fn masks<S: Borrow<Sample>>(samples: &[S]) -> Vec<&[f32]> {
    samples.iter().map(|sample| sample.borrow().loss_mask.get(1..).unwrap_or(&[])).collect()
}

/// Collates a part of a batch of size `batch`, such as a micro-batch or a rank's share. Weights are
/// those in the whole batch (law N1). Tokens are counted like TRL's `num_items_in_batch`.
pub fn collate_in<S: Borrow<Sample>>(
    samples: &[S],
    aggregation: Aggregation,
    batch: &BatchSize,
) -> Result<TrainBatch, BatchError> {
    let samples: Vec<&Sample> = samples.iter().map(Borrow::borrow).collect();
    for sample in &samples {
        sample.validate()?;
        let id = SampleId::of(sample);
        let refuse = |what, value| Err(BatchError::NonFinite { id, what, value });
        if let Some(value) = sample.advantage.filter(|value| !value.is_finite()) {
            return refuse("advantage", value);
        }
        if let Some(value) = sample.log_probs.iter().find(|value| !value.is_finite()) {
            return refuse("behaviour log-probability", f64::from(*value));
        }
        if let Some(value) = sample.ref_log_probs.iter().find(|value| !value.is_finite()) {
            return refuse("reference log-probability", f64::from(*value));
        }
    }
    let weights = aggregation.token_weights(&masks(&samples), batch);
    let sequences: Vec<TrainSequence> = samples.iter().zip(weights).map(|(sample, weights)| shift(sample, &weights)).collect();
    let batch_tokens = sequences.iter().map(|sequence| sequence.rows.len()).sum();
    if batch_tokens == 0 {
        return Err(BatchError::NothingToTrain { samples: samples.len() });
    }
    let version = samples.iter().filter_map(|sample| sample.versions.newest()).max().unwrap_or(0);
    Ok(TrainBatch { sequences, batch_tokens, version, ..TrainBatch::default() })
}

/// Collates a part of a batch whose other parts are still unknown, and returns its sum of weights.
///
/// Weights are [`collate`]'s times that sum, so that gradients of parts add up to the batch's
/// gradient times the total of the sums ([`Aggregation::weight_sum`], law N1). `None` if the part has no
/// trained token; its sum of weights counts nevertheless.
pub fn collate_part<S: Borrow<Sample>>(samples: &[S], aggregation: Aggregation) -> Result<(Option<TrainBatch>, f64), BatchError> {
    let weight_sum = aggregation.weight_sum(&masks(samples)).unwrap_or(1.0);
    let batch = match collate(samples, aggregation) {
        Err(BatchError::NothingToTrain { .. }) => return Ok((None, weight_sum)),
        batch => batch?,
    };
    let scaled = |sequence: TrainSequence| {
        let weights = sequence.weights.iter().map(|weight| weight * weight_sum).collect();
        TrainSequence { weights, ..sequence }
    };
    Ok((Some(TrainBatch { sequences: batch.sequences.into_iter().map(scaled).collect(), ..batch }), weight_sum))
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
        id: SampleId::of(sample),
        inputs: sample.tokens[..read].iter().map(|&token| i64::from(token)).collect(),
        targets: rows.iter().map(|&row| i64::from(sample.tokens[row + 1])).collect(),
        weights: rows.iter().map(|&row| weights[row]).collect(),
        behaviour: column(&sample.log_probs),
        versions: rows.iter().map(|&row| versions[row + 1]).collect(),
        proximal: None,
        reference: column(&sample.ref_log_probs),
        advantages: vec![sample.advantage.unwrap_or(f64::NAN); rows.len()],
        temperature: sample.temperature.map(f64::from),
        rows,
    }
}

impl TrainSequence {
    /// Returns true if it has trained tokens and all their advantages are zero.
    pub fn is_indifferent(&self) -> bool {
        !self.rows.is_empty() && self.advantages.iter().all(|advantage| *advantage == 0.0)
    }
}

impl TrainBatch {
    /// The batch that `version` is trained on.
    pub fn at_version(self, version: Version) -> Self {
        TrainBatch { version, ..self }
    }

    /// Sets the algorithm.
    pub fn by(self, algorithm: Option<Arc<Algorithm>>) -> Self {
        TrainBatch { algorithm, ..self }
    }

    /// The batch as pairs of neighbours, a chosen answer and a rejected one, that no cut divides.
    pub fn in_pairs(self) -> Self {
        TrainBatch { pairs: true, ..self }
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
    /// possible, of similar size. A longer sequence gets its own micro-batch. Sequences without
    /// trained tokens are skipped. A pair counts as one sequence.
    ///
    /// Sequences with zero advantage come last, in micro-batches of their own. The others, and the
    /// rounding of their gradients, are therefore the same with and without them.
    pub fn micro_batches(&self, max_tokens: usize, least: usize) -> Vec<Vec<usize>> {
        self.micro_batches_by(max_tokens, least, |length| length as f64)
    }

    /// [`TrainBatch::micro_batches`] of similar cost, where a sequence of `n` inputs costs
    /// `cost(n)`: attention makes long sequences more expensive per token.
    pub fn micro_batches_by(&self, max_tokens: usize, least: usize, cost: impl Fn(usize) -> f64) -> Vec<Vec<usize>> {
        self.by_indifference().iter().flat_map(|places| self.cut(places, max_tokens, least, &cost)).collect()
    }

    /// [`TrainBatch::micro_batches`] for attention over rectangles, which computes padding, too.
    /// Sequences of similar length go together, the longest first. `max_tokens` includes padding.
    pub fn rectangles(&self, max_tokens: usize, least: usize) -> Vec<Vec<usize>> {
        let longest = |places: &Range<usize>| self.sequences[places.clone()].iter().map(|of| of.inputs.len()).max().unwrap_or(0);
        let cut = |mut places: Vec<Range<usize>>| {
            places.sort_by_key(|places| std::cmp::Reverse(longest(places)));
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

    fn cut(&self, places: &[Range<usize>], max_tokens: usize, least: usize, cost: &dyn Fn(usize) -> f64) -> Vec<Vec<usize>> {
        let lengths = |places: &Range<usize>| self.sequences[places.clone()].iter().map(|sequence| sequence.inputs.len());
        let tokens: Vec<usize> = places.iter().map(|places| lengths(places).sum()).collect();
        let costs: Vec<f64> = places.iter().map(|places| lengths(places).map(cost).sum()).collect();
        let runs = cut_evenly(&tokens, &costs, max_tokens, least);
        runs.into_iter().map(|run| places[run].iter().flat_map(Clone::clone).collect()).collect()
    }
}

/// The columns of some sequences' trained tokens, packed end to end as losses read them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PackedColumns {
    /// Range of each sequence.
    pub sequences: Vec<Range<usize>>,
    /// Each sequence's sample.
    pub ids: Vec<SampleId>,
    /// Each token's place in its sample, prompt included.
    pub positions: Vec<usize>,
    /// Next tokens.
    pub targets: Vec<i64>,
    /// Aggregation weights.
    pub weights: Vec<f64>,
    /// Behaviour log-probabilities; NaN for tokens that no policy sampled.
    pub behaviour: Vec<f64>,
    /// Token lag; 0 for tokens that no policy sampled.
    pub lags: Vec<u64>,
    /// Log-probabilities before the first update on the batch; NaN before the first update.
    pub proximal: Vec<f64>,
    /// Log-probabilities under the reference policy; NaN where none scored the sample.
    pub reference: Vec<f64>,
    /// Advantages.
    pub advantages: Vec<f64>,
}

impl PackedColumns {
    /// Packs the sequences at `part`, in that order.
    pub fn new(batch: &TrainBatch, part: &[usize]) -> Self {
        let mut packed = PackedColumns::default();
        for sequence in part.iter().map(|&at| &batch.sequences[at]) {
            let (start, len) = (packed.targets.len(), sequence.rows.len());
            packed.sequences.push(start..start + len);
            packed.ids.push(sequence.id);
            packed.positions.extend(sequence.rows.iter().map(|row| row + 1));
            packed.targets.extend(&sequence.targets);
            packed.weights.extend(&sequence.weights);
            packed.advantages.extend(&sequence.advantages);
            let lag = |version: &Option<Version>| version.map_or(0, |version| batch.version.saturating_sub(version));
            packed.lags.extend(sequence.versions.iter().map(lag));
            extend(&mut packed.behaviour, sequence.behaviour.as_deref(), len);
            extend(&mut packed.proximal, sequence.proximal.as_deref(), len);
            extend(&mut packed.reference, sequence.reference.as_deref(), len);
        }
        packed
    }

    /// Trainer against generator, over the tokens that were sampled.
    pub fn gap(&self, log_probs: &[f64]) -> LogProbGap {
        let mut gap = LogProbGap::default();
        for (id, sequence) in self.ids.iter().zip(&self.sequences) {
            let compared = |at| ComparedToken {
                group: id.group,
                sample: id.index,
                position: self.positions[at],
                token: self.targets[at],
                lag: self.lags[at],
                trainer: log_probs[at],
                behaviour: self.behaviour[at],
            };
            let sampled = sequence.clone().filter(|&at| !self.behaviour[at].is_nan());
            gap.add_sequence(&sampled.map(compared).collect::<Vec<_>>());
        }
        gap
    }

    /// Evaluates the loss with its trust region and correction. Tokens that no policy sampled count
    /// as on-policy: their behaviour log-probability is the trainer's.
    pub fn evaluate(
        &self,
        loss: &dyn Loss,
        off_policy: &OffPolicy,
        log_probs: &[f64],
        entropies: &[f64],
        batch_tokens: usize,
    ) -> Result<LossOutput, LossError> {
        let start = own_where_absent(&self.proximal, log_probs);
        let behaviour = own_where_absent(&self.behaviour, &start);
        let anchors = off_policy.anchors(log_probs, &start, &behaviour, &self.lags, &self.sequences);
        let inputs = LossInputs {
            log_probs,
            behaviour: Some(&behaviour),
            proximal: anchors.proximal.as_deref(),
            // All tokens or none, so that no loss mistakes a part for the whole.
            reference: self.reference.iter().all(|value| !value.is_nan()).then_some(&self.reference),
            importance: anchors.importance.as_deref(),
            log_sum_squares: None,
            entropies,
            advantages: &self.advantages,
            weights: &self.weights,
            sequences: &self.sequences,
            batch_tokens,
        };
        // User-defined losses may panic.
        let panicked = |message| LossError::Custom(format!("the loss `{}` panicked: {message}", loss.name()));
        let output = caught(|| loss.evaluate(&inputs)).map_err(panicked)??;
        let mut output = output.aligned(loss.name(), log_probs.len())?;
        output.metrics.correction = anchors.metrics;
        Ok(output)
    }
}

/// A column's numbers, or `len` times NaN.
fn extend(column: &mut Vec<f64>, values: Option<&[f64]>, len: usize) {
    match values {
        Some(values) => column.extend(values),
        None => column.extend(std::iter::repeat_n(f64::NAN, len)),
    }
}

fn own_where_absent(column: &[f64], own: &[f64]) -> Vec<f64> {
    column.iter().zip(own).map(|(value, own)| if value.is_nan() { *own } else { *value }).collect()
}

/// Batch of step `step`: `batch_size` samples in order, cyclically. Empty only if `samples` is.
pub fn collate_batch<T>(samples: &[T], batch_size: usize, step: u64) -> Vec<&T> {
    let start = (step as u128 * batch_size as u128 % samples.len().max(1) as u128) as usize;
    samples.iter().cycle().skip(start).take(if samples.is_empty() { 0 } else { batch_size }).collect()
}

#[cfg(test)]
mod tests;
