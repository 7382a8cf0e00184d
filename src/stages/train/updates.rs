//! Updates of a whole batch: PPO epochs, each cut into minibatches.
//!
//! A minibatch is an optimizer step with denominators of its own, as in verl. Advantages, values
//! and proximal log-probabilities come from the whole batch. Groups stay together (law D2), and
//! (seed, step, pass) draws them, so that a resumed run repeats the draw (law C2). A single
//! minibatch is the whole batch, in order.

use std::ops::Range;
use std::sync::Arc;

use super::critic::Valued;
use super::step_config::{Minibatches, StepConfig};
use super::trainer::Trainer;
use crate::algo::Aggregation;
use crate::data::{Batch, Sample, permutation};
use crate::flow::StageError;
use crate::train::{
    CollateError, ForwardBackward, OptimStep, PackedColumns, TrainBatch, TrainFuture, TrainSequence, TrainingBackend, Update,
    collate,
};

/// Keeps these draws apart from those of the prompts.
const DOMAIN: u64 = 0x6d69_6e69_6261_7463;

impl Minibatches {
    /// Draws minibatches of groups with these numbers of samples, and returns the samples' indices.
    /// `stream` differs between passes.
    fn draw(self, groups: impl Iterator<Item = usize>, stream: u64) -> Vec<Vec<usize>> {
        let mut samples = 0;
        let place = |size: usize| {
            samples += size;
            samples - size..samples
        };
        let groups: Vec<Range<usize>> = groups.map(place).collect();
        let mut order: Vec<usize> = (0..groups.len()).collect();
        let count = self.count.max(1);
        if count > 1 {
            order = permutation(groups.len(), self.seed ^ DOMAIN, stream);
        }
        // As even as possible; with fewer groups than minibatches, some are empty.
        let cut = |at: usize| at * order.len() / count;
        let minibatch = |at: usize| {
            let mut chosen = order[cut(at)..cut(at + 1)].to_vec();
            chosen.sort_unstable();
            chosen.into_iter().flat_map(|group| groups[group].clone()).collect::<Vec<_>>()
        };
        (0..count).map(minibatch).filter(|places| !places.is_empty()).collect()
    }
}

/// Result of a step's updates.
pub(super) struct Updated {
    /// The first pass, with the loss's counts of all.
    pub forward: ForwardBackward,
    /// Loss of the samples mixed into the last update.
    pub mixed: Option<f64>,
    /// The last update, in progress.
    pub optim: TrainFuture<OptimStep>,
}

/// Sequences at `places` with the minibatch's own denominators; `None` if none of their tokens is
/// trained.
fn minibatch(
    whole: &Arc<TrainBatch>,
    samples: &[&Sample],
    places: &[usize],
    aggregation: Aggregation,
) -> Result<Option<Arc<TrainBatch>>, CollateError> {
    if places.len() == samples.len() {
        return Ok(Some(whole.clone()));
    }
    let chosen: Vec<&Sample> = places.iter().map(|&at| samples[at]).collect();
    let own = match collate(&chosen, aggregation) {
        Err(CollateError::NothingToTrain { .. }) => return Ok(None),
        own => own?,
    };
    let column = |(own, &at): (TrainSequence, &usize)| TrainSequence { weights: own.weights, ..whole.sequences[at].clone() };
    let sequences = own.sequences.into_iter().zip(places).map(column).collect();
    Ok(Some(Arc::new(TrainBatch { sequences, batch_tokens: own.batch_tokens, ..TrainBatch::clone(whole) })))
}

impl<B: TrainingBackend> Trainer<B> {
    /// Makes all updates of a step, the critic's included. The policy's first pass is checked
    /// before any weight changes (law N3).
    pub(super) fn update(
        &self,
        (step, config): (u64, &StepConfig),
        batch: &Batch,
        policy: TrainBatch,
        valued: Option<&mut Valued>,
    ) -> Result<Updated, StageError> {
        let samples: Vec<&Sample> = batch.samples().collect();
        let policy = Arc::new(policy);
        let rests = self.critic.as_ref().is_some_and(|critic| critic.warms_up(step));
        let (mut forward, mut optim) =
            if rests { (Some(self.look(step, &policy)?), Some(self.no_update())) } else { (None, None) };
        let mut mixed = None;
        let mut critic = self.critic.as_ref().zip(valued).map(|(critic, valued)| {
            let whole = Arc::new(std::mem::take(&mut valued.critic));
            (critic, whole, &mut valued.step)
        });
        let (passes, schedule) = (config.ppo_epochs.max(1), config.schedule);
        // Pairs are laid out over the batch, and are not cut.
        let minibatches = if config.pairs.is_some() { Minibatches::default() } else { config.minibatches };
        for pass in 0..passes {
            let stream = step.wrapping_mul(passes).wrapping_add(pass);
            for places in minibatches.draw(batch.groups.iter().map(|group| group.samples.len()), stream) {
                let part = |whole: &Arc<TrainBatch>| minibatch(whole, &samples, &places, config.aggregation);
                if !rests && let Some(part) = part(&policy)? {
                    let seen = self.backend.forward_backward(part).wait()?;
                    match &mut forward {
                        None => {
                            self.judge(step, &seen)?;
                            forward = Some(seen);
                        }
                        Some(forward) => {
                            forward.metrics.merge(&seen.metrics);
                            forward.skipped = forward.skipped.take().or(seen.skipped);
                        }
                    }
                    mixed = self.mix_in(config, 1.0)?;
                    optim = Some(self.backend.update(Update { schedule, ..Update::default() }));
                }
                if let Some((critic, whole, step)) = &mut critic
                    && let Some(part) = part(whole)?
                {
                    critic.learn(part, step)?;
                }
            }
        }
        let nothing = || CollateError::NothingToTrain { samples: samples.len() };
        let (forward, optim) = forward.zip(optim).ok_or_else(nothing)?;
        Ok(Updated { forward, mixed, optim })
    }

    /// Measures the gap of a batch that the policy is not trained on.
    fn look(&self, step: u64, batch: &Arc<TrainBatch>) -> Result<ForwardBackward, StageError> {
        let scores = self.backend.score(batch.clone()).wait()?;
        let all: Vec<usize> = (0..batch.sequences.len()).collect();
        let gap = PackedColumns::new(batch, &all).gap(&scores.concat());
        let seen = ForwardBackward { gap, ..ForwardBackward::default() };
        self.judge(step, &seen)?;
        Ok(seen)
    }

    fn no_update(&self) -> TrainFuture<OptimStep> {
        TrainFuture::ready(Ok(OptimStep { step: self.backend.state().step, ..OptimStep::default() }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_sample_is_in_one_minibatch_of_a_pass_with_its_group(
            sizes in prop::collection::vec(1usize..4, 1..20), count in 1usize..8, seed in any::<u64>(), stream in 0u64..9
        ) {
            let minibatches = Minibatches { count, seed };
            let drawn = minibatches.draw(sizes.iter().copied(), stream);
            prop_assert_eq!(&drawn, &minibatches.draw(sizes.iter().copied(), stream), "law C2");
            prop_assert_eq!(drawn.len(), count.min(sizes.len()));
            let mut all = drawn.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..sizes.iter().sum()).collect::<Vec<_>>());
            let ends = sizes.iter().scan(0, |end, size| { *end += size; Some(*end) });
            for (end, size) in ends.zip(&sizes) {
                let met = |places: &Vec<usize>| (end - size..end).filter(|at| places.contains(at)).count();
                prop_assert!(drawn.iter().all(|places| [0, *size].contains(&met(places))), "law D2");
            }
        }
    }

    #[test]
    fn passes_meet_in_different_minibatches_and_a_single_one_is_the_batch_as_it_is() {
        let draw = |count, stream| Minibatches { count, seed: 3 }.draw([1; 16].into_iter(), stream);
        assert_ne!(draw(4, 1), draw(4, 2));
        assert_eq!(draw(1, 1), [(0..16).collect::<Vec<_>>()]);
    }
}
