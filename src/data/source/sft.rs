//! Examples as tokens, for those who train from code.

use std::path::Path;

use super::DataError;
use super::dataset::{DataSet, DataSpec};
use super::shape::Example;
use super::skips::Skips;
use crate::data::{ChatMessage, Pair, PromptText, Sample, Tokenizer, TokenizerError};

/// Why examples did not become samples.
#[derive(Debug, thiserror::Error)]
pub enum SftDataError {
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The example as a sample: a completion behind its prompt, of a conversation the assistant's last turn behind the others, or a text of which every
/// token is trained; ended by the end-of-text token.
pub fn prepare_sft_sample(example: &Example, tokenizer: &Tokenizer) -> Result<Sample, TokenizerError> {
    let (prompt, completion) = match example {
        Example::Pair(Pair { prompt, completion }) => (prompt.clone(), completion.as_str()),
        Example::Chat { turns, .. } => {
            let last = turns.iter().rposition(|turn| turn.role == "assistant").unwrap_or(0);
            (PromptText::Chat(turns[..last].to_vec()), turns.get(last).map_or("", |turn| turn.content.as_str()))
        }
        Example::Text(text) => (PromptText::default(), text.as_str()),
    };
    let mut given = Vec::new();
    // With what the tokenizer puts around a text, which stands before the first token whatever that is.
    let mut learned = match example {
        Example::Text(text) => tokenizer.encode(text)?,
        _ => {
            given = tokenizer.encode(&prompt.render())?;
            tokenizer.encode_bare(completion)?
        }
    };
    let end = tokenizer.eos_token_ids().first().copied();
    if learned.last().copied() != end {
        learned.extend(end);
    }
    Ok(Sample { prompt, response: completion.to_owned(), ..Sample::supervised(&given, &learned) })
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
    let mut out = std::io::BufWriter::new(std::fs::File::create(file)?);
    for sample in samples {
        let messages: Vec<ChatMessage> = sample.conversation();
        serde_json::to_writer(&mut out, &serde_json::json!({ "messages": messages }))?;
        out.write_all(b"\n")?;
    }
    out.flush()
}
