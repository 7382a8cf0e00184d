//! Prompts for rollouts, epoch after epoch.

use std::collections::VecDeque;
use std::path::Path;

use crate::data::{BufferError, DataBuffer, Prompt, arithmetic, jsonl};
use crate::flow::{Source, StageError, StageSpec};
use crate::stages::Admission;

/// Prompts that could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum PromptsError {
    /// The file can't be read or holds something else.
    #[error(transparent)]
    Jsonl(#[from] jsonl::JsonlError),
    /// There is nothing in it.
    #[error(transparent)]
    Buffer(#[from] BufferError),
}

/// An endless stream of prompts unless it was limited; ordinals run over the whole stream.
#[derive(Clone, Debug)]
pub struct Prompts {
    buffer: DataBuffer,
    left: Option<u64>,
    admission: Option<Admission>,
    /// What entered before an interruption and goes first; `None` until the first prompt was asked for.
    again: Option<VecDeque<Prompt>>,
}

impl Prompts {
    /// From a buffer, at its present position.
    pub fn new(buffer: DataBuffer) -> Self {
        Prompts { buffer, left: None, admission: None, again: None }
    }

    /// From a file with a `prompt` and an `answer` on each line; what else stands there goes to the metadata. Later epochs are shuffled
    /// by `seed`.
    pub fn jsonl(path: impl AsRef<Path>, seed: u64) -> Result<Self, PromptsError> {
        let prompts = jsonl::load_prompts(path.as_ref(), "prompt", Some("answer"), None)?;
        Ok(Prompts::new(DataBuffer::new(prompts, seed)?))
    }

    /// Sums of two numbers of up to `digits` digits, `3+4=`, in an order drawn by `seed`.
    pub fn addition(digits: u32, seed: u64) -> Result<Self, PromptsError> {
        Ok(Prompts::new(DataBuffer::new(arithmetic::addition(digits).iter().map(Prompt::from), seed)?.shuffled()))
    }

    /// Shuffles the first epoch too.
    pub fn shuffled(self) -> Self {
        Prompts { buffer: self.buffer.shuffled(), ..self }
    }

    /// Ends after `n` prompts.
    pub fn limited(self, n: u64) -> Self {
        Prompts { left: Some(n), ..self }
    }

    /// Each prompt waits to be admitted, in the state *credit*. A run that was resumed goes on where it was interrupted, with the prompts
    /// that were under way first.
    pub fn admitted_by(self, admission: &Admission) -> Self {
        Prompts { admission: Some(admission.clone()), ..self }
    }

    /// What was under way, once; from then on the buffer goes on where the interrupted run stood.
    fn next_again(&mut self) -> Result<Option<Prompt>, StageError> {
        let Some(admission) = &self.admission else { return Ok(None) };
        if self.again.is_none() {
            let (prompts, stream) = admission.interrupted();
            if let Some(stream) = stream {
                self.buffer.load_state(&stream)?;
            }
            admission.data(self.buffer.save_state());
            self.again = Some(prompts.into());
        }
        Ok(self.again.as_mut().and_then(VecDeque::pop_front))
    }
}

impl Source for Prompts {
    type Out = Prompt;

    fn next(&mut self) -> Result<Option<Prompt>, StageError> {
        match &mut self.left {
            Some(0) => return Ok(None),
            Some(left) => *left -= 1,
            None => {}
        }
        let prompt = match self.next_again()? {
            Some(prompt) => Some(prompt),
            None => self.buffer.next(),
        };
        if let (Some(prompt), Some(admission)) = (&prompt, &self.admission) {
            admission.enter(prompt);
        }
        Ok(prompt)
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::thread();
        match &self.admission {
            Some(admission) => spec.window(admission.window()),
            None => spec,
        }
    }
}
