//! Data sets in the local cache of the Hugging Face hub. Nothing is ever downloaded.

use std::path::{Path, PathBuf};

use super::DataError;
use crate::hub::{Cache, snapshot};

/// The folder of a data set: of its newest known state, or of the revision behind an `@`.
pub(super) fn dataset(cache: &Cache, name: &str) -> Result<PathBuf, DataError> {
    let (id, revision) = name.split_once('@').map_or((name, None), |(id, revision)| (id, Some(revision)));
    let home = cache.root().join(format!("datasets--{}", id.replace('/', "--")));
    let fetch = revision.map_or(String::new(), |revision| format!(" --revision {revision}"));
    snapshot(&home, revision).ok_or_else(|| DataError::Missing {
        name: name.to_owned(),
        looked: vec![PathBuf::from(name), home],
        help: format!(
            "Nothing is downloaded from here: fetch it once with `hf download --repo-type dataset {id}{fetch}`, or name a file or folder"
        ),
    })
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
