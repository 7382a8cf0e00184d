//! State of one sample on remote engines: pure, with the clock as an argument.

use std::sync::Arc;
use std::time::Instant;

use tokio::task::AbortHandle;

use super::{LoadedAdapter, VersionSpan};
use crate::data::{Answer, SampledToken, Spans, Tokenizer, TokenizerError, Version};
use crate::engine::stop::StopWatch;
use crate::engine::{FinishReason, Request};

/// Prompt ordinal and sample index.
pub(super) type SampleKey = (u64, u32);

/// Policy versions that an engine can have served during an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServedVersions {
    pub(super) floor: Version,
    pub(super) newest: Version,
    /// If true, the engine was verified to serve versions by name, and any other label is an error.
    pub(super) known: bool,
}

/// Sample that has not ended.
#[derive(Debug)]
pub(super) struct InFlightSample {
    pub(super) request: Arc<Request>,
    pub(super) answer: Answer,
    /// Number of the current or next attempt.
    pub(super) number: u32,
    pub(super) stage: Stage,
    /// Newest token, which is reported with the next one or with the end.
    pub(super) held: Option<SampledToken>,
    /// Failed attempts since the last token.
    pub(super) failures: u32,
    /// Rejected or aborted attempts since the last token.
    pub(super) turned_away: u32,
    /// Engines on trial that generated tokens of it, with their refutations before.
    pub(super) unproven: Vec<(usize, u64)>,
    /// Time of the last event.
    pub(super) since: Instant,
    /// Finds stop strings that span two attempts.
    watch: Option<StopWatch>,
}

/// Stage of a sample.
#[derive(Debug)]
pub(super) enum Stage {
    /// Waits for an engine, until this time at least.
    Waiting(Instant),
    /// Runs on an engine.
    Running(Running),
    /// Has ended, and waits until its weights are verified.
    Ended(FinishReason),
}

#[derive(Debug)]
pub(super) struct Running {
    pub(super) place: usize,
    /// Oldest version that can sample its tokens.
    pub(super) floor: Version,
    /// If true, the engine was verified to serve that version.
    pub(super) known: bool,
    /// Number of tokens before the attempt.
    pub(super) before: usize,
    /// Adapter of the attempt, kept loaded.
    pub(super) adapter: Option<Arc<LoadedAdapter>>,
    pub(super) task: AbortHandle,
}

impl Drop for Running {
    /// Closes the connection, which stops the engine.
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl InFlightSample {
    pub(super) fn new(request: &Arc<Request>, answer: Answer, now: Instant) -> Self {
        InFlightSample {
            request: request.clone(),
            answer,
            number: 0,
            stage: Stage::Waiting(now),
            held: None,
            failures: 0,
            turned_away: 0,
            unproven: Vec::new(),
            since: now,
            watch: None,
        }
    }

    pub(super) fn running(&self) -> Option<&Running> {
        match &self.stage {
            Stage::Running(running) => Some(running),
            Stage::Waiting(_) | Stage::Ended(_) => None,
        }
    }

    /// Restarts the sample from its prompt.
    pub(super) fn restart(&mut self, now: Instant) {
        self.answer = Answer::new(self.answer.index);
        (self.held, self.watch) = (None, None);
        self.unproven.clear();
        self.wait(now);
    }

    /// Allows the next attempt from `at` on.
    pub(super) fn wait(&mut self, at: Instant) {
        self.number += 1;
        self.stage = Stage::Waiting(at);
    }

    /// Reason for the end if the newest token is the last. An interrupted attempt may not have
    /// reported it.
    pub(super) fn ends(&mut self, tokenizer: &Tokenizer) -> Result<Option<FinishReason>, TokenizerError> {
        let params = self.request.params.clone();
        let Some(last) = self.turn().last() else { return Ok(None) };
        if (!params.ignore_eos && tokenizer.eos_token_ids().contains(last)) || params.stop_token_ids.contains(last) {
            return Ok(Some(FinishReason::Stop));
        }
        if !params.stop.is_empty() && self.completes_stop(tokenizer)? {
            return Ok(Some(FinishReason::Stop));
        }
        Ok((self.answer.turn() >= params.max_new_tokens).then_some(FinishReason::Length))
    }

    /// Tokens sampled after the last given token.
    fn turn(&self) -> &[u32] {
        &self.answer.tokens[self.answer.tokens.len() - self.answer.turn()..]
    }

    /// Feeds new tokens to the stop detection.
    fn completes_stop(&mut self, tokenizer: &Tokenizer) -> Result<bool, TokenizerError> {
        let (all, stop) = (&self.answer.tokens, &self.request.params.stop);
        let tokens = &all[all.len() - self.answer.turn()..];
        match &mut self.watch {
            Some(watch) => Ok(watch.feed(tokenizer, tokens, stop)?.is_some()),
            None => {
                let mut watch = StopWatch::default();
                let mut found = false;
                for len in 1..=tokens.len() {
                    found = watch.feed(tokenizer, &tokens[..len], stop)?.is_some();
                }
                self.watch = Some(watch);
                Ok(found)
            }
        }
    }
}

/// Versions of an attempt's `count` tokens, from the engine's spans or else `served.floor`.
pub(super) fn versions(spans: Option<&[VersionSpan]>, count: usize, served: ServedVersions) -> Result<Spans, String> {
    let ServedVersions { floor, newest, known } = served;
    let mut all = Spans::default();
    let unknown = || {
        let mut all = Spans::default();
        all.extend(Some(floor), count);
        all
    };
    let Some(spans) = spans else { return Ok(unknown()) };
    let mut next = 0;
    for VersionSpan { label, start, end } in spans {
        if *start != next || end < start {
            return Err(format!("version spans with tokens {start}..{end} after {next} tokens"));
        }
        next = *end;
        match label.parse::<Version>() {
            Ok(version) if (floor..=newest).contains(&version) => all.extend(Some(version), end - start),
            _ if known => {
                return Err(format!(
                    "weights {label:?} for tokens {start}..{end}, where it was given versions {floor} to {newest}"
                ));
            }
            _ => return Ok(unknown()),
        }
    }
    match next == count {
        true => Ok(all),
        false => Err(format!("version spans of {next} tokens for {count}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(label: &str, start: usize, end: usize) -> VersionSpan {
        VersionSpan { label: label.into(), start, end }
    }

    fn of(spans: &[VersionSpan], known: bool) -> Result<Vec<Version>, String> {
        versions(Some(spans), 4, ServedVersions { floor: 3, newest: 5, known }).map(|spans| spans.per_token().flatten().collect())
    }

    #[test]
    fn d3_tokens_have_the_version_that_the_engine_says_and_else_the_oldest_that_they_can_have() {
        assert_eq!(of(&[span("3", 0, 1), span("4", 1, 4)], true), Ok(vec![3, 4, 4, 4]));
        assert_eq!(of(&[span("default", 0, 4)], false), Ok(vec![3; 4]));
        assert_eq!(
            versions(None, 2, ServedVersions { floor: 7, newest: 9, known: true }).unwrap().per_token().collect::<Vec<_>>(),
            [Some(7); 2]
        );
    }

    #[test]
    fn spans_that_contradict_themselves_or_name_weights_that_it_was_never_given_are_refused() {
        for spans in [
            &[span("3", 0, 3)][..],
            &[span("3", 0, 2), span("4", 3, 4)],
            &[span("3", 0, 5)],
            &[span("default", 0, 4)],
            &[span("2", 0, 4)],
            &[span("6", 0, 4)],
        ] {
            assert!(of(spans, true).is_err(), "{spans:?}");
        }
    }
}
