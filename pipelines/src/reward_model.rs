//! Training of a reward model on pairs of completions, with Bradley and Terry's loss (as in Ouyang et
//! al., InstructGPT, 2022).
//!
//! The last checkpoint is a Hugging Face folder of a sequence classifier, or with `[lora]` of adapters
//! and a head, for `reward.kind = "model"`.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use rollflow::algo::{BradleyTerry, PairMetrics};
use rollflow::data::RankedPair;
use rollflow::flow::{Ended, Flow, Report};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::stages::evaluate::PairEvaluator;
use rollflow::stages::reward::Scorer;
use rollflow::stages::train::StepConfig;
use rollflow::train::checkpoint::{self, CHECKPOINTS};
use rollflow::train::{Algorithm, ScoreModel, score_pair};
use rollflow::util::cores::cores;

use crate::assemble::{data, evaluation, origin, policy, preferences, references, steps, trainers};
use crate::registry::Registry;
use crate::run::folder::{Outputs, RunFolder};
use crate::run::resume::ResumePoint;

/// The pipeline `reward_model`: trains, and judges what was saved by the pairs that were held out.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let model = origin::score_model(plan, run.path())?;
    let (mut flow, held_out) = declare(plan, registry, &model, run.outputs(plan)?, from)?;
    let report = run.watch(&mut flow, plan.steps())?;
    let trained = checkpoint::latest(&run.path().join(CHECKPOINTS))?;
    if report.ended != Ended::Finished {
        return Ok(report);
    }
    if let (Some(folder), false) = (trained, held_out.is_empty()) {
        let saved = ScoreModel::load(&folder)?.computing(policy::compute(&plan.model)?);
        let threads = plan.reward_model.as_ref().and_then(|of| of.optimization.threads).unwrap_or_else(cores);
        let judged = judge(&Scorer::new(&saved, threads)?, &held_out)?;
        tracing::info!("Held-out pairs: {} accuracy={:.4} margin={:.4}", judged.pairs, judged.accuracy(), judged.margin());
    }
    tracing::info!("Training complete!");
    Ok(report)
}

/// The graph, from pairs to checkpoints, and the pairs that it leaves out, which the pairs of `[eval]`
/// replace in evaluations.
pub fn declare(
    plan: &Plan,
    registry: &Registry,
    scorer: &ScoreModel,
    outputs: Outputs,
    from: Option<&ResumePoint>,
) -> Result<(Flow, Vec<RankedPair>)> {
    let of = plan.reward_model.as_ref().context("the pipeline reward_model needs a section [reward_model]")?;
    let (model, reader) = (&plan.model, (scorer.tokenizer(), scorer.config()));
    let [pairs, held_out] = preferences::divided(&plan.task, &plan.chat, plan.seed, of.held_out)?;
    let read = |pair| score_pair(reader.0, reader.1, pair);
    let pairs = pairs.iter().enumerate().map(|(at, pair)| read(pair).with_context(|| format!("pair {at}")));
    let pairs = pairs.collect::<Result<Vec<_>>>()?;
    let config = trainers::reward_model_config(of, model, &plan.checkpoint)?;
    let backend = scorer.backend(trainers::shared(config, registry, trainers::REWARD_MODEL)).context("starting the trainer")?;
    let trainer = Trainer::new(backend).steps(of.steps).threads(of.optimization.threads.unwrap_or(0));
    let trainer = evaluation::publish_for_evaluation(trainer, plan);
    let trainer = trainers::supervised(trainer, plan, registry, step_config, outputs.checkpoints)?;
    let trainer = data::resumable(trainer, from, None)?;

    let mut flow = Flow::new(&plan.name).metrics(&outputs.metrics);
    let done = from.map_or(0, |from| from.trainer.step);
    let batches = flow.source("pairs", Supervised::grouped("reward model", pairs, of.batch, of.steps)?.after(done));
    let mut trained = flow.stage("train", batches, trainer);
    if let Some(eval) = evaluation::during(plan) {
        let mut pairs = match &eval.task {
            Some(task) => preferences::held_out(task, &plan.chat, plan.seed)?,
            None => held_out.clone(),
        };
        ensure!(!pairs.is_empty(), "[eval] has no pairs: give it a task, or hold some out with reward_model.held_out");
        pairs.truncate(eval.limit.unwrap_or(usize::MAX));
        let samples = pairs.iter().map(read).collect::<Result<Vec<_>, _>>().context("preparing the evaluation")?;
        let config = references::scoring(model, plan.generate.scoring_temperature(), &of.optimization, eval.threads)?;
        let loss = Arc::new(BradleyTerry { center: of.center });
        let evaluator = PairEvaluator::new(config, scorer.config().clone(), loss, samples.concat(), eval.every);
        trained = flow.stage("evaluate", trained, evaluator.last(of.steps).report(done, outputs.answers));
    }
    flow.sink("log", trained, outputs.log);
    Ok((flow, held_out))
}

/// Schedule and loss of a plan's steps, where the plan changes them.
pub fn step_config(plan: &Plan) -> Result<StepConfig> {
    let of = plan.reward_model.as_ref().context("the pipeline reward_model needs a section [reward_model]")?;
    let schedule = steps::schedule(&of.optimization, of.lr, of.steps, 1)?;
    let algorithm = Algorithm::new(BradleyTerry { center: of.center });
    Ok(StepConfig { schedule: Some(schedule), algorithm: Some(Arc::new(algorithm)), ..StepConfig::default() })
}

/// Share of pairs whose chosen completion scores higher, and the margin.
pub fn judge(scorer: &Scorer, pairs: &[RankedPair]) -> Result<PairMetrics> {
    let scores = |pair: &RankedPair| -> Result<(f64, f64)> {
        Ok((scorer.score(&pair.prompt, &pair.chosen)?, scorer.score(&pair.prompt, &pair.rejected)?))
    };
    Ok(PairMetrics::of(pairs.iter().map(scores).collect::<Result<Vec<_>>>()?))
}
