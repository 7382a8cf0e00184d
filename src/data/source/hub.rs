//! Data sets in the local cache of the Hugging Face hub. Nothing is ever downloaded.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::DataError;

/// The cache's folder: `datasets--org--name/snapshots/<revision>/…` lie in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubCache(PathBuf);

impl HubCache {
    /// A cache in this folder.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        HubCache(folder.into())
    }

    /// Where Hugging Face's own programs keep it: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else in `huggingface` of the user's cache folder.
    pub fn of_user() -> Self {
        Self::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name| variable(name).map(PathBuf::from);
        let cache = || path("XDG_CACHE_HOME").unwrap_or_else(|| path("HOME").unwrap_or_default().join(".cache"));
        let home = || path("HF_HOME").unwrap_or_else(|| cache().join("huggingface"));
        HubCache(path("HF_HUB_CACHE").unwrap_or_else(|| home().join("hub")))
    }

    /// The folder of a data set: of its newest known state, or of the revision behind an `@`.
    pub fn dataset(&self, name: &str) -> Result<PathBuf, DataError> {
        let (id, revision) = match name.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (name, None),
        };
        let folder = self.0.join(format!("datasets--{}", id.replace('/', "--")));
        let snapshots = folder.join("snapshots");
        let at = |revision: &str| {
            let commit = std::fs::read_to_string(folder.join("refs").join(revision));
            let snapshot = snapshots.join(commit.as_ref().map_or(revision, |commit| commit.trim()));
            snapshot.is_dir().then_some(snapshot)
        };
        let found = match revision {
            Some(revision) => at(revision),
            None => at("main").or_else(|| only(&snapshots)),
        };
        let fetch = revision.map_or(String::new(), |revision| format!(" --revision {revision}"));
        found.ok_or_else(|| DataError::Missing {
            name: name.to_owned(),
            looked: vec![PathBuf::from(name), folder],
            help: format!(
                "Nothing is downloaded from here: fetch it once with `hf download --repo-type dataset {id}{fetch}`, or name a file \
                 or folder"
            ),
        })
    }
}

/// Whether `name` could be a data set's id: `name` or `organization/name`, perhaps with `@revision`.
pub(super) fn is_id(name: &Path) -> bool {
    let Some(name) = name.to_str() else { return false };
    let id = name.split('@').next().unwrap_or(name);
    let word = |part: &str| {
        !part.is_empty() && !part.starts_with('.') && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    id.split('/').count() <= 2 && id.split('/').all(word)
}

/// The only snapshot, where no reference says which is meant.
fn only(snapshots: &Path) -> Option<PathBuf> {
    let mut found = std::fs::read_dir(snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir());
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_lies_where_the_variables_say() {
        let cache = |variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value));
            HubCache::from_variables(find).0
        };
        let home = ("HOME", "/home/a");
        assert_eq!(cache(&[home]), Path::new("/home/a/.cache/huggingface/hub"));
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/c")]), Path::new("/c/huggingface/hub"));
        assert_eq!(cache(&[home, ("HF_HOME", "/h")]), Path::new("/h/hub"));
        assert_eq!(cache(&[home, ("HF_HOME", "/h"), ("HF_HUB_CACHE", "/x")]), Path::new("/x"));
    }

    #[test]
    fn ids_are_told_from_paths() {
        for id in ["gsm8k", "openai/gsm8k", "a-b/c_d.e@refs-1"] {
            assert!(is_id(Path::new(id)), "{id}");
        }
        for path in ["./data", "/data/x", "a/b/c", "../x", ""] {
            assert!(!is_id(Path::new(path)), "{path}");
        }
    }
}
