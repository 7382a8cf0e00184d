//! The generator's thread, where rollouts have environments: it computes while they work, and waits for them only when there is nothing to compute.

use std::time::Duration;

use super::conversations::{Conversations, Setup};
use crate::data::{Group, Prompt, Version};
use crate::engine::TokenEngine;
use crate::flow::{Io, Signal, StageError, TryRecv};
use crate::observe::Metric;
use crate::rollout::Admission;
use crate::stages::generate::Generator;

/// How often a thread with nothing to compute looks for prompts, weights and signals while it waits for environments.
const LOOK: Duration = Duration::from_millis(10);
/// Rollouts under way for every slot: while environments work, the engine answers others.
const AHEAD: usize = 2;

impl<E: TokenEngine> Generator<E> {
    /// Rollouts with an environment, until no prompt comes any more.
    pub(in crate::stages::generate) fn converse(
        &mut self,
        io: &mut Io<Prompt, Group>,
        mut engine: E,
        setup: Setup,
    ) -> Result<(), StageError> {
        let rounds = self.admission.clone().filter(Admission::in_rounds);
        let most = AHEAD * engine.free_slots();
        let mut all = Conversations::new(setup);
        let first = io.wait_weights(&mut self.weights, 0)?;
        self.take_weights(&mut engine, &mut all, first);
        let (mut more, mut received) = (true, 0);
        while io.signal() != Signal::Stop {
            more = more
                && match &rounds {
                    None => self.let_in(io, &engine, &mut all, most)?,
                    Some(admission) => self.let_round_in(io, &engine, &mut all, (admission, &mut received))?,
                };
            if all.under_way() == 0 && !more {
                break;
            }
            all.submit(&mut engine, rounds.is_some())?;
            let idle = engine.is_idle() && all.wait_for_environments();
            all.environments(if idle { LOOK } else { Duration::ZERO })?;
            if engine.version().is_some_and(|version| self.weights.has_newer_than(version))
                && let Some(newest) = self.weights.latest()
            {
                self.take_weights(&mut engine, &mut all, newest);
            }
            if !engine.is_idle() {
                let finished = engine.step()?;
                if let Some(look) = &self.look {
                    look(engine.load());
                }
                all.turns_anew(engine.discarded());
                all.hear(engine.sampled())?;
                if let Some(admission) = &self.admission {
                    admission.sampled(all.places(engine.sampled()));
                }
                if let Some(metrics) = &self.metrics {
                    metrics.add(Metric::GeneratedTokens, &[], engine.sampled().len() as f64);
                }
                finished.into_iter().try_for_each(|finished| all.finished(finished))?;
            }
            for group in all.take_groups() {
                self.count(&group);
                io.send(group)?;
            }
        }
        Ok(())
    }

    fn take_weights(&self, engine: &mut E, all: &mut Conversations, (version, weights): (Version, std::sync::Arc<E::Weights>)) {
        all.expire(engine, version);
        engine.set_weights(version, &weights);
        if let Some(metrics) = &self.metrics {
            metrics.set(Metric::WeightVersion, &["generator"], version as f64);
        }
    }

    fn enter(&self, engine: &E, all: &mut Conversations, mut prompt: Prompt) {
        let params = self.params_of(prompt.ordinal, engine.version());
        prompt.partial = self.resume(&mut prompt, engine.version(), &|_, _| true);
        all.admit(prompt, self.group_size, params);
    }

    /// Lets prompts in while slots are free. False when none will come any more.
    fn let_in(&self, io: &mut Io<Prompt, Group>, engine: &E, all: &mut Conversations, most: usize) -> Result<bool, StageError> {
        while engine.free_slots() > 0 && all.under_way() < most {
            if all.under_way() == 0 {
                let Some(prompt) = io.recv()? else { return Ok(false) };
                self.enter(engine, all, prompt);
                continue;
            }
            match io.try_recv()? {
                TryRecv::Item(prompt) => self.enter(engine, all, prompt),
                TryRecv::Empty => break,
                TryRecv::Closed => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Lets a whole round in once the last one is done.
    fn let_round_in(
        &self,
        io: &mut Io<Prompt, Group>,
        engine: &E,
        all: &mut Conversations,
        (admission, received): (&Admission, &mut u64),
    ) -> Result<bool, StageError> {
        if all.under_way() > 0 {
            return Ok(true);
        }
        loop {
            let Some(prompt) = io.recv()? else { return Ok(false) };
            self.enter(engine, all, prompt);
            *received += 1;
            if admission.rest_of_round(*received) == 0 {
                return Ok(true);
            }
        }
    }
}
