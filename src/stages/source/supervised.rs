//! Source of ready samples for training without a generator. Reports their number as `tracing`
//! events when the run begins.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use super::announce_data;
use crate::data::packing::cut_evenly;
use crate::data::source::{Drawn, Mixed, Shape};
use crate::data::{Batch, DataError, Group, Prompt, Sample};
use crate::flow::{RunContext, Source, StageError};
use crate::observe::Metrics;
use crate::observe::logs::announce_training;

/// Source of batches that cycles over samples. Batch `k` holds samples `k·size …` modulo their
/// number, so every batch is full.
///
/// Each sample is a group of one, unless samples come as groups. Samples of data sets are read when
/// they are drawn. Batches by tokens hold neighbours, too, but end with the last sample, so batch
/// `k` is the same in every pass.
pub struct Supervised {
    kind: &'static str,
    what: &'static str,
    groups: Box<dyn Draw>,
    size: Size,
    next: u64,
    batches: u64,
    announced: bool,
    metrics: Option<Metrics>,
}

/// Groups in memory or in data sets.
pub(super) trait Draw: Send {
    /// Group by its number in the stream, which passes over all groups again and again.
    fn draw(&mut self, number: u64) -> Result<Group, StageError>;
    /// Groups in an epoch.
    fn len(&self) -> usize;
    /// Reports the data.
    fn announce(&self, _: Option<&Metrics>) {}
}

impl Draw for Vec<Vec<Sample>> {
    fn draw(&mut self, number: u64) -> Result<Group, StageError> {
        let samples = self[(number % self.len() as u64) as usize].clone();
        Ok(Group { samples, ..Group::default() })
    }

    fn len(&self) -> usize {
        Vec::len(self)
    }
}

struct Data<T, F> {
    data: Mixed<T>,
    group: F,
}

impl<T: Shape, F: FnMut(T) -> Result<Vec<Sample>, StageError> + Send> Draw for Data<T, F> {
    fn draw(&mut self, number: u64) -> Result<Group, StageError> {
        let Drawn { item, source, epoch } = self.data.get(number)?;
        let prompt = Arc::new(Prompt { epoch, source, ..Prompt::default() });
        Ok(Group { prompt, samples: (self.group)(item)?, ..Group::default() })
    }

    fn len(&self) -> usize {
        self.data.len()
    }

    fn announce(&self, metrics: Option<&Metrics>) {
        announce_data(&self.data, metrics);
    }
}

/// Size of a batch.
#[derive(Clone, Debug)]
pub(super) enum Size {
    /// Number of groups.
    Groups(usize),
    /// Tokens at most, and the resulting ranges of groups.
    Tokens(usize, Vec<Range<usize>>),
}

impl Size {
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

impl Supervised {
    /// Returns a source of `batches` batches of `size` samples.
    ///
    /// Errors, as of the constructors below: no samples, or a size of 0.
    pub fn new(samples: Vec<Sample>, size: usize, batches: u64) -> Result<Self, DataError> {
        let each = samples.into_iter().map(|sample| vec![sample]).collect();
        Ok(Self::grouped("SFT", each, size, batches)?.called("Samples"))
    }

    /// Returns a source of `batches` batches of `size` groups, such as pairs; `kind` names the
    /// training in logs.
    pub fn grouped(kind: &'static str, groups: Vec<Vec<Sample>>, size: usize, batches: u64) -> Result<Self, DataError> {
        Self::drawing(kind, Box::new(groups), Size::Groups(size), batches)
    }

    /// Returns a source of `batches` batches of at most `tokens` tokens each; a longer group is its
    /// own batch. The cuts minimise the largest batch's cost; `cost` is that of a sequence of this
    /// many tokens.
    pub fn by_tokens(
        kind: &'static str,
        groups: Vec<Vec<Sample>>,
        tokens: usize,
        cost: impl Fn(usize) -> f64,
        batches: u64,
    ) -> Result<Self, DataError> {
        let lengths = |group: &Vec<Sample>| group.iter().map(|sample| sample.tokens.len()).collect::<Vec<_>>();
        let lengths: Vec<Vec<usize>> = groups.iter().map(lengths).collect();
        let sizes: Vec<usize> = lengths.iter().map(|lengths| lengths.iter().sum()).collect();
        let costs: Vec<f64> = lengths.iter().map(|lengths| lengths.iter().map(|&length| cost(length)).sum()).collect();
        let runs = if tokens > 0 { cut_evenly(&sizes, &costs, tokens, 1) } else { Vec::new() };
        Self::drawing(kind, Box::new(groups), Size::Tokens(tokens, runs), batches)
    }

    /// Returns a source of `batches` batches of `size` records of data sets. Each record becomes a
    /// group when it is drawn.
    pub fn drawn<T: Shape>(
        kind: &'static str,
        data: Mixed<T>,
        size: usize,
        batches: u64,
        group: impl FnMut(T) -> Result<Vec<Sample>, StageError> + Send + 'static,
    ) -> Result<Self, DataError> {
        Ok(Self::drawing(kind, Box::new(Data { data, group }), Size::Groups(size), batches)?.called("Samples"))
    }

    pub(super) fn drawing(kind: &'static str, groups: Box<dyn Draw>, size: Size, batches: u64) -> Result<Self, DataError> {
        let none = |problem: &str| DataError::Unusable(problem.to_owned());
        match (groups.len(), &size) {
            (0, _) => Err(none("samples is empty: there is nothing to train on")),
            (_, Size::Groups(0) | Size::Tokens(0, _)) => Err(none("batch size is 0; it must be at least 1")),
            _ => Ok(Supervised { kind, what: "Groups", groups, size, next: 0, batches, announced: false, metrics: None }),
        }
    }

    /// Names the items in the report at the begin of the run. Default: `Groups`, or `Samples` from
    /// [`Supervised::new`] and [`Supervised::drawn`].
    pub fn called(self, what: &'static str) -> Self {
        Supervised { what, ..self }
    }

    /// Reports the data.
    fn announce(&self) {
        let size: (&str, &dyn Display) = match &self.size {
            Size::Groups(size) => ("Batch size", size),
            Size::Tokens(tokens, _) => ("Batch tokens", tokens),
        };
        announce_training(self.kind, &[(self.what, &self.groups.len()), ("Steps", &self.batches), size]);
        self.groups.announce(self.metrics.as_ref());
    }

    fn group(&mut self, ordinal: u64) -> Result<Group, StageError> {
        let Group { prompt, mut samples, .. } = self.groups.draw(ordinal)?;
        samples.iter_mut().for_each(|sample| sample.group_index = ordinal);
        let text = samples.first().map(|sample| sample.prompt.clone()).unwrap_or_default();
        Ok(Group { prompt: Arc::new(Prompt { ordinal, text, ..Prompt::clone(&prompt) }), samples, ..Group::default() })
    }

    /// Number of batches of one pass over the groups; a partial last batch counts as a fraction.
    pub fn batches_per_epoch(&self) -> f64 {
        match &self.size {
            Size::Groups(size) => self.groups.len() as f64 / *size as f64,
            Size::Tokens(_, runs) => runs.len() as f64,
        }
    }

    /// Resumes after this many batches.
    pub fn after(self, batches: u64) -> Self {
        Supervised { next: batches, ..self }
    }

    /// Returns batch `number`, from 0. It follows from its number alone.
    pub fn batch(&mut self, number: u64) -> Result<Batch, StageError> {
        let ordinals = self.size.batch(number, self.groups.len());
        let groups = ordinals.map(|ordinal| self.group(ordinal)).collect::<Result<_, _>>()?;
        Ok(Batch { groups, ..Batch::default() })
    }
}

impl Source for Supervised {
    type Out = Batch;

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.metrics);
    }

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
