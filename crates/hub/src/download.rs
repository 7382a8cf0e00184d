//! One file of a repository: downloaded into `blobs/ETAG.incomplete`, resumed from there if it was
//! interrupted, compared with the hub's SHA-256, and only then renamed to `blobs/ETAG`.

use std::fs::File;
use std::io::{Seek, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use reqwest::header::{HeaderValue, RANGE};
use reqwest::{Method, StatusCode, Url};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

use super::HubError;
use super::error::io;
use super::fetch::{Fetch, REDIRECTS, RETRY, Remote, STALL, WHOLE, location, plain};
use super::store::take_lock;
use rollflow_net::{Client, Endpoint};
use rollflow_util::atomic_file;

/// Longest time without a new byte of a file that another process downloads. It exceeds all retries
/// of that process.
const OTHERS_STALL: Duration = Duration::from_secs(900);

/// A file that is being downloaded, and its bytes so far.
struct Part<'a> {
    path: PathBuf,
    file: File,
    have: u64,
    bar: &'a ProgressBar,
}

impl Part<'_> {
    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(io(&self.path))?;
        self.have += bytes.len() as u64;
        self.bar.inc(bytes.len() as u64);
        Ok(())
    }

    /// Forgets the bytes so far.
    fn restart(&mut self) -> Result<(), HubError> {
        self.bar.set_position(self.bar.position().saturating_sub(self.have));
        self.have = 0;
        self.file.set_len(0).map_err(io(&self.path))
    }

    /// Returns true unless the hub gives a SHA-256 that the file does not have.
    fn is_whole(&mut self, etag: &str) -> Result<bool, HubError> {
        if etag.len() != 64 || !etag.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(true);
        }
        let mut sum = Sha256::new();
        self.file.rewind().and_then(|()| std::io::copy(&mut self.file, &mut sum)).map_err(io(&self.path))?;
        Ok(format!("{:x}", sum.finalize()) == etag.to_ascii_lowercase())
    }
}

impl Fetch<'_> {
    /// Downloads one file, from where an earlier attempt ended.
    pub(super) async fn download(&self, commit: &str, remote: &Remote, bar: &ProgressBar) -> Result<(), HubError> {
        let blobs = self.blobs();
        let (blob, path) = (blobs.join(&remote.etag), blobs.join(format!("{}.incomplete", remote.etag)));
        let lock = self.hub.cache.root().join(".locks").join(self.kind.folder(self.id)).join(format!("{}.lock", remote.etag));
        let _lock = take_lock(&lock, &format!("{} of {}", remote.path, self.id), &path, OTHERS_STALL).await?;
        if blob.exists() {
            bar.inc(remote.size.unwrap_or_default());
            return Ok(());
        }
        let file = File::options().read(true).append(true).create(true).open(&path).map_err(io(&path))?;
        let have = file.metadata().map_err(io(&path))?.len();
        bar.inc(have);
        let mut part = Part { path, file, have, bar };
        if remote.size.is_some_and(|size| have > size) {
            part.restart()?;
        }
        let begin = |have| RETRY.begin(have, Instant::now() + WHOLE);
        let mut retries = begin(part.have);
        while remote.size.is_none_or(|size| part.have < size) {
            let before = part.have;
            match self.pieces(commit, remote, &mut part).await {
                // The part was no beginning of this file: the whole file is requested.
                Ok(()) if remote.size.is_none() && part.have == 0 && before > 0 => {}
                // Without an announced size the end of the connection is the end of the file. With one, an
                // answer without further bytes means that the hub has fewer than it announced.
                Ok(()) if remote.size.is_none() || part.have <= before => break,
                Ok(()) => {}
                Err(HubError::Remote(error)) => {
                    if part.have > before {
                        retries = begin(part.have);
                    }
                    match retries.after(error.fault.outcome(), Instant::now()) {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if remote.size.is_some_and(|size| size != part.have) || !part.is_whole(&remote.etag)? {
            // Whatever it is, it is no beginning of this file.
            part.restart()?;
            return Err(HubError::Damaged(remote.path.clone(), self.id.to_owned()));
        }
        atomic_file::publish(&part.path, &blob).map_err(io(&blob))
    }

    /// Appends what comes until the connection ends.
    async fn pieces(&self, commit: &str, remote: &Remote, part: &mut Part<'_>) -> Result<(), HubError> {
        let mut headers = plain();
        if part.have > 0 {
            headers.extend(HeaderValue::from_str(&format!("bytes={}-", part.have)).ok().map(|range| (RANGE, range)));
        }
        let mut response = self.ask(Method::GET, &self.resolve(commit, &remote.path), headers.clone()).await?;
        // Large files lie on other hosts, which must not see the token.
        let mut client = self.client.clone();
        for _ in 0..REDIRECTS {
            if !response.status().is_redirection() {
                break;
            }
            let to = location(&response).unwrap_or_default();
            let to = Url::parse(client.base())
                .and_then(|base| base.join(&to))
                .map_err(|error| self.nonsense(error.to_string(), &to))?;
            let endpoint = Endpoint { token: None, url: to.to_string(), ..self.hub.endpoint.clone() };
            client = Client::new("hub", endpoint)?;
            let asked = timeout(STALL, client.request(Method::GET, "", headers.clone(), None)).await;
            response = asked.unwrap_or_else(|_| Err(client.late(&remote.path, STALL)))?;
        }
        if let Some(error) = client.busy_or_failed(&response) {
            return Err(error.into());
        }
        let status = response.status();
        let beyond = status == StatusCode::RANGE_NOT_SATISFIABLE && part.have > 0;
        if !status.is_success() && !beyond {
            return Err(client.refusal(&remote.path, status.as_u16(), "").into());
        }
        if status != StatusCode::PARTIAL_CONTENT && part.have > 0 {
            // The whole file comes, or the hub has another than the part that is here.
            part.restart()?;
        }
        if beyond {
            return Ok(());
        }
        loop {
            let piece = timeout(STALL, response.chunk()).await.map_err(|_| client.late(&remote.path, STALL))?;
            match piece.map_err(|error| client.broken(error))? {
                Some(piece) => part.append(&piece)?,
                None => return Ok(()),
            }
        }
    }
}

/// A bar on the terminal; nothing where standard error is none.
pub(super) fn progress_bar(id: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(id.to_owned());
    bar
}
