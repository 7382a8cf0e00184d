//! Components of a reinforcement pipeline, before [`declare`](crate::grpo::declare) puts them on a
//! graph.

use std::path::PathBuf;

use anyhow::{Context, Result};
use rollflow::data::{Group, Prompt};
use rollflow::engine::{LocalEngine, TokenEngine};
use rollflow::flow::{BoxedStage, weights};
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::stages::evaluate::Evaluator;

use crate::assemble::engines::Engines;
use crate::assemble::rewards::Scoring;
use crate::assemble::steps::Mixture;
use crate::assemble::{data, evaluation, references, rollout, trainers};
use crate::registry::Registry;

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
    /// Stage that scores them under the reference policy, if the recipe has one.
    pub reference: Option<Reference<B::Weights>>,
    /// Backend that trains the policy.
    pub backend: B,
    /// Backend that trains the critic, if the recipe has one.
    pub critic: Option<B>,
    /// Supervised samples that are mixed into steps, if the recipe has `[mix]`.
    pub mixture: Option<Mixture>,
    /// Stage that gives new weights to the generator.
    pub sync: StepStage<B::Weights>,
    /// Stage that evaluates published weights, if the recipe has `[eval]`.
    pub evaluator: Option<PendingEvaluator<B::Weights>>,
    /// Custom parts by name.
    pub registry: Registry,
}

/// An evaluator that still needs the step the run continues after, and where its answers go.
pub struct PendingEvaluator<W>(Box<dyn FnOnce(u64, Option<PathBuf>) -> StepStage<W> + Send>);

impl<W: Send + Sync + 'static> PendingEvaluator<W> {
    fn new<E: TokenEngine>(evaluator: Evaluator<E, W>) -> Self {
        PendingEvaluator(Box::new(move |after, log| BoxedStage::new(evaluator.after(after).log(log))))
    }

    /// The stage of a run that has taken `after` steps.
    pub fn stage(self, after: u64, log: Option<PathBuf>) -> StepStage<W> {
        (self.0)(after, log)
    }
}

/// The generator, and the two stages that depend on where it runs.
struct Generation<E: TokenEngine> {
    generator: Generator<E>,
    sync: StepStage<FrozenWeights>,
    evaluator: Option<Evaluator<E, FrozenWeights>>,
}

impl Components<LocalBackend> {
    /// Builds components that generate in this process. `start` is the policy that the run started from.
    pub fn local(plan: &Plan, registry: &Registry, policy: &Policy, start: &Policy) -> Result<Self> {
        Components::observed(plan, registry, policy, start, |generator| generator)
    }

    /// Builds the components of [`Components::local`] with a generator that `observe` has configured further.
    pub fn observed(
        plan: &Plan,
        registry: &Registry,
        policy: &Policy,
        start: &Policy,
        observe: impl FnOnce(Generator<LocalEngine>) -> Generator<LocalEngine>,
    ) -> Result<Self> {
        let (publish, published) = weights();
        let reference = references::reference(plan, start, &published)?;
        let generation = Generation {
            generator: observe(rollout::generator(plan, policy, published)?),
            sync: BoxedStage::new(WeightSync::to(publish).log_every(plan.observe.log_every)),
            evaluator: evaluation::evaluator(plan, registry, policy)?,
        };
        let prompts = data::prompts(plan, Some(&policy.into()))?;
        Components::assemble(plan, registry, policy, start, prompts, reference, generation)
    }

    /// Builds components that generate and evaluate on servers.
    pub fn remote(plan: &Plan, registry: &Registry, policy: &Policy, start: &Policy, engines: &Engines) -> Result<Self> {
        let (publish, published) = weights();
        let (also, read) = weights();
        let reader = engines.reader(policy);
        let generator = rollout::generator_by(plan, engines.generator(plan, policy, published))?;
        let generator = rollout::in_environment(plan, &reader, generator)?;
        let (mut sync, mut evaluator) = (engines.sync(plan, publish)?.also(also), None);
        if let Some(hold) = evaluation::hold(plan) {
            sync = sync.hold(&hold);
            evaluator = evaluation::evaluator_of_servers(plan, registry, policy, engines, &hold)?;
        }
        let reference = references::reference(plan, start, &read)?;
        let sync = BoxedStage::new(sync.log_every(plan.observe.log_every));
        let prompts = data::prompts(plan, Some(&reader))?;
        let generation = Generation { generator, sync, evaluator };
        Components::assemble(plan, registry, policy, start, prompts, reference, generation)
    }

    /// Adds the components that run in this process wherever completions come from.
    fn assemble<E: TokenEngine>(
        plan: &Plan,
        registry: &Registry,
        policy: &Policy,
        start: &Policy,
        prompts: Prompts,
        reference: Option<Reference<FrozenWeights>>,
        generation: Generation<E>,
    ) -> Result<Self> {
        Ok(Components {
            prompts,
            generator: BoxedStage::new(generation.generator),
            reward: Scoring::of(plan, registry)?,
            reference,
            backend: trainers::backend(plan, registry, policy).context("starting the trainer")?,
            critic: trainers::critic(plan, start).context("starting the critic")?,
            mixture: Mixture::of(plan, policy)?,
            sync: generation.sync,
            evaluator: generation.evaluator.map(PendingEvaluator::new),
            registry: registry.clone(),
        })
    }
}
