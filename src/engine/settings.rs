//! `[engine]`: the engine of a run, its servers and their weight sync.

use std::path::PathBuf;

use super::remote::parse_address;
use super::remote::sync::{Carry, SyncConfig};
use crate::model::Dtype;
use crate::settings::declare::{choices, section};
use crate::settings::setting::{Limit, NOT_NEGATIVE, POSITIVE, POSITIVE_IF_GIVEN, SOME};

section! {
    /// Engine that generates: this process, or servers over HTTP, which load the trained weights
    /// from a folder.
    pub struct Engine {
        /// Kind of engine.
        kind: EngineKind = EngineKind::default();
        /// Running servers, as `http://host:port` or `https://host`. One of another kind names it:
        /// `vllm+http://host:port`.
        urls: Vec<String> = Vec::new();
        /// Servers that come and go, in addition to `urls`: a file with an address a line, as in
        /// `urls`, which is watched, or `dns://host:port`, whose addresses are looked up.
        members: Option<String> = None;
        /// Seconds that a server may continue its work after it left `members`; the rest of its
        /// work continues on others.
        drain_timeout: f64 = 30.0, NOT_NEGATIVE;
        /// Seconds without a token after which a sample continues on another server that has room.
        /// Left out: only after 120.
        hedge_after: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Environment variable with a token for all servers, sent as `Authorization: Bearer …`.
        /// The token itself is never written.
        token_env: Option<String> = None;
        /// Servers to start on this machine for the duration of the run, in addition to `urls`.
        launch: Launch = Launch::default();
        /// Number of servers to start.
        replicas: usize = 1, REPLICAS;
        /// GPU of each started server, by its number from 0. Left out: one GPU each, of those that
        /// the run does not compute on, as far as there are any; with `carry = "ipc"`, the trainer's.
        devices: Vec<usize> = Vec::new();
        /// Share of its GPU's memory that each started server takes. Left out: on a GPU that the
        /// run computes on, what the memory plan leaves; elsewhere the server's own default.
        gpu_memory: Option<f64> = None, SHARE_IF_GIVEN;
        /// Port of the first started server; the others follow.
        port: usize = 8400, PORT;
        /// Command that starts a server, before its flags. Left out: that of `scripts/engines.sh`,
        /// else of the machine.
        program: Option<String> = None;
        /// Further flags, one word each.
        flags: Vec<String> = Vec::new();
        /// Further environment variables, each as `NAME=value`.
        env: Vec<String> = Vec::new();
        /// Seconds until a started server must be ready.
        start_timeout: f64 = 600.0, POSITIVE;
        /// Number of times that a started server is restarted after it ended.
        restarts: u32 = 3;
        /// Model name in requests. Left out: the first that the server lists.
        model: Option<String> = None;
        /// Format of whole models that servers get. Left out: that of the model's folder. With
        /// `"bf16"`, few numbers change at a small learning rate, so that deltas of `[store]` are
        /// small.
        dtype: Option<Dtype> = None;
        /// If true, a model whose output head is tied to its embedding is exported with a head of
        /// its own; the servers must have been started so. Left out: true if a server is vLLM, which
        /// reloads one without the other, else false.
        untie: Option<bool> = None;
        /// Folder for weight versions, which the servers can read. Left out: `engine` in the run
        /// folder.
        folder: Option<PathBuf> = None;
        /// Versions that are kept there, in addition to those being read.
        keep: usize = 2, SOME;
        /// Mean difference, in nats, that a server's log-probabilities may have from the trainer's
        /// after a sync. Left out: 0.001 in f32, 0.08 in bf16 and 0.02 in f16 (`model.dtype`). For
        /// a server that computes in another format than the trainer, give the value of that
        /// format.
        tolerance: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Seconds that a run waits when all servers are lost.
        #[formerly(patience)]
        lost_timeout: f64 = 120.0, NOT_NEGATIVE;
        last sync: SyncConfig;
    }
}

const SHARE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0, below 1", holds: |value| value.is_none_or(|value| value > 0.0 && value < 1.0) };

/// Most servers that a run can start, each at another port.
const MOST_REPLICAS: usize = 65_536;

const REPLICAS: Limit<usize> = Limit { text: "1 to 65536", holds: |count| (1..=MOST_REPLICAS).contains(count) };

const PORT: Limit<usize> = Limit { text: "1 to 65535", holds: |port| (1..=65_535).contains(port) };

choices! {
    /// Kind of engine.
    pub enum EngineKind {
        /// this process.
        "local" => Local,
        /// vLLM servers.
        "vllm" => Vllm,
        /// SGLang servers.
        "sglang" => Sglang,
        /// `rollflow serve`, which speaks SGLang's protocol.
        "rollflow" => Rollflow,
        /// servers with OpenAI's API, which cannot be given weights: for generation without
        /// training.
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
    /// Kind of engine, which `launch` implies.
    pub fn kind(&self) -> EngineKind {
        match (self.kind, self.launch) {
            (EngineKind::Local, Launch::Vllm) => EngineKind::Vllm,
            (EngineKind::Local, Launch::Sglang) => EngineKind::Sglang,
            (kind, _) => kind,
        }
    }

    /// Kinds of the servers: that of the section, and those that `urls` name.
    pub fn kinds(&self) -> Vec<EngineKind> {
        let named = self.urls.iter().filter_map(|url| parse_address(url, self.kind()).ok());
        let mut kinds = vec![self.kind()];
        named.for_each(|(kind, _)| {
            if !kinds.contains(&kind) {
                kinds.push(kind)
            }
        });
        kinds
    }

    /// Returns true if servers generate.
    pub fn is_remote(&self) -> bool {
        self.kind() != EngineKind::Local
    }

    /// Returns true if a tied output head is exported untied.
    pub fn unties(&self) -> bool {
        self.untie.unwrap_or_else(|| self.kinds().contains(&EngineKind::Vllm))
    }

    /// Addresses of the servers that the run starts.
    pub fn launched_urls(&self) -> Vec<String> {
        let of = |at: usize| format!("http://127.0.0.1:{}", self.port.saturating_add(at));
        // Checks also ask for the addresses of a section that is out of range.
        let count = if self.launch == Launch::None { 0 } else { self.replicas.min(MOST_REPLICAS) };
        (0..count).map(of).collect()
    }

    /// GPU of each server that the run starts, by number: those of the section, or one each of `count`, GPUs
    /// that the run does not compute on first. With [`Carry::Ipc`] the trainer's. Fewer if there are fewer, and
    /// none if its environment selects them. `own` are the GPUs that the run computes on, the trainer's first.
    pub fn gpus(&self, count: usize, own: &[usize]) -> Vec<usize> {
        if self.launch == Launch::None {
            return Vec::new();
        }
        if !self.devices.is_empty() || self.env.iter().any(|pair| pair.starts_with("CUDA_VISIBLE_DEVICES=")) {
            return self.devices.clone();
        }
        if self.sync.carry == Carry::Ipc {
            return own.first().copied().into_iter().collect();
        }
        let (shared, free): (Vec<usize>, Vec<usize>) = (0..count).partition(|gpu| own.contains(gpu));
        free.into_iter().chain(shared).take(self.replicas).collect()
    }

    /// Addresses of all servers.
    pub fn all_urls(&self) -> Vec<String> {
        [self.urls.clone(), self.launched_urls()].concat()
    }
}
