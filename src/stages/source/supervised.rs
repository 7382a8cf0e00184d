//! Ready samples for training without a generator, in batches of one size. Says how many, as `tracing` events, when the run begins.

use std::sync::Arc;

use crate::data::{Batch, Group, Prompt, Sample};
use crate::flow::{Source, StageError};
use crate::observe::logs::announce_training;

/// Cycles over samples: batch `k` holds samples `k·size …` modulo their number, so that every batch is full, also when there are fewer
/// samples than a batch takes. Each sample is a group of one, unless they come as groups.
#[derive(Clone, Debug)]
pub struct Supervised {
    kind: &'static str,
    groups: Vec<Vec<Sample>>,
    size: usize,
    next: u64,
    batches: u64,
    announced: bool,
}

/// Supervised training without something to train on.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum SupervisedError {
    /// No samples.
    #[error("samples is empty: there is nothing to train on")]
    NoSamples,
    /// No batch.
    #[error("batch size is 0; it must be at least 1")]
    NoBatch,
}

impl Supervised {
    /// `batches` batches of `size` samples.
    pub fn new(samples: Vec<Sample>, size: usize, batches: u64) -> Result<Self, SupervisedError> {
        let each = samples.into_iter().map(|sample| vec![sample]).collect();
        Self::grouped("SFT", each, size, batches)
    }

    /// `batches` batches of `size` groups, such as pairs; `kind` says what is trained.
    pub fn grouped(kind: &'static str, groups: Vec<Vec<Sample>>, size: usize, batches: u64) -> Result<Self, SupervisedError> {
        match (groups.len(), size) {
            (0, _) => Err(SupervisedError::NoSamples),
            (_, 0) => Err(SupervisedError::NoBatch),
            _ => Ok(Supervised { kind, groups, size, next: 0, batches, announced: false }),
        }
    }

    /// Goes on after so many batches.
    pub fn after(self, batches: u64) -> Self {
        Supervised { next: batches, ..self }
    }
}

impl Supervised {
    /// Batch `id`, which counts from 0: a pure function of its number.
    pub fn batch(&self, id: u64) -> Batch {
        let first = id.wrapping_mul(self.size as u64);
        let group = |ordinal: u64| {
            let mut samples = self.groups[(ordinal % self.groups.len() as u64) as usize].clone();
            samples.iter_mut().for_each(|sample| sample.group_index = ordinal);
            let text = samples.first().map(|sample| sample.prompt.clone()).unwrap_or_default();
            Group { prompt: Arc::new(Prompt { ordinal, text, ..Prompt::default() }), samples }
        };
        Batch { id, groups: (first..first + self.size as u64).map(group).collect(), ..Batch::default() }
    }
}

impl Source for Supervised {
    type Out = Batch;

    fn next(&mut self) -> Result<Option<Batch>, StageError> {
        if !std::mem::replace(&mut self.announced, true) {
            let (groups, steps) = (self.groups.len(), self.batches);
            let what = if self.groups.iter().all(|samples| samples.len() == 1) { "Samples" } else { "Groups" };
            announce_training(self.kind, &[(what, &groups), ("Steps", &steps), ("Batch size", &self.size)]);
        }
        if self.next >= self.batches {
            return Ok(None);
        }
        self.next += 1;
        Ok(Some(self.batch(self.next - 1)))
    }
}
