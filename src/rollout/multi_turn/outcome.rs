//! Samples of a rollout that has ended: one for each part, with the rollout's metadata.

use serde_json::{Value, json};

use super::rollout::{Part, Rollout};
use crate::data::{DataError, Metadata, Prompt, Sample, Status, number};
use crate::env::Grade;
use crate::rollout::agent::StopReason;
use crate::rollout::{ENVIRONMENT_FAILURE, REFUSED, RolloutContext};

impl Rollout {
    /// Samples in the order of the parts. Greedy samples (`temperature` 0) carry no temperature.
    pub fn into_samples(self, prompt: &Prompt, temperature: f32, context: &RolloutContext) -> Result<Vec<Sample>, DataError> {
        let tokenizer = &context.tokenizer;
        let complete = self.stop.is_some_and(StopReason::is_complete);
        let lost = self.failure.is_some();
        let metadata = self.metadata();
        let parts = self.done.into_iter().chain([self.part]);
        let sample = |(at, part): (usize, Part)| {
            // The context is empty if the environment never opened the conversation.
            let tokens = if part.context.is_empty() { tokenizer.encode_prompt(prompt)?.into() } else { part.context };
            let mut sample = Sample::begin(prompt, self.index, &tokens);
            sample.part = at as u32;
            sample.response = tokenizer.decode(&part.answer.tokens)?;
            sample.status = match complete {
                _ if lost => Status::Aborted,
                true => Status::Completed,
                false => Status::Truncated,
            };
            sample.temperature = Some(temperature).filter(|temperature| *temperature > 0.0);
            sample.answered(&part.answer.tokens, &part.answer.log_probs, &part.answer.versions);
            sample.metadata.extend(metadata.clone());
            if context.mask_older {
                sample.mask_older();
            }
            Ok(sample)
        };
        parts.enumerate().map(sample).collect()
    }

    fn metadata(&self) -> Metadata {
        let mut metadata = Metadata::new();
        let mut set = |key: &str, value: Value| drop(metadata.insert(key.to_owned(), value));
        set("turns", self.turns.into());
        set("stop_reason", self.stop.map(StopReason::label).into());
        set("tool_calls", self.tool_calls.to_json());
        set("turn_rewards", self.rewards.iter().map(|reward| number::to_json(*reward)).collect());
        if let Some(dialogue) = &self.dialogue {
            set("conversation", json!(dialogue.messages()));
        }
        if let Some(failure) = &self.failure {
            let key = if self.stop == Some(StopReason::EngineFailed) { REFUSED } else { ENVIRONMENT_FAILURE };
            set(key, failure.as_str().into());
        }
        if let Some(Grade { reward, correct, metadata: more }) = &self.grade {
            set("environment_reward", number::to_json(reward + self.rewards.iter().sum::<f64>()));
            set("grade", number::to_json(*reward));
            if let Some(correct) = correct {
                set("correct", (*correct).into());
            }
            metadata.extend(more.clone());
        }
        metadata
    }
}
