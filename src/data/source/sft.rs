//! Examples as tokens, for those who train from code.

use std::path::Path;

use serde_json::Value;

use super::DataError;
use super::dataset::{DataSet, DataSpec};
use super::shape::Example;
use super::skips::Skips;
use crate::data::chat::{ChatError, ChatInput, tokenize_conversation, tokenize_last_turn};
use crate::data::{ChatMessage, Conversation, Pair, PromptText, Sample, Tokenizer};
use crate::util::atomic_file;

/// Why examples did not become samples.
#[derive(Debug, thiserror::Error)]
pub enum SftDataError {
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Chat(#[from] ChatError),
}

/// Converts an example to a sample. Of a pair, the completion is trained; of a conversation, all
/// turns of the assistant; of a text, every token. Conversations are rendered by the tokenizer's
/// chat template.
pub fn prepare_sft_sample(example: &Example, tokenizer: &Tokenizer) -> Result<Sample, ChatError> {
    match example {
        Example::Pair(pair) => prepare_pair(pair, tokenizer),
        Example::Chat { turns, tools } => {
            let tools = tools_of(tools.as_ref());
            Ok(tokenize_conversation(&ChatInput::new(turns).tools(&tools), tokenizer)?.sample(turns))
        }
        Example::Text(text) => {
            // With what the tokenizer puts around a text, which stands before the first token whatever that is.
            let mut learned = tokenizer.encode(text)?;
            let end = tokenizer.eos_token_ids().first().copied();
            if learned.last().copied() != end {
                learned.extend(end);
            }
            Ok(Sample { response: text.clone(), ..Sample::supervised(&[], &learned) })
        }
    }
}

impl Example {
    /// The conversation, if it is one.
    pub fn conversation(&self) -> Option<Conversation> {
        let Example::Chat { turns, tools } = self else { return None };
        Some(Conversation { turns: turns.clone(), tools: tools_of(tools.as_ref()) })
    }
}

/// Converts a conversation to one sample per turn of the assistant, after the prompt that the model
/// would be given; other examples to one sample.
pub fn prepare_sft_turns(example: &Example, tokenizer: &Tokenizer) -> Result<Vec<Sample>, ChatError> {
    let Some(conversation) = example.conversation() else { return Ok(vec![prepare_sft_sample(example, tokenizer)?]) };
    let sample = |turns: &[ChatMessage]| {
        Ok(tokenize_last_turn(&ChatInput::new(turns).tools(&conversation.tools), tokenizer)?.sample(turns))
    };
    conversation.beginnings().map(sample).collect()
}

/// Converts a pair to a sample whose completion ends with the end-of-text token; if the prompt is a
/// conversation, the completion is its next turn.
pub fn prepare_pair(pair: &Pair, tokenizer: &Tokenizer) -> Result<Sample, ChatError> {
    let text = match &pair.prompt {
        PromptText::Text(text) => text,
        PromptText::Chat(asked) => {
            let answer = ChatMessage::new("assistant", &pair.completion);
            let turns: Vec<ChatMessage> = asked.iter().cloned().chain([answer]).collect();
            return Ok(tokenize_last_turn(&ChatInput::new(&turns), tokenizer)?.sample(&turns));
        }
    };
    let sample = Sample::supervised(&tokenizer.encode(text)?, &tokenizer.completion(&pair.completion)?);
    Ok(Sample { prompt: pair.prompt.clone(), response: pair.completion.clone(), ..sample })
}

/// Tools as a list, which some data sets write as text.
fn tools_of(written: Option<&Value>) -> Vec<Value> {
    match written {
        Some(Value::Array(tools)) => tools.clone(),
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// Loads and tokenises the samples of a data set, and counts the dropped ones, among them those
/// longer than `max_length` tokens.
pub fn load_sft_dataset(
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    max_length: Option<usize>,
) -> Result<(Vec<Sample>, Skips), SftDataError> {
    let data = DataSet::<Example>::open(spec)?;
    let mut skips = data.skips().clone();
    let mut samples = Vec::new();
    for example in data.iter() {
        let sample = prepare_sft_sample(&example?, tokenizer)?;
        match max_length {
            Some(max) if sample.tokens.len() > max => skips.count(too_long(max)),
            _ => samples.push(sample),
        }
    }
    Ok((samples, skips))
}

/// [`load_sft_dataset`] of a local file, all of it.
pub fn load_sft_samples(file: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Vec<Sample>, SftDataError> {
    Ok(load_sft_dataset(&DataSpec::new(file.as_ref()), tokenizer, None)?.0)
}

/// Why an example is left out.
pub fn too_long(max_length: usize) -> super::Skip {
    format!("longer than {max_length} tokens").into()
}

/// Writes samples as conversations, one `{"messages": […]}` per line. A folder with such a
/// `train.jsonl` is a data set for Hugging Face's `datasets`, and for [`DataSpec`].
pub fn export_conversations<'a>(file: &Path, samples: impl IntoIterator<Item = &'a Sample>) -> std::io::Result<()> {
    use std::io::Write;
    atomic_file::write_with(file, |out| {
        for sample in samples {
            let messages: Vec<ChatMessage> = sample.conversation();
            serde_json::to_writer(&mut *out, &serde_json::json!({ "messages": messages }))?;
            out.write_all(b"\n")?;
        }
        Ok(())
    })
}
