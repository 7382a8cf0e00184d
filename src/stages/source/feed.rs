//! Origins of prompts. Each resumes at any position: prompt number `k` follows from `k`.

use crate::data::source::{DataSet, Drawn, Mixed, Place};
use crate::data::{BufferState, DataBuffer, DataError, Prompt};
use crate::flow::StageError;
use crate::observe::Metrics;
use crate::rollout::{Curriculum, CurriculumRule};

type Load = Box<dyn FnMut(u64) -> Vec<Prompt> + Send>;

pub(super) enum Feed {
    /// Prompts in memory.
    Buffer(DataBuffer),
    /// Data sets on disk.
    Data { data: Mixed<Prompt>, next: u64 },
    /// A function.
    Loader { load: Load, batch: usize, next: u64, loaded: Option<(u64, Vec<Prompt>)> },
}

/// Error of a loader that returned another number of prompts.
#[derive(Debug, thiserror::Error)]
#[error("the prompt loader gave {found} prompts for iteration {iteration} and promised {promised}; give as many each time")]
struct Miscounted {
    iteration: u64,
    found: usize,
    promised: usize,
}

/// Fingerprint of a loader's stream in saved states.
const LOADER: &str = "loader";

impl Feed {
    pub(super) fn next(&mut self) -> Result<Prompt, StageError> {
        match self {
            Feed::Buffer(buffer) => buffer.next().ok_or_else(|| StageError::new("a buffer never ends")),
            Feed::Data { data, next } => {
                let prompt = data.prompt(*next)?;
                *next += 1;
                Ok(prompt)
            }
            Feed::Loader { load, batch, next, loaded } => {
                let (iteration, at) = (*next / *batch as u64, (*next % *batch as u64) as usize);
                if loaded.as_ref().is_none_or(|(of, _)| *of != iteration) {
                    let prompts = load(iteration);
                    if prompts.len() != *batch {
                        return Err(StageError::new(Miscounted { iteration, found: prompts.len(), promised: *batch }));
                    }
                    *loaded = Some((iteration, prompts));
                }
                let prompt = loaded.as_ref().map(|(_, prompts)| prompts[at].clone()).unwrap_or_default();
                let prompt = Prompt { ordinal: *next, ..prompt };
                *next += 1;
                Ok(prompt)
            }
        }
    }

    /// The place of a number in the stream. A function has no records to choose from.
    pub(super) fn place(&mut self, number: u64) -> Place {
        match self {
            Feed::Buffer(buffer) => buffer.place(number),
            Feed::Data { data, .. } => data.place(number),
            Feed::Loader { .. } => Place { set: 0, record: 0, epoch: 0 },
        }
    }

    /// The prompt of a place, with this ordinal.
    pub(super) fn read(&mut self, place: Place, ordinal: u64) -> Result<Prompt, StageError> {
        match self {
            Feed::Buffer(buffer) => Ok(buffer.read(place, ordinal)),
            Feed::Data { data, .. } => {
                let Drawn { item, source, epoch } = data.read(place)?;
                Ok(Prompt { ordinal, epoch, source, ..item })
            }
            Feed::Loader { .. } => self.next(),
        }
    }

    /// Makes a curriculum over the records.
    ///
    /// # Errors
    /// The origin is a function, or the rule names a data set that is not among the records'.
    pub(super) fn curriculum(&self, rule: CurriculumRule) -> Result<Curriculum, DataError> {
        let (names, len, seed) = match self {
            Feed::Buffer(buffer) => (vec![""], buffer.len(), buffer.save_state().seed),
            Feed::Data { data, .. } => (data.sets().iter().map(DataSet::name).collect(), data.len(), data.state(0).seed),
            Feed::Loader { .. } => {
                let problem = "a curriculum chooses among the prompts of data; a function of prompts chooses by itself";
                return Err(DataError::Unusable(problem.to_owned()));
            }
        };
        Curriculum::new(rule, seed, &names, len).map_err(|unknown| {
            let known = names.join(", ");
            DataError::Unusable(format!("the curriculum names the data set {unknown:?}; the data sets are: {known}"))
        })
    }

    pub(super) fn shuffled(self) -> Self {
        match self {
            Feed::Buffer(buffer) => Feed::Buffer(buffer.shuffled()),
            Feed::Data { data, next } => Feed::Data { data: data.shuffled(), next },
            Feed::Loader { .. } => self,
        }
    }

    pub(super) fn save_state(&self) -> BufferState {
        match self {
            Feed::Buffer(buffer) => buffer.save_state(),
            Feed::Data { data, next } => data.state(*next),
            Feed::Loader { batch, next, .. } => {
                BufferState { fingerprint: LOADER.to_owned(), len: *batch, seed: 0, shuffled: false, next: *next }
            }
        }
    }

    pub(super) fn load_state(&mut self, state: &BufferState) -> Result<(), StageError> {
        match self {
            Feed::Buffer(buffer) => buffer.load_state(state)?,
            Feed::Data { data, next } => *next = data.resume(state)?,
            Feed::Loader { batch, next, .. } => {
                state.check(LOADER, *batch)?;
                *next = state.next;
            }
        }
        Ok(())
    }

    pub(super) fn announce(&self, metrics: Option<&Metrics>) {
        if let Feed::Data { data, .. } = self {
            super::announce_data(data, metrics);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loader(batch: usize) -> Feed {
        let load = move |iteration| (0..3).map(|n| Prompt::from(format!("{iteration}.{n}"))).collect();
        Feed::Loader { load: Box::new(load), batch, next: 0, loaded: None }
    }

    /// R048, law C2.
    #[test]
    fn a_loader_gives_the_same_stream_from_wherever_it_goes_on() {
        let mut whole = loader(3);
        let all: Vec<Prompt> = (0..9).map(|_| whole.next().unwrap()).collect();
        assert_eq!(all.iter().map(|prompt| prompt.text.render()).collect::<Vec<_>>()[2..5], ["0.2", "1.0", "1.1"]);
        assert!(all.iter().enumerate().all(|(at, prompt)| prompt.ordinal == at as u64));
        for (stop, expected) in all.iter().enumerate() {
            let mut before = loader(3);
            (0..stop).for_each(|_| drop(before.next().unwrap()));
            let mut after = loader(3);
            after.load_state(&before.save_state()).unwrap();
            assert_eq!(&after.next().unwrap(), expected);
        }
    }

    #[test]
    fn a_loader_that_gives_another_number_of_prompts_is_refused() {
        assert!(loader(4).next().unwrap_err().to_string().contains("3 prompts for iteration 0 and promised 4"));
        assert!(loader(4).load_state(&loader(3).save_state()).is_err());
    }
}
