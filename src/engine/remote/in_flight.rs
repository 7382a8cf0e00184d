//! State of one sample on remote engines: pure, with the clock as an argument.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Instant;

use tokio::task::AbortHandle;

use super::sync::Update;
use crate::data::{Answer, DataError, SampledToken, Spans, Tokenizer, Version};
use crate::engine::stop::StopWatch;
use crate::engine::{FinishReason, Request};

/// Prompt ordinal and sample index.
pub(super) type SampleKey = (u64, u32);

/// Sample that has not ended.
#[derive(Debug)]
pub(super) struct InFlightSample {
    pub(super) request: Arc<Request>,
    pub(super) answer: Answer,
    /// Number of attempts that have ended.
    pub(super) attempts: u32,
    pub(super) stage: Stage,
    /// Newest token, which is reported with the next one or with the end.
    pub(super) held: Option<SampledToken>,
    /// Failed attempts since the last token.
    pub(super) failures: u32,
    /// Rejected or aborted attempts since the last token.
    pub(super) turned_away: u32,
    /// Engine that was too slow for it.
    pub(super) avoided: Option<usize>,
    /// Engines on trial that generated tokens of it, with their refutations before.
    pub(super) unproven: Vec<(usize, u64)>,
    /// Time of the last event.
    pub(super) since: Instant,
    /// Finds stop strings that span two attempts.
    watch: StopWatch,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Waits for an engine, until this time at least.
    Waiting(Instant),
    Running(Running),
    /// Has ended, and waits until its weights are verified.
    Ended(FinishReason),
}

#[derive(Debug)]
pub(super) struct Running {
    /// Number of the attempt.
    pub(super) number: u32,
    pub(super) place: usize,
    /// Oldest version that can sample its tokens.
    pub(super) floor: Version,
    /// If true, the engine was verified to serve that version.
    pub(super) known: bool,
    /// Number of tokens before the attempt.
    pub(super) before: usize,
    /// If true, some of these are of the same turn.
    pub(super) continues: bool,
    /// Adapter of the attempt, kept loaded.
    pub(super) adapter: Option<Arc<Update>>,
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
            attempts: 0,
            stage: Stage::Waiting(now),
            held: None,
            failures: 0,
            turned_away: 0,
            avoided: None,
            unproven: Vec::new(),
            since: now,
            watch: StopWatch::default(),
        }
    }

    pub(super) fn running(&self) -> Option<&Running> {
        match &self.stage {
            Stage::Running(running) => Some(running),
            Stage::Waiting(_) | Stage::Ended(_) => None,
        }
    }

    pub(super) fn restart(&mut self, now: Instant) {
        self.answer = Answer::new(self.answer.index);
        (self.held, self.watch) = (None, StopWatch::default());
        self.unproven.clear();
        self.wait(now);
    }

    /// Allows the next attempt from `at` on.
    pub(super) fn wait(&mut self, at: Instant) {
        self.attempts += 1;
        self.stage = Stage::Waiting(at);
    }

    /// Reason for the end if the newest token is the last. An interrupted attempt may not have
    /// reported it.
    pub(super) fn ends(&mut self, tokenizer: &Tokenizer) -> Result<Option<FinishReason>, DataError> {
        self.watch.ends(&self.answer, &self.request.params, tokenizer)
    }
}

/// Versions of an attempt's `count` tokens, from the engine's labels of token ranges or else the
/// oldest of `served`, the policy versions that it can have served. If it is `known` to serve them
/// by name, any other label is an error.
pub(super) fn versions(
    spans: Option<&[(String, Range<usize>)]>,
    count: usize,
    served: RangeInclusive<Version>,
    known: bool,
) -> Result<Spans, String> {
    let (mut all, mut oldest) = (Spans::default(), Spans::default());
    oldest.extend(Some(*served.start()), count);
    let Some(spans) = spans else { return Ok(oldest) };
    let mut next = 0;
    for (label, Range { start, end }) in spans {
        if *start != next || end < start {
            return Err(format!("version spans with tokens {start}..{end} after {next} tokens"));
        }
        next = *end;
        match label.parse::<Version>() {
            Ok(version) if served.contains(&version) => all.extend(Some(version), end - start),
            _ if known => {
                let (floor, newest) = served.into_inner();
                return Err(format!(
                    "weights {label:?} for tokens {start}..{end}, where it was given versions {floor} to {newest}"
                ));
            }
            _ => return Ok(oldest),
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

    #[test]
    fn d3_tokens_have_the_versions_that_the_engine_reports_or_the_oldest_possible_and_contradictions_are_refused() {
        // Four tokens of an engine that was given versions 3 to 5.
        let of = |spans: &[(&str, Range<usize>)], known| {
            let spans: Vec<_> = spans.iter().map(|(label, range)| (label.to_string(), range.clone())).collect();
            versions(Some(&spans), 4, 3..=5, known).map(|spans| spans.per_token().flatten().collect::<Vec<_>>())
        };
        let default = [("default", 0..4)];
        assert_eq!(of(&[("3", 0..1), ("4", 1..4)], true), Ok(vec![3, 4, 4, 4]));
        assert_eq!(of(&default, false), Ok(vec![3; 4]));
        assert_eq!(versions(None, 2, 7..=9, true).unwrap().per_token().collect::<Vec<_>>(), [Some(7); 2]);
        for spans in [&[("3", 0..3)][..], &[("3", 0..2), ("4", 3..4)], &[("3", 0..5)], &default, &[("2", 0..4)], &[("6", 0..4)]] {
            assert!(of(spans, true).is_err(), "{spans:?}");
        }
    }
}
