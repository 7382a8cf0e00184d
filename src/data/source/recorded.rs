//! Recorded rollouts: this project's `rollouts.jsonl`, or records with a prompt, a response and a
//! reward.
//!
//! | field | is |
//! | --- | --- |
//! | `prompt` (or another name of a prompt) | text or messages, formatted as prompts of `[task]` are |
//! | `response` (or `completion`, `output`) | the completion as text |
//! | `tokens` with `versions` | both as tokens; `versions` says which were sampled |
//! | `prompt_tokens` and `response_tokens` | both as tokens |
//! | `reward` | the reward |
//! | `log_probs` | the sampling policy's, of each of the `tokens` or of the response |
//! | `group` | which completions belong together; without it, those of the same prompt |
//! | `index` and `part` | in a group, which rollout it is, and which part of it |
//! | `status`, `temperature`, `metadata` | as in `rollouts.jsonl` |

use serde::Deserialize;
use serde_json::{Value, json};

use super::sft::refused;
use super::shape::{Columns, Shape, take_first};
use super::turns;
use crate::data::{Metadata, Prompt, PromptText, Sample, Spans, Status, Tokenizer, is_reward, number, scoring_temperature};

/// One of them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Recorded {
    #[serde(skip)]
    pub(crate) prompt: PromptText,
    #[serde(skip)]
    response: String,
    /// Group of the completion, a number or a text, if that was recorded.
    pub(crate) group: Option<Value>,
    index: Option<u32>,
    part: u32,
    status: Option<Status>,
    #[serde(with = "number")]
    reward: Option<f64>,
    tokens: Vec<u32>,
    versions: Spans,
    prompt_tokens: Vec<u32>,
    response_tokens: Vec<u32>,
    #[serde(with = "number")]
    log_probs: Option<Vec<f32>>,
    temperature: Option<f32>,
    metadata: Metadata,
}

impl Shape for Recorded {
    fn read(mut record: Metadata, _columns: &Columns) -> Result<Self, String> {
        let (_, prompt) = take_first(&mut record, &["prompt", "question", "instruction", "query"]).ok_or("without a prompt")?;
        let prompt = match prompt {
            Value::String(text) => PromptText::Text(text),
            list @ Value::Array(_) => PromptText::Chat(turns::read(list)?),
            _ => return Err("whose prompt is neither text nor messages".into()),
        };
        let response = take_first(&mut record, &["response", "completion", "output"]);
        let response = response.map(|(_, response)| turns::completion(response)).transpose()?;
        record.retain(|_, value| !value.is_null());
        // A completion may be empty: the policy ended it with its first token.
        let has_tokens = record.contains_key("tokens") || record.contains_key("response_tokens");
        let said = response.is_some() || has_tokens;
        let response = match response {
            Some(turns) if !has_tokens => turns::text_alone(turns)?,
            turns => turns.and_then(|mut turns| turns.pop()).unwrap_or_default().content,
        };
        let record = Value::Object(record);
        let recorded = Recorded::deserialize(&record).map_err(|_| wrong_field(&record))?;
        if !recorded.reward.is_some_and(is_reward) {
            return Err("without a reward that is a number of at most 1e100 either way".into());
        }
        if !said {
            return Err("without a response".into());
        }
        Ok(Recorded { prompt, response, ..recorded })
    }
}

/// The reason to skip a record: its first field that is not of the expected type.
fn wrong_field(record: &Value) -> String {
    let wrong = |(name, value): &(&String, &Value)| Recorded::deserialize(json!({ *name: value })).is_err();
    match record.as_object().into_iter().flatten().find(wrong) {
        Some((name, value)) => format!("whose `{name}` is not of its type: {value}"),
        None => "with a field that is not of its type".to_owned(),
    }
}

impl Recorded {
    /// Returns true if log-probabilities of the tokens were recorded.
    pub(crate) fn has_log_probs(&self) -> bool {
        self.log_probs.is_some()
    }

    /// Place in the group and part of the rollout, if that was recorded.
    pub(crate) fn place(&self) -> Option<(u32, u32)> {
        self.index.map(|index| (index, self.part))
    }

    /// Converts it to a sample; text is tokenised if no tokens were recorded, a prompt as `asked`
    /// formats it. Tokens have version 0, which no version of this run is. Without recorded
    /// log-probabilities the sample has none, and the trainer computes them.
    pub(crate) fn sample(&self, tokenizer: &Tokenizer, asked: impl Fn(PromptText) -> PromptText) -> Result<Sample, String> {
        let status = self.status.unwrap_or(Status::Completed);
        let mut prompt = Prompt { text: self.prompt.clone(), metadata: self.metadata.clone(), ..Prompt::default() };
        let (tokens, given) = if !self.tokens.is_empty() {
            if self.versions.len() != self.tokens.len() {
                return Err("whose versions are not as many as its tokens".into());
            }
            (self.tokens.clone(), self.versions.per_token().map(|version| version.is_none()).collect())
        } else {
            let asked = match self.prompt_tokens.as_slice() {
                [] => {
                    prompt.text = asked(prompt.text);
                    tokenizer.encode_prompt(&prompt).map_err(refused)?
                }
                tokens => tokens.to_vec(),
            };
            let mut said = self.response_tokens.clone();
            if said.is_empty() {
                said = tokenizer.encode_bare(&self.response).map_err(refused)?;
                // An answer that ended by itself ended with this token.
                said.extend(tokenizer.eos_token_ids().first().filter(|_| status == Status::Completed));
            }
            let given: Vec<bool> = (0..asked.len() + said.len()).map(|at| at < asked.len()).collect();
            ([asked, said].concat(), given)
        };
        let behaviour = match self.log_probs.as_deref() {
            None => Vec::new(),
            Some(all) if all.len() == tokens.len() => all.to_vec(),
            Some(sampled) if sampled.len() == given.iter().filter(|given| !**given).count() => {
                let mut sampled = sampled.iter();
                given.iter().map(|given| if *given { 0.0 } else { sampled.next().copied().unwrap_or_default() }).collect()
            }
            Some(_) => return Err("whose log_probs are not as many as its tokens".into()),
        };
        if behaviour.iter().any(|value| !value.is_finite()) {
            return Err("with a log-probability that is not finite".into());
        }
        if given.iter().all(|given| *given) {
            return Err("of which nothing was sampled".into());
        }
        let mut versions = Spans::default();
        given.iter().for_each(|given| versions.extend((!given).then_some(0), 1));
        Ok(Sample {
            response: self.response.clone(),
            loss_mask: given.iter().map(|given| if *given { 0.0 } else { 1.0 }).collect(),
            log_probs: behaviour,
            versions,
            temperature: self.temperature.map(scoring_temperature),
            reward: self.reward,
            status,
            tokens,
            ..Sample::begin(&prompt, 0, &[])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::ChatMessage;
    use crate::data::chat::ChatTemplate;

    #[test]
    fn a_recorded_conversation_without_tokens_is_tokenised_as_a_prompt_of_the_run() {
        let template =
            "{{ tools[0].name }}{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}:{% endif %}";
        let tokenizer = Tokenizer::characters("abdehio[]:", 16).unwrap().with_chat(ChatTemplate::new(template).unwrap());
        let record = json!({"prompt": [{"role": "user", "content": "hi"}], "response": "ho", "reward": 1,
            "metadata": {"tools": [{"name": "add"}]}});
        let recorded = Recorded::read(record.as_object().unwrap().clone(), &Columns::default()).unwrap();
        let asked = |prompt| match prompt {
            PromptText::Chat(turns) => [vec![ChatMessage::new("system", "be")], turns].concat().into(),
            text => text,
        };
        let sample = recorded.sample(&tokenizer, asked).unwrap();
        assert_eq!(tokenizer.decode_all(&sample.tokens).unwrap(), "add[be][hi]:ho<eos>");
        let prompt = Prompt { text: sample.prompt, metadata: sample.metadata, ..Prompt::default() };
        let parts = [tokenizer.encode_prompt(&prompt).unwrap(), tokenizer.completion("ho").unwrap()];
        assert_eq!(sample.tokens, parts.concat());
    }
}
