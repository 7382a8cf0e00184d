//! Group-relative policy optimization (Shao et al., DeepSeekMath, 2024), as a pipeline.
//!
//! Generation overlaps training: while a step trains, the generator already answers the prompts of the next, up to the staleness that the
//! recipe allows. With `max_staleness = 0` it is the synchronous algorithm.
//!
//! PPO is the same graph: its critic is a second model of the trainer's, which nobody else needs to know of.

use anyhow::{Context, Result};
use rollflow::engine::remote::Fleet;
use rollflow::engine::{LocalEngine, TokenEngine};
use rollflow::flow::{Ended, Flow, Port, Report, Until, WeightsTx, weights};
use rollflow::model::FrozenWeights;
use rollflow::observe::logs::announce_training;
use rollflow::prelude::*;
use rollflow::recipe::{Pipeline, Plan};
use rollflow::stages::evaluate::Evaluator;
use rollflow::stages::pairs::Pairs;
use rollflow::stages::sync::RemoteSync;
use rollflow::stages::train::Trained;

use crate::assemble::data;
use crate::assemble::engines::Engines;
use crate::assemble::evaluation;
use crate::assemble::lessons::Mixture;
use crate::assemble::losses;
use crate::assemble::origin;
use crate::assemble::references;
use crate::assemble::rewards;
use crate::assemble::rewards::Judge;
use crate::assemble::rollout;
use crate::assemble::trainers;
use crate::registry::Registry;
use crate::run::folder::{Outputs, RunFolder};
use crate::run::resume::ResumePoint;
use crate::sft::WarmUp;
use crate::{sft, sft_then_grpo};

/// Most parts of a batch: more would cost more passes than waiting for a few groups costs time.
const PARTS: usize = 8;

/// Warms up if the recipe says so, probes that generator and trainer agree, then reinforces; a run that was interrupted goes on reinforcing.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let mut policy = origin::policy(plan, run.path())?;
    // One for both flows, so that none is lost between them.
    let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
    let warmed = match &plan.sft {
        Some(_) if plan.pipeline == Pipeline::SftThenGrpo => {
            Some(sft_then_grpo::learned((plan, registry), run, &policy, &interrupts)?)
        }
        Some(warm_up) if from.is_none() => Some(sft::warm_up(plan, warm_up, &policy, &interrupts)?),
        _ => None,
    };
    match warmed {
        Some(WarmUp::Learned(learned)) => policy = learned,
        Some(WarmUp::Interrupted(report)) => return Ok(report),
        None => {}
    }
    let start = match from {
        Some(_) => references::kept(plan, &policy, run.path())?,
        None => policy.clone(),
    };
    if from.is_none() {
        references::keep(plan, &policy, run.path())?;
    }
    if !plan.engine.is_remote() {
        return reinforce(plan, Actors::held_to(plan, registry, &policy, &start)?, (run, &policy), from, &interrupts);
    }
    // Those that were started end with it, however this ends.
    let heard = (|line: &str| run.say(line), || interrupts.pressed());
    let Some(engines) = Engines::begin(plan, &policy, &run.path().join("engine"), heard)? else {
        return Ok(Report::before(&plan.name));
    };
    reinforce(plan, Actors::elsewhere(plan, registry, (&policy, &start), &engines)?, (run, &policy), from, &interrupts)
}

fn reinforce<E: TokenEngine>(
    plan: &Plan,
    actors: Actors<E, LocalBackend>,
    (run, policy): (&RunFolder, &Policy),
    from: Option<&ResumePoint>,
    interrupts: &Interrupts,
) -> Result<Report> {
    if let (Some(from), Some(state)) = (from, actors.reference.as_ref().and_then(Reference::state)) {
        state.resume(policy, &from.checkpoint).context("going on with the reference policy")?;
    }
    if plan.train.probe && from.is_none() {
        rollout::probe(plan, policy, &actors.backend)?;
    }
    let mut flow = declare(plan, actors, run.outputs(plan)?, from)?;
    let groups = format!("{} groups of {}", plan.batch.groups, plan.generate.group_size);
    announce_training("RL", &[("Steps", &plan.train.steps), ("Batch size", &groups)]);
    flow.interrupted_by(interrupts);
    let report = run.watch(&mut flow, plan.train.steps, |flow| flow.run(Until::finished()))?;
    if report.ended == Ended::Finished {
        tracing::info!("RL training complete!");
    }
    Ok(report)
}

/// How weights get to the generator.
pub enum Publisher<W> {
    /// It reads them in this process.
    Here(WeightsTx<W>),
    /// Servers are given them.
    There(Box<RemoteSync<W>>),
}

impl<W: Send + Sync + 'static> Publisher<W> {
    fn stage(self, flow: &mut Flow, trained: Port<Trained<W>>, log_every: u64) -> Port<Trained<W>> {
        match self {
            Publisher::Here(to) => {
                let sync = WeightSync::to(to).log_every(log_every);
                flow.stage("sync", trained, sync)
            }
            Publisher::There(sync) => flow.stage("sync", trained, sync.log_every(log_every)),
        }
    }
}

/// Who does the work: `E` generates and is asked what was learned, `B` learns. A simulation has others for the same graph.
pub struct Actors<E: TokenEngine, B: TrainingBackend> {
    /// What is asked.
    pub prompts: Prompts,
    /// Answers prompts with the weights of `publisher`.
    pub generator: Generator<E>,
    /// Gives weights to the generator.
    pub publisher: Publisher<B::Weights>,
    /// Scores answers.
    pub reward: Judge,
    /// Scores them under the policy that the trained one is held to, if there is any.
    pub reference: Option<Reference<B::Weights>>,
    /// Learns from them.
    pub backend: B,
    /// Tells it what to expect of them, if anything does.
    pub critic: Option<B>,
    /// What its steps are mixed with, if anything.
    pub mixture: Option<Mixture>,
    /// Asks published weights what they know, if anything does.
    pub evaluator: Option<Evaluator<E, B::Weights>>,
    /// Parts of the user's own.
    pub registry: Registry,
}

impl Actors<LocalEngine, LocalBackend> {
    /// Those of this process.
    pub fn local(plan: &Plan, registry: &Registry, policy: &Policy) -> Result<Self> {
        Actors::held_to(plan, registry, policy, policy)
    }

    /// The same, of a run that began as `start`.
    pub fn held_to(plan: &Plan, registry: &Registry, policy: &Policy, start: &Policy) -> Result<Self> {
        let (publisher, published) = weights();
        let reference = references::reference(plan, start, &published)?;
        let generator = rollout::generator(plan, policy, published)?;
        let evaluator = evaluation::evaluator(plan, registry, policy)?;
        let prompts = data::prompts(plan, Some(&policy.into()))?;
        Actors::around((prompts, generator, Publisher::Here(publisher), evaluator), reference, plan, registry, (policy, start))
    }
}

impl Actors<Fleet, LocalBackend> {
    /// Those of this process but for what generates and answers evaluations, which is on servers; of a run that has come to `policy` and began as
    /// `start`.
    pub fn elsewhere(plan: &Plan, registry: &Registry, (policy, start): (&Policy, &Policy), engines: &Engines) -> Result<Self> {
        let (publisher, published) = weights();
        let (also, read) = weights();
        let generator = rollout::generator_by(plan, engines.generator(plan, policy, published))?;
        let reader = engines.reader(policy);
        let generator = rollout::in_environment(plan, &reader, generator)?;
        let (mut sync, mut evaluator) = (engines.sync(plan, publisher)?.also(also), None);
        if let Some(hold) = evaluation::hold(plan) {
            sync = sync.hold(&hold);
            evaluator = evaluation::evaluator_of_servers(plan, registry, policy, (engines, &hold))?;
        }
        let reference = references::reference(plan, start, &read)?;
        let publisher = Publisher::There(Box::new(sync));
        let prompts = data::prompts(plan, Some(&reader))?;
        Actors::around((prompts, generator, publisher, evaluator), reference, plan, registry, (policy, start))
    }
}

type Evaluating<E> = Option<Evaluator<E, FrozenWeights>>;

impl<E: TokenEngine> Actors<E, LocalBackend> {
    /// All others, who are of this process wherever answers come from.
    fn around(
        (prompts, generator, publisher, evaluator): (Prompts, Generator<E>, Publisher<FrozenWeights>, Evaluating<E>),
        reference: Option<Reference<FrozenWeights>>,
        plan: &Plan,
        registry: &Registry,
        (policy, start): (&Policy, &Policy),
    ) -> Result<Self> {
        Ok(Actors {
            prompts,
            generator,
            publisher,
            reward: rewards::reward(plan, registry)?,
            reference,
            backend: trainers::backend(plan, registry, policy).context("starting the trainer")?,
            critic: trainers::critic(plan, start).context("starting the critic")?,
            mixture: Mixture::of(plan, policy)?,
            evaluator,
            registry: registry.clone(),
        })
    }
}

/// The graph, from prompts to weights.
pub fn declare<E: TokenEngine, B: TrainingBackend + 'static>(
    plan: &Plan,
    actors: Actors<E, B>,
    outputs: Outputs<B::Weights>,
    from: Option<&ResumePoint>,
) -> Result<Flow> {
    let Actors { prompts, generator, publisher, mut reward, reference, backend, critic, mixture, evaluator, registry } = actors;
    let Outputs { metrics, log, dead_letters, answers, checkpoints } = outputs;
    let groups_per_version = plan.groups_per_publish() as u64;
    let all_groups = plan.train.steps * plan.batch.groups as u64;
    let admission =
        Admission::new(groups_per_version, plan.admission_window() as u64, Some(all_groups)).bounded(plan.flow.max_staleness);
    let mut trainer = trainers::trainer(plan, &registry, backend, critic, mixture, checkpoints)?;
    if let Some(from) = from {
        admission.restore(from.trainer.progress.clone());
        trainer = trainer.resume(&from.checkpoint, from.trainer.clone())?;
    }
    if let Some(state) = reference.as_ref().and_then(Reference::state) {
        trainer = trainer.checkpoint_files(move || state.files());
    }
    if let Some(writer) = dead_letters {
        reward = reward.dead_letters(writer);
    }

    let mut flow = Flow::new(&plan.name).admission(&admission).metrics(&metrics);
    flow.capacity(Capacity::items(plan.flow.edge_items).tokens(plan.flow.edge_tokens));

    let prompts = flow.source("prompts", prompts);
    let groups = flow.stage("generate", prompts, generator);
    let scored = reward.stage(&mut flow, "reward", groups);
    let filter = Filter::by(rollout::filter(plan, &registry)?).fallback(plan.filter_fallback);
    let mut kept = flow.stage("filter", scored, filter);
    if let Some(pairing) = losses::pairing(plan).filter(|_| !plan.changes("pairs")) {
        kept = flow.stage("pairs", kept, Pairs::of(&pairing));
    }
    if let Some(reference) = reference {
        kept = flow.stage("reference", kept, reference);
    }
    let batcher = Batcher::groups(plan.batch.groups).over_sample(plan.batch.oversampling_factor).on_stale(plan.flow.on_stale);
    // A synchronous run is the same to the bit each time, and so are its passes; any other begins to learn before a batch is whole.
    let batcher = if plan.flow.max_staleness == 0 { batcher } else { batcher.in_parts(plan.batch.groups.div_ceil(PARTS)) };
    let batches = flow.stage("batch", kept, batcher);
    let trained = flow.stage("train", batches, trainer);
    let mut synced = publisher.stage(&mut flow, trained, plan.observe.log_every);
    if let Some(evaluator) = evaluator {
        let evaluator = evaluator.after(from.map_or(0, |from| from.trainer.step));
        synced = flow.stage("evaluate", synced, evaluator.log(answers));
    }
    flow.sink("log", synced, log);
    Ok(flow)
}
