//! One micro-batch: forward pass, loss, gradient.
//!
//! A replica shares its device's parameters and owns the graph over them, so that several replicas
//! differentiate in parallel. Parameters are not written meanwhile.

use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::head::{OutputHead, Scored, SlopesOf, Temperature, Words};
use super::shards::Gathered;
use super::{Algorithm, AtTeacher, LocalConfig, RouterMismatch, RouterReplay, TeacherColumn, TrainBatch, TrainSequence};
use crate::algo::{LossError, LossOutput};
use crate::data::{ANY_EXPERT, TopK};
use crate::model::{
    Compute, Decoder, Dtype, Kept, Layout, ModelConfig, Packed, PackedRoutes, Passed, Watch, Weights, Whole, logits_chunk, upload,
};
use crate::ranks::CollectiveError;

/// A sequence's place in its batch, its log-probabilities, its entropies, and its log-probabilities of a
/// teacher's tokens, if they are wanted and there are any.
pub(super) type Columns = (usize, [Vec<f64>; 3]);

/// A sequence's place in its batch, its log-probabilities and the likeliest tokens.
pub(super) type TopColumns = (usize, (Vec<f64>, TeacherColumn));

/// Failure of a pass.
#[derive(Debug, thiserror::Error)]
pub(super) enum PassError {
    #[error(transparent)]
    Loss(#[from] LossError),
    /// The ranks are out of step.
    #[error(transparent)]
    Ranks(#[from] CollectiveError),
}

pub(super) struct Replica {
    config: Arc<LocalConfig>,
    /// May be another device than the trainer's.
    compute: Compute,
    decoder: Decoder,
    held: Held,
}

/// Parameters of a replica.
enum Held {
    /// All, of which the trained ones are a leaf for autograd.
    Whole(Weights),
    /// This rank's part. All ranks must pass equally often.
    Part(Arc<Gathered>),
}

/// Result of one micro-batch.
pub(super) struct Part {
    pub scored: Scored,
    pub output: LossOutput,
    /// Gradient by the flat trained parameters, `None` if it was added up already, or the names of samples
    /// with non-finite numbers.
    pub gradient: Result<Option<Tensor>, Vec<String>>,
    /// The experts' loss, by its weight, if there is one.
    pub router_loss: Option<f64>,
    pub router_mismatch: RouterMismatch,
}

/// Result of a forward pass.
struct Forward {
    rows: Tensor,
    head: Tensor,
    targets: Tensor,
    backward: Backward,
    /// What the routers did.
    watch: Watch,
}

impl Forward {
    fn recomputed(of: Passed, targets: Tensor) -> Self {
        let Passed { hidden: rows, head, kept, watch } = of;
        Forward { rows, head, targets, backward: Backward::Recompute(kept), watch }
    }
}

/// Path of gradients from the rows to the parameters.
enum Backward {
    /// Along a graph whose leaves are the embedded tokens and the parameters.
    Graph { embedded: Tensor, ids: Vec<i64> },
    /// Through recomputed layers.
    Recompute(Kept),
}

/// A loss by the results of a forward pass, and the derivatives of its surrogate.
struct Judged {
    scored: Scored,
    output: LossOutput,
    slopes: Result<Slopes, Vec<String>>,
}

/// Derivatives of a loss by the rows and the head, multiplied by `scale`.
struct Slopes {
    scale: f64,
    by_rows: Tensor,
    by_head: Option<Tensor>,
    surrogate: Option<Tensor>,
}

impl Replica {
    /// Creates a replica over `weights`, which are on its device in the format of computation.
    pub fn new(config: &Arc<LocalConfig>, model: &ModelConfig, weights: &Weights) -> Self {
        let compute = Compute { device: weights.trained().1.device(), ..config.compute };
        let mut weights = weights.share();
        *weights.trained_mut() = weights.trained().1.detach().set_requires_grad(true);
        let decoder = Decoder::new(model, weights.layout.clone());
        Replica { config: config.clone(), compute, decoder, held: Held::Whole(weights) }
    }

    /// Creates a replica over parameters of which this rank holds a part.
    pub fn of_part(config: &Arc<LocalConfig>, model: &ModelConfig, layout: &Arc<Layout>, part: &Arc<Gathered>) -> Self {
        let decoder = Decoder::new(model, layout.clone());
        Replica { config: config.clone(), compute: config.compute, decoder, held: Held::Part(part.clone()) }
    }

    /// Computes the sequences at `part` and their gradient. `judged` is their part of a loss that was
    /// computed over the whole batch. The gradient is added to `sum`, if there is one: for layers that are
    /// computed again, without adapters, in another format than f16.
    ///
    /// A gradient that overflows f16 is computed again with a lower loss scale. It depends on the micro-batch
    /// alone, so that no scale is kept from step to step. With divided parameters nothing is repeated,
    /// because all ranks must make equally many passes.
    pub fn differentiate(
        &self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        part: &[usize],
        mut judged: Option<LossOutput>,
        sum: Option<&mut Option<Tensor>>,
    ) -> Result<Part, PassError> {
        let retries = if self.compute.dtype == Dtype::F16 { 3 } else { 0 };
        for retry in 0..retries {
            let found = self.pass(algorithm, batch, part, judged, 256f64.powi(-retry), None)?;
            match &found.gradient {
                Ok(Some(gradient)) if gradient.isfinite().all().int64_value(&[]) == 0 => judged = Some(found.output),
                _ => return Ok(found),
            }
        }
        self.pass(algorithm, batch, part, judged, 256f64.powi(-retries), sum)
    }

    /// [`Replica::differentiate`] with the loss scale multiplied by `lowered`.
    fn pass(
        &self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        part: &[usize],
        judged: Option<LossOutput>,
        lowered: f64,
        sum: Option<&mut Option<Tensor>>,
    ) -> Result<Part, PassError> {
        let forward = self.forward(batch, part, self.config.gradient_checkpointing, self.config.router_loss > 0.0)?;
        let weight = self.router_weight(batch, part);
        let judged = self.judge(&forward, algorithm, batch, part, judged, lowered);
        let slopes = judged.as_ref().ok().and_then(|judged| judged.slopes.as_ref().ok());
        let of_experts = forward.watch.loss();
        let router_loss = of_experts.as_ref().map(|loss| loss.double_value(&[]) * weight);
        let router_mismatch =
            forward.watch.router_mismatch().map_or_else(RouterMismatch::default, |[other, all]| RouterMismatch { other, all });
        let gradient = match (&self.held, forward.backward) {
            // The other ranks wait for this one's gradient, whatever the loss is.
            (Held::Part(gathered), Backward::Recompute(kept)) => {
                let none = forward.rows.zeros_like();
                let (by_rows, by_head) = slopes.map_or((&none, None), |slopes| (&slopes.by_rows, slopes.by_head.as_ref()));
                let scale = slopes.map_or(1.0, |slopes| slopes.scale);
                gathered.unscale_by(scale);
                self.decoder.gradient(&**gathered, kept, by_rows, by_head, weight * scale)?;
                None
            }
            (Held::Whole(weights), Backward::Recompute(kept)) => slopes.and_then(|slopes| {
                let mut alone = None;
                let sum = sum.unwrap_or(&mut alone);
                let whole = Whole::new(weights, sum.take(), slopes.scale);
                let by_head = slopes.by_head.as_ref();
                let Ok(()) = self.decoder.gradient(&whole, kept, &slopes.by_rows, by_head, weight * slopes.scale);
                *sum = Some(whole.into_gradient());
                alone
            }),
            (Held::Whole(weights), Backward::Graph { embedded, ids }) => slopes.map(|slopes| {
                let of_experts = of_experts.map(|loss| loss * (weight * slopes.scale));
                let flat = self.along_graph(weights, slopes, of_experts, &embedded, &ids);
                if slopes.scale == 1.0 { flat } else { flat / slopes.scale }
            }),
            (Held::Part(_), Backward::Graph { .. }) => unreachable!("parts are gathered for recomputed layers only"),
        };
        let Judged { scored, output, slopes } = judged?;
        Ok(Part { scored, output, gradient: slopes.map(|_| gradient), router_loss, router_mismatch })
    }

    /// Takes part in a micro-batch of other ranks, with no sequence.
    pub fn accompany(&self, backward: bool) -> Result<(), PassError> {
        let Held::Part(gathered) = &self.held else { return Ok(()) };
        let mut packed = Packed::default();
        packed.push([0], None);
        let rows = Tensor::zeros([1], (Kind::Int64, self.compute.device));
        let Passed { hidden, kept, .. } =
            self.decoder.hidden_kept(&**gathered, packed, rows, Watch::default(), self.kept_on())?;
        if backward {
            self.decoder.gradient(&**gathered, kept, &hidden.zeros_like(), None, 0.0)?;
        }
        Ok(())
    }

    /// Device on which the inputs of layers that are computed again wait.
    fn kept_on(&self) -> Device {
        if self.config.activations_on_host { Device::Cpu } else { self.compute.device }
    }

    /// Weight of the experts' loss.
    fn router_weight(&self, batch: &TrainBatch, part: &[usize]) -> f64 {
        let rows: usize = part.iter().map(|&at| batch.sequences[at].rows.len()).sum();
        let share = rows as f64 / batch.batch_tokens.max(1) as f64;
        self.config.router_loss * share * batch.factor.unwrap_or(1.0)
    }

    /// The loss, and its derivatives by what `forward` gave. `lowered`: factor of the loss scale.
    fn judge(
        &self,
        forward: &Forward,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        part: &[usize],
        judged: Option<LossOutput>,
        lowered: f64,
    ) -> Result<Judged, LossError> {
        let head = self.head(forward, batch, part);
        let mut scored = head.score();
        let output = match judged {
            Some(output) => output,
            None => {
                let Algorithm { loss, off_policy, .. } = algorithm;
                let vocabulary = self.decoder.config().vocab_size;
                let at_teacher = scored.at_teacher.as_deref().map(|log_probs| AtTeacher { log_probs, vocabulary });
                batch.evaluate(part, loss.as_ref(), off_policy, &scored.log_probs, &scored.entropies, at_teacher)?
            }
        };
        let slopes = match self.bad_samples(batch, part, &scored.log_probs, &output) {
            Some(names) => Err(names),
            None => {
                let scale = lowered * self.loss_scale(&output, &forward.watch, self.router_weight(batch, part));
                let scaled = |slopes: &[f64]| slopes.iter().map(|slope| slope * scale).collect::<Vec<f64>>();
                let entropy_slopes = output.entropy_grad.as_deref().map(scaled);
                let teacher_slopes = output.teacher_grad.as_deref().map(scaled);
                let all = SlopesOf {
                    log_probs: &scaled(&output.grad),
                    entropies: entropy_slopes.as_deref(),
                    at_teacher: teacher_slopes.as_deref(),
                };
                let by_head = head.gradients(&mut scored, all);
                let along_graph = matches!(forward.backward, Backward::Graph { .. });
                let surrogate = along_graph.then(|| head.surrogate(&by_head.rows));
                Ok(Slopes { scale, by_rows: by_head.rows, by_head: by_head.weight, surrogate })
            }
        };
        Ok(Judged { scored, output, slopes })
    }

    /// Law N4: samples whose part of a loss is not finite, with the first such number; `None` if
    /// all are finite.
    fn bad_samples(&self, batch: &TrainBatch, part: &[usize], log_probs: &[f64], output: &LossOutput) -> Option<Vec<String>> {
        let bad = |values: &[f64]| values.iter().any(|value| !value.is_finite());
        if output.loss.is_finite() && !bad(&output.grad) && !output.teacher_grad.as_deref().is_some_and(bad) {
            return None;
        }
        let given = if self.decoder.config().scores { "scores" } else { "log-probabilities" };
        let (mut names, mut end) = (Vec::new(), 0);
        for sequence in part.iter().map(|&at| &batch.sequences[at]) {
            let (range, id) = (end..end + sequence.rows.len(), sequence.name());
            end = range.end;
            if bad(&log_probs[range.clone()]) {
                names.push(format!("{id} (the model's {given})"));
            } else if bad(&output.grad[range]) {
                let why = if bad(&sequence.advantages) { "it has no advantage" } else { "the loss itself" };
                names.push(format!("{id} ({why})"));
            }
        }
        if names.is_empty() {
            names.push("the loss's sum".into());
        }
        Some(names)
    }

    /// Flat f32 gradient of `of` by the trained parameters, the head's included.
    fn along_graph(
        &self,
        weights: &Weights,
        slopes: &Slopes,
        of_experts: Option<Tensor>,
        embedded: &Tensor,
        ids: &[i64],
    ) -> Tensor {
        let (trained, by_head) = (weights.trained().1, &slopes.by_head);
        let of = slopes.surrogate.as_ref().expect("a graph has a surrogate");
        let of: Vec<&Tensor> = [of].into_iter().chain(&of_experts).collect();
        if let Some(adapter) = &weights.adapter {
            let flat = Tensor::run_backward(&of, &[trained], false, false).swap_remove(0).contiguous().to_kind(Kind::Float);
            adapter.set_head_gradient(&flat, by_head.as_ref());
            return flat;
        }
        let mut gradients = Tensor::run_backward(&of, &[trained, embedded], false, false);
        let (by_embedded, flat) = (gradients.swap_remove(1), gradients.swap_remove(0));
        let flat = flat.contiguous().to_kind(Kind::Float);
        self.decoder.add_embedding_and_head(&flat, ids, &by_embedded, by_head.as_ref());
        flat
    }

    /// Loss scale, a power of two, which brings the largest derivative near 1, that of the experts' loss with
    /// `weight` included. In f16 the derivative by one of thousands of tokens would round to 0.
    fn loss_scale(&self, output: &LossOutput, watch: &Watch, weight: f64) -> f64 {
        if self.compute.dtype != Dtype::F16 {
            return 1.0;
        }
        let slopes = output.grad.iter().chain(output.entropy_grad.iter().flatten()).chain(output.teacher_grad.iter().flatten());
        let of_experts = (watch.steepest() * weight).abs();
        let largest = slopes.fold(of_experts, |largest: f64, slope| largest.max(slope.abs()));
        if largest > 0.0 && largest.is_finite() { largest.log2().round().exp2().recip() } else { 1.0 }
    }

    /// Log-probabilities and entropies (or scores and zeros) of each sequence, and with `of_teacher` those of
    /// a teacher's tokens, without a graph.
    pub fn score(&self, batch: &TrainBatch, part: &[usize], of_teacher: bool) -> Result<Vec<Columns>, PassError> {
        let _guard = tch::no_grad_guard();
        let scored = self.head(&self.forward(batch, part, false, false)?, batch, part).score();
        let at_teacher = scored.at_teacher.filter(|_| of_teacher).unwrap_or_default();
        let each = [1, 1, at_teacher.len() / scored.log_probs.len().max(1)];
        let mut rest = [scored.log_probs, scored.entropies, at_teacher].map(Vec::into_iter);
        let mut own = |rows: usize| [0, 1, 2].map(|column| rest[column].by_ref().take(rows * each[column]).collect());
        Ok(part.iter().map(|&at| (at, own(batch.sequences[at].rows.len()))).collect())
    }

    /// Log-probabilities of each sequence's targets, and the likeliest tokens there, without a graph. A
    /// score head has none.
    pub fn score_top(&self, batch: &TrainBatch, part: &[usize], top: TopK) -> Result<Vec<TopColumns>, PassError> {
        let _guard = tch::no_grad_guard();
        let forward = self.forward(batch, part, false, false)?;
        let head = self.head(&forward, batch, part);
        let Some(words) = &head.words else { return Ok(Vec::new()) };
        let (chosen, TeacherColumn { k, ids, log_probs }) = head.top(words, top);
        let (mut chosen, mut ids, mut log_probs) = (chosen.into_iter(), ids.into_iter(), log_probs.into_iter());
        let mut own = |rows: usize| {
            let (ids, log_probs) = (ids.by_ref().take(rows * k).collect(), log_probs.by_ref().take(rows * k).collect());
            (chosen.by_ref().take(rows).collect(), TeacherColumn { k, ids, log_probs })
        };
        Ok(part.iter().map(|&at| (at, own(batch.sequences[at].rows.len()))).collect())
    }

    /// Hidden states of the rows that predict trained tokens; with `kept`, without a graph, and with
    /// `balanced`, with the experts' loss.
    fn forward(&self, batch: &TrainBatch, part: &[usize], kept: bool, balanced: bool) -> Result<Forward, PassError> {
        let targets: Vec<i64> = part.iter().flat_map(|&at| &batch.sequences[at].targets).copied().collect();
        let longest = part.iter().map(|&at| batch.sequences[at].inputs.len()).max().unwrap_or(0);
        // The experts' loss counts a prompt with each answer.
        let balanced = balanced && self.decoder.config().experts.is_some();
        let share = !balanced && self.decoder.shares_prompts(longest, self.compute);
        let (packed, rows) = pack(batch, part, share, self.config.router_replay);
        let mut watch = Watch::new(balanced);
        let [rows, targets] = [rows, targets].map(|numbers| upload(&numbers, self.compute.device));
        let weights = match &self.held {
            Held::Part(gathered) => {
                let passed = self.decoder.hidden_kept(&**gathered, packed, rows, watch, self.kept_on())?;
                return Ok(Forward::recomputed(passed, targets));
            }
            Held::Whole(weights) => weights,
        };
        // A graph would hold all layers' numbers.
        if kept || weights.is_quantised() {
            let Ok(passed) = self.decoder.hidden_kept(&Whole::reading(weights), packed, rows, watch, self.kept_on());
            return Ok(Forward::recomputed(passed, targets));
        }
        let views = self.decoder.views_of(weights);
        let embedded = self.decoder.embedded(&views, &packed, weights.adapter.is_none());
        let rows = self.decoder.hidden_after(&views, &packed, &rows, &embedded, &mut watch);
        let head = views.head.shallow_clone();
        Ok(Forward { rows, head, targets, backward: Backward::Graph { embedded, ids: packed.ids }, watch })
    }

    fn head<'a>(&self, forward: &'a Forward, batch: &TrainBatch, part: &[usize]) -> OutputHead<'a> {
        let Forward { rows, head: weight, targets, .. } = forward;
        let model = self.decoder.config();
        let words = (!model.scores).then(|| {
            let chunk = self.config.logits_chunk.unwrap_or_else(|| logits_chunk(self.compute.device));
            let chunk_rows = (chunk / model.vocab_size).max(1) as i64;
            let temperatures = part.iter().map(|&at| &batch.sequences[at]).flat_map(|sequence| {
                std::iter::repeat_n(sequence.temperature.unwrap_or(self.config.temperature), sequence.rows.len())
            });
            let temperature = Temperature::of(&temperatures.collect::<Vec<f64>>(), self.compute.device);
            let teacher =
                batch.teacher_column(part).map(|column| upload(&column.ids, self.compute.device).reshape([-1, column.k as i64]));
            Words { targets, temperature, cap: model.logits_cap, teacher, chunk_rows }
        });
        OutputHead { weight, rows, words }
    }
}

/// Packs the sequences at `part`, and returns the rows that predict their trained tokens. With
/// `share`, the common prefix of neighbours in one group is computed once, and their gradients are
/// summed there, if the experts of `replay` are the same, too.
fn pack(batch: &TrainBatch, part: &[usize], share: bool, replay: RouterReplay) -> (Packed, Vec<i64>) {
    let sequences: Vec<&TrainSequence> = part.iter().map(|&at| &batch.sequences[at]).collect();
    let known = |sequence: &&&TrainSequence| sequence.routes.is_some() && replay != RouterReplay::Off;
    let width = sequences.iter().find(known).and_then(|sequence| Some(sequence.routes.as_ref()?.width()));
    let (mut packed, mut rows, mut experts) = (Packed::default(), Vec::new(), Vec::new());
    let mut route = |sequence: &TrainSequence, tokens: Range<usize>| {
        if let Some(width) = width {
            let own = tokens.clone().flat_map(|at| sequence.experts_at(at));
            let end = experts.len() + tokens.len() * width;
            experts.extend(own);
            experts.resize(end, ANY_EXPERT);
        }
    };
    for group in sequences.chunk_by(|a, b| a.group == b.group) {
        let common = if share && group.len() > 1 { common_prefix(group, width.is_some()) } else { 0 };
        let prefix_at = packed.lens.len();
        let prefix_row = if common > 0 { packed.push(group[0].inputs[..common].iter().copied(), None) } else { 0 };
        route(group[0], 0..common);
        for sequence in group {
            let own = &sequence.inputs[common..];
            let own_row = match own {
                [] => 0,
                own => packed.push(own.iter().copied(), (common > 0).then_some(prefix_at)),
            };
            route(sequence, common..sequence.inputs.len());
            let place = |&row: &usize| if row < common { prefix_row + row } else { own_row + row - common };
            rows.extend(sequence.rows.iter().map(|row| place(row) as i64));
        }
    }
    packed.recorded = width.map(|_| PackedRoutes { experts, follow: replay == RouterReplay::Follow });
    (packed, rows)
}

/// Number of tokens that all sequences of a group start with, and with `routed` experts, too.
fn common_prefix(group: &[&TrainSequence], routed: bool) -> usize {
    let first = group[0];
    let common = |other: &&TrainSequence| {
        let alike = first
            .inputs
            .iter()
            .zip(&other.inputs)
            .enumerate()
            .take_while(|(at, (a, b))| a == b && (!routed || first.experts_at(*at) == other.experts_at(*at)));
        alike.count()
    };
    group[1..].iter().map(common).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(group: u64, inputs: &[i64], rows: &[usize]) -> TrainSequence {
        TrainSequence { group, inputs: inputs.to_vec(), rows: rows.to_vec(), ..TrainSequence::default() }
    }

    #[test]
    fn the_common_prefix_of_a_group_is_packed_once() {
        let sequences = vec![
            sequence(0, &[1, 2, 3, 4], &[2, 3]),
            sequence(0, &[1, 2, 3], &[2]),
            sequence(0, &[1, 2, 3, 5, 6], &[2, 3, 4]),
            sequence(1, &[1, 2], &[1]),
        ];
        let batch = TrainBatch { sequences, batch_tokens: 7, ..TrainBatch::default() };
        let (packed, rows) = pack(&batch, &[0, 1, 2, 3], true, RouterReplay::Off);
        assert_eq!(packed.ids, [1, 2, 3, 4, 5, 6, 1, 2]);
        assert_eq!((&packed.lens[..], &packed.prefixes[..]), (&[3, 1, 2, 2][..], &[None, Some(0), Some(0), None][..]));
        assert_eq!(rows, [2, 3, 2, 2, 4, 5, 7], "the prompt's last row predicts the first token of each answer");
        let (apart, rows) = pack(&batch, &[0, 1, 2, 3], false, RouterReplay::Off);
        assert_eq!((apart.len(), apart.shares(), rows[2]), (14, false, 6));
    }
}
