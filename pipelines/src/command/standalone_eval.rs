//! `rollflow eval`: an evaluation outside a run, whose answers a folder keeps.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rollflow::data::Version;
use rollflow::engine::TokenEngine;
use rollflow::engine::remote::Fleet;
use rollflow::observe::StepMetrics;
use rollflow::observe::logs::{JsonLines, JudgedAnswer, read_lines};
use rollflow::prelude::Policy;
use rollflow::recipe::Plan;
use rollflow::recipe::eval::Eval;
use rollflow::rollout::Evaluation;
use rollflow::util::atomic_file;
use serde_json::{Value, json};

use crate::assemble::engines::Engines;
use crate::assemble::evaluation::eval_spec;
use crate::assemble::policy::Reader;
use crate::registry::Registry;
use crate::run::recipe_keys::flat;

/// File of the answers, one a line.
pub const ANSWERS: &str = "answers.jsonl";
/// File of the evaluation's identity and metrics.
const EVALUATION: &str = "evaluation.json";

/// Evaluation of a model by a recipe's `[eval]`. Answers that `out` holds of the same evaluation are
/// kept and not sampled again.
pub struct StandaloneEval<'a> {
    pub plan: &'a Plan,
    pub registry: &'a Registry,
    /// Folder of the model, by which the evaluation is identified.
    pub model: &'a Path,
    pub policy: &'a Policy,
    /// Folder of the answers.
    pub out: &'a Path,
}

impl StandaloneEval<'_> {
    /// Evaluates in this process. Returns the metrics and the number of answers. `progress` gets the number of judged answers and of all answers, and
    /// ends the evaluation with an error.
    pub fn run(&self, progress: impl FnMut(usize, usize) -> Result<()>) -> Result<(StepMetrics, usize)> {
        let slots = self.eval().max_num_seqs;
        self.run_on(self.policy.engine(slots, self.plan.seed), 0, &self.policy.into(), progress)
    }

    /// Evaluates on servers, after they have loaded and verified the model.
    pub fn run_on_servers(
        &self,
        engines: &Engines,
        progress: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<(StepMetrics, usize)> {
        const VERSION: Version = 1;
        engines.give(self.plan, self.policy, VERSION)?;
        let config = engines.fleet_config(self.plan, self.policy);
        let mut fleet = Fleet::new(engines.handle(), config, self.policy.tokenizer(), self.eval().max_num_seqs, self.plan.seed);
        fleet.set_weights(VERSION, &());
        self.run_on(fleet, VERSION, &engines.reader(self.policy), progress)
    }

    fn run_on<E: TokenEngine>(
        &self,
        mut engine: E,
        version: Version,
        reader: &Reader,
        mut progress: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<(StepMetrics, usize)> {
        let eval = self.eval();
        let spec = Arc::new(eval_spec(self.plan, &eval, self.registry, reader.config.max_positions)?);
        let identity = self.identity(&eval);
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
        Ok((summary, evaluation.answers().len()))
    }

    fn eval(&self) -> Eval {
        self.plan.eval.clone().unwrap_or_default()
    }

    /// Identity of the evaluation. Answers of evaluations with different identities are never mixed.
    fn identity(&self, eval: &Eval) -> Value {
        let plan = Plan { eval: Some(eval.clone()), ..self.plan.clone() };
        let text = plan.to_toml();
        let matters = |section: &&str| {
            let heads = ["[chat]", "[task]", "[eval]", "[reward]", "[environment]"];
            heads.iter().any(|head| section.trim_start().starts_with(head))
        };
        let sections: Vec<&str> = text.split("\n\n").filter(matters).collect();
        let mut identity = json!({
            "model": std::fs::canonicalize(self.model).unwrap_or_else(|_| self.model.to_owned()),
            "seed": plan.seed,
            "max_new_tokens": eval.max_new_tokens.unwrap_or(plan.generate.max_new_tokens),
            "asked": sections.join("\n\n"),
        });
        if plan.engine.is_remote() {
            identity["engine"] = plan.engine.kind().word().into();
        }
        identity
    }

    /// Answers that an interrupted evaluation of the same identity left.
    fn judged(&self, identity: &Value) -> Result<Vec<JudgedAnswer>> {
        let path = self.out.join(EVALUATION);
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(Vec::new()) };
        let mut found: Value = serde_json::from_str(&text).with_context(|| format!("reading {}", path.display()))?;
        if let Some(found) = found.as_object_mut() {
            found.remove("summary");
        }
        if !is_same(&found, identity)? {
            bail!("{} holds an evaluation of something else; choose another folder with --out", self.out.display());
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
fn is_same(found: &Value, identity: &Value) -> Result<bool> {
    let sections = |identity: &Value| flat(identity["asked"].as_str().unwrap_or_default());
    let others = |identity: &Value| -> Option<Value> {
        let mut identity = identity.clone();
        identity.as_object_mut()?.remove("asked");
        Some(identity)
    };
    Ok(others(found) == others(identity) && sections(found)? == sections(identity)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_evaluation_is_continued_under_the_former_names_of_its_keys() {
        let of = |key: &str, slots: u64| json!({"seed": 1, "asked": format!("[eval]\nsamples = 1\n{key} = {slots}")});
        assert!(is_same(&of("slots", 64), &of("max_num_seqs", 64)).unwrap());
        assert!(!is_same(&of("slots", 64), &of("max_num_seqs", 32)).unwrap());
        assert!(!is_same(&json!({"seed": 2, "asked": of("slots", 64)["asked"]}), &of("slots", 64)).unwrap());
    }
}
