//! Findings about a run: what looks unhealthy in its recorded numbers.
//!
//! A [`Check`] is a pure function of the [`Evidence`], and a row of one of three tables: [`curves`]
//! reads `metrics.jsonl`, [`samples`] the newest groups of `rollouts.jsonl`, [`flow`] the record.
//! Thresholds are constants with their reasons. `docs/how_to/reading_a_run.md` has a section for
//! each check.

mod curves;
mod flow;
pub(crate) mod forecast;
pub(crate) mod plots;
mod samples;
mod series;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use rollflow::algo::{Level, LossChoice};
use rollflow::observe::StageShares;
use rollflow::observe::logs::{TIMINGS, metrics_rows};
use rollflow::recipe::{self, Pipeline, Plan};
use rollflow::util::untrusted;
use serde::Serialize;

pub(crate) use flow::setting_of;
use samples::Group;

use crate::run::RECIPE;
use crate::run::record::{Record, State};

/// Speed in a row of `timings.jsonl`.
const SPEED: &str = "trained_tokens_per_second";

/// The page that explains the findings.
const PAGE: &str = "docs/how_to/reading_a_run.md";

/// A check of a run.
struct Check {
    /// Name, which is also the heading of its section.
    name: &'static str,
    /// Returns the figure and its threshold if the run looks unhealthy.
    find: fn(&Evidence) -> Option<String>,
    /// Advice. Keys of `train` are those of the section that trains.
    advice: &'static str,
}

/// Something in a run that looks unhealthy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Finding {
    /// Name of the check.
    pub check: &'static str,
    /// Figure, and the threshold that it passed.
    pub figure: String,
    /// Advice.
    pub advice: String,
    /// Section of the documents that explains it.
    pub page: String,
}

/// Recorded numbers of a run that checks read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    settings: Settings,
    /// Values of each metric in the order of steps.
    columns: BTreeMap<String, Vec<f64>>,
    /// The newest recorded groups.
    groups: Vec<Group>,
    /// Stage times of the last process; none while the run is in progress.
    stages: Vec<StageShares>,
    /// Generated tokens by fate; none while the run is in progress, and of a process that was killed.
    tokens: Vec<(String, f64)>,
    /// Reason why the run ended early.
    failure: Option<String>,
}

/// Settings of the recipe that thresholds depend on.
#[derive(Clone, Debug, Default)]
struct Settings {
    /// `generate.max_new_tokens`, if it bounds a whole completion: not with an environment.
    max_new_tokens: Option<f64>,
    /// Gap between generator and trainer from which on the run warns, in nats.
    gap_warn: f64,
    /// `flow.max_staleness`, in versions.
    max_staleness: f64,
    /// `batch.groups`.
    groups: f64,
    /// If true, the trained policy samples what it learns from, and rewards follow it.
    samples: bool,
    /// If true, the loss clips ratios of single tokens.
    clips_tokens: bool,
    /// Section that configures the training, with its dot, if it is not `train.`.
    section: Option<&'static str>,
}

impl Settings {
    fn of(plan: &Plan) -> Self {
        let [gap_warn, _] = plan.train.gap_limits(plan.model.precision());
        Settings {
            max_new_tokens: plan.environment.is_none().then_some(plan.generate.max_new_tokens as f64),
            gap_warn,
            max_staleness: plan.flow.max_staleness as f64,
            groups: plan.batch.groups as f64,
            samples: plan.pipeline.reinforces(),
            clips_tokens: match &plan.train.loss {
                LossChoice::Grpo(of) => of.level == Level::Token,
                LossChoice::Dapo(_) | LossChoice::ClipCov(_) => true,
                _ => false,
            },
            section: match plan.pipeline {
                Pipeline::Sft => Some("sft."),
                Pipeline::RewardModel => Some("reward_model."),
                _ => None,
            },
        }
    }
}

impl Evidence {
    /// Reads what the run in `folder` recorded so far.
    pub fn read(folder: &Path, record: &Record) -> Result<Self> {
        let path = folder.join(RECIPE);
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let plan = recipe::parse(&path.display().to_string(), &text, &[]).with_context(|| "the run's recipe cannot be read")?;
        let mut columns = BTreeMap::<String, Vec<f64>>::new();
        let metrics = folder.join("metrics.jsonl");
        if metrics.exists() {
            for row in metrics_rows(metrics)? {
                row?.1.into_iter().for_each(|(name, value)| columns.entry(name).or_default().push(value));
            }
        }
        // Speed is only drawn.
        let timings = folder.join(TIMINGS);
        if timings.exists() {
            for row in metrics_rows(timings)? {
                let speed = row?.1.remove(SPEED);
                columns.entry(SPEED.to_owned()).or_default().extend(speed);
            }
        }
        let error = record.sessions.last().and_then(|session| session.error.clone());
        let failure = match record.state {
            State::Failed => Some(error.unwrap_or_else(|| "no reason was recorded".to_owned())),
            State::Died => Some("its process ended without notice".to_owned()),
            _ => None,
        };
        Ok(Evidence {
            settings: Settings::of(&plan),
            columns,
            groups: samples::newest(&folder.join("rollouts.jsonl"))?,
            stages: record.drawn.stages.clone(),
            tokens: record.drawn.tokens.clone(),
            failure: failure.map(|failure| untrusted::line(&failure)),
        })
    }

    /// All that looks unhealthy.
    pub fn findings(&self) -> Vec<Finding> {
        let found = |check: &Check| {
            let page = format!("{PAGE}#{}", check.name);
            let advice = || check.advice.replace("train.", self.settings.section.unwrap_or("train."));
            (check.find)(self).map(|figure| Finding { check: check.name, figure, advice: advice(), page })
        };
        checks().filter_map(found).collect()
    }

    /// Finite values of a metric in the order of steps; none if the run does not have it.
    fn series(&self, name: &str) -> Vec<f64> {
        self.columns.get(name).into_iter().flatten().copied().filter(|value| value.is_finite()).collect()
    }
}

fn checks() -> impl Iterator<Item = &'static Check> {
    flow::CHECKS.iter().chain(curves::CHECKS).chain(samples::CHECKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_has_its_section_of_the_page_and_no_section_lacks_a_check() {
        let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE)).unwrap();
        let mut sections: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`')).collect();
        let mut names: Vec<&str> = checks().map(|check| check.name).collect();
        sections.sort_unstable();
        names.sort_unstable();
        assert_eq!(sections, names);
    }

    #[test]
    fn a_run_without_numbers_has_no_finding() {
        assert_eq!(Evidence::default().findings(), []);
    }
}
