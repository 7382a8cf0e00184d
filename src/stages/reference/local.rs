//! Reference policies in this process, with the local trainer's forward pass.

use std::path::Path;
use std::sync::Arc;

use tch::Kind;

use super::{BoxError, Reference, Score, Source};
use crate::data::Version;
use crate::flow::WeightsRx;
use crate::model::{FrozenWeights, Weights, load_weights, release_helpers, use_threads, weights_to_bytes};
use crate::train::{LocalConfig, Policy, Scorer, TrainError};

impl<M> Reference<FrozenWeights, M> {
    /// Scores with the policy's initial weights, shared. `config` should be the trainer's; only
    /// settings of the forward pass matter, such as the temperature.
    pub fn local(policy: &Policy, config: LocalConfig) -> Self {
        let threads = config.threads.unwrap_or(1);
        Reference::of(Source::Frozen(scoring(policy, config), policy.frozen())).threads(threads)
    }

    /// Follows the `published` weights of a model of the policy's architecture
    /// ([`Reference::following`]).
    pub fn local_following(
        policy: &Policy,
        config: LocalConfig,
        published: WeightsRx<FrozenWeights>,
        share: impl Fn(Version, Version) -> f64 + Send + 'static,
    ) -> Self {
        let threads = config.threads.unwrap_or(1);
        Reference::moving(scoring(policy, config), published, share, (blend, encode)).threads(threads)
    }

    /// Continues from a checkpoint of this policy's run; fixed weights stay. A checkpoint without a
    /// reference was written before the first weights, or by a run without one: the reference then
    /// starts with the first published weights.
    pub fn resume(&self, policy: &Policy, checkpoint: &Path) -> Result<(), TrainError> {
        let [file, version] = self.files().map(|name| checkpoint.join(name));
        let Source::Moving(_, moving) = &self.weights else { return Ok(()) };
        if !file.exists() {
            return Ok(());
        }
        let text = std::fs::read_to_string(&version).map_err(TrainError::io(&version))?;
        let seen = text.trim().parse().map_err(|error| TrainError::malformed(&version, error))?;
        let weights = load_weights(policy.config(), &file).map_err(TrainError::of_model(&file))?;
        *moving.held.lock() = Some((seen, Arc::new(FrozenWeights::of_own(weights))));
        Ok(())
    }
}

fn scoring(policy: &Policy, config: LocalConfig) -> Score<FrozenWeights> {
    let (mut threads, mut scorer) = (config.threads, Scorer::new(config, policy.config().clone()));
    Box::new(move |weights, samples, top_tokens| {
        // The setting belongs to the thread that scores.
        threads.take().into_iter().for_each(use_threads);
        let scored = scorer.annotate(weights, samples, top_tokens);
        release_helpers();
        scored.map_err(BoxError::from)
    })
}

fn blend(old: &FrozenWeights, new: &FrozenWeights, share: f64) -> FrozenWeights {
    // The mean of products is not the product of means.
    let (old, new) = (old.read().merged(), new.read().merged());
    // The first weights may be in a folder's 16-bit format, and weights from a checkpoint are
    // on the host.
    let flat = |weights: &Weights| weights.flat.to_device(new.flat.device()).to_kind(Kind::Float);
    let mean = flat(&old).lerp(&flat(&new), share);
    FrozenWeights::of_own(Weights::new(old.layout, mean))
}

fn encode(weights: &FrozenWeights) -> Result<Vec<u8>, BoxError> {
    Ok(weights_to_bytes(&weights.read().merged())?)
}
