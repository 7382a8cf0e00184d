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

use hint::Hinted;
use served::ServedScorer;

use crate::data::{Batch, Sample, Scored, TopK, Version};
use crate::flow::{Io, Message, Stage, StageError, StageSpec, WeightsRx};

pub use hint::Hint;
pub use served::ServedReference;

type BoxError = Box<dyn Error + Send + Sync>;
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
    /// Weights on servers.
    Served(Arc<ServedScorer>),
    /// Each for the groups of these data sets; without names, for those of all others.
    Several(Vec<(Vec<String>, Source<W>)>),
}

impl<W> Source<W> {
    /// Place of the one that scores groups of a data set.
    fn place(&self, source: &str) -> Result<usize, StageError> {
        let Source::Several(all) = self else { return Ok(0) };
        let names = |names: &Vec<String>| names.iter().any(|name| name == source);
        let at = all.iter().position(|(of, _)| names(of)).or_else(|| all.iter().position(|(of, _)| of.is_empty()));
        at.ok_or_else(|| StageError::new(format!("no part of by_source scores the groups of the data set {source:?}")))
    }

    /// The one at a place.
    fn at(&mut self, place: usize) -> &mut Self {
        match self {
            Source::Several(all) => &mut all[place].1,
            one => one,
        }
    }

    /// Samples that its server scores at the same time, the largest number if there are several servers.
    /// `None` unless all weights are on servers.
    fn concurrency(&self) -> Option<usize> {
        match self {
            Source::Frozen(..) | Source::Moving(..) => None,
            Source::Served(server) => Some(server.concurrency()),
            Source::Several(all) => {
                let each = all.iter().map(|(_, of)| of.concurrency()).collect::<Option<Vec<usize>>>()?;
                each.into_iter().max()
            }
        }
    }

    /// A copy for a further worker, if all weights are on servers.
    fn replica(&self) -> Option<Self> {
        match self {
            Source::Frozen(..) | Source::Moving(..) => None,
            Source::Served(server) => Some(Source::Served(server.clone())),
            Source::Several(all) => {
                let copy = |(names, of): &(Vec<String>, Self)| Some((names.clone(), of.replica()?));
                all.iter().map(copy).collect::<Option<_>>().map(Source::Several)
            }
        }
    }

    /// Scores the samples of groups, each with the newest version that sampled it.
    fn score<In: Message, Out: Message>(
        &mut self,
        io: &mut Io<In, Out>,
        groups: Vec<(Version, &mut [Sample])>,
        top: TopK,
    ) -> Result<(), StageError> {
        let mut groups = groups.into_iter();
        match self {
            Source::Frozen(score, weights) => {
                groups.try_for_each(|(_, samples)| score(weights, samples, top)).map_err(StageError::new)
            }
            Source::Moving(score, moving) => groups.try_for_each(|(sampled, samples)| {
                let (version, new) = io.wait_weights(&mut moving.published, sampled)?;
                score(&moving.see(version, new), samples, top).map_err(StageError::new)
            }),
            Source::Served(server) => server.score(groups.flat_map(|(_, samples)| samples).collect(), top, io.0.stopped()),
            Source::Several(_) => Err(StageError::new("teachers by data set are not nested")),
        }
    }
}

/// A group that is being scored.
struct Scoring<'a> {
    own: &'a mut [Sample],
    /// The newest version that sampled it.
    sampled: Version,
    /// The samples as a teacher with a hint reads them.
    hinted: Option<Hinted>,
    /// A reference's columns, which scorers overwrite by the teacher's.
    kept: Option<Vec<Vec<f32>>>,
}

impl Scoring<'_> {
    fn samples(&mut self) -> &mut [Sample] {
        self.hinted.as_mut().map_or(&mut *self.own, |hinted| &mut hinted.samples)
    }

    fn finish(mut self) {
        let kept = self.kept.take();
        for (sample, kept) in self.samples().iter_mut().zip(kept.into_iter().flatten()) {
            sample.teacher_log_probs = replace(&mut sample.ref_log_probs, kept);
        }
        self.hinted.into_iter().for_each(|hinted| hinted.give_back(self.own));
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

    /// Scores groups that are no message of a graph, each with the name of its data set. The weights
    /// must be fixed.
    #[cfg(feature = "torch")]
    pub(super) fn score_held_out<In: Message, Out: Message>(
        &mut self,
        io: &mut Io<In, Out>,
        groups: Vec<(String, &mut [Sample])>,
    ) -> Result<(), StageError> {
        match self.weights {
            Source::Moving(..) => Err(StageError::new("held-out samples need a reference with fixed weights")),
            _ => self.score(io, groups),
        }
    }

    /// Scores groups, each with the name of its data set. A server gets all samples that it scores
    /// at the same time.
    fn score<In: Message, Out: Message>(
        &mut self,
        io: &mut Io<In, Out>,
        groups: Vec<(String, &mut [Sample])>,
    ) -> Result<(), StageError> {
        let mut by_place: BTreeMap<usize, Vec<Scoring>> = BTreeMap::new();
        for (source, own) in groups {
            let sampled = own.iter().filter_map(|sample| sample.versions.newest()).max().unwrap_or(0);
            let hinted = self.hint.as_ref().map(|hint| hint.applied(own)).transpose().map_err(StageError::new)?;
            let mut group = Scoring { own, sampled, hinted, kept: None };
            if self.teaches {
                group.kept = Some(group.samples().iter_mut().map(|sample| take(&mut sample.ref_log_probs)).collect());
            }
            by_place.entry(self.weights.place(&source)?).or_default().push(group);
        }
        for (place, mut groups) in by_place {
            let samples = groups.iter_mut().map(|group| (group.sampled, group.samples())).collect();
            self.weights.at(place).score(io, samples, self.top_tokens)?;
            groups.into_iter().for_each(Scoring::finish);
        }
        Ok(())
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
    /// Most messages that servers score at the same time.
    const IN_FLIGHT: usize;

    /// The samples of each group that is not dropped, with the name of its data set.
    fn groups(&mut self) -> Vec<(String, &mut [Sample])>;
}

impl Scorable for Scored {
    const IN_FLIGHT: usize = 64;

    fn groups(&mut self) -> Vec<(String, &mut [Sample])> {
        let source = self.group().prompt.source.clone();
        if self.dropped().is_some() { Vec::new() } else { vec![(source, self.samples_mut())] }
    }
}

impl Scorable for Batch {
    const IN_FLIGHT: usize = 1;

    fn groups(&mut self) -> Vec<(String, &mut [Sample])> {
        self.groups.iter_mut().map(|group| (group.prompt.source.clone(), &mut group.samples[..])).collect()
    }
}

impl<W: Send + Sync + 'static, M: Scorable> Stage for Reference<W, M> {
    type In = M;
    type Out = M;

    fn run(&mut self, io: &mut Io<M, M>) -> Result<(), StageError> {
        while let Some(mut message) = io.recv()? {
            self.score(io, message.groups())?;
            io.send(message)?;
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::default().threads(self.threads);
        match (&self.weights, self.weights.concurrency()) {
            (Source::Moving(_, moving), _) => spec.knob("threads").subscribes(&moving.published),
            // A group has one sample at least.
            (_, Some(samples)) => spec.knob("concurrency, or servers").workers(samples.min(M::IN_FLIGHT)).ordered(),
            _ => spec.knob("threads"),
        }
    }

    fn replica(&self) -> Option<Self> {
        Some(Reference { weights: self.weights.replica()?, hint: self.hint.clone(), ..*self })
    }
}
