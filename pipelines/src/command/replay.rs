//! `rollflow replay`: scores the dead letters of a run again (law F6).
//!
//! `dead_letters.jsonl` is only read, so a run that still writes to it loses nothing. Each replay
//! replaces `replayed.jsonl` with the groups that are scored now, as rollouts of step 0.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use rollflow::data::Group;
use rollflow::observe::logs::{DEAD_LETTERS, DeadLetter, Failure, FailureKind, JsonLines, Rollout, read_whole_lines};
use rollflow::rollout::why_lost;
use rollflow::util::{atomic_file, untrusted};

use super::plans::load_of_run;
use super::{End, out};
use crate::assemble::rewards::Scoring;
use crate::registry::Registry;

/// The file in the run's folder that gets the groups that earn now.
const REPLAYED: &str = "replayed.jsonl";

/// Score the groups of a run again whose reward failed (its dead letters), and write those that now
/// have a reward to `replayed.jsonl` in the run's folder. Nothing else is changed.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow replay runs/mine --set reward.require_end_of_text=false")]
pub struct Replay {
    /// The run's folder.
    run: PathBuf,
    /// Override a key of the run's reward, as in reward.kind=numeric; may be given several times.
    #[arg(long = "set", value_name = "reward.KEY=VALUE", value_parser = reward_key)]
    sets: Vec<String>,
}

impl Replay {
    /// Prints a line for each group, and writes no file if there are no dead letters.
    pub fn run(self, registry: &Registry) -> Result<()> {
        let (plan, folder) = (load_of_run(&self.run, &self.sets, registry)?, &self.run);
        let (letters, mut earned, mut failed) = (folder.join(DEAD_LETTERS), 0, 0);
        if !letters.exists() {
            return out::line(&format!("no dead letters in {}", folder.display()));
        }
        let reward = Scoring::of(&plan, registry)?;
        // What an earlier replay found stays until this one is through.
        let (path, writing) = (folder.join(REPLAYED), folder.join(format!(".{REPLAYED}.writing")));
        atomic_file::remove(&writing).with_context(|| format!("removing {}", writing.display()))?;
        let mut writer = JsonLines::create(&writing)?;
        // A closed output must not end the replay.
        let say = |line: String| match out::line(&line) {
            Err(error) if matches!(error.downcast_ref(), Some(End::Closed)) => Ok(()),
            said => said,
        };
        if is_torn(&letters).with_context(|| format!("reading {}", letters.display()))? {
            say(format!("the last line of {} is incomplete and is skipped", letters.display()))?;
        }
        for letter in read_whole_lines(letters)? {
            let group = match letter.map(DeadLetter::group) {
                Ok(group) => group,
                Err(damaged) => {
                    failed += 1;
                    say(untrusted::line(&damaged.to_string()))?;
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
            say(format!("group {}: {}", group.id(), untrusted::line(&outcome(&group, &failures))))?;
            if failures.is_empty() {
                earned += 1;
                group.samples.iter().try_for_each(|sample| writer.write(&Rollout::new(0, sample, true)))?;
            } else {
                failed += 1;
            }
        }
        writer.sync()?;
        atomic_file::publish(&writing, &path).with_context(|| format!("writing {}", path.display()))?;
        say(format!("{earned} of {} earn now: {}", earned + failed, path.display()))?;
        if failed == 0 { Ok(()) } else { Err(End::Said(1).into()) }
    }
}

/// Returns true if the last line lacks its end: its run was killed, or is writing it.
fn is_torn(path: &Path) -> std::io::Result<bool> {
    let mut file = File::open(path)?;
    let mut last = *b"\n";
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    Ok(last != *b"\n")
}

/// Accepts keys of the reward only: a replay reads no other key.
fn reward_key(set: &str) -> Result<String, &'static str> {
    let rewards = ["reward.", "reward="].iter().any(|key| set.starts_with(key));
    rewards.then(|| set.to_owned()).ok_or("only keys of [reward] have a meaning here, as in reward.kind=numeric")
}

/// Rewards of a group, or the failures that remain.
fn outcome(group: &Group, failures: &[Failure]) -> String {
    if failures.is_empty() {
        return format!("earns {:?}", group.rewards());
    }
    failures.iter().map(|failure| format!("sample {}: {failure}", failure.sample)).collect::<Vec<_>>().join("; ")
}
