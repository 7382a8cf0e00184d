//! Evaluation on engines elsewhere.

use std::sync::Arc;

use super::evaluation::Exam;
use super::stage::Evaluator;
use crate::data::Tokenizer;
use crate::engine::TokenEngine;
use crate::engine::remote::{Fleet, FleetConfig, FleetHandle, Synced};
use crate::stages::generate::EngineSettings;
use crate::stages::sync::EvaluationHold;

impl<W: Send + Sync + 'static> Evaluator<Fleet, W> {
    /// Asks the engines of `handle`, which [`RemoteSync`](crate::stages::sync::RemoteSync) gives weights. Both share `hold`, so that all answers are of
    /// the version that is evaluated: it was verified before, and none is newer.
    pub fn remote(
        handle: &FleetHandle,
        config: FleetConfig,
        tokenizer: &Arc<Tokenizer>,
        (exam, every): (Exam, u64),
        hold: &EvaluationHold,
    ) -> Self {
        let (handle, reads) = (handle.clone(), tokenizer.clone());
        let make = move |settings: &EngineSettings| Fleet::new(&handle, config.clone(), &reads, settings.slots, settings.seed);
        let give = |fleet: &mut Fleet, version, _: &W| fleet.set_weights(version, &Synced { version });
        Evaluator::with((make, give), tokenizer, exam, every).hold(hold)
    }
}
