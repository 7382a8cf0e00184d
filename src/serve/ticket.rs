//! A request for completions, from its admission to its end.

use std::ops::Range;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedReceiver;

use super::reply::Refusal;
use super::shared::Shared;
use super::worker::{Command, End, Piece};
use crate::data::{DataError, Routes, Tokenizer};
use crate::engine::{FinishReason, SamplingParams, TextStream, certain_text, text_before_stop};

/// A request. Dropping it before its end cancels it.
pub(super) struct Ticket {
    pub shared: Arc<Shared>,
    pub prompts: Vec<Arc<[u32]>>,
    /// Completions of each prompt.
    pub samples: u32,
    pub params: Arc<SamplingParams>,
    /// Completions of the first prompt, then of the second, and so on.
    pub completions: Vec<Completion>,
    id: u64,
    news: UnboundedReceiver<Piece>,
    _permit: OwnedSemaphorePermit,
}

impl Ticket {
    pub fn new(
        shared: Arc<Shared>,
        id: u64,
        news: UnboundedReceiver<Piece>,
        permit: OwnedSemaphorePermit,
        prompts: Vec<Arc<[u32]>>,
        samples: u32,
        params: Arc<SamplingParams>,
    ) -> Self {
        let end = (params.max_new_tokens == 0).then_some(End::Finished(FinishReason::Length));
        let completion = || Completion { end: end.clone(), ..Completion::default() };
        let completions = (0..prompts.len() * samples as usize).map(|_| completion()).collect();
        Ticket { shared, prompts, samples, params, completions, id, news, _permit: permit }
    }

    /// Waits for news, and returns the indices of completions that have some; `None` after the last.
    pub async fn next(&mut self) -> Option<Vec<usize>> {
        if self.completions.iter().all(|completion| completion.end.is_some()) {
            return None;
        }
        let mut changed = Vec::new();
        let mut piece = self.news.recv().await;
        if piece.is_none() {
            for (choice, completion) in self.completions.iter_mut().enumerate().filter(|(_, known)| known.end.is_none()) {
                completion.end = Some(End::Failed("the engine has ended".to_owned()));
                changed.push(choice);
            }
        }
        while let Some(news) = piece {
            changed.push(self.take(news));
            piece = self.news.try_recv().ok();
        }
        changed.sort_unstable();
        changed.dedup();
        Some(changed)
    }

    fn take(&mut self, piece: Piece) -> usize {
        match piece {
            Piece::Token { choice, token, log_prob, label } => {
                let completion = &mut self.completions[choice];
                let at = completion.tokens.len();
                completion.tokens.push(token);
                completion.log_probs.push(log_prob);
                match completion.spans.last_mut() {
                    Some((last, range)) if *last == label => range.end = at + 1,
                    _ => completion.spans.push((label, at..at + 1)),
                }
                choice
            }
            Piece::End { choice, end, routes } => {
                (self.completions[choice].end, self.completions[choice].routes) = (Some(end), routes);
                choice
            }
        }
    }

    /// Waits for the end of all completions.
    ///
    /// # Errors
    /// The reason of the first that failed.
    pub async fn finish(&mut self) -> Result<(), Refusal> {
        while self.next().await.is_some() {}
        (0..self.completions.len()).try_for_each(|choice| self.check(choice))
    }

    /// Error of a completion that failed.
    pub fn check(&self, choice: usize) -> Result<(), Refusal> {
        match &self.completions[choice].end {
            Some(End::Failed(why)) => Err(Refusal::new(500, why.clone())),
            _ => Ok(()),
        }
    }

    /// Prompt of a completion.
    pub fn prompt(&self, choice: usize) -> &Arc<[u32]> {
        &self.prompts[choice / self.samples as usize]
    }

    /// Token counts of the whole request.
    pub fn usage(&self) -> Value {
        let prompt: usize = self.prompts.iter().map(|prompt| prompt.len()).sum();
        let completion: usize = self.completions.iter().map(|completion| completion.tokens.len()).sum();
        json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.completions.iter().any(|completion| completion.end.is_none()) {
            self.shared.send(Command::Cancel(self.id));
        }
    }
}

/// Form of a completion's text.
#[derive(Clone, Copy)]
pub(super) struct TextStyle {
    /// If true, special tokens are left out.
    pub skip_special: bool,
    /// If true, the text ends before the stop string or stop token that ended it.
    pub trim: bool,
}

/// Tokens of a completion so far.
#[derive(Default)]
pub(super) struct Completion {
    pub tokens: Vec<u32>,
    pub log_probs: Vec<f32>,
    /// Labels of the weights, and the tokens that were sampled with each.
    pub spans: Vec<(Arc<str>, Range<usize>)>,
    pub end: Option<End>,
    /// Experts of the prompt's tokens and of these, but for the last, if the model has any.
    pub routes: Option<Routes>,
    /// Number of tokens, and length of the text, that were sent.
    pub sent: usize,
    pub sent_text: usize,
    stream: TextStream,
    /// The same with special tokens, which stop strings may contain.
    with_special: TextStream,
    /// Number of tokens that the streams have read.
    read: usize,
}

impl Completion {
    /// The stop token or stop string that ended it.
    pub fn matched(&self, params: &SamplingParams, tokenizer: &Tokenizer) -> Value {
        let last = self.tokens.last().filter(|_| self.end == Some(End::Finished(FinishReason::Stop)));
        match last {
            None => Value::Null,
            Some(last) if self.ends_by_token(params, tokenizer) => (*last).into(),
            Some(_) => {
                let text = tokenizer.decode_all(&self.tokens).unwrap_or_default();
                let found = params.stop.iter().filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
                found.min().map_or(Value::Null, |(_, stop)| stop.as_str().into())
            }
        }
    }

    fn ends_by_token(&self, params: &SamplingParams, tokenizer: &Tokenizer) -> bool {
        let is_end = |token: &u32| {
            params.stop_token_ids.contains(token) || (!params.ignore_eos && tokenizer.eos_token_ids().contains(token))
        };
        self.end == Some(End::Finished(FinishReason::Stop)) && self.tokens.last().is_some_and(is_end)
    }

    /// The text so far that no further token changes.
    pub fn text(&mut self, params: &SamplingParams, tokenizer: &Tokenizer, style: TextStyle) -> Result<String, DataError> {
        let decode = |tokens: &[u32]| if style.skip_special { tokenizer.decode(tokens) } else { tokenizer.decode_all(tokens) };
        let cut = usize::from(style.trim && self.ends_by_token(params, tokenizer));
        let tokens = &self.tokens[..self.tokens.len() - cut];
        let ended = self.end.is_some();
        while self.read < tokens.len() && !ended {
            self.read += 1;
            self.stream.read(&tokens[..self.read], decode)?;
            if style.skip_special && !params.stop.is_empty() {
                self.with_special.read(&tokens[..self.read], |tokens| tokenizer.decode_all(tokens))?;
            }
        }
        let stops: &[String] = if style.trim { &params.stop } else { &[] };
        let sent = self.stream.text.get(..self.sent_text).unwrap_or_default();
        // The whole decides, unless it takes back what was sent.
        let whole = if ended { Some(text_before_stop(tokens, stops, tokenizer, style.skip_special)?) } else { None };
        let whole = whole.filter(|whole| whole.starts_with(sent));
        // A stop string may have begun.
        let read = self.with_special.text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let holds = style.skip_special && certain_text(&self.with_special.text, stops, false).len() < read.len();
        let stops = if style.skip_special { &[] } else { stops };
        Ok(match whole {
            Some(whole) => whole,
            None if holds => sent.to_owned(),
            None => certain_text(&self.stream.text, stops, ended).to_owned(),
        })
    }

    /// Spans in the form that vLLM and SGLang share.
    pub fn weight_versions(&self) -> Value {
        let span =
            |(label, Range { start, end }): &(Arc<str>, Range<usize>)| json!({"version": **label, "start": start, "end": end});
        self.spans.iter().map(span).collect()
    }
}
