//! Passes of a worker over a batch: micro-batches, on this rank or all, and the gradient's sum.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use tch::Tensor;

use super::error::given_up;
use super::optimizer::grad_norm;
use super::replica::{Part, PassError, Replica};
use super::shards::Shards;
use super::team::{Command, Team, key_of};
use super::worker::Worker;
use super::{Algorithm, AtTeacher, ForwardBackward, RouterReplay, TrainBatch, TrainError, TrainSequence};
use crate::algo::LossOutput;
use crate::flow::caught;
use crate::model::{Dtype, Entry, Layout, part};
use crate::ranks::Shard;

/// Accumulated gradient of the next optimizer step.
#[derive(Default)]
pub(super) struct Accumulated {
    /// Of this rank's passes; or this rank's part of that of all passes, if ranks sum it after each.
    /// `None` is zero.
    pub gradient: Option<Tensor>,
    /// Set by the first batch.
    pub begun: bool,
    /// Reason to skip the step, the same on all ranks.
    pub skip: Option<String>,
}

impl Accumulated {
    fn add(&mut self, gradient: Tensor) {
        self.gradient = Some(match self.gradient.take() {
            None => gradient,
            Some(mut sum) => sum.g_add_(&gradient),
        });
    }
}

impl Worker {
    /// Micro-batches of all ranks, as many for each as for the others if possible.
    fn micro_batches(&self, batch: &TrainBatch, replicas: usize) -> Vec<Vec<usize>> {
        let ranks = self.team.as_ref().map_or(1, Team::size);
        let cut = |least| self.config.micro_batches(batch, &self.model, self.cut.packed, least);
        let parts = cut(replicas * ranks);
        match parts.len() % ranks {
            0 => parts,
            odd => cut(parts.len() + ranks - odd),
        }
    }

    /// Indices of this rank's micro-batches.
    fn own(&self, parts: usize) -> Vec<usize> {
        let (rank, size) = self.team.as_ref().map_or((0, 1), |team| (team.rank(), team.size()));
        (rank..parts).step_by(size).collect()
    }

    /// Rejects experts of another model, and warns once if sampled sequences have none to follow.
    fn check_routes(&mut self, batch: &TrainBatch) -> Result<(), TrainError> {
        let Some(of) = self.model.experts.as_ref().filter(|_| self.config.router_replay != RouterReplay::Off) else {
            return Ok(());
        };
        let layers = self.model.sparse_before(self.model.layers());
        let wrong = |sequence: &TrainSequence| {
            let problem = sequence.routes.as_ref()?.problem_for(layers, of.count, of.per_token)?;
            Some(TrainError::Routes(sequence.name(), problem))
        };
        if let Some(error) = batch.sequences.iter().find_map(wrong) {
            return Err(error);
        }
        let lacks = |sequence: &&TrainSequence| sequence.behaviour.is_some() && sequence.routes.is_none();
        let lacking: Vec<&TrainSequence> = batch.sequences.iter().filter(lacks).collect();
        if let (Some(first), false) = (lacking.first(), self.warned_of_routes) {
            self.warned_of_routes = true;
            tracing::warn!(
                "{} and {} others of {} sequences came without the experts of their generator, so that the trainer's routers choose \
                 for them; let the generator record them",
                first.name(),
                lacking.len() - 1,
                batch.sequences.len()
            );
        }
        Ok(())
    }

    pub fn forward_backward(&mut self, batch: &TrainBatch) -> Result<ForwardBackward, TrainError> {
        self.check_routes(batch)?;
        // The experts' loss depends on the cuts, which threads shall not decide.
        let replicas = if self.config.router_loss > 0.0 { 1 } else { self.cut.replicas };
        let mut parts = self.micro_batches(batch, replicas);
        if parts.is_empty() {
            return Err(TrainError::NothingToTrain(batch.sequences.len()));
        }
        self.command(|| Ok(Command::ForwardBackward(Cow::Owned(batch.clone()), key_of(batch)?)))?;
        let algorithm = batch.algorithm.clone().unwrap_or_else(|| self.algorithm.clone());
        // The experts' loss is of all tokens.
        let leaves_out = algorithm.ignores_zero_advantage() && self.config.router_loss == 0.0;
        let saved_tokens = if leaves_out { leave_out(batch, &mut parts) } else { 0 };
        let judged = self.judge_whole_batch(&algorithm, batch, &parts)?;
        let mut seen = match self.team.is_some() {
            true => self.passes_of_all(&algorithm, batch, &parts, &judged)?,
            false => self.passes(&algorithm, batch, &parts, &judged)?,
        };
        seen.saved_tokens = saved_tokens;
        self.accumulated.begun = true;
        if let Some(reason) = &seen.skipped {
            self.accumulated.skip.get_or_insert(reason.clone());
        }
        Ok(seen)
    }

    /// The sum over all ranks of what was accumulated: this rank's part, if the state is divided.
    pub(super) fn summed(&self, own: Option<Tensor>) -> Result<Tensor, TrainError> {
        let options = (tch::Kind::Float, self.config.compute.device);
        let zeros = |len: usize| Tensor::zeros([len as i64], options);
        let whole = || zeros(self.weights.trained().0.total());
        let sum = || match (&self.team, &self.shards) {
            (None, _) => Ok(own.unwrap_or_else(whole)),
            (Some(team), None) => {
                let mut sum = own.unwrap_or_else(whole);
                team.mesh().all.lock().all_reduce(&mut sum)?;
                Ok(sum)
            }
            (Some(team), Some(shards)) => {
                let mut sum = match (team.shard(), &self.divided) {
                    (_, Some(divided)) => divided.gathered.take_sums().unwrap_or_else(|| zeros(shards.own_len())),
                    (Shard::Gradients, _) => own.unwrap_or_else(|| zeros(shards.own_len())),
                    _ => shards.sum(&own.unwrap_or_else(whole))?,
                };
                shards.sum_of_copies(&mut sum)?;
                Ok(sum)
            }
        };
        sum().map_err(|error| self.explain(error))
    }

    /// Norm of the gradient of which this rank has `own`, over all ranks, and the tensors with numbers
    /// that are not finite, if it is not. Copies of the state must agree to the bit.
    pub(super) fn norm_of_all(&mut self, own: &Tensor) -> Result<(f64, Vec<String>), TrainError> {
        let (norm, layout) = (grad_norm(own), self.weights.trained().0);
        let held = self.shards.as_ref().map_or_else(|| vec![(0..layout.total(), 0)], |shards| shards.held().collect());
        let names = if norm.is_finite() { Vec::new() } else { bad_tensors(layout, own, &held) };
        let Some(team) = &mut self.team else { return Ok((norm, names)) };
        let all = team.agree(Ok((norm, names)))?;
        let parts = self.shards.as_ref().map_or(1, Shards::parts);
        let of_copy = |copy: &[(f64, Vec<String>)]| match copy {
            [(whole, _)] => *whole,
            parts => parts.iter().map(|(norm, _)| norm * norm).sum::<f64>().sqrt(),
        };
        let norms: Vec<f64> = all.chunks(parts).map(of_copy).collect();
        team.check_equal("gradient norm", &norms, parts)?;
        let mut names: Vec<String> = all[..parts].iter().flat_map(|(_, names)| names.clone()).collect();
        names.dedup();
        Ok((norms[0], names))
    }

    /// [`Worker::passes`] on every rank over its own parts, with one result.
    fn passes_of_all(
        &mut self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        parts: &[Vec<usize>],
        judged: &[LossOutput],
    ) -> Result<ForwardBackward, TrainError> {
        let in_step = self.in_step();
        let mut pass = || self.passes(algorithm, batch, parts, judged);
        // The others wait in their passes, not for this rank's result: a panic ends the run.
        let own = if in_step { Ok(pass()) } else { caught(pass) };
        let own = own.unwrap_or_else(|message| Err(TrainError::Tensor(message)));
        let Some(team) = &mut self.team else { return own };
        let mut seen = ForwardBackward::default();
        team.agree(own)?.into_iter().for_each(|other| seen.merge(other));
        Ok(seen)
    }

    /// Forward and backward passes over this rank's parts, whose gradients are accumulated.
    fn passes(
        &mut self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        parts: &[Vec<usize>],
        judged: &[LossOutput],
    ) -> Result<ForwardBackward, TrainError> {
        let (own, count) = (self.own(parts.len()), self.passes_of_each(parts.len()));
        let mut seen = ForwardBackward { micro_batches: own.len(), ..Default::default() };
        let (mut ended, mut broken) = (Ok::<(), TrainError>(()), None);
        // A score head has no log-probabilities to compare with the generator's.
        let words = !self.model.scores;
        let (device, in_step) = (self.config.compute.device, self.in_step());
        let (accumulated, policy) = (&mut self.accumulated, self.config.non_finite);
        // Each pass's gradient is summed over the ranks.
        let whole = self.weights.trained().0.total() as i64;
        let sum = |shards: &Shards, gradient: Option<Tensor>| {
            shards.sum(&gradient.unwrap_or_else(|| Tensor::zeros([whole], (tch::Kind::Float, device))))
        };
        let shards = self.shards.as_ref().filter(|_| self.team.as_ref().is_some_and(|team| team.shard() == Shard::Gradients));
        let over = AtomicBool::new(false);
        // A single replica that computes layers again adds each one's gradient to the sum, without a copy of all.
        // Not in f16, where a gradient that overflows is computed again.
        let whole_model = self.weights.adapter.is_none() && shards.is_none();
        let alone = self.replicas.len() == 1 && self.config.compute.dtype != Dtype::F16;
        let adds = self.config.gradient_checkpointing && whole_model && alone;
        let sum_of_one = Mutex::new(if adds { accumulated.gradient.take() } else { None });
        let work = |replica: &mut Replica, at: usize| match own.get(at) {
            Some(&piece) if !over.load(Relaxed) => {
                let (judged, mut sum) = (judged.get(piece).cloned(), adds.then(|| sum_of_one.lock()));
                replica.differentiate(algorithm, batch, &parts[piece], judged, sum.as_deref_mut()).map(Some)
            }
            _ => replica.accompany(true).map(|()| None),
        };
        self.replicas.run(count, work, |at, part| {
            let mut gradient = None;
            let mut take =
                |Part { scored, output, gradient: of_part, router_loss, router_mismatch }: Part| -> Result<(), TrainError> {
                    let part = &parts[own[at]];
                    seen.loss += output.loss + router_loss.unwrap_or(0.0);
                    seen.router_loss = router_loss.map(|own| own + seen.router_loss.unwrap_or(0.0)).or(seen.router_loss);
                    seen.router_mismatch.merge(router_mismatch);
                    seen.tokens += scored.log_probs.len();
                    seen.input_tokens += batch.input_tokens(part);
                    seen.entropy += scored.entropies.iter().sum::<f64>();
                    seen.metrics.merge(&output.metrics);
                    if words {
                        seen.gap.merge(&batch.gap(part, &scored.log_probs));
                        seen.scores.extend(batch.scores(part, &scored.log_probs, &scored.entropies));
                    }
                    match of_part {
                        Ok(of_part) => gradient = of_part.map(|gradient| gradient.to_device(device)),
                        Err(names) => seen.skipped = Some(given_up(policy, "the loss", names)?),
                    }
                    Ok(())
                };
            match part {
                Ok(Some(part)) if ended.is_ok() => ended = take(part),
                Ok(_) => {}
                Err(PassError::Loss(error)) => ended = Err(error.into()),
                Err(PassError::Ranks(error)) => broken = Some(error),
            }
            match shards {
                None => gradient.into_iter().for_each(|gradient| accumulated.add(gradient)),
                Some(shards) => match sum(shards, gradient) {
                    Ok(gradient) => accumulated.add(gradient),
                    Err(error) => broken = Some(error),
                },
            }
            let stop = ended.is_err() || seen.skipped.is_some();
            over.store(stop, Relaxed);
            // The others pass as often as this rank would have.
            if broken.is_some() || stop && !in_step { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if adds {
            accumulated.gradient = sum_of_one.into_inner();
        }
        broken.map_or(Ok(()), |error| Err(self.explain(error)))?;
        ended?;
        seen.entropy /= seen.tokens.max(1) as f64;
        Ok(seen)
    }

    /// Returns true if the ranks exchange numbers in each pass.
    fn in_step(&self) -> bool {
        self.team.as_ref().is_some_and(|team| matches!(team.shard(), Shard::Gradients | Shard::Parameters))
    }

    /// Passes of each rank over `parts` micro-batches: all pass equally often if they are in step.
    fn passes_of_each(&self, parts: usize) -> usize {
        match &self.team {
            Some(team) if self.in_step() => parts.div_ceil(team.size()),
            _ => self.own(parts).len(),
        }
    }

    /// Log-probabilities of trained tokens, or scores at their rows, sequence by sequence.
    pub fn score(&mut self, batch: &TrainBatch) -> Result<Vec<Vec<f64>>, TrainError> {
        self.check_routes(batch)?;
        self.command(|| Ok(Command::Score(Cow::Owned(batch.clone()))))?;
        let parts = self.micro_batches(batch, self.cut.replicas);
        Ok(self.columns(batch, &parts, false)?.into_iter().map(|[log_probs, ..]| log_probs).collect())
    }

    /// Log-probabilities and entropies of the sequences in `parts`, by sequence, and with `of_teacher` those of
    /// a teacher's tokens.
    fn columns(&mut self, batch: &TrainBatch, parts: &[Vec<usize>], of_teacher: bool) -> Result<Vec<[Vec<f64>; 3]>, TrainError> {
        let (own, count) = (self.own(parts.len()), self.passes_of_each(parts.len()));
        let score = |replica: &mut Replica, at: usize| match own.get(at) {
            Some(&piece) => replica.score(batch, &parts[piece], of_teacher),
            None => replica.accompany(false).map(|()| Vec::new()),
        };
        let (in_step, replicas, mut broken) = (self.in_step(), &mut self.replicas, None);
        let mut work = || {
            let mut scored = Vec::new();
            replicas.run(count, score, |_, part| match part {
                Ok(part) => {
                    scored.extend(part);
                    ControlFlow::Continue(())
                }
                Err(error) => {
                    broken = Some(error);
                    ControlFlow::Break(())
                }
            });
            scored
        };
        let own = match &self.team {
            Some(_) if !in_step => caught(work).map_err(TrainError::Tensor),
            _ => Ok(work()),
        };
        match broken {
            Some(PassError::Ranks(error)) => return Err(self.explain(error)),
            Some(PassError::Loss(error)) => return Err(error.into()),
            None => {}
        }
        let all = match &mut self.team {
            Some(team) => team.agree(own)?.concat(),
            None => own?,
        };
        let mut columns = vec![[Vec::new(), Vec::new(), Vec::new()]; batch.sequences.len()];
        all.into_iter().for_each(|(sequence, own)| columns[sequence] = own);
        Ok(columns)
    }

    /// Loss of each part for algorithms that need the whole batch together: all log-probabilities
    /// first, then the loss, then its split. Empty for other algorithms, and if there is one part.
    fn judge_whole_batch(
        &mut self,
        algorithm: &Algorithm,
        batch: &TrainBatch,
        parts: &[Vec<usize>],
    ) -> Result<Vec<LossOutput>, TrainError> {
        if parts.len() == 1 || !algorithm.whole_batch() {
            return Ok(Vec::new());
        }
        let columns = self.columns(batch, parts, true)?;
        // The loss takes sequences in batch order.
        let mut own = parts.concat();
        own.sort_unstable();
        let packed = |column: usize| own.iter().flat_map(|&at| &columns[at][column]).copied().collect::<Vec<f64>>();
        let Algorithm { loss, off_policy, .. } = algorithm;
        let ([log_probs, entropies, policy], vocabulary) = ([0, 1, 2].map(packed), self.model.vocab_size);
        let at_teacher = Some(AtTeacher { log_probs: &policy, vocabulary }).filter(|_| !policy.is_empty());
        let mut whole = batch.evaluate(&own, loss.as_ref(), off_policy, &log_probs, &entropies, at_teacher)?;
        let mut end = 0;
        let place = |&at: &usize| {
            end += batch.sequences[at].rows.len();
            (at, end - batch.sequences[at].rows.len()..end)
        };
        let places: BTreeMap<usize, Range<usize>> = own.iter().map(place).collect();
        // Several numbers for each token of a teacher's.
        let of = |column: &[f64], part: &[usize]| {
            let each = column.len() / log_probs.len().max(1);
            let place = |at: &usize| places[at].start * each..places[at].end * each;
            part.iter().flat_map(|at| &column[place(at)]).copied().collect::<Vec<f64>>()
        };
        let take = |part: &Vec<usize>| LossOutput {
            grad: of(&whole.grad, part),
            entropy_grad: whole.entropy_grad.as_deref().map(|grad| of(grad, part)),
            teacher_grad: whole.teacher_grad.as_deref().map(|grad| of(grad, part)),
            // Value and counts belong to the first part, so that the sum over parts is the whole.
            loss: std::mem::take(&mut whole.loss),
            metrics: std::mem::take(&mut whole.metrics),
        };
        Ok(parts.iter().map(take).collect())
    }
}

/// Tensors with numbers that are not finite, of a gradient that has these ranges of the whole from
/// these places on.
fn bad_tensors(layout: &Layout, gradient: &Tensor, held: &[(Range<usize>, usize)]) -> Vec<String> {
    let is_bad = |entry: &&Entry| {
        held.iter().any(|(range, at)| {
            let (start, end) = (range.start.max(entry.range().start), range.end.min(entry.range().end));
            let own = || at + start - range.start..at + end - range.start;
            start < end && part(gradient, own()).isfinite().all().int64_value(&[]) == 0
        })
    };
    layout.entries().iter().filter(is_bad).map(|entry| entry.name.clone()).collect()
}
/// Removes parts with zero advantage, and returns their number of input tokens.
fn leave_out(batch: &TrainBatch, parts: &mut Vec<Vec<usize>>) -> usize {
    let indifferent = |part: &Vec<usize>| part.iter().all(|&at| batch.sequences[at].is_indifferent());
    let saved = parts.split_off(parts.partition_point(|part| !indifferent(part)));
    batch.input_tokens(&saved.concat())
}
