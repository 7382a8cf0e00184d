//! An endless, ordered, resumable stream over several data sets, read from disk when drawn.

use std::sync::Arc;

use super::dataset::{DataSet, DataSpec};
use super::mixture::{Mixture, Place};
use super::shape::Shape;
use crate::data::{BufferState, DataError, Prompt};

/// Item of a [`Mixed`] stream, with the name of its data set, and the pass over its data that it
/// belongs to, from 0.
pub(crate) struct Drawn<T> {
    pub item: T,
    pub source: String,
    pub epoch: u64,
}

/// Several data sets as one stream. Its position is a number; the item at a position follows from
/// the number, the data and the seed alone. Clones share the index of the data.
#[derive(Clone, Debug)]
pub struct Mixed<T> {
    sets: Arc<[DataSet<T>]>,
    mixture: Mixture,
    state: BufferState,
}

impl<T: Shape> Mixed<T> {
    /// Opens them. Epoch 0 keeps the given order unless `shuffled`.
    pub fn open(sets: &[DataSpec], seed: u64, shuffled: bool) -> Result<Self, DataError> {
        Self::open_if(sets, seed, shuffled, |_| Ok(()))
    }

    /// [`Mixed::open`] with a say in which records are used: an error is the reason to skip one.
    pub fn open_if(
        specs: &[DataSpec],
        seed: u64,
        shuffled: bool,
        usable: impl Fn(&T) -> Result<(), String> + Sync,
    ) -> Result<Self, DataError> {
        let (mut sets, mut sizes, mut hash) = (Vec::new(), Vec::new(), crc32fast::Hasher::new());
        for spec in specs {
            let (set, share) = (DataSet::open_if(spec, &usable)?, spec.share());
            hash.update(&set.fingerprint().to_le_bytes());
            hash.update(format!("{share:?}").as_bytes());
            sizes.push((set.len(), share));
            sets.push(set);
        }
        let mixture = Mixture::new(&sizes, seed, shuffled)?;
        let fingerprint = format!("mixed-{:08x}", hash.finalize());
        let state = BufferState { fingerprint, len: mixture.len(), seed, shuffled, next: 0 };
        Ok(Mixed { sets: sets.into(), mixture, state })
    }

    /// Number `number` of the stream.
    pub(crate) fn get(&mut self, number: u64) -> Result<Drawn<T>, DataError> {
        let place = self.place(number);
        self.read(place)
    }

    /// The place of a number, without its record.
    pub(crate) fn place(&mut self, number: u64) -> Place {
        self.mixture.draw(number)
    }

    /// The record of a place.
    pub(crate) fn read(&self, place: Place) -> Result<Drawn<T>, DataError> {
        let set = &self.sets[place.set];
        Ok(Drawn { item: set.get(place.record)?, source: set.name().to_owned(), epoch: place.epoch })
    }
}

impl<T> Mixed<T> {
    /// The data sets.
    pub fn sets(&self) -> &[DataSet<T>] {
        &self.sets
    }

    /// Numbers in an epoch; where sets have weights, records.
    #[expect(clippy::len_without_is_empty, reason = "it cannot be empty")]
    pub fn len(&self) -> usize {
        self.state.len
    }

    /// Shuffles epoch 0, too.
    pub fn shuffled(self) -> Self {
        let mixture = self.mixture.with_order(self.state.seed, true);
        Mixed { mixture, state: BufferState { shuffled: true, ..self.state }, ..self }
    }

    /// The position before `next`, to be continued by [`Mixed::resume`].
    pub fn state(&self, next: u64) -> BufferState {
        BufferState { next, ..self.state.clone() }
    }

    /// Continues the saved stream, with its seed: gives the number that comes next. Other data is refused.
    pub fn resume(&mut self, state: &BufferState) -> Result<u64, DataError> {
        state.check(&self.state.fingerprint, self.state.len)?;
        if (self.state.seed, self.state.shuffled) != (state.seed, state.shuffled) {
            self.mixture = self.mixture.with_order(state.seed, state.shuffled);
            self.state = state.clone();
        }
        Ok(state.next)
    }
}

impl Mixed<Prompt> {
    /// Number `number` as a prompt with its place in the stream.
    pub fn prompt(&mut self, number: u64) -> Result<Prompt, DataError> {
        let Drawn { item, source, epoch } = self.get(number)?;
        Ok(Prompt { ordinal: number, epoch, source, ..item })
    }

    /// The prompts of a step: always `batch_size` of them, and the same for the same `iteration`, from 0.
    pub fn get_batch(&mut self, batch_size: usize, iteration: u64) -> Result<Vec<Prompt>, DataError> {
        let first = iteration * batch_size as u64;
        (first..first + batch_size as u64).map(|number| self.prompt(number)).collect()
    }
}
