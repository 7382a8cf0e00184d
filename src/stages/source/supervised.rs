//! Ready samples for training without a generator, in batches of one size. Says how many, as `tracing` events, when the run begins.

use std::sync::Arc;

use super::announce_data;
use crate::data::source::{Drawn, Mixed, Shape};
use crate::data::{Batch, Group, Prompt, Sample};
use crate::flow::{Source, StageError};
use crate::observe::Metrics;
use crate::observe::logs::announce_training;

/// Cycles over samples: batch `k` holds samples `k·size …` modulo their number, so that every batch is full, also when there are fewer
/// samples than a batch takes. Each sample is a group of one, unless they come as groups. Those of data sets are read as they are drawn.
pub struct Supervised {
    kind: &'static str,
    groups: Groups,
    size: usize,
    next: u64,
    batches: u64,
    announced: bool,
    metrics: Option<Metrics>,
}

enum Groups {
    Given(Vec<Vec<Sample>>),
    Drawn(Box<dyn Draw>),
}

/// What is drawn from data sets, whatever they hold.
pub(super) trait Draw: Send {
    fn draw(&mut self, number: u64) -> Result<Group, StageError>;
    /// Groups in an epoch.
    fn len(&self) -> usize;
    /// Whether each is a single sample.
    fn is_single(&self) -> bool {
        false
    }
    fn announce(&self, metrics: Option<&Metrics>);
}

struct Data<T, F> {
    data: Mixed<T>,
    group: F,
}

impl<T: Shape, F: FnMut(T) -> Result<Vec<Sample>, StageError> + Send> Draw for Data<T, F> {
    fn draw(&mut self, number: u64) -> Result<Group, StageError> {
        let Drawn { item, source, epoch } = self.data.get(number)?;
        let samples = (self.group)(item)?;
        Ok(Group { prompt: Arc::new(Prompt { epoch, source: source.to_string(), ..Prompt::default() }), samples })
    }

    fn len(&self) -> usize {
        self.data.len()
    }

    fn is_single(&self) -> bool {
        true
    }

    fn announce(&self, metrics: Option<&Metrics>) {
        announce_data(&self.data, metrics);
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
            _ => Ok(Supervised { kind, groups: Groups::Given(groups), size, next: 0, batches, announced: false, metrics: None }),
        }
    }

    /// `batches` batches of `size` records of data sets, each made a group of samples when it is drawn.
    pub fn drawn<T: Shape>(
        kind: &'static str,
        data: Mixed<T>,
        size: usize,
        batches: u64,
        group: impl FnMut(T) -> Result<Vec<Sample>, StageError> + Send + 'static,
    ) -> Result<Self, SupervisedError> {
        Self::of(kind, Box::new(Data { data, group }), size, batches)
    }

    pub(super) fn of(kind: &'static str, data: Box<dyn Draw>, size: usize, batches: u64) -> Result<Self, SupervisedError> {
        if size == 0 {
            return Err(SupervisedError::NoBatch);
        }
        let groups = Groups::Drawn(data);
        Ok(Supervised { kind, groups, size, next: 0, batches, announced: false, metrics: None })
    }

    /// Counts there what data sets hold, and what was left out.
    pub fn metrics(self, metrics: &Metrics) -> Self {
        Supervised { metrics: Some(metrics.clone()), ..self }
    }

    /// Says what is trained on.
    fn announce(&self) {
        let (count, single) = match &self.groups {
            Groups::Given(groups) => (groups.len(), groups.iter().all(|samples| samples.len() == 1)),
            Groups::Drawn(data) => (data.len(), data.is_single()),
        };
        let what = if single { "Samples" } else { "Groups" };
        announce_training(self.kind, &[(what, &count), ("Steps", &self.batches), ("Batch size", &self.size)]);
        if let Groups::Drawn(data) = &self.groups {
            data.announce(self.metrics.as_ref());
        }
    }

    fn group(&mut self, ordinal: u64) -> Result<Group, StageError> {
        let Group { prompt, mut samples } = match &mut self.groups {
            Groups::Given(groups) => {
                let samples = groups[(ordinal % groups.len() as u64) as usize].clone();
                Group { prompt: Arc::default(), samples }
            }
            Groups::Drawn(data) => data.draw(ordinal)?,
        };
        samples.iter_mut().for_each(|sample| sample.group_index = ordinal);
        let text = samples.first().map(|sample| sample.prompt.clone()).unwrap_or_default();
        Ok(Group { prompt: Arc::new(Prompt { ordinal, text, ..Prompt::clone(&prompt) }), samples })
    }

    /// Goes on after so many batches.
    pub fn after(self, batches: u64) -> Self {
        Supervised { next: batches, ..self }
    }
}

impl Supervised {
    /// Batch `id`, which counts from 0: it follows from its number alone.
    pub fn batch(&mut self, id: u64) -> Result<Batch, StageError> {
        let first = id.wrapping_mul(self.size as u64);
        let groups = (first..first + self.size as u64).map(|ordinal| self.group(ordinal)).collect::<Result<_, _>>()?;
        Ok(Batch { id, groups, ..Batch::default() })
    }
}

impl Source for Supervised {
    type Out = Batch;

    fn next(&mut self) -> Result<Option<Batch>, StageError> {
        if !std::mem::replace(&mut self.announced, true) {
            self.announce();
        }
        if self.next >= self.batches {
            return Ok(None);
        }
        self.next += 1;
        self.batch(self.next - 1).map(Some)
    }
}
