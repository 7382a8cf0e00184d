//! Files of a data set by its name: a file, a folder of files, a data set's repository folder, or
//! an id in the hub's local cache.
//!
//! In a folder, the split follows from file names as in Hugging Face's `datasets`:
//! `data/train-00000-of-00003.parquet`, `train.jsonl`, `validation/part.json`. If no name contains
//! a split, all files are `train`. A subset is a folder in it, or the beginning of a file's name.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::DataError;
use super::hub;
use super::split::TRAIN;
use crate::hub::Cache as HubCache;
use crate::util::reading;

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// An object a line.
    JsonLines,
    /// A list of objects, alone or in an object.
    Json,
    /// Columns in groups of rows.
    Parquet,
    /// A text a line.
    Text,
}

impl Format {
    /// By the name's end.
    pub fn of(file: &Path) -> Option<Self> {
        match file.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Some(Format::JsonLines),
            "json" => Some(Format::Json),
            "parquet" => Some(Format::Parquet),
            "txt" | "text" => Some(Format::Text),
            _ => None,
        }
    }
}

const KNOWN: &str = ".jsonl, .ndjson, .json, .parquet and .txt are read";

/// Files that say something of a data set and hold none of it.
const ABOUT: [&str; 5] = ["dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json", "requirements.txt"];

/// The files of `data`, in the order of their names.
pub fn locate(data: &Path, subset: Option<&str>, split: &str, cache: &HubCache) -> Result<Vec<(PathBuf, Format)>, DataError> {
    if data.is_file() {
        let format =
            Format::of(data).ok_or_else(|| DataError::format(data, format!("not a kind of file that is known: {KNOWN}")))?;
        if split != TRAIN || subset.is_some() {
            let named = subset.map_or(format!("split \"{split}\""), |subset| format!("subset \"{subset}\""));
            return Err(DataError::format(data, format!("a single file has no {named}; slices are written \"train[:10%]\"")));
        }
        return Ok(vec![(data.to_owned(), format)]);
    }
    if data.is_dir() {
        return in_folder(data, subset, split);
    }
    if names_id(data) {
        return hub::in_cache(cache, &data.to_string_lossy(), subset, split);
    }
    if data.exists() {
        reading::regular(data).map_err(DataError::file(data))?;
    }
    let help = "paths are relative to the folder that the command runs in";
    Err(DataError::NoFile { name: data.to_owned(), help })
}

/// Returns true if `data` is an id of the hub, and no file or folder.
pub(super) fn names_id(data: &Path) -> bool {
    !data.exists() && hub::is_id(data)
}

/// Returns the missing part of a split in several files, `prefix-00000-of-00003`.
pub(super) fn lacks_part(files: &[(PathBuf, Format)]) -> Option<String> {
    let stems: Vec<&str> = files.iter().filter_map(|(file, _)| file.file_stem()?.to_str()).collect();
    stems.iter().find_map(|stem| {
        let (name, of) = (without_shard(stem)?, stem.rsplit_once("-of-")?.1.parse::<usize>().ok()?);
        let have = stems.iter().filter(|other| without_shard(other) == Some(name)).count();
        (have < of).then(|| format!("holds {have} of the {of} parts of {name}"))
    })
}

/// Named divisions of a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Subsets (configurations), of which one must be named; empty if there is none or one.
    pub subsets: Vec<String>,
    /// The splits that its files name, of the subset that was asked for; empty where no name says one.
    pub splits: Vec<String>,
}

/// The subsets of a folder, and the splits of one of them.
pub(super) fn layout_of_folder(folder: &Path, subset: Option<&str>) -> Result<Layout, DataError> {
    let mut found = Vec::new();
    collect(folder, Path::new(""), &mut found)?;
    Ok(layout(found, subset))
}

/// The subsets of a repository with these files, and the splits of one of them.
pub(super) fn layout_of_listing(files: &[String], subset: Option<&str>) -> Layout {
    layout(listed(files).collect(), subset)
}

fn layout(mut found: Vec<Found>, subset: Option<&str>) -> Layout {
    if let Some(subset) = subset {
        found.retain(|file| belongs(&file.inside, subset));
    }
    let splits: BTreeSet<String> = found.iter().filter_map(|file| file.split.clone()).collect();
    let subsets: BTreeSet<Option<String>> = found.iter().map(subset_of).collect();
    let divided = !splits.is_empty() && subsets.len() > 1;
    let subsets = subsets.into_iter().flatten().filter(|_| divided).collect();
    Layout { subsets, splits: splits.into_iter().collect() }
}

/// A data file and what its name says.
struct Found {
    path: PathBuf,
    /// Below the folder.
    inside: PathBuf,
    format: Format,
    split: Option<String>,
}

pub(super) fn in_folder(folder: &Path, subset: Option<&str>, split: &str) -> Result<Vec<(PathBuf, Format)>, DataError> {
    let mut found = Vec::new();
    collect(folder, Path::new(""), &mut found)?;
    match chosen(found, subset, split) {
        Ok(files) => Ok(files.into_iter().map(|file| (file.path, file.format)).collect()),
        Err(problem) => Err(DataError::Layout { folder: folder.to_owned(), problem }),
    }
}

/// Returns the files of a repository that hold this split, or an error.
pub(super) fn in_listing(files: &[String], subset: Option<&str>, split: &str) -> Result<Vec<(String, Format)>, String> {
    let files = chosen(listed(files).collect(), subset, split)?;
    Ok(files.into_iter().map(|file| (file.path.to_string_lossy().into_owned(), file.format)).collect())
}

/// The data files among those of a repository.
fn listed(files: &[String]) -> impl Iterator<Item = Found> + '_ {
    let hidden = |file: &Path| file.iter().any(|part| part.to_string_lossy().starts_with('.'));
    files.iter().map(PathBuf::from).filter(move |file| !hidden(file)).filter_map(|file| {
        let about = file.file_name().is_some_and(|name| ABOUT.iter().any(|known| name == *known));
        let format = Format::of(&file).filter(|_| !about)?;
        Some(Found { split: split_of(&file), path: file.clone(), inside: file, format })
    })
}

fn chosen(mut found: Vec<Found>, subset: Option<&str>, split: &str) -> Result<Vec<Found>, String> {
    let refuse = Err;
    found.sort_by(|a, b| a.inside.cmp(&b.inside));
    if found.is_empty() {
        return refuse(format!("holds no data: {KNOWN}"));
    }
    match subset {
        Some(subset) => {
            let subsets = names(found.iter().filter_map(subset_of));
            found.retain(|file| belongs(&file.inside, subset));
            if found.is_empty() {
                return refuse(format!("has no subset \"{subset}\"; it has: {subsets}"));
            }
        }
        None => {
            let subsets: Vec<_> = found.iter().map(subset_of).collect();
            // Folders without a split in any name are just folders.
            if found.iter().any(|file| file.split.is_some()) && subsets.iter().any(|subset| subset != &subsets[0]) {
                return refuse(format!("has several subsets; name one of: {}", names(subsets.into_iter().flatten())));
            }
        }
    }
    let splits = names(found.iter().filter_map(|file| file.split.clone()));
    if found.iter().any(|file| file.split.is_some()) {
        found.retain(|file| {
            let stem = file.inside.file_stem().is_some_and(|stem| stem == split);
            stem || file.split.as_deref().is_some_and(|of| canonical(of) == canonical(split))
        });
    } else if canonical(split) != TRAIN {
        return refuse(format!("has no split \"{split}\"; no file's name says one, so that all of it is \"train\""));
    }
    if found.is_empty() {
        return refuse(format!("has no split \"{split}\"; it has: {splits}"));
    }
    Ok(found)
}

fn collect(folder: &Path, inside: &Path, found: &mut Vec<Found>) -> Result<(), DataError> {
    for entry in std::fs::read_dir(folder).map_err(DataError::file(folder))? {
        let entry = entry.map_err(DataError::file(folder))?;
        let (path, name) = (entry.path(), entry.file_name());
        let (inside, name) = (inside.join(&name), name.to_string_lossy().into_owned());
        if name.starts_with('.') || ABOUT.contains(&name.as_str()) {
            continue;
        }
        // Through links: the cache's snapshots hold nothing else.
        if path.is_dir() {
            collect(&path, &inside, found)?;
        } else if let Some(format) = Format::of(&path) {
            found.push(Found { split: split_of(&inside), path, inside, format });
        }
    }
    Ok(())
}

/// `prefix-00000-of-00003` without the numbers.
fn without_shard(stem: &str) -> Option<&str> {
    let (rest, of) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(of) && digits(number)).then_some(name)
}

/// The split that a file's name, or a folder around it, says.
fn split_of(inside: &Path) -> Option<String> {
    let stem = inside.file_stem()?.to_str()?;
    if let Some(name) = without_shard(stem) {
        return Some(name.to_owned());
    }
    let words = stem.split(|c: char| !c.is_ascii_alphanumeric());
    let folders = inside.parent().into_iter().flat_map(Path::iter).filter_map(|part| part.to_str());
    words.chain(folders).find(|word| is_keyword(word)).map(str::to_owned)
}

fn is_keyword(word: &str) -> bool {
    [TRAIN, "validation", "test"].contains(&canonical(word).as_str())
}

fn canonical(split: &str) -> String {
    let split = split.to_ascii_lowercase();
    match split.as_str() {
        "training" => TRAIN.to_owned(),
        "valid" | "val" | "dev" => "validation".to_owned(),
        "testing" | "eval" | "evaluation" => "test".to_owned(),
        _ => split,
    }
}

/// The first folder whose name is neither a split nor `data`.
fn subset_of(file: &Found) -> Option<String> {
    let folders = file.inside.parent()?.iter().filter_map(|part| part.to_str());
    folders.into_iter().find(|name| *name != "data" && !is_keyword(name)).map(str::to_owned)
}

fn belongs(inside: &Path, subset: &str) -> bool {
    let folder = inside
        .parent()
        .is_some_and(|folder| folder.ends_with(subset) || folder.starts_with(subset) || folder.iter().any(|part| part == subset));
    let begins =
        |stem: &str| stem.strip_prefix(subset).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()));
    folder || inside.file_stem().and_then(|stem| stem.to_str()).is_some_and(begins)
}

fn names(names: impl Iterator<Item = String>) -> String {
    let sorted: BTreeSet<String> = names.collect();
    if sorted.is_empty() { "none".to_owned() } else { sorted.into_iter().collect::<Vec<_>>().join(", ") }
}
