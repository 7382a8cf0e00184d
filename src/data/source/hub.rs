//! Data sets by their ids: from the local cache of the Hugging Face hub, or fetched into it on first use.

use std::path::{Path, PathBuf};

use super::DataError;
use super::locate::{in_listing, names_id};
use crate::hub::{Cache, Hub, HubError, RepoKind, shown, snapshot};

/// The folder of a data set in the cache: of its newest known state, or of the revision after an `@`.
pub(super) fn dataset(cache: &Cache, name: &str) -> Result<PathBuf, DataError> {
    let (id, revision) = name.split_once('@').map_or((name, None), |(id, revision)| (id, Some(revision)));
    let home = RepoKind::Dataset.home(cache, id);
    let of = revision.map_or(String::new(), |revision| format!(" --revision {revision}"));
    snapshot(&home, revision).ok_or_else(|| DataError::Missing {
        name: name.to_owned(),
        looked: vec![PathBuf::from(name), home],
        help: format!("To fetch it: `hf download --repo-type dataset {id}{of}`; or name a file or folder"),
    })
}

/// Fetches the files of one split of a data set into the cache.
pub(super) fn fetch(hub: &Hub, name: &str, subset: Option<&str>, split: &str) -> Result<PathBuf, HubError> {
    hub.fetch(RepoKind::Dataset, name, |listing| {
        in_listing(&listing.files, subset, split).map_err(|problem| {
            let mut problem = problem;
            if problem.starts_with("holds no data") {
                problem +=
                    &format!(", and it holds {}; the hub's own conversion is {name}@refs/convert/parquet", shown(&listing.files));
            }
            HubError::Lacks { id: name.to_owned(), problem }
        })
    })
}

/// The commit of a data set in the cache that `data` names by its id.
pub(crate) fn dataset_commit(data: &Path, cache: &Cache) -> Option<String> {
    let folder = dataset(cache, data.to_str().filter(|_| names_id(data))?).ok()?;
    Some(folder.file_name()?.to_str()?.to_owned())
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

#[cfg(test)]
mod tests {
    use super::*;

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
