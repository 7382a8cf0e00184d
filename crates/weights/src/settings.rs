//! `[store]`: the object store of a run.

use std::path::Path;

use rollflow_settings::declare::section;
use rollflow_settings::setting::{SOME, SOME_STEPS};

use super::{Publisher, Store, WeightsError};

section! {
    /// Object store for weights and checkpoints, for hosts without a shared disk.
    pub struct StoreRule {
        /// Address: `s3://bucket/folder`, `gs://bucket/folder`, `az://container/folder` or
        /// `file:///folder`. Credentials come from the environment or from the files of the store's
        /// own tools, and are never written. Left out: no store.
        url: Option<String> = None;
        /// If true, servers of `engine.urls` get weights through the store: `rollflow weights pull`
        /// on their host brings each version to a folder there.
        weights: bool = true;
        /// Versions from one that is stored whole to the next; those between are deltas to the one
        /// before. 1 stores each whole.
        anchor_every: u64 = 20, SOME_STEPS;
        /// Newest versions that are kept, in addition to those that they are deltas to.
        keep: usize = 4, SOME;
        /// If true, each checkpoint is uploaded when it is complete, in the background.
        checkpoints: bool = true;
        /// Newest checkpoints that are kept in the store.
        keep_checkpoints: usize = 2, SOME;
    }
}

/// Folder of the weights, below the address of a run.
pub const WEIGHTS: &str = "weights";
/// Folder of the checkpoints, below the address of a run.
pub const CHECKPOINTS: &str = "checkpoints";

impl StoreRule {
    /// Writer of weights, if the rule names a store for them.
    ///
    /// # Errors
    /// Those of [`Store::open`].
    pub fn weights(&self, ca_file: Option<&Path>) -> Result<Option<Publisher>, WeightsError> {
        let Some(url) = self.url.as_ref().filter(|_| self.weights) else { return Ok(None) };
        let store = Store::open(url, ca_file)?.below(WEIGHTS);
        Ok(Some(Publisher::new(store, self.anchor_every, self.keep)))
    }

    /// Writer of checkpoints, if the rule names a store for them. Each is stored whole.
    ///
    /// # Errors
    /// Those of [`Store::open`].
    pub fn checkpoints(&self, ca_file: Option<&Path>) -> Result<Option<Publisher>, WeightsError> {
        let Some(url) = self.url.as_ref().filter(|_| self.checkpoints) else { return Ok(None) };
        let store = Store::open(url, ca_file)?.below(CHECKPOINTS);
        Ok(Some(Publisher::new(store, 1, self.keep_checkpoints)))
    }
}
