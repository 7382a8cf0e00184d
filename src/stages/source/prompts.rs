//! Source of prompts for rollouts, epoch after epoch.

use std::collections::VecDeque;
use std::path::Path;

use super::feed::Feed;
use crate::data::source::{DataSpec, Mixed};
use crate::data::{BufferState, DataBuffer, DataError, Prompt, arithmetic};
use crate::flow::{RunContext, Source, StageError, StageSpec};
use crate::observe::Metrics;
use crate::rollout::{Admission, Curriculum, CurriculumRule};

/// Endless stream of prompts, unless it is limited. Ordinals run over the whole stream.
///
/// In a flow with admission each prompt waits in the state *credit*, and a resumed run begins with
/// the prompts that were in flight.
pub struct Prompts {
    feed: Feed,
    metrics: Option<Metrics>,
    left: Option<u64>,
    map: Option<Box<dyn Fn(Prompt) -> Prompt + Send>>,
    curriculum: Option<Curriculum>,
    admission: Option<Admission>,
    /// Prompts that entered before an interruption and come first; `None` until the first call.
    again: Option<VecDeque<Prompt>>,
}

impl Prompts {
    /// Prompts of a buffer, from its present position.
    pub fn new(buffer: DataBuffer) -> Self {
        Self::of(Feed::Buffer(buffer))
    }

    /// Prompts of data sets on disk, of any size. The run reports used and skipped records when it
    /// begins.
    pub fn dataset(data: Mixed<Prompt>) -> Self {
        Self::of(Feed::Data { data, next: 0 })
    }

    /// Prompts of a function that returns exactly `batch` prompts for each iteration, from 0. A
    /// resumed run calls it again, so its result must follow from the iteration alone.
    pub fn loader<P: Into<Prompt>>(batch: usize, mut load: impl FnMut(u64) -> Vec<P> + Send + 'static) -> Self {
        let load = move |iteration| load(iteration).into_iter().map(Into::into).collect();
        Self::of(Feed::Loader { load: Box::new(load), batch: batch.max(1), next: 0, loaded: None })
    }

    fn of(feed: Feed) -> Self {
        Prompts { feed, metrics: None, left: None, map: None, curriculum: None, admission: None, again: None }
    }

    /// Prompts of a file with a `prompt` on each line, and an `answer` if the reward compares with one; other
    /// fields go to the metadata. The first epoch keeps the file's order, and `seed` shuffles later ones. Lines
    /// without a prompt are skipped and counted (`data_records_skipped`).
    pub fn jsonl(path: impl AsRef<Path>, seed: u64) -> Result<Self, DataError> {
        Ok(Prompts::dataset(Mixed::open(&[DataSpec::new(path.as_ref())], seed, false)?))
    }

    /// Sums of two numbers of up to `digits` digits, `3+4=`, in an order drawn by `seed`.
    pub fn addition(digits: u32, seed: u64) -> Result<Self, DataError> {
        Ok(Prompts::new(DataBuffer::new(arithmetic::addition(digits).iter().map(Prompt::from), seed)?.shuffled()))
    }

    /// Shuffles the first epoch too. Prompts of a function keep its order.
    pub fn shuffled(self) -> Self {
        Prompts { feed: self.feed.shuffled(), ..self }
    }

    /// Applies `map` to every prompt, for example to wrap a text in a conversation. Ordinal, epoch and source
    /// of the prompt stay.
    pub fn map(self, map: impl Fn(Prompt) -> Prompt + Send + 'static) -> Self {
        Prompts { map: Some(Box::new(map)), ..self }
    }

    /// Ends after `n` prompts. In a flow with admission a resumed run counts those that were settled before.
    pub fn limited(self, n: u64) -> Self {
        Prompts { left: Some(n), ..self }
    }

    /// Chooses prompts by the pass rates of their earlier groups, in a flow with admission.
    ///
    /// # Errors
    /// The prompts come from a function, or the rule names an unknown data set.
    pub fn curriculum(self, rule: CurriculumRule) -> Result<Self, DataError> {
        let curriculum = self.feed.curriculum(rule)?;
        Ok(Prompts { curriculum: Some(curriculum), ..self })
    }

    /// Returns true if `state` is a position in this stream.
    pub fn is_at(&self, state: &BufferState) -> bool {
        let own = self.feed.save_state();
        state.check(&own.fingerprint, own.len).is_ok()
    }

    /// The next prompt of the stream, or the curriculum's choice.
    fn next_new(&mut self) -> Result<Prompt, StageError> {
        let prompt = match (&self.curriculum, &self.admission) {
            (None, _) => self.feed.next()?,
            (Some(_), Some(admission)) => {
                let (ordinal, place) = admission.choose(|number| self.feed.place(number));
                self.feed.read(place, ordinal)?
            }
            (Some(_), None) => return Err(StageError::new("a curriculum needs `max_staleness` or `admission` of its flow")),
        };
        Ok(match &self.map {
            Some(map) => {
                let (ordinal, epoch, source) = (prompt.ordinal, prompt.epoch, prompt.source.clone());
                Prompt { ordinal, epoch, source, ..map(prompt) }
            }
            None => prompt,
        })
    }

    /// Takes the prompts that were in flight, once. The stream and its limit continue where the interrupted run
    /// stood.
    fn resume(&mut self) -> Result<(), StageError> {
        let Some(admission) = self.admission.as_ref().filter(|_| self.again.is_none()) else { return Ok(()) };
        let ((prompts, stream), totals) = (admission.interrupted(), admission.totals());
        if let Some(stream) = stream {
            self.feed.load_state(&stream)?;
        }
        admission.data(self.feed.save_state());
        self.feed.announce(self.metrics.as_ref());
        self.left = self.left.map(|left| left.saturating_sub(totals.entered.saturating_sub(totals.open_groups)));
        self.again = Some(prompts.into());
        Ok(())
    }
}

impl Source for Prompts {
    type Out = Prompt;

    fn next(&mut self) -> Result<Option<Prompt>, StageError> {
        self.resume()?;
        match &mut self.left {
            Some(0) => return Ok(None),
            Some(left) => *left -= 1,
            None => {}
        }
        let prompt = match self.again.as_mut().and_then(VecDeque::pop_front) {
            Some(prompt) => prompt,
            None => self.next_new()?,
        };
        if let Some(admission) = &self.admission {
            admission.enter(&prompt);
        }
        Ok(Some(prompt))
    }

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        context.fill(&mut self.metrics);
        if let (Some(curriculum), Some(admission)) = (&self.curriculum, &self.admission) {
            admission.learn_from(curriculum);
        }
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::default();
        match &self.admission {
            Some(admission) => spec.window(admission.window()),
            None => spec,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Law N2: an ordinal keys the randomness of its group.
    #[test]
    fn a_mapped_prompt_keeps_its_place_in_the_stream() {
        let buffer = DataBuffer::new(["a", "b"].map(Prompt::from), 0).unwrap();
        let mut prompts = Prompts::new(buffer).map(|prompt| Prompt::from(prompt.text.render() + "!"));
        let read: Vec<Prompt> = (0..3).map(|_| prompts.next().unwrap().unwrap()).collect();
        let places: Vec<_> = read.iter().map(|prompt| (prompt.ordinal, prompt.epoch)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (2, 1)]);
        assert_eq!(read[1].text.render(), "b!");
    }
}
