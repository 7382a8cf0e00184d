//! Ready samples for training without a generator, in batches of one size. Says how many, as `tracing` events, when the run begins.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use crate::data::packing::cut_evenly;
use crate::data::{Batch, Group, Prompt, Sample};
use crate::flow::{Source, StageError};
use crate::observe::logs::announce_training;

/// Cycles over samples: batch `k` holds samples `k·size …` modulo their number, so that every batch is full, also when there are fewer
/// samples than a batch takes. Each sample is a group of one, unless they come as groups.
///
/// Batches by tokens hold neighbours, too, but end with the last of the samples, so that batch `k` is the same in every round.
#[derive(Clone, Debug)]
pub struct Supervised {
    kind: &'static str,
    what: &'static str,
    groups: Vec<Vec<Sample>>,
    size: Size,
    next: u64,
    batches: u64,
    announced: bool,
}

/// What a batch holds.
#[derive(Clone, Debug)]
enum Size {
    /// So many groups.
    Groups(usize),
    /// By tokens: at most so many, and the runs of groups that makes.
    Tokens(usize, Vec<Range<usize>>),
}

impl Size {
    /// Ordinals of a batch's groups.
    fn batch(&self, number: u64, groups: usize) -> Range<u64> {
        match self {
            Size::Groups(size) => number * *size as u64..(number + 1) * *size as u64,
            Size::Tokens(_, runs) => {
                let (round, run) = (number / runs.len() as u64, &runs[(number % runs.len() as u64) as usize]);
                let first = round * groups as u64;
                first + run.start as u64..first + run.end as u64
            }
        }
    }
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
            _ => Ok(Self::of(kind, groups, Size::Groups(size), batches)),
        }
    }

    /// `batches` batches of as many groups in turn as have no more than `tokens` tokens together (a longer one is a batch), such that the costliest is as
    /// cheap as can be. `cost`: of a sequence of that many tokens.
    pub fn by_tokens(
        kind: &'static str,
        groups: Vec<Vec<Sample>>,
        tokens: usize,
        cost: impl Fn(usize) -> f64,
        batches: u64,
    ) -> Result<Self, SupervisedError> {
        match (groups.len(), tokens) {
            (0, _) => return Err(SupervisedError::NoSamples),
            (_, 0) => return Err(SupervisedError::NoBatch),
            _ => {}
        }
        let lengths = |group: &Vec<Sample>| group.iter().map(|sample| sample.tokens.len()).collect::<Vec<_>>();
        let lengths: Vec<Vec<usize>> = groups.iter().map(lengths).collect();
        let sizes: Vec<usize> = lengths.iter().map(|lengths| lengths.iter().sum()).collect();
        let costs: Vec<f64> = lengths.iter().map(|lengths| lengths.iter().map(|&length| cost(length)).sum()).collect();
        let runs = cut_evenly(&sizes, &costs, tokens, 1);
        Ok(Self::of(kind, groups, Size::Tokens(tokens, runs), batches))
    }

    fn of(kind: &'static str, groups: Vec<Vec<Sample>>, size: Size, batches: u64) -> Self {
        let what = if groups.iter().all(|samples| samples.len() == 1) { "Samples" } else { "Groups" };
        Supervised { kind, what, groups, size, next: 0, batches, announced: false }
    }

    /// Says `what` there are so many of, when the run begins: `Samples` or `Groups` unless told otherwise.
    pub fn called(self, what: &'static str) -> Self {
        Supervised { what, ..self }
    }

    /// Goes on after so many batches.
    pub fn after(self, batches: u64) -> Self {
        Supervised { next: batches, ..self }
    }
}

impl Source for Supervised {
    type Out = Batch;

    fn next(&mut self) -> Result<Option<Batch>, StageError> {
        if !std::mem::replace(&mut self.announced, true) {
            let (groups, steps) = (self.groups.len(), self.batches);
            let size: (&str, &dyn Display) = match &self.size {
                Size::Groups(size) => ("Batch size", size),
                Size::Tokens(tokens, _) => ("Batch tokens", tokens),
            };
            announce_training(self.kind, &[(self.what, &groups), ("Steps", &steps), size]);
        }
        if self.next >= self.batches {
            return Ok(None);
        }
        let group = |ordinal: u64| {
            let mut samples = self.groups[(ordinal % self.groups.len() as u64) as usize].clone();
            samples.iter_mut().for_each(|sample| sample.group_index = ordinal);
            let text = samples.first().map(|sample| sample.prompt.clone()).unwrap_or_default();
            Group { prompt: Arc::new(Prompt { ordinal, text, ..Prompt::default() }), samples }
        };
        let batch = Batch {
            id: self.next,
            groups: self.size.batch(self.next, self.groups.len()).map(group).collect(),
            ..Batch::default()
        };
        self.next += 1;
        Ok(Some(batch))
    }
}
