//! Generation on servers.

use std::sync::Arc;

use super::generator::{EngineSettings, Generator};
use crate::data::Tokenizer;
use crate::engine::remote::{Fleet, FleetConfig, FleetHandle};

impl Generator<Fleet> {
    /// Generates on the engines of `handle`, from the first synced version of the flow (law V4). One
    /// worker is enough: it computes nothing.
    pub fn remote(handle: &FleetHandle, config: FleetConfig, tokenizer: &Arc<Tokenizer>) -> Self {
        let (handle, reads) = (handle.clone(), tokenizer.clone());
        let make = move |settings: &EngineSettings| Fleet::new(&handle, config.clone(), &reads, settings.slots, settings.seed);
        Generator::by(make, tokenizer)
    }
}
