//! `rollflow replay`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::End;
use super::plans::load_of_run;
use crate::registry::Registry;
use crate::replay;

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
    pub fn run(self, registry: &Registry) -> Result<()> {
        let plan = load_of_run(&self.run, &self.sets, registry)?;
        let replayed = replay::replay(&plan, registry, &self.run, &mut std::io::stdout())?;
        if replayed.failed == 0 { Ok(()) } else { Err(End::Said(1).into()) }
    }
}

/// Accepts keys of the reward only: a replay reads no other key.
fn reward_key(set: &str) -> Result<String, &'static str> {
    let rewards = ["reward.", "reward="].iter().any(|key| set.starts_with(key));
    rewards.then(|| set.to_owned()).ok_or("only keys of [reward] have a meaning here, as in reward.kind=numeric")
}
