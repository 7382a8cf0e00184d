//! `rollflow replay`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::REFUSED;
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
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        let Some(plan) = load_of_run(&self.run, &self.sets, registry) else { return Ok(ExitCode::from(REFUSED)) };
        let replayed = replay::replay(&plan, registry, &self.run, &mut std::io::stdout())?;
        Ok(if replayed.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Accepts keys of the reward only: a replay reads no other key.
fn reward_key(set: &str) -> Result<String, String> {
    let rewards = ["reward.", "reward="].iter().any(|key| set.starts_with(key));
    if rewards {
        Ok(set.to_owned())
    } else {
        Err("only keys of [reward] have a meaning here, as in reward.kind=numeric".to_owned())
    }
}
