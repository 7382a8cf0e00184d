//! `[reward]`: what answers earn, computed here or by other processes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use regex::Regex;
use rollflow::algo::rewards::{
    Aggregator, Earned, Earnings, Parts, exact_match, format, keywords, length, math, numeric_match, overlong, repetition,
};
use rollflow::data::number;
use rollflow::observe::logs::{DeadLetterWriter, Failure};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::recipe::net::Net;
use rollflow::recipe::reward::{CodeRule, Combine, Composition, PartRule, SandboxRule};
use rollflow::sandbox::{Limits, Program, Sandbox, SandboxConfig};
use rollflow::stages::reward::service::{Judge as Grader, JudgeConfig, Service, ServiceConfig};
use rollflow::stages::reward::{CodeReward, OnLostSample, Scorer, Scorers, Served, ServedReward, score};
use tracing::info;

use crate::assemble::models;
use crate::assemble::policy;
use crate::assemble::secrets;
use crate::registry::Registry;

/// A reward of whole samples.
type Rule = Box<dyn Fn(&Sample) -> Result<Earnings, String> + Send + Sync>;
/// One value of theirs.
type Value = Box<dyn Fn(&Sample) -> Result<f64, String> + Send + Sync>;

/// Reward models.
type Asked = Vec<Arc<Scorer>>;

/// How answers are scored. One that must be compared with a ground truth that its prompt lacks cannot be judged.
pub enum Scoring {
    /// By this process.
    Here {
        /// What an answer earns.
        rule: Rule,
        /// Reward models that it asks, which may be shown groups before their answers are scored.
        asked: Asked,
    },
    /// By services, some parts perhaps by this process.
    Served {
        /// What they answer, and what is made of it.
        served: Arc<Served>,
        /// Most groups that they are asked for at the same time.
        concurrency: usize,
    },
}

impl Scoring {
    /// As `[reward]` says.
    pub fn of(plan: &Plan, registry: &Registry) -> Result<Self> {
        let mut asked = Asked::new();
        Ok(match plan.reward.rule.alone() {
            Ok(rule) if rule.served().is_some() => {
                let served = Served::by(service(&rule, &plan.net)?).retries(plan.reward.retries);
                Scoring::Served { served: Arc::new(served), concurrency: rule.served().map_or(1, |of| of.concurrency) }
            }
            // With its parts, if it has some.
            Ok(PartRule::Custom(of)) => {
                let (reward, must_end) = (registry.reward_of(&of.function, &of.params)?, plan.reward.require_end_of_text);
                Scoring::Here {
                    rule: Box::new(move |sample| if ended(must_end, sample) { reward(sample) } else { 0.0.earned() }),
                    asked,
                }
            }
            Ok(rule) => {
                let value = value(plan, registry, &rule, &mut asked)?;
                Scoring::Here { rule: Box::new(move |sample: &Sample| value(sample).earned()), asked }
            }
            Err(of) => {
                let parts = parts(plan, registry, of, &mut asked)?;
                let served = || of.part.iter().filter_map(|part| Some((part, part.rule.served()?)));
                match served().map(|(_, rule)| rule.concurrency).min() {
                    None => Scoring::Here { rule: Box::new(move |sample: &Sample| parts.earn(sample)), asked },
                    Some(concurrency) => {
                        let services: Vec<(String, Service)> = served()
                            .map(|(part, _)| Ok((part.name.clone(), service(&part.rule, &plan.net)?)))
                            .collect::<Result<_>>()?;
                        let served = Served::parts(parts, services).retries(plan.reward.retries);
                        Scoring::Served { served: Arc::new(served), concurrency }
                    }
                }
            }
        })
    }

    /// One group by itself: with its rewards, and those of its samples that have none.
    pub fn score(&self, mut group: Group, retries: u32) -> Result<(Group, Vec<Failure>)> {
        Ok(match self {
            Scoring::Here { rule, asked } => {
                asked.iter().for_each(|scorer| scorer.announce(&group));
                let failures = score(&mut group, rule, retries, Scorers::Threads).failures;
                (group, failures)
            }
            Scoring::Served { served, .. } => {
                let (group, scoring) = served.score_now(group)?;
                (group, scoring.failures)
            }
        })
    }

    /// The stage that scores.
    pub fn judge(self, plan: &Plan) -> Judge {
        match self {
            Scoring::Here { rule, asked } => Judge::Here(
                Reward::each(rule)
                    .ahead(move |group| asked.iter().for_each(|scorer| scorer.announce(group)))
                    .threads(plan.reward.rule.threads())
                    .retries(plan.reward.retries),
            ),
            Scoring::Served { served, concurrency } => Judge::Served(ServedReward::new(served).concurrency(concurrency)),
        }
    }
}

/// A stage that scores.
pub enum Judge {
    /// By this process.
    Here(Reward),
    /// By services.
    Served(ServedReward),
}

impl Judge {
    /// What to do when no retry helps.
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        match self {
            Judge::Here(reward) => Judge::Here(reward.on_failure(on_failure)),
            Judge::Served(reward) => Judge::Served(reward.on_failure(on_failure)),
        }
    }

    /// What becomes of a group that lost samples.
    pub fn on_lost_sample(self, on_lost_sample: OnLostSample) -> Self {
        match self {
            Judge::Here(reward) => Judge::Here(reward.on_lost_sample(on_lost_sample)),
            Judge::Served(reward) => Judge::Served(reward.on_lost_sample(on_lost_sample)),
        }
    }

    /// Most groups in a row that may fail.
    pub fn max_poisoned(self, groups: u64) -> Self {
        match self {
            Judge::Here(reward) => Judge::Here(reward.max_poisoned(groups)),
            Judge::Served(reward) => Judge::Served(reward.max_poisoned(groups)),
        }
    }

    /// Puts the stage on the graph, after `groups`.
    pub fn stage(self, flow: &mut Flow, name: &str, groups: Port<Group>, letters: Option<DeadLetterWriter>) -> Port<Scored> {
        match (self, letters) {
            (Judge::Here(reward), None) => flow.stage(name, groups, reward),
            (Judge::Here(reward), Some(letters)) => flow.stage(name, groups, reward.dead_letters(letters)),
            (Judge::Served(reward), None) => flow.stage(name, groups, reward),
            (Judge::Served(reward), Some(letters)) => flow.stage(name, groups, reward.dead_letters(letters)),
        }
    }
}

/// What is asked for by `rule`, which is served.
fn service(rule: &PartRule, net: &Net) -> Result<Service> {
    let of = rule.served().context("this reward is computed here")?;
    let service = Service::new(ServiceConfig {
        endpoint: secrets::endpoint(&of.url, of.token_env.as_ref(), net)?,
        timeout: Duration::try_from_secs_f64(of.timeout)?,
        // The reward stage counts the attempts.
        retry: of.retry.policy(0)?,
    })?;
    Ok(match rule {
        PartRule::Judge(of) => service.judge(Grader::new(JudgeConfig {
            model: of.model.clone(),
            prompt: of.prompt.clone(),
            score: of.score.clone(),
            scale: of.scale,
            max_tokens: of.max_tokens,
            cache: of.cache.clone(),
        })?),
        _ => service,
    })
}

fn parts(plan: &Plan, registry: &Registry, of: &Composition, asked: &mut Asked) -> Result<Parts> {
    let combined = match of.combine {
        Combine::Sum => Aggregator::Weighted(of.part.iter().map(|part| part.weight).collect()),
        Combine::Min => Aggregator::Min,
        Combine::Product => Aggregator::Product,
        Combine::Lexicographic => Aggregator::Lexicographic { levels: of.levels },
        Combine::Custom => registry.aggregator_of(of)?,
    };
    let at_least: Vec<Option<f64>> = of.part.iter().map(|part| part.at_least).collect();
    let gated = at_least.iter().any(Option::is_some);
    let aggregator = if gated { Aggregator::Gated { at_least, then: Box::new(combined) } } else { combined };
    of.part.iter().try_fold(Parts::new(aggregator), |parts, part| {
        Ok(match &part.rule {
            rule if rule.served().is_some() => parts.given(&part.name),
            rule => parts.part(&part.name, value(plan, registry, rule, asked)?),
        })
    })
}

fn value(plan: &Plan, registry: &Registry, rule: &PartRule, asked: &mut Asked) -> Result<Value> {
    let must_end = plan.reward.require_end_of_text;
    Ok(match rule {
        PartRule::Exact(_) => said(must_end, |sample| Ok(exact_match(&sample.response, truth(sample)?))),
        PartRule::Numeric(numeric) => {
            let tolerance = numeric.tolerance;
            said(must_end, move |sample| Ok(numeric_match(&sample.response, truth(sample)?, tolerance)))
        }
        PartRule::Regex(regex) => {
            let pattern = Regex::new(&regex.pattern)?;
            said(must_end, move |sample| match pattern.captures(&sample.response).map(|found| found.get(1)) {
                Some(Some(group)) => Ok(f64::from(group.as_str() == truth(sample)?)),
                found => Ok(f64::from(found.is_some())),
            })
        }
        PartRule::Math(_) => {
            let math = math();
            said(must_end, move |sample| math(sample).map_err(str::to_owned))
        }
        PartRule::Model(of) => {
            let model = ScoreModel::load(models::model_folder(&of.path)?)
                .with_context(|| format!("loading the reward model {}", of.path.display()))?;
            let scorer = Arc::new(Scorer::new(&model.computing(policy::compute(plan)?), of.threads)?);
            asked.push(scorer.clone());
            // Scores are told apart by their differences: 0 may be the best of all, and is no answer to one that was cut off.
            let penalty = of.missing_end_penalty;
            Box::new(move |sample| Ok(scorer.reward(sample)? - if sample.status == Status::Completed { 0.0 } else { penalty }))
        }
        PartRule::Format(of) => {
            let format = format(of.tags.iter().cloned())?;
            said(must_end, move |sample| Ok(format(sample)))
        }
        PartRule::Keywords(of) => {
            let keywords = keywords(of.words.iter().cloned())?;
            said(must_end, move |sample| Ok(keywords(sample)))
        }
        PartRule::Length(of) => counted(length(of.min, of.max)?),
        PartRule::Overlong(of) => counted(overlong(plan.generate.max_new_tokens, of.buffer)?),
        PartRule::Repetition(of) => counted(repetition(of.n)?),
        PartRule::Environment(_) => Box::new(graded),
        PartRule::Code(of) => {
            let code = code(of)?;
            said(must_end, move |sample| code.reward(sample))
        }
        PartRule::Http(_) | PartRule::Judge(_) => bail!("a service answers for groups, and no closure for it"),
        PartRule::Custom(of) => {
            let reward = registry.reward_of(&of.function, &of.params)?;
            said(must_end, move |sample| reward(sample).map(|earned| earned.reward))
        }
    })
}

/// Tests in a sandbox.
fn code(of: &CodeRule) -> Result<CodeReward> {
    Ok(CodeReward::new(sandbox(&of.sandbox)?).score(of.score).tests(&of.sandbox.tests).template(&of.template))
}

/// Where code runs. It is tried out here: a machine without walls refuses before anything is sampled.
pub fn sandbox(of: &SandboxRule) -> Result<Sandbox> {
    let config = SandboxConfig::new(Program::python(&of.python)?);
    let wall = Duration::try_from_secs_f64(of.timeout)?;
    let (memory, processes) = ((of.memory as u64) << 20, u32::try_from(of.processes).unwrap_or(u32::MAX));
    let limits = Limits { wall, cpu: wall, memory, processes, ..config.limits };
    let sandbox = Sandbox::new(SandboxConfig { limits, unsandboxed: of.unsandboxed, ..config })?;
    info!("Code runs behind {}", sandbox.isolation());
    Ok(sandbox)
}

/// A value of what the answer says, which is 0 where the answer had to end by itself and did not.
fn said(must_end: bool, value: impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static) -> Value {
    Box::new(move |sample| if ended(must_end, sample) { value(sample) } else { Ok(0.0) })
}

/// What the environment said of a whole rollout, however it ended.
fn graded(sample: &Sample) -> Result<f64, String> {
    let said = |key: &str| sample.metadata.get(key);
    said("environment_reward").and_then(number::from_json).ok_or_else(|| {
        let why = said("environment_failure").and_then(serde_json::Value::as_str).unwrap_or("it has not seen this sample");
        format!("the environment gave no grade: {why}")
    })
}

fn ended(must_end: bool, sample: &Sample) -> bool {
    !must_end || sample.status == Status::Completed
}

/// A value of its tokens, however it ended.
fn counted(value: impl Fn(&Sample) -> f64 + Send + Sync + 'static) -> Value {
    Box::new(move |sample| Ok(value(sample)))
}

fn truth(sample: &Sample) -> Result<&str, String> {
    sample.answer().ok_or_else(|| "the prompt has no ground truth, metadata[\"answer\"]".to_owned())
}

/// The stage that scores.
pub fn reward(plan: &Plan, registry: &Registry) -> Result<Judge> {
    let judge = Scoring::of(plan, registry)?.judge(plan);
    let judge = judge.on_failure(plan.reward.on_failure).on_lost_sample(plan.flow.on_lost_sample);
    Ok(judge.max_poisoned(plan.reward.max_poisoned))
}
