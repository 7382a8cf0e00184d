//! `[reference]` as the library's stage, and where a frozen one is found again.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rollflow::flow::WeightsRx;
use rollflow::model::{Dtype, FrozenWeights, ModelConfig, ModelError, load_hf, save_hf};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::recipe::reference_policy::ReferencePolicy;
use rollflow::stages::reference::{ema, periodic};

use crate::parts;

/// The folder in the run's own that keeps the policy as it was after the warm-up.
const KEPT: &str = "reference";

/// The stage that scores, of a run that begins as `policy`.
pub fn reference(plan: &Plan, policy: &Policy, published: &WeightsRx<FrozenWeights>) -> Result<Option<Reference<FrozenWeights>>> {
    let Some(of) = &plan.reference else { return Ok(None) };
    // As the trainer scores, so that equal weights find tokens equally likely. It trains nothing: there is no rate.
    let config = LocalConfig {
        temperature: plan.generate.temperature,
        micro_batch_tokens: plan.train.optimization.micro_batch_tokens,
        threads: Some(of.threads),
        compute: parts::compute(plan)?,
        ..LocalConfig::new(CrossEntropy, Schedule::constant(0.0))
    };
    Ok(Some(match &of.policy {
        ReferencePolicy::Frozen(frozen) => match &frozen.path {
            Some(path) => Reference::local(&other(path, policy)?, config),
            None => Reference::local(policy, config),
        },
        ReferencePolicy::Ema(of) => Reference::local_following(policy, config, published.clone(), ema(of.decay)),
        ReferencePolicy::Periodic(of) => Reference::local_following(policy, config, published.clone(), periodic(of.every)),
    }))
}

fn other(path: &Path, policy: &Policy) -> Result<Policy> {
    let reference = Policy::load(path).with_context(|| format!("loading the reference policy from {}", path.display()))?;
    let (theirs, ours) = (reference.config().vocab_size, policy.config().vocab_size);
    ensure!(
        theirs == ours,
        "the reference policy in {} has a vocabulary of {theirs} tokens, the policy has {ours}: they speak of different tokens",
        path.display()
    );
    Ok(reference)
}

/// Whether nothing but the run itself can tell what its reference was: the warm-up is not made again when it is resumed.
fn is_made_by_the_run(plan: &Plan) -> bool {
    let of_start = |policy: &ReferencePolicy| matches!(policy, ReferencePolicy::Frozen(frozen) if frozen.path.is_none());
    plan.sft.is_some() && plan.reference.as_ref().is_some_and(|reference| of_start(&reference.policy))
}

/// Keeps the policy in the run's folder if the reference could not be found again otherwise.
pub fn keep(plan: &Plan, policy: &Policy, run: &Path) -> Result<()> {
    if !is_made_by_the_run(plan) {
        return Ok(());
    }
    let (folder, writing) = (run.join(KEPT), run.join(".reference.writing"));
    let written = || -> Result<(), ModelError> {
        let io = |source| ModelError::Io { path: folder.clone(), source };
        // What training made is not rounded to what the folder was.
        let config = ModelConfig { dtype: Dtype::F32, ..policy.config().clone() };
        save_hf(&writing, &config, &policy.weights())?;
        if folder.exists() {
            std::fs::remove_dir_all(&folder).map_err(io)?;
        }
        std::fs::rename(&writing, &folder).map_err(io)
    };
    written().context("keeping the reference policy")
}

/// The policy that an interrupted run began as, where its reference is that.
pub fn kept(plan: &Plan, policy: &Policy, run: &Path) -> Result<Policy> {
    if !is_made_by_the_run(plan) {
        return Ok(policy.clone());
    }
    let (_, weights) = load_hf(&run.join(KEPT)).context("the reference policy, which the run kept when it began")?;
    Ok(policy.with_weights(Arc::new(weights.freeze())))
}
