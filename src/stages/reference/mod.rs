//! Reference policy and teacher: stages that write log-probabilities of another policy into samples, in
//! parallel with generator and trainer.
//!
//! Law V3: in a synchronous run the version that sampled a group stays the newest until the group
//! is trained. A moving reference is therefore a function of that version, too. Laws C1, C2: its
//! state is part of the trainer's checkpoints.

mod hint;
#[cfg(feature = "torch")]
mod local;
mod served;

use std::collections::BTreeMap;
use std::error::Error;
use std::marker::PhantomData;
use std::mem::{replace, take};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::data::{Batch, Sample, Scored, TopK, Version};
use crate::flow::{Io, Message, Stage, StageError, StageSpec, WeightsRx};

pub use hint::Hint;
pub use served::ServedReference;

type BoxError = Box<dyn Error + Send + Sync>;
type ScoreElsewhere = Box<dyn FnMut(&mut [Sample], TopK) -> Result<(), BoxError> + Send>;
type Score<W> = Box<dyn FnMut(&Arc<W>, &mut [Sample], TopK) -> Result<(), BoxError> + Send>;

/// Stage that scores samples under a reference policy: between filter and batcher, or for batches
/// (`M` is [`Batch`]) between source and trainer. Dropped groups pass unscored.
pub struct Reference<W, M = Scored> {
    weights: Source<W>,
    top_tokens: TopK,
    hint: Option<Hint>,
    teaches: bool,
    threads: usize,
    messages: PhantomData<fn(M)>,
}

enum Source<W> {
    Frozen(Score<W>, Arc<W>),
    Moving(Score<W>, Moving<W>),
    /// Weights that are elsewhere.
    Served(ScoreElsewhere),
    /// Each for the groups of these data sets; without names, for those of all others.
    Several(Vec<(Vec<String>, Source<W>)>),
}

impl<W> Source<W> {
    /// The one that scores groups of a data set.
    fn of(&mut self, source: &str) -> Result<&mut Self, StageError> {
        let Source::Several(all) = self else { return Ok(self) };
        let names = |names: &Vec<String>| names.iter().any(|name| name == source);
        let at = all.iter().position(|(of, _)| names(of)).or_else(|| all.iter().position(|(of, _)| of.is_empty()));
        match at {
            Some(at) => Ok(&mut all[at].1),
            None => Err(StageError::new(format!("no teacher scores the groups of the data set {source:?}"))),
        }
    }
}

struct Moving<W> {
    published: WeightsRx<W>,
    share: Box<dyn Fn(Version, Version) -> f64 + Send>,
    blend: fn(&W, &W, f64) -> W,
    encode: fn(&W) -> Result<Vec<u8>, BoxError>,
    held: Held<W>,
}

/// Functions of a moving reference: the mean of weights, and a checkpoint's file.
type Blending<W> = (fn(&W, &W, f64) -> W, fn(&W) -> Result<Vec<u8>, BoxError>);

/// Newest version that is included, and the weights; `None` before the first version.
type Held<W> = Arc<Mutex<Option<(Version, Arc<W>)>>>;

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

impl<W: Send + Sync + 'static, M> Reference<W, M> {
    /// Scores with fixed weights. `score` writes `ref_log_probs` into the samples of one group.
    pub fn frozen(score: impl FnMut(&Arc<W>, &mut [Sample]) -> Result<(), BoxError> + Send + 'static, weights: Arc<W>) -> Self {
        let mut score = score;
        Reference::of(Source::Frozen(Box::new(move |weights, samples, _| score(weights, samples)), weights))
    }

    fn of(weights: Source<W>) -> Self {
        Reference { weights, top_tokens: TopK::default(), hint: None, teaches: false, threads: 1, messages: PhantomData }
    }

    /// Several teachers with fixed weights, each for the groups of some data sets
    /// ([`Prompt::source`](crate::data::Prompt::source)). One without names scores those of all others.
    pub fn by_source(teachers: Vec<(Vec<String>, Self)>) -> Self {
        let threads = teachers.iter().map(|(_, teacher)| teacher.threads).max().unwrap_or(1);
        let teachers = teachers.into_iter().map(|(names, teacher)| (names, teacher.weights)).collect();
        Reference::of(Source::Several(teachers)).threads(threads)
    }

    /// Makes it a teacher: its log-probabilities become
    /// [`teacher_log_probs`](Sample::teacher_log_probs), for [`Distill`](crate::stages::train::Distill).
    pub fn teaching(self) -> Self {
        Reference { teaches: true, ..self }
    }

    /// Gives it another prompt than the policy, with a hint for example.
    pub fn hint(self, hint: Option<Hint>) -> Self {
        Reference { hint, ..self }
    }

    /// Also writes its likeliest tokens at each trained token into samples, for
    /// [`Distilled`](crate::algo::Distilled). Default: none.
    pub fn top_tokens(self, top_tokens: TopK) -> Self {
        Reference { top_tokens, ..self }
    }

    /// Starts as the first of the `published` versions, and blends in later ones by `share`: [`ema`],
    /// [`periodic`], or a closure of the newest version included and the new one, from 0 (nothing)
    /// to 1 (all). `blend` returns `(1 − share) · old + share · new`, and `encode` makes a file of a
    /// checkpoint.
    pub fn following(
        score: impl FnMut(&Arc<W>, &mut [Sample]) -> Result<(), BoxError> + Send + 'static,
        published: WeightsRx<W>,
        share: impl Fn(Version, Version) -> f64 + Send + 'static,
        blend: fn(&W, &W, f64) -> W,
        encode: fn(&W) -> Result<Vec<u8>, BoxError>,
    ) -> Self {
        let mut score = score;
        Reference::moving(Box::new(move |weights, samples, _| score(weights, samples)), published, share, (blend, encode))
    }

    fn moving(
        score: Score<W>,
        published: WeightsRx<W>,
        share: impl Fn(Version, Version) -> f64 + Send + 'static,
        (blend, encode): Blending<W>,
    ) -> Self {
        let moving = Moving { published, share: Box::new(share), blend, encode, held: Held::default() };
        Reference::of(Source::Moving(score, moving))
    }

    /// Sets the number of cores, for the thread budget. Default: 1.
    pub fn threads(self, threads: usize) -> Self {
        Reference { threads, ..self }
    }

    /// Files of a checkpoint with the present state, by name, for
    /// [`Trainer::checkpoint_files`](crate::stages::train::Trainer::checkpoint_files); `None` for
    /// fixed weights.
    pub fn checkpoint_files(&self) -> Option<impl Fn() -> Result<BTreeMap<String, Vec<u8>>, BoxError> + Send + use<W, M>> {
        let Source::Moving(_, Moving { held, encode, .. }) = &self.weights else { return None };
        let (held, encode, [weights_file, version_file]) = (held.clone(), *encode, self.files());
        Some(move || {
            let Some((version, weights)) = held.lock().clone() else { return Ok(BTreeMap::new()) };
            Ok(BTreeMap::from([(weights_file.clone(), encode(&weights)?), (version_file.clone(), version.to_string().into())]))
        })
    }

    /// Files of a checkpoint with a moving policy's weights, and with its version as text.
    fn files(&self) -> [String; 2] {
        let name = if self.teaches { "teacher" } else { "reference" };
        [format!("{name}.safetensors"), format!("{name}.version")]
    }

    /// Scores the samples of one group, outside a graph and with fixed weights.
    #[cfg(feature = "torch")]
    pub(super) fn score_group(&mut self, samples: &mut [Sample]) -> Result<(), StageError> {
        match &mut self.weights {
            Source::Frozen(score, weights) => score(weights, samples, self.top_tokens).map_err(StageError::new),
            Source::Served(score) => score(samples, self.top_tokens).map_err(StageError::new),
            Source::Moving(..) | Source::Several(_) => Err(StageError::new("these weights need a graph")),
        }
    }
}

impl<W> Moving<W> {
    /// Blends in a version, unless it is included already, and returns the new weights.
    fn see(&self, version: Version, new: Arc<W>) -> Arc<W> {
        // A checkpoint does not wait for a blend.
        let held = self.held.lock().clone();
        let next = match held {
            Some((seen, weights)) if seen >= version => return weights,
            Some((seen, weights)) => match (self.share)(seen, version) {
                0.0 => weights,
                1.0 => new,
                share => Arc::new((self.blend)(&weights, &new, share)),
            },
            None => new,
        };
        *self.held.lock() = Some((version, next.clone()));
        next
    }
}

/// Message whose groups are scored.
pub(crate) trait Scorable: Message {
    /// Calls `score` with the data set and the samples of each group that is not dropped.
    fn each_group(&mut self, score: impl FnMut(&str, &mut [Sample]) -> Result<(), StageError>) -> Result<(), StageError>;
}

impl Scorable for Scored {
    fn each_group(&mut self, mut score: impl FnMut(&str, &mut [Sample]) -> Result<(), StageError>) -> Result<(), StageError> {
        if self.dropped().is_some() {
            return Ok(());
        }
        let prompt = self.group().prompt.clone();
        score(&prompt.source, self.samples_mut())
    }
}

impl Scorable for Batch {
    fn each_group(&mut self, mut score: impl FnMut(&str, &mut [Sample]) -> Result<(), StageError>) -> Result<(), StageError> {
        self.groups.iter_mut().try_for_each(|group| score(&group.prompt.source, &mut group.samples))
    }
}

impl<W: Send + Sync + 'static, M: Scorable> Stage for Reference<W, M> {
    type In = M;
    type Out = M;

    fn run(&mut self, io: &mut Io<M, M>) -> Result<(), StageError> {
        while let Some(mut message) = io.recv()? {
            message.each_group(|source, own| {
                let sampled = own.iter().filter_map(|sample| sample.versions.newest()).max().unwrap_or(0);
                let mut hinted = self.hint.as_ref().map(|hint| hint.applied(own)).transpose().map_err(StageError::new)?;
                let samples = hinted.as_mut().map_or(&mut *own, |hinted| &mut hinted.samples);
                // Scorers write the same column for both.
                let reference = |sample: &mut Sample| take(&mut sample.ref_log_probs);
                let kept: Option<Vec<_>> = self.teaches.then(|| samples.iter_mut().map(reference).collect());
                let scored = match self.weights.of(source)? {
                    Source::Frozen(score, weights) => score(weights, samples, self.top_tokens),
                    Source::Moving(score, moving) => {
                        let (version, new) = io.wait_weights(&mut moving.published, sampled)?;
                        score(&moving.see(version, new), samples, self.top_tokens)
                    }
                    Source::Served(score) => score(samples, self.top_tokens),
                    Source::Several(_) => Err("teachers by data set are not nested".into()),
                };
                scored.map_err(StageError::new)?;
                for (sample, kept) in samples.iter_mut().zip(kept.into_iter().flatten()) {
                    sample.teacher_log_probs = replace(&mut sample.ref_log_probs, kept);
                }
                hinted.into_iter().for_each(|hinted| hinted.give_back(own));
                Ok(())
            })?;
            io.send(message)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::default().threads(self.threads).knob("threads");
        match &self.weights {
            Source::Frozen(..) | Source::Served(_) | Source::Several(_) => spec,
            Source::Moving(_, moving) => spec.subscribes(&moving.published),
        }
    }
}
