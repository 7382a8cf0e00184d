//! The engine's thread: takes commands between two steps, and sends each request its tokens.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use super::sampling::OneOrMany;
use crate::algo::{CrossEntropy, Schedule};
use crate::data::{Routes, Sample, TopK, TopTokens, Version};
use crate::engine::remote::PauseMode;
use crate::engine::{EngineError, FinishReason, LocalEngine, OnNewWeights, Request, SamplingParams, TokenEngine};
use crate::flow::caught;
use crate::model::FrozenWeights;
use crate::observe::{Metric, Metrics};
use crate::train::{LocalConfig, Policy, Scorer};

/// Name of an adapter; `None` for the model's own weights.
pub(super) type AdapterName = Option<Arc<str>>;

/// One HTTP request for completions.
pub(super) struct Job {
    pub id: u64,
    /// Name that the client gave the request, or one of each prompt, to abort it.
    pub rid: Option<OneOrMany<String>>,
    pub prompts: Vec<Arc<[u32]>>,
    /// Completions of each prompt.
    pub samples: u32,
    pub params: Arc<SamplingParams>,
    pub seed: Option<u64>,
    pub adapter: AdapterName,
    /// Whether the experts of tokens are wanted.
    pub routes: bool,
    pub asked: Instant,
    pub pieces: UnboundedSender<Piece>,
}

/// News of one completion of a job.
pub(super) enum Piece {
    Token { choice: usize, token: u32, log_prob: f32, label: Arc<str> },
    End { choice: usize, end: End, routes: Option<Routes> },
}

/// End of a completion.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum End {
    Finished(FinishReason),
    Aborted,
    Failed(String),
}

/// Weights under a name, to install together.
pub(super) struct Installed {
    pub label: Arc<str>,
    pub weights: Arc<FrozenWeights>,
    /// The adapters over these weights.
    pub adapters: BTreeMap<Arc<str>, Arc<FrozenWeights>>,
}

type Done<T> = oneshot::Sender<T>;

pub(super) enum Command {
    /// Ends the thread.
    Stop,
    Generate(Job),
    Score(Score),
    /// The client of this job is gone.
    Cancel(u64),
    /// Ends the requests of this name, or all, with what they have.
    Abort(Option<String>),
    Pause {
        mode: PauseMode,
        reply: Done<()>,
    },
    Resume {
        reply: Done<()>,
    },
    /// Forgets remembered sequences.
    Flush,
    /// Frees the memory of weights, keys and values, unless completions are in flight. The weights in host
    /// memory take the place of those that are served until others are installed.
    Sleep {
        what: Installed,
        reply: Done<Result<(), String>>,
    },
    Install {
        what: Installed,
        reply: Done<()>,
    },
    /// Renames the served weights.
    Label {
        label: Arc<str>,
        reply: Done<()>,
    },
    Adapter {
        name: Arc<str>,
        weights: Option<Arc<FrozenWeights>>,
        reply: Done<()>,
    },
}

/// A text whose tokens' log-probabilities are asked for, of each but the first, and the `k` likeliest
/// tokens in each of their places.
pub(super) struct Score {
    pub tokens: Vec<u32>,
    pub adapter: AdapterName,
    pub k: usize,
    pub reply: Done<Result<TextScores, String>>,
}

impl Score {
    /// Returns true unless the client left.
    fn is_awaited(&self) -> bool {
        !self.reply.is_closed()
    }
}

/// Log-probability of each token but the first, and the likeliest tokens, from position 1 on.
#[derive(Clone, Debug, Default)]
pub(super) struct TextScores {
    pub log_probs: Vec<f32>,
    pub top: TopTokens,
}

/// Completions of one prompt of a job.
struct Open {
    job: u64,
    rid: Option<String>,
    /// Index of the prompt's first completion in the job.
    first: usize,
    /// Samples without an end.
    left: BTreeSet<u32>,
    /// Time of the request, until its first token.
    asked: Option<Instant>,
    pieces: UnboundedSender<Piece>,
}

/// Sizes and seed of the engine.
pub(super) struct Setup {
    pub slots: usize,
    pub prefix_cache: usize,
    pub cache_tokens: Option<usize>,
    pub draft_tokens: usize,
    pub seed: u64,
}

pub(super) struct Worker {
    engine: LocalEngine,
    scorer: Scorer,
    served: Installed,
    /// Label of each version that was installed.
    labels: Vec<Arc<str>>,
    /// By the ordinal of the engine's request.
    open: BTreeMap<u64, Open>,
    next: u64,
    paused: Option<PauseMode>,
    scores: VecDeque<Score>,
    commands: UnboundedReceiver<Command>,
    metrics: Metrics,
}

impl Worker {
    pub fn new(policy: &Policy, setup: Setup, metrics: Metrics, commands: UnboundedReceiver<Command>) -> Self {
        let config = LocalConfig { compute: policy.compute(), ..LocalConfig::new(CrossEntropy, Schedule::constant(0.0)) };
        let label: Arc<str> = super::shared::UNNAMED.into();
        Worker {
            engine: policy
                .engine(setup.slots, setup.seed)
                .remembering(setup.prefix_cache)
                .cache_tokens(setup.cache_tokens)
                .drafting(setup.draft_tokens)
                .recording_routes(true),
            scorer: Scorer::new(config, policy.config().clone()),
            served: Installed { label: label.clone(), weights: policy.frozen(), adapters: BTreeMap::new() },
            labels: vec![label],
            open: BTreeMap::new(),
            next: 0,
            paused: None,
            scores: VecDeque::new(),
            commands,
            metrics,
        }
    }

    /// Works until the last sender of commands is dropped.
    pub fn run(mut self) {
        loop {
            let idle = self.paused.is_some() || (self.engine.is_idle() && self.scores.is_empty());
            let command =
                if idle { self.commands.blocking_recv().ok_or(TryRecvError::Disconnected) } else { self.commands.try_recv() };
            match command {
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return,
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => {
                    let score = self.scores.pop_front().filter(Score::is_awaited);
                    if let Some(Score { tokens, adapter, k, reply }) = score {
                        // The tensor library panics without memory; other requests continue.
                        let scored = caught(|| self.score(tokens, adapter, k)).unwrap_or_else(Err);
                        drop(reply.send(scored));
                    }
                    self.step();
                }
            }
        }
    }

    fn take(&mut self, command: Command) {
        // A reply that no one waits for is dropped.
        match command {
            Command::Stop => {}
            Command::Generate(job) => self.submit(job),
            Command::Score(score) => {
                // Texts whose clients left have no room in the queue any more.
                self.scores.retain(Score::is_awaited);
                self.scores.push_back(score);
            }
            Command::Cancel(job) => self.end(|open| open.job == job, &End::Aborted),
            Command::Abort(None) => self.end(|_| true, &End::Aborted),
            Command::Abort(rid) => self.end(|open| open.rid == rid, &End::Aborted),
            Command::Pause { mode, reply } => {
                match mode {
                    PauseMode::Abort => self.end(|_| true, &End::Aborted),
                    PauseMode::Recompute => self.engine.retract(),
                    PauseMode::Keep | PauseMode::Finish => {}
                }
                self.paused = Some(mode);
                reply.send(()).ok();
            }
            Command::Resume { reply } => {
                self.paused = None;
                reply.send(()).ok();
            }
            Command::Flush => self.engine.forget(),
            Command::Sleep { what, reply } => drop(reply.send(self.sleep(what))),
            Command::Install { what, reply } => {
                self.install(what);
                reply.send(()).ok();
            }
            Command::Label { label, reply } => {
                if label != self.served.label {
                    self.labels.push(label.clone());
                    self.engine.rename(self.version());
                    self.served.label = label;
                }
                reply.send(()).ok();
            }
            Command::Adapter { name, weights, reply } => {
                let version = self.version();
                let read = weights.as_ref().map(|weights| weights.read());
                // An engine that sleeps gets it with its next weights.
                let sleeps = self.engine.version().is_none();
                let dropped = if sleeps { Vec::new() } else { self.engine.set_adapter(&name, version, read.as_ref()) };
                match weights {
                    Some(weights) => drop(self.served.adapters.insert(name, weights)),
                    None => drop(self.served.adapters.remove(&name)),
                }
                let end = End::Failed("its LoRA adapter was unloaded".to_owned());
                dropped.into_iter().for_each(|(ordinal, index)| self.end_sample(ordinal, index, &end, None));
                reply.send(()).ok();
            }
        }
        self.gauge();
    }

    fn version(&self) -> Version {
        self.labels.len() as Version - 1
    }

    /// Installs weights by the rule of the pause. Without one, samples end under the weights that
    /// they began with.
    fn install(&mut self, what: Installed) {
        let rule = match self.paused {
            Some(PauseMode::Keep | PauseMode::Finish) => OnNewWeights::Swap,
            Some(PauseMode::Recompute | PauseMode::Abort) => OnNewWeights::Abort,
            None => OnNewWeights::Finish,
        };
        self.install_with(what, rule);
    }

    fn sleep(&mut self, what: Installed) -> Result<(), String> {
        self.scores.retain(Score::is_awaited);
        let (open, scores) = (self.open.len(), self.scores.len());
        if open + scores > 0 {
            return Err(format!("{open} completions and {scores} texts are in work: wait for them, or abort them first"));
        }
        self.engine.rest();
        self.scorer.forget();
        self.served = what;
        self.metrics.add(Metric::ServedSleeps, &[], 1.0);
        Ok(())
    }

    fn install_with(&mut self, what: Installed, rule: OnNewWeights) {
        self.labels.push(what.label.clone());
        let version = self.version();
        self.engine.change_on_new_weights(rule);
        TokenEngine::set_weights(&mut self.engine, version, &what.weights);
        for (name, weights) in &what.adapters {
            self.engine.set_adapter(name, version, Some(&weights.read()));
        }
        self.served = what;
    }

    fn submit(&mut self, job: Job) {
        for (at, prompt) in job.prompts.iter().enumerate() {
            let (ordinal, first) = (self.next, at * job.samples as usize);
            self.next += 1;
            let open = Open {
                job: job.id,
                rid: job.rid.as_ref().and_then(|rid| rid.of(at)).cloned(),
                first,
                left: (0..job.samples).collect(),
                asked: Some(job.asked),
                pieces: job.pieces.clone(),
            };
            self.open.insert(ordinal, open);
            let request = Request {
                seed: job.seed,
                adapter: job.adapter.clone(),
                routes: job.routes,
                ..Request::new(ordinal, prompt.clone(), job.samples, job.params.clone())
            };
            if let Err(error) = self.engine.submit(request) {
                self.end_request(ordinal, &End::Failed(error.to_string()));
            }
        }
    }

    fn step(&mut self) {
        if self.paused.is_some() || self.engine.is_idle() {
            return;
        }
        let finished = self.engine.step();
        let (sampled, load) = (self.engine.sampled(), self.engine.load());
        self.metrics.add(Metric::ServedTokens, &[], sampled.len() as f64);
        self.metrics.add(Metric::ServedPrefill, &[], load.prefill as f64);
        load.record(&self.metrics);
        for token in sampled {
            let Some(open) = self.open.get_mut(&token.ordinal) else { continue };
            if let Some(asked) = open.asked.take() {
                self.metrics.observe(Metric::ServedFirstToken, &[], asked.elapsed().as_secs_f64());
            }
            let choice = open.first + token.index as usize;
            let label = self.labels[token.version as usize].clone();
            // A client that is gone cancels its job.
            drop(open.pieces.send(Piece::Token { choice, token: token.token, log_prob: token.log_prob, label }));
        }
        match finished {
            Ok(finished) => {
                for finished in finished {
                    let end = finished.finish.map_or_else(End::Failed, End::Finished);
                    self.end_sample(finished.ordinal, finished.index, &end, finished.routes);
                }
            }
            Err(error) => self.recover(error),
        }
        self.gauge();
    }

    /// Ends the request that an error names, or else all, and retracts the others: the step was
    /// left half-done.
    fn recover(&mut self, error: EngineError) {
        tracing::error!("{error}");
        // The samples that the step completed before the error.
        self.engine.retract();
        let end = End::Failed(error.to_string());
        match error {
            EngineError::NonFinite { ordinal, .. } => self.end_request(ordinal, &end),
            _ => self.end(|_| true, &end),
        }
    }

    /// Ends all requests that match, with what they have.
    fn end(&mut self, which: impl Fn(&Open) -> bool, end: &End) {
        let ordinals: Vec<u64> = self.open.iter().filter(|(_, open)| which(open)).map(|(ordinal, _)| *ordinal).collect();
        ordinals.into_iter().for_each(|ordinal| self.end_request(ordinal, end));
    }

    fn end_request(&mut self, ordinal: u64, end: &End) {
        self.engine.cancel(ordinal);
        let left = self.open.get(&ordinal).map(|open| open.left.clone()).unwrap_or_default();
        left.into_iter().for_each(|index| self.end_sample(ordinal, index, end, None));
    }

    fn end_sample(&mut self, ordinal: u64, index: u32, end: &End, routes: Option<Routes>) {
        let Some(open) = self.open.get_mut(&ordinal) else { return };
        let status = match end {
            End::Finished(FinishReason::Stop) => "completed",
            End::Finished(FinishReason::Length) => "truncated",
            End::Aborted | End::Failed(_) => "aborted",
        };
        self.metrics.add(Metric::ServedSamples, &[status], 1.0);
        drop(open.pieces.send(Piece::End { choice: open.first + index as usize, end: end.clone(), routes }));
        open.left.remove(&index);
        if open.left.is_empty() {
            self.open.remove(&ordinal);
        }
    }

    fn score(&mut self, tokens: Vec<u32>, adapter: AdapterName, k: usize) -> Result<TextScores, String> {
        let weights = match &adapter {
            None => &self.served.weights,
            Some(name) => self.served.adapters.get(name).ok_or_else(|| format!("the LoRA adapter {name:?} is not loaded"))?,
        };
        let loss_mask = [vec![0.0], vec![1.0; tokens.len() - 1]].concat();
        let mut samples = [Sample { tokens, loss_mask, ..Sample::default() }];
        self.scorer.annotate(weights, &mut samples, TopK { k, below: usize::MAX }).map_err(|error| error.to_string())?;
        let [Sample { ref_log_probs, teacher, .. }] = samples;
        Ok(TextScores { log_probs: ref_log_probs[1..].to_vec(), top: teacher.unwrap_or_default() })
    }

    fn gauge(&self) {
        self.metrics.set(Metric::ServedActive, &[], self.engine.active() as f64);
        let open: usize = self.open.values().map(|open| open.left.len()).sum();
        self.metrics.set(Metric::ServedOpen, &[], open as f64);
        self.metrics.set(Metric::ServedPaused, &[], f64::from(u8::from(self.paused.is_some())));
        if let Ok(version) = self.served.label.parse::<u32>() {
            self.metrics.set(Metric::ServedVersion, &[], f64::from(version));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;

    use super::super::tests::policy;
    use super::*;
    use crate::model::Lora;

    fn worker() -> Worker {
        let setup = Setup { slots: 4, prefix_cache: 2, cache_tokens: None, draft_tokens: 0, seed: 0 };
        Worker::new(&policy(), setup, Metrics::new(), unbounded_channel().1)
    }

    fn install(label: &str, adapters: BTreeMap<Arc<str>, Arc<FrozenWeights>>) -> Command {
        let what = Installed { label: label.into(), weights: policy().frozen(), adapters };
        Command::Install { what, reply: oneshot::channel().0 }
    }

    #[test]
    fn v5_renamed_weights_keep_what_is_remembered_and_older_ones_their_completions() {
        let (mut worker, (pieces, _news)) = (worker(), unbounded_channel());
        let params = Arc::new(SamplingParams { max_new_tokens: 9, ignore_eos: true, ..Default::default() });
        let ask = |id| Job {
            id,
            rid: None,
            prompts: vec![(4..14).cycle().take(40).collect()],
            samples: 1,
            params: params.clone(),
            seed: None,
            adapter: None,
            routes: false,
            asked: Instant::now(),
            pieces: pieces.clone(),
        };
        let rename = |label: &str| Command::Label { label: label.into(), reply: oneshot::channel().0 };
        worker.take(Command::Generate(ask(0)));
        worker.step();
        worker.take(install("next", BTreeMap::new()));
        worker.take(rename("renamed"));
        worker.take(Command::Generate(ask(1)));
        let mut versions = BTreeSet::new();
        while !worker.engine.is_idle() {
            worker.step();
            versions.extend(worker.engine.sampled().iter().map(|token| (token.ordinal, token.version)));
        }
        assert_eq!(
            versions.iter().map(|(of, version)| (*of, &*worker.labels[*version as usize])).collect::<Vec<_>>(),
            [(0, "default"), (1, "renamed")]
        );
        worker.take(rename("again"));
        worker.take(Command::Generate(ask(2)));
        worker.step();
        assert_eq!(worker.engine.load().reused, 39);
    }

    #[test]
    fn an_adapter_that_a_sleeping_server_loads_is_in_its_engine_with_the_next_weights() {
        let (mut worker, policy) = (worker(), policy());
        let what = Installed { label: "default".into(), weights: policy.frozen(), adapters: BTreeMap::new() };
        worker.sleep(what).unwrap();
        let adapted = policy.weights().adapted(policy.config(), Lora::new(2, 4.0, &[Lora::ALL]).unwrap(), 1);
        let weights = Some(Arc::new(FrozenWeights::of_own(adapted)));
        worker.take(Command::Adapter { name: "a".into(), weights, reply: oneshot::channel().0 });
        let ask = || Request { adapter: Some("a".into()), ..Request::new(0, [5], 1, Arc::default()) };
        assert!(worker.engine.submit(ask()).is_err());
        worker.take(install("default", worker.served.adapters.clone()));
        worker.engine.submit(ask()).unwrap();
    }
}
