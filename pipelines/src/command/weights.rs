//! `rollflow weights`: versions of weights in an object store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, Subcommand};
use rollflow::engine::remote::sync::{SyncConfig, SyncReport, Update, WeightSyncManager};
use rollflow::engine::remote::{FleetHandle, InferenceEngine};
use rollflow::engine::settings::{Engine as Section, EngineKind};
use rollflow::net::Tasks;
use rollflow::recipe::Net;
use rollflow::util::causes::full_message;
use rollflow::weights::{Pulled, Puller, Store, WEIGHTS, check_address};

use super::{choice, out, refused};
use crate::assemble::engines;

/// Kinds of engine that load weights.
const LOADING: &[EngineKind] = &[EngineKind::Vllm, EngineKind::Sglang, EngineKind::Rollflow];

/// Bring versions of weights from a run's store to this machine.
#[derive(Args)]
pub struct Weights {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Pull(Pull),
}

/// Bring the newest version to a folder of this machine, exact to the bit: FOLDER/v0000000042, and
/// the link FOLDER/latest. Begun again after an interruption, it fetches what is missing.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow weights pull s3://bucket/run /local/weights\n\
\x20 rollflow weights pull s3://bucket/run /local/weights --follow --host gpu-7    (a host of engine.urls)\n\
\x20 rollflow weights pull s3://bucket/run /local/weights --follow --engine http://127.0.0.1:8000 --kind vllm")]
struct Pull {
    /// The run's store, as in the recipe's store.url.
    url: String,
    /// The folder to pull into; no other process may.
    folder: PathBuf,
    /// A version other than the newest.
    #[arg(long, value_name = "N", conflicts_with = "follow")]
    version: Option<u64>,
    /// Stay, and pull each new version, until the process is ended.
    #[arg(long)]
    follow: bool,
    /// Seconds from one look for a new version to the next.
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: u64,
    /// Pulled versions that are kept in the folder.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u16).range(1..))]
    keep: u16,
    /// Report each version in the store under this name, so that the trainer tells this host's servers
    /// to load it: the host in engine.urls, without scheme and port.
    #[arg(long, value_name = "NAME", conflicts_with = "engine")]
    host: Option<String>,
    /// A server of this machine that loads each version, without a trainer that tells it to.
    #[arg(long, value_name = "URL")]
    engine: Option<String>,
    /// Kind of the server.
    #[arg(long, value_parser = choice(LOADING, EngineKind::word), default_value = "vllm")]
    kind: EngineKind,
    /// Environment variable with the server's token.
    #[arg(long, value_name = "NAME")]
    token_env: Option<String>,
    /// PEM file of certificate authorities that are trusted in addition to the system's.
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
}

impl Weights {
    pub fn run(self) -> Result<()> {
        match self.what {
            What::Pull(of) => of.run(),
        }
    }
}

impl Pull {
    fn run(self) -> Result<()> {
        check_address(&self.url).map_err(|why| refused(format!("{:?}: {why}", rollflow::util::secrets::masked(&self.url))))?;
        let store = Store::open(&self.url, self.ca_file.as_deref())?.below(WEIGHTS);
        let puller = Puller::open(store, &self.folder, self.keep.into())?;
        let server = self.engine.as_ref().map(|url| self.server(url)).transpose()?;
        let mut held = None;
        if !self.follow {
            return self.pull(&puller, server.as_ref(), &mut held);
        }
        let mut told = None;
        loop {
            let pulled = self.pull(&puller, server.as_ref(), &mut held);
            // A store, a network or a server that is away may return. The same error is printed once.
            let error = pulled.err().map(|error| full_message(error.as_ref()));
            if let Some(error) = error.as_ref().filter(|error| told.as_ref() != Some(*error)) {
                out::complain(&format!("warning: {error}; trying again every {} s", self.every));
            }
            told = error;
            std::thread::sleep(Duration::from_secs(self.every));
        }
    }

    /// Pulls what is wanted, unless it is `held`, reports it and has it loaded.
    fn pull(&self, puller: &Puller, server: Option<&Server>, held: &mut Option<Pulled>) -> Result<()> {
        let newest = if self.follow { puller.newest()? } else { None };
        if newest.is_none() || held.as_ref().map(|held| held.id) != newest {
            let started = Instant::now();
            let pulled = puller.pull(self.version)?;
            if let Some(host) = &self.host {
                puller.report(host, &pulled)?;
            }
            let (folder, fetched, seconds) = (pulled.folder.display(), pulled.fetched, started.elapsed().as_secs_f64());
            out::line(&format!("version {} in {folder} ({fetched} bytes fetched, {seconds:.2} s)", pulled.id.version))?;
            if let Some(server) = server {
                server.load(&pulled.folder)?;
            }
            *held = Some(pulled);
        } else if let Some(server) = server {
            server.keep()?;
        }
        Ok(())
    }

    fn server(&self, url: &str) -> Result<Server> {
        let section = Section { kind: self.kind, token_env: self.token_env.clone(), ..Section::default() };
        let net = Net { ca_file: self.ca_file.clone(), ..Net::default() };
        let engine: Arc<dyn InferenceEngine> = engines::engine(&section, &net, url)?;
        let manager = WeightSyncManager { fleet: FleetHandle::new(vec![engine]), config: SyncConfig::default(), max_lag: 0 };
        Ok(Server { manager, tasks: engines::tasks()? })
    }
}

/// The server of this machine.
struct Server {
    manager: WeightSyncManager,
    tasks: Tasks,
}

impl Server {
    fn load(&self, folder: &Path) -> Result<()> {
        let report = self.tasks.block_on(self.manager.sync(Update::from(folder)))?;
        Server::say(&report)
    }

    /// Loads the newest version again if the server has lost it.
    fn keep(&self) -> Result<()> {
        self.tasks.block_on(self.manager.catch_up()).map_or(Ok(()), |report| Server::say(&report))
    }

    fn say(report: &SyncReport) -> Result<()> {
        for engine in &report.engines {
            match engine {
                Ok(times) => {
                    let times: Vec<String> = times.iter().map(|(phase, time)| format!("{phase} {time:.0?}")).collect();
                    out::line(&format!("loaded version {} ({})", report.version, times.join(", ")))?;
                }
                Err(isolated) => out::complain(&format!("warning: {isolated}")),
            }
        }
        Ok(())
    }
}
