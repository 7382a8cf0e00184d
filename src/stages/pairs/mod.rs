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

    pub(crate) fn mask_others(&self, batch: &mut Batch) {
        for group in &mut batch.groups {
            mask_unpaired(&(self.0)(group), &mut group.samples);
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
                let pairs = (self.0)(scored.group());
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
