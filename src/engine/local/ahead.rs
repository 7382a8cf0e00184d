//! Steps that a GPU computes while the host takes the tokens of the step before.
//!
//! A step starts from tokens that are still on the device, so that a GPU always has one queued. Samples that
//! the step before ended have a row in vain. Nothing depends on such a step: weights that change drop it, and
//! its tokens are drawn again. A model whose steps can't be computed again has none at work then.

use std::rc::Rc;

use tch::Tensor;

use super::LocalEngine;
use super::draw::{Row, choices, settings};
use super::graphs::StepInput;
use crate::engine::EngineError;
use crate::model::stream::Event;

/// A step at work on the device.
pub(super) struct Ahead {
    /// Its number, by which a sample knows its row.
    id: u64,
    /// Tokens and log-probabilities, `[rows, 2]`, of rows that some slots had.
    drawn: Tensor,
    done: Event,
}

impl LocalEngine {
    /// The step at work, or a new one for all slots in use; `None` if these are not computed by a recorded
    /// step, as those with penalties, which depend on the token before.
    pub(super) fn at_work(&mut self) -> Option<Ahead> {
        let ahead = self.ahead.take().filter(|ahead| self.rows(ahead.id).any(|row| row.is_some()));
        ahead.or_else(|| self.start(None))
    }

    fn rows(&self, id: u64) -> impl Iterator<Item = Option<usize>> {
        self.slots.iter_from(0).map(move |(_, sequence)| sequence.state.row_of(id))
    }

    /// Starts a step of all slots in use after the step `before`, which some of them are in.
    fn start(&mut self, before: Option<&Ahead>) -> Option<Ahead> {
        let weights = self.slots.iter_from(0).next()?.1.state.weights.clone();
        if !self.graphs.are_used() || !self.decoder.records_steps(&weights.views) {
            return None;
        }
        let (mut input, mut rows, mut any_lasts) = (StepInput::default(), Vec::new(), false);
        for (_, sequence) in self.slots.iter_from(0) {
            if !Rc::ptr_eq(&sequence.state.weights, &weights) || sequence.request.params.adjusts() {
                return None;
            }
            let row = before.and_then(|before| sequence.state.row_of(before.id));
            // Tokens that are not taken yet.
            let further = usize::from(row.is_some());
            let (token, position) = sequence.newest();
            input.tokens.push(token);
            input.positions.push((position + further) as i64);
            input.drawn.push(row);
            let drawn = sequence.answer.tokens.len() + further;
            let uniform = sequence.uniform_after(drawn, self.run_seed);
            rows.push(Row { params: &sequence.request.params, uniform, adjusted: Vec::new() });
            any_lasts |= sequence.lasts_beyond(further);
        }
        if !any_lasts {
            return None;
        }
        input.settings = settings(&rows);
        let places = || (0..).zip(input.positions.iter().map(|position| *position as usize + 1));
        if places().map(|(slot, tokens)| self.cache.pages.lacking(slot, tokens)).sum::<usize>() > self.cache.pages.available() {
            return None;
        }
        places().for_each(|(slot, tokens)| self.cache.pages.reserve(slot, tokens));
        let drawn = self.graphs.step(
            &self.decoder,
            (&weights, &weights.views),
            (input, before.map(|before| &before.drawn)),
            (&mut self.cache, self.slots.len()),
        )?;
        self.steps += 1;
        let id = self.steps;
        self.slots.iter_mut().enumerate().for_each(|(row, sequence)| sequence.state.row = (id, row));
        Some(Ahead { id, drawn, done: Event::now(self.compute.device) })
    }

    /// Takes the tokens of a step at work, after the next one is started.
    pub(super) fn take_drawn(&mut self, step: Ahead) -> Result<(), EngineError> {
        let rows: Vec<(usize, usize)> = self.rows(step.id).enumerate().filter_map(|(slot, row)| Some((slot, row?))).collect();
        let next = if self.decoder.repeats_steps() { self.start(Some(&step)) } else { None };
        let drawn = {
            // In another stream, which does not wait for the next step.
            let _stream = self.downloads.enter();
            step.done.before([&step.drawn]);
            choices(&step.drawn)
        };
        let (slots, choices) =
            rows.iter().filter_map(|&(slot, row)| Some((slot, *drawn.get(row)?))).unzip::<_, _, Vec<_>, Vec<_>>();
        self.slots.load.add(slots.len(), 0);
        self.take(&slots, choices)?;
        self.ahead = next.filter(|_| self.slots.active() > 0);
        Ok(())
    }
}
