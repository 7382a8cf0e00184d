//! `rollflow tokens`: the tokens of a text, a prompt or a conversation, and which of them would be
//! trained.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rollflow::data::ChatMessage;
use rollflow::data::source::{Columns, DataSet, DataSpec, Example, Shape, prepare_sft_sample, prepare_sft_turns};
use rollflow::prelude::*;
use rollflow::recipe::Chat;
use rollflow::train::tokenizer_folder;
use rollflow::util::untrusted;
use serde_json::{Map, Value, json};

use super::out;
use crate::assemble::{conversations, models};

/// Show the tokens of a text, a prompt or a conversation, and which of them would be trained.
#[derive(Args)]
#[command(after_help = r#"Examples:
  rollflow tokens models/qwen2.5-0.5b-instruct chats.jsonl --limit 1
  rollflow tokens models/qwen2.5-0.5b-instruct --text '[{"role": "user", "content": "2+2?"}]'"#)]
pub struct Tokens {
    /// Whose tokenizer and chat template: a model's folder, an id in the hub's local cache, or a run.
    model: PathBuf,
    /// Data set: a file, a folder, or an id in the hub's local cache. - is a text, or a list of
    /// messages as JSON, from standard input.
    #[arg(required_unless_present = "text")]
    data: Option<PathBuf>,
    /// A text, or a list of messages as JSON, in place of a data set.
    #[arg(long, conflicts_with = "data")]
    text: Option<String>,
    /// Show the first so many records.
    #[arg(long, value_name = "N", default_value_t = 3)]
    limit: usize,
    /// One of the data set's subsets.
    #[arg(long)]
    subset: Option<String>,
    /// Split, and range of records: train[100:].
    #[arg(long, default_value = "train")]
    split: String,
    /// Fields by what they hold, where their names do not say so: prompt=query,completion=reply.
    #[arg(long, value_name = "WHAT=FIELD", value_delimiter = ',')]
    columns: Vec<String>,
    /// A chat template in place of the model's: a file, or plain.
    #[arg(long, value_name = "FILE")]
    template: Option<String>,
    /// Train each turn of a conversation separately (`turns = "apart"` in [sft]): a sample for each
    /// turn of the assistant.
    #[arg(long)]
    apart: bool,
    /// Print one JSON object per sample: its text, and for each token the id, the piece of text and
    /// whether it is trained.
    #[arg(long)]
    json: bool,
}

/// A record as `[sft]` would imitate it, or else as `[task]` would ask it.
enum Record {
    Imitated(Example),
    Asked(Prompt),
}

impl Shape for Record {
    fn read(record: Map<String, Value>, columns: &Columns) -> Result<Self, String> {
        match Example::read(record.clone(), columns) {
            Ok(example) => Ok(Record::Imitated(example)),
            Err(_) => Prompt::read(record, columns).map(Record::Asked),
        }
    }
}

impl Tokens {
    /// Writes the tokens, in colours on a terminal. A closed output ends it without an error.
    pub fn run(self) -> Result<()> {
        let chat = Chat { template: self.template.clone(), ..Chat::default() };
        let tokenizer = conversations::tokenizer(&chat, Tokenizer::from_dir(&tokenizer_of(&self.model)?)?)?;
        let mut out = io::stdout().lock();
        let colours = out.is_terminal();
        for (at, sample) in samples(&self, &tokenizer)?.iter().enumerate() {
            let pieces = pieces(&sample.tokens, |tokens| Ok(tokenizer.decode_all(tokens)?))?;
            let trained: Vec<bool> = sample.loss_mask.iter().map(|weight| *weight > 0.0).collect();
            let written = if self.json {
                let text = pieces.concat();
                writeln!(out, "{}", json!({"text": text, "tokens": sample.tokens, "pieces": pieces, "trained": trained}))
            } else {
                write_text(at + 1, &pieces, &trained, colours, &mut out)
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
                written => written.context("writing tokens")?,
            }
        }
        Ok(())
    }
}

fn samples(args: &Tokens, tokenizer: &Tokenizer) -> Result<Vec<Sample>> {
    let given = match (&args.text, args.data.as_deref()) {
        (Some(text), _) => Some(text.clone()),
        (None, Some(path)) if path == Path::new("-") => Some(out::input().context("reading standard input")?),
        _ => None,
    };
    if let Some(text) = given {
        return match serde_json::from_str::<Vec<ChatMessage>>(&text) {
            Ok(turns) if turns.last().is_some_and(|turn| turn.role == "assistant") => {
                of_example(&Example::Chat { turns, tools: Vec::new(), first: 0 }, args.apart, tokenizer)
            }
            Ok(turns) => Ok(vec![of_prompt(&turns.into(), tokenizer)?]),
            Err(_) => Ok(vec![of_prompt(&text.into(), tokenizer)?]),
        };
    }
    let spec = DataSpec {
        subset: args.subset.clone(),
        split: args.split.clone(),
        max_samples: Some(args.limit),
        columns: columns(&args.columns)?,
        ..DataSpec::new(args.data.as_deref().unwrap_or(Path::new("-")))
    };
    let data = DataSet::<Record>::open(&spec)?;
    if data.skips().total() > 0 {
        out::complain(&data.describe());
    }
    let shown = data.iter().map(|record| match record? {
        Record::Imitated(example) => of_example(&example, args.apart, tokenizer),
        Record::Asked(prompt) => Ok(vec![of_prompt(&prompt, tokenizer)?]),
    });
    Ok(shown.collect::<Result<Vec<_>>>()?.concat())
}

/// Returns the folder of the tokenizer: a folder of its files alone, or a model's.
pub(crate) fn tokenizer_of(model: &Path) -> Result<PathBuf> {
    if model.join("tokenizer.json").is_file() {
        Ok(model.to_owned())
    } else {
        Ok(tokenizer_folder(models::model_folder(model)?)?)
    }
}

/// `what=field`, as the keys of a source's `columns`.
fn columns(given: &[String]) -> Result<Columns> {
    let mut columns = Columns::default();
    for pair in given {
        let (what, field) = pair.split_once('=').unwrap_or((pair, ""));
        let place = match what {
            "prompt" => &mut columns.prompt,
            "completion" => &mut columns.completion,
            "answer" => &mut columns.answer,
            "messages" => &mut columns.messages,
            "text" => &mut columns.text,
            _ => bail!("--columns {pair}: expected prompt, completion, answer, messages or text, then = and the field's name"),
        };
        ensure!(!field.is_empty(), "--columns {pair}: after `{what}` comes = and the field's name");
        *place = Some(field.to_owned());
    }
    Ok(columns)
}

fn of_example(example: &Example, apart: bool, tokenizer: &Tokenizer) -> Result<Vec<Sample>> {
    Ok(if apart { prepare_sft_turns(example, tokenizer)? } else { vec![prepare_sft_sample(example, tokenizer)?] })
}

/// A prompt's tokens, of which none is trained.
fn of_prompt(prompt: &Prompt, tokenizer: &Tokenizer) -> Result<Sample> {
    Ok(Sample::begin(prompt, 0, &tokenizer.encode_prompt(prompt)?))
}

/// Returns the text that each token adds. A character of several tokens belongs to the last of
/// them.
///
/// `decode` gets a few tokens at a time: those since the text was last complete, and those before
/// them, on which a decoder's spaces depend. So the cost is linear in the number of tokens.
pub(crate) fn pieces(tokens: &[u32], decode: impl Fn(&[u32]) -> Result<String>) -> Result<Vec<String>> {
    /// Tokens that may be wanted for one character. Bytes that are still none after these never become one.
    const CHARACTER: usize = 16;
    let mut pieces = Vec::with_capacity(tokens.len());
    let (mut context, mut begin, mut told) = (0, 0, 0);
    for end in 1..=tokens.len() {
        let text = decode(&tokens[context..end])?;
        let whole = !text.ends_with(char::REPLACEMENT_CHARACTER) || end - begin >= CHARACTER || end == tokens.len();
        let done = if whole { text.len() } else { text.trim_end_matches(char::REPLACEMENT_CHARACTER).len() };
        pieces.push(text.get(told..done).unwrap_or("").to_owned());
        told = told.max(done);
        if whole {
            (context, begin) = (begin, end);
            told = decode(&tokens[context..end])?.len();
        }
    }
    Ok(pieces)
}

/// Trained tokens are green and others grey; without colours, trained ones are between `«` and `»`.
/// A bar divides tokens.
fn write_text(number: usize, pieces: &[String], trained: &[bool], colours: bool, out: &mut impl Write) -> io::Result<()> {
    let count = trained.iter().filter(|trained| **trained).count();
    writeln!(out, "sample {number}: {} tokens, {count} trained", pieces.len())?;
    let mut before = false;
    for (at, &trained) in trained.iter().enumerate() {
        // What ends a line is written out and ends it.
        let piece = untrusted::block(&pieces[at]).replace('\n', "⏎\n");
        let bar = if at > 0 && before == trained && !pieces[at - 1].ends_with('\n') { "│" } else { "" };
        match (colours, trained, before) {
            (true, true, _) => write!(out, "\x1b[90m{bar}\x1b[0m\x1b[32m{piece}\x1b[0m")?,
            (true, false, _) => write!(out, "\x1b[90m{bar}{piece}\x1b[0m")?,
            (false, true, false) => write!(out, "«{piece}")?,
            (false, false, true) => write!(out, "»{piece}")?,
            (false, ..) => write!(out, "{bar}{piece}")?,
        }
        before = trained;
    }
    writeln!(out, "{}", if before && !colours { "»" } else { "" })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// One byte a token.
    fn bytes(tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn tokens(text: &[u8]) -> Vec<u32> {
        text.iter().copied().map(u32::from).collect()
    }

    #[test]
    fn a_character_of_several_tokens_is_the_last_ones_piece() {
        let decode = |tokens: &[u32]| Ok(bytes(tokens));
        assert_eq!(pieces(&tokens("aé👍b".as_bytes()), decode).unwrap(), ["a", "", "é", "", "", "", "👍", "b"]);
        assert_eq!(pieces(&[], decode).unwrap(), [""; 0]);
        let broken = [&b"a"[..], &[0xff; 40], b"b"].concat();
        assert_eq!(pieces(&tokens(&broken), decode).unwrap().concat(), bytes(&tokens(&broken)));
    }

    /// Quadratic work would decode 50 million tokens here.
    #[test]
    fn the_work_grows_with_the_number_of_tokens() {
        let decoded = Cell::new(0);
        let decode = |tokens: &[u32]| {
            decoded.set(decoded.get() + tokens.len());
            Ok(bytes(tokens))
        };
        for text in [tokens("Grüße, 你好! ".repeat(500).as_bytes()), vec![0xff; 10_000]] {
            decoded.set(0);
            assert_eq!(pieces(&text, decode).unwrap().concat(), bytes(&text));
            assert!(decoded.get() <= 64 * text.len(), "{} tokens decoded for {}", decoded.get(), text.len());
        }
    }
}
