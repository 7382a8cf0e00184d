//! Data sets by their ids: from the local cache of the Hugging Face hub, or fetched into it on first use.
//!
//! The cache holds the files that were downloaded, which may be one of several subsets. The names
//! of all files of a revision are therefore cached too, and subsets and splits are chosen by them.

use std::path::{Path, PathBuf};

use super::locate::{Format, Listing, below, lacks_part, names_id};
use crate::data::DataError;
use crate::hub::{Cache, Hub, HubError, RepoKind, is_word, shown, snapshot};

const KIND: RepoKind = RepoKind::Dataset;

/// The folder of a data set in the cache: of its newest known state, or of the revision after an `@`.
fn folder(cache: &Cache, name: &str) -> Result<PathBuf, DataError> {
    let (id, revision) = name.split_once('@').map_or((name, None), |(id, revision)| (id, Some(revision)));
    let home = KIND.home(cache, id);
    let of = revision.map_or(String::new(), |revision| format!(" --revision {revision}"));
    snapshot(&home, revision).ok_or_else(|| {
        DataError::NotFound(match id.contains('/') {
            true => format!(
                "there is no data set `{name}` here; looked for {name}, {}. To fetch it: `hf download --repo-type dataset {id}{of}`; or \
                 name a file or folder",
                home.display()
            ),
            false => format!(
                "file not found: {name}; paths are relative to the folder that the command runs in, and a data set of the hub is named \
                 ORGANIZATION/NAME"
            ),
        })
    })
}

/// The files of one split in the cache.
pub(super) fn in_cache(
    cache: &Cache,
    name: &str,
    subset: Option<&str>,
    split: &str,
) -> Result<Vec<(PathBuf, Format)>, DataError> {
    let folder = folder(cache, name)?;
    let files = match cache.listing(KIND, name) {
        Some(names) => below(&folder, choose(name, &names, subset, split)?),
        None => match Listing::of_folder(&folder)?.choose(subset, split).map(|files| (lacks_part(&files), files)) {
            Ok((None, files)) => below(&folder, files),
            Ok((Some(problem), _)) | Err(problem) => return Err(DataError::Layout { folder, problem }),
        },
    };
    match files.iter().find(|(file, _)| !file.exists()) {
        None => Ok(files),
        Some((missing, _)) => {
            let name = missing.strip_prefix(&folder).unwrap_or(missing).display();
            let problem = format!("split \"{split}\" is here only in part: {name} is missing");
            Err(DataError::Layout { folder, problem })
        }
    }
}

/// Selects the files of a split from those of a repository.
fn choose(name: &str, files: &[String], subset: Option<&str>, split: &str) -> Result<Vec<(PathBuf, Format)>, HubError> {
    Listing::of(files).choose(subset, split).map_err(|mut problem| {
        if problem.starts_with("holds no data") {
            problem += &format!(", and it holds {}; the hub's own conversion is {name}@refs/convert/parquet", shown(files));
        }
        HubError::Lacks(name.to_owned(), problem)
    })
}

/// Fetches the files of one split of a data set into the cache.
pub(super) fn fetch(hub: &Hub, name: &str, subset: Option<&str>, split: &str) -> Result<PathBuf, HubError> {
    hub.fetch(KIND, name, |files| {
        let chosen = choose(name, files, subset, split)?;
        Ok(chosen.into_iter().map(|(file, _)| file.to_string_lossy().into_owned()).collect())
    })
}

/// Asks the hub for the subsets of a data set that is cached without a list of its files, as
/// Python's tools leave it. Without an answer the cached files are used.
pub(super) fn list_if_unknown(hub: &Hub, name: &str) {
    let cache = hub.cache();
    let Ok(folder) = folder(cache, name) else { return };
    let commit = folder.file_name().and_then(|commit| commit.to_str());
    let (Some(commit), None) = (commit.filter(|_| !hub.is_offline()), cache.listing(KIND, name)) else { return };
    let id = name.split('@').next().unwrap_or(name);
    if let Err(error) = hub.list_once(KIND, &format!("{id}@{commit}")) {
        tracing::warn!("{name} may have more subsets than those in the cache, and none is named: {error}");
    }
}

/// The files of a data set: from the hub, or from the cache if nothing may be fetched.
pub(super) fn listing(hub: &Hub, name: &str) -> Result<Listing, DataError> {
    if !hub.is_offline() && may_be_asked_for(Path::new(name)) {
        match hub.list(KIND, name) {
            Ok(files) => return Ok(Listing::of(files)),
            Err(error) if folder(hub.cache(), name).is_err() => return Err(error.into()),
            // The cached files are enough.
            Err(_) => {}
        }
    }
    let folder = folder(hub.cache(), name)?;
    hub.cache().listing(KIND, name).map_or_else(|| Listing::of_folder(&folder), |files| Ok(Listing::of(files)))
}

/// Returns true if the hub may be asked for `data`: the id must have an organization, so that a
/// mistyped file name is not looked up.
pub(super) fn may_be_asked_for(data: &Path) -> bool {
    names_id(data) && data.to_str().and_then(|name| name.split('@').next()).is_some_and(|id| id.contains('/'))
}

/// The commit of a data set in the cache that `data` names by its id.
pub(crate) fn dataset_commit(data: &Path, cache: &Cache) -> Option<String> {
    let folder = folder(cache, data.to_str().filter(|_| names_id(data))?).ok()?;
    Some(folder.file_name()?.to_str()?.to_owned())
}

/// Returns true if `name` could be a data set's id: `name` or `organization/name`, optionally with
/// `@revision`.
pub(super) fn is_id(name: &Path) -> bool {
    let Some(name) = name.to_str() else { return false };
    let (id, revision) = name.split_once('@').unwrap_or((name, "main"));
    let words = |text: &str| text.split('/').all(is_word);
    id.split('/').count() <= 2 && words(id) && words(revision) && !ends_as_file(id)
}

/// Returns true if a name has the ending of a data file, supported or not.
fn ends_as_file(name: &str) -> bool {
    const ENDINGS: [&str; 16] = [
        "jsonl", "ndjson", "json", "parquet", "txt", "text", "csv", "tsv", "arrow", "feather", "orc", "gz", "zst", "zip", "xz",
        "tar",
    ];
    let ending = name.rsplit_once('.').map(|(_, ending)| ending.to_ascii_lowercase());
    ending.is_some_and(|ending| ENDINGS.contains(&ending.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::source::DataSpec;

    /// A run pins its ids. Curriculum, teachers and metrics name the data set as its recipe did.
    #[test]
    fn an_id_has_the_same_name_under_each_revision() {
        let name = |data: &str| DataSpec::new(data).name();
        for id in ["openai/gsm8k", "openai/gsm8k@0123456789abcdef0123456789abcdef01234567", "openai/gsm8k@refs/convert/parquet"] {
            assert_eq!(name(id), "gsm8k", "{id}");
        }
        assert_eq!(DataSpec { name: Some("mine".to_owned()), ..DataSpec::new("openai/gsm8k@main") }.name(), "mine");
    }

    #[test]
    fn ids_are_told_from_paths() {
        for id in ["gsm8k", "openai/gsm8k", "a-b/c_d.e@refs-1"] {
            assert!(is_id(Path::new(id)), "{id}");
        }
        let files = ["./data", "/data/x", "a/b/c", "../x", "", "trian.jsonl", "data/trian.csv", "data/train.jsonl.gz"];
        for path in files.into_iter().chain(["org/name@../../x", "org/name@/x", "org/name@"]) {
            assert!(!is_id(Path::new(path)), "{path}");
        }
        assert!(may_be_asked_for(Path::new("openai/gsm8k")) && may_be_asked_for(Path::new("a/b@refs/convert/parquet")));
        assert!(!may_be_asked_for(Path::new("trian")) && !may_be_asked_for(Path::new("trian@refs/convert/parquet")));
    }
}
