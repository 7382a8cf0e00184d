//! Files of a data set by its name: a file, a folder of files, a data set's repository folder, or
//! an id in the hub's local cache.
//!
//! In a folder, the split follows from file names as in Hugging Face's `datasets`:
//! `data/train-00000-of-00003.parquet`, `train.jsonl`, `validation/part.json`. If no name contains
//! a split, all files are `train`. A subset is a folder in it, or the beginning of a file's name.
//! Files of no such folder are the subset `default`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::hub;
use super::split::TRAIN;
use crate::data::DataError;
use crate::hub::Cache;
use crate::util::reading;

/// Format of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
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
    fn of(file: &Path) -> Option<Self> {
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

/// First words of the names of texts about a data set: `LICENSE-MIT.txt`.
const NOTES: [&str; 5] = ["license", "licence", "readme", "notice", "citation"];

/// Name of the subset of files that are in no subset's folder, as in `datasets`.
const DEFAULT: &str = "default";

/// Returns true if the file of this name describes a data set and holds no record.
fn is_about(name: &str, format: Format) -> bool {
    let word = name.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    ABOUT.contains(&name) || format == Format::Text && NOTES.iter().any(|note| note.eq_ignore_ascii_case(word))
}

/// The files of `data`, in the order of their names.
pub(super) fn locate(data: &Path, subset: Option<&str>, split: &str, cache: &Cache) -> Result<Vec<(PathBuf, Format)>, DataError> {
    if data.is_file() {
        let unknown = || DataError::invalid(data, format!("not a kind of file that is known: {KNOWN}{}", conversion(data)));
        let format = Format::of(data).ok_or_else(unknown)?;
        if split != TRAIN || subset.is_some() {
            let named = subset.map_or(format!("split \"{split}\""), |subset| format!("subset \"{subset}\""));
            return Err(DataError::invalid(data, format!("a single file has no {named}; slices are written \"train[:10%]\"")));
        }
        return Ok(vec![(data.to_owned(), format)]);
    }
    if data.is_dir() {
        let files = Listing::of_folder(data)?.choose(subset, split);
        return files.map(|files| below(data, files)).map_err(|problem| DataError::Layout { folder: data.to_owned(), problem });
    }
    if names_id(data) {
        return hub::in_cache(cache, &data.to_string_lossy(), subset, split);
    }
    if data.exists() {
        reading::regular(data).map_err(DataError::read(data))?;
    }
    let name = data.display();
    Err(DataError::NotFound(format!("file not found: {name}; paths are relative to the folder that the command runs in")))
}

/// A command that makes a usual kind of file one that is read; empty for other kinds.
fn conversion(file: &Path) -> String {
    let shown = file.display().to_string();
    match file.extension().and_then(|end| end.to_str()) {
        Some("csv") => format!(
            "; convert it with pandas: pandas.read_csv({shown:?}).to_json({:?}, orient=\"records\", lines=True)",
            file.with_extension("jsonl")
        ),
        Some("gz") => format!("; unpack it: gunzip {shown}"),
        Some("zst") => format!("; unpack it: unzstd {shown}"),
        _ => String::new(),
    }
}

/// Files by their paths in `folder`, as paths.
pub(super) fn below(folder: &Path, files: Vec<(PathBuf, Format)>) -> Vec<(PathBuf, Format)> {
    files.into_iter().map(|(file, format)| (folder.join(file), format)).collect()
}

/// Returns true if `data` is an id of the hub, and no file or folder.
pub(super) fn names_id(data: &Path) -> bool {
    !data.exists() && hub::is_id(data)
}

/// Returns the missing part of a split in several files, `prefix-00000-of-00003`.
pub(super) fn lacks_part(files: &[(PathBuf, Format)]) -> Option<String> {
    let stems: Vec<&str> = files.iter().filter_map(|(file, _)| file.file_stem()?.to_str()).collect();
    stems.iter().find_map(|stem| {
        let (name, of) = without_shard(stem)?;
        let have = stems.iter().filter(|other| without_shard(other).is_some_and(|(other, _)| other == name)).count();
        (have < of).then(|| format!("holds {have} of the {of} parts of {name}"))
    })
}

/// A data file by its path in the folder, and what its name says.
struct Found {
    path: PathBuf,
    format: Format,
    split: Option<String>,
}

impl Found {
    /// Returns true if the file's name says this split.
    fn holds(&self, split: &str) -> bool {
        let stem = self.path.file_stem().is_some_and(|stem| stem == split);
        stem || self.split.as_deref().is_some_and(|of| canonical(of) == canonical(split))
    }

    /// Returns true if the file is one of this subset.
    fn belongs(&self, subset: &str) -> bool {
        let folder = self.path.parent().is_some_and(|folder| {
            folder.ends_with(subset) || folder.starts_with(subset) || folder.iter().any(|part| part == subset)
        });
        let begins =
            |stem: &str| stem.strip_prefix(subset).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()));
        folder || subset_of(self) == subset || self.path.file_stem().and_then(|stem| stem.to_str()).is_some_and(begins)
    }
}

/// The data files of a folder or a repository.
#[derive(Default)]
pub(super) struct Listing(Vec<Found>);

impl Listing {
    pub(super) fn of_folder(folder: &Path) -> Result<Self, DataError> {
        let mut names = Vec::new();
        collect(folder, Path::new(""), &mut names)?;
        Ok(Self::of(names))
    }

    /// The data files among the files of a repository, by their paths.
    pub(super) fn of<P: Into<PathBuf>>(names: impl IntoIterator<Item = P>) -> Self {
        let found = names.into_iter().map(Into::into).filter_map(|path: PathBuf| {
            let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
            let format = Format::of(&path).filter(|_| parts.iter().all(|part| !part.starts_with('.')))?;
            if is_about(parts.last()?, format) {
                return None;
            }
            Some(Found { split: split_of(&path), path, format })
        });
        let mut found: Vec<Found> = found.collect();
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Listing(found)
    }

    /// Names of subsets, if there are several.
    pub(super) fn subsets(&self) -> Vec<String> {
        let subsets: BTreeSet<&str> = self.0.iter().map(subset_of).collect();
        let divided = self.names_splits() && subsets.len() > 1;
        subsets.into_iter().filter(|_| divided).map(str::to_owned).collect()
    }

    /// Names of the splits of a subset.
    pub(super) fn splits(&self, subset: Option<&str>) -> Vec<String> {
        let of_subset = self.0.iter().filter(|file| subset.is_none_or(|subset| file.belongs(subset)));
        of_subset.filter_map(|file| file.split.clone()).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn names_splits(&self) -> bool {
        self.0.iter().any(|file| file.split.is_some())
    }

    /// Returns the files that hold this split, or what is missing and what there is.
    pub(super) fn choose(mut self, subset: Option<&str>, split: &str) -> Result<Vec<(PathBuf, Format)>, String> {
        if self.0.is_empty() {
            return Err(format!("holds no data: {KNOWN}"));
        }
        match subset {
            Some(subset) => {
                let subsets = listed(self.0.iter().map(|file| subset_of(file).to_owned()).collect());
                self.0.retain(|file| file.belongs(subset));
                if self.0.is_empty() {
                    return Err(format!("has no subset \"{subset}\"; it has: {subsets}"));
                }
            }
            None => {
                // Folders without a split in any name are just folders.
                let subsets = self.subsets();
                let is_default = |file: &Found| subset_of(file) == DEFAULT;
                if !subsets.is_empty() && self.0.iter().any(|file| is_default(file) && file.holds(split)) {
                    self.0.retain(is_default);
                } else if !subsets.is_empty() {
                    return Err(format!("has several subsets; name one of: {}", subsets.join(", ")));
                }
            }
        }
        let splits = listed(self.splits(None).into_iter().collect());
        if self.names_splits() {
            self.0.retain(|file| file.holds(split));
        } else if canonical(split) != TRAIN {
            return Err(format!("has no split \"{split}\"; no file's name says one, so that all of it is \"train\""));
        }
        if self.0.is_empty() {
            return Err(format!("has no split \"{split}\"; it has: {splits}"));
        }
        Ok(self.0.into_iter().map(|file| (file.path, file.format)).collect())
    }
}

/// The paths of all files in a folder, but for hidden ones.
fn collect(folder: &Path, inside: &Path, names: &mut Vec<PathBuf>) -> Result<(), DataError> {
    for entry in std::fs::read_dir(folder).map_err(DataError::read(folder))? {
        let entry = entry.map_err(DataError::read(folder))?;
        let (path, inside) = (entry.path(), inside.join(entry.file_name()));
        // Through links: the cache's snapshots hold nothing else.
        match path.is_dir() {
            _ if entry.file_name().to_string_lossy().starts_with('.') => {}
            true => collect(&path, &inside, names)?,
            false => names.push(inside),
        }
    }
    Ok(())
}

/// Prefix and number of files of `prefix-00000-of-00003`, also with a checksum after them.
fn without_shard(stem: &str) -> Option<(&str, usize)> {
    let (rest, of) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let (of, checksum) = of.split_once('-').unwrap_or((of, "0"));
    let digits = |text: &str, radix| !text.is_empty() && text.chars().all(|c| c.is_digit(radix));
    (digits(number, 10) && digits(of, 10) && digits(checksum, 16)).then_some((name, of.parse().ok()?))
}

/// The split that a file's name, or a folder around it, says.
fn split_of(inside: &Path) -> Option<String> {
    let stem = inside.file_stem()?.to_str()?;
    if let Some((name, _)) = without_shard(stem) {
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
fn subset_of(file: &Found) -> &str {
    let mut folders = file.path.parent().into_iter().flat_map(Path::iter).filter_map(|part| part.to_str());
    folders.find(|name| *name != "data" && !is_keyword(name)).unwrap_or(DEFAULT)
}

fn listed(names: BTreeSet<String>) -> String {
    if names.is_empty() { "none".to_owned() } else { names.into_iter().collect::<Vec<_>>().join(", ") }
}
