//! Generation on a thread of its own, by any [`TokenEngine`].
//!
//! Prompts enter as slots become free, groups leave as their last sample ends, and new weights are taken between two tokens: the thread
//! waits only when there is nothing to generate.
//!
//! Every token is written down in the [`Admission`]'s ledger with the step that sampled it, so that whatever ends the run loses none
//! (laws C1, D4). Partial completions that a prompt carries are continued (law D7). Answers too old to be trained are begun anew (law V2).

use std::sync::Arc;

use super::agent::{Agent, Setup};
use super::assembly::Assembly;
use crate::data::{Answer, Group, Partial, Prompt, Sample, Status, Tokenizer, Version};
use crate::engine::{Concurrency, Load, OnNewWeights, Request, SamplingParams, TokenEngine};
use crate::flow::{Io, RunContext, Signal, Stage, StageError, StageSpec, TryRecv, WeightsRx};
use crate::observe::{Metric, Metrics};
use crate::rollout::{Admission, Fate};

/// What a generator's engine is to be made with.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Samples at a time.
    pub slots: usize,
    /// Keys the randomness.
    pub seed: u64,
    /// Cores to compute with.
    pub threads: usize,
    /// What becomes of samples under way when weights change.
    pub on_new_weights: OnNewWeights,
}

/// Makes an engine on its worker's thread, which it never leaves.
type MakeEngine<E> = Arc<dyn Fn(&EngineSettings) -> E + Send + Sync>;

/// Answers each prompt `group_size` times.
pub struct Generator<E: TokenEngine> {
    make: MakeEngine<E>,
    tokenizer: Arc<Tokenizer>,
    pub(super) weights: WeightsRx<E::Weights>,
    settings: EngineSettings,
    params: SamplingParams,
    /// Where it changes over versions.
    temperature: Option<TemperatureByVersion>,
    pub(super) group_size: u32,
    workers: usize,
    mask_older: bool,
    /// Whether fewer slots are used where more bring nothing.
    adaptive: bool,
    pub(super) look: Option<LookAtStep>,
    pub(super) metrics: Option<Metrics>,
    pub(super) admission: Option<Admission>,
    /// Who answers what is said, where that is more than one turn.
    agent: Option<Agent>,
}

type LookAtStep = Arc<dyn Fn(Load) + Send + Sync>;
type TemperatureByVersion = Arc<dyn Fn(Version) -> f32 + Send + Sync>;

impl<E: TokenEngine> Generator<E> {
    /// Generates with the engine that `make` returns, under the newest weights of the flow. It starts with the first version (law V4).
    pub fn by(make: impl Fn(&EngineSettings) -> E + Send + Sync + 'static, tokenizer: &Arc<Tokenizer>) -> Self {
        Generator {
            make: Arc::new(make),
            tokenizer: tokenizer.clone(),
            weights: WeightsRx::default(),
            settings: EngineSettings { slots: 64, seed: 0, threads: 1, on_new_weights: OnNewWeights::default() },
            params: SamplingParams::default(),
            temperature: None,
            group_size: 8,
            workers: 1,
            mask_older: false,
            adaptive: false,
            look: None,
            metrics: None,
            admission: None,
            agent: None,
        }
    }

    /// Reads the weights of this edge instead of the flow's.
    pub fn weights(self, weights: WeightsRx<E::Weights>) -> Self {
        Generator { weights, ..self }
    }

    /// Samples for each prompt; 8 unless told otherwise.
    pub fn group_size(self, group_size: usize) -> Self {
        Generator { group_size: group_size.max(1) as u32, ..self }
    }

    /// How tokens are chosen, and how many at most.
    pub fn sampling(self, params: SamplingParams) -> Self {
        Generator { params, ..self }
    }

    /// Of a prompt that enters under a version, all answers are sampled at the temperature that this closure says, whatever interrupts them. Samples
    /// carry it ([`Sample::temperature`]), so that trainers score them at the same.
    pub fn temperature_by(self, by_version: impl Fn(Version) -> f32 + Send + Sync + 'static) -> Self {
        Generator { temperature: Some(Arc::new(by_version)), ..self }
    }

    /// Longest answer, in tokens.
    pub fn max_new_tokens(mut self, tokens: usize) -> Self {
        self.params.max_new_tokens = tokens;
        self
    }

    /// So many engines beside each other, on a thread each, that share the slots; 1 unless told otherwise. In rounds (law V3) there is one
    /// all the same, so that what is computed together depends on nothing but the round.
    pub fn workers(self, workers: usize) -> Self {
        Generator { workers: workers.max(1), ..self }
    }

    /// Samples that are generated at the same time; 64 unless told otherwise.
    pub fn slots(mut self, slots: usize) -> Self {
        (self.settings.slots, self.adaptive) = (slots.max(1), false);
        self
    }

    /// As many at the same time as the measured throughput is worth, at most `most` ([`Concurrency`]). Which samples are computed together then
    /// depends on timing, so that a run in rounds (law V3) keeps to `most`.
    pub fn adaptive_slots(mut self, most: usize) -> Self {
        (self.settings.slots, self.adaptive) = (most.max(1), true);
        self
    }

    /// What becomes of samples under way when new weights arrive; they go on under the new ones unless told otherwise.
    pub fn on_new_weights(mut self, on_new_weights: OnNewWeights) -> Self {
        self.settings.on_new_weights = on_new_weights;
        self
    }

    /// Of a sample that several versions made, only what the newest of them sampled weighs in the loss. Every token does unless told
    /// otherwise.
    pub fn mask_older(self, mask_older: bool) -> Self {
        Generator { mask_older, ..self }
    }

    /// Keys the randomness together with prompt, sample and position (law N2).
    pub fn seed(mut self, seed: u64) -> Self {
        self.settings.seed = seed;
        self
    }

    /// Cores that it computes with; 1 unless told otherwise.
    pub fn threads(mut self, threads: usize) -> Self {
        self.settings.threads = threads.max(1);
        self
    }

    /// Shows this closure what every step of the engine computed and how long it took.
    pub fn each_step(self, look: impl Fn(Load) + Send + Sync + 'static) -> Self {
        Generator { look: Some(Arc::new(look)), ..self }
    }

    /// Answers in several turns, in an environment: what leaves are whole rollouts, of which only what was sampled is trained.
    pub fn environment(self, agent: Agent) -> Self {
        Generator { agent: Some(agent), ..self }
    }

    fn engines(&self) -> usize {
        let in_rounds = self.admission.as_ref().is_some_and(Admission::in_rounds);
        if in_rounds { 1 } else { self.workers }
    }

    fn submit(&self, engine: &mut E, groups: &mut Assembly, mut prompt: Prompt) -> Result<(), StageError> {
        let tokens: Arc<[u32]> = self.tokenizer.encode_prompt(&prompt)?.into();
        let (ordinal, samples) = (prompt.ordinal, self.group_size);
        let Partial { completions: answers, .. } =
            self.resume(&mut prompt, engine.version(), &|answer, version| self.continues(answer, version));
        let params = self.params_of(ordinal, engine.version());
        groups.open(prompt, tokens.clone(), samples, params.temperature);
        engine.submit(Request { answers, ..Request::new(ordinal, tokens, samples, Arc::new(params)) })?;
        Ok(())
    }

    /// Takes the partial completions off a prompt and returns those to be continued (law D7): without an admission all that are
    /// `usable`.
    pub(super) fn resume(
        &self,
        prompt: &mut Prompt,
        version: Option<Version>,
        usable: &dyn Fn(&Answer, Version) -> bool,
    ) -> Partial {
        let version = version.unwrap_or_default();
        match &self.admission {
            Some(admission) => admission.resume(prompt, version, |answer| usable(answer, version)),
            None => {
                let mut partial = std::mem::take(&mut prompt.partial);
                let _unusable = partial.retain(|answer| usable(answer, version));
                partial
            }
        }
    }

    /// How a prompt's answers are sampled that comes to an engine of `version`.
    pub(super) fn params_of(&self, ordinal: u64, version: Option<Version>) -> SamplingParams {
        let entered = self.admission.as_ref().and_then(|admission| admission.entered_under(ordinal)).or(version);
        let params = self.params.clone();
        match (&self.temperature, entered) {
            (Some(by_version), Some(version)) => SamplingParams { temperature: by_version(version), ..params },
            _ => params,
        }
    }

    /// Whether an answer that an interrupted run began can go on. Where no sample may mix versions, one that older weights began can't:
    /// nobody has them any more.
    fn continues(&self, answer: &Answer, version: Version) -> bool {
        let pure = self.settings.on_new_weights != OnNewWeights::Finish || answer.versions.oldest() == Some(version);
        answer.index < self.group_size && (answer.has_ended() || pure)
    }

    /// Lets prompts in while slots are free; waits only when there is nothing else to do. False when none will come any more.
    fn admit(&self, io: &mut Io<Prompt, Group>, engine: &mut E, groups: &mut Assembly) -> Result<bool, StageError> {
        while engine.free_slots() > 0 {
            if engine.is_idle() {
                let Some(prompt) = io.recv()? else { return Ok(false) };
                self.submit(engine, groups, prompt)?;
                continue;
            }
            match io.try_recv()? {
                TryRecv::Item(prompt) => self.submit(engine, groups, prompt)?,
                TryRecv::Empty => break,
                TryRecv::Closed => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Lets a whole round in once the last one is done.
    fn admit_round(
        &self,
        io: &mut Io<Prompt, Group>,
        (engine, groups): (&mut E, &mut Assembly),
        (admission, received): (&Admission, &mut u64),
    ) -> Result<bool, StageError> {
        if !engine.is_idle() {
            return Ok(true);
        }
        loop {
            let Some(prompt) = io.recv()? else { return Ok(false) };
            self.submit(engine, groups, prompt)?;
            *received += 1;
            if admission.rest_of_round(*received) == 0 {
                return Ok(true);
            }
        }
    }

    fn swap(&self, engine: &mut E, (version, weights): (Version, Arc<E::Weights>)) {
        let truncated = self.admission.as_ref().map_or(0, |admission| {
            let expired = engine.restart_expired(&|ordinal, answer| admission.expires(ordinal, answer, version));
            expired.into_iter().map(|(ordinal, index)| admission.discard(ordinal, index)).sum()
        });
        engine.set_weights(version, &weights);
        if let Some(metrics) = &self.metrics {
            metrics.set(Metric::WeightVersion, &["generator"], version as f64);
            metrics.add(Metric::Tokens, &[Fate::Truncated.label()], truncated as f64);
        }
    }

    fn write_down(&self, engine: &E) {
        if let Some(admission) = &self.admission {
            let forgotten: u64 = engine.discarded().iter().map(|(ordinal, index)| admission.discard(*ordinal, *index)).sum();
            admission.sampled(engine.sampled().iter().copied());
            if let Some(metrics) = self.metrics.as_ref().filter(|_| forgotten > 0) {
                metrics.add(Metric::Tokens, &[Fate::Truncated.label()], forgotten as f64);
            }
        }
        if let Some(metrics) = &self.metrics {
            metrics.add(Metric::GeneratedTokens, &[], engine.sampled().len() as f64);
        }
    }

    fn show_slots(&self, slots: usize) {
        if let Some(metrics) = &self.metrics {
            metrics.set(Metric::GeneratorSlots, &[], slots as f64);
        }
    }

    pub(super) fn count(&self, group: &Group) {
        let Some(metrics) = &self.metrics else { return };
        for sample in &group.samples {
            metrics.add(Metric::Samples, &[status_label(sample)], 1.0);
            metrics.observe(Metric::ResponseLength, &[], sample.generated() as f64);
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

impl<E: TokenEngine> Stage for Generator<E> {
    type In = Prompt;
    type Out = Group;

    fn run(&mut self, io: &mut Io<Prompt, Group>) -> Result<(), StageError> {
        let slots = self.settings.slots.div_ceil(self.engines());
        let mut engine = (self.make)(&EngineSettings { slots, ..self.settings.clone() });
        if let Some(agent) = &self.agent {
            let setup = Setup {
                agent: agent.clone(),
                tokenizer: self.tokenizer.clone(),
                mask_older: self.mask_older,
                admission: self.admission.clone(),
                metrics: self.metrics.clone(),
            };
            return self.converse(io, engine, setup);
        }
        let mut groups = Assembly::new(self.mask_older);
        let first = io.wait_weights(&mut self.weights, 0)?;
        self.swap(&mut engine, first);
        let rounds = self.admission.clone().filter(Admission::in_rounds);
        let mut concurrency = (self.adaptive && rounds.is_none()).then(|| Concurrency::new(slots));
        if let Some(concurrency) = &concurrency {
            engine.limit_slots(concurrency.slots());
        }
        let (mut more, mut received) = (true, 0);
        while io.signal() != Signal::Stop {
            more = more
                && match &rounds {
                    None => self.admit(io, &mut engine, &mut groups)?,
                    Some(admission) => self.admit_round(io, (&mut engine, &mut groups), (admission, &mut received))?,
                };
            if engine.is_idle() && !more {
                break;
            }
            if engine.version().is_some_and(|version| self.weights.has_newer_than(version))
                && let Some(newest) = self.weights.latest()
            {
                self.swap(&mut engine, newest);
            }
            let finished = engine.step()?;
            if let Some(look) = &self.look {
                look(engine.load());
            }
            if let Some(concurrency) = &mut concurrency {
                let (in_use, tokens) = (engine.active() + finished.len(), engine.sampled().len());
                engine.limit_slots(concurrency.step(in_use, tokens, engine.load().time.as_secs_f64()));
                self.show_slots(concurrency.slots());
            }
            self.write_down(&engine);
            for finished in finished {
                if let Some(group) = groups.add(finished, &self.tokenizer)? {
                    self.count(&group);
                    io.send(group)?;
                }
            }
        }
        Ok(())
    }

    fn attach(&mut self, context: &mut RunContext) {
        context.fill(&mut self.admission);
        context.fill(&mut self.metrics);
        context.subscribe(&mut self.weights);
    }

    fn spec(&self) -> StageSpec {
        let spec = StageSpec::thread().workers(self.engines()).threads(self.settings.threads);
        spec.subscribes(self.weights.id()).knob("threads, workers or slots")
    }

    fn replica(&self) -> Option<Self> {
        Some(Generator {
            make: self.make.clone(),
            tokenizer: self.tokenizer.clone(),
            weights: self.weights.clone(),
            settings: self.settings.clone(),
            params: self.params.clone(),
            temperature: self.temperature.clone(),
            look: self.look.clone(),
            metrics: self.metrics.clone(),
            admission: self.admission.clone(),
            agent: self.agent.clone(),
            ..*self
        })
    }
}
