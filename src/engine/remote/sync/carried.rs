//! Weights that reach an engine's host through a store: `rollflow weights pull` brings each version to
//! a folder there, and reports in the store which version that is and where.
//!
//! The report of a host names a folder of that host, which the engine is then told to load. Who may
//! write to the store may therefore choose what engines load; the probe verifies it (law V4).

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Update;
use super::engine_sync::StepError;
use crate::util::deadline;
use crate::weights::{HostReport, Id, Store, WEIGHTS, WeightsError};

/// Pause between looks for a host's report.
const LOOK: Duration = Duration::from_millis(300);

/// Version in a store, and the engines that need it from there.
#[derive(Clone, Debug)]
pub struct Carried {
    /// The store.
    pub store: Store,
    /// The artefact.
    pub id: Id,
    /// Addresses of engines that read the trainer's folder instead.
    pub here: Arc<[String]>,
}

impl Carried {
    /// Waits until the host of the engine at `address` holds the version, for `seconds` at most.
    /// Returns its folder there. Cancel-safe. Costs a small request a third of a second.
    pub(super) async fn folder(&self, address: &str, update: &Update, seconds: f64) -> Result<Arc<Path>, StepError> {
        if self.here.iter().any(|here| here == address) {
            return Ok(update.folder.clone());
        }
        let (host, version) = (host_of(address), self.id.version);
        let until = deadline(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
        loop {
            let reported = match self.report(host).await? {
                Some(Ok(HostReport { id, folder })) if id == self.id => return Ok(folder.into()),
                Some(Ok(HostReport { id, .. })) if id > self.id => {
                    return Err(StepError::Skipped { host: host.to_owned(), holds: id.version });
                }
                Some(Ok(HostReport { id, .. })) => format!("it holds {id}"),
                Some(Err(error)) => error.to_string(),
                None => "it has never reported a version".to_owned(),
            };
            if Instant::now() >= until {
                let store = self.store.name();
                // The command adds it.
                let store = store.strip_suffix(WEIGHTS).unwrap_or(store).trim_end_matches('/').to_owned();
                return Err(StepError::NotArrived { host: host.to_owned(), version, seconds, reported, store });
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn report(&self, host: &str) -> Result<Option<Result<HostReport, WeightsError>>, StepError> {
        let (store, host) = (self.store.clone(), host.to_owned());
        let report = tokio::task::spawn_blocking(move || store.report_of(&host).transpose());
        report.await.map_err(|error| StepError::Store(error.to_string()))
    }
}

/// Host in an address, without port and brackets.
fn host_of(address: &str) -> &str {
    let authority = address.split_once("://").map_or(address, |(_, rest)| rest);
    let authority = authority.split(['/', '?']).next().unwrap_or_default();
    match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, _)) => host,
        None => authority.split(':').next().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::host_of;

    #[test]
    fn hosts_are_named_without_scheme_port_and_path() {
        let found = ["http://gpu-7:8000", "https://gpu-7.lab/x", "http://[::1]:80/y", "http://10.0.0.3:1"].map(host_of);
        assert_eq!(found, ["gpu-7", "gpu-7.lab", "::1", "10.0.0.3"]);
    }
}
