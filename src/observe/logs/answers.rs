//! Judged completions of an evaluation, one line each, written as they are judged, so that an
//! interrupted evaluation can resume.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::LogError;
use super::lines::{LineFile, read_lines};
use crate::data::{PromptText, Status, Version, number};

/// One answer, judged. Non-finite numbers are the strings `"NaN"`, `"inf"` and `"-inf"`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JudgedAnswer {
    /// The weights that answered.
    pub version: Version,
    /// Index of the prompt in the evaluation, from 0.
    pub question: usize,
    /// If true, it was sampled greedily.
    pub greedy: bool,
    /// The answer's place among those to the same prompt.
    pub index: u32,
    /// Prompt.
    pub prompt: PromptText,
    /// Completion.
    pub response: String,
    /// Reward; `None` if the reward failed.
    #[serde(with = "number")]
    pub reward: Option<f64>,
    /// State in which its generation ended.
    pub status: Status,
    /// Number of sampled tokens.
    pub tokens: usize,
    /// Why it has no reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Appends judged answers to a file; one line is one write.
#[derive(Debug)]
pub struct AnswerWriter(LineFile);

impl AnswerWriter {
    /// Writes to `path` from its beginning, which is `answers`. What was there is gone.
    pub fn create(path: impl AsRef<Path>, answers: &[JudgedAnswer]) -> Result<Self, LogError> {
        let mut writer = AnswerWriter(LineFile::create(path.as_ref().to_owned())?);
        answers.iter().try_for_each(|answer| writer.write(answer))?;
        Ok(writer)
    }

    /// The file it writes.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes one.
    pub fn write(&mut self, answer: &JudgedAnswer) -> Result<(), LogError> {
        self.0.write(serde_json::to_string(answer).expect("an answer has string keys and finite or named numbers"))
    }

    /// Asks the machine to put everything on the disk.
    pub fn finish(&mut self) -> Result<(), LogError> {
        self.0.sync()
    }
}

/// Reads judged answers line by line. A line that a crash truncated is a separate error.
pub fn read_answers(path: impl AsRef<Path>) -> Result<impl Iterator<Item = Result<JudgedAnswer, LogError>>, LogError> {
    read_lines(path.as_ref().to_owned())
}
