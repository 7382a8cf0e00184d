//! Evaluation on servers.

use std::sync::Arc;

use super::stage::Evaluator;
use crate::data::Tokenizer;
use crate::engine::TokenEngine;
use crate::engine::remote::{Fleet, FleetConfig, FleetHandle, Synced};
use crate::rollout::EvalSpec;
use crate::stages::generate::EngineSettings;
use crate::stages::sync::EvaluationHold;

impl<W: Send + Sync + 'static> Evaluator<Fleet, W> {
    /// Evaluates on the engines of `handle`, whose weights [`RemoteSync`](crate::stages::sync::RemoteSync)
    /// syncs and verifies. Both share `hold`, so that all completions are of the evaluated version.
    pub fn remote(
        handle: &FleetHandle,
        config: FleetConfig,
        tokenizer: &Arc<Tokenizer>,
        spec: EvalSpec,
        every: u64,
        hold: &EvaluationHold,
    ) -> Self {
        let (handle, reads) = (handle.clone(), tokenizer.clone());
        let make = move |settings: &EngineSettings| Fleet::new(&handle, config.clone(), &reads, settings.slots, settings.seed);
        let set_weights = |fleet: &mut Fleet, version, _: &W| fleet.set_weights(version, &Synced { version });
        Evaluator::with(Box::new(make), Box::new(set_weights), tokenizer, spec, every).hold(hold)
    }
}
