//! `[reference]` as the library's stage, and where a frozen one is found again.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rollflow::engine::remote::{connect, parse_address};
use rollflow::engine::settings::EngineKind;
use rollflow::flow::WeightsRx;
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::recipe::{Model, Net, Optimization, ReferencePolicy, ServedPolicy};
use rollflow::stages::reference::{ServedReference, ema, periodic};

use crate::assemble::{models, origin, policy, secrets};

/// Folder in the run's own that keeps the policy as it was after the warm-up.
const KEPT: &str = "reference";

/// Scoring configuration of a reference or an evaluation: that of the trainer `of`, so that equal
/// weights give equal log-probabilities. The learning rate is 0.
pub fn scoring(model: &Model, temperature: f64, of: &Optimization, threads: usize) -> Result<LocalConfig> {
    Ok(LocalConfig {
        temperature,
        micro_batch_tokens: of.micro_batch_tokens,
        threads: Some(threads),
        compute: policy::compute(model)?,
        ..LocalConfig::new(CrossEntropy, Schedule::constant(0.0))
    })
}

/// Builds the stage that scores under the reference policy. The run starts from `policy`; a reference that
/// follows it reads the `published` weights.
pub fn reference<M>(
    of: &ReferencePolicy,
    net: &Net,
    policy: &Policy,
    config: LocalConfig,
    published: Option<WeightsRx<FrozenWeights>>,
) -> Result<Reference<FrozenWeights, M>> {
    let published = || published.context("a run that publishes no weights has a frozen reference");
    Ok(match of {
        ReferencePolicy::Frozen { path: Some(path) } => Reference::local(&other(path, policy)?, config),
        ReferencePolicy::Frozen { path: None } => Reference::local(policy, config),
        ReferencePolicy::Server(of) => Reference::served(served(of, net)?)?,
        ReferencePolicy::Ema { decay } => Reference::local_following(policy, config, published()?, ema(*decay)),
        ReferencePolicy::Periodic { every } => Reference::local_following(policy, config, published()?, periodic(*every)),
    })
}

/// The server of `[reference]`.
pub fn served(of: &ServedPolicy, net: &Net) -> Result<ServedReference> {
    let (kind, url) = parse_address(&of.url, EngineKind::Rollflow).map_err(|why| anyhow!("reference.url: {why}"))?;
    let engine = connect(kind, secrets::endpoint(url, of.token_env.as_ref(), net)?, of.model.clone())?;
    let (retry, timeout) = (of.retry.policy(of.retries)?, Duration::try_from_secs_f64(of.timeout)?);
    Ok(ServedReference { engine, retry, timeout, concurrency: of.concurrency })
}

fn other(path: &Path, policy: &Policy) -> Result<Policy> {
    let reference = Policy::load_for(models::model_folder(path)?, policy.compute())
        .with_context(|| format!("loading the reference policy from {}", path.display()))?;
    models::same_vocabulary("the reference policy", path, reference.config().vocab_size, policy.config().vocab_size)?;
    Ok(reference)
}

/// Returns the frozen policy that a run with a warm-up starts from, whatever `policy` has learned since. A
/// new run keeps it in the run folder; a resumed run, which repeats no warm-up, reads it from there.
pub fn start(policy: &Policy, run: &Path, resumed: bool) -> Result<Policy> {
    if resumed {
        return policy.with_weights_of(&run.join(KEPT)).context("loading the reference policy that the run kept at its start");
    }
    origin::keep(policy, run, KEPT).context("keeping the reference policy")?;
    Ok(policy.clone())
}
