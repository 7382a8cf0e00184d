//! `rollflow eval`: an evaluation outside a run, whose answers a folder keeps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rollflow::data::Version;
use rollflow::engine::TokenEngine;
use rollflow::engine::remote::{Fleet, FleetConfig};
use rollflow::flow::Interrupts;
use rollflow::observe::StepMetrics;
use rollflow::observe::logs::{JsonLines, JudgedAnswer, read_lines};
use rollflow::prelude::Policy;
use rollflow::recipe::{self, Eval as Section, Plan, with_current_names};
use rollflow::rollout::Evaluation;
use rollflow::util::atomic_file;
use serde_json::{Value, json};

use super::out;
use super::plans::{RecipeArgs, load, load_of_run};
use super::policies::{model_folder, policy_by, saved};
use crate::assemble::engines::Engines;
use crate::assemble::evaluation::eval_spec;
use crate::assemble::models::run_of;
use crate::assemble::policy;
use crate::assemble::policy::Reader;
use crate::assemble::servers::Startup;
use crate::registry::Registry;
use crate::run::RECIPE;
use crate::run::python_files;
use crate::run::recipe_keys::flat;

/// File of the answers, one a line.
const ANSWERS: &str = "answers.jsonl";
/// Field of the identity with checksums of the data, of the models and of what judges.
const CONTENTS: &str = "contents";
/// File of the evaluation's identity and metrics.
const EVALUATION: &str = "evaluation.json";
/// Version of the evaluated weights on servers.
const VERSION: Version = 1;

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
    /// Evaluate in an environment: verifiers:NAME with its own tasks, openenv:URL, or FILE.py:CLASS;
    /// its grade is the reward. `--set environment.python=.venv/bin/python` names the interpreter.
    #[arg(long, value_name = "ENVIRONMENT")]
    environment: Option<String>,
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
    pub fn run(self, registry: &Registry) -> Result<()> {
        let is_run = self.what.join(RECIPE).exists();
        let environment = self.environment.as_deref().map(environment_sets).transpose()?;
        let sets: Vec<String> = environment.into_iter().flatten().chain(self.sets.iter().cloned()).collect();
        let plan = match is_run {
            true => self.plan_of_run(&sets, registry)?,
            false => load(&RecipeArgs { recipe: self.what.clone(), sets }, registry)?,
        };
        let (model, policy) = self.model(&plan, is_run)?;
        let name_of =
            |path: &Path| path.file_name().map_or_else(|| plan.name.clone(), |name| name.to_string_lossy().into_owned());
        // A checkpoint of another run has that run's name, too.
        let name = match run_of(&model).filter(|run| !is_run || *run != self.what) {
            Some(run) => format!("{}-{}", name_of(run), name_of(&model)),
            None => name_of(&model),
        };
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
        // Servers that take adapters were started with what is under them.
        let merges = plan.engine.is_remote() && !plan.syncs_adapters();
        let policy = &if merges { policy.merged() } else { policy };
        // From here on, so that servers that are started don't outlive it.
        let interrupts = plan.engine.is_remote().then(Interrupts::listen).transpose().context("listening for Ctrl-C")?;
        let progress = |judged: usize, of: usize| {
            show(judged, of);
            let why = "interrupted; its answers are kept, and a second call resumes it";
            ensure!(!interrupts.as_ref().is_some_and(Interrupts::pressed), "{}: {why}", folder.display());
            Ok(())
        };
        let evaluation = StandaloneEval { plan: &plan, registry, model: &model, out: &folder };
        let (rows, count, failed) = match &interrupts {
            None => {
                let engine = policy.engine(evaluation.eval().max_num_seqs, plan.seed);
                evaluation.run(engine, 0, &policy.into(), progress)?
            }
            Some(interrupts) => {
                let startup = Startup { report: &out::complain, interrupted: &|| interrupts.pressed() };
                let Some(engines) = Engines::begin(&plan, policy, &folder.join("engine"), startup)? else {
                    return Ok(());
                };
                engines.give(policy, VERSION)?;
                let slots = evaluation.eval().max_num_seqs;
                let config = FleetConfig { routes: None, log_probs: false, ..engines.fleet_config(policy.config()) };
                let mut fleet = Fleet::new(engines.handle(), config, policy.tokenizer(), slots, plan.seed);
                fleet.set_weights(VERSION, &());
                evaluation.run(fleet, VERSION, &engines.reader(policy), progress)?
            }
        };
        let answers = folder.join(ANSWERS);
        match self.json {
            true => out::line(&json!({"model": model, "answers": answers, "metrics": rows}).to_string())?,
            false => out::text(&format!("{}{count} answers: {}\n", table(&rows), answers.display()))?,
        }
        failed.map_or(Ok(()), |first| bail!("all {count} completions failed; the first: {first}"))
    }

    /// The run's plan under these overrides.
    fn plan_of_run(&self, sets: &[String], registry: &Registry) -> Result<Plan> {
        let mut plan = load_of_run(&self.what, sets, registry)?;
        let given = sets.iter().any(|set| set.trim_start().starts_with("eval"));
        // A number for servers would take as much memory here.
        if !given && !plan.engine.is_remote() && load_of_run(&self.what, &[], registry)?.engine.is_remote() {
            plan.eval.iter_mut().for_each(|eval| eval.max_num_seqs = Section::default().max_num_seqs);
        }
        Ok(plan)
    }

    fn model(&self, plan: &Plan, is_run: bool) -> Result<(PathBuf, Policy)> {
        let model = match (&self.model, is_run) {
            (Some(model), _) => model,
            (None, true) => &self.what,
            (None, false) => return Ok((PathBuf::from(&plan.name), policy::policy(plan)?)),
        };
        let own = is_run && self.model.is_none() && !self.sets.iter().any(|set| set.trim_start().starts_with("chat"));
        let chat = if own { saved(plan.chat.clone()) } else { plan.chat.clone() };
        Ok((model_folder(model)?, policy_by(&Plan { chat, ..plan.clone() }, model)?))
    }
}

/// The metrics, one a line, with the confidence intervals of accuracies.
fn table(rows: &StepMetrics) -> String {
    let interval = |name: &str| {
        let error =
            rows.get(&name.replace("_accuracy_ratio", "_accuracy_stderr_ratio")).filter(|_| name.ends_with("_accuracy_ratio"));
        error.map_or_else(String::new, |error| format!(" ± {:.4} (95 %)", 1.96 * error))
    };
    let shown = rows.iter().filter(|(name, _)| !name.contains("_stderr_"));
    shown.map(|(name, value)| format!("  {name:<28} {value:.4}{}\n", interval(name))).collect()
}

/// The keys that `--environment` stands for.
fn environment_sets(of: &str) -> Result<Vec<String>> {
    let table = |kind: &str, keys: &[(&str, &str)]| {
        let keys: String = keys.iter().map(|(key, value)| format!(",{key}={value:?}")).collect();
        format!("environment={{kind={kind:?}{keys}}}")
    };
    let tasks = "eval.task={kind=\"environment\"}".to_owned();
    let (environment, tasks) = match of.split_once(':') {
        Some(("verifiers", name)) => (table("verifiers", &[("name", name)]), Some(tasks)),
        Some(("openenv", url)) => (table("openenv", &[("url", url)]), None),
        _ => {
            let (file, class) = of
                .rsplit_once(':')
                .with_context(|| format!("{of:?} is no environment; write verifiers:NAME, openenv:URL or FILE.py:CLASS"))?;
            (table("python", &[("file", file), ("environment", class)]), None)
        }
    };
    Ok([environment, "reward={kind=\"environment\"}".to_owned()].into_iter().chain(tasks).collect())
}

/// Evaluation of a model by a recipe's `[eval]`. Answers that `out` holds of the same evaluation are
/// kept and not sampled again.
struct StandaloneEval<'a> {
    plan: &'a Plan,
    registry: &'a Registry,
    /// Folder of the model, by which the evaluation is identified.
    model: &'a Path,
    out: &'a Path,
}

impl StandaloneEval<'_> {
    /// Evaluates what `engine` samples; returns the metrics, the number of answers, and the first error if
    /// all of them are errors. `progress` gets the numbers of judged answers and of all answers; its error
    /// ends the evaluation.
    fn run<E: TokenEngine>(
        &self,
        mut engine: E,
        version: Version,
        reader: &Reader,
        mut progress: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<(StepMetrics, usize, Option<String>)> {
        let eval = self.eval();
        let spec = Arc::new(eval_spec(self.plan, &eval, self.registry, reader.config.max_positions)?);
        let identity = self.identity(&eval)?;
        let judged = self.judged(&identity)?;
        let mut evaluation = Evaluation::begin(&spec, &reader.tokenizer, &engine, version, judged);
        // Drops the answers to prompts that are sampled again.
        let mut answers = JsonLines::create(self.out.join(ANSWERS))?;
        evaluation.answers().iter().try_for_each(|answer| answers.write(answer))?;
        self.write(&identity, None)?;
        let each = eval.samples as usize + usize::from(eval.greedy);
        while !evaluation.is_done() {
            for judged in evaluation.advance(&mut engine)? {
                answers.write(&judged)?;
            }
            progress(evaluation.answers().len(), spec.prompts.len() * each)?;
        }
        let summary = evaluation.summary();
        self.write(&identity, Some(&summary))?;
        let errors: Option<Vec<&String>> = evaluation.answers().iter().map(|answer| answer.error.as_ref()).collect();
        let first = errors.and_then(|errors| errors.first().map(|first| first.to_string()));
        Ok((summary, evaluation.answers().len(), first))
    }

    fn eval(&self) -> Section {
        let by_default = || match self.plan.engine.is_remote() {
            true => Section { max_num_seqs: self.plan.most_in_flight(), ..Section::default() },
            false => Section::default(),
        };
        self.plan.eval.clone().unwrap_or_else(by_default)
    }

    /// Identity of the evaluation. Answers of evaluations with different identities are never mixed.
    fn identity(&self, eval: &Section) -> Result<Value> {
        let plan = Plan { eval: Some(eval.clone()), ..self.plan.clone() };
        let matters = |key: &str| {
            let section = key.split(['.', '[']).next().unwrap_or(key);
            let asks = ["chat", "task", "eval", "reward", "environment", "model", "lora"].contains(&section);
            (asks && !["model.device", "model.threads", "model.check_memory"].contains(&key)) || key == "generate.stop"
        };
        let mut asked = flat(&plan.to_toml())?;
        asked.retain(|key, _| matters(key));
        let weights = match self.model.is_dir() {
            true => recipe::folder_fingerprint(self.model).ok(),
            false => recipe::model_fingerprints(&plan).get("model.path").copied(),
        };
        let mut identity = json!({
            "model": std::fs::canonicalize(self.model).unwrap_or_else(|_| self.model.to_owned()),
            "weights": weights,
            "seed": plan.seed,
            "max_new_tokens": eval.max_new_tokens.unwrap_or(plan.generate.max_new_tokens),
            "asked": asked,
            CONTENTS: {
                "data": recipe::data_fingerprints(&plan),
                "models": recipe::model_fingerprints(&plan),
                "python": python_files::checksums(&plan),
            },
        });
        if plan.engine.is_remote() {
            identity["engine"] = plan.engine.kind().word().into();
        }
        Ok(identity)
    }

    /// Answers that an evaluation of the same identity left. What judged them is the same.
    fn judged(&self, identity: &Value) -> Result<Vec<JudgedAnswer>> {
        let path = self.out.join(EVALUATION);
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(Vec::new()) };
        let mut found: Value = serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?;
        if let Some(found) = found.as_object_mut() {
            found.remove("summary");
        }
        if !is_same(&found, identity) {
            bail!("{} holds an evaluation of something else; choose another folder with --out", self.out.display());
        }
        // Earlier versions noted no contents.
        if found.get(CONTENTS).is_some_and(|of| *of != identity[CONTENTS]) {
            out::complain("the data, the reward's files or its models have changed: everything is sampled and judged again");
            return Ok(Vec::new());
        }
        let answers = self.out.join(ANSWERS);
        // A line that was torn by the interruption is skipped.
        Ok(if answers.exists() { read_lines(answers)?.filter_map(Result::ok).collect() } else { Vec::new() })
    }

    fn write(&self, identity: &Value, summary: Option<&StepMetrics>) -> Result<()> {
        atomic_file::create_folder(self.out).with_context(|| format!("making {}", self.out.display()))?;
        let mut page = identity.clone();
        if let (Some(page), Some(summary)) = (page.as_object_mut(), summary) {
            page.insert("summary".to_owned(), json!(summary));
        }
        let path = self.out.join(EVALUATION);
        atomic_file::write(&path, format!("{page:#}\n")).with_context(|| format!("writing {}", path.display()))
    }
}

/// Returns true if both identities name one evaluation, whatever names their keys had at the time.
fn is_same(found: &Value, identity: &Value) -> bool {
    let asked = |identity: &Value| -> Option<BTreeMap<String, String>> {
        Some(with_current_names(serde_json::from_value(identity["asked"].clone()).ok()?))
    };
    let others = |identity: &Value| -> Option<Value> {
        let mut identity = identity.clone();
        identity.as_object_mut()?.retain(|key, _| !["asked", CONTENTS].contains(&&**key));
        Some(identity)
    };
    others(found) == others(identity) && asked(found).is_some_and(|found| Some(found) == asked(identity))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_is_continued_under_the_former_names_of_its_keys() {
        let of = |key: &str, slots: u64| json!({"seed": 1, "asked": {"eval.samples": "1", key: slots.to_string()}});
        assert!(is_same(&of("eval.slots", 64), &of("eval.max_num_seqs", 64)));
        assert!(!is_same(&of("eval.slots", 64), &of("eval.max_num_seqs", 32)));
        assert!(!is_same(&json!({"seed": 2, "asked": of("eval.slots", 64)["asked"]}), &of("eval.slots", 64)));
    }
}
