//! `rollflow explain`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rollflow::recipe;

use super::{Refused, out};

/// Print the page of a recipe key: type, range, default, meaning, pipelines and related keys.
#[derive(Args)]
#[command(after_help = "Examples:\n  rollflow explain train.lr\n  rollflow explain flow")]
pub struct Explain {
    /// A key or a section, as in train.lr or train.
    key: String,
}

impl Explain {
    pub fn run(self) -> Result<ExitCode> {
        out::line(recipe::explain(&self.key).map_err(Refused::because)?.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}
