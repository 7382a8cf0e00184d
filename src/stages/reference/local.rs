//! Reference policies in this process.

use std::path::Path;
use std::sync::Arc;

use tch::Kind;

use super::model::{ReferenceError, ReferenceModel};
use super::moving::{Held, MovingReference};
use super::scored::Reference;
use crate::data::{Sample, Version};
use crate::flow::WeightsRx;
use crate::model::{FrozenWeights, ModelError, Weights, load_weights, weights_to_bytes};
use crate::train::Policy;
use crate::train::{CheckpointError, LocalConfig, Scorer};

/// Scores with the local trainer's forward pass.
pub struct LocalReference {
    scorer: Scorer,
    threads: Option<usize>,
}

impl LocalReference {
    /// Creates a reference of the policy's architecture. `config` should be the trainer's; only
    /// settings of the forward pass matter, such as the temperature.
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
        // The mean of products is not the product of means.
        let whole = |weights: &FrozenWeights| weights.read().merged();
        let (old, new) = (whole(old), whole(new));
        // The first weights may be in a folder's 16-bit format, and weights from a checkpoint are
        // on the host.
        let flat = |weights: &Weights| weights.flat.to_device(new.flat.device()).to_kind(Kind::Float);
        let mean = flat(&old).lerp(&flat(&new), share);
        FrozenWeights::of_own(Weights::new(old.layout, mean))
    }

    fn encode(weights: &FrozenWeights) -> Result<Vec<u8>, ReferenceError> {
        Ok(weights_to_bytes(&weights.read().merged())?)
    }
}

impl Reference<FrozenWeights> {
    /// Scores with the policy's initial weights, shared.
    pub fn local(policy: &Policy, config: LocalConfig) -> Self {
        let threads = config.threads.unwrap_or(1);
        Reference::frozen(LocalReference::new(policy, config), policy.frozen()).threads(threads)
    }

    /// Follows the `published` weights of a model of the policy's architecture.
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
    /// Continues from a checkpoint of this policy's run. A checkpoint without a reference was
    /// written before the first weights, or by a run without one: the reference then starts with
    /// the first published weights.
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
