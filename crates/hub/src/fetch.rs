//! Asking a hub about a repository, and fetching the files that a caller chooses into the cache.
//!
//! All files are downloaded before the first is linked into its snapshot.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use reqwest::header::{ACCEPT_ENCODING, HeaderMap, HeaderValue, LOCATION};
use reqwest::{Method, Response, StatusCode};
use serde::Deserialize;
use tokio::time::{sleep, timeout};

use super::download::progress_bar;
use super::error::io;
use super::store::{check_path, link, write};
use super::{Hub, HubError, RepoKind};
use rollflow_net::{Client, Fault, Outcome, RemoteError, RetryPolicy};

/// Longest time for a page, and for the next piece of a file.
pub(super) const STALL: Duration = Duration::from_secs(30);

/// Longest time for a page that is asked for once.
const ONCE: Duration = Duration::from_secs(10);

/// Longest time for all of a fetch.
pub(super) const WHOLE: Duration = Duration::from_secs(24 * 3600);

/// Longest chain of redirects.
pub(super) const REDIRECTS: usize = 5;

/// Retries of one file; every piece that arrives begins them again.
pub(super) const RETRY: RetryPolicy = RetryPolicy {
    retries: 5,
    pause: Duration::from_secs(1),
    max_pause: Duration::from_secs(30),
    busy_timeout: Duration::from_secs(600),
};

/// Attempts to make the first connection.
const FIRST_ATTEMPTS: u32 = 2;

/// One file of a repository.
pub(super) struct Remote {
    pub(super) path: String,
    pub(super) etag: String,
    pub(super) size: Option<u64>,
}

/// Requests about one revision of one repository.
pub(super) struct Fetch<'a> {
    pub(super) hub: &'a Hub,
    pub(super) client: Client,
    pub(super) kind: RepoKind,
    pub(super) id: &'a str,
    revision: &'a str,
    home: PathBuf,
    retry: RetryPolicy,
    /// Longest time for a page.
    stall: Duration,
}

/// The commit that a revision names, and its files.
#[derive(Deserialize)]
struct RepoInfo {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl<'a> Fetch<'a> {
    pub(super) fn new(hub: &'a Hub, kind: RepoKind, name: &'a str) -> Result<Self, HubError> {
        let (id, revision) = name.split_once('@').unwrap_or((name, "main"));
        let client = Client::new("hub", hub.endpoint.clone())?;
        Ok(Fetch { hub, client, kind, id, revision, home: kind.home(&hub.cache, id), retry: RETRY, stall: STALL })
    }

    /// Makes one short attempt, for questions whose answer is not needed.
    pub(super) fn once(self) -> Self {
        Fetch { retry: RetryPolicy { retries: 0, busy_timeout: Duration::ZERO, ..RETRY }, stall: ONCE, ..self }
    }

    /// The folder of the repository's files by their checksums.
    pub(super) fn blobs(&self) -> PathBuf {
        self.home.join("blobs")
    }

    pub(super) async fn run(&self, wanted: impl Fn(&[String]) -> Result<Vec<String>, HubError>) -> Result<PathBuf, HubError> {
        let (commit, files) = self.listing().await?;
        let mut remotes = Vec::new();
        for path in wanted(&files)? {
            check_path(&path).map_err(|why| self.nonsense(why, &path))?;
            remotes.push(self.head(&commit, path).await?);
        }
        let blobs = self.blobs();
        std::fs::create_dir_all(&blobs).map_err(io(&blobs))?;
        let missing: Vec<&Remote> = remotes.iter().filter(|remote| !blobs.join(&remote.etag).exists()).collect();
        let total = missing.iter().filter_map(|remote| remote.size).sum();
        if !missing.is_empty() {
            let (count, id, hub, size) = (missing.len(), self.id, self.client.base(), total / 1_000_000);
            tracing::info!("Fetching {count} files of {id} from {hub} ({size} MB)");
        }
        let bar = progress_bar(self.id, total);
        for remote in missing {
            self.download(&commit, remote, &bar).await?;
        }
        bar.finish_and_clear();
        // Linked when all are there, so that what a snapshot shows is whole.
        let snapshot = self.home.join("snapshots").join(&commit);
        for remote in &remotes {
            link(&snapshot, remote)?;
        }
        if self.revision != commit {
            let reference = self.home.join("refs").join(self.revision);
            write(&reference, commit.as_bytes())?;
        }
        Ok(snapshot)
    }

    /// The commit of the revision, and the paths of its files. Those of a data set are kept in the cache.
    pub(super) async fn listing(&self) -> Result<(String, Vec<String>), HubError> {
        let path = format!("/api/{}/{}/revision/{}", self.kind.plural(), self.id, self.revision.replace('/', "%2F"));
        let response = self.ask(Method::GET, &path, HeaderMap::new()).await?;
        let late = |_| self.client.late("the list of files", self.stall);
        let page = timeout(self.stall, response.bytes()).await.map_err(late)?;
        let page = page.map_err(|error| self.client.broken(error))?;
        let info: RepoInfo =
            serde_json::from_slice(&page).map_err(|error| self.nonsense(error.to_string(), &String::from_utf8_lossy(&page)))?;
        if info.sha.len() < 7 || !info.sha.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(self.nonsense("no commit".to_owned(), &info.sha));
        }
        let files: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        if self.kind == RepoKind::Dataset {
            let text = serde_json::to_vec(&files).map_err(|error| self.nonsense(error.to_string(), ""))?;
            // A cache that only can be read has no list; the hub is asked again.
            if let Err(error) = write(&self.hub.cache.listing_path(self.kind, self.id, &info.sha), &text) {
                tracing::debug!("{error}");
            }
        }
        Ok((info.sha, files))
    }

    /// Size and checksum of a file.
    async fn head(&self, commit: &str, path: String) -> Result<Remote, HubError> {
        let response = self.ask(Method::HEAD, &self.resolve(commit, &path), plain()).await?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let linked = header("x-linked-etag").or_else(|| header("etag")).unwrap_or_default();
        let etag = linked.trim_start_matches("W/").trim_matches('"').to_owned();
        if etag.is_empty() || !etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
            return Err(self.nonsense(format!("no usable ETag for {path}"), &etag));
        }
        let linked = header("x-linked-size").and_then(|size| size.parse().ok());
        let length = header("content-length").and_then(|size| size.parse().ok());
        let size = linked.or(length.filter(|_| response.status().is_success()));
        Ok(Remote { path, etag, size })
    }

    pub(super) fn resolve(&self, commit: &str, path: &str) -> String {
        let path: Vec<String> = path.split('/').map(encoded).collect();
        format!("{}/resolve/{commit}/{}", self.page(), path.join("/"))
    }

    /// Path of the repository's page.
    fn page(&self) -> String {
        let kind = if self.kind == RepoKind::Model { "" } else { "/datasets" };
        format!("{kind}/{}", self.id)
    }

    /// Asks the hub; follows redirects within it. An answer that leads elsewhere is an answer.
    pub(super) async fn ask(&self, method: Method, path: &str, headers: HeaderMap) -> Result<Response, HubError> {
        let mut path = path.to_owned();
        for _ in 0..REDIRECTS {
            let response = self.answer(&method, &path, &headers).await?;
            if !response.status().is_redirection() {
                return self.allowed(response);
            }
            match location(&response).filter(|to| to.starts_with('/') && !to.starts_with("//")) {
                Some(to) => path = to,
                None => return Ok(response),
            }
        }
        Err(self.nonsense("too many redirects".to_owned(), &path))
    }

    /// Sends one request, again after failures. Until the hub has answered once, few connections are tried.
    async fn answer(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<Response, RemoteError> {
        let contact = &self.hub.contact;
        if let Some(Err(error)) = contact.get() {
            return Err(error.clone());
        }
        let mut retries = self.retry.begin(path.len() as u64, Instant::now() + WHOLE);
        let mut attempt = 1;
        loop {
            let asked = timeout(self.stall, self.client.request(method.clone(), path, headers.clone(), None)).await;
            let asked = asked.unwrap_or_else(|_| Err(self.client.late(path, self.stall)));
            if asked.is_ok() {
                contact.set(Ok(())).ok();
            }
            let error = match asked.and_then(|response| self.client.busy_or_failed(&response).map_or(Ok(response), Err)) {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            let unreached = matches!(error.fault, Fault::Unreachable(_)) && contact.get().is_none();
            let attempts = if unreached { FIRST_ATTEMPTS } else { self.retry.retries + 1 };
            let outcome = error.fault.outcome();
            let pause = retries.after(outcome, Instant::now()).filter(|_| !unreached || attempt < attempts);
            let Some(pause) = pause else {
                if unreached {
                    contact.set(Err(error.clone())).ok();
                }
                return Err(error);
            };
            // Waiting for a busy hub uses no attempt.
            attempt += u32::from(outcome == Outcome::Failed);
            tracing::warn!("waiting for {} (attempt {attempt} of {attempts}): {}", self.client.name(), error.fault);
            sleep(pause).await;
        }
    }

    /// The answer, unless the hub refuses it. A range beyond the end is for who asked for one.
    fn allowed(&self, response: Response) -> Result<Response, HubError> {
        let status = response.status();
        if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(response);
        }
        let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
        let (id, revision, hub, has_token) = (self.id, self.revision, self.client.base(), self.hub.endpoint.token.is_some());
        let refused = match (status, code) {
            (_, "GatedRepo") => {
                let token =
                    if has_token { "use a token of that account in HF_TOKEN" } else { "set HF_TOKEN to a token of that account" };
                let page = self.page();
                format!("{id} is gated: accept its terms at {hub}{page}, then {token}")
            }
            (_, "RevisionNotFound") => {
                format!("{id} has no revision {revision:?}; name a branch, a tag or a commit of it")
            }
            // The hub does not say whether there is a repository that one may not see.
            (StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => {
                let token = if has_token { ", for the token in use" } else { "; a private one needs a token in HF_TOKEN" };
                format!("{id} is neither here nor on {hub}{token}; check the name")
            }
            _ => return Err(self.client.refusal("the request", status.as_u16(), code).into()),
        };
        Err(HubError::Refused(refused))
    }

    pub(super) fn nonsense(&self, why: String, page: &str) -> HubError {
        self.client.nonsense("the request", why, page).into()
    }
}

/// Asks for files as they are, so that sizes and ranges are those of the file.
pub(super) fn plain() -> HeaderMap {
    HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static("identity"))])
}

pub(super) fn location(response: &Response) -> Option<String> {
    response.headers().get(LOCATION)?.to_str().ok().map(str::to_owned)
}

fn encoded(part: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    part.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// The first names of a list, for messages.
pub fn shown(files: &[String]) -> String {
    let files: BTreeSet<&str> = files.iter().map(String::as_str).collect();
    let more = files.len().saturating_sub(8);
    let shown = files.into_iter().take(8).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}
