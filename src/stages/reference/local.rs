//! A reference in this process.

use std::path::Path;
use std::sync::Arc;

use tch::Kind;

use super::model::{ReferenceError, ReferenceModel};
use super::moving::{Held, MovingReference};
use super::scored::Reference;
use crate::data::{Sample, Version};
use crate::flow::WeightsRx;
use crate::model::{FrozenWeights, ModelError, Weights, load_weights, weights_to_bytes};
use crate::stages::Policy;
use crate::train::{CheckpointError, LocalConfig, Scorer};

/// Scores with the forward pass of the local trainer.
pub struct LocalReference {
    scorer: Scorer,
    threads: Option<usize>,
}

impl LocalReference {
    /// A model of the policy's shape. Of `config` counts what a forward pass reads; let it be the trainer's, above all its temperature.
    pub fn new(policy: &Policy, config: LocalConfig) -> Self {
        LocalReference { threads: config.threads, scorer: Scorer::new(config, policy.config().clone()) }
    }
}

impl ReferenceModel for LocalReference {
    type Weights = FrozenWeights;

    fn start(&mut self) {
        if let Some(threads) = self.threads {
            tch::set_num_threads(threads as i32);
        }
    }

    fn score(&mut self, weights: &Arc<FrozenWeights>, samples: &mut [Sample]) -> Result<(), ReferenceError> {
        Ok(self.scorer.annotate(weights, samples)?)
    }

    fn blend(&self, old: &FrozenWeights, new: &FrozenWeights, share: f64) -> FrozenWeights {
        // A mean of products is no product of means.
        let whole = |weights: &FrozenWeights| weights.read().merged();
        let (old, new) = (whole(old), whole(new));
        // The first weights may be in a folder's narrower format, and what a checkpoint held lies on the host.
        let flat = |weights: &Weights| weights.flat.to_device(new.flat.device()).to_kind(Kind::Float);
        let mean = flat(&old).lerp(&flat(&new), share);
        FrozenWeights::of_own(Weights::new(old.layout, mean))
    }

    fn encode(weights: &FrozenWeights) -> Result<Vec<u8>, ReferenceError> {
        Ok(weights_to_bytes(&weights.read().merged())?)
    }
}

impl Reference<FrozenWeights> {
    /// Held to the policy's own weights, which are shared, not copied.
    pub fn local(policy: &Policy, config: LocalConfig) -> Self {
        let threads = config.threads.unwrap_or(1);
        Reference::frozen(LocalReference::new(policy, config), policy.frozen()).threads(threads)
    }

    /// Follows the weights that are `published` of a model of the policy's shape.
    pub fn local_following(
        policy: &Policy,
        config: LocalConfig,
        published: WeightsRx<FrozenWeights>,
        share: impl Fn(Version, Version) -> f64 + Send + 'static,
    ) -> Self {
        let threads = config.threads.unwrap_or(1);
        Reference::following(LocalReference::new(policy, config), published, share).threads(threads)
    }
}

impl MovingReference<FrozenWeights> {
    /// Goes on where a checkpoint stood of a run of this policy. One that holds no reference was written before it had seen any weights, or
    /// by a run without one: it begins with the weights that are announced first.
    pub fn resume(&self, policy: &Policy, checkpoint: &Path) -> Result<(), CheckpointError> {
        let (file, version) = (checkpoint.join(Self::WEIGHTS), checkpoint.join(Self::VERSION));
        if !file.exists() {
            return Ok(());
        }
        let text = std::fs::read_to_string(&version).map_err(CheckpointError::io(&version))?;
        let seen = text.trim().parse().map_err(|error| CheckpointError::malformed(&version, error))?;
        let weights = load_weights(policy.config(), &file).map_err(|error| match error {
            ModelError::Io { path, source } => CheckpointError::Io { path, source },
            other => CheckpointError::malformed(&file, other),
        })?;
        self.restore(Held { seen, weights: Arc::new(FrozenWeights::of_own(weights)) });
        Ok(())
    }
}
