//! The generator: one loop for single-turn and multi-turn rollouts on any [`TokenEngine`].
//!
//! Prompts enter as slots become free, groups leave as their last rollout ends, and new weights are
//! taken between two tokens. The thread waits only if there is nothing to compute.
//!
//! Every token is recorded in the [`Admission`]'s ledger when it is sampled, so that no interruption
//! loses any (laws C1, D4). Partial completions of a prompt are continued (law D7). Completions that
//! would be too old to be trained are restarted (law V2).

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::data::{Answer, Group, Partial, Prompt, Sample, Status, Tokenizer, Version};
use crate::engine::remote::{Fleet, FleetConfig, FleetHandle};
use crate::engine::{Concurrency, Load, OnNewWeights, SamplingParams, TokenEngine};
use crate::flow::{Io, RunContext, Signal, Stage, StageError, StageSpec, WeightsRx};
use crate::observe::{Metric, Metrics};
use crate::rollout::{Admission, Agent, Fate, POLL, RolloutContext, Rollouts};
use crate::util::cores::cores;

/// Settings with which a generator makes its engine.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Number of samples in flight; 64 by default.
    pub slots: usize,
    /// Seed of the sampling; 0 by default.
    pub seed: u64,
    /// Number of threads; `None`: by the size of the model, and all of the machine's in a synchronous run.
    pub threads: Option<usize>,
    /// Policy for samples in flight when weights change.
    pub on_new_weights: OnNewWeights,
    /// Room for sequences of earlier requests, which are remembered; 0, none, by default.
    pub prefix_cache: usize,
    /// Most tokens of the cache; `None`, what all slots take at their longest, by default.
    pub cache_tokens: Option<usize>,
    /// Longest draft of a sample's next tokens; 0, none, by default.
    pub draft_tokens: usize,
    /// Whether completions have the experts of their tokens; false by default.
    pub routes: bool,
}

impl Default for EngineSettings {
    fn default() -> Self {
        let on_new_weights = OnNewWeights::default();
        EngineSettings {
            slots: 64,
            seed: 0,
            threads: None,
            on_new_weights,
            prefix_cache: 0,
            cache_tokens: None,
            draft_tokens: 0,
            routes: false,
        }
    }
}

/// Makes an engine on its worker's thread.
type MakeEngine<E> = Arc<dyn Fn(&EngineSettings) -> E + Send + Sync>;

/// Stage that samples a group of rollouts for each prompt.
pub struct Generator<E: TokenEngine> {
    make: MakeEngine<E>,
    tokenizer: Arc<Tokenizer>,
    weights: WeightsRx<E::Weights>,
    settings: EngineSettings,
    /// Seed that was set by hand; otherwise the flow's counts.
    seed: Option<u64>,
    params: SamplingParams,
    /// Overrides the temperature of `params`.
    temperature: Option<TemperatureByVersion>,
    group_size: u32,
    workers: usize,
    mask_older: bool,
    /// If true, the number of slots follows the measured throughput.
    adaptive: bool,
    each_step: Option<StepHook>,
    metrics: Option<Metrics>,
    admission: Option<Admission>,
    /// Environment of multi-turn rollouts; none for single-turn ones.
    agent: Option<Agent>,
}

type StepHook = Arc<dyn Fn(Load) + Send + Sync>;
type TemperatureByVersion = Arc<dyn Fn(Version) -> f32 + Send + Sync>;

impl<E: TokenEngine> Generator<E> {
    /// Generates on the engine that `make` returns, under the newest weights of the flow. It starts with
    /// the first version (law V4).
    pub fn by(make: impl Fn(&EngineSettings) -> E + Send + Sync + 'static, tokenizer: &Arc<Tokenizer>) -> Self {
        Generator {
            make: Arc::new(make),
            tokenizer: tokenizer.clone(),
            weights: WeightsRx::default(),
            seed: None,
            settings: EngineSettings::default(),
            params: SamplingParams::default(),
            temperature: None,
            group_size: 8,
            workers: 1,
            mask_older: false,
            adaptive: false,
            each_step: None,
            metrics: None,
            admission: None,
            agent: None,
        }
    }

    /// Reads the weights of this edge instead of the flow's.
    pub fn weights(self, weights: WeightsRx<E::Weights>) -> Self {
        Generator { weights, ..self }
    }

    /// Rollouts for each prompt, at least 1; 8 by default.
    pub fn group_size(self, group_size: usize) -> Self {
        Generator { group_size: group_size.max(1) as u32, ..self }
    }

    /// Sampling parameters.
    pub fn sampling(self, params: SamplingParams) -> Self {
        Generator { params, ..self }
    }

    /// Temperature by the version under which a prompt enters. It holds for all of the prompt's
    /// completions, interrupted or not. Samples carry it ([`Sample::temperature`]) to the trainer.
    pub fn temperature_by(self, by_version: impl Fn(Version) -> f32 + Send + Sync + 'static) -> Self {
        Generator { temperature: Some(Arc::new(by_version)), ..self }
    }

    /// Longest completion or turn, in tokens.
    pub fn max_new_tokens(mut self, tokens: usize) -> Self {
        self.params.max_new_tokens = tokens;
        self
    }

    /// Number of engines that run in parallel and share the slots; 1 by default. A synchronous run has
    /// one, so that what is computed together depends on the round alone (law V3).
    pub fn workers(self, workers: usize) -> Self {
        Generator { workers: workers.max(1), ..self }
    }

    /// Number of samples in flight, at least 1; 64 by default.
    pub fn slots(mut self, slots: usize) -> Self {
        (self.settings.slots, self.adaptive) = (slots.max(1), false);
        self
    }

    /// Chooses the number of slots, at most `most`, by the measured throughput. A
    /// synchronous run and multi-turn rollouts use `most`.
    pub fn adaptive_slots(mut self, most: usize) -> Self {
        (self.settings.slots, self.adaptive) = (most.max(1), true);
        self
    }

    /// Policy for samples in flight when new weights arrive; by default they continue under these.
    pub fn on_new_weights(mut self, on_new_weights: OnNewWeights) -> Self {
        self.settings.on_new_weights = on_new_weights;
        self
    }

    /// If true, only tokens of the newest version in a sample are trained. Default: all tokens.
    pub fn mask_older(self, mask_older: bool) -> Self {
        Generator { mask_older, ..self }
    }

    /// Seed of the sampling, together with prompt, sample and position (law N2); 0 by default.
    pub fn seed(mut self, seed: u64) -> Self {
        (self.settings.seed, self.seed) = (seed, Some(seed));
        self
    }

    /// Number of threads of each engine, at least 1. Default: one for each four million parameters, and at most
    /// the machine's; in a synchronous run all of them
    /// ([`LocalEngine::threads`](crate::engine::LocalEngine::threads)).
    pub fn threads(mut self, threads: usize) -> Self {
        self.settings.threads = Some(threads.max(1));
        self
    }

    /// Room in the engines' caches, together, for so many sequences more than are decoded. With any, prompts and
    /// ended sequences are remembered: of a turn or prompt that begins alike, under the same weights, only the
    /// rest is computed. 0 by default.
    pub fn prefix_cache(mut self, sequences: usize) -> Self {
        self.settings.prefix_cache = sequences;
        self
    }

    /// Most tokens of the engines' caches, together; by default what all samples take at their longest. Where a
    /// cache is full, the youngest sample waits, and continues from its tokens later.
    pub fn cache_tokens(mut self, tokens: Option<usize>) -> Self {
        self.settings.cache_tokens = tokens;
        self
    }

    /// Longest draft of a sample's next tokens from its own text, checked in one pass; 0, none, by default.
    /// Samples stay the same, up to rounding.
    pub fn draft_tokens(mut self, tokens: usize) -> Self {
        self.settings.draft_tokens = tokens;
        self
    }

    /// Gives samples the experts that computed their tokens ([`Routes`](crate::data::Routes)), for a trainer that
    /// follows them or compares. A model without experts has none.
    pub fn recording_routes(mut self, routes: bool) -> Self {
        self.settings.routes = routes;
        self
    }

    /// Calls this closure after every step of the engine.
    pub fn each_step(self, hook: impl Fn(Load) + Send + Sync + 'static) -> Self {
        Generator { each_step: Some(Arc::new(hook)), ..self }
    }

    /// Generates multi-turn rollouts in an environment. Only sampled tokens are trained.
    pub fn environment(self, agent: Agent) -> Self {
        Generator { agent: Some(agent), ..self }
    }

    /// Engine of one worker, made on the calling thread.
    pub(crate) fn engine(&self) -> E {
        let share = |all: usize| all.div_ceil(self.engines());
        let EngineSettings { slots, threads, prefix_cache, cache_tokens, .. } = self.settings;
        let (slots, prefix_cache, cache_tokens) = (share(slots), share(prefix_cache), cache_tokens.map(share));
        // Nothing is trained meanwhile.
        let threads = threads.or_else(|| self.in_rounds().then(cores));
        (self.make)(&EngineSettings { slots, threads, prefix_cache, cache_tokens, ..self.settings.clone() })
    }

    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    fn in_rounds(&self) -> bool {
        self.admission.as_ref().is_some_and(Admission::in_rounds)
    }

    fn engines(&self) -> usize {
        if self.in_rounds() { 1 } else { self.workers }
    }

    fn rollouts(&self, engine: &E) -> Box<dyn Rollouts<E>> {
        let context = RolloutContext {
            tokenizer: self.tokenizer.clone(),
            mask_older: self.mask_older,
            lockstep: self.in_rounds(),
            admission: self.admission.clone(),
            metrics: self.metrics.clone(),
        };
        context.rollouts(self.agent.as_ref(), engine)
    }

    /// Admits prompts while there is room, or a whole round after the last one (law V3). Waits only if
    /// nothing is in flight. Returns false once the prompts have ended.
    fn admit(
        &self,
        io: &mut Io<Prompt, Group>,
        engine: &mut E,
        rollouts: &mut dyn Rollouts<E>,
        received: &mut u64,
    ) -> Result<bool, StageError> {
        if let Some(admission) = self.admission.as_ref().filter(|admission| admission.in_rounds()) {
            let mut rest = u64::from(rollouts.is_idle(engine));
            while rest > 0 {
                let Some(prompt) = io.recv()? else { return Ok(false) };
                self.submit(engine, rollouts, prompt)?;
                *received += 1;
                rest = admission.rest_of_round(*received);
            }
            return Ok(true);
        }
        while rollouts.room(engine) > 0 {
            let prompt = match rollouts.is_idle(engine) {
                true => io.recv()?,
                false => match io.try_recv() {
                    Poll::Ready(arrived) => arrived,
                    Poll::Pending => return Ok(true),
                },
            };
            let Some(prompt) = prompt else { return Ok(false) };
            self.submit(engine, rollouts, prompt)?;
        }
        Ok(true)
    }

    fn submit(&self, engine: &mut E, rollouts: &mut dyn Rollouts<E>, mut prompt: Prompt) -> Result<(), StageError> {
        let version = engine.version();
        let params = self.params_of(prompt.ordinal, version);
        prompt.partial = self.resume(&mut prompt, version.unwrap_or_default());
        rollouts.admit(engine, prompt, self.group_size, params)?;
        Ok(())
    }

    /// Takes the partial completions off a prompt and returns those to be continued (law D7).
    fn resume(&self, prompt: &mut Prompt, version: Version) -> Partial {
        let usable = |answer: &Answer| self.agent.is_some() || self.continues(answer, version);
        match &self.admission {
            Some(admission) => admission.resume(prompt, version, usable),
            None => {
                let mut partial = std::mem::take(&mut prompt.partial);
                let _discarded = partial.retain(usable);
                partial
            }
        }
    }

    /// Returns true if a completion of an interrupted run can be continued. If no sample may mix
    /// versions, the weights of one that has not ended must still be there.
    fn continues(&self, answer: &Answer, version: Version) -> bool {
        let pure = self.settings.on_new_weights != OnNewWeights::Finish || answer.versions.oldest() == Some(version);
        answer.index < self.group_size && (answer.has_ended() || pure)
    }

    /// Sampling parameters of a prompt that an engine of `version` takes up.
    fn params_of(&self, ordinal: u64, version: Option<Version>) -> SamplingParams {
        let entered = self.admission.as_ref().and_then(|admission| admission.ledger().entered_under(ordinal)).or(version);
        let params = self.params.clone();
        match (&self.temperature, entered) {
            (Some(by_version), Some(version)) => SamplingParams { temperature: by_version(version), ..params },
            _ => params,
        }
    }

    fn set_weights(&self, engine: &mut E, rollouts: &mut dyn Rollouts<E>, version: Version, weights: &E::Weights) {
        rollouts.expire(engine, version);
        engine.set_weights(version, weights);
        if let Some(metrics) = &self.metrics {
            metrics.set(Metric::WeightVersion, &["generator"], version as f64);
            // The series exists before its first token.
            metrics.add(Metric::Tokens, &[Fate::Truncated.label()], 0.0);
        }
    }

    /// Computes one token of every sample in flight.
    fn step(
        &self,
        engine: &mut E,
        rollouts: &mut dyn Rollouts<E>,
        concurrency: Option<&mut Concurrency>,
    ) -> Result<(), StageError> {
        let finished = engine.step()?;
        if let Some(hook) = &self.each_step {
            hook(engine.load());
        }
        if let Some(concurrency) = concurrency {
            let (in_use, tokens) = (engine.active() + finished.len(), engine.sampled().len());
            engine.limit_slots(concurrency.step(in_use, tokens, engine.load().time.as_secs_f64()));
            if let Some(metrics) = &self.metrics {
                metrics.set(Metric::GeneratorSlots, &[], concurrency.slots() as f64);
            }
        }
        if let Some(metrics) = &self.metrics {
            metrics.add(Metric::GeneratedTokens, &[], engine.sampled().len() as f64);
            engine.load().record(metrics);
        }
        rollouts.record(engine, finished)?;
        Ok(())
    }

    fn count(&self, group: &Group) {
        let Some(metrics) = &self.metrics else { return };
        for sample in &group.samples {
            metrics.add(Metric::Samples, &[status_label(sample)], 1.0);
            metrics.observe_of(Metric::ResponseLength, &[], sample.generated() as f64, Some(sample.group_index));
        }
    }
}

fn status_label(sample: &Sample) -> &'static str {
    match sample.status {
        Status::Completed => "completed",
        Status::Truncated => "truncated",
        Status::Aborted => "aborted",
        Status::Pending => "pending",
    }
}

#[cfg(feature = "torch")]
impl Generator<crate::engine::LocalEngine> {
    /// Generates in this process, under the newest weights of the flow. It starts with the first version
    /// (law V4).
    pub fn local(policy: &crate::train::Policy) -> Self {
        Generator::local_on(policy, [policy.compute().device])
    }

    /// Generates on these devices, which the workers ([`Generator::workers`]) take in turn. Completions
    /// do not depend on the device, up to rounding.
    pub fn local_on(policy: &crate::train::Policy, devices: impl IntoIterator<Item = tch::Device>) -> Self {
        let tokenizer = policy.tokenizer().clone();
        let policy = policy.clone();
        let (devices, started) = (devices.into_iter().collect::<Vec<_>>(), std::sync::atomic::AtomicUsize::new(0));
        let make = move |settings: &EngineSettings| {
            let engine =
                crate::engine::LocalEngine::new(policy.decoder(), policy.tokenizer().clone(), settings.slots, settings.seed);
            let turn = started.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % devices.len().max(1);
            let compute = policy.compute();
            let device = devices.get(turn).copied().unwrap_or(compute.device);
            let engine = engine.computing(crate::model::Compute { device, ..compute });
            let engine = engine.threads(settings.threads.unwrap_or_else(|| crate::model::threads_of_engine(policy.config())));
            let engine = engine.remembering(settings.prefix_cache).cache_tokens(settings.cache_tokens);
            let engine = engine.drafting(settings.draft_tokens);
            let engine = engine.recording_routes(settings.routes);
            engine.on_new_weights(settings.on_new_weights)
        };
        Generator::by(make, &tokenizer)
    }
}

impl Generator<Fleet> {
    /// Generates on the engines of `handle`, from the first synced version of the flow (law V4). One
    /// worker is enough: it computes nothing.
    pub fn remote(handle: &FleetHandle, config: FleetConfig, tokenizer: &Arc<Tokenizer>) -> Self {
        let (handle, reads) = (handle.clone(), tokenizer.clone());
        let make = move |settings: &EngineSettings| Fleet::new(&handle, config.clone(), &reads, settings.slots, settings.seed);
        Generator::by(make, tokenizer)
    }
}

impl<E: TokenEngine> Stage for Generator<E> {
    type In = Prompt;
    type Out = Group;

    fn run(&mut self, io: &mut Io<Prompt, Group>) -> Result<(), StageError> {
        let slots = self.settings.slots.div_ceil(self.engines());
        let mut engine = self.engine();
        if let Some(admission) = self.admission.as_ref().filter(|admission| !admission.in_rounds()) {
            engine.allow_older(Arc::new(admission.clone()));
        }
        let mut rollouts = self.rollouts(&engine);
        let (version, weights) = io.wait_weights(&mut self.weights, 0)?;
        self.set_weights(&mut engine, &mut *rollouts, version, &weights);
        let adaptive = self.adaptive && !self.in_rounds() && self.agent.is_none();
        let mut concurrency = adaptive.then(|| Concurrency::new(slots));
        if let Some(concurrency) = &concurrency {
            engine.limit_slots(concurrency.slots());
        }
        let (mut more, mut received) = (true, 0);
        while io.signal() != Signal::Stop {
            more = more && self.admit(io, &mut engine, &mut *rollouts, &mut received)?;
            if !more && rollouts.is_idle(&engine) {
                break;
            }
            rollouts.submit(&mut engine)?;
            let nothing_to_compute = engine.is_idle() && rollouts.awaits_environments();
            rollouts.poll(if nothing_to_compute { POLL } else { Duration::ZERO })?;
            if engine.version().is_some_and(|version| self.weights.has_newer_than(version))
                && let Some((version, weights)) = self.weights.latest()
            {
                self.set_weights(&mut engine, &mut *rollouts, version, &weights);
            }
            if !engine.is_idle() {
                self.step(&mut engine, &mut *rollouts, concurrency.as_mut())?;
            }
            for group in rollouts.take_groups() {
                self.count(&group);
                io.send(group)?;
            }
        }
        Ok(())
    }

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        context.fill(&mut self.metrics);
        context.subscribe(&mut self.weights);
        self.settings.seed = self.seed.or(context.seed()).unwrap_or_default();
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::default().workers(self.engines()).threads(self.settings.threads.unwrap_or(0));
        spec.subscribes(&self.weights).knob("threads, workers or max_num_seqs")
    }

    fn replica(&self) -> Option<Self> {
        Some(Generator {
            make: self.make.clone(),
            tokenizer: self.tokenizer.clone(),
            weights: self.weights.clone(),
            settings: self.settings.clone(),
            params: self.params.clone(),
            temperature: self.temperature.clone(),
            each_step: self.each_step.clone(),
            metrics: self.metrics.clone(),
            admission: self.admission.clone(),
            agent: self.agent.clone(),
            ..*self
        })
    }
}
