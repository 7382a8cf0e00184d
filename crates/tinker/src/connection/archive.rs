//! Downloads of saved weights.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::time::{Duration, Instant};

use reqwest::Method;
use reqwest::header::LOCATION;
use rollflow_net::{Fault, RemoteError, bare_client, now};
use tokio::time::timeout;

use super::Connection;
use crate::TinkerError;

/// Redirects on the way to an archive.
const REDIRECTS: usize = 5;

/// Longest pause of a download after its first byte. Before it, the server may pack the archive.
const STALL: Duration = Duration::from_secs(60);

/// Longest page of an error that is read, in bytes.
const LONGEST_ERROR: usize = 1 << 16;

const WHAT: &str = "downloading weights";

impl Connection {
    /// Writes the archive of weights for sampling at this path, `tinker://…`, to `file`: a tar file, which
    /// may be compressed by gzip. A download that breaks off begins again.
    ///
    /// # Errors
    /// The server does not have it, cannot be reached for long, or `file` can't be written.
    pub async fn archive(&self, path: &str, file: &mut File) -> Result<(), TinkerError> {
        let (started, mut heard, mut nth) = (now(), now(), 0);
        loop {
            let error = match self.download(path, file, &mut heard).await {
                Err(TinkerError::Remote(error)) => error,
                done => return done,
            };
            let again = match &error.fault {
                Fault::Unreachable(_) | Fault::Broke(_) | Fault::Late { .. } | Fault::Failed { .. } => {
                    now() < heard + self.patience.unreachable
                }
                Fault::Busy { .. } | Fault::Refused { status: 408 | 425, .. } => true,
                _ => false,
            };
            if !again || now() > started + self.patience.operation {
                return Err(error.into());
            }
            nth += 1;
            self.rest(&error.fault, nth, started + self.patience.operation).await;
        }
    }

    /// Makes one attempt. `heard`: when the last piece came.
    async fn download(&self, path: &str, file: &mut File, heard: &mut Instant) -> Result<(), TinkerError> {
        let disk = |error: io::Error| TinkerError::File { server: self.name().to_owned(), why: error.to_string() };
        let late = |limit| move |_| self.client.late(WHAT, limit);
        let (run, rest) = path.strip_prefix("tinker://").and_then(|path| path.split_once('/')).unwrap_or((path, ""));
        let mut next = format!("/api/v1/training_runs/{run}/checkpoints/{rest}/archive");
        for _ in 0..REDIRECTS {
            let mut limit = self.patience.operation;
            let here = next.strip_prefix(self.client.base()).unwrap_or(&next);
            let mut answer = if here.starts_with('/') {
                let asked = self.client.request(Method::GET, here, self.headers.clone(), None);
                timeout(limit, asked).await.map_err(late(limit))??
            } else {
                // A signed address of a store, which gets no key.
                let http = bare_client(self.ca_file.as_deref(), limit).map_err(|fault| RemoteError::new(self.name(), fault))?;
                let asked = timeout(limit, http.get(&next).send()).await.map_err(late(limit))?;
                asked.map_err(|error| self.client.broken(error))?
            };
            let (status, location) = (answer.status().as_u16(), answer.headers().get(LOCATION).cloned());
            file.rewind().and_then(|()| file.set_len(0)).map_err(disk)?;
            let mut page = Vec::new();
            while let Some(piece) =
                timeout(limit, answer.chunk()).await.map_err(late(limit))?.map_err(|error| self.client.broken(error))?
            {
                (*heard, limit) = (now(), STALL);
                match status {
                    200..300 => file.write_all(&piece).map_err(disk)?,
                    _ if page.len() < LONGEST_ERROR => page.extend_from_slice(&piece),
                    _ => {}
                }
            }
            match (status, location.as_ref().and_then(|location| location.to_str().ok())) {
                (200..300, _) => return Ok(()),
                (300..400, Some(location)) => next = location.to_owned(),
                _ => return Err(self.client.refusal(WHAT, status, &String::from_utf8_lossy(&page)).into()),
            }
        }
        Err(self.nonsense(WHAT, "one redirect after another".to_owned(), &next))
    }
}
