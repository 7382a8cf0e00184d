//! `rollflow eval`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use rollflow::observe::StepMetrics;
use rollflow::prelude::Policy;
use rollflow::recipe::Plan;
use serde_json::json;

use super::engine::Ending;
use super::plans::{RecipeArgs, load, load_of_run};
use super::policies::{model_folder, policy_of};
use super::standalone_eval::{ANSWERS, StandaloneEval};
use super::{REFUSED, out};
use crate::assemble::engines::Engines;
use crate::assemble::policy;
use crate::assemble::servers::Startup;
use crate::registry::Registry;
use crate::run::files::RECIPE;

/// Sample a model on the prompts of a recipe's [eval] and judge its completions: pass@k, greedy and
/// sampled accuracy, reward.
///
/// Completions are written as they are judged, and a second call resumes an interrupted evaluation.
/// With [engine] the recipe's servers load the model's weights, which are verified, and generate.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow eval runs/mine --set eval.samples=16\n\
\x20 rollflow eval pipelines/recipes/gsm8k.toml --model models/qwen2.5-0.5b-instruct --json")]
pub struct Eval {
    /// A recipe, or the folder of a run, whose newest checkpoint is asked by its recipe.
    what: PathBuf,
    /// Model to evaluate: a Hugging Face folder, a checkpoint or a run. Left out: the recipe's
    /// model, or the run's newest checkpoint.
    #[arg(long, value_name = "MODEL|RUN")]
    model: Option<PathBuf>,
    /// Override a key, as in eval.samples=16; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// Folder of the results. Left out: in the run's folder, or below `runs/`.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Eval {
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        let is_run = self.what.join(RECIPE).exists();
        let plan = match is_run {
            true => load_of_run(&self.what, &self.sets, registry),
            false => load(&RecipeArgs { recipe: self.what.clone(), sets: self.sets.clone() }, registry),
        };
        let Some(plan) = plan else { return Ok(ExitCode::from(REFUSED)) };
        let (model, policy) = self.model(&plan, is_run)?;
        let name = model.file_name().map_or_else(|| plan.name.clone(), |name| name.to_string_lossy().into_owned());
        let folder = self.out.clone().unwrap_or_else(|| match is_run {
            true => self.what.join("evals").join(&name),
            false => PathBuf::from("runs").join(format!("{}-eval-{name}", plan.name)),
        });
        let shows = !self.json && std::io::IsTerminal::is_terminal(&std::io::stderr());
        let mut shown = 0;
        let mut show = |judged: usize, of: usize| {
            if shows && (judged * 50 / of.max(1) > shown || judged == of) {
                shown = judged * 50 / of.max(1);
                eprint!("\r{judged} of {of} answers{}", if judged == of { "\n" } else { "" });
            }
        };
        let evaluation = |policy| StandaloneEval { plan: &plan, registry, model: &model, policy, out: &folder };
        let (rows, count) = match plan.engine.is_remote() {
            false => evaluation(&policy).run(|judged, of| {
                show(judged, of);
                Ok(())
            })?,
            true => {
                // Servers that take adapters were started with what is under them.
                let policy = if plan.syncs_adapters() { policy } else { policy.merged() };
                // From here on, so that servers that are started don't outlive it.
                let ending = Ending::listen().context("listening for Ctrl-C")?;
                let startup = Startup { report: &out::complain, interrupted: &|| ending.came() };
                let Some(engines) = Engines::begin(&plan, &policy, &folder.join("engine"), startup)? else {
                    return Ok(ExitCode::SUCCESS);
                };
                evaluation(&policy).run_on_servers(&engines, |judged, of| {
                    show(judged, of);
                    ensure!(!ending.came(), "interrupted; what is answered is in {}: call it again to go on", folder.display());
                    Ok(())
                })?
            }
        };
        let answers = folder.join(ANSWERS);
        if self.json {
            out::line(&json!({"model": model, "answers": answers, "metrics": rows}).to_string())?;
        } else {
            out::text(&format!("{}{} answers: {}\n", table(&rows), count, answers.display()))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn model(&self, plan: &Plan, is_run: bool) -> Result<(PathBuf, Policy)> {
        Ok(match (&self.model, is_run) {
            (Some(model), _) => (model_folder(model)?, policy_of(model, policy::compute(&plan.model)?)?),
            (None, true) => (model_folder(&self.what)?, policy_of(&self.what, policy::compute(&plan.model)?)?),
            (None, false) => (PathBuf::from(&plan.name), policy::policy(plan)?),
        })
    }
}

fn table(rows: &StepMetrics) -> String {
    rows.iter().map(|(name, value)| format!("  {name:<28} {value:.4}\n")).collect()
}
