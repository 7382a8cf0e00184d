//! Implementation of [`TokenEngine`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{EVENTS, Fleet};
use crate::data::{Answer, SampledToken, Version};
use crate::engine::remote::in_flight::InFlightSample;
use crate::engine::slots::finish_of;
use crate::engine::{EngineError, Finished, Load, OlderVersions, Request, TokenEngine};
use crate::net::now;

impl TokenEngine for Fleet {
    type Weights = ();

    fn submit(&mut self, mut request: Request) -> Result<(), EngineError> {
        request.check(self.config.vocabulary)?;
        if request.params.counts() {
            let why = "a sample that continues on another server is a prompt to it, whose tokens these do not count";
            return Err(EngineError::Params(format!(
                "`presence_penalty` and `frequency_penalty` are not for servers: {why}; use `repetition_penalty`, which counts all tokens"
            )));
        }
        let (ordinal, now) = (request.ordinal, now());
        if self.samples.is_empty() {
            (self.progress, self.in_sync, self.watched) = (now, Duration::ZERO, now);
        }
        let mut begun: BTreeMap<u32, Answer> =
            std::mem::take(&mut request.answers).into_iter().map(|answer| (answer.index, answer)).collect();
        let request = Arc::new(request);
        for index in request.first..request.samples {
            let answer = begun.remove(&index).filter(|answer| !answer.tokens.is_empty()).unwrap_or_else(|| Answer::new(index));
            match finish_of(&answer, request.params.max_new_tokens) {
                Some(finish) => self.finished.push(Finished::new(ordinal, answer, Ok(finish))),
                None => {
                    self.samples.insert((ordinal, index), InFlightSample::new(&request, answer, now));
                }
            }
        }
        Ok(())
    }

    fn set_weights(&mut self, version: Version, _: &()) {
        self.version = Some(version);
        if self.older.is_none() {
            self.handle.require(version);
        }
    }

    fn allow_older(&mut self, older: Arc<dyn OlderVersions>) {
        self.older = Some(older);
    }

    fn restart_expired(&mut self, expired: &dyn Fn(u64, &Answer) -> bool) -> Vec<(u64, u32)> {
        let (mut restarted, now) = (Vec::new(), now());
        for (key, sample) in &mut self.samples {
            if sample.answer.tokens.is_empty() || !expired(key.0, &sample.answer) {
                continue;
            }
            sample.restart(now);
            restarted.push(*key);
        }
        restarted
    }

    fn cancel(&mut self, ordinal: u64) {
        self.samples.retain(|(of, _), _| *of != ordinal);
        self.finished.retain(|finished| finished.ordinal != ordinal);
    }

    fn version(&self) -> Option<Version> {
        self.version
    }

    fn is_idle(&self) -> bool {
        self.samples.is_empty() && self.finished.is_empty()
    }

    fn free_slots(&self) -> usize {
        self.limit.saturating_sub(self.samples.len())
    }

    fn active(&self) -> usize {
        self.samples.values().filter(|sample| sample.running().is_some()).count()
    }

    fn limit_slots(&mut self, limit: usize) {
        self.limit = limit.clamp(1, self.slots);
    }

    fn step(&mut self) -> Result<Vec<Finished>, EngineError> {
        let started = now();
        self.sampled.clear();
        self.discarded.clear();
        self.load = Load { passes: 1, ..Load::default() };
        if !self.samples.is_empty() {
            self.process_changes(started)?;
            self.dispatch(started)?;
            // Finished samples do not wait for unfinished ones.
            let wait = if self.finished.is_empty() { self.config.step } else { Duration::ZERO };
            if let Ok(event) = self.from.recv_timeout(wait) {
                let now = now();
                // A refuted engine ends its work; the reason must be processed first.
                self.process_changes(now)?;
                self.on_event(event, now)?;
                // Those that wait for room in the channel, one a sample, are no older.
                let most = EVENTS + self.samples.len();
                for event in self.from.try_iter().take(most).collect::<Vec<_>>() {
                    self.on_event(event, now)?;
                }
            }
            self.watch(now())?;
        }
        self.load.time = started.elapsed();
        Ok(std::mem::take(&mut self.finished))
    }

    fn sampled(&self) -> &[SampledToken] {
        &self.sampled
    }

    fn discarded(&self) -> &[(u64, u32)] {
        &self.discarded
    }

    fn load(&self) -> Load {
        self.load
    }
}
