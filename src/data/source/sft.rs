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

/// The example as a sample: a completion behind its prompt; a conversation, of which all that the assistant says is trained; or a text of which
/// every token is. Conversations are written by the tokenizer's chat template.
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

/// The same, but of a conversation a sample for each turn of the assistant, behind what the model was shown before it.
pub fn prepare_sft_turns(example: &Example, tokenizer: &Tokenizer) -> Result<Vec<Sample>, ChatError> {
    let Some(conversation) = example.conversation() else { return Ok(vec![prepare_sft_sample(example, tokenizer)?]) };
    let sample = |turns: &[ChatMessage]| {
        Ok(tokenize_last_turn(&ChatInput::new(turns).tools(&conversation.tools), tokenizer)?.sample(turns))
    };
    conversation.beginnings().map(sample).collect()
}

/// A completion behind its prompt, ended by the end-of-text token; where the prompt is a conversation, its next turn.
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

/// The samples of a data set, read and tokenized at once, and what was left out; longer ones than `max_length` tokens are.
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

/// Samples as conversations, a `{"messages": […]}` a line: a folder with such a `train.jsonl` is a data set to Hugging Face's `datasets`, and to
/// [`DataSpec`].
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
