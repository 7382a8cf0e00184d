//! `[reward]` as a function of samples.

use std::sync::Arc;

use anyhow::{Context, Result};
use regex::Regex;
use rollflow::algo::rewards::{
    Aggregator, Earned, Earnings, Parts, exact_match, format, keywords, length, math, numeric_match, overlong, repetition,
};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::recipe::reward::{Combine, Composition, PartRule};
use rollflow::stages::reward::Scorer;

/// A reward of whole samples.
type Rule = Box<dyn Fn(&Sample) -> Result<Earnings, String> + Send + Sync>;
/// One value of theirs.
type Value = Box<dyn Fn(&Sample) -> Result<f64, String> + Send + Sync>;

/// Reward models, which may be shown groups before their answers are scored.
type Asked = Vec<Arc<Scorer>>;

/// What an answer earns, and the reward models that it asks. An answer that must be compared with a ground truth that its prompt lacks cannot
/// be judged.
pub fn earned(plan: &Plan) -> Result<(Rule, Asked)> {
    let mut asked = Asked::new();
    let rule: Rule = match plan.reward.rule.alone() {
        Ok(rule) => {
            let value = value(plan, &rule, &mut asked)?;
            Box::new(move |sample: &Sample| value(sample).earned())
        }
        Err(of) => {
            let parts = parts(plan, of, &mut asked)?;
            Box::new(move |sample: &Sample| parts.earn(sample))
        }
    };
    Ok((rule, asked))
}

fn parts(plan: &Plan, of: &Composition, asked: &mut Asked) -> Result<Parts> {
    let combined = match of.combine {
        Combine::Sum => Aggregator::Weighted(of.part.iter().map(|part| part.weight).collect()),
        Combine::Min => Aggregator::Min,
        Combine::Product => Aggregator::Product,
        Combine::Lexicographic => Aggregator::Lexicographic { levels: of.levels },
    };
    let at_least: Vec<Option<f64>> = of.part.iter().map(|part| part.at_least).collect();
    let gated = at_least.iter().any(Option::is_some);
    let aggregator = if gated { Aggregator::Gated { at_least, then: Box::new(combined) } } else { combined };
    of.part.iter().try_fold(Parts::new(aggregator), |parts, part| Ok(parts.part(&part.name, value(plan, &part.rule, asked)?)))
}

fn value(plan: &Plan, rule: &PartRule, asked: &mut Asked) -> Result<Value> {
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
            let model = ScoreModel::load(&of.path).with_context(|| format!("loading the reward model {}", of.path.display()))?;
            let scorer = Arc::new(Scorer::new(&model, of.threads)?);
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
    })
}

/// A value of what the answer says, which is 0 where the answer had to end by itself and did not.
fn said(must_end: bool, value: impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static) -> Value {
    Box::new(move |sample| if must_end && sample.status != Status::Completed { Ok(0.0) } else { value(sample) })
}

/// A value of its tokens, however it ended.
fn counted(value: impl Fn(&Sample) -> f64 + Send + Sync + 'static) -> Value {
    Box::new(move |sample| Ok(value(sample)))
}

fn truth(sample: &Sample) -> Result<&str, String> {
    sample.answer().ok_or_else(|| "the prompt has no ground truth, metadata[\"answer\"]".to_owned())
}
