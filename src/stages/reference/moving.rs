//! Moving reference policies: shares of new versions, and their state in checkpoints (laws C1, C2).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::model::{ReferenceError, ReferenceModel};
use crate::data::Version;

/// Share of a new version in the reference: `(last version included, new version) -> share`, from 0
/// (nothing) to 1 (all).
pub type Share = Box<dyn Fn(Version, Version) -> f64 + Send>;

/// Exponential moving average: `θref ← d·θref + (1 − d)·θ` at every version. If versions are
/// skipped, the newest counts for all: `d` to the power of their number.
pub fn ema(decay: f64) -> impl Fn(Version, Version) -> f64 + Send {
    move |seen, version| 1.0 - decay.powf(version.saturating_sub(seen) as f64)
}

/// Copies versions 1, n + 1, 2n + 1 and so on, or the first version seen after one of them.
pub fn periodic(every: u64) -> impl Fn(Version, Version) -> f64 + Send {
    let period = move |version: Version| version.saturating_sub(1) / every.max(1);
    move |seen, version| if period(version) > period(seen) { 1.0 } else { 0.0 }
}

/// Weights of the reference, and the newest version included.
#[derive(Debug)]
pub struct Held<W> {
    /// Newest version included.
    pub seen: Version,
    /// Weights.
    pub weights: Arc<W>,
}

impl<W> Clone for Held<W> {
    fn clone(&self) -> Self {
        Held { seen: self.seen, weights: self.weights.clone() }
    }
}

/// State of a moving reference, shared with the trainer, which saves it in checkpoints. Clones
/// share the state.
pub struct MovingReference<W> {
    held: Arc<Mutex<Option<Held<W>>>>,
    encode: fn(&W) -> Result<Vec<u8>, ReferenceError>,
}

impl<W> Clone for MovingReference<W> {
    fn clone(&self) -> Self {
        MovingReference { held: self.held.clone(), encode: self.encode }
    }
}

impl<W> fmt::Debug for MovingReference<W> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("MovingReference").field("seen", &self.lock().as_ref().map(|held| held.seen)).finish()
    }
}

impl<W> MovingReference<W> {
    /// File of the weights in a checkpoint.
    pub const WEIGHTS: &str = "reference.safetensors";
    /// File of the version in a checkpoint, as text.
    pub const VERSION: &str = "reference.version";

    /// Empty state: the first version becomes the reference.
    pub fn new<M: ReferenceModel<Weights = W>>() -> Self {
        MovingReference { held: Arc::default(), encode: M::encode }
    }

    /// Continues from a checkpoint, before the run.
    pub fn restore(&self, held: Held<W>) {
        *self.lock() = Some(held);
    }

    /// Current state.
    pub fn held(&self) -> Option<Held<W>> {
        self.lock().clone()
    }

    /// Blends in `version` unless it is already included, and returns the new state.
    pub(super) fn see(&self, version: Version, new: Arc<W>, share: &Share, blend: impl FnOnce(&W, &W, f64) -> W) -> Held<W> {
        let next = match self.held() {
            Some(held) if held.seen >= version => return held,
            Some(held) => {
                let share = share(held.seen, version);
                let weights = match share {
                    0.0 => held.weights,
                    1.0 => new,
                    share => Arc::new(blend(&held.weights, &new, share)),
                };
                Held { seen: version, weights }
            }
            None => Held { seen: version, weights: new },
        };
        *self.lock() = Some(next.clone());
        next
    }

    /// Files for a checkpoint.
    pub fn files(&self) -> Result<BTreeMap<String, Vec<u8>>, ReferenceError> {
        let Some(held) = self.held() else { return Ok(BTreeMap::new()) };
        let weights = (self.encode)(&held.weights)?;
        Ok(BTreeMap::from([(Self::WEIGHTS.to_owned(), weights), (Self::VERSION.to_owned(), held.seen.to_string().into())]))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held<W>>> {
        self.held.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r209_versions_that_were_skipped_weigh_as_if_they_had_been_seen() {
        let one_by_one = (1..4).fold(1.0, |kept, seen| kept * (1.0 - ema(0.9)(seen, seen + 1)));
        assert!((one_by_one - (1.0 - ema(0.9)(1, 4))).abs() < 1e-12);
        assert_eq!(ema(0.0)(3, 4), 1.0);
        let copied: Vec<Version> = (2..12).filter(|version| periodic(4)(version - 1, *version) == 1.0).collect();
        assert_eq!(copied, [5, 9]);
        assert_eq!(
            [periodic(4)(4, 7), periodic(4)(5, 8)],
            [1.0, 0.0],
            "the first seen after a multiple, and then none until the next"
        );
    }
}
