//! Timeouts of a fleet, and health checks of lost engines.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::{FAILURES, Fleet, id};
use crate::engine::remote::handle::{EngineState, no_answer};
use crate::engine::remote::in_flight::{InFlightSample, SampleKey, Stage};
use crate::engine::remote::router::{EngineSlot, choose, pause};
use crate::engine::remote::{Fault, FleetHandle};
use crate::engine::{EngineError, TokenEngine};

/// Time limit of a health check of a lost engine.
const LOOK: Duration = Duration::from_secs(2);

/// Time limit of a health check of an engine that sends nothing.
const CHECK: Duration = Duration::from_secs(1);

/// Time without news of a sample before a warning.
const WARN: Duration = Duration::from_secs(30);

impl Fleet {
    /// Checks timeouts, and starts health checks of engines that are lost or send nothing. Samples on
    /// one that is lost and sends nothing continue elsewhere.
    pub(super) fn watch(&mut self, now: Instant) -> Result<(), EngineError> {
        let tasks = self.tasks()?;
        let mut left = BTreeSet::new();
        for (&place, slot) in &mut self.engine_slots {
            let looking = slot.look.as_ref().is_some_and(|look| !look.is_finished());
            let state = self.handle.state(place);
            if state == EngineState::Lost && slot.is_silent(now) {
                left.insert(place);
            } else if !looking && matches!(state, EngineState::Serving | EngineState::Behind) && slot.is_suspect(now) {
                slot.checked(now);
                slot.look = Some(tasks.spawn(check(self.handle.clone(), place)));
                continue;
            }
            if !looking && state == EngineState::Lost {
                let nth = slot.failures.saturating_sub(FAILURES) + 1;
                slot.failures = slot.failures.saturating_add(1);
                slot.look = Some(tasks.spawn(look(self.handle.clone(), place, self.config.pause, nth)));
            }
        }
        self.abandon(&left, now);
        self.hedge(now);
        let busy = self.active() > 0;
        let bound = if busy { self.config.fleet_timeout + self.config.stall_timeout } else { self.config.fleet_timeout };
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.watched, now));
        if self.engine_slots.keys().any(|place| self.is_given_weights(*place)) {
            self.in_sync = self.in_sync.saturating_add(passed);
        }
        // Engines that load weights make no tokens.
        let still = now.saturating_duration_since(self.progress).saturating_sub(self.in_sync.min(self.config.sync_timeout));
        if still > bound {
            return Err(EngineError::Stuck { seconds: still.as_secs_f64(), report: self.report(now) });
        }
        if now.saturating_duration_since(self.warned) > WARN {
            let running = self.samples.iter().filter(|(_, sample)| sample.running().is_some());
            let longest = running.min_by_key(|(_, sample)| sample.since);
            let stalled = longest.filter(|(_, sample)| now.saturating_duration_since(sample.since) > WARN);
            let warning = match stalled {
                _ if still > WARN => format!("no engine made a token for {:.0} s; {}", still.as_secs_f64(), self.report(now)),
                Some((key, sample)) => self.describe(*key, sample, now),
                None => return Ok(()),
            };
            self.warned = now;
            tracing::warn!("{warning}");
        }
        Ok(())
    }

    fn is_given_weights(&self, place: usize) -> bool {
        self.handle.is_syncing(place) && matches!(self.handle.state(place), EngineState::Serving | EngineState::Behind)
    }

    /// Continues the samples of these engines elsewhere.
    fn abandon(&mut self, places: &BTreeSet<usize>, now: Instant) {
        let place_of = |sample: &InFlightSample| sample.running().map(|running| running.place);
        let there = self.samples.iter().filter_map(|(key, sample)| Some((*key, place_of(sample)?)));
        for (key, place) in there.filter(|(_, place)| places.contains(place)).collect::<Vec<_>>() {
            let at = self.budget.spend(now);
            self.leave(key, at);
            self.handle.record(place, |meter, name| meter.moved(name));
        }
    }

    /// Continues samples elsewhere that have waited long for a token, if another engine has room and
    /// is not silent itself: all are while they load weights. A sample that ended under weights whose
    /// verification is late begins again.
    fn hedge(&mut self, now: Instant) {
        let Some(after) = self.config.hedge_after else { return };
        let slow = |sample: &InFlightSample| now.saturating_duration_since(sample.since) > after;
        let slow = self.samples.iter().filter(|(_, sample)| slow(sample));
        let slow: Vec<_> = slow.filter_map(|(key, sample)| Some((*key, self.waits_for(sample, after, now)?))).collect();
        if slow.is_empty() {
            return;
        }
        let serving = self.handle.serving();
        let may = |slot: &EngineSlot| slot.has_room(1, now) && slot.answers(after, now);
        let open = self.engine_slots.iter().filter(|(place, slot)| serving.contains(place) && may(slot));
        let mut open: BTreeSet<usize> = open.map(|(place, _)| *place).collect();
        for (key, place) in slow {
            if open.iter().all(|other| *other == place) {
                continue;
            }
            let oldest = self.oldest(key.0);
            let serves = |other| other != place && open.contains(&other) && self.serves_since(other, oldest);
            let Some(other) = choose(&self.engine_slots, None, key.0, 1, serves, now) else { continue };
            if let Some(slot) = self.engine_slots.get_mut(&other) {
                slot.in_flight += 1;
                if !slot.has_room(1, now) {
                    open.remove(&other);
                }
            }
            let at = self.budget.spend(now);
            let Some(sample) = self.samples.get_mut(&key) else { continue };
            (sample.avoided, sample.since) = (Some(place), now);
            if sample.running().is_some() {
                self.leave(key, at);
            } else {
                sample.restart(at);
                self.withdraw(key);
            }
            if let Some(slot) = self.engine_slots.get_mut(&place)
                && !self.handle.is_syncing(place)
            {
                slot.silent(place, after, now);
            }
            self.handle.record(place, |meter, name| meter.moved(name));
        }
    }

    /// Place of the engine that a sample waits for: it computes the sample, or it ended the sample on
    /// trial and has been silent since.
    fn waits_for(&self, sample: &InFlightSample, after: Duration, now: Instant) -> Option<usize> {
        match &sample.stage {
            Stage::Waiting(_) => None,
            Stage::Running(running) => Some(running.place),
            Stage::Ended(_) => {
                let silent = |place: &usize| self.engine_slots.get(place).is_some_and(|slot| !slot.spoke(after, now));
                sample.unproven.iter().map(|(place, _)| *place).find(silent)
            }
        }
    }

    /// Waiting samples, where and since when, and the state of each engine.
    fn report(&self, now: Instant) -> String {
        let mut samples: Vec<_> = self.samples.iter().collect();
        samples.sort_by_key(|(_, sample)| sample.since);
        let shown = samples.iter().take(3).map(|(key, sample)| self.describe(**key, sample, now));
        let places = self.handle.places();
        let engines = places.iter().map(|&place| (place, self.handle.name(place)));
        let engines = engines.map(|(place, name)| match self.handle.state(place) {
            EngineState::Serving => match self.engine_slots.get(&place).and_then(|slot| slot.closed_for(now)) {
                Some(left) => format!("{name} is busy and gets its next sample in {:.1} s", left.as_secs_f64()),
                None => format!("{name} serves"),
            },
            EngineState::Behind => format!("{name} waits for weights"),
            EngineState::Leaving => format!("{name} leaves"),
            EngineState::Lost => match self.handle.why_lost(place) {
                Some(error) => format!("lost: {error}"),
                None => format!("{name} is lost"),
            },
        });
        let more = samples.len().saturating_sub(3);
        let more = if more > 0 { format!(" and {more} more samples") } else { String::new() };
        // A large fleet would fill the screen.
        let (most, all) = (16, places.len());
        let unnamed = if all > most { format!("; and {} more", all - most) } else { String::new() };
        let engines = if all == 0 { "none".to_owned() } else { engines.take(most).collect::<Vec<_>>().join("; ") + &unnamed };
        let shown = shown.collect::<Vec<_>>().join(", ");
        format!("waiting: {shown}{more}; engines: {engines}")
    }

    fn describe(&self, key: SampleKey, sample: &InFlightSample, now: Instant) -> String {
        let at = sample.running().map_or("no engine".into(), |running| self.handle.name(running.place));
        let (made, silent) = (sample.answer.tokens.len(), now.saturating_duration_since(sample.since).as_secs_f64());
        format!("sample {} on {at} with {made} tokens, nothing new for {silent:.0} s (attempt {})", id(key), sample.attempts)
    }
}

/// Marks an engine as lost if it does not answer a health check.
async fn check(handle: FleetHandle, place: usize) {
    let Some(engine) = handle.engine(place) else { return };
    if let Some(error) = no_answer(engine.as_ref(), CHECK).await {
        tracing::warn!("{error}; it gets no work until it is well again");
        handle.mark_lost(place, error);
    }
}

/// Checks an engine's health until it succeeds.
async fn look(handle: FleetHandle, place: usize, first: Duration, nth: u32) {
    for again in nth.. {
        tokio::time::sleep(pause(first, place as u64, again.min(3))).await;
        let Some(engine) = handle.engine(place) else { return };
        let well = match tokio::time::timeout(LOOK, engine.healthy(LOOK)).await {
            Ok(Ok(())) => true,
            // SGLang says so while it is paused, which an interrupted sync leaves it, also its first.
            // The next sync resumes and verifies it.
            Ok(Err(error)) => {
                matches!(error.fault, Fault::Busy { .. }) && (handle.served(place).is_some() || handle.is_doubtful(place))
            }
            Err(_) => false,
        };
        if well {
            tracing::info!("{} is back", engine.name());
            return handle.mark_found(place);
        }
    }
}
