//! Components of a reinforcement pipeline, each built from its own sections of the plan, before
//! [`declare`](crate::grpo::declare) puts them on a graph.

use std::path::PathBuf;

use anyhow::{Context, Result};
use rollflow::data::{Batch, Group, Prompt};
use rollflow::engine::{LocalEngine, TokenEngine};
use rollflow::flow::{BoxedStage, WeightsRx, weights};
use rollflow::model::FrozenWeights;
use rollflow::observe::logs::Every;
use rollflow::prelude::*;
use rollflow::recipe::{Plan, Timeline};
use rollflow::stages::evaluate::Evaluator;

use crate::assemble::engines::Engines;
use crate::assemble::policy::Reader;
use crate::assemble::references::Scorers;
use crate::assemble::rewards::Scoring;
use crate::assemble::steps::Mixture;
use crate::assemble::supervised::Imitation;
use crate::assemble::{data, environments, evaluation, rollout, trainers};
use crate::registry::Registry;
use crate::run::resume::ResumePoint;

/// A stage that passes on trained steps.
pub type StepStage<W> = BoxedStage<Trained<W>, Trained<W>>;

/// The stages of a reinforcement pipeline. `B` trains; a simulation has another `B` for the same graph.
pub struct Components<B: TrainingBackend> {
    /// Source of prompts.
    pub prompts: Prompts,
    /// Stage that samples completions.
    pub generator: BoxedStage<Prompt, Group>,
    /// Stage that scores them.
    pub reward: Scoring,
    /// Stages that score them under other policies.
    pub scorers: Scorers<B::Weights>,
    /// Backend that trains the policy.
    pub backend: B,
    /// Backend that trains the critic, if the recipe has one.
    pub critic: Option<B>,
    /// Supervised samples that are mixed into steps, if the recipe has `[mix]`.
    pub mixture: Option<Mixture>,
    /// Stage that puts servers to sleep before a step, if they share its GPU.
    pub sleep: Option<BoxedStage<Batch, Batch>>,
    /// Stage that gives new weights to the generator.
    pub sync: StepStage<B::Weights>,
    /// Stage that evaluates published weights, if the recipe has `[eval]`.
    pub evaluator: Option<PendingEvaluator<B::Weights>>,
    /// Custom parts by name.
    pub registry: Registry,
    /// Plan of each step, for trainer and generator.
    pub timeline: Timeline,
}

/// An evaluator that still needs the step that the run continues after, and where its answers go.
pub type PendingEvaluator<W> = Box<dyn FnOnce(u64, Option<PathBuf>) -> StepStage<W> + Send>;

/// Puts off what the run's start decides.
pub fn pending<E: TokenEngine, W: Send + Sync + 'static>(evaluator: Evaluator<E, W>) -> PendingEvaluator<W> {
    Box::new(move |after, log| BoxedStage::new(evaluator.report(after, log)))
}

/// The components that depend on where completions are sampled.
struct Sampled {
    /// Reads prompts that fit whatever samples.
    reader: Reader,
    generator: BoxedStage<Prompt, Group>,
    /// For scorers that follow the policy.
    published: WeightsRx<FrozenWeights>,
    sleep: Option<BoxedStage<Batch, Batch>>,
    sync: StepStage<FrozenWeights>,
    evaluator: Option<PendingEvaluator<FrozenWeights>>,
    timeline: Timeline,
}

impl Components<LocalBackend> {
    /// Builds components that generate in this process. `start` is the policy that the run started from.
    pub fn local(plan: &Plan, registry: &Registry, policy: &Policy, start: &Policy) -> Result<Self> {
        Components::observed(plan, registry, policy, start, None, |generator| generator)
    }

    /// Builds the components of [`Components::local`] for a run that `from` may resume, with a generator that
    /// `observe` has configured further.
    pub fn observed(
        plan: &Plan,
        registry: &Registry,
        policy: &Policy,
        start: &Policy,
        from: Option<&ResumePoint>,
        observe: impl FnOnce(Generator<LocalEngine>) -> Generator<LocalEngine>,
    ) -> Result<Self> {
        let ((publish, published), reader, timeline) = (weights(), Reader::from(policy), Timeline::of(plan)?);
        let evaluator = evaluation::evaluator(plan, registry, policy)?;
        let generator = rollout::local_generator(plan, policy)?.weights(published.clone());
        let sampled = Sampled {
            generator: BoxedStage::new(observe(generator_of(plan, &timeline, &reader, generator)?)),
            sleep: None,
            sync: BoxedStage::new(WeightSync::to(publish).log_every(log_every(&timeline))),
            evaluator: evaluator.map(pending),
            reader,
            published,
            timeline,
        };
        Components::around(sampled, plan, registry, policy, start, from)
    }

    /// Builds components that generate and evaluate on servers, for a run that `from` may resume.
    pub fn remote(
        plan: &Plan,
        registry: &Registry,
        policy: &Policy,
        start: &Policy,
        from: Option<&ResumePoint>,
        engines: &Engines,
    ) -> Result<Self> {
        let ((publish, synced), (also, published), reader) = (weights(), weights(), engines.reader(policy));
        let timeline = Timeline::of(plan)?;
        let (mut sync, mut sleep, mut evaluator) = (engines.sync(publish)?.also(also), engines.sleep(), None);
        if let Some(eval) = evaluation::during(plan) {
            let hold = evaluation::hold(plan, eval);
            sync = sync.hold(&hold);
            sleep = sleep.map(|sleep| sleep.hold(&hold));
            evaluator = Some(evaluation::evaluator_of_servers(plan, eval, registry, &reader, engines.evaluator(&reader), &hold)?);
        }
        let sampled = Sampled {
            generator: BoxedStage::new(generator_of(plan, &timeline, &reader, engines.generator(&reader).weights(synced))?),
            sleep: sleep.map(BoxedStage::new),
            sync: BoxedStage::new(sync.log_every(log_every(&timeline))),
            evaluator: evaluator.map(pending),
            reader,
            published,
            timeline,
        };
        Components::around(sampled, plan, registry, policy, start, from)
    }

    /// Adds the components that run in this process wherever completions come from.
    fn around(
        of: Sampled,
        plan: &Plan,
        registry: &Registry,
        policy: &Policy,
        start: &Policy,
        from: Option<&ResumePoint>,
    ) -> Result<Self> {
        let mix = plan.mix.as_ref().zip(plan.sft.as_ref());
        let mixture = mix.map(|(mix, sft)| Mixture::of(mix, Imitation::of(plan, sft), policy)).transpose()?;
        Ok(Components {
            prompts: data::training_prompts(plan, &of.reader, from)?,
            generator: of.generator,
            reward: Scoring::of(plan, registry)?,
            scorers: Scorers::of(plan, start, Some(&of.published))?,
            backend: trainers::backend(plan, registry, policy).context("starting the trainer")?,
            critic: trainers::critic(plan, registry, start).context("starting the critic")?,
            mixture,
            sleep: of.sleep,
            sync: of.sync,
            evaluator: of.evaluator,
            registry: registry.clone(),
            timeline: of.timeline,
        })
    }
}

/// Steps from one printed line to the next.
pub fn log_every(timeline: &Timeline) -> Every {
    let timeline = timeline.clone();
    Every::by_step(move |step| timeline.seen_at(step).observe.log_every)
}

/// Configures a generator by `[generate]`, in the recipe's environment if it has one.
pub fn generator_of<E: TokenEngine>(
    plan: &Plan,
    timeline: &Timeline,
    reader: &Reader,
    generator: Generator<E>,
) -> Result<Generator<E>> {
    let timeline = timeline.clone();
    let generator = rollout::configured(generator, &plan.generate, plan.seed, plan.most_slots(), timeline, plan.sync.every);
    let Some(of) = &plan.environment else { return Ok(generator) };
    Ok(generator.environment(environments::agent(of, &plan.net, plan.seed, reader.config.max_positions)?))
}
