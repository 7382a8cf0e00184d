//! Names of the files in a run's folder.

/// The resolved recipe.
pub const RECIPE: &str = "recipe.toml";
/// Lock held by the process that works on the run.
pub const LOCK: &str = ".lock";
/// Files that grow by lines of ascending steps.
pub const LOGS: [&str; 3] = ["metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"];
/// The run's record.
pub const RECORD: &str = "run.json";
/// Name of the checkpoint that the run started from.
pub const LINEAGE: &str = "lineage.json";
/// The run's page.
pub const PAGE: &str = "report.html";
/// Folder of the supervised part of an `sft_then_grpo` run.
pub const SFT: &str = "sft";
