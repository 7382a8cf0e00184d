//! One trajectory: given and sampled tokens with their versions and log-probabilities, and the
//! reward.

use serde::{Deserialize, Serialize};

use super::{ChatMessage, DataError, Metadata, Prompt, PromptText, RewardParts, Routes, Spans, TopTokens, Version, number};

/// Divisor of the logits when tokens that were sampled at `temperature` are scored: 1 for the likeliest
/// ones, as in engines.
pub(crate) fn scoring_temperature(temperature: f32) -> f32 {
    if temperature > 0.0 { temperature } else { 1.0 }
}

/// State of a sample's generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Not finished yet.
    #[default]
    Pending,
    /// Ended by itself: end-of-text or a stop string.
    Completed,
    /// Cut off by a length limit.
    Truncated,
    /// Interrupted; may be resumed.
    Aborted,
}

/// One trajectory. Per-token columns (`loss_mask`, `log_probs`, `ref_log_probs`, `teacher_log_probs`,
/// `versions`) are aligned with `tokens`: entry `t` belongs to token `t`. Labels are never stored
/// shifted (law D5). In JSON, non-finite numbers are the strings `"NaN"`, `"inf"` and `"-inf"`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// The group's id: the ordinal of its prompt.
    pub group_index: u64,
    /// Place within the group, from 0.
    pub index: u32,
    /// Part of its rollout, from 0, if the model's context was rewritten between two turns. Each
    /// part is a separate sample with the same index and the same reward.
    #[serde(skip_serializing_if = "is_first")]
    pub part: u32,
    /// Prompt.
    pub prompt: PromptText,
    /// Completion, decoded for rewards and logs only (law D1). In a multi-turn rollout it has the tokens
    /// that the environment gave, too.
    pub response: String,
    /// Prompt and response tokens, exactly as the model read and sampled them.
    pub tokens: Vec<u32>,
    /// Weight of each token in the loss: 0.0 ignored, 1.0 trained, fractions in between.
    #[serde(with = "number")]
    pub loss_mask: Vec<f32>,
    /// Behaviour log-probability of each sampled token, 0.0 for given ones. Empty for SFT data, of
    /// which nothing was sampled.
    #[serde(with = "number")]
    pub log_probs: Vec<f32>,
    /// Log-probability of each trained token under the reference policy, 0.0 for all others. Empty
    /// if no reference scored the sample.
    #[serde(with = "number", skip_serializing_if = "Vec::is_empty")]
    pub ref_log_probs: Vec<f32>,
    /// Log-probability of each trained token under a teacher, 0.0 for all others. Empty if no teacher
    /// scored the sample.
    #[serde(with = "number", skip_serializing_if = "Vec::is_empty")]
    pub teacher_log_probs: Vec<f32>,
    /// A teacher's likeliest tokens at each trained position, if one gave them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TopTokens>,
    /// The weights that sampled each token.
    pub versions: Spans,
    /// Experts that computed its tokens in the generator, for a trainer that follows them or compares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routes: Option<Routes>,
    /// Temperature at which its tokens were sampled, so that scorers divide logits by the same value; 1
    /// for the likeliest tokens. If `None`, a scorer takes its default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Reward, if the sample was scored.
    #[serde(with = "number")]
    pub reward: Option<f64>,
    /// Named parts of its reward; empty if the reward is one value.
    #[serde(with = "number", skip_serializing_if = "RewardParts::is_empty")]
    pub reward_parts: RewardParts,
    /// Advantage, if its group was compared.
    #[serde(with = "number")]
    pub advantage: Option<f64>,
    /// State of its generation.
    pub status: Status,
    /// The prompt's metadata and whatever stages added.
    pub metadata: Metadata,
}

fn is_first(part: &u32) -> bool {
    *part == 0
}

impl Sample {
    /// A sample that holds its prompt's tokens and nothing sampled yet.
    pub fn begin(prompt: &Prompt, index: u32, prompt_tokens: &[u32]) -> Self {
        Sample {
            group_index: prompt.ordinal,
            index,
            prompt: prompt.text.clone(),
            tokens: prompt_tokens.to_vec(),
            loss_mask: vec![0.0; prompt_tokens.len()],
            log_probs: vec![0.0; prompt_tokens.len()],
            versions: Spans::given(prompt_tokens.len()),
            metadata: prompt.metadata.clone(),
            ..Sample::default()
        }
    }

    /// Supervised data: `prompt` is ignored by the loss, every token of `completion` is trained.
    pub fn supervised(prompt: &[u32], completion: &[u32]) -> Self {
        let mut loss_mask = vec![0.0; prompt.len()];
        loss_mask.resize(prompt.len() + completion.len(), 1.0);
        Sample { tokens: [prompt, completion].concat(), loss_mask, status: Status::Completed, ..Sample::default() }
    }

    /// Appends one sampled token (law D3).
    pub fn push(&mut self, token: u32, log_prob: f32, version: Version) {
        self.tokens.push(token);
        self.loss_mask.push(1.0);
        self.log_probs.push(log_prob);
        self.versions.push(version);
    }

    /// Appends tokens that no policy sampled, such as tool output: they are context, and not
    /// trained.
    pub fn give(&mut self, tokens: &[u32]) {
        self.tokens.extend(tokens);
        self.loss_mask.resize(self.tokens.len(), 0.0);
        self.log_probs.resize(self.tokens.len(), 0.0);
        self.versions.extend(None, tokens.len());
    }

    /// Appends what was sampled and given of an answer.
    pub fn answered(&mut self, tokens: &[u32], log_probs: &[f32], versions: &Spans) {
        let mut at = 0;
        for (version, len) in versions.iter() {
            let run = at..(at + len).min(tokens.len());
            at = run.end;
            match version {
                Some(version) => run.for_each(|at| self.push(tokens[at], log_probs[at], version)),
                None => self.give(&tokens[run]),
            }
        }
    }

    /// Ignores in the loss what was sampled by weights older than the newest that sampled here.
    pub fn mask_older(&mut self) {
        let newest = self.versions.newest();
        for (weight, version) in self.loss_mask.iter_mut().zip(self.versions.per_token()) {
            if version.is_some() && version < newest {
                *weight = 0.0;
            }
        }
    }

    /// Ignores the sample in the loss if it was truncated.
    pub fn mask_truncated(&mut self) {
        if self.status == Status::Truncated {
            self.loss_mask.fill(0.0);
        }
    }

    /// The ground truth that came with the prompt, `metadata["answer"]`, as text.
    pub fn answer(&self) -> Option<&str> {
        self.metadata.get("answer").and_then(|value| value.as_str())
    }

    /// Text that rewards of final answers judge: the policy's last turn where an environment gave tokens
    /// after its first one, else the whole completion.
    pub fn last_turn(&self) -> &str {
        let has_turns = self.versions.iter().skip_while(|(version, _)| version.is_none()).any(|(version, _)| version.is_none());
        let turns = self.metadata.get("conversation").filter(|_| has_turns).and_then(|turns| turns.as_array());
        let last = turns.and_then(|turns| turns.iter().rfind(|turn| turn["role"] == "assistant"));
        last.and_then(|turn| turn["content"].as_str()).unwrap_or(&self.response)
    }

    /// Tokens that weigh in the loss.
    pub fn response_length(&self) -> usize {
        self.loss_mask.iter().filter(|&&weight| weight > 0.0).count()
    }

    /// Tokens that were sampled by a policy.
    pub fn generated(&self) -> usize {
        self.versions.generated()
    }

    /// Tokens that were sampled by a policy and weigh in the loss.
    pub fn learned(&self) -> usize {
        self.versions.per_token().zip(&self.loss_mask).filter(|(version, mask)| version.is_some() && **mask > 0.0).count()
    }

    /// The prompt's turns, a text being one of the user's, and the response as the assistant's.
    pub fn conversation(&self) -> Vec<ChatMessage> {
        let mut turns = match &self.prompt {
            PromptText::Text(text) => vec![ChatMessage::new("user", text)],
            PromptText::Chat(turns) => turns.clone(),
        };
        turns.push(ChatMessage::new("assistant", &self.response));
        turns
    }

    /// Checks that all columns agree; cheap, O(tokens).
    pub fn validate(&self) -> Result<(), DataError> {
        self.mismatches().into_iter().next().map_or(Ok(()), |problem| Err(DataError::Unusable(problem)))
    }

    /// Columns of another length than the tokens, and mask weights that are none.
    pub(crate) fn mismatches(&self) -> Vec<String> {
        let tokens = self.tokens.len();
        let mut problems = Vec::new();
        for (column, found, may_be_empty) in [
            ("loss_mask", self.loss_mask.len(), false),
            ("log_probs", self.log_probs.len(), true),
            ("ref_log_probs", self.ref_log_probs.len(), true),
            ("teacher_log_probs", self.teacher_log_probs.len(), true),
            ("versions", self.versions.len(), true),
        ] {
            if found != tokens && !(may_be_empty && found == 0) {
                problems
                    .push(self.problem(&format!("{column} has {found} entries for {tokens} tokens; they must be equally many")));
            }
        }
        if let Some(at) = self.loss_mask.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
            problems
                .push(self.problem(&format!("loss_mask[{at}] is {}; a mask weight is a finite number ≥ 0", self.loss_mask[at])));
        }
        problems
    }

    /// A problem with the name of the sample.
    pub(crate) fn problem(&self, problem: &str) -> String {
        format!("sample {} of group {}: {problem}", self.index, self.group_index)
    }
}
