//! Facts of a run's record about where its numbers come from, besides code and machine: the contents of
//! models and data, and the variables that libraries read.

use std::collections::BTreeMap;

use rollflow::recipe::{Plan, data_fingerprints, model_fingerprints};
use rollflow::util::secrets::{is_secret_name, masked};
use rollflow::util::untrusted;

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
