//! Fetching from a Hugging Face hub into its local cache, in the layout that Python's tools use.
//!
//! This is a thin piece on [`net`](crate::net): the crate `hf-hub` 1.0 knows neither `HF_HUB_OFFLINE`
//! nor certificates of one's own, begins interrupted files again, and brings another TLS library that
//! needs CMake. A file is downloaded into `blobs/ETAG.incomplete`, resumed from there if it was
//! interrupted, checked against the hub's SHA-256, and only then renamed and linked into its snapshot.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use reqwest::header::{ACCEPT_ENCODING, ETAG, HeaderMap, HeaderName, HeaderValue, LOCATION, RANGE};
use reqwest::{Method, Response, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::time::timeout;

use super::{Cache, HubError, home};
use crate::net::{Client, Endpoint, RetryPolicy, Token};

/// The public hub.
const PUBLIC: &str = "https://huggingface.co";

/// Longest time for a page, and for the next piece of a file.
const STALL: Duration = Duration::from_secs(30);

/// Longest time for all of a fetch.
const WHOLE: Duration = Duration::from_secs(24 * 3600);

/// Longest chain of redirects.
const REDIRECTS: usize = 5;

/// Retries of one file; every piece that arrives begins them again.
const RETRY: RetryPolicy = RetryPolicy {
    retries: 5,
    pause: Duration::from_secs(1),
    max_pause: Duration::from_secs(30),
    busy_timeout: Duration::from_secs(600),
};

/// What a repository of the hub holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl RepoKind {
    fn folder(self, id: &str) -> String {
        let kind = if self == RepoKind::Model { "models" } else { "datasets" };
        format!("{kind}--{}", id.replace('/', "--"))
    }

    /// The folder of a repository in a cache.
    pub(crate) fn home(self, cache: &Cache, id: &str) -> PathBuf {
        cache.root().join(self.folder(id))
    }
}

/// A revision of a repository, as the hub lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The commit that the revision names.
    pub commit: String,
    /// The paths of its files.
    pub files: Vec<String>,
}

/// A hub, the cache that it is fetched into, and what this process may do there.
#[derive(Clone, Debug, PartialEq)]
pub struct Hub {
    cache: Cache,
    endpoint: Endpoint,
    offline: bool,
}

impl Hub {
    /// The hub and the cache that the environment names: `HF_ENDPOINT`, `HF_TOKEN` (else the token that
    /// `hf auth login` keeps), `HF_HUB_OFFLINE`, `HF_HOME` and `HF_HUB_CACHE`.
    pub fn of_user() -> Self {
        Hub::by(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    pub(super) fn by(variable: impl Fn(&str) -> Option<String>) -> Self {
        let cache = Cache::by(|name| variable(name).map(PathBuf::from));
        let kept = || {
            let file = variable("HF_TOKEN_PATH")
                .map_or_else(|| home(&|name| variable(name).map(PathBuf::from)).join("token"), PathBuf::from);
            std::fs::read_to_string(file).ok()
        };
        let token = variable("HF_TOKEN").or_else(kept).map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let yes = |value: String| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on");
        let url = variable("HF_ENDPOINT").unwrap_or_else(|| PUBLIC.to_owned());
        let endpoint = Endpoint { token: token.as_deref().and_then(Token::new), ..Endpoint::new(url) };
        Hub { endpoint, offline: variable("HF_HUB_OFFLINE").is_some_and(yes), cache }
    }

    /// The hub at `endpoint`, with a cache of its own.
    pub fn at(endpoint: impl Into<Endpoint>, cache: Cache) -> Self {
        Hub { endpoint: endpoint.into(), cache, offline: false }
    }

    /// If true, nothing is fetched.
    pub fn offline(self, offline: bool) -> Self {
        Hub { offline, ..self }
    }

    /// Trusts the authorities in this PEM file too.
    pub fn ca_file(mut self, file: Option<PathBuf>) -> Self {
        self.endpoint.ca_file = file.or(self.endpoint.ca_file);
        self
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The folder of a model by its id, `ORG/NAME` or `ORG/NAME@REVISION`: from the cache, or fetched now.
    pub fn model(&self, id: &str) -> Result<PathBuf, HubError> {
        match self.cache.model(id) {
            Ok(folder) => Ok(folder),
            Err(missing) if self.offline => Err(HubError::Offline(missing)),
            Err(_) => self.fetch(RepoKind::Model, id, |listing| Ok(model_files(&listing.files))),
        }
    }

    /// Returns true if nothing may be fetched.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// Fetches the files of a repository that `wanted` chooses from its listing; returns the snapshot's folder.
    pub fn fetch(
        &self,
        kind: RepoKind,
        id: &str,
        wanted: impl Fn(&Listing) -> Result<Vec<String>, HubError> + Send,
    ) -> Result<PathBuf, HubError> {
        let thread = |source| HubError::Io { path: self.cache.root().to_owned(), source };
        // A thread of its own, since the caller may be a task, which must not wait.
        std::thread::scope(|scope| {
            let work = std::thread::Builder::new().name("hub".into()).spawn_scoped(scope, || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(thread)?;
                runtime.block_on(Fetch::new(self, kind, id)?.run(wanted))
            });
            match work.map_err(thread)?.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

/// The files of a model that training and generation read.
fn model_files(files: &[String]) -> Vec<String> {
    const NAMED: [&str; 10] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
    ];
    let index = "model.safetensors.index.json";
    // A repository may hold its weights whole and in parts: the whole file is read.
    let whole = files.iter().any(|file| file == "model.safetensors");
    let part = |file: &str| !whole && !file.contains('/') && file.ends_with(".safetensors") && file.starts_with("model-");
    let wanted = |file: &&String| {
        NAMED.contains(&file.as_str()) || part(file) || if whole { *file == "model.safetensors" } else { *file == index }
    };
    files.iter().filter(wanted).cloned().collect()
}

/// One file of a repository.
struct Remote {
    path: String,
    etag: String,
    size: Option<u64>,
}

struct Fetch<'a> {
    hub: &'a Hub,
    client: Client,
    kind: RepoKind,
    id: &'a str,
    revision: &'a str,
    home: PathBuf,
}

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
    fn new(hub: &'a Hub, kind: RepoKind, name: &'a str) -> Result<Self, HubError> {
        let (id, revision) = name.split_once('@').unwrap_or((name, "main"));
        let client = Client::new("hub", hub.endpoint.clone())?;
        Ok(Fetch { hub, client, kind, id, revision, home: kind.home(&hub.cache, id) })
    }

    async fn run(&self, wanted: impl Fn(&Listing) -> Result<Vec<String>, HubError>) -> Result<PathBuf, HubError> {
        let listing = self.listing().await?;
        let mut remotes = Vec::new();
        for path in wanted(&listing)? {
            check_path(&path).map_err(|why| self.nonsense(why, &path))?;
            remotes.push(self.head(&listing.commit, path).await?);
        }
        let blobs = self.home.join("blobs");
        std::fs::create_dir_all(&blobs).map_err(io(&blobs))?;
        let missing: Vec<&Remote> = remotes.iter().filter(|remote| !blobs.join(&remote.etag).exists()).collect();
        let total = missing.iter().filter_map(|remote| remote.size).sum();
        if !missing.is_empty() {
            tracing::info!(
                "Fetching {} files of {} from {} ({} MB)",
                missing.len(),
                self.id,
                self.client.base(),
                total / 1_000_000
            );
        }
        let bar = bar(self.id, total);
        for remote in missing {
            self.download(&listing.commit, remote, &blobs, &bar).await?;
        }
        bar.finish_and_clear();
        // Linked when all are there, so that what a snapshot shows is whole.
        let snapshot = self.home.join("snapshots").join(&listing.commit);
        for remote in &remotes {
            link(&snapshot, remote)?;
        }
        if self.revision != listing.commit {
            let reference = self.home.join("refs").join(self.revision);
            write(&reference, listing.commit.as_bytes())?;
        }
        Ok(snapshot)
    }

    async fn listing(&self) -> Result<Listing, HubError> {
        let kind = if self.kind == RepoKind::Model { "models" } else { "datasets" };
        let path = format!("/api/{kind}/{}/revision/{}", self.id, self.revision.replace('/', "%2F"));
        let response = self.ask(Method::GET, &path, HeaderMap::new()).await?;
        let page = timeout(STALL, response.bytes()).await.map_err(|_| self.client.late("the list of files", STALL))?;
        let page = page.map_err(|error| self.client.broken(error))?;
        let info: RepoInfo =
            serde_json::from_slice(&page).map_err(|error| self.nonsense(error.to_string(), &String::from_utf8_lossy(&page)))?;
        if info.sha.len() < 7 || !info.sha.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(self.nonsense("no commit".to_owned(), &info.sha));
        }
        let files = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        Ok(Listing { commit: info.sha, files })
    }

    /// Size and checksum of a file.
    async fn head(&self, commit: &str, path: String) -> Result<Remote, HubError> {
        let response = self.ask(Method::HEAD, &self.resolve(commit, &path), plain()).await?;
        let header = |name: &HeaderName| response.headers().get(name).and_then(|value| value.to_str().ok());
        let linked = header(&HeaderName::from_static("x-linked-etag")).or_else(|| header(&ETAG));
        let etag = linked.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned()).unwrap_or_default();
        if etag.is_empty() || !etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
            return Err(self.nonsense(format!("no usable ETag for {path}"), &etag));
        }
        let linked = header(&HeaderName::from_static("x-linked-size")).and_then(|size| size.parse().ok());
        let length = header(&reqwest::header::CONTENT_LENGTH).and_then(|size| size.parse().ok());
        let size = linked.or(length.filter(|_| response.status().is_success()));
        Ok(Remote { path, etag, size })
    }

    fn resolve(&self, commit: &str, path: &str) -> String {
        let kind = if self.kind == RepoKind::Model { "" } else { "/datasets" };
        let path: Vec<String> = path.split('/').map(encoded).collect();
        format!("{kind}/{}/resolve/{commit}/{}", self.id, path.join("/"))
    }

    /// Asks the hub; follows redirects within it. An answer that leads elsewhere is an answer.
    async fn ask(&self, method: Method, path: &str, headers: HeaderMap) -> Result<Response, HubError> {
        let mut path = path.to_owned();
        for _ in 0..REDIRECTS {
            let mut retries = RETRY.begin(path.len() as u64, Instant::now() + WHOLE);
            let response = loop {
                let asked = timeout(STALL, self.client.request(method.clone(), &path, headers.clone(), None)).await;
                let error = match asked.unwrap_or_else(|_| Err(self.client.late(&path, STALL))) {
                    Ok(response) => match self.client.busy_or_failed(&response) {
                        None => break response,
                        Some(error) => error,
                    },
                    Err(error) => error,
                };
                match retries.after(error.fault.outcome(), Instant::now()) {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => return Err(error.into()),
                }
            };
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

    /// The answer, unless the hub refuses it.
    fn allowed(&self, response: Response) -> Result<Response, HubError> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
        let (id, revision, hub) = (self.id.to_owned(), self.revision.to_owned(), self.client.base().to_owned());
        Err(match (status, code) {
            (_, "GatedRepo") => HubError::Gated { id, hub, has_token: self.hub.endpoint.token.is_some() },
            (_, "RevisionNotFound") => HubError::NoRevision { id, revision },
            // The hub does not say whether there is a repository that one may not see.
            (StatusCode::NOT_FOUND | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => {
                HubError::NoRepository { id, hub, has_token: self.hub.endpoint.token.is_some() }
            }
            _ => self.client.refusal("the request", status.as_u16(), code).into(),
        })
    }

    /// Downloads one file, from where an earlier try ended.
    async fn download(&self, commit: &str, remote: &Remote, blobs: &Path, bar: &ProgressBar) -> Result<(), HubError> {
        let (blob, part) = (blobs.join(&remote.etag), blobs.join(format!("{}.incomplete", remote.etag)));
        let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&part).map_err(io(&part))?;
        // Another process may fetch the same file.
        file.lock().map_err(io(&part))?;
        if blob.exists() {
            return Ok(());
        }
        let mut have = file.seek(SeekFrom::End(0)).map_err(io(&part))?;
        if remote.size.is_some_and(|size| have > size) {
            file.set_len(0).map_err(io(&part))?;
            have = file.seek(SeekFrom::Start(0)).map_err(io(&part))?;
        }
        bar.inc(have);
        let mut retries = RETRY.begin(have, Instant::now() + WHOLE);
        while remote.size.is_none_or(|size| have < size) {
            let before = have;
            match self.pieces(commit, remote, (&mut file, &part), &mut have, bar).await {
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
        file.sync_all().map_err(io(&part))?;
        std::fs::rename(&part, &blob).map_err(io(&blob))?;
        sync_folder(blobs)
    }

    /// Appends what comes until the connection ends.
    async fn pieces(
        &self,
        commit: &str,
        remote: &Remote,
        (file, part): (&mut File, &Path),
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
            let endpoint = Endpoint { token: None, url: to.to_string(), ..self.hub.endpoint.clone() };
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
            // The whole file comes, or the hub has another than what is here.
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

    fn nonsense(&self, why: String, page: &str) -> HubError {
        self.client.nonsense("the request", why, page).into()
    }
}

/// Asks for files as they are, so that sizes and ranges are those of the file.
fn plain() -> HeaderMap {
    HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static("identity"))])
}

fn location(response: &Response) -> Option<String> {
    response.headers().get(LOCATION)?.to_str().ok().map(str::to_owned)
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> HubError {
    let path = path.to_owned();
    move |source| HubError::Io { path: path.clone(), source }
}

/// A file's path must stay inside of its snapshot.
fn check_path(path: &str) -> Result<(), String> {
    let inside = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
    if path.split('/').all(inside) { Ok(()) } else { Err("the name of a file that leads out of its folder".to_owned()) }
}

fn encoded(part: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    part.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
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

/// Points a snapshot's file to its blob, by a relative link.
fn link(snapshot: &Path, remote: &Remote) -> Result<(), HubError> {
    let path = snapshot.join(&remote.path);
    let folder = path.parent().unwrap_or(snapshot);
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let depth = remote.path.split('/').count() + 1;
    let target = Path::new(&"../".repeat(depth)).join("blobs").join(&remote.etag);
    if std::fs::read_link(&path).is_ok_and(|old| old == target) {
        return Ok(());
    }
    let beside = folder.join(format!(".{}.{}", remote.etag, std::process::id()));
    std::os::unix::fs::symlink(&target, &beside).map_err(io(&beside))?;
    std::fs::rename(&beside, &path).map_err(io(&path))?;
    sync_folder(folder)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let beside = folder.join(format!(".writing.{}", std::process::id()));
    let mut file = File::create(&beside).map_err(io(&beside))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io(&beside))?;
    std::fs::rename(&beside, path).map_err(io(path))?;
    sync_folder(folder)
}

fn sync_folder(folder: &Path) -> Result<(), HubError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io(folder))
}

/// A bar on the terminal; nothing where standard error is none.
fn bar(id: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(id.to_owned());
    bar
}

/// The first names of a list, for messages.
pub(crate) fn shown(files: &[String]) -> String {
    let files: BTreeSet<&str> = files.iter().map(String::as_str).collect();
    let more = files.len().saturating_sub(8);
    let shown = files.into_iter().take(8).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}
