//! Steps that a GPU computes while the host takes the tokens of the step before.
//!
//! A step starts from tokens that are still on the device, so that a GPU always has one queued. Samples that
//! the step before ended have a row in vain. Nothing depends on such a step: weights that change drop it, and
//! its tokens are drawn again.

use std::rc::Rc;

use tch::Tensor;

use super::LocalEngine;
use super::draw::{choices, settings};
use super::graphs::StepInput;
use super::sequence::Sequence;
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
    /// step.
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
        let is_of = |(_, sequence): (usize, &Sequence)| Rc::ptr_eq(&sequence.state.weights, &weights);
        let drafts = self.rows_for_drafts(self.slots.active()) > 0;
        if !self.graphs.are_used() || drafts || !self.slots.iter_from(0).all(is_of) {
            return None;
        }
        let rows = self.rows(before.map_or(0, |before| before.id));
        let drawn: Vec<Option<usize>> = rows.map(|row| row.filter(|_| before.is_some())).collect();
        let sequences = || self.slots.iter_from(0).map(|(_, sequence)| sequence).zip(&drawn);
        let goes_on = |(sequence, row): (&Sequence, &Option<usize>)| sequence.goes_on_after(usize::from(row.is_some()));
        if !sequences().any(goes_on) {
            return None;
        }
        let (tokens, positions) = sequences()
            .map(|(sequence, row)| {
                let (token, position) = sequence.newest();
                (if row.is_some() { 0 } else { token }, (position + usize::from(row.is_some())) as i64)
            })
            .unzip();
        let params = sequences().map(|(sequence, row)| {
            let tokens = sequence.answer.tokens.len() + usize::from(row.is_some());
            (&*sequence.request.params, sequence.uniform_after(tokens, self.run_seed))
        });
        let settings = settings(&params.collect::<Vec<_>>());
        let input = StepInput { tokens, positions, settings, drawn };
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
        let next = self.start(Some(&step));
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
