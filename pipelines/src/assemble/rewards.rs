//! `[reward]`: scoring of groups, in this process or by services.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rollflow::algo::rewards::{Aggregator, Combine, IntoReward, PartReward, Parts, RewardOutput};
use rollflow::flow::BoxedStage;
use rollflow::judge::Service;
use rollflow::observe::logs::{DeadLetter, Failure, JsonLines};
use rollflow::prelude::*;
use rollflow::recipe::reward::{self as section, Composition, PartRule};
use rollflow::recipe::{FlowLimits, Model, Net, Plan};
use rollflow::stages::reward::{CodeReward, FailurePolicy, ModelRule, RemoteReward, Scorer, score};
use rollflow::train::ScoreModel;

use crate::assemble::{models, policy, secrets};
use crate::registry::Registry;

/// Reward of a sample, with its parts.
type SampleReward = Box<dyn Fn(&Sample) -> Result<RewardOutput, String> + Send + Sync>;

/// Reward models in use.
type Models = Vec<Arc<Scorer>>;

/// Scores groups as `[reward]` says.
pub enum Scoring {
    /// In this process.
    Local {
        /// Reward of a sample.
        reward: SampleReward,
        /// Reward models that it uses; they score a group in one batch.
        models: Models,
        /// Threads of the models.
        threads: usize,
    },
    /// By services; some parts may be computed in this process.
    Remote(RemoteReward),
}

impl Scoring {
    /// Builds the reward of the plan.
    pub fn of(plan: &Plan, registry: &Registry) -> Result<Self> {
        let mut models = Models::new();
        let retries = plan.reward.retries;
        let reward: SampleReward = match plan.reward.rule.alone() {
            Ok(rule) => {
                if let Some(of) = rule.service() {
                    let reward = RemoteReward::new(service(&rule, &plan.net)?).retries(retries);
                    return Ok(Scoring::Remote(reward.concurrency(of.concurrency)));
                }
                match rule {
                    // A registered reward may have parts of its own.
                    PartRule::Custom { function, params } => {
                        let (reward, must_end) = (registry.reward_of(&function, &params)?, plan.reward.require_end_of_text);
                        Box::new(
                            move |sample: &Sample| if has_ended(must_end, sample) { reward(sample) } else { 0.0.into_reward() },
                        )
                    }
                    rule => {
                        let value = value(plan, registry, &rule, &mut models)?;
                        Box::new(move |sample: &Sample| value(sample).into_reward())
                    }
                }
            }
            Err(of) => {
                let parts = composition(plan, registry, of, &mut models)?;
                let services: Vec<_> = of.part.iter().filter_map(|part| Some((part, part.rule.service()?))).collect();
                if let Some(concurrency) = services.iter().map(|(_, keys)| keys.concurrency).min() {
                    let services = services.iter().map(|(part, _)| Ok((part.name.clone(), service(&part.rule, &plan.net)?)));
                    let services = services.collect::<Result<Vec<(String, Service)>>>()?;
                    let reward = RemoteReward::with_parts(parts, services).retries(retries);
                    return Ok(Scoring::Remote(reward.concurrency(concurrency)));
                }
                Box::new(move |sample: &Sample| parts.reward(sample))
            }
        };
        Ok(Scoring::Local { reward, models, threads: plan.reward.rule.threads() })
    }

    /// Scores one group outside a graph; returns it with the failures of its samples.
    pub fn score(&self, mut group: Group, retries: u32) -> Result<(Group, Vec<Failure>)> {
        Ok(match self {
            Scoring::Local { reward, models, .. } => {
                models.iter().for_each(|model| model.announce(&group));
                let failures = score(&mut group, reward, retries, true).failures;
                (group, failures)
            }
            Scoring::Remote(reward) => {
                let (group, scoring) = reward.score_blocking(group)?;
                (group, scoring.failures)
            }
        })
    }

    /// Builds the reward stage.
    pub fn stage(
        self,
        of: &section::Reward,
        flow: &FlowLimits,
        letters: Option<JsonLines<DeadLetter>>,
    ) -> BoxedStage<Group, Scored> {
        let failures = FailurePolicy {
            on_failure: of.on_failure,
            on_lost_sample: flow.on_lost_sample,
            max_poisoned: of.max_poisoned,
            dead_letters: letters,
            ..FailurePolicy::default()
        };
        match self {
            Scoring::Local { reward, models, threads } => {
                let announce = move |group: &Group| models.iter().for_each(|model| model.announce(group));
                let reward = Reward::each(reward).ahead(announce).threads(threads).retries(of.retries);
                BoxedStage::new(reward.failures(failures))
            }
            Scoring::Remote(reward) => BoxedStage::new(reward.failures(failures)),
        }
    }
}

/// Connects to the service of `rule`.
fn service(rule: &PartRule, net: &Net) -> Result<Service> {
    let of = rule.service().context("this reward is computed here")?;
    let service = of.service(secrets::endpoint(&of.url, of.token_env.as_ref(), net)?)?;
    Ok(match rule {
        PartRule::Judge(of) => service.judge(of.clone())?,
        _ => service,
    })
}

fn composition(plan: &Plan, registry: &Registry, of: &Composition, models: &mut Models) -> Result<Parts> {
    let aggregator = match of.combine {
        Combine::Custom => registry.aggregator_of(of)?,
        combine => Aggregator::new(combine),
    };
    let weights: Vec<f64> = of.part.iter().map(|part| part.weight).collect();
    let thresholds: Vec<Option<f64>> = of.part.iter().map(|part| part.at_least).collect();
    let aggregator = aggregator.weights(weights).levels(of.levels).at_least(thresholds);
    of.part.iter().try_fold(Parts::new(aggregator), |parts, part| {
        Ok(match part.rule.service() {
            Some(_) => parts.remote(&part.name),
            None => parts.part(&part.name, value(plan, registry, &part.rule, models)?),
        })
    })
}

/// Builds the value of one part. Adds its reward model, if it has one, to `models`.
fn value(plan: &Plan, registry: &Registry, rule: &PartRule, models: &mut Models) -> Result<PartReward> {
    let value = match rule.function(plan.generate.max_new_tokens)? {
        Some(value) => value,
        None => match rule {
            PartRule::Model(of) => scorer(&plan.model, of, models)?,
            PartRule::Code(of) => {
                let code = CodeReward::new(of.clone())?;
                Box::new(move |sample: &Sample| code.reward(sample))
            }
            PartRule::Custom { function, params } => {
                let reward = registry.reward_of(function, params)?;
                Box::new(move |sample: &Sample| reward(sample).map(|output| output.reward))
            }
            _ => bail!("a service scores whole groups"),
        },
    };
    let must_end = plan.reward.require_end_of_text && rule.requires_end();
    Ok(Box::new(move |sample: &Sample| if has_ended(must_end, sample) { value(sample) } else { Ok(0.0) }))
}

fn scorer(model: &Model, of: &ModelRule, models: &mut Models) -> Result<PartReward> {
    let loaded = ScoreModel::load(models::model_folder(&of.path)?)
        .with_context(|| format!("loading the reward model {}", of.path.display()))?;
    let scorer = Arc::new(Scorer::new(&loaded.computing(policy::compute(model)?), of.threads)?);
    models.push(scorer.clone());
    // Scores have no zero point, so a truncated completion gets a penalty instead of 0.
    let penalty = of.missing_end_penalty;
    Ok(Box::new(move |sample: &Sample| {
        Ok(scorer.reward(sample)? - if sample.status == Status::Completed { 0.0 } else { penalty })
    }))
}

fn has_ended(must_end: bool, sample: &Sample) -> bool {
    !must_end || sample.status == Status::Completed
}
