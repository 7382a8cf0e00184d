//! Models and data sets by their ids: from the local cache of the Hugging Face hub, or fetched into
//! it on first use.
//!
//! [`Cache`] only looks; [`Hub`] fetches files that the cache lacks, unless `HF_HUB_OFFLINE` is set.
//! A revision is pinned to its commit when it is first resolved.
//!
//! The crate hf-hub (1.1) would not do: it resumes no download, compares no checksum, reads none of
//! the `HF_` variables, and sends part of its requests past `net`'s certificates and retries.

mod cache;
mod download;
mod error;
mod fetch;
mod store;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use cache::{Cache, CachedModel, RepoKind, hub_id, is_word, snapshot};
pub use error::HubError;
use fetch::Fetch;
pub use fetch::shown;

use rollflow_net::{Endpoint, RemoteError, Tasks};

/// The public hub.
const PUBLIC: &str = "https://huggingface.co";

/// A hub, the cache that it is fetched into, and what this process may do there.
///
/// If no first connection can be made, this value and its clones fail with the same error from then on.
#[derive(Clone, Debug, PartialEq)]
pub struct Hub {
    cache: Cache,
    endpoint: Endpoint,
    offline: bool,
    /// Set once: the hub has answered, or no first connection could be made.
    contact: Arc<OnceLock<Result<(), RemoteError>>>,
}

impl Hub {
    /// The hub and the cache that the environment names: `HF_ENDPOINT`, `HF_TOKEN` (else the token
    /// that `hf auth login` keeps), `HF_HUB_OFFLINE`, `HF_HOME` and `HF_HUB_CACHE`.
    pub fn of_user() -> Self {
        Hub::by(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn by(variable: impl Fn(&str) -> Option<String>) -> Self {
        let cache = Cache::by(|name| variable(name).map(PathBuf::from));
        let home = || cache::home(&|name| variable(name).map(PathBuf::from));
        let kept = || {
            let file = variable("HF_TOKEN_PATH").map_or_else(|| home().join("token"), PathBuf::from);
            std::fs::read_to_string(file).ok()
        };
        let token = variable("HF_TOKEN").or_else(kept).map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let yes = |value: String| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on");
        let url = variable("HF_ENDPOINT").unwrap_or_else(|| PUBLIC.to_owned());
        let endpoint = Endpoint::new(url);
        let endpoint = token.and_then(|token| endpoint.clone().with_token(&token)).unwrap_or(endpoint);
        Hub { offline: variable("HF_HUB_OFFLINE").is_some_and(yes), ..Hub::at(endpoint, cache) }
    }

    /// Hub at `endpoint` with the given cache.
    pub fn at(endpoint: impl Into<Endpoint>, cache: Cache) -> Self {
        Hub { endpoint: endpoint.into(), cache, offline: false, contact: Arc::default() }
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

    /// Returns true if nothing may be fetched.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// The folder that `name` means: itself if it is one, else the model of that id, `ORG/NAME` or
    /// `ORG/NAME@REVISION`, from the cache or fetched now.
    ///
    /// # Errors
    ///
    /// [`HubError`] says whether the name, the network or the hub's permission is missing.
    pub fn open(&self, name: &Path) -> Result<PathBuf, HubError> {
        match self.cache.locate(name) {
            Err(HubError::NotCached(missing)) if self.offline => Err(HubError::Offline(missing)),
            Err(HubError::NotCached(_)) => {
                let id = name.to_string_lossy();
                let folder = self.fetch(RepoKind::Model, &id, |files| Ok(model_files(files)))?;
                match cache::missing_shard(&folder) {
                    None => Ok(folder),
                    Some(shard) => Err(HubError::Lacks(id.into_owned(), format!("lacks {shard}, which its index names"))),
                }
            }
            located => located,
        }
    }

    /// Fetches the files of a repository that `wanted` chooses from all of its files; returns the
    /// snapshot's folder.
    pub fn fetch(
        &self,
        kind: RepoKind,
        id: &str,
        wanted: impl Fn(&[String]) -> Result<Vec<String>, HubError> + Send,
    ) -> Result<PathBuf, HubError> {
        self.wait(async || Fetch::new(self, kind, id)?.run(wanted).await)
    }

    /// Lists the files of a repository, and fetches none.
    pub fn list(&self, kind: RepoKind, id: &str) -> Result<Vec<String>, HubError> {
        self.wait(async || Ok(Fetch::new(self, kind, id)?.listing().await?.1))
    }

    /// Lists like [`Hub::list`], in one attempt of a few seconds.
    pub fn list_once(&self, kind: RepoKind, id: &str) -> Result<Vec<String>, HubError> {
        self.wait(async || Ok(Fetch::new(self, kind, id)?.once().listing().await?.1))
    }

    /// Runs `work` on a separate thread, because the caller may be a task, which must not block.
    fn wait<T: Send>(&self, work: impl AsyncFnOnce() -> Result<T, HubError> + Send) -> Result<T, HubError> {
        let failed = error::io(self.cache.root());
        let subscriber = tracing::dispatcher::get_default(Clone::clone);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("hub".into()).spawn_scoped(scope, || {
                let _subscriber = tracing::dispatcher::set_default(&subscriber);
                Tasks::new().map_err(&failed)?.block_on(work())
            });
            match thread.map_err(&failed)?.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

/// Files of a model's tokenizer and chat template.
pub const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// Folder of further chat templates of a model, each a file `NAME.jinja`.
pub const MORE_TEMPLATES: &str = "additional_chat_templates";

/// The files of a model that training and generation read.
fn model_files(files: &[String]) -> Vec<String> {
    const OTHERS: [&str; 2] = ["config.json", "generation_config.json"];
    // A repository may hold its weights whole and in parts: the whole file is read.
    let whole = files.iter().any(|file| file == "model.safetensors");
    let numbered = |file: &str| ["model-", "model.safetensors-"].iter().any(|begin| file.starts_with(begin));
    let part = |file: &str| !whole && !file.contains('/') && file.ends_with(".safetensors") && numbered(file);
    let template = |file: &str| file.ends_with(".jinja") && Path::new(file).parent() == Some(Path::new(MORE_TEMPLATES));
    let wanted = |file: &&String| {
        let file = file.as_str();
        TOKENIZER_FILES.contains(&file)
            || OTHERS.contains(&file)
            || part(file)
            || template(file)
            || file == if whole { "model.safetensors" } else { cache::INDEX }
    };
    files.iter().filter(wanted).cloned().collect()
}
