//! `[eval]`: the exam that a recipe describes, for the stage that holds it during a run and for `rollflow eval`, which goes on with what it
//! finds in its folder.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rollflow::data::{Prompt, Version};
use rollflow::engine::remote::{Fleet, Synced};
use rollflow::engine::{LocalEngine, SamplingParams, TokenEngine};
use rollflow::model::FrozenWeights;
use rollflow::observe::logs::{AnswerWriter, JudgedAnswer, read_answers};
use rollflow::prelude::{Flow, Metrics, Policy, Port, Trained, Trainer, TrainingBackend};
use rollflow::recipe::Plan;
use rollflow::recipe::eval::Eval;
use rollflow::recipe::task::{Task, TaskData};
use rollflow::rollout::{EvalSpec, EvalSummary, Evaluation};
use rollflow::stages::evaluate::{AnswerLog, Evaluator};
use rollflow::stages::sync::EvaluationHold;
use rollflow::util::atomic_file;
use serde_json::{Value, json};

use crate::assemble::conversations;
use crate::assemble::data;
use crate::assemble::engines::Engines;
use crate::assemble::environments;
use crate::assemble::policy::Reader;
use crate::assemble::rewards::Scoring;
use crate::registry::Registry;

/// The answers, a line each.
pub const ANSWERS: &str = "answers.jsonl";
/// What was asked, of whom, and what came of it.
pub const EVALUATION: &str = "evaluation.json";

/// What a model that reads at most `positions` tokens is asked.
pub fn eval_spec(plan: &Plan, eval: &Eval, registry: &Registry, positions: usize) -> Result<EvalSpec> {
    let mut prompts = prompts(eval.task.as_ref().unwrap_or(&plan.task), plan.seed)?;
    prompts.truncate(eval.limit.unwrap_or(usize::MAX));
    let chat = conversations::chat(plan);
    for prompt in &mut prompts {
        prompt.text = conversations::asked(&chat, std::mem::take(&mut prompt.text));
    }
    let (scoring, retries) = (Scoring::of(plan, registry)?, plan.reward.retries);
    Ok(EvalSpec {
        prompts,
        samples: eval.samples,
        sampling: SamplingParams {
            temperature: eval.temperature as f32,
            top_p: eval.top_p as f32,
            max_new_tokens: eval.max_new_tokens.unwrap_or(plan.generate.max_new_tokens),
            stop: plan.generate.stop.clone(),
            ..SamplingParams::default()
        },
        agent: environments::agent(plan, positions)?,
        greedy: eval.greedy,
        success: eval.success,
        judge: Arc::new(move |group| scoring.score(group, retries).map_err(Into::into)),
    })
}

fn prompts(task: &Task, seed: u64) -> Result<Vec<Prompt>> {
    Ok(match &task.data {
        TaskData::Arithmetic(task) => data::sums(task, seed).iter().map(Prompt::from).collect(),
        TaskData::Data(task) => data::all(&task.sources())?,
        TaskData::Rollouts(_) => bail!("rollouts that were recorded are answered already; name a task of its own in [eval.task]"),
    })
}

/// A trainer that publishes for evaluations alone.
pub fn published<B: TrainingBackend>(trainer: Trainer<B>, plan: &Plan) -> Trainer<B> {
    match plan.eval.as_ref().map(|eval| eval.every) {
        None | Some(0) => trainer.sync_every(u64::MAX),
        Some(every) => trainer.sync_every(every).sync_last(),
    }
}

/// Behind a trainer that nobody generates for: its steps, with what evaluations of its weights found, if the recipe has any. Each step is written
/// down when its own evaluation is done.
pub fn beside(
    flow: &mut Flow,
    plan: &Plan,
    registry: &Registry,
    policy: &Policy,
    trained: Port<Trained<FrozenWeights>>,
    (metrics, answers, after): (&Metrics, Option<AnswerLog>, u64),
) -> Result<Port<Trained<FrozenWeights>>> {
    Ok(match evaluator(plan, registry, policy)? {
        None => trained,
        Some(evaluator) => flow.stage("evaluate", trained, evaluator.in_order(true).after(after).metrics(metrics).log(answers)),
    })
}

/// The stage that evaluates during a run in this process, if the recipe has one.
pub fn evaluator(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<Option<Evaluator<LocalEngine>>> {
    let Some(eval) = during(plan) else { return Ok(None) };
    let spec = prepared(plan, eval, registry, &policy.into())?;
    Ok(Some(configured(Evaluator::local(policy, spec, eval.every), plan, eval)))
}

/// The stage that evaluates during a run on the servers that it trains with, which `hold` keeps at the version that is evaluated.
pub fn evaluator_of_servers(
    plan: &Plan,
    registry: &Registry,
    policy: &Policy,
    (engines, hold): (&Engines, &EvaluationHold),
) -> Result<Option<Evaluator<Fleet, FrozenWeights>>> {
    let Some(eval) = during(plan) else { return Ok(None) };
    let spec = prepared(plan, eval, registry, &engines.reader(policy))?;
    let (handle, config) = (engines.handle(), engines.fleet_config(plan, policy));
    Ok(Some(configured(Evaluator::remote(handle, config, policy.tokenizer(), spec, eval.every, hold), plan, eval)))
}

/// What servers are kept at one version for: the steps that [`evaluator_of_servers`] evaluates.
pub fn hold(plan: &Plan) -> Option<EvaluationHold> {
    let (every, last) = (during(plan)?.every, plan.steps());
    Some(EvaluationHold::new(move |step| step.is_multiple_of(every) || step == last))
}

fn during(plan: &Plan) -> Option<&Eval> {
    plan.eval.as_ref().filter(|eval| eval.every > 0)
}

fn prepared(plan: &Plan, eval: &Eval, registry: &Registry, reader: &Reader) -> Result<EvalSpec> {
    eval_spec(plan, eval, registry, reader.config.max_positions).context("preparing the evaluation")
}

fn configured<E: TokenEngine, W: Send + Sync + 'static>(of: Evaluator<E, W>, plan: &Plan, eval: &Eval) -> Evaluator<E, W> {
    of.slots(eval.max_num_seqs).threads(eval.threads).seed(plan.seed).last(plan.steps()).in_order(plan.flow.max_staleness == 0)
}

/// Evaluates a model. What `out` holds of the same evaluation is not asked again; `see` is shown every answer as it is judged, and
/// may end it.
pub fn evaluate(
    plan: &Plan,
    registry: &Registry,
    (model, policy): (&Path, &Policy),
    out: &Path,
    see: impl FnMut(usize, usize) -> Result<()>,
) -> Result<EvalSummary> {
    let eval = plan.eval.clone().unwrap_or_default();
    ask(plan, registry, (model, &policy.into()), out, (policy.engine(eval.max_num_seqs, plan.seed), 0), see)
}

/// The same by servers: they are given the model, verified, and asked.
pub fn evaluate_by_servers(
    plan: &Plan,
    registry: &Registry,
    (model, policy): (&Path, &Policy),
    out: &Path,
    engines: &Engines,
    see: impl FnMut(usize, usize) -> Result<()>,
) -> Result<EvalSummary> {
    const VERSION: Version = 1;
    let eval = plan.eval.clone().unwrap_or_default();
    engines.give(plan, policy, VERSION)?;
    let config = engines.fleet_config(plan, policy);
    let mut fleet = Fleet::new(engines.handle(), config, policy.tokenizer(), eval.max_num_seqs, plan.seed);
    fleet.set_weights(VERSION, &Synced { version: VERSION });
    ask(plan, registry, (model, &engines.reader(policy)), out, (fleet, VERSION), see)
}

fn ask<E: TokenEngine>(
    plan: &Plan,
    registry: &Registry,
    (model, reader): (&Path, &Reader),
    out: &Path,
    (mut engine, version): (E, Version),
    mut see: impl FnMut(usize, usize) -> Result<()>,
) -> Result<EvalSummary> {
    let eval = plan.eval.clone().unwrap_or_default();
    let spec = Arc::new(eval_spec(plan, &eval, registry, reader.config.max_positions)?);
    let asked = asked(plan, &eval, model);
    let answered = go_on(out, &asked)?;
    let mut evaluation = Evaluation::begin(&spec, &reader.tokenizer, &engine, version, answered);
    // Without those of prompts that are asked again.
    let mut answers = AnswerWriter::create(out.join(ANSWERS), evaluation.answers())?;
    write_evaluation(out, &asked, None)?;
    let each = eval.samples as usize + usize::from(eval.greedy);
    while !evaluation.is_done() {
        for judged in evaluation.advance(&mut engine)? {
            answers.write(&judged)?;
        }
        see(evaluation.answers().len(), spec.prompts.len() * each)?;
    }
    let summary = evaluation.summary();
    write_evaluation(out, &asked, Some(&summary))?;
    Ok(summary)
}

/// What identifies an evaluation: answers to anything else are not mixed with its own.
fn asked(plan: &Plan, eval: &Eval, model: &Path) -> Value {
    let plan = Plan { eval: Some(eval.clone()), ..plan.clone() };
    let text = plan.to_toml();
    let matters = |section: &&str| {
        ["[chat]", "[task]", "[eval]", "[reward]", "[environment]"].iter().any(|head| section.trim_start().starts_with(head))
    };
    let about: Vec<&str> = text.split("\n\n").filter(matters).collect();
    let model = std::fs::canonicalize(model).unwrap_or_else(|_| model.to_owned());
    let mut asked = json!({
        "model": model,
        "seed": plan.seed,
        "max_new_tokens": eval.max_new_tokens.unwrap_or(plan.generate.max_new_tokens),
        "asked": about.join("\n\n"),
    });
    if plan.engine.is_remote() {
        asked["engine"] = plan.engine.kind().word().into();
    }
    asked
}

/// The answers that an interrupted evaluation of the same left there.
fn go_on(out: &Path, asked: &Value) -> Result<Vec<JudgedAnswer>> {
    let known = out.join(EVALUATION);
    let Ok(text) = std::fs::read_to_string(&known) else { return Ok(Vec::new()) };
    let mut found: Value = serde_json::from_str(&text).with_context(|| format!("reading {}", known.display()))?;
    if let Some(found) = found.as_object_mut() {
        found.remove("summary");
    }
    if found != *asked {
        bail!("{} holds an evaluation of something else; choose another folder with --out", out.display());
    }
    match out.join(ANSWERS) {
        // A line that was torn when it was interrupted is asked again.
        path if path.exists() => Ok(read_answers(path)?.filter_map(Result::ok).collect()),
        _ => Ok(Vec::new()),
    }
}

fn write_evaluation(out: &Path, asked: &Value, summary: Option<&EvalSummary>) -> Result<()> {
    atomic_file::create_folder(out).with_context(|| format!("making {}", out.display()))?;
    let mut page = asked.clone();
    if let (Some(page), Some(summary)) = (page.as_object_mut(), summary) {
        page.insert("summary".to_owned(), json!(summary.row()));
    }
    let path = out.join(EVALUATION);
    atomic_file::write(&path, format!("{page:#}\n")).with_context(|| format!("writing {}", path.display()))
}
