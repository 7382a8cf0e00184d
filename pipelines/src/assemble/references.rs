//! `[reference]` as the library's stage, and where a frozen one is found again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rollflow::data::TopK;
use rollflow::engine::remote::{connect, parse_address};
use rollflow::engine::settings::EngineKind;
use rollflow::flow::WeightsRx;
use rollflow::model::FrozenWeights;
use rollflow::net::RetryPolicy;
use rollflow::prelude::*;
use rollflow::recipe::{
    Model, Net, Optimization, Plan, Reference as Section, ReferencePolicy, ServedPolicy, SourceTeacher, Timeline, TinkerPolicy,
};
use rollflow::stages::reference::{Hint, ServedReference, ema, periodic};

use rollflow::train::tinker::{Patience, TinkerTeacher};

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

/// Builds the stage of `[reference]`. The run starts from `policy`; a reference that follows it reads the
/// `published` weights.
pub fn stage<M>(
    plan: &Plan,
    of: &Section,
    policy: &Policy,
    published: Option<WeightsRx<FrozenWeights>>,
) -> Result<Reference<FrozenWeights, M>> {
    let config = scoring(&plan.model, plan.generate.temperature, &plan.train.optimization, of.threads)?;
    let reference = reference(&of.policy, &plan.net, policy, config, published)?;
    Ok(reference.top_tokens(top_tokens(plan, policy)?).hint(of.hint.as_ref().map(|hint| Hint::new(hint, policy.tokenizer()))))
}

/// Builds a stage that scores under the reference policy, by the policy's own prompts.
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
        ReferencePolicy::Tinker(of) => Reference::served(on_tinker(of, net)?)?,
        ReferencePolicy::BySource { teacher } => {
            let part = |of: &SourceTeacher| -> Result<(Vec<String>, Reference<FrozenWeights, M>)> {
                Ok((of.sources.clone(), reference(&of.policy.alone(), net, policy, config.clone(), None)?))
            };
            Reference::by_source(teacher.iter().map(part).collect::<Result<_>>()?)
        }
        ReferencePolicy::Ema { decay } => Reference::local_following(policy, config, published()?, ema(*decay)),
        ReferencePolicy::Periodic { every } => Reference::local_following(policy, config, published()?, periodic(*every)),
    })
}

/// Likeliest tokens that the teacher gives, as many as any step compares, and no more than the policy has.
fn top_tokens(plan: &Plan, policy: &Policy) -> Result<TopK> {
    let of = |plan: &Plan| plan.train.distill.as_ref().map_or(0, |distill| distill.top_k);
    let below = policy.config().vocab_size;
    Ok(TopK { k: Timeline::of(plan)?.plans().map(of).max().unwrap_or(0).min(below), below })
}

/// The server of `[reference]`.
pub fn served(of: &ServedPolicy, net: &Net) -> Result<ServedReference> {
    let (kind, url) = parse_address(&of.url, EngineKind::Rollflow).map_err(|why| anyhow!("reference.url: {why}"))?;
    let engine = connect(kind, secrets::endpoint(url, of.token_env.as_ref(), net)?, of.model.clone())?;
    let (retry, timeout) = (of.retry.policy(of.retries)?, Duration::try_from_secs_f64(of.timeout)?);
    Ok(ServedReference { engine, retry, timeout, concurrency: of.concurrency })
}

/// The Tinker server of `[reference]`.
pub fn on_tinker(of: &TinkerPolicy, net: &Net) -> Result<ServedReference> {
    let key = of
        .key_env
        .as_ref()
        .map(|name| std::env::var(name).with_context(|| format!("the environment has no {name}, which reference.key_env names")));
    let timeout = Duration::try_from_secs_f64(of.timeout)?;
    let patience = Patience { operation: timeout, unreachable: timeout, ..Patience::default() };
    let endpoint = secrets::endpoint(&of.url, None, net)?;
    let engine = Arc::new(TinkerTeacher::new(endpoint, key.transpose()?, of.model.clone(), patience));
    Ok(ServedReference { engine, retry: RetryPolicy::default(), timeout, concurrency: of.concurrency })
}

fn other(path: &Path, policy: &Policy) -> Result<Policy> {
    let reference = Policy::load_for(models::model_folder(path)?, policy.compute())
        .with_context(|| format!("loading the reference policy from {}", path.display()))?;
    let same = policy.tokenizer().check_same_tokens(reference.tokenizer());
    same.with_context(|| format!("the reference policy in {} reads other tokens than the policy", path.display()))?;
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
