//! A hub as its user's environment names it, and what is fetched from it.

use std::path::PathBuf;

use super::HubError;
use super::cache::{Cache, RepoKind, home};
use super::fetch::{Fetch, Listing};
use crate::net::{Endpoint, Tasks};

/// The public hub.
const PUBLIC: &str = "https://huggingface.co";

/// A hub, the cache that it is fetched into, and what this process may do there.
#[derive(Clone, Debug, PartialEq)]
pub struct Hub {
    cache: Cache,
    endpoint: Endpoint,
    offline: bool,
}

impl Hub {
    /// The hub and the cache that the environment names: `HF_ENDPOINT`, `HF_TOKEN` (else the token
    /// that `hf auth login` keeps), `HF_HUB_OFFLINE`, `HF_HOME` and `HF_HUB_CACHE`.
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
        let endpoint = Endpoint::new(url);
        let endpoint = token.and_then(|token| endpoint.clone().with_token(&token)).unwrap_or(endpoint);
        Hub { endpoint, offline: variable("HF_HUB_OFFLINE").is_some_and(yes), cache }
    }

    /// Hub at `endpoint` with the given cache.
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

    /// The folder of a model by its id, `ORG/NAME` or `ORG/NAME@REVISION`: from the cache, or
    /// fetched now.
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

    /// The endpoint.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Fetches the files of a repository that `wanted` chooses from its listing; returns the
    /// snapshot's folder.
    pub fn fetch(
        &self,
        kind: RepoKind,
        id: &str,
        wanted: impl Fn(&Listing) -> Result<Vec<String>, HubError> + Send,
    ) -> Result<PathBuf, HubError> {
        self.wait(async || Fetch::new(self, kind, id)?.run(wanted).await)
    }

    /// Lists the files of a repository, and fetches none.
    pub fn list(&self, kind: RepoKind, id: &str) -> Result<Listing, HubError> {
        self.wait(async || Fetch::new(self, kind, id)?.listing().await)
    }

    /// Lists like [`Hub::list`], in one attempt of a few seconds.
    pub(crate) fn list_once(&self, kind: RepoKind, id: &str) -> Result<Listing, HubError> {
        self.wait(async || Fetch::new(self, kind, id)?.once().listing().await)
    }

    /// Runs `work` on a separate thread, because the caller may be a task, which must not block.
    fn wait<T: Send>(&self, work: impl AsyncFnOnce() -> Result<T, HubError> + Send) -> Result<T, HubError> {
        let failed = |source| HubError::Io { path: self.cache.root().to_owned(), source };
        let subscriber = tracing::dispatcher::get_default(Clone::clone);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("hub".into()).spawn_scoped(scope, || {
                let _subscriber = tracing::dispatcher::set_default(&subscriber);
                Tasks::new().map_err(failed)?.block_on(work())
            });
            match thread.map_err(failed)?.join() {
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
