//! `rollflow score`: log-probabilities of texts under a model, token by token. One line of output
//! per line of input, in order and without buffering, so that a program can wait for each.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use rollflow::data::{Prompt, PromptText};
use rollflow::prelude::{CrossEntropy, LocalConfig, Policy, Sample, Schedule};
use rollflow::train::Scorer;
use serde::Deserialize;
use serde_json::{Value, json};

use super::out;
use super::policies::Computing;

/// Lines that are read ahead, and scored together where they are there.
const AHEAD: usize = 256;

/// Log-probabilities of texts under a model: a JSON line in, a JSON line out.
///
/// Each line is {"text": …}, {"tokens": […]}, or {"prompt": …, "completion": …}, whose completion
/// alone is scored; a prompt may be a list of messages. An "id" is returned. The result has
/// "tokens", "log_probs" (null for the first token and for a prompt's), "sum" and "mean"; or "line"
/// and "error".
#[derive(Args)]
#[command(after_help = r#"Example:
  echo '{"id": 1, "prompt": "3+4=", "completion": "7"}' | rollflow score runs/mine"#)]
pub struct Score {
    /// A Hugging Face folder, a hub id, or a run, whose newest checkpoint is asked.
    model: PathBuf,
    /// A file of JSON lines; standard input unless given.
    input: Option<PathBuf>,
    /// Divides the logits; above 0.
    #[arg(long, default_value_t = 1.0, value_parser = temperature)]
    temperature: f64,
    /// Tokens of one forward pass.
    #[arg(long, default_value_t = 8192)]
    pass_tokens: usize,
    #[command(flatten)]
    computing: Computing,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    #[serde(default)]
    id: Value,
    text: Option<String>,
    tokens: Option<Vec<u32>>,
    prompt: Option<PromptText>,
    completion: Option<String>,
}

/// A line's number, its id, and its sample or what is wrong with it.
type Line = (usize, Value, Result<Sample>);

/// Number and bytes of a line that is not blank.
type Numbered = std::io::Result<(usize, Vec<u8>)>;

impl Score {
    pub fn run(self) -> Result<()> {
        let policy = self.computing.policy_by_recipe(&self.model)?;
        let config = LocalConfig {
            temperature: self.temperature,
            micro_batch_tokens: self.pass_tokens.max(1),
            compute: policy.compute(),
            ..LocalConfig::new(CrossEntropy, Schedule::constant(0.0))
        };
        let mut scorer = Scorer::new(config, policy.config().clone());
        let lines = self.lines()?;
        let (mut all, mut refused, mut unreadable) = (0, 0, None);
        while unreadable.is_none()
            && let Ok(first) = lines.recv()
        {
            let (mut block, mut tokens, mut next) = (Vec::new(), 0, Some(first));
            while let Some(line) = next {
                match line {
                    Ok((number, text)) => block.push(read(number, &text, &policy)),
                    Err(error) => unreadable = Some(error),
                }
                tokens += block.last().map_or(0, tokens_of);
                let has_room = tokens < self.pass_tokens && unreadable.is_none();
                next = if has_room { lines.try_recv().ok() } else { None };
            }
            all += block.len();
            refused += answer(&mut scorer, &policy, block)?;
        }
        if let Some(error) = unreadable {
            return Err(error).context("reading the lines to score");
        }
        ensure!(refused == 0, "{refused} of {all} lines could not be scored; the row of each has its error");
        Ok(())
    }

    /// The lines, as they come, from a thread that ends with its input or with this process.
    fn lines(&self) -> Result<Receiver<Numbered>> {
        let input: Box<dyn Read + Send> = match &self.input {
            Some(path) => Box::new(File::open(path).with_context(|| format!("reading {}", path.display()))?),
            None => Box::new(std::io::stdin()),
        };
        let (send, lines) = sync_channel(AHEAD);
        let read = move || {
            // Bytes: a line that is no UTF-8 has its error as any other.
            for (number, line) in (1..).zip(BufReader::new(input).split(b'\n')) {
                let is_blank = line.as_ref().is_ok_and(|line| line.trim_ascii().is_empty());
                if !is_blank && send.send(line.map(|line| (number, line))).is_err() {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("lines".to_owned()).spawn(read).context("starting the thread that reads")?;
        Ok(lines)
    }
}

fn temperature(text: &str) -> Result<f64, &'static str> {
    let value: Option<f64> = text.parse().ok();
    value.filter(|value| value.is_finite() && *value > 0.0).ok_or("it must be a number above 0")
}

fn tokens_of((_, _, sample): &Line) -> usize {
    sample.as_ref().map_or(0, |sample| sample.tokens.len())
}

fn read(number: usize, text: &[u8], policy: &Policy) -> Line {
    match serde_json::from_slice::<Asked>(text) {
        Err(error) => (number, Value::Null, Err(anyhow!("not a line to score: {error}"))),
        Ok(mut asked) => (number, asked.id.take(), sample(asked, policy)),
    }
}

/// The tokens, and which of them are asked about: all but the first, which has nothing before it.
fn sample(asked: Asked, policy: &Policy) -> Result<Sample> {
    let (tokenizer, model) = (policy.tokenizer(), policy.config());
    let (tokens, given) = match asked {
        Asked { text: Some(text), tokens: None, prompt: None, completion: None, .. } => (tokenizer.encode(&text)?, 0),
        Asked { tokens: Some(tokens), text: None, prompt: None, completion: None, .. } => (tokens, 0),
        Asked { prompt: Some(prompt), completion: Some(completion), text: None, tokens: None, .. } => {
            let prompt = tokenizer.encode_prompt(&Prompt::from(prompt))?;
            let given = prompt.len();
            ([prompt, tokenizer.encode_bare(&completion)?].concat(), given)
        }
        _ => bail!("it needs \"text\", or \"tokens\", or \"prompt\" and \"completion\", and only those"),
    };
    if let Some(token) = tokens.iter().find(|token| **token as usize >= model.vocab_size) {
        bail!("token {token} is beyond the model's vocabulary of {}", model.vocab_size);
    }
    let (there, most) = (tokens.len(), model.max_positions);
    ensure!(
        there <= most,
        "{there} tokens exceed the model's {most} positions (--context raises those of a model with LongRoPE)"
    );
    ensure!(!tokens.is_empty(), "it has no token");
    let (given, asked_about) = tokens.split_at(given.max(1));
    Ok(Sample::supervised(given, asked_about))
}

/// Prints what is known of a block of lines; returns how many could not be scored.
fn answer(scorer: &mut Scorer, policy: &Policy, block: Vec<Line>) -> Result<usize> {
    let mut samples: Vec<Sample> = block.iter().filter_map(|(_, _, sample)| sample.as_ref().ok().cloned()).collect();
    if !samples.is_empty() {
        scorer.annotate(&policy.frozen(), &mut samples, Default::default())?;
    }
    let (mut samples, mut refused) = (samples.iter(), 0);
    for (number, id, sample) in block {
        let mut row = match sample {
            Ok(_) => samples.next().map_or(Value::Null, scored),
            Err(error) => {
                refused += 1;
                json!({"line": number, "error": error.to_string()})
            }
        };
        if !id.is_null() {
            row["id"] = id;
        }
        out::line(&row.to_string())?;
    }
    Ok(refused)
}

fn scored(sample: &Sample) -> Value {
    let asked = |(log_prob, weight): (&f32, &f32)| (*weight > 0.0).then_some(f64::from(*log_prob));
    let log_probs: Vec<Option<f64>> = sample.ref_log_probs.iter().zip(&sample.loss_mask).map(asked).collect();
    let (sum, count) = log_probs.iter().flatten().fold((0.0, 0), |(sum, count), log_prob| (sum + log_prob, count + 1));
    let mean = (count > 0).then(|| sum / f64::from(count));
    json!({"tokens": sample.tokens, "log_probs": log_probs, "sum": sum, "mean": mean})
}
