//! Checksums of the Python files that a run calls, by which a resumed run finds that they changed.

use std::collections::BTreeMap;
use std::path::Path;

use rollflow::recipe::{EnvironmentKind, Plan};
use sha2::{Digest, Sha256};

/// SHA-256 of each file of `plan`'s rewards and environment, by the path that the recipe gives.
/// Installed modules, and files that can't be read, are left out.
pub fn checksums(plan: &Plan) -> BTreeMap<String, String> {
    let rewards = plan.reward.rule.python().into_iter().map(|(_, of)| &of.file);
    let environment = plan.environment.as_ref().and_then(|of| match &of.kind {
        EnvironmentKind::Python(of) => Some(&of.file),
        _ => None,
    });
    let checksum = |file: &std::path::PathBuf| Some((file.display().to_string(), sha256(file)?));
    rewards.chain(environment).filter_map(checksum).collect()
}

/// A warning of each file that is another than when the run's last session began.
pub fn changes(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<String> {
    let changed = now.iter().filter(|(file, sum)| before.get(*file).is_some_and(|before| before != *sum));
    let warning = |file: &String| {
        format!("warning: {file} changed since this run began: its results may differ from those of the steps before")
    };
    changed.map(|(file, _)| warning(file)).collect()
}

fn sha256(file: &Path) -> Option<String> {
    Some(format!("{:x}", Sha256::digest(std::fs::read(file).ok()?)))
}
