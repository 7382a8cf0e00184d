//! Pairs of a scored group's completions, for preference losses.
//!
//! A group stays whole, so its rewards count in the curves and all its tokens in the ledger (law
//! D4). Completions without a pair are masked. The trainer gets the same selector
//! ([`Trainer::pairs`](crate::stages::train::Trainer::pairs)) and lays the pairs out.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::algo::filters::{GroupFilter, Verdict};
use crate::algo::{PairOf, PairSelector};
use crate::data::{Batch, Group, Sample, Scored};
use crate::flow::{Io, Stage, StageError};

/// Reason for dropping a group whose completions have equal rewards.
pub const NO_PAIR: &str = "no_pair";

/// Selector of the pairs of a group.
#[derive(Clone)]
pub struct Pairing(Arc<dyn PairSelector>);

impl Pairing {
    /// Selects pairs by one of [`best_against_worst`](crate::algo::best_against_worst),
    /// [`random_pair`](crate::algo::random_pair), [`all_pairs`](crate::algo::all_pairs), or a
    /// closure.
    pub fn by(select: impl PairSelector) -> Self {
        Pairing(Arc::new(select))
    }

    /// Returns the pairs of a group.
    pub fn of(&self, group: &Group) -> Vec<PairOf> {
        (self.0)(group)
    }

    /// Returns a filter that drops groups without a pair.
    pub fn filter(&self) -> impl GroupFilter {
        let pairing = self.clone();
        move |group: &Group| Verdict::keep_if(!pairing.of(group).is_empty(), NO_PAIR)
    }

    /// Masks the samples of a group that are in none of these pairs.
    fn mask(pairs: &[PairOf], samples: &mut [Sample]) {
        for (at, sample) in samples.iter_mut().enumerate() {
            if pairs.iter().all(|pair| at != pair.chosen && at != pair.rejected) {
                sample.loss_mask.fill(0.0);
            }
        }
    }

    /// Masks the samples of a batch that are in no pair.
    pub(crate) fn mask_others(&self, batch: &mut Batch) {
        for group in &mut batch.groups {
            let pairs = self.of(group);
            Pairing::mask(&pairs, &mut group.samples);
        }
    }

    /// Returns chosen and rejected samples in turn, pair after pair.
    pub fn laid_out<'a>(&self, groups: &'a [Group]) -> Vec<&'a Sample> {
        let of = |group: &'a Group| {
            self.of(group).into_iter().flat_map(|pair| [&group.samples[pair.chosen], &group.samples[pair.rejected]])
        };
        groups.iter().flat_map(of).collect()
    }
}

impl fmt::Debug for Pairing {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Pairing")
    }
}

/// Stage that masks samples without a pair, so that no reference scores them, and drops groups
/// without a pair. The trainer masks the same samples, so a run that trains on pairs only in later
/// steps needs no such stage.
#[derive(Clone, Debug)]
pub struct Pairs {
    pairing: Pairing,
}

impl Pairs {
    /// Uses this selector.
    pub fn of(pairing: &Pairing) -> Self {
        Pairs { pairing: pairing.clone() }
    }
}

impl Stage for Pairs {
    type In = Scored;
    type Out = Scored;

    fn run(&mut self, io: &mut Io<Scored, Scored>) -> Result<(), StageError> {
        while let Some(mut scored) = io.recv()? {
            if scored.dropped().is_none() {
                let pairs = self.pairing.of(scored.group());
                if pairs.is_empty() {
                    scored = scored.drop_for(Cow::Borrowed(NO_PAIR));
                }
                Pairing::mask(&pairs, scored.samples_mut());
            }
            io.send(scored)?;
        }
        Ok(())
    }
}
