//! Lines of `rollouts.jsonl`, with all that is needed to inspect, score or replay a trained sample,
//! and of evaluations' answers.

use memchr::memmem;
use serde::{Deserialize, Serialize};

use crate::data::{Metadata, PromptText, RewardParts, Sample, Spans, Status, Version, number};

/// One line of `rollouts.jsonl`. Non-finite numbers are the strings `"NaN"`, `"inf"` and `"-inf"`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rollout {
    /// The optimizer step that consumed it.
    pub step: u64,
    /// The group's id.
    pub group: u64,
    /// The sample's place in its group.
    pub index: u32,
    /// Part of its rollout, from 0, if that has several ([`Sample::part`]).
    #[serde(skip_serializing_if = "is_first")]
    pub part: u32,
    /// State in which its generation ended.
    pub status: Status,
    /// Prompt.
    pub prompt: PromptText,
    /// Completion.
    pub response: String,
    /// Reward.
    #[serde(with = "number")]
    pub reward: Option<f64>,
    /// Named parts of its reward, if there are any.
    #[serde(with = "number", skip_serializing_if = "RewardParts::is_empty")]
    pub reward_parts: RewardParts,
    /// Advantage.
    #[serde(with = "number")]
    pub advantage: Option<f64>,
    /// Prompt and response tokens.
    pub tokens: Vec<u32>,
    /// The weights that sampled each token, as runs of `[version, length]`.
    pub versions: Spans,
    /// Temperature at which it was sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Behaviour log-probabilities, where they were asked for.
    #[serde(with = "number", skip_serializing_if = "Option::is_none")]
    pub log_probs: Option<Vec<f32>>,
    /// The trainer's log-probability of each token before the update, at the same temperature, in nats
    /// with five decimals; null for tokens that it did not compute. Absent in files of older versions
    /// and of backends that give none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trainer_log_probs: Option<Vec<Option<f32>>>,
    /// Entropy of the trainer's distribution for each token, in nats with four decimals; null and absent
    /// as above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropies: Option<Vec<Option<f32>>>,
    /// Weight of each token in the loss, if it is not 1 for sampled tokens and 0 for the others.
    #[serde(with = "number", skip_serializing_if = "Option::is_none")]
    pub loss_mask: Option<Vec<f32>>,
    /// Data set of the prompt, where that is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub source: String,
    /// If true, a filter had rejected the group, and it was trained because too few others were left.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub spared: bool,
    /// The prompt's metadata and whatever stages added.
    pub metadata: Metadata,
}

fn is_first(part: &u32) -> bool {
    *part == 0
}

impl Rollout {
    /// The line of `sample`, consumed by `step`. Without its log-probabilities it is about a third as
    /// long.
    pub fn new(step: u64, sample: &Sample, with_log_probs: bool) -> Self {
        Rollout {
            step,
            group: sample.group_index,
            index: sample.index,
            part: sample.part,
            status: sample.status,
            prompt: sample.prompt.clone(),
            response: sample.response.clone(),
            reward: sample.reward,
            reward_parts: sample.reward_parts.clone(),
            advantage: sample.advantage,
            tokens: sample.tokens.clone(),
            versions: sample.versions.clone(),
            temperature: sample.temperature,
            log_probs: with_log_probs.then(|| sample.log_probs.clone()),
            loss_mask: Some(&sample.loss_mask).filter(|mask| **mask != default_mask(&sample.versions)).cloned(),
            metadata: sample.metadata.clone(),
            ..Rollout::default()
        }
    }

    /// Takes in the trainer's numbers of the tokens at `positions`. Those that are not finite stay null.
    pub fn score(&mut self, positions: &[usize], log_probs: &[f32], entropies: &[f32]) {
        let tokens = self.tokens.len();
        let column = |values: &[f32], scale: f32| {
            let mut column = vec![None; tokens];
            for (&at, &value) in positions.iter().zip(values).filter(|(at, value)| **at < tokens && value.is_finite()) {
                column[at] = Some((value * scale).round() / scale);
            }
            (!values.is_empty()).then_some(column)
        };
        (self.trainer_log_probs, self.entropies) = (column(log_probs, 1e5), column(entropies, 1e4));
    }

    /// The sample again. Without recorded weights, its sampled tokens weigh 1 and the others 0;
    /// log-probabilities that were not recorded are missing.
    pub fn into_sample(self) -> Sample {
        Sample {
            group_index: self.group,
            index: self.index,
            part: self.part,
            prompt: self.prompt,
            response: self.response,
            loss_mask: self.loss_mask.unwrap_or_else(|| default_mask(&self.versions)),
            tokens: self.tokens,
            log_probs: self.log_probs.unwrap_or_default(),
            versions: self.versions,
            temperature: self.temperature,
            reward: self.reward,
            reward_parts: self.reward_parts,
            advantage: self.advantage,
            status: self.status,
            metadata: self.metadata,
            ..Sample::default()
        }
    }
}

/// Weights of tokens that are not recorded: 1 for sampled ones, 0 for the others.
fn default_mask(versions: &Spans) -> Vec<f32> {
    versions.per_token().map(|version| f32::from(u8::from(version.is_some()))).collect()
}

/// Columns by token, which most of a line consists of.
const COLUMNS: [&str; 5] =
    [r#","tokens":["#, r#","log_probs":["#, r#","trainer_log_probs":["#, r#","entropies":["#, r#","loss_mask":["#];

impl Rollout {
    /// Reads a line without its columns by token, for readers that look for samples: they are skipped
    /// without being parsed, where they are written as [`Rollout`] writes them.
    ///
    /// # Errors
    /// The line is no rollout.
    pub fn without_columns(line: &[u8]) -> Result<Self, serde_json::Error> {
        // No text holds such a key: its quotes are escaped there.
        let (mut kept, mut rest) = (Vec::with_capacity(line.len() / 4), line);
        for column in COLUMNS {
            let Some(start) = memmem::find(rest, column.as_bytes()) else { continue };
            let Some(length) = memchr::memchr(b']', &rest[start..]) else { continue };
            kept.extend_from_slice(&rest[..start]);
            rest = &rest[start + length + 1..];
        }
        kept.extend_from_slice(rest);
        // Another program may have written arrays of arrays.
        serde_json::from_slice(&kept).or_else(|_| serde_json::from_slice(line))
    }
}

/// One line of an evaluation's answers, written when it is judged, so that an interrupted evaluation
/// can resume. Non-finite numbers are the strings `"NaN"`, `"inf"` and `"-inf"`.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts and metadata may hold what looks like a column.
    #[test]
    fn a_row_is_read_without_its_columns_whatever_its_texts_are() {
        let mut rollout = Rollout {
            step: 3,
            group: 7,
            index: 1,
            prompt: ",\"tokens\":[1,2]".into(),
            response: "],\"log_probs\":[".into(),
            tokens: (0..50).collect(),
            versions: Spans::given(48),
            log_probs: Some(vec![f32::NAN; 50]),
            ..Rollout::default()
        };
        rollout.versions.extend(Some(4), 2);
        rollout.score(&[48, 49, 70], &[-0.123_456_7, f32::NAN, 0.0], &[]);
        assert_eq!(rollout.trainer_log_probs.as_ref().map(|of| (of[0], of[48], of[49])), Some((None, Some(-0.12346), None)));
        assert_eq!(rollout.entropies, None);
        for metadata in [serde_json::json!({}), serde_json::json!({"a": 1, "tokens": [[1], ["]"]]})] {
            rollout.metadata = metadata.as_object().cloned().unwrap_or_default();
            let line = serde_json::to_vec(&rollout).unwrap_or_default();
            let row = Rollout::without_columns(&line).expect("it is a rollout");
            assert_eq!((row.step, row.group, row.index, row.versions.generated()), (3, 7, 1, 2));
            assert_eq!((row.prompt, row.response), (rollout.prompt.clone(), rollout.response.clone()));
        }
    }
}
