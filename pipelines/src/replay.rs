//! `rollflow replay`: scores the dead letters of a run again (law F6).
//!
//! `dead_letters.jsonl` is only read, so a run that still writes to it loses nothing. Each replay
//! replaces `replayed.jsonl` with the groups that are scored now, as rollouts of step 0.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use rollflow::data::Group;
use rollflow::observe::logs::{DEAD_LETTERS, DeadLetter, Failure, FailureKind, JsonLines, Rollout, read_lines};
use rollflow::recipe::Plan;
use rollflow::rollout::why_lost;
use rollflow::util::{atomic_file, untrusted};

use crate::assemble::rewards::Scoring;
use crate::registry::Registry;

/// The file in the run's folder that gets what earns now.
pub const REPLAYED: &str = "replayed.jsonl";

/// Counts of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Groups whose every sample earns now.
    pub earned: usize,
    /// Groups that still fail, and lines that could not be read.
    pub failed: usize,
}

/// Scores the dead letters in `folder` by the plan's reward and writes a line for each to `out`. Writes
/// no file if there are none.
pub fn replay(plan: &Plan, registry: &Registry, folder: &Path, out: &mut impl Write) -> Result<Replayed> {
    let (letters, mut replayed) = (folder.join(DEAD_LETTERS), Replayed::default());
    if !letters.exists() {
        writeln!(out, "no dead letters in {}", folder.display())?;
        return Ok(replayed);
    }
    let reward = Scoring::of(&plan.reward, &plan.model, &plan.net, plan.generate.max_new_tokens, registry)?;
    // What an earlier replay found stays until this one is through.
    let (path, writing) = (folder.join(REPLAYED), folder.join(format!(".{REPLAYED}.writing")));
    atomic_file::remove(&writing).with_context(|| format!("removing {}", writing.display()))?;
    let mut writer = JsonLines::create(&writing)?;
    for letter in read_lines(letters)? {
        let group = match letter.map(DeadLetter::group) {
            Ok(group) => group,
            Err(damaged) => {
                replayed.failed += 1;
                writeln!(out, "{}", untrusted::line(&damaged.to_string()))?;
                continue;
            }
        };
        let (group, mut failures) = reward.score(group, plan.reward.retries)?;
        // What an engine or an environment lost has no end that could be judged.
        for sample in &group.samples {
            if let Some(why) = why_lost(sample).filter(|_| failures.iter().all(|failure| failure.sample != sample.index)) {
                failures.push(Failure { sample: sample.index, attempts: 1, kind: FailureKind::Lost, text: why.to_owned() });
            }
        }
        writeln!(out, "group {}: {}", group.id(), untrusted::line(&outcome(&group, &failures)))?;
        if failures.is_empty() {
            replayed.earned += 1;
            group.samples.iter().try_for_each(|sample| writer.write(&Rollout::new(0, sample, true)))?;
        } else {
            replayed.failed += 1;
        }
    }
    writer.sync()?;
    atomic_file::publish(&writing, &path).with_context(|| format!("writing {}", path.display()))?;
    writeln!(out, "{} of {} earn now: {}", replayed.earned, replayed.earned + replayed.failed, path.display())?;
    Ok(replayed)
}

/// Rewards of a group, or the failures that remain.
fn outcome(group: &Group, failures: &[Failure]) -> String {
    if failures.is_empty() {
        return format!("earns {:?}", group.rewards());
    }
    failures.iter().map(|failure| format!("sample {}: {failure}", failure.sample)).collect::<Vec<_>>().join("; ")
}
