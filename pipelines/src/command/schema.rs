//! `rollflow schema`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rollflow::recipe;

use super::out;

/// Print the JSON schema of recipes, which tells an editor every key with its meaning.
#[derive(Args)]
pub struct Schema {}

impl Schema {
    pub fn run(self) -> Result<ExitCode> {
        out::line(&format!("{:#}", recipe::schema()))?;
        Ok(ExitCode::SUCCESS)
    }
}
