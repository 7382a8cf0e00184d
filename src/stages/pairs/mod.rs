//! Pairs of a scored group's answers, for losses that learn from preferences.
//!
//! A group stays whole, so that its rewards count in the curves and all its tokens in the ledger (law D4): what is in no pair is masked, and the
//! trainer, which is given the same selector ([`Trainer::pairs`](crate::stages::train::Trainer::pairs)), lays the pairs out.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::algo::filters::{GroupFilter, Verdict};
use crate::algo::{PairOf, PairSelector};
use crate::data::{Batch, Group, Sample, Scored};
use crate::flow::{Io, Stage, StageError};

/// Why a group was dropped whose answers all earned the same.
pub const NO_PAIR: &str = "no_pair";

/// Which pairs are made of a group. Clones are the same.
#[derive(Clone)]
pub struct Pairing(Arc<dyn PairSelector>);

impl Pairing {
    /// By one of [`best_against_worst`](crate::algo::best_against_worst), [`random_pair`](crate::algo::random_pair),
    /// [`all_pairs`](crate::algo::all_pairs), or a closure.
    pub fn by(select: impl PairSelector) -> Self {
        Pairing(Arc::new(select))
    }

    /// The pairs of a group.
    pub fn of(&self, group: &Group) -> Vec<PairOf> {
        (self.0)(group)
    }

    /// Drops groups without a pair, for a filter that knows when to lose patience.
    pub fn filter(&self) -> impl GroupFilter {
        let pairing = self.clone();
        move |group: &Group| Verdict::keep_if(!pairing.of(group).is_empty(), NO_PAIR)
    }

    /// Masks what is in none of these pairs of a group, so that nothing is learned from it.
    fn mask(pairs: &[PairOf], samples: &mut [Sample]) {
        for (at, sample) in samples.iter_mut().enumerate() {
            if pairs.iter().all(|pair| at != pair.chosen && at != pair.rejected) {
                sample.loss_mask.fill(0.0);
            }
        }
    }

    /// Masks what is in no pair of a batch.
    pub(crate) fn mask_others(&self, batch: &mut Batch) {
        for group in &mut batch.groups {
            let pairs = self.of(group);
            Pairing::mask(&pairs, &mut group.samples);
        }
    }

    /// Chosen and rejected, one behind the other, pair after pair.
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

/// The stage: masks what is in no pair, so that no reference need score it, and drops groups that have none. A trainer masks the same, so that a
/// run which comes to pairs in a later step can do without.
#[derive(Clone, Debug)]
pub struct Pairs {
    pairing: Pairing,
}

impl Pairs {
    /// Makes these pairs.
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
