//! Checksums of the models and data that a plan names, by which ranks find that theirs differ, and runs are
//! compared.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::data::Source;
use super::model::ModelSource;
use super::model_folder::model_folder_from;
use super::plan::Plan;
use super::task::{Sft, TaskData};
use crate::hub::Hub;
use crate::util::reading;

/// Pieces of a file that are read, evenly spaced; of a data set's files, together.
const PIECES: u64 = 256;
/// Bytes of a piece.
const PIECE: u64 = 4096;

/// Checksums of the models that `plan` names and that this host has, by their keys. Fetches nothing.
///
/// A checksum covers the configuration, and of each file of weights its name, its size and 256 pieces
/// of 4 KiB: two models that were trained differently differ in these. A whole file would cost each
/// rank the time of loading it.
pub fn model_fingerprints(plan: &Plan) -> BTreeMap<String, u32> {
    let hub = Hub::of_user().offline(true);
    let own = match &plan.model.source {
        ModelSource::Folder(folder) => Some(("model.path".to_owned(), folder.name())),
        _ => None,
    };
    let all = own.into_iter().chain(plan.models());
    // What a rank lacks or cannot read is for the rank that loads it to report.
    all.filter_map(|(key, path)| Some((key, folder_fingerprint(&model_folder_from(&hub, &path).ok()?).ok()?))).collect()
}

/// Checksums of the data sets that `plan` names and that lie in files here, by their keys: of each file its
/// name, its size and pieces of 4 KiB, the first and the last among them: 256 in all, or two of each file.
/// Of ids on the hub the recipe has the commit.
pub fn data_fingerprints(plan: &Plan) -> BTreeMap<String, u32> {
    let of = |section: &'static str, sources: Vec<Source>| {
        let key = move |at: usize| if at == 0 { section.to_owned() } else { format!("{section}.sources[{at}]") };
        sources.into_iter().enumerate().map(move |(at, source)| (key(at), source.data))
    };
    let held_out = plan.eval.as_ref().and_then(|eval| eval.task.as_ref()).map_or_else(Vec::new, |task| task.data.sources());
    let all = of("task", plan.task.data.sources()).chain(of("eval.task", held_out));
    let all = all.chain(of("sft", plan.sft.as_ref().map_or_else(Vec::new, Sft::sources)));
    let rollouts = match &plan.task.data {
        TaskData::Rollouts { path, .. } => Some(("task.path".to_owned(), path.clone())),
        _ => None,
    };
    all.chain(rollouts).filter_map(|(key, path)| Some((key, files_fingerprint(&path).ok()?))).collect()
}

/// Most files of a data set that are looked at.
const FILES: usize = 10_000;

/// The checksum of a file, or of the files in a folder and below.
fn files_fingerprint(path: &Path) -> io::Result<u32> {
    let (mut files, mut folders) = (Vec::new(), vec![path.to_owned()]);
    while let Some(at) = folders.pop() {
        if fs::metadata(&at)?.is_dir() {
            folders.extend(fs::read_dir(&at)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?);
        } else {
            files.push(at);
        }
        if files.len() + folders.len() > FILES {
            return Err(io::Error::other("too many files"));
        }
    }
    files.sort();
    let (mut sum, pieces) = (crc32fast::Hasher::new(), (PIECES / files.len().max(1) as u64).max(2));
    for file in files {
        sum.update(file.strip_prefix(path).unwrap_or(&file).as_os_str().as_encoded_bytes());
        sample(reading::open(&file)?, pieces, &mut sum)?;
    }
    Ok(sum.finalize())
}

/// The checksum of a model folder, as [`model_fingerprints`] has it.
pub fn folder_fingerprint(folder: &Path) -> io::Result<u32> {
    let names = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort();
    let mut sum = crc32fast::Hasher::new();
    for name in names {
        let path = folder.join(&name);
        let holds_weights = name.ends_with(".safetensors") && ["model", "adapter_model"].iter().any(|of| name.starts_with(of));
        if holds_weights {
            sum.update(name.as_bytes());
            sample(reading::open(&path)?, PIECES, &mut sum)?;
        } else if ["config.json", "adapter_config.json"].contains(&name.as_str()) {
            sum.update(&reading::read(&path, reading::TEXT_LIMIT)?);
        }
    }
    Ok(sum.finalize())
}

/// Adds a file's size and so many pieces of it, the first and the last among them.
fn sample(mut file: File, pieces: u64, sum: &mut crc32fast::Hasher) -> io::Result<()> {
    let size = file.metadata()?.len();
    sum.update(&size.to_le_bytes());
    let last = size.saturating_sub(PIECE);
    let step = (last / (pieces - 1)).max(PIECE);
    let mut piece = Vec::with_capacity(PIECE as usize);
    for at in (0..last).step_by(step as usize).chain([last]) {
        piece.clear();
        file.seek(SeekFrom::Start(at))?;
        file.by_ref().take(PIECE).read_to_end(&mut piece)?;
        sum.update(&piece);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_name_size_or_byte_of_data_changes_the_checksum() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("below");
        fs::create_dir(&below).unwrap();
        let of = || files_fingerprint(folder.path()).unwrap();
        let mut seen = vec![of()];
        for (path, text) in
            [("a.jsonl", "1"), ("a.jsonl", "2"), ("a.jsonl", "22"), ("below/b.jsonl", "1"), ("below/c.jsonl", "1")]
        {
            fs::write(folder.path().join(path), text).unwrap();
            seen.push(of());
        }
        fs::rename(below.join("c.jsonl"), below.join("d.jsonl")).unwrap();
        seen.push(of());
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all);
        assert!(files_fingerprint(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_changed_configuration_size_or_number_changes_the_checksum_and_other_files_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        let of = || folder_fingerprint(folder.path()).unwrap();
        let weights = |first: u8, last: u8, len: usize| {
            let mut bytes = vec![7; len];
            (bytes[0], bytes[len - 1]) = (first, last);
            bytes
        };
        write("config.json", b"{}");
        let mut seen = vec![of()];
        for bytes in [weights(1, 1, 10), weights(1, 1, 3_000_000), weights(1, 2, 3_000_000), weights(2, 1, 3_000_000)] {
            write("model.safetensors", &bytes);
            seen.push(of());
        }
        // As training changes a model: all over.
        write("model.safetensors", &vec![8; 3_000_000]);
        seen.push(of());
        write("config.json", b"{ }");
        seen.push(of());
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all);
        let before = of();
        write("optimizer.safetensors", b"state");
        write("README.md", b"about it");
        assert_eq!(of(), before);
    }
}
