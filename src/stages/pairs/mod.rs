//! Pairs of a scored group's completions, for preference losses.
//!
//! A group stays whole, so its rewards count in the curves and all its tokens in the ledger (law
//! D4). Completions without a pair are masked. The trainer gets the same selector
//! ([`StepConfig::pairs`](crate::stages::train::StepConfig::pairs)) and lays the pairs out.

use std::borrow::Cow;
use std::sync::Arc;

use crate::algo::filters::{GroupFilter, Verdict};
use crate::algo::{PairOf, PairSelector};
use crate::data::{Batch, Group, Sample, Scored};
use crate::flow::{Io, Stage, StageError};

/// Reason for dropping a group whose completions have equal rewards.
pub const NO_PAIR: &str = "no_pair";

const IN_PARTS: &str = "its rollout is in parts, because the chat template rewrites earlier turns, and [pairs] compares rollouts \
                        of one part; use a template that keeps turns as they were, or leave out [pairs]";

/// Selector of the pairs of a group. As a stage it masks samples without a pair, so that no
/// reference scores them, and drops groups without a pair. The trainer masks the same samples, so a
/// run that trains on pairs only in later steps needs no such stage.
#[derive(Clone)]
pub struct Pairing(Arc<dyn PairSelector>);

impl Pairing {
    /// Selects pairs by one of [`best_against_worst`](crate::algo::best_against_worst),
    /// [`random_pair`](crate::algo::random_pair), [`all_pairs`](crate::algo::all_pairs), or a
    /// closure.
    pub fn by(select: impl PairSelector) -> Self {
        Pairing(Arc::new(select))
    }

    /// Returns a filter that drops groups without a pair.
    pub fn filter(&self) -> impl GroupFilter {
        let select = self.0.clone();
        move |group: &Group| Verdict::keep_if(!select(group).is_empty(), NO_PAIR)
    }

    pub(crate) fn mask_others(&self, batch: &mut Batch) -> Result<(), StageError> {
        for group in &mut batch.groups {
            mask_unpaired(&self.pairs_of(group)?, &mut group.samples);
        }
        Ok(())
    }

    /// Pairs of a group of whole rollouts. The losses compare samples, of which a rollout in parts has several.
    fn pairs_of(&self, group: &Group) -> Result<Vec<PairOf>, StageError> {
        if let Some(sample) = group.samples.iter().find(|sample| sample.part > 0) {
            return Err(StageError::new(sample.problem(IN_PARTS)));
        }
        let (pairs, count) = ((self.0)(group), group.samples.len());
        match pairs.iter().flat_map(|pair| [pair.chosen, pair.rejected]).find(|at| *at >= count) {
            Some(at) => Err(StageError::new(format!("group {}: the selector pairs sample {at} of {count}", group.id()))),
            None => Ok(pairs),
        }
    }

    /// Returns chosen and rejected samples in turn, pair after pair.
    pub(crate) fn laid_out<'a>(&self, groups: &'a [Group]) -> Vec<&'a Sample> {
        let of = |group: &'a Group| {
            (self.0)(group).into_iter().flat_map(|pair| [&group.samples[pair.chosen], &group.samples[pair.rejected]])
        };
        groups.iter().flat_map(of).collect()
    }
}

fn mask_unpaired(pairs: &[PairOf], samples: &mut [Sample]) {
    for (at, sample) in samples.iter_mut().enumerate() {
        if pairs.iter().all(|pair| at != pair.chosen && at != pair.rejected) {
            sample.loss_mask.fill(0.0);
        }
    }
}

impl Stage for Pairing {
    type In = Scored;
    type Out = Scored;

    fn run(&mut self, io: &mut Io<Scored, Scored>) -> Result<(), StageError> {
        while let Some(mut scored) = io.recv()? {
            if scored.dropped().is_none() {
                let pairs = self.pairs_of(scored.group())?;
                if pairs.is_empty() {
                    scored = scored.drop_for(Cow::Borrowed(NO_PAIR));
                }
                mask_unpaired(&pairs, scored.samples_mut());
            }
            io.send(scored)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::best_against_worst;
    use crate::data::Prompt;

    #[test]
    fn a_rollout_in_parts_and_samples_that_are_not_there_are_in_no_pair_and_end_the_run() {
        let sample = |index: u32, part: u32| {
            let mut sample = Sample::begin(&Prompt::default(), index, &[1]);
            sample.push(2, -0.5, 1);
            Sample { part, reward: Some(f64::from(index)), ..sample }
        };
        let batch = |samples: Vec<Sample>| Batch { groups: vec![Group { samples, ..Group::default() }], ..Batch::default() };
        let masked = |samples| Pairing::by(best_against_worst).mask_others(&mut batch(samples));
        assert!(masked(vec![sample(0, 0), sample(1, 0)]).is_ok());
        let error = masked(vec![sample(0, 0), sample(1, 0), sample(1, 1)]).unwrap_err().to_string();
        assert!(error.contains("sample 1 of group 0") && error.contains("[pairs]"), "{error}");
        let beyond = Pairing::by(|_: &Group| vec![PairOf { chosen: 0, rejected: 2 }]);
        let error = beyond.mask_others(&mut batch(vec![sample(0, 0), sample(1, 0)])).unwrap_err().to_string();
        assert_eq!(error, "group 0: the selector pairs sample 2 of 2");
    }
}
