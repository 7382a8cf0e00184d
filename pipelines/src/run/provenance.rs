//! Facts of a run's record about where its numbers come from: code, machine, the contents of models and
//! data, and the variables that libraries read.

use std::collections::BTreeMap;
use std::process::Command;

use rollflow::observe::gpus;
use rollflow::recipe::{Plan, data_fingerprints, model_fingerprints};
use rollflow::util::secrets::{is_secret_name, masked};
use rollflow::util::untrusted;
use serde::{Deserialize, Serialize};

/// A repository's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Git {
    pub commit: String,
    /// The branch; empty for none.
    pub branch: String,
    /// If true, tracked files had uncommitted changes.
    pub changed: bool,
}

/// Machine of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    pub host: String,
    pub system: String,
    pub processor: String,
    /// Threads that run at the same time.
    pub threads: usize,
    pub memory_gib: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
}

/// Variables that change how a run computes; a name that ends in `_` stands for all that begin so.
const VARIABLES: [&str; 13] = [
    "ROLLFLOW__",
    "ROLLFLOW_CACHE",
    "LIBTORCH",
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA_",
    "CUBLAS_",
    "NCCL_",
    "NVIDIA_",
    "PYTORCH_",
    "TORCH_",
    "HF_HUB_OFFLINE",
];

/// Longest value that is kept, in characters.
const VALUE: usize = 200;

/// Checksums of models, and of data in files, by their keys in the recipe.
pub fn inputs(plan: &Plan) -> BTreeMap<String, String> {
    let all = model_fingerprints(plan).into_iter().chain(data_fingerprints(plan));
    all.map(|(key, sum)| (key, format!("{sum:08x}"))).collect()
}

/// The environment's variables of [`VARIABLES`], without those that hold a secret.
pub fn variables() -> BTreeMap<String, String> {
    let known = |name: &str| VARIABLES.iter().any(|of| name == *of || of.ends_with('_') && name.starts_with(of));
    let all = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let shown = |value: String| untrusted::line(&masked(&value)).chars().take(VALUE).collect();
    all.filter(|(name, _)| known(name) && !is_secret_name(name)).map(|(name, value)| (name, shown(value))).collect()
}

/// The repository around the folder that the command runs in, if there is one and git is.
pub fn git() -> Option<Git> {
    let ask = |args: &[&str]| {
        // Its index is not locked: the user may be at work with git.
        let output =
            Command::new("git").arg("--no-optional-locks").args(args).output().ok().filter(|output| output.status.success())?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    Some(Git {
        commit: ask(&["rev-parse", "HEAD"])?,
        branch: ask(&["branch", "--show-current"]).unwrap_or_default(),
        changed: !ask(&["status", "--porcelain", "--untracked-files=no"])?.is_empty(),
    })
}

/// This machine.
pub fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kib = field(&read("/proc/meminfo"), "MemTotal").and_then(|text| text.trim_end_matches("kB").trim().parse::<u64>().ok());
    Machine {
        host: read("/proc/sys/kernel/hostname").trim().to_owned(),
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        memory_gib: kib.map_or(0, |kib| kib.div_ceil(1 << 20)),
        gpus: gpus(),
    }
}
