//! Training of a reward model: of two answers to one prompt, the better one learns to score higher (Bradley and Terry's loss, as in Ouyang et
//! al., InstructGPT, 2022).
//!
//! The run's last checkpoint is a Hugging Face folder of a sequence classifier, for `reward.kind = "model"`.

use anyhow::{Context, Result};
use rollflow::algo::PairMetrics;
use rollflow::data::RankedPair;
use rollflow::flow::{Ended, Flow, Report, Until};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::stages::reward::Scorer;
use rollflow::train::checkpoint::{self, CHECKPOINTS};

use crate::resume::ResumePoint;
use crate::run_folder::{Outputs, RunFolder};
use crate::{parts, trainers};

/// The pipeline `reward_model`: trains, and judges what was saved by the pairs that were held out.
pub fn run(plan: &Plan, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let (mut flow, held_out) = declare(plan, run.outputs(plan)?, from)?;
    let report = run.watch(&mut flow, plan.steps(), |flow| flow.run(Until::finished()))?;
    let trained = checkpoint::latest(&run.path().join(CHECKPOINTS))?;
    if report.ended != Ended::Finished {
        return Ok(report);
    }
    if let (Some(folder), false) = (trained, held_out.is_empty()) {
        let judged =
            judge(&Scorer::new(&ScoreModel::load(&folder)?.computing(parts::compute(plan)?), plan.threads())?, &held_out)?;
        tracing::info!("Held-out pairs: {} accuracy={:.4} margin={:.4}", judged.pairs, judged.accuracy(), judged.margin());
    }
    tracing::info!("Training complete!");
    Ok(report)
}

/// The graph, from pairs to checkpoints, and the pairs that it leaves out.
pub fn declare(plan: &Plan, outputs: Outputs, from: Option<&ResumePoint>) -> Result<(Flow, Vec<RankedPair>)> {
    let of = plan.reward_model.as_ref().context("the pipeline reward_model needs a section [reward_model]")?;
    let model = parts::score_model(plan)?;
    let (pairs, held_out) = parts::ranked_pairs(plan, of)?;
    let reader = model.reader();
    let pairs = pairs.iter().enumerate().map(|(at, pair)| reader.pair(pair).with_context(|| format!("pair {at}")));
    let pairs = pairs.collect::<Result<Vec<_>>>()?;
    let backend = trainers::reward_model_backend(plan, of, &model).context("starting the trainer")?;
    let trainer = Trainer::new(backend).steps(of.steps).threads(of.optimization.threads).sync_every(u64::MAX);
    let mut trainer = trainers::checkpointed(trainer, plan, outputs.checkpoints);
    if let Some(from) = from {
        trainer = trainer.resume(&from.checkpoint, from.trainer.clone())?;
    }

    let mut flow = Flow::new(&plan.name);
    let done = from.map_or(0, |from| from.trainer.step);
    let batches = flow.source("pairs", Supervised::grouped("reward model", pairs, of.batch, of.steps)?.after(done));
    let trained = flow.stage("train", batches, trainer);
    flow.sink("log", trained, outputs.log);
    Ok((flow, held_out))
}

/// How often, and by how much, chosen answers score higher.
pub fn judge(scorer: &Scorer, pairs: &[RankedPair]) -> Result<PairMetrics> {
    let scores = |pair: &RankedPair| -> Result<(f64, f64)> {
        Ok((scorer.score(&pair.prompt, &pair.chosen)?, scorer.score(&pair.prompt, &pair.rejected)?))
    };
    Ok(PairMetrics::of(pairs.iter().map(scores).collect::<Result<Vec<_>>>()?))
}
