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

use super::{Prompt, shuffle};

/// Error of a data buffer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BufferError {
    /// There is nothing to draw from.
    #[error("the data set holds no prompt; give at least one (is the file empty, or a limit 0?)")]
    Empty,
    /// Continuing in another data set would silently repeat some prompts and skip others.
    #[error(
        "the saved position belongs to another data set: it was saved over {saved_len} prompts with fingerprint {saved}, this one has \
         {len} with fingerprint {found}; resume with the data set of the saved run, or start over without its state"
    )]
    OtherDataSet {
        /// Fingerprint in the state.
        saved: String,
        /// Prompts of the data set that the state was saved over.
        saved_len: usize,
        /// Fingerprint of this buffer's data set.
        found: String,
        /// Prompts of this buffer's data set.
        len: usize,
    },
}

/// Position of a [`DataBuffer`]: all that another process needs to continue it.
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

/// Hands out prompts without end, epoch after epoch.
///
/// ```
/// use rollflow::data::DataBuffer;
/// let mut buffer = DataBuffer::new(["1+1=", "1+2="], 7)?;
/// let prompts = buffer.get_prompts(3);
/// assert_eq!(prompts.iter().map(|prompt| (prompt.ordinal, prompt.epoch)).collect::<Vec<_>>(), [(0, 0), (1, 0), (2, 1)]);
/// assert_eq!((buffer.epoch(), buffer.offset()), (1, 1));
/// # Ok::<(), rollflow::data::BufferError>(())
/// ```
#[derive(Clone, Debug)]
pub struct DataBuffer {
    prompts: Arc<[Prompt]>,
    fingerprint: String,
    seed: u64,
    shuffled: bool,
    next: u64,
    /// The order that was drawn last, and its epoch.
    order: (u64, Vec<usize>),
}

impl DataBuffer {
    /// Makes a buffer of texts, conversations or prompts, whose ordinals and epochs are
    /// overwritten. Epoch 0 keeps the given order, later epochs are shuffled.
    pub fn new<P: Into<Prompt>>(prompts: impl IntoIterator<Item = P>, seed: u64) -> Result<Self, BufferError> {
        let prompts: Arc<[Prompt]> = prompts.into_iter().map(Into::into).collect();
        if prompts.is_empty() {
            return Err(BufferError::Empty);
        }
        let fingerprint = fingerprint(&prompts);
        let order = (0, (0..prompts.len()).collect());
        Ok(DataBuffer { prompts, fingerprint, seed, shuffled: false, next: 0, order })
    }

    /// Shuffles epoch 0 too.
    pub fn shuffled(mut self) -> Self {
        self.shuffled = true;
        self.order = (0, self.order_of(0));
        self
    }

    /// Exactly `n` prompts, also across epochs and beyond the size of the data set.
    pub fn get_prompts(&mut self, n: usize) -> Vec<Prompt> {
        self.take(n).collect()
    }

    /// The pass over the data set that the next prompt belongs to, from 0.
    pub fn epoch(&self) -> u64 {
        self.next / self.prompts.len() as u64
    }

    /// Number of prompts of that epoch that were returned.
    pub fn offset(&self) -> usize {
        (self.next % self.prompts.len() as u64) as usize
    }

    /// Size of the data set. Never 0: an empty one is refused.
    #[expect(clippy::len_without_is_empty, reason = "it cannot be empty")]
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// The position, to be continued by [`Self::load_state`].
    pub fn save_state(&self) -> BufferState {
        BufferState {
            fingerprint: self.fingerprint.clone(),
            len: self.len(),
            seed: self.seed,
            shuffled: self.shuffled,
            next: self.next,
        }
    }

    /// Continues the saved stream, with its seed, wherever this buffer stands now.
    pub fn load_state(&mut self, state: &BufferState) -> Result<(), BufferError> {
        if (&state.fingerprint, state.len) != (&self.fingerprint, self.len()) {
            return Err(BufferError::OtherDataSet {
                saved: state.fingerprint.clone(),
                saved_len: state.len,
                found: self.fingerprint.clone(),
                len: self.len(),
            });
        }
        (self.seed, self.shuffled, self.next) = (state.seed, state.shuffled, state.next);
        self.order = (self.epoch(), self.order_of(self.epoch()));
        Ok(())
    }

    fn order_of(&self, epoch: u64) -> Vec<usize> {
        if epoch == 0 && !self.shuffled {
            return (0..self.len()).collect();
        }
        shuffle::permutation(self.len(), self.seed, epoch)
    }
}

impl Iterator for DataBuffer {
    type Item = Prompt;

    fn next(&mut self) -> Option<Prompt> {
        let (epoch, ordinal) = (self.epoch(), self.next);
        if self.order.0 != epoch {
            self.order = (epoch, self.order_of(epoch));
        }
        let prompt = &self.prompts[self.order.1[self.offset()]];
        self.next += 1;
        Some(Prompt { ordinal, epoch, ..prompt.clone() })
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
