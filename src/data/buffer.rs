//! An endless, ordered, resumable stream of prompts from a finite data set.
//!
//! The stream is a pure function of (data set, seed, shuffled). Prompt number `k` belongs to epoch
//! `k / len` and is number `k % len` of that epoch's order, which depends on the original list, the
//! seed and the epoch alone. The position is one number, so a resume needs no replay.
//!
//! The stream never ends. Memory is one index per prompt for the current order, which is drawn
//! again at each epoch; clones share the prompts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::source::{Mixture, Place, Share};
use super::{DataError, Prompt};

/// Position of a stream: all that another process needs to continue it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferState {
    /// Identifies the data set: its prompts with their metadata, in order.
    pub fingerprint: String,
    /// Number of prompts in the data set.
    pub len: usize,
    /// Seed of the orders.
    pub seed: u64,
    /// If true, epoch 0 is shuffled too.
    pub shuffled: bool,
    /// Ordinal of the next prompt.
    pub next: u64,
}

impl BufferState {
    /// Returns an error unless the state is of the data set with this fingerprint and length: to
    /// continue in another one would silently repeat some prompts and skip others.
    pub(crate) fn check(&self, found: &str, len: usize) -> Result<(), DataError> {
        if (self.fingerprint.as_str(), self.len) == (found, len) {
            return Ok(());
        }
        let BufferState { fingerprint: saved, len: saved_len, .. } = self;
        Err(DataError::Unusable(format!(
            "the saved position belongs to another data set: it was saved over {saved_len} prompts with fingerprint {saved}, this \
             one has {len} with fingerprint {found}; resume with the data set of the saved run, or start over without its state"
        )))
    }
}

/// Hands out prompts without end, epoch after epoch.
///
/// ```
/// use rollflow::data::DataBuffer;
/// let mut buffer = DataBuffer::new(["1+1=", "1+2="], 7)?;
/// let places = buffer.get_prompts(3).into_iter().map(|prompt| (prompt.ordinal, prompt.epoch));
/// assert!(places.eq([(0, 0), (1, 0), (2, 1)]));
/// assert_eq!((buffer.epoch(), buffer.offset()), (1, 1));
/// # Ok::<(), rollflow::data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct DataBuffer {
    prompts: Arc<[Prompt]>,
    order: Mixture,
    state: BufferState,
}

impl DataBuffer {
    /// Makes a buffer of texts, conversations or prompts, whose ordinals and epochs are
    /// overwritten. Epoch 0 keeps the given order, later epochs are shuffled.
    pub fn new<P: Into<Prompt>>(prompts: impl IntoIterator<Item = P>, seed: u64) -> Result<Self, DataError> {
        let prompts: Arc<[Prompt]> = prompts.into_iter().map(Into::into).collect();
        if prompts.is_empty() {
            let problem = "the data set holds no prompt; give at least one (is the file empty, or a limit 0?)";
            return Err(DataError::Unusable(problem.to_owned()));
        }
        let order = Mixture::new(&[(prompts.len(), Share::Repeat(1))], seed, false)?;
        let state = BufferState { fingerprint: fingerprint(&prompts), len: prompts.len(), seed, shuffled: false, next: 0 };
        Ok(DataBuffer { prompts, order, state })
    }

    /// Shuffles epoch 0 too.
    pub fn shuffled(mut self) -> Self {
        self.state.shuffled = true;
        self.order = self.order.with_order(self.state.seed, true);
        self
    }

    /// Exactly `n` prompts, also across epochs and beyond the size of the data set.
    pub fn get_prompts(&mut self, n: usize) -> Vec<Prompt> {
        self.take(n).collect()
    }

    /// The pass over the data set that the next prompt belongs to, from 0.
    pub fn epoch(&self) -> u64 {
        self.state.next / self.prompts.len() as u64
    }

    /// Number of prompts of that epoch that were returned.
    pub fn offset(&self) -> usize {
        (self.state.next % self.prompts.len() as u64) as usize
    }

    /// Size of the data set. Never 0: an empty one is refused.
    #[expect(clippy::len_without_is_empty, reason = "it cannot be empty")]
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// The place of a number in the stream.
    pub(crate) fn place(&mut self, number: u64) -> Place {
        self.order.draw(number)
    }

    /// The prompt of a place.
    pub(crate) fn read(&self, place: Place, ordinal: u64) -> Prompt {
        Prompt { ordinal, epoch: place.epoch, ..self.prompts[place.record].clone() }
    }

    /// The position, to be continued by [`Self::load_state`].
    pub fn save_state(&self) -> BufferState {
        self.state.clone()
    }

    /// Continues the saved stream, with its seed, wherever this buffer stands now.
    pub fn load_state(&mut self, state: &BufferState) -> Result<(), DataError> {
        state.check(&self.state.fingerprint, self.len())?;
        self.order = self.order.with_order(state.seed, state.shuffled);
        self.state = state.clone();
        Ok(())
    }
}

impl Iterator for DataBuffer {
    type Item = Prompt;

    fn next(&mut self) -> Option<Prompt> {
        let ordinal = self.state.next;
        let place = self.place(ordinal);
        self.state.next += 1;
        Some(self.read(place, ordinal))
    }
}

/// FNV-1a over every prompt as JSON: not cryptographic, but stable across machines and releases,
/// unlike `std`'s hashers.
fn fingerprint(prompts: &[Prompt]) -> String {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for prompt in prompts {
        let line = serde_json::to_vec(&(&prompt.text, &prompt.metadata)).expect("text and JSON maps always serialise");
        for byte in line.iter().chain(b"\n") {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    format!("{hash:016x}")
}
