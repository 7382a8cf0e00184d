//! `rollflow report`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::{REFUSED, out};
use crate::run::files::RECIPE;
use crate::run::page;
use crate::run::record::Record;

/// Write the page of a run, finished or not: `report.html` in its folder, which needs only a
/// browser.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow report runs/mine")]
pub struct Report {
    /// The run's folder.
    run: PathBuf,
    /// Print the run's record and where the page is as one JSON object.
    #[arg(long)]
    json: bool,
}

impl Report {
    pub fn run(self) -> Result<ExitCode> {
        if !self.run.join(RECIPE).exists() {
            out::complain(&format!("error: {} holds no run; give the folder of one, as in runs/mine", self.run.display()));
            return Ok(ExitCode::from(REFUSED));
        }
        let record = Record::read(&self.run)?;
        let page = page::write(&self.run, &record)?;
        let line = match self.json {
            true => json!({"page": page, "run": record}).to_string(),
            false => page.display().to_string(),
        };
        out::line(&line)?;
        Ok(ExitCode::SUCCESS)
    }
}
