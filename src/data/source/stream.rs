//! An endless, ordered, resumable stream over several data sets, read from disk as it is drawn.

use std::sync::Arc;

use super::DataError;
use super::dataset::{DataSet, DataSpec};
use super::mixture::{Mixture, Share};
use super::shape::Shape;
use super::skips::Skip;
use crate::data::{BufferError, BufferState, Prompt};

/// Item of a [`Mixed`] stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn<T> {
    /// Value of the record.
    pub item: T,
    /// The name of its data set.
    pub source: Arc<str>,
    /// The pass over its data that it belongs to, from 0.
    pub epoch: u64,
}

/// Several data sets as one stream. Its position is a number; the item at a position follows from
/// the number, the data and the seed alone. Clones share the index of the data.
#[derive(Clone, Debug)]
pub struct Mixed<T> {
    sets: Arc<[DataSet<T>]>,
    names: Vec<Arc<str>>,
    mixture: Mixture,
    fingerprint: String,
}

/// A stream of prompts.
pub type PromptDataset = Mixed<Prompt>;

impl<T: Shape> Mixed<T> {
    /// Opens them. Epoch 0 keeps the given order unless `shuffled`.
    pub fn open(sets: &[(DataSpec, Share)], seed: u64, shuffled: bool) -> Result<Self, DataError> {
        Self::open_if(sets, seed, shuffled, |_| Ok(()))
    }

    /// [`Mixed::open`] with a say in which records are used.
    pub fn open_if(
        sets: &[(DataSpec, Share)],
        seed: u64,
        shuffled: bool,
        usable: impl Fn(&T) -> Result<(), Skip> + Sync,
    ) -> Result<Self, DataError> {
        let open = |(spec, share): &(DataSpec, Share)| Ok((DataSet::open_if(spec, &usable)?, *share));
        Self::of(sets.iter().map(open).collect::<Result<_, DataError>>()?, seed, shuffled)
    }

    /// Makes a stream of open data sets.
    pub fn of(sets: Vec<(DataSet<T>, Share)>, seed: u64, shuffled: bool) -> Result<Self, DataError> {
        let sizes: Vec<(usize, Share)> = sets.iter().map(|(set, share)| (set.len(), *share)).collect();
        let mixture = Mixture::new(&sizes, seed, shuffled)?;
        let mut hash = crc32fast::Hasher::new();
        for (set, share) in &sets {
            hash.update(&set.fingerprint().to_le_bytes());
            hash.update(format!("{share:?}").as_bytes());
        }
        let fingerprint = format!("mixed-{:08x}", hash.finalize());
        let sets: Arc<[DataSet<T>]> = sets.into_iter().map(|(set, _)| set).collect();
        let names = sets.iter().map(|set| set.name().into()).collect();
        Ok(Mixed { sets, names, mixture, fingerprint })
    }

    /// Number `number` of the stream.
    pub fn get(&mut self, number: u64) -> Result<Drawn<T>, DataError> {
        let draw = self.mixture.draw(number);
        let item = self.sets[draw.set].get(draw.record)?;
        Ok(Drawn { item, source: self.names[draw.set].clone(), epoch: draw.epoch })
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
        self.mixture.len()
    }

    /// A line for each data set: how much there is, and what was left out.
    pub fn describe(&self) -> Vec<String> {
        self.sets.iter().map(DataSet::describe).collect()
    }

    /// The position before `next`, to be continued by [`Mixed::resume`].
    pub fn state(&self, next: u64) -> BufferState {
        let (seed, shuffled) = self.mixture.order();
        BufferState { fingerprint: self.fingerprint.clone(), len: self.len(), seed, shuffled, next }
    }

    /// Continues the saved stream, with its seed: gives the number that comes next. Other data is refused.
    pub fn resume(&mut self, state: &BufferState) -> Result<u64, DataError> {
        if (&state.fingerprint, state.len) != (&self.fingerprint, self.len()) {
            let (saved, saved_len) = (state.fingerprint.clone(), state.len);
            let other = BufferError::OtherDataSet { saved, saved_len, found: self.fingerprint.clone(), len: self.len() };
            return Err(other.into());
        }
        if self.mixture.order() != (state.seed, state.shuffled) {
            self.mixture = self.mixture.with_order(state.seed, state.shuffled);
        }
        Ok(state.next)
    }
}

impl Mixed<Prompt> {
    /// Number `number` as a prompt with its place in the stream.
    pub fn prompt(&mut self, number: u64) -> Result<Prompt, DataError> {
        let Drawn { item, source, epoch } = self.get(number)?;
        Ok(Prompt { ordinal: number, epoch, source: source.to_string(), ..item })
    }

    /// The prompts of a step: always `batch_size` of them, and the same for the same `iteration`, from 0.
    pub fn get_batch(&mut self, batch_size: usize, iteration: u64) -> Result<Vec<Prompt>, DataError> {
        let first = iteration * batch_size as u64;
        (first..first + batch_size as u64).map(|number| self.prompt(number)).collect()
    }
}
