//! `rollflow report`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::json;

use super::{out, require_run};
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
    pub fn run(self) -> Result<()> {
        require_run(&self.run)?;
        let record = Record::read(&self.run)?;
        let page = page::write(&self.run, &record)?;
        out::line(&match self.json {
            true => json!({"page": page, "run": record}).to_string(),
            false => page.display().to_string(),
        })
    }
}
