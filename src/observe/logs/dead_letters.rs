//! `dead_letters.jsonl`: the items that poisoned a stage, with all that is needed to try them again (law F6).
//!
//! The reward stage waits until a letter is on disk: neither a killed process nor a crash of the
//! machine loses one. Only a resume removes lines: those after its checkpoint, whose groups are
//! generated again.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::JsonLines;
use crate::data::{Group, Prompt, REWARD_LIMIT, Sample, number};

/// The file's name in a run's folder.
pub const DEAD_LETTERS: &str = "dead_letters.jsonl";

/// A group that no retry could save, as one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// When it was given up, in seconds since the beginning of 1970 (UTC).
    #[serde(with = "number")]
    pub time: f64,
    /// The stage that gave up, by its name in the graph.
    pub stage: String,
    /// Failures, one per failed sample.
    pub failures: Vec<Failure>,
    /// Prompt, whose ordinal is the group's id.
    pub prompt: Prompt,
    /// The whole group (law D2): tokens, log-probabilities, version spans, masks, metadata, and
    /// rewards where there are any.
    #[serde(deserialize_with = "sound")]
    pub samples: Vec<Sample>,
}

/// Why a sample was given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The sample's place in its group.
    pub sample: u32,
    /// Number of attempts.
    pub attempts: u32,
    /// Kind of failure of the last attempt.
    pub kind: FailureKind,
    /// The panic's text, the error's, or the number that was given.
    pub text: String,
}

/// Kind of failure of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The reward panicked.
    Panicked,
    /// The reward returned an error.
    Refused,
    /// The reward was NaN or infinite.
    NotFinite,
    /// The reward was finite but beyond [`REWARD_LIMIT`].
    TooLarge,
    /// An engine or an environment lost the sample before it could be judged.
    Lost,
}

impl FailureKind {
    /// Returns true if nothing is wrong with the sample itself: an engine, an environment, a sandbox
    /// or a service failed. A panic or a number that cannot be trained is a defect of the reward.
    pub fn is_loss(self) -> bool {
        matches!(self, FailureKind::Refused | FailureKind::Lost)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            FailureKind::Panicked => write!(f, "it panicked: {}", self.text),
            FailureKind::Refused => write!(f, "it refused: {}", self.text),
            FailureKind::Lost => write!(f, "it was lost: {}", self.text),
            FailureKind::NotFinite => write!(f, "it gave {}, not a finite number", self.text),
            FailureKind::TooLarge => write!(f, "it gave {}, and a reward is at most {REWARD_LIMIT:e} either way", self.text),
        }?;
        write!(f, " ({} {})", self.attempts, if self.attempts == 1 { "attempt" } else { "attempts" })
    }
}

impl DeadLetter {
    /// The group, to be tried again.
    pub fn group(self) -> Group {
        Group { prompt: Arc::new(self.prompt), samples: self.samples, ..Group::default() }
    }
}

/// Samples whose columns agree, for otherwise the line was damaged in a way that JSON does not show.
fn sound<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Sample>, D::Error> {
    let samples = Vec::<Sample>::deserialize(deserializer)?;
    samples.iter().try_for_each(Sample::validate).map_err(D::Error::custom)?;
    Ok(samples)
}

/// The dead letters in a run's folder, to append to. Neither file nor folder is made before there is
/// a letter.
pub fn dead_letters(folder: impl AsRef<Path>) -> JsonLines<DeadLetter> {
    JsonLines::later(folder.as_ref().join(DEAD_LETTERS))
}
