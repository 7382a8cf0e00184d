//! `[reference]` as the library's stage, and where a frozen one is found again.

use std::path::Path;

use anyhow::{Context, Result, bail};
use rollflow::data::Batch;
use rollflow::flow::{Port, WeightsRx};
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::recipe::reference_policy::ReferencePolicy;
use rollflow::recipe::{Optimization, Pipeline, Plan};
use rollflow::stages::reference::{ema, periodic};

use crate::assemble::{models, origin, policy};

/// Folder in the run's own that keeps the policy as it was after the warm-up.
const KEPT: &str = "reference";

/// Scoring configuration of a reference or an evaluation: that of the trainer `of`, so that equal
/// weights give equal log-probabilities. The learning rate is 0.
pub fn scoring(plan: &Plan, of: &Optimization, threads: Option<usize>) -> Result<LocalConfig> {
    Ok(LocalConfig {
        temperature: plan.generate.temperature,
        micro_batch_tokens: of.micro_batch_tokens,
        threads,
        compute: policy::compute(&plan.model)?,
        ..LocalConfig::new(CrossEntropy, Schedule::constant(0.0))
    })
}

/// Builds the frozen reference of a run without generator.
pub fn frozen(plan: &Plan, policy: &Policy, config: LocalConfig) -> Result<Option<Reference<FrozenWeights, Batch>>> {
    let Some(of) = &plan.reference else { return Ok(None) };
    let ReferencePolicy::Frozen { path } = &of.policy else { bail!("a run that publishes no weights has a frozen reference") };
    let other = path.as_ref().map(|path| other(path, policy)).transpose()?;
    Ok(Some(Reference::local(other.as_ref().unwrap_or(policy), config)))
}

/// Adds the stage that scores batches under the frozen reference, if the recipe has one.
pub fn scored(flow: &mut Flow, plan: &Plan, policy: &Policy, batches: Port<Batch>) -> Result<Port<Batch>> {
    let config = scoring(plan, &plan.train.optimization, plan.reference.as_ref().map(|of| of.threads))?;
    Ok(match frozen(plan, policy, config)? {
        Some(reference) => flow.stage("reference", batches, reference),
        None => batches,
    })
}

/// Builds the stage that scores under the reference policy. The run starts from `policy`.
pub fn reference(plan: &Plan, policy: &Policy, published: &WeightsRx<FrozenWeights>) -> Result<Option<Reference<FrozenWeights>>> {
    let Some(of) = &plan.reference else { return Ok(None) };
    let config = scoring(plan, &plan.train.optimization, Some(of.threads))?;
    Ok(Some(match &of.policy {
        ReferencePolicy::Frozen { path: Some(path) } => Reference::local(&other(path, policy)?, config),
        ReferencePolicy::Frozen { path: None } => Reference::local(policy, config),
        ReferencePolicy::Ema { decay } => Reference::local_following(policy, config, published.clone(), ema(*decay)),
        ReferencePolicy::Periodic { every } => Reference::local_following(policy, config, published.clone(), periodic(*every)),
    }))
}

fn other(path: &Path, policy: &Policy) -> Result<Policy> {
    let reference = Policy::load_for(models::model_folder(path)?, policy.compute())
        .with_context(|| format!("loading the reference policy from {}", path.display()))?;
    models::same_vocabulary("the reference policy", path, reference.config().vocab_size, policy.config().vocab_size)?;
    Ok(reference)
}

/// Returns the policy that the run starts from, whatever `policy` has learned since. A new run keeps
/// it in the run folder if nothing else could restore it; a resumed run reads it from there.
pub fn start(plan: &Plan, policy: &Policy, run: &Path, resumed: bool) -> Result<Policy> {
    let of_start = plan.reference.as_ref().is_some_and(|of| of.policy == ReferencePolicy::Frozen { path: None });
    // A resumed run repeats no warm-up. What a supervised run leaves is found in its checkpoint.
    if plan.sft.is_none() || plan.pipeline == Pipeline::SftThenGrpo || !of_start {
        return Ok(policy.clone());
    }
    if resumed {
        return policy.with_weights_of(&run.join(KEPT)).context("loading the reference policy that the run kept at its start");
    }
    origin::keep(policy, run, KEPT).context("keeping the reference policy")?;
    Ok(policy.clone())
}
