//! One file of a repository: downloaded into `blobs/ETAG.incomplete`, resumed from there if it was
//! interrupted, compared with the hub's SHA-256, and only then renamed to `blobs/ETAG`.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use reqwest::header::{HeaderValue, RANGE};
use reqwest::{Method, StatusCode, Url};
use sha2::{Digest, Sha256};
use tokio::time::timeout;

use super::HubError;
use super::fetch::{Fetch, REDIRECTS, RETRY, Remote, STALL, WHOLE, location, plain};
use super::store::{FileLock, io};
use crate::net::{Client, Endpoint};
use crate::util::atomic_file;

/// Longest time without a new byte of a file that another process downloads. It exceeds all retries
/// of that process.
const OTHERS_STALL: Duration = Duration::from_secs(900);

impl Fetch<'_> {
    /// Downloads one file, from where an earlier attempt ended.
    pub(super) async fn download(&self, commit: &str, remote: &Remote, bar: &ProgressBar) -> Result<(), HubError> {
        let blobs = self.blobs();
        let (blob, part) = (blobs.join(&remote.etag), blobs.join(format!("{}.incomplete", remote.etag)));
        let _lock = FileLock::of(self.hub.cache(), self.kind, self.id, remote).take(&part, OTHERS_STALL).await?;
        if blob.exists() {
            bar.inc(remote.size.unwrap_or_default());
            return Ok(());
        }
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&part).map_err(io(&part))?;
        let mut have = file.seek(SeekFrom::End(0)).map_err(io(&part))?;
        if remote.size.is_some_and(|size| have > size) {
            file.set_len(0).map_err(io(&part))?;
            have = file.seek(SeekFrom::Start(0)).map_err(io(&part))?;
        }
        bar.inc(have);
        let mut retries = RETRY.begin(have, Instant::now() + WHOLE);
        while remote.size.is_none_or(|size| have < size) {
            let before = have;
            match self.pieces(commit, remote, &mut file, &part, &mut have, bar).await {
                Ok(()) if remote.size.is_none_or(|size| have >= size) => break,
                Ok(()) => {}
                Err(HubError::Remote(error)) => {
                    if have > before {
                        retries = RETRY.begin(have, Instant::now() + WHOLE);
                    }
                    match retries.after(error.fault.outcome(), Instant::now()) {
                        Some(pause) => tokio::time::sleep(pause).await,
                        None => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if remote.size.is_some_and(|size| size != have) || !is_whole(&mut file, &part, &remote.etag)? {
            // Whatever it is, it is no beginning of this file.
            file.set_len(0).map_err(io(&part))?;
            return Err(HubError::Damaged { id: self.id.to_owned(), file: remote.path.clone() });
        }
        drop(file);
        atomic_file::publish(&part, &blob).map_err(io(&blob))
    }

    /// Appends what comes until the connection ends.
    async fn pieces(
        &self,
        commit: &str,
        remote: &Remote,
        file: &mut File,
        part: &Path,
        have: &mut u64,
        bar: &ProgressBar,
    ) -> Result<(), HubError> {
        let mut headers = plain();
        if *have > 0
            && let Ok(range) = HeaderValue::from_str(&format!("bytes={have}-"))
        {
            headers.insert(RANGE, range);
        }
        let mut response = self.ask(Method::GET, &self.resolve(commit, &remote.path), headers.clone()).await?;
        // Large files lie on other hosts, which must not see the token.
        let mut client = self.client.clone();
        for _ in 0..REDIRECTS {
            if !response.status().is_redirection() {
                break;
            }
            let to = location(&response).unwrap_or_default();
            let base = Url::parse(client.base()).map_err(|error| self.nonsense(error.to_string(), ""))?;
            let to = base.join(&to).map_err(|error| self.nonsense(error.to_string(), ""))?;
            let endpoint = Endpoint { token: None, url: to.to_string(), ..self.hub.endpoint().clone() };
            client = Client::new("hub", endpoint)?;
            let asked = timeout(STALL, client.request(Method::GET, "", headers.clone(), None)).await;
            response = asked.unwrap_or_else(|_| Err(client.late(&remote.path, STALL)))?;
        }
        if let Some(error) = client.busy_or_failed(&response) {
            return Err(error.into());
        }
        let status = response.status();
        if !status.is_success() && status != StatusCode::RANGE_NOT_SATISFIABLE {
            return Err(client.refusal(&remote.path, status.as_u16(), "").into());
        }
        if status != StatusCode::PARTIAL_CONTENT && *have > 0 {
            // The whole file comes, or the hub has another than the part that is here.
            bar.set_position(bar.position().saturating_sub(*have));
            file.set_len(0).map_err(io(part))?;
            file.rewind().map_err(io(part))?;
            *have = 0;
        }
        if status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(());
        }
        loop {
            let piece = timeout(STALL, response.chunk()).await.map_err(|_| client.late(&remote.path, STALL))?;
            match piece.map_err(|error| client.broken(error))? {
                None => return Ok(()),
                Some(piece) => {
                    file.write_all(&piece).map_err(io(part))?;
                    *have += piece.len() as u64;
                    bar.inc(piece.len() as u64);
                }
            }
        }
    }
}

/// Returns true unless the hub gives a SHA-256 that the file does not have.
fn is_whole(file: &mut File, path: &Path, etag: &str) -> Result<bool, HubError> {
    if etag.len() != 64 || !etag.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(true);
    }
    file.rewind().map_err(io(path))?;
    let (mut sum, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(io(path))? {
            0 => break,
            read => sum.update(&buffer[..read]),
        }
    }
    let sum: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(sum == etag.to_ascii_lowercase())
}

/// A bar on the terminal; nothing where standard error is none.
pub(super) fn progress_bar(id: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(id.to_owned());
    bar
}
