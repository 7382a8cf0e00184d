//! The local cache of the hub, in the layout of its Python tools, which share it.
//!
//! A repository's folder holds `blobs`, `refs` and `snapshots`. rollflow adds
//! `.listings/COMMIT.json`: the names of all files of a revision, since a snapshot holds only those
//! that were fetched.

use std::path::{Path, PathBuf};

use super::HubError;
use rollflow_util::reading;

/// Index of weights in parts.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Kind of repository.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl RepoKind {
    /// The kind in paths of the cache and of the hub.
    pub(super) fn plural(self) -> &'static str {
        if self == RepoKind::Model { "models" } else { "datasets" }
    }

    /// The name of the repository's folder.
    pub(super) fn folder(self, id: &str) -> String {
        format!("{}--{}", self.plural(), id.replace('/', "--"))
    }

    /// The folder of a repository in a cache.
    pub fn home(self, cache: &Cache, id: &str) -> PathBuf {
        cache.root.join(self.folder(id))
    }
}

/// The hub's local cache: `models--ORG--NAME/snapshots/COMMIT` and
/// `datasets--ORG--NAME/snapshots/COMMIT` below a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    root: PathBuf,
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// `ORG/NAME`.
    pub id: String,
    /// The folder of its files, of revision `main` or else of the one that is there.
    pub folder: PathBuf,
    /// Missing files, if any.
    pub missing: Option<String>,
}

impl Cache {
    /// The cache of this user: `$HF_HUB_CACHE`, else `hub` in `$HF_HOME`, else in `huggingface` in
    /// `$XDG_CACHE_HOME` or `~/.cache`.
    pub fn of_user() -> Self {
        Self::by(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
    }

    pub(super) fn by(variable: impl Fn(&str) -> Option<PathBuf>) -> Self {
        Cache { root: variable("HF_HUB_CACHE").unwrap_or_else(|| home(&variable).join("hub")) }
    }

    /// The cache in that folder.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Cache { root: root.into() }
    }

    /// Path of the cache.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder that `name` means: itself if it is one, else the cached model of that id, `ORG/NAME`
    /// or `ORG/NAME@REVISION`, with all of its weights in it. Fetches nothing.
    pub fn locate(&self, name: &Path) -> Result<PathBuf, HubError> {
        if name.exists() {
            return Ok(name.to_owned());
        }
        let Some(id) = name.to_str().filter(|name| is_id(name)) else {
            let relative = "; paths are relative to the folder that the command runs in";
            let why = format!("which does not exist{}", if name.is_absolute() { "" } else { relative });
            return Err(HubError::NotFound(format!("{}, {why}", name.display())));
        };
        let (name, revision) = id.split_once('@').map_or((id, None), |(name, revision)| (name, Some(revision)));
        let refuse = |looked: String| {
            let of = revision.map_or_else(String::new, |revision| format!(" --revision {revision}"));
            HubError::NotCached(format!("{id}, which {looked}; to fetch it: hf download {name}{of}"))
        };
        let home = RepoKind::Model.home(self, name);
        if !home.is_dir() {
            return Err(refuse(format!("does not exist here, nor in the hub's cache (looked for {})", home.display())));
        }
        let folder = snapshot(&home, revision).ok_or_else(|| {
            let revision = revision.unwrap_or("main");
            refuse(format!("is in the hub's cache, but not its revision {revision:?} (looked in {})", home.display()))
        })?;
        let lacks = |what| refuse(format!("is in the hub's cache only in part: {what} is missing in {}", folder.display()));
        missing(&folder).map_or(Ok(folder.clone()), |what| Err(lacks(what)))
    }

    /// The names of all files of a repository's revision, if its list was kept when it was fetched.
    pub fn listing(&self, kind: RepoKind, name: &str) -> Option<Vec<String>> {
        let (id, revision) = name.split_once('@').map_or((name, None), |(id, revision)| (id, Some(revision)));
        let folder = snapshot(&kind.home(self, id), revision)?;
        let text = reading::read_text(&self.listing_path(kind, id, folder.file_name()?.to_str()?)).ok()?;
        serde_json::from_str(&text).ok()
    }

    pub(super) fn listing_path(&self, kind: RepoKind, id: &str, commit: &str) -> PathBuf {
        kind.home(self, id).join(".listings").join(format!("{commit}.json"))
    }

    /// Every model in it, by id.
    pub fn models(&self) -> Vec<CachedModel> {
        let entries = std::fs::read_dir(&self.root).into_iter().flatten().flatten();
        let model = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let id = name.strip_prefix("models--")?.replacen("--", "/", 1);
            let folder = snapshot(&entry.path(), None)?;
            Some(CachedModel { id, missing: missing(&folder), folder })
        };
        let mut models: Vec<CachedModel> = entries.filter_map(model).collect();
        models.sort_by(|a, b| a.id.cmp(&b.id));
        models
    }
}

/// Returns true if the hub may have a model of this name.
fn is_id(name: &str) -> bool {
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    name.split('/').count() == 2 && name.split('/').all(is_word) && revision.split('/').all(is_word)
}

/// Returns true if `part` can be a part of an id.
pub fn is_word(part: &str) -> bool {
    !part.is_empty() && !part.starts_with('.') && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

/// The folder of the hub's tools: `$HF_HOME`, else `huggingface` in `$XDG_CACHE_HOME` or
/// `~/.cache`.
pub(super) fn home(variable: &impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let caches = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache"))).unwrap_or_default();
    variable("HF_HOME").unwrap_or_else(|| caches().join("huggingface"))
}

/// The files of a revision: what its reference names, or the commit itself; without one, `main` or
/// the only one there is.
pub fn snapshot(home: &Path, revision: Option<&str>) -> Option<PathBuf> {
    let snapshots = home.join("snapshots");
    let named = |revision: &str| {
        let commit = std::fs::read_to_string(home.join("refs").join(revision)).ok()?;
        Some(snapshots.join(commit.trim())).filter(|folder| folder.is_dir())
    };
    let folders = || std::fs::read_dir(&snapshots).into_iter().flatten().flatten().map(|entry| entry.path());
    let commit = |revision: &str| {
        let whole = Some(snapshots.join(revision)).filter(|folder| folder.is_dir());
        let begins = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(revision));
        whole.or_else(|| folders().find(|path| revision.len() >= 7 && begins(path)))
    };
    match revision {
        Some(revision) => named(revision).or_else(|| commit(revision)),
        None => named("main").or_else(|| folders().next().filter(|_| folders().count() == 1)),
    }
}

/// Id and commit of the model whose snapshot in a cache this folder is.
pub fn hub_id(folder: &Path) -> Option<(String, String)> {
    let (snapshots, commit) = (folder.parent()?, folder.file_name()?.to_str()?);
    let home = snapshots.parent().filter(|_| snapshots.ends_with("snapshots"))?;
    let id = home.file_name()?.to_str()?.strip_prefix("models--")?.replacen("--", "/", 1);
    is_id(&id).then(|| (id, commit.to_owned()))
}

/// Missing files of a model's folder.
fn missing(folder: &Path) -> Option<String> {
    let lacks = |name: &&str| !folder.join(name).exists();
    if let Some(name) = ["config.json", "tokenizer.json"].into_iter().find(lacks) {
        return Some(name.to_owned());
    }
    let weights = ["model.safetensors", INDEX];
    if weights.iter().all(lacks) { Some(weights[0].to_owned()) } else { missing_shard(folder) }
}

/// First missing file of weights in parts, by their index. None without an index.
pub(super) fn missing_shard(folder: &Path) -> Option<String> {
    if folder.join("model.safetensors").exists() {
        return None;
    }
    let index: serde_json::Value = serde_json::from_str(&reading::read_text(&folder.join(INDEX)).ok()?).unwrap_or_default();
    let mut shards: Vec<&str> =
        index["weight_map"].as_object().into_iter().flatten().filter_map(|(_, file)| file.as_str()).collect();
    shards.sort_unstable();
    shards.into_iter().find(|shard| !folder.join(shard).exists()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A cache with one model in the hub's layout.
    fn cached(id: &str, files: &[&str]) -> (tempfile::TempDir, Cache) {
        let root = tempfile::tempdir().unwrap();
        let home = root.path().join(format!("models--{}", id.replace('/', "--")));
        let folder = home.join("snapshots/0123456789abcdef");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(home.join("refs/pr")).unwrap();
        fs::write(home.join("refs/main"), "0123456789abcdef").unwrap();
        fs::write(home.join("refs/pr/7"), "0123456789abcdef\n").unwrap();
        files.iter().for_each(|file| fs::write(folder.join(file), "{}").unwrap());
        let cache = Cache::at(root.path());
        (root, cache)
    }

    #[test]
    fn an_id_is_the_snapshot_that_its_revision_names() {
        let (root, cache) = cached("Org/some-model_1.5", &["config.json", "tokenizer.json", "model.safetensors"]);
        let folder = root.path().join("models--Org--some-model_1.5/snapshots/0123456789abcdef");
        for id in ["Org/some-model_1.5", "Org/some-model_1.5@main", "Org/some-model_1.5@pr/7", "Org/some-model_1.5@0123456"] {
            assert_eq!(cache.locate(Path::new(id)).unwrap(), folder, "{id}");
        }
        let error = cache.locate(Path::new("Org/some-model_1.5@v2")).unwrap_err().to_string();
        assert!(error.contains("revision \"v2\"") && error.contains("--revision v2"), "{error}");
        assert_eq!(hub_id(&folder), Some(("Org/some-model_1.5".to_owned(), "0123456789abcdef".to_owned())));
        assert_eq!(hub_id(root.path()), None);
        assert_eq!(cache.models(), [CachedModel { id: "Org/some-model_1.5".into(), folder, missing: None }]);
    }

    #[test]
    fn what_is_not_there_says_where_it_was_looked_for_and_how_to_fetch_it() {
        let (root, cache) = cached("a/b", &["config.json", "tokenizer.json"]);
        let error = |name: &str| cache.locate(Path::new(name)).unwrap_err().to_string();
        let looked = root.path().join("models--a--c").display().to_string();
        assert!(error("a/c").contains(&looked) && error("a/c").ends_with("hf download a/c"), "{}", error("a/c"));
        assert!(error("a/b").contains("only in part: model.safetensors is missing"), "{}", error("a/b"));
        assert!(!error("./a/c").contains("hf download"), "{}", error("./a/c"));
    }

    #[test]
    fn shards_that_the_index_names_must_be_there() {
        let (root, cache) = cached("a/b", &["config.json", "tokenizer.json", "one.safetensors"]);
        let folder = root.path().join("models--a--b/snapshots/0123456789abcdef");
        let index = r#"{"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}"#;
        fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
        assert!(cache.locate(Path::new("a/b")).unwrap_err().to_string().contains("two.safetensors is missing"));
        fs::write(folder.join("two.safetensors"), "").unwrap();
        assert_eq!(cache.locate(Path::new("a/b")).unwrap(), folder);
    }

    #[test]
    fn the_users_cache_is_where_the_hubs_tools_put_it() {
        let by = |set: &[(&str, &str)]| {
            Cache::by(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| PathBuf::from(value))).root
        };
        assert_eq!(by(&[("HOME", "/h")]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(by(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(by(&[("HOME", "/h"), ("HF_HOME", "/f")]), Path::new("/f/hub"));
        assert_eq!(by(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
    }
}
