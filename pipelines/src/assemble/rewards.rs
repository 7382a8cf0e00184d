//! `[reward]`: scoring of groups, in this process or by services.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rollflow::algo::rewards::{Aggregator, Combine, IntoReward, PartReward, Parts, RewardOutput};
use rollflow::flow::BoxedStage;
use rollflow::judge::{HttpRule, Service};
use rollflow::observe::logs::{DeadLetter, Failure, JsonLines};
use rollflow::prelude::*;
use rollflow::recipe::{self as section, Composition, FlowLimits, PartRule, Plan};
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
    /// Not at all.
    None,
}

impl Scoring {
    /// Builds the reward of `[reward]`. Rewards of the registry are used by name; reward models compute as
    /// the policy does.
    pub fn of(plan: &Plan, registry: &Registry) -> Result<Self> {
        let mut build = Build { plan, registry, models: Models::new() };
        let (reward, retries) = (&plan.reward, plan.reward.retries);
        let score: SampleReward = match reward.rule.alone() {
            Ok(None) => return Ok(Scoring::None),
            Ok(Some(rule)) => {
                if rule.is_remote() {
                    let (service, concurrency) = build.service(&rule)?;
                    return Ok(Scoring::Remote(RemoteReward::new(service).retries(retries).concurrency(concurrency)));
                }
                match rule {
                    // A registered reward may have parts.
                    PartRule::Custom { function, params } => {
                        let (score, must_end) = (registry.reward_of(&function, &params)?, reward.require_end_of_text);
                        Box::new(
                            move |sample: &Sample| if has_ended(must_end, sample) { score(sample) } else { 0.0.into_reward() },
                        )
                    }
                    rule => {
                        let value = build.value(&rule)?;
                        Box::new(move |sample: &Sample| value(sample).into_reward())
                    }
                }
            }
            Err(of) => {
                let parts = build.composition(of)?;
                let remote = of.part.iter().filter(|part| part.rule.is_remote());
                let remote =
                    remote.map(|part| Ok((part.name.clone(), build.service(&part.rule)?))).collect::<Result<Vec<_>>>()?;
                if let Some(concurrency) = remote.iter().map(|(_, (_, concurrency))| *concurrency).min() {
                    let services = remote.into_iter().map(|(name, (service, _))| (name, service));
                    let reward = RemoteReward::with_parts(parts, services).retries(retries);
                    return Ok(Scoring::Remote(reward.concurrency(concurrency)));
                }
                Box::new(move |sample: &Sample| parts.reward(sample))
            }
        };
        Ok(Scoring::Local { reward: score, models: build.models, threads: reward.rule.threads() })
    }

    /// Scores one group outside a graph; returns it with the failures of its samples.
    pub fn score(&self, mut group: Group, retries: u32) -> Result<(Group, Vec<Failure>)> {
        Ok(match self {
            Scoring::Local { reward, models, .. } => {
                models.iter().for_each(|model| model.announce(&group));
                let failures = score(&mut group, reward, retries, true);
                (group, failures)
            }
            Scoring::Remote(reward) => reward.score_blocking(group)?,
            Scoring::None => (group, Vec::new()),
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
            Scoring::None => BoxedStage::new(Reward::none().failures(failures)),
        }
    }
}

/// Plan that parts of a reward are built from, and the reward models that the parts use.
struct Build<'a> {
    plan: &'a Plan,
    registry: &'a Registry,
    models: Models,
}

impl Build<'_> {
    /// Connects to the service of `rule`, or starts its processes. Returns it with the number of groups
    /// that it takes at a time.
    fn service(&self, rule: &PartRule) -> Result<(Service, usize)> {
        let over_http = |of: &HttpRule| -> Result<Service> {
            Ok(of.service(secrets::endpoint(&of.url, of.token_env.as_ref(), &self.plan.net)?)?)
        };
        Ok(match rule {
            PartRule::Http(of) => (over_http(of)?, of.concurrency),
            PartRule::Judge(of) => (over_http(&of.http)?.judge(of.clone())?, of.http.concurrency),
            PartRule::Python(of) => {
                let workers = of.start()?;
                let capacity = workers.capacity();
                (Service::python(workers, Duration::try_from_secs_f64(of.timeout)?), capacity)
            }
            _ => bail!("this reward is computed in this process"),
        })
    }

    fn composition(&mut self, of: &Composition) -> Result<Parts> {
        let aggregator = match of.combine {
            Combine::Custom => self.registry.aggregator_of(of)?,
            combine => Aggregator::new(combine),
        };
        let weights: Vec<f64> = of.part.iter().map(|part| part.weight).collect();
        let thresholds: Vec<Option<f64>> = of.part.iter().map(|part| part.at_least).collect();
        let aggregator = aggregator.weights(weights).levels(of.levels).at_least(thresholds);
        of.part.iter().try_fold(Parts::new(aggregator), |parts, part| {
            Ok(match part.rule.is_remote() {
                true => parts.remote(&part.name),
                false => parts.part(&part.name, self.value(&part.rule)?),
            })
        })
    }

    /// Builds the value of one part. Adds its reward model, if it has one, to `models`.
    fn value(&mut self, rule: &PartRule) -> Result<PartReward> {
        let value = match (rule.function(self.plan.generate.max_new_tokens)?, rule) {
            (Some(value), _) => value,
            (None, PartRule::Model(of)) => self.scorer(of)?,
            (None, PartRule::Code(of)) => {
                let code = CodeReward::new(of.clone())?;
                Box::new(move |sample: &Sample| code.reward(sample))
            }
            (None, PartRule::Custom { function, params }) => {
                let reward = self.registry.reward_of(function, params)?;
                Box::new(move |sample: &Sample| reward(sample).map(|output| output.reward))
            }
            (None, _) => bail!("a service scores whole groups"),
        };
        let must_end = self.plan.reward.require_end_of_text && rule.requires_end();
        Ok(Box::new(move |sample: &Sample| if has_ended(must_end, sample) { value(sample) } else { Ok(0.0) }))
    }

    fn scorer(&mut self, of: &ModelRule) -> Result<PartReward> {
        let loaded = ScoreModel::load(models::model_folder(&of.path)?)
            .with_context(|| format!("loading the reward model {}", of.path.display()))?;
        let scorer = Arc::new(Scorer::new(&loaded.computing(policy::compute(&self.plan.model)?), of.threads)?);
        self.models.push(scorer.clone());
        // Scores have no zero point, so a truncated completion gets a penalty instead of 0.
        let penalty = of.missing_end_penalty;
        Ok(Box::new(move |sample: &Sample| Ok(scorer.reward(sample)? - if has_ended(true, sample) { 0.0 } else { penalty })))
    }
}

fn has_ended(must_end: bool, sample: &Sample) -> bool {
    !must_end || sample.status == Status::Completed
}
