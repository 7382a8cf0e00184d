//! `rollflow tokens`: what a model reads of a text, a prompt or a conversation, token by token, and which of them it would be trained on.

use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use rollflow::data::chat::{ChatInput, ChatTemplate, tokenize_conversation, tokenize_last_turn};
use rollflow::data::{ChatMessage, Conversation, Prompt, PromptText, jsonl};
use rollflow::prelude::*;
use rollflow::recipe::chat::PLAIN;
use serde_json::json;

/// Show what a model reads of a text, a prompt or a conversation, token by token, and which tokens it would be trained on.
#[derive(Args)]
pub struct Tokens {
    /// A model's folder: its tokenizer and chat template.
    model: PathBuf,
    /// JSON lines, each with `messages`, or with `prompt` and, if any, `completion`; - is a text, or a list of messages as JSON, from standard input.
    #[arg(required_unless_present = "text")]
    data: Option<PathBuf>,
    /// A text, or a list of messages as JSON, in place of a file.
    #[arg(long, conflicts_with = "data")]
    text: Option<String>,
    /// Show the first so many records of the file.
    #[arg(long, value_name = "N", default_value_t = 3)]
    limit: usize,
    /// Field with the messages.
    #[arg(long, value_name = "KEY", default_value = "messages")]
    messages_key: String,
    /// Field with the prompt.
    #[arg(long, value_name = "KEY", default_value = "prompt")]
    prompt_key: String,
    /// Field with the text to imitate.
    #[arg(long, value_name = "KEY", default_value = "completion")]
    completion_key: String,
    /// A chat template in place of the model's: a file, or plain.
    #[arg(long, value_name = "FILE")]
    template: Option<String>,
    /// Train each turn of a conversation apart (`turns = "apart"` in [sft]): a sample for each turn of the assistant.
    #[arg(long)]
    apart: bool,
    /// One JSON object a sample: its text, and of each token the id, the stretch of text and whether it is trained.
    #[arg(long)]
    json: bool,
}

/// A text as tokens, of which each is trained or not.
struct Shown {
    text: String,
    tokens: Vec<u32>,
    places: Vec<Range<usize>>,
    trained: Vec<bool>,
}

impl Tokens {
    pub fn run(self) -> Result<ExitCode> {
        let mut out = io::stdout().lock();
        show(&self, out.is_terminal(), &mut out)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Writes what was asked for; `colours` says whether `out` shows any. Whoever stops reading ends it quietly.
fn show(args: &Tokens, colours: bool, out: &mut impl Write) -> Result<()> {
    let tokenizer = Tokenizer::from_dir(&args.model)?;
    let tokenizer = match args.template.as_deref() {
        None => tokenizer,
        Some(PLAIN) => tokenizer.with_chat(ChatTemplate::plain()),
        Some(file) => tokenizer.with_chat(ChatTemplate::from_file(file.as_ref())?),
    };
    for (at, shown) in samples(args, &tokenizer)?.iter().enumerate() {
        let written = if args.json { write_json(shown, out) } else { write_text(at + 1, shown, colours, out) };
        match written {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break,
            written => written.context("writing tokens")?,
        }
    }
    Ok(())
}

fn samples(args: &Tokens, tokenizer: &Tokenizer) -> Result<Vec<Shown>> {
    let given = match (&args.text, args.data.as_deref()) {
        (Some(text), _) => Some(text.clone()),
        (None, Some(path)) if path == Path::new("-") => {
            let mut text = String::new();
            io::stdin().read_to_string(&mut text).context("reading standard input")?;
            Some(text.strip_suffix('\n').map(str::to_owned).unwrap_or(text))
        }
        _ => None,
    };
    if let Some(text) = given {
        return match serde_json::from_str::<Vec<ChatMessage>>(&text) {
            Ok(turns) => conversation(&Conversation { turns, tools: Vec::new() }, args.apart, tokenizer),
            Err(_) => Ok(vec![of_prompt(&text.into(), tokenizer)?]),
        };
    }
    let file = args.data.as_deref().unwrap_or(Path::new("-"));
    let (fields, limit) = (fields(file)?, Some(args.limit));
    let has = |key: &String| fields.contains(key);
    if has(&args.messages_key) {
        let conversations = jsonl::load_conversations(file, &args.messages_key, limit)?;
        let shown = conversations.iter().map(|one| conversation(one, args.apart, tokenizer));
        return Ok(shown.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect());
    }
    if has(&args.completion_key) {
        let pairs = jsonl::load_pairs(file, &args.prompt_key, &args.completion_key, limit)?;
        return pairs.into_iter().map(|pair| of_pair(pair.prompt, pair.completion, tokenizer)).collect();
    }
    jsonl::load_prompts(file, &args.prompt_key, None, limit)?.iter().map(|prompt| of_prompt(prompt, tokenizer)).collect()
}

/// Fields of the first record, if it is one: what is wrong with it, its reader says.
fn fields(file: &Path) -> Result<Vec<String>> {
    let opened = std::fs::File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
    let lines = BufReader::new(opened).lines().map_while(Result::ok);
    let first = lines.map(|line| line.trim_start_matches('\u{feff}').trim().to_owned()).find(|line| !line.is_empty());
    let record: serde_json::Map<String, serde_json::Value> =
        first.and_then(|line| serde_json::from_str(&line).ok()).unwrap_or_default();
    Ok(record.keys().cloned().collect())
}

/// What is trained of it, or a prompt if nobody is to imitate its last turn.
fn conversation(of: &Conversation, apart: bool, tokenizer: &Tokenizer) -> Result<Vec<Shown>> {
    if of.turns.last().is_none_or(|turn| turn.role != "assistant") {
        let mut prompt = Prompt::from(of.turns.clone());
        prompt.metadata.insert("tools".to_owned(), of.tools.clone().into());
        return Ok(vec![of_prompt(&prompt, tokenizer)?]);
    }
    let input = |turns| ChatInput::new(turns).tools(&of.tools);
    let tokens = if apart {
        of.beginnings().map(|turns| tokenize_last_turn(&input(turns), tokenizer)).collect::<Result<Vec<_>, _>>()?
    } else {
        vec![tokenize_conversation(&input(&of.turns), tokenizer)?]
    };
    let shown = tokens.into_iter().map(|one| Shown {
        trained: one.loss_mask.iter().map(|weight| *weight > 0.0).collect(),
        text: one.text,
        tokens: one.tokens,
        places: one.places,
    });
    Ok(shown.collect())
}

fn of_pair(prompt: PromptText, completion: String, tokenizer: &Tokenizer) -> Result<Shown> {
    match prompt {
        PromptText::Chat(mut turns) => {
            turns.push(ChatMessage::new("assistant", completion));
            let one = tokenize_last_turn(&ChatInput::new(&turns), tokenizer)?;
            let trained = one.loss_mask.iter().map(|weight| *weight > 0.0).collect();
            Ok(Shown { text: one.text, tokens: one.tokens, places: one.places, trained })
        }
        PromptText::Text(text) => {
            let mut shown = of_prompt(&text.into(), tokenizer)?;
            let completion = tokenizer.completion(&completion)?;
            shown.append(&completion, true, tokenizer)?;
            Ok(shown)
        }
    }
}

fn of_prompt(prompt: &Prompt, tokenizer: &Tokenizer) -> Result<Shown> {
    let mut shown = Shown { text: String::new(), tokens: Vec::new(), places: Vec::new(), trained: Vec::new() };
    shown.append(&tokenizer.encode_prompt(prompt)?, false, tokenizer)?;
    Ok(shown)
}

impl Shown {
    /// Tokens whose stretches of text are what each adds to the text of those before it.
    fn append(&mut self, tokens: &[u32], trained: bool, tokenizer: &Tokenizer) -> Result<()> {
        let before = self.text.len();
        let mut whole = String::new();
        for end in 1..=tokens.len() {
            let text = tokenizer.decode_all(&tokens[..end])?;
            // A character of several tokens is there with the last of them.
            let done = text.trim_end_matches('\u{fffd}');
            let from = whole.len().min(done.len());
            self.places.push(before + from..before + done.len());
            whole = done.to_owned();
        }
        self.text.push_str(&whole);
        self.tokens.extend(tokens);
        self.trained.extend(std::iter::repeat_n(trained, tokens.len()));
        Ok(())
    }

    /// What of the text belongs to a token and to none before it.
    fn piece(&self, at: usize) -> &str {
        let reached = if at == 0 { 0 } else { self.places[at - 1].end };
        self.text.get(self.places[at].start.max(reached)..self.places[at].end).unwrap_or("")
    }
}

fn write_json(shown: &Shown, out: &mut impl Write) -> io::Result<()> {
    let pieces: Vec<&str> = (0..shown.tokens.len()).map(|at| shown.piece(at)).collect();
    writeln!(out, "{}", json!({"text": shown.text, "tokens": shown.tokens, "pieces": pieces, "trained": shown.trained}))
}

/// Trained tokens are green and others grey, or else trained ones stand between `«` and `»`; a bar divides tokens.
fn write_text(number: usize, shown: &Shown, colours: bool, out: &mut impl Write) -> io::Result<()> {
    let trained = shown.trained.iter().filter(|trained| **trained).count();
    writeln!(out, "sample {number}: {} tokens, {trained} trained", shown.tokens.len())?;
    let mut before = false;
    for (at, &trained) in shown.trained.iter().enumerate() {
        // What ends a line is written out and ends it.
        let piece = shown.piece(at).replace('\n', "⏎\n");
        let bar = if at > 0 && before == trained && !shown.piece(at - 1).ends_with('\n') { "│" } else { "" };
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
