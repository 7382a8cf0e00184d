//! Lines of `rollouts.jsonl`, with all that is needed to inspect, score or replay a trained sample,
//! and of evaluations' answers.

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
            metadata: sample.metadata.clone(),
        }
    }

    /// The sample again. Its sampled tokens weigh 1, the others 0, as a line records no weights;
    /// log-probabilities that were not recorded are missing.
    pub fn into_sample(self) -> Sample {
        Sample {
            group_index: self.group,
            index: self.index,
            part: self.part,
            prompt: self.prompt,
            response: self.response,
            loss_mask: self.versions.per_token().map(|version| f32::from(u8::from(version.is_some()))).collect(),
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
