//! `[engine]`: who generates, and how servers are given weights.

pub use crate::engine::remote::PauseMode;
pub use crate::engine::remote::sync::CachePolicy;
use std::path::PathBuf;

use crate::settings::declare::{choices, section};
use crate::settings::setting::{NOT_NEGATIVE, POSITIVE, SOME};

section! {
    /// Who generates: this process, or servers over HTTP, which are given the trained weights through a folder that they can read.
    pub struct Engine {
        /// What kind of engine.
        kind: EngineKind = EngineKind::default();
        /// Servers that run already, as `http://host:port` or `https://host`.
        urls: Vec<String> = Vec::new();
        /// The environment variable that holds a token for all of them, sent as `Authorization: Bearer …`. The token itself stands nowhere.
        token_env: Option<String> = None;
        /// What is started for as long as the run lasts, on this machine, besides.
        launch: Launch = Launch::default();
        /// How many of these.
        replicas: usize = 1, SOME;
        /// The GPU of each of these, by its number, the first being 0. Left out: GPUs that the run itself does not compute on, one each, as far as
        /// there are any.
        devices: Vec<usize> = Vec::new();
        /// The share of its GPU's memory that each takes. Left out: on a GPU that the run computes on what its plan leaves, else the server's own
        /// default.
        gpu_memory: Option<f64> = None, SHARE_IF_GIVEN;
        /// Port of the first of these; the others follow.
        port: usize = 8400, PORT;
        /// The command that starts one, with words before its flags; left out, that of `scripts/engines.sh` or else of the machine.
        program: Option<String> = None;
        /// More flags for it, one a word.
        flags: Vec<String> = Vec::new();
        /// More of its environment, each as `NAME=value`.
        env: Vec<String> = Vec::new();
        /// Seconds until one must be ready.
        start_timeout: f64 = 600.0, POSITIVE;
        /// Times that one which ended is started anew.
        restarts: u32 = 3;
        /// The model to ask a server for; left out, the first that it serves.
        model: Option<String> = None;
        /// What becomes of a server's work while it is given weights.
        pause: PauseMode = PauseMode::default();
        /// What becomes of keys and values that it remembers of prompts.
        cache: CachePolicy = CachePolicy::default();
        /// Whether a model whose output head is its embedding is handed over with a head of its own; the servers must have been started so. Left
        /// out: yes for vLLM, which reloads the one without the other, and no for others.
        untie: Option<bool> = None;
        /// Where versions are written for servers, a folder that they can read; left out, `engine` in the run's.
        folder: Option<PathBuf> = None;
        /// Versions that are kept there, besides those that are read.
        keep: usize = 2, SOME;
        /// Nats by which a server's log-probabilities may differ from the trainer's on average when it was given weights. Left out: 0.001 in f32, 0.08 in
        /// bf16 and 0.02 in f16 (`model.dtype`). A server that computes in another format than the trainer needs its format's.
        tolerance: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Whether servers are asked for checksums, which read all weights.
        checksums: bool = true;
        /// Tries beyond the first to give one server a version.
        retries: u32 = 2;
        /// Seconds for a pause.
        pause_timeout: f64 = 60.0, POSITIVE;
        /// Seconds for a load.
        load_timeout: f64 = 600.0, POSITIVE;
        /// Seconds for any other step of a sync.
        step_timeout: f64 = 60.0, POSITIVE;
        /// Seconds for which a run waits when all servers are away.
        patience: f64 = 120.0, NOT_NEGATIVE;
    }
}

const POSITIVE_IF_GIVEN: crate::settings::setting::Limit<Option<f64>> = crate::settings::setting::Limit {
    text: "above 0",
    holds: |value| value.is_none_or(|value| value > 0.0 && value.is_finite()),
};

const SHARE_IF_GIVEN: crate::settings::setting::Limit<Option<f64>> = crate::settings::setting::Limit {
    text: "above 0, below 1",
    holds: |value| value.is_none_or(|value| value > 0.0 && value < 1.0),
};

const PORT: crate::settings::setting::Limit<usize> =
    crate::settings::setting::Limit { text: "1 to 65535", holds: |port| (1..=65_535).contains(port) };

choices! {
    /// Kinds of engines.
    pub enum EngineKind {
        /// in this process.
        "local" => Local,
        /// vLLM servers.
        "vllm" => Vllm,
        /// SGLang servers.
        "sglang" => Sglang,
        /// servers that speak as OpenAI's do, and can't be given weights: to generate with, not to train.
        "openai" => OpenAi,
    }
}

choices! {
    /// Servers that a run starts.
    pub enum Launch {
        /// none.
        "none" => None,
        /// vLLM.
        "vllm" => Vllm,
        /// SGLang.
        "sglang" => Sglang,
    }
}

impl Engine {
    /// The kind, which `launch` implies.
    pub fn kind(&self) -> EngineKind {
        match (self.kind, self.launch) {
            (EngineKind::Local, Launch::Vllm) => EngineKind::Vllm,
            (EngineKind::Local, Launch::Sglang) => EngineKind::Sglang,
            (kind, _) => kind,
        }
    }

    /// Whether generation happens elsewhere.
    pub fn is_remote(&self) -> bool {
        self.kind() != EngineKind::Local
    }

    /// Whether a shared head is handed over as one of its own.
    pub fn unties(&self) -> bool {
        self.untie.unwrap_or(self.kind() == EngineKind::Vllm)
    }

    /// Where the servers are that a run starts.
    pub fn launched_urls(&self) -> Vec<String> {
        let of = |at: usize| format!("http://127.0.0.1:{}", self.port + at);
        if self.launch == Launch::None { Vec::new() } else { (0..self.replicas).map(of).collect() }
    }

    /// All servers.
    pub fn all_urls(&self) -> Vec<String> {
        [self.urls.clone(), self.launched_urls()].concat()
    }
}
