//! Examples as tokens, for those who train from code.

use std::borrow::Borrow;
use std::path::Path;

use serde_json::{Value, json};

use super::dataset::{DataSet, DataSpec, Skips};
use super::shape::Example;
use crate::data::chat::{render_from, tokenize_from, tokenize_last_turn};
use crate::data::{ChatMessage, DataError, Pair, PromptText, Sample, Tokenizer, jsonl};

/// Converts an example to a sample. Of a pair, the completion is trained; of a conversation, all turns of the
/// assistant after the prompt; of a text, every token. Conversations are rendered by the tokenizer's chat
/// template.
pub fn prepare_sft_sample(example: &Example, tokenizer: &Tokenizer) -> Result<Sample, DataError> {
    match example {
        Example::Pair(pair) => prepare_pair(pair, tokenizer),
        Example::Chat { turns, tools, first } => tokenize_from(turns, tools, tokenizer, *first),
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

/// Converts a conversation to one sample per turn of the assistant, after the prompt that the model
/// would be given; other examples to one sample.
pub fn prepare_sft_turns(example: &Example, tokenizer: &Tokenizer) -> Result<Vec<Sample>, DataError> {
    let Example::Chat { turns, tools, first } = example else { return Ok(vec![prepare_sft_sample(example, tokenizer)?]) };
    ends(turns, *first).map(|end| tokenize_last_turn(&turns[..=end], tools, tokenizer)).collect()
}

/// The turns of the assistant from number `first` on.
fn ends(turns: &[ChatMessage], first: usize) -> impl Iterator<Item = usize> {
    (first..turns.len()).filter(|at| turns[*at].role == "assistant")
}

/// Bytes of the longest text that [`prepare_sft_sample`] tokenises, or [`prepare_sft_turns`] if `apart` is
/// true. Fails if the chat template refuses the example.
pub fn rendered_bytes(example: &Example, tokenizer: &Tokenizer, apart: bool) -> Result<usize, DataError> {
    let bytes = |turns: &[ChatMessage], tools: &[Value], first| Ok(render_from(turns, tools, tokenizer, first)?.text.len());
    match example {
        Example::Text(text) => Ok(text.len()),
        Example::Pair(pair) => match &pair.prompt {
            PromptText::Text(text) => Ok(text.len() + pair.completion.len()),
            PromptText::Chat(asked) => bytes(&answered(asked, &pair.completion), &pair.tools, asked.len()),
        },
        Example::Chat { turns, tools, first } if apart => {
            ends(turns, *first).try_fold(0, |most, end| Ok(most.max(bytes(&turns[..=end], tools, end)?)))
        }
        Example::Chat { turns, tools, first } => bytes(turns, tools, *first),
    }
}

/// A conversation with the assistant's next turn.
fn answered(asked: &[ChatMessage], completion: &str) -> Vec<ChatMessage> {
    [asked, &[ChatMessage::new("assistant", completion)]].concat()
}

/// Converts a pair to a sample whose completion ends with the end-of-text token; if the prompt is a
/// conversation, the completion is its next turn.
pub fn prepare_pair(pair: &Pair, tokenizer: &Tokenizer) -> Result<Sample, DataError> {
    let text = match &pair.prompt {
        PromptText::Text(text) => text,
        PromptText::Chat(asked) => {
            return tokenize_last_turn(&answered(asked, &pair.completion), &pair.tools, tokenizer);
        }
    };
    let sample = Sample::supervised(&tokenizer.encode(text)?, &tokenizer.completion(&pair.completion)?);
    Ok(Sample { prompt: pair.prompt.clone(), response: pair.completion.clone(), ..sample })
}

/// Loads and tokenises the samples of a data set, and counts the dropped ones, among them those
/// longer than `max_length` tokens.
pub fn load_sft_dataset(
    spec: &DataSpec,
    tokenizer: &Tokenizer,
    max_length: Option<usize>,
) -> Result<(Vec<Sample>, Skips), DataError> {
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
pub fn load_sft_samples(file: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Vec<Sample>, DataError> {
    Ok(load_sft_dataset(&DataSpec::new(file.as_ref()), tokenizer, None)?.0)
}

/// Reason to skip a record that a tokenizer or a chat template refuses.
pub fn refused(error: DataError) -> String {
    format!("that the tokenizer or the chat template refuses: {error}")
}

/// Reason to skip an example that is longer than `max_length` tokens.
pub fn too_long(max_length: usize) -> String {
    format!("longer than {max_length} tokens")
}

/// Writes samples as conversations, one `{"messages": […]}` per line. A folder with such a
/// `train.jsonl` is a data set for Hugging Face's `datasets`, and for [`DataSpec`].
pub fn export_conversations(file: &Path, samples: impl IntoIterator<Item = impl Borrow<Sample>>) -> Result<(), DataError> {
    jsonl::write(file, samples.into_iter().map(|sample| json!({ "messages": sample.borrow().conversation() })))
}
