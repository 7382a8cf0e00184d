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

/// An evaluator that still needs the step that the run continues after, and where its answers go.
pub type PendingEvaluator<W> = Box<dyn FnOnce(u64, Option<PathBuf>) -> StepStage<W> + Send>;

fn pending<E: TokenEngine>(evaluator: Evaluator<E, FrozenWeights>) -> PendingEvaluator<FrozenWeights> {
    Box::new(move |after, log| BoxedStage::new(evaluator.after(after).log(log)))
}

/// The components that depend on where completions are sampled.
struct Sampled {
    prompts: Prompts,
    generator: BoxedStage<Prompt, Group>,
    reference: Option<Reference<FrozenWeights>>,
    sync: StepStage<FrozenWeights>,
    evaluator: Option<PendingEvaluator<FrozenWeights>>,
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
        let sampled = Sampled {
            reference: references::reference(plan, start, &published)?,
            generator: BoxedStage::new(observe(rollout::generator(plan, policy, published)?)),
            sync: BoxedStage::new(WeightSync::to(publish).log_every(plan.observe.log_every)),
            evaluator: evaluation::evaluator(plan, registry, policy)?.map(pending),
            prompts: data::prompts(plan, Some(&policy.into()))?,
        };
        Components::around(sampled, plan, registry, policy, start)
    }

    /// Builds components that generate and evaluate on servers.
    pub fn remote(plan: &Plan, registry: &Registry, policy: &Policy, start: &Policy, engines: &Engines) -> Result<Self> {
        let (publish, published) = weights();
        let (also, read) = weights();
        let reader = engines.reader(policy);
        let generator = rollout::generator_by(plan, engines.generator(plan, policy, published))?;
        let (mut sync, mut evaluator) = (engines.sync(plan, publish)?.also(also), None);
        if let Some(hold) = evaluation::hold(plan) {
            sync = sync.hold(&hold);
            evaluator = evaluation::evaluator_of_servers(plan, registry, policy, engines, &hold)?;
        }
        let sampled = Sampled {
            reference: references::reference(plan, start, &read)?,
            generator: BoxedStage::new(rollout::in_environment(plan, &reader, generator)?),
            sync: BoxedStage::new(sync.log_every(plan.observe.log_every)),
            evaluator: evaluator.map(pending),
            prompts: data::prompts(plan, Some(&reader))?,
        };
        Components::around(sampled, plan, registry, policy, start)
    }

    /// Adds the components that run in this process wherever completions come from.
    fn around(of: Sampled, plan: &Plan, registry: &Registry, policy: &Policy, start: &Policy) -> Result<Self> {
        Ok(Components {
            prompts: of.prompts,
            generator: of.generator,
            reward: Scoring::of(plan, registry)?,
            reference: of.reference,
            backend: trainers::backend(plan, registry, policy).context("starting the trainer")?,
            critic: trainers::critic(plan, start).context("starting the critic")?,
            mixture: Mixture::of(plan, policy)?,
            sync: of.sync,
            evaluator: of.evaluator,
            registry: registry.clone(),
        })
    }
}
