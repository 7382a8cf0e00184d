//! `rollflow monitor`: files for Prometheus and Grafana.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::{out, refused};
use crate::monitor;

/// Write what Prometheus and Grafana need to watch runs: prometheus.yml, which asks the given addresses,
/// rules.yml with alerts, dashboard.json and kubernetes.yml. Nothing is downloaded or started.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow run recipe.toml --metrics 127.0.0.1:9464\n  rollflow monitor 127.0.0.1:9464 --out \
    monitoring")]
pub struct Monitor {
    /// Addresses of runs' metrics, as in `--metrics`.
    #[arg(default_value = "127.0.0.1:9464", value_parser = address)]
    addresses: Vec<String>,
    /// Folder for the files, which are replaced. Other files in it stay.
    #[arg(long, default_value = "monitoring")]
    out: PathBuf,
}

/// HOST:PORT, which YAML can hold in quotes.
fn address(text: &str) -> Result<String, &'static str> {
    let plain = |host: &str| !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_:[]".contains(c));
    match text.rsplit_once(':') {
        Some((host, port)) if plain(host) && port.parse::<u16>().is_ok_and(|port| port > 0) => Ok(text.to_owned()),
        _ => Err("write it as HOST:PORT, for example 127.0.0.1:9464"),
    }
}

impl Monitor {
    pub fn run(self) -> Result<()> {
        if self.out.is_file() {
            return Err(refused(format!("{} is a file; choose a folder with --out", self.out.display())));
        }
        let written = monitor::write(&self.out, &self.addresses)?;
        written.iter().try_for_each(|path| out::line(&path.display().to_string()))
    }
}
