//! `rollflow generate`: one completion, printed while it is sampled.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::Args;
use rollflow::data::{ChatMessage, Prompt, PromptText};
use rollflow::engine::{FinishReason, Request, SamplingParams, TokenEngine, certain_text, text_before_stop};
use rollflow::prelude::Policy;
use serde_json::json;

use super::out;
use super::policies::Computing;

/// Default length of a completion, in tokens.
const MOST_TOKENS: usize = 256;

/// Continue a prompt, or answer in a conversation; tokens are shown as they come.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow generate runs/mine '3+4=' --temperature 0\n\
\x20 rollflow generate models/qwen2.5-0.5b-instruct 'Why is the sky blue?' --chat --system 'Be brief.'")]
pub struct Generate {
    /// A Hugging Face folder, a hub id, or a run, whose newest checkpoint speaks.
    model: PathBuf,
    /// Prompt. Left out, or `-`: read from standard input.
    prompt: Option<String>,
    /// Treat the prompt as a user's message, or as a conversation if it is a JSON list of {"role":
    /// …, "content": …}.
    #[arg(long)]
    chat: bool,
    /// System message at the beginning of the conversation; implies --chat.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Longest answer, in tokens; 256 unless given, or fewer where the model has no room for them.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Divides the logits; 0 takes the likeliest token.
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,
    /// Keeps the likeliest tokens up to this total probability; 1 keeps all.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Keeps this many likeliest tokens; 0 keeps all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Keeps tokens at least this likely relative to the likeliest; 0 keeps all.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Divides positive scores of tokens that are there already, and multiplies others; above 1,
    /// repetitions are less likely.
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f32,
    /// String that ends the completion, in addition to the end-of-text token; may be given several
    /// times.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed: the same seed gives the same completion.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    computing: Computing,
    /// Print one JSON object at the end instead: prompt, text, tokens, log_probs, finish.
    #[arg(long)]
    json: bool,
}

impl Generate {
    pub fn run(self) -> Result<()> {
        let policy = self.computing.policy_by_recipe(&self.model)?;
        let prompt = self.asked()?;
        let tokens = policy.tokenizer().encode_prompt(&Prompt::from(prompt.clone()))?;
        let Answer { text, tokens, log_probs, finish } = self.answer(&policy, &tokens)?;
        out::line(&match self.json {
            true => {
                json!({"prompt": prompt, "text": text, "tokens": tokens, "log_probs": log_probs, "finish": finish}).to_string()
            }
            false => String::new(),
        })
    }

    fn asked(&self) -> Result<PromptText> {
        let text = match self.prompt.as_deref() {
            Some(text) if text != "-" => text.to_owned(),
            _ => {
                if std::io::stdin().is_terminal() {
                    out::complain("The prompt, ended by Ctrl-D:");
                }
                out::input().context("reading the prompt from standard input")?
            }
        };
        if !self.chat && self.system.is_none() {
            return Ok(text.into());
        }
        let mut turns: Vec<ChatMessage> = self.system.iter().map(|words| ChatMessage::new("system", words)).collect();
        if text.trim_start().starts_with('[') {
            let said: Vec<ChatMessage> =
                serde_json::from_str(&text).context("the conversation is a JSON list of {\"role\": …, \"content\": …}")?;
            turns.extend(said);
        } else {
            turns.push(ChatMessage::new("user", text));
        }
        Ok(turns.into())
    }

    /// Shows the answer while it is made, unless it is to be shown as JSON.
    fn answer(&self, policy: &Policy, prompt: &[u32]) -> Result<Answer> {
        let positions = policy.config().max_positions;
        let room = positions.saturating_sub(prompt.len());
        let longer = policy.config().contexts().filter(|(_, longest)| *longest > positions);
        let longer = longer.map_or_else(String::new, |(_, longest)| format!(", or give --context, up to {longest}"));
        ensure!(room > 0, "the prompt has {} tokens, and the model has room for {positions}; shorten it{longer}", prompt.len());
        let params = Arc::new(SamplingParams {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            max_new_tokens: self.max_tokens.unwrap_or(MOST_TOKENS.min(room)),
            stop: self.stop.clone(),
            ..SamplingParams::default()
        });
        let mut engine = policy.engine(1, self.seed);
        engine.submit(Request::new(0, prompt, 1, params))?;
        let (mut answer, mut shown) = (Answer::default(), 0);
        while !engine.is_idle() {
            let ended = engine.step()?.pop();
            for sampled in engine.sampled() {
                answer.tokens.push(sampled.token);
                answer.log_probs.push(sampled.log_prob);
            }
            answer.finish = ended.and_then(|ended| ended.finish.ok());
            let (tokenizer, tokens) = (policy.tokenizer(), &answer.tokens);
            let all = tokenizer.decode_all(tokens)?;
            if answer.finish.is_some() {
                answer.text = text_before_stop(tokens, &self.stop, tokenizer, true)?;
            } else if certain_text(&all, &self.stop, false) == all {
                answer.text = tokenizer.decode(tokens)?;
            }
            if !self.json
                && let Some(more) = answer.text.get(shown..)
            {
                out::text(more)?;
            }
            shown = shown.max(answer.text.len());
        }
        Ok(answer)
    }
}

#[derive(Default)]
struct Answer {
    text: String,
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
    finish: Option<FinishReason>,
}
