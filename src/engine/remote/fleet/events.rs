//! Events of attempts: tokens, ends and failures.

use std::time::{Duration, Instant};

use super::{FAILURES, Fleet, id};
use crate::data::SampledToken;
use crate::engine::remote::attempt::{AttemptEvent, AttemptUpdate};
use crate::engine::remote::handle::{EngineState, FleetHandle};
use crate::engine::remote::in_flight::{InFlightSample, Running, SampleKey, Stage, versions};
use crate::engine::remote::router::pause;
use crate::engine::remote::sync::look_for_restart;
use crate::engine::remote::{Ending, Fault, RemoteError};
use crate::engine::{EngineError, FinishReason, Finished};
use crate::net::Tasks;
use crate::util::rng::mix;

impl Fleet {
    pub(super) fn on_event(&mut self, event: AttemptEvent, now: Instant) -> Result<(), EngineError> {
        let AttemptEvent { key, number, place, update } = event;
        let running = self.samples.get(&key).and_then(InFlightSample::running);
        if running.is_none_or(|running| running.number != number) {
            // An earlier attempt, which another has replaced.
            if let AttemptUpdate::Ended(Ok(Ending { finish: Some(_), .. })) = update {
                self.handle.record(place, |meter, name| meter.duplicate(name));
            }
            return Ok(());
        }
        // On trial, or refuted since changes were processed.
        let on_trial = matches!(update, AttemptUpdate::Tokens(_)) && self.handle.on_trial(place);
        let refuted = self.engine_slots.get(&place).map_or(0, |slot| slot.refuted);
        if (on_trial || self.handle.refutations(place) > refuted)
            && let Some(sample) = self.samples.get_mut(&key)
            && sample.unproven.iter().all(|(other, _)| *other != place)
        {
            sample.unproven.push((place, refuted));
        }
        match update {
            AttemptUpdate::Tokens(chunk) => self.take(key, place, chunk, now),
            AttemptUpdate::Ended(Ok(ending)) => {
                if let Ending { finish: None, spans: None, .. } = ending {
                    self.doubt(key);
                }
                self.end(key, place, ending, now)
            }
            AttemptUpdate::Ended(Err(error)) => self.fail(key, place, error, now),
        }
    }

    /// Ends the attempt of a sample, which continues elsewhere from `at` on.
    pub(super) fn leave(&mut self, key: SampleKey, at: Instant) {
        self.doubt(key);
        if let Some(sample) = self.samples.get_mut(&key) {
            sample.wait(at);
        }
    }

    /// Records that the sample's attempt ends without labels of its tokens' weights. Where the engine was
    /// verified by name, the tokens are unproven until it was asked whether it restarted (law V4).
    fn doubt(&mut self, key: SampleKey) {
        let Some(sample) = self.samples.get_mut(&key) else { return };
        let Some(Running { place, known: true, before, .. }) = sample.running() else { return };
        let (place, begun) = (*place, sample.answer.tokens.len() > *before);
        if let Some(slot) = self.engine_slots.get(&place).filter(|_| begun)
            && sample.unproven.iter().all(|(other, _)| *other != place)
        {
            sample.unproven.push((place, slot.refuted));
            look(&self.handle, self.tasks.as_deref(), place);
        }
    }

    fn take(&mut self, key: SampleKey, place: usize, chunk: Vec<(u32, f32)>, now: Instant) -> Result<(), EngineError> {
        let Some(sample) = self.samples.get_mut(&key) else { return Ok(()) };
        let Some(Running { floor, before, continues, .. }) = sample.running() else { return Ok(()) };
        let (floor, before) = (*floor, *before);
        // A single attempt detects stop strings by itself.
        let continues = *continues && !sample.request.params.stop.is_empty();
        let waited = now.saturating_duration_since(sample.since);
        (sample.since, sample.failures, sample.turned_away) = (now, 0, 0);
        (self.progress, self.in_sync) = (now, Duration::ZERO);
        sample.avoided = None;
        if let Some(slot) = self.engine_slots.get_mut(&place) {
            slot.works(chunk.len(), waited, now);
        }
        self.load.rows += chunk.len();
        let first = (sample.answer.tokens.len() == before).then_some(waited);
        self.handle.record(place, |meter, name| meter.tokens(name, chunk.len(), first));
        for (token, log_prob) in chunk {
            let (ordinal, index) = key;
            let newest = SampledToken { ordinal, index, token, log_prob, version: floor, ..SampledToken::default() };
            self.sampled.extend(sample.held.replace(newest));
            sample.answer.push(token, log_prob, floor);
            if continues && let Some(finish) = sample.ends(&self.tokenizer)? {
                self.doubt(key);
                return self.finish(key, finish);
            }
        }
        Ok(())
    }

    fn end(&mut self, key: SampleKey, place: usize, ending: Ending, now: Instant) -> Result<(), EngineError> {
        let newest = self.handle.newest().max(self.version).unwrap_or(0);
        let Some(sample) = self.samples.get_mut(&key) else { return Ok(()) };
        let Some(Running { floor, known, before, adapter, .. }) = sample.running() else { return Ok(()) };
        let (served, known, before) = (*floor..=newest.max(*floor), *known, *before);
        // Labels of the base weights say nothing about an adapter, which is the same for all
        // tokens.
        let spans = ending.spans.as_deref().filter(|_| adapter.is_none());
        let count = sample.answer.tokens.len() - before;
        match versions(spans, count, served, known) {
            Ok(spans) => {
                sample.answer.versions.truncate(before);
                spans.iter().for_each(|(version, len)| sample.answer.versions.extend(version, len));
                if let (Some(held), Some(version)) = (&mut sample.held, sample.answer.versions.per_token().last().flatten()) {
                    held.version = version;
                }
            }
            Err(why) => {
                // The weights of these tokens are unknown: discard the tokens, and all others that
                // the engine is sampling.
                if known {
                    self.handle.mark_restarted(place);
                }
                sample.restart(now + pause(self.config.pause, key.0, 1));
                self.withdraw(key);
                let error = self.nonsense(place, why);
                self.handle.record(place, |meter, name| meter.error(name, &error.fault));
                tracing::warn!("{}", error.of_sample(&id(key)));
                return Ok(());
            }
        }
        sample.answer.routes = ending.routes;
        let finish = match ending.finish {
            Some(finish) => Some(finish),
            None => sample.ends(&self.tokenizer)?,
        };
        let Some(finish) = finish else {
            sample.turned_away += u32::from(count == 0);
            let at = if count == 0 { now + pause(self.config.pause, key.0, sample.turned_away.min(5)) } else { now };
            sample.wait(at);
            return Ok(());
        };
        if count == 0 {
            let error = self.nonsense(place, "an answer without a token".into());
            return self.fail(key, place, error.of_sample(&id(key)), now);
        }
        if let Some(slot) = self.engine_slots.get_mut(&place) {
            slot.ended();
        }
        self.budget.earn();
        self.finish(key, finish)
    }

    fn nonsense(&self, place: usize, why: String) -> RemoteError {
        let what = "the request".to_owned();
        RemoteError::new(self.handle.name(place).as_ref(), Fault::Nonsense { what, why, begins: String::new() })
    }

    fn fail(&mut self, key: SampleKey, place: usize, error: RemoteError, now: Instant) -> Result<(), EngineError> {
        self.doubt(key);
        let Some(sample) = self.samples.get_mut(&key) else { return Ok(()) };
        // A connection that breaks after the last token lost nothing.
        if let Some(finish) = sample.ends(&self.tokenizer)? {
            return self.finish(key, finish);
        }
        self.handle.record(place, |meter, name| meter.error(name, &error.fault));
        let Some(slot) = self.engine_slots.get_mut(&place) else { return Ok(()) };
        match &error.fault {
            Fault::Busy { status, retry_after } => {
                slot.busy(place, *status, *retry_after, now);
                sample.turned_away += 1;
                sample.wait(now + pause(self.config.pause, mix(key.0 ^ u64::from(key.1)), sample.turned_away.min(4)));
                return Ok(());
            }
            // It is paused, and sends nothing.
            Fault::Late { .. } if self.handle.is_syncing(place) => {
                sample.wait(self.budget.spend(now));
                return Ok(());
            }
            // Others got tokens meanwhile: it waits in the engine's queue.
            Fault::Late { .. } if slot.spoke(self.config.stall_timeout, now) => {
                slot.busy(place, 429, None, now);
                sample.failures += 1;
            }
            // Every sample fails there with this token, path or certificate.
            Fault::Certificates(_) | Fault::Untrusted { .. } | Fault::Refused { status: 401 | 403 | 404 | 405, .. } => {
                sample.failures += 1;
                slot.failures = FAILURES;
            }
            refusal @ Fault::Refused { .. } if refusal.passes() => sample.failures += 1,
            Fault::Refused { .. } | Fault::Unsupported(_) | Fault::Url { .. } => return self.give_up(key, error),
            Fault::Unreachable(_) => slot.failures = FAILURES,
            _ => {
                sample.failures += 1;
                slot.failures += 1;
            }
        }
        // A connection may break because the engine restarts.
        if matches!(error.fault, Fault::Broke(_)) {
            look(&self.handle, self.tasks.as_deref(), place);
        }
        let failing = slot.failures >= FAILURES;
        if sample.failures > self.config.retries {
            return self.give_up(key, error);
        }
        tracing::debug!("{error}; trying again");
        let at = self.budget.spend(now) + pause(self.config.pause, mix(key.0 ^ u64::from(key.1)), sample.failures.max(1));
        sample.wait(at);
        if failing && !matches!(self.handle.state(place), EngineState::Lost | EngineState::Leaving) {
            tracing::warn!("{error}; it gets no work until it is well again");
            self.handle.mark_lost(place, error);
        }
        Ok(())
    }

    /// Gives up a sample (law F6). Too many in a row fail the run.
    fn give_up(&mut self, key: SampleKey, error: RemoteError) -> Result<(), EngineError> {
        self.refused += 1;
        if self.refused > self.config.max_refused {
            return Err(EngineError::Refused { in_a_row: self.refused, last: Box::new(error) });
        }
        tracing::warn!("{error}; the sample is given up");
        if let Some(sample) = self.samples.remove(&key) {
            self.sampled.extend(sample.held);
            self.finished.push(Finished::new(key.0, sample.answer, Err(error.to_string())));
        }
        Ok(())
    }

    pub(super) fn finish(&mut self, key: SampleKey, finish: FinishReason) -> Result<(), EngineError> {
        self.refused = 0;
        if let Some(sample) = self.samples.get_mut(&key).filter(|sample| !sample.unproven.is_empty()) {
            sample.stage = Stage::Ended(finish);
            return Ok(());
        }
        if let Some(sample) = self.samples.remove(&key) {
            let routes = sample.answer.routes.clone();
            self.sampled.extend(sample.held.map(|held| SampledToken { status: finish.into(), routes, ..held }));
            self.finished.push(Finished::new(key.0, sample.answer, Ok(finish)));
        }
        Ok(())
    }
}

/// Asks the engine at `place` whether it restarted, unless it is being asked.
fn look(handle: &FleetHandle, tasks: Option<&Tasks>, place: usize) {
    if let Some(tasks) = tasks.filter(|_| !handle.is_looked_at(place)) {
        tasks.spawn(look_for_restart(handle.clone(), place));
    }
}
