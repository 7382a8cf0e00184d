//! `[reference]` and `[teacher]` as the library's stages, and where a frozen one is found again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rollflow::data::{Scored, TopK};
use rollflow::engine::remote::{connect, parse_address};
use rollflow::engine::settings::EngineKind;
use rollflow::flow::WeightsRx;
use rollflow::model::FrozenWeights;
use rollflow::net::RetryPolicy;
use rollflow::prelude::*;
use rollflow::recipe::{
    Model, Net, Optimization, Plan, ReferencePolicy, ServedPolicy, SourcePolicy, Teacher, Timeline, TinkerPolicy,
};
use rollflow::stages::reference::{Hint, ServedReference, ema, periodic};

use rollflow::train::tinker::{Patience, SamplerWeights, TinkerTeacher};

use crate::assemble::policy::Reader;
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

/// The stages of `[reference]` and `[teacher]`, of those that the recipe has.
pub struct Scorers<W, M = Scored> {
    /// Scores under the reference policy.
    pub reference: Option<Reference<W, M>>,
    /// Scores under the teacher.
    pub teacher: Option<Reference<W, M>>,
}

impl<M> Scorers<FrozenWeights, M> {
    /// Builds them. The run starts from `policy`; one that follows it reads the `published` weights.
    pub fn of(plan: &Plan, policy: &Policy, published: Option<&WeightsRx<FrozenWeights>>) -> Result<Self> {
        let build = |section: &str, of: &ReferencePolicy, threads| -> Result<Reference<FrozenWeights, M>> {
            let config = scoring(&plan.model, plan.generate.scoring_temperature(), &plan.train.optimization, threads)?;
            scorer(section, of, &plan.net, policy, config, published.cloned())
        };
        let reference = plan.reference.as_ref().map(|of| build("reference", &of.policy, of.threads)).transpose()?;
        let teacher = |of: &Teacher| -> Result<_> {
            let hint = of.hint.as_ref().map(|hint| Hint::new(hint, policy.tokenizer()));
            let teacher = build("teacher", &of.policy, of.threads)?.teaching().hint(hint);
            Ok(teacher.top_tokens(top_tokens(plan, policy)?))
        };
        Ok(Scorers { reference, teacher: plan.teacher.as_ref().map(teacher).transpose()? })
    }

    /// Continues from a checkpoint of this run.
    pub fn resume(&self, policy: &Policy, checkpoint: &Path) -> Result<()> {
        let resume = |scorer: &Reference<FrozenWeights, M>| scorer.resume(policy, checkpoint);
        self.reference.iter().try_for_each(resume).context("resuming the reference policy")?;
        self.teacher.iter().try_for_each(resume).context("resuming the teacher")
    }
}

impl<W, M> Scorers<W, M> {
    /// Returns those of the recipe.
    pub fn iter(&self) -> impl Iterator<Item = &Reference<W, M>> {
        self.reference.iter().chain(&self.teacher)
    }
}

impl<M> Scorers<SamplerWeights, M> {
    /// Builds those of a run whose model is elsewhere. Its tokens are those of `reader`.
    pub fn served(plan: &Plan, reader: &Reader) -> Result<Self> {
        let build = |(section, of): (&'static str, &ReferencePolicy)| -> Result<Reference<SamplerWeights, M>> {
            served_scorer(section, of, &plan.net)?.with_context(|| format!("{section}.kind: no model is in this process"))
        };
        let reference = plan.reference.as_ref().map(|of| build(("reference", &of.policy))).transpose()?;
        let teacher = |of: &Teacher| -> Result<_> {
            let hint = of.hint.as_ref().map(|hint| Hint::new(hint, &reader.tokenizer));
            Ok(build(("teacher", &of.policy))?.teaching().hint(hint))
        };
        Ok(Scorers { reference, teacher: plan.teacher.as_ref().map(teacher).transpose()? })
    }
}

/// Builds a stage that scores under another policy, by the policy's own prompts. `section` names it in
/// errors.
pub fn scorer<M>(
    section: &str,
    of: &ReferencePolicy,
    net: &Net,
    policy: &Policy,
    config: LocalConfig,
    published: Option<WeightsRx<FrozenWeights>>,
) -> Result<Reference<FrozenWeights, M>> {
    if let Some(served) = served_scorer(section, of, net)? {
        return Ok(served);
    }
    let published = || published.with_context(|| format!("{section}.kind: this run publishes no weights to follow"));
    Ok(match of {
        ReferencePolicy::Frozen { path: Some(path) } => Reference::local(&other(section, path, policy)?, config),
        ReferencePolicy::Ema { decay } => Reference::local_following(policy, config, published()?, ema(*decay)),
        ReferencePolicy::Periodic { every } => Reference::local_following(policy, config, published()?, periodic(*every)),
        ReferencePolicy::BySource { part } => {
            let build = |(of, (key, policy_of)): (&SourcePolicy, (String, ReferencePolicy))| -> Result<_> {
                Ok((of.sources.clone(), scorer(&key, &policy_of, net, policy, config.clone(), None)?))
            };
            Reference::by_source(part.iter().zip(of.parts(section)).map(build).collect::<Result<_>>()?)
        }
        _ => Reference::local(policy, config),
    })
}

/// The same if a server scores; else `None`.
fn served_scorer<W: Send + Sync + 'static, M>(section: &str, of: &ReferencePolicy, net: &Net) -> Result<Option<Reference<W, M>>> {
    Ok(match of {
        ReferencePolicy::Server(of) => Some(Reference::served(served(section, of, net)?)?),
        ReferencePolicy::Tinker(of) => Some(Reference::served(on_tinker(section, of, net)?)?),
        _ => None,
    })
}

/// Likeliest tokens that the teacher gives, as many as any step compares, and no more than the policy has.
fn top_tokens(plan: &Plan, policy: &Policy) -> Result<TopK> {
    let of = |plan: &Plan| plan.teacher.as_ref().map_or(0, |teacher| teacher.distill.top_k);
    let below = policy.config().vocab_size;
    Ok(TopK { k: Timeline::of(plan)?.plans().iter().map(|plan| of(plan)).max().unwrap_or(0).min(below), below })
}

fn served(section: &str, of: &ServedPolicy, net: &Net) -> Result<ServedReference> {
    let (kind, url) = parse_address(&of.url, EngineKind::Rollflow).map_err(|why| anyhow!("{section}.url: {why}"))?;
    let engine = connect(kind, secrets::endpoint(url, of.token_env.as_ref(), net)?, of.model.clone())?;
    let (retry, timeout) = (of.retry.policy(of.retries)?, Duration::try_from_secs_f64(of.timeout)?);
    Ok(ServedReference { engine, retry, timeout, concurrency: of.concurrency })
}

fn on_tinker(section: &str, of: &TinkerPolicy, net: &Net) -> Result<ServedReference> {
    let secret =
        |name| std::env::var(name).with_context(|| format!("the environment has no {name}, which {section}.key_env names"));
    let key = of.key_env.as_ref().map(secret).transpose()?;
    let timeout = Duration::try_from_secs_f64(of.timeout)?;
    let patience = Patience { operation: timeout, unreachable: timeout, ..Patience::default() };
    let engine = Arc::new(TinkerTeacher::new(secrets::endpoint(&of.url, None, net)?, key, of.model.clone(), patience));
    Ok(ServedReference { engine, retry: RetryPolicy::default(), timeout, concurrency: of.concurrency })
}

fn other(section: &str, path: &Path, policy: &Policy) -> Result<Policy> {
    let other = Policy::load_for(models::model_folder(path)?, policy.compute())
        .with_context(|| format!("loading the model of [{section}] from {}", path.display()))?;
    let long = policy.config().rotates_long() && other.config().contexts().is_some();
    let other = if long { other.within(Some(policy.config().max_positions))? } else { other };
    let same = policy.tokenizer().check_same_tokens(other.tokenizer());
    same.with_context(|| format!("the model of [{section}] in {} reads other tokens than the policy", path.display()))?;
    Ok(other)
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
