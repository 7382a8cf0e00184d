//! A run's folder: what a run writes, its record and page, and where an interrupted run continues.

pub mod changes;
pub(crate) mod curves;
pub mod folder;
pub(crate) mod growing;
pub(crate) mod observed;
#[cfg(feature = "otlp")]
pub(crate) mod otlp;
pub(crate) mod page;
mod provenance;
pub(crate) mod python_files;
pub(crate) mod ranks;
pub(crate) mod recipe_keys;
pub(crate) mod record;
pub mod resume;
pub mod traces;
pub(crate) mod trackers;
pub(crate) mod upload;

use rollflow::observe::logs::TIMINGS;

/// The resolved recipe.
pub(crate) const RECIPE: &str = "recipe.toml";
/// Lock held by the process that works on the run.
pub(crate) const LOCK: &str = ".lock";
/// Files that grow by lines of ascending steps.
pub(crate) const LOGS: [&str; 4] = ["metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", TIMINGS];
/// The run's record.
pub(crate) const RECORD: &str = "run.json";
/// Name of the checkpoint that the run started from.
pub(crate) const LINEAGE: &str = "lineage.json";
/// The run's page.
pub(crate) const PAGE: &str = "report.html";
/// Times of the run's parts, for simulations.
pub(crate) const PROFILE: &str = "profile.json";
/// Environment variable with the token of a run's live page, unless the recipe names another.
pub(crate) const PAGE_TOKEN: &str = "ROLLFLOW_PAGE_TOKEN";
/// Folder of the supervised part of an `sft_then_grpo` run.
pub(crate) const SFT: &str = "sft";
