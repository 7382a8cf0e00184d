//! The local cache of the hub, in the layout of its Python tools, which share it.
//!
//! A repository's folder holds `blobs`, `refs` and `snapshots`. rollflow adds
//! `.listings/COMMIT.json`: the names of all files of a revision, since a snapshot holds only those
//! that were fetched.

use std::path::{Path, PathBuf};

use super::NotFound;
use crate::util::reading;

/// Kind of repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    Model,
    /// A data set.
    Dataset,
}

impl RepoKind {
    /// The name of the repository's folder.
    pub(super) fn folder(self, id: &str) -> String {
        let kind = if self == RepoKind::Model { "models" } else { "datasets" };
        format!("{kind}--{}", id.replace('/', "--"))
    }

    /// The folder of a repository in a cache.
    pub(crate) fn home(self, cache: &Cache, id: &str) -> PathBuf {
        cache.root().join(self.folder(id))
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

    /// The folder of a model by its id, `ORG/NAME` or `ORG/NAME@REVISION`, with all of its weights
    /// in it.
    pub fn model(&self, id: &str) -> Result<PathBuf, NotFound> {
        let refused = |looked: String| NotFound { name: id.to_owned(), looked, is_id: true };
        let (name, revision) = id.split_once('@').map_or((id, None), |(name, revision)| (name, Some(revision)));
        let home = self.root.join(format!("models--{}", name.replace('/', "--")));
        if !home.is_dir() {
            return Err(refused(format!("which does not exist here, nor in the hub's cache (looked for {})", home.display())));
        }
        let folder = snapshot(&home, revision).ok_or_else(|| {
            let revision = revision.unwrap_or("main");
            refused(format!("which is in the hub's cache, but not its revision {revision:?} (looked in {})", home.display()))
        })?;
        match missing(&folder) {
            None => Ok(folder),
            Some(what) => {
                Err(refused(format!("which is in the hub's cache only in part: {what} is missing in {}", folder.display())))
            }
        }
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

/// The folder of the hub's tools: `$HF_HOME`, else `huggingface` in `$XDG_CACHE_HOME` or
/// `~/.cache`.
pub(super) fn home(variable: &impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let caches = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache"))).unwrap_or_default();
    variable("HF_HOME").unwrap_or_else(|| caches().join("huggingface"))
}

/// The files of a revision: what its reference names, or the commit itself; without one, `main` or
/// the only one there is.
pub(crate) fn snapshot(home: &Path, revision: Option<&str>) -> Option<PathBuf> {
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

/// Missing files of a model's folder.
fn missing(folder: &Path) -> Option<String> {
    let lacks = |name: &&str| !folder.join(name).exists();
    if let Some(name) = ["config.json", "tokenizer.json"].into_iter().find(lacks) {
        return Some(name.to_owned());
    }
    if folder.join("model.safetensors").exists() {
        return None;
    }
    let Ok(index) = reading::read_text(&folder.join("model.safetensors.index.json")) else {
        return Some("model.safetensors".to_owned());
    };
    let index: serde_json::Value = serde_json::from_str(&index).unwrap_or_default();
    let mut shards: Vec<&str> =
        index["weight_map"].as_object().into_iter().flatten().filter_map(|(_, file)| file.as_str()).collect();
    shards.sort_unstable();
    shards.into_iter().find(lacks).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::hub::locate_in;

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
            assert_eq!(locate_in(&cache, Path::new(id)).unwrap(), folder, "{id}");
        }
        let error = cache.model("Org/some-model_1.5@v2").unwrap_err().to_string();
        assert!(error.contains("revision \"v2\"") && error.contains("--revision v2"), "{error}");
        assert_eq!(cache.models(), [CachedModel { id: "Org/some-model_1.5".into(), folder, missing: None }]);
    }

    #[test]
    fn what_is_not_there_says_where_it_was_looked_for_and_how_to_fetch_it() {
        let (root, cache) = cached("a/b", &["config.json", "tokenizer.json"]);
        let error = locate_in(&cache, Path::new("a/c")).unwrap_err().to_string();
        assert!(error.contains(&root.path().join("models--a--c").display().to_string()), "{error}");
        assert!(error.ends_with("hf download a/c"), "{error}");
        let error = cache.model("a/b").unwrap_err().to_string();
        assert!(error.contains("only in part: model.safetensors is missing"), "{error}");
        let error = locate_in(&cache, Path::new("./a/c")).unwrap_err().to_string();
        assert!(!error.contains("hf download"), "{error}");
    }

    #[test]
    fn shards_that_the_index_names_must_be_there() {
        let (root, cache) = cached("a/b", &["config.json", "tokenizer.json", "one.safetensors"]);
        let folder = root.path().join("models--a--b/snapshots/0123456789abcdef");
        let index = r#"{"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}"#;
        fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
        assert!(cache.model("a/b").unwrap_err().to_string().contains("two.safetensors is missing"));
        fs::write(folder.join("two.safetensors"), "").unwrap();
        assert_eq!(cache.model("a/b").unwrap(), folder);
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
