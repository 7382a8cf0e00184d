//! Tensors of a layout in the files of a folder, by their names: of models that also take images, in 4
//! bits, and experts one by one or all in one.

use std::path::Path;

use safetensors::tensor::TensorInfo;

use super::bitsandbytes::{Found, PackedOnDisk};
use super::folder::{Stored, WeightFile};
use super::mxfp4::ExpertsOnDisk;
use super::{Entry, Layout, ModelError};

/// Prefixes of a language model's tensors in a model that also takes images, and those that they have alone.
const INSIDE: [(&str, &str); 5] = [
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    // Of adapters.
    ("base_model.model.model.language_model.", "base_model.model.model."),
    ("base_model.model.language_model.model.", "base_model.model.model."),
];

/// Prefixes of tensors that see images or predict several tokens ahead.
const FOREIGN: [&str; 7] = [
    "model.visual.",
    "visual.",
    "vision_tower.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "mtp.",
];

pub(super) fn is_foreign(name: &str) -> bool {
    FOREIGN.iter().any(|prefix| name.starts_with(prefix))
}

/// Name of a stored tensor in a language model.
fn own_name(name: &str) -> String {
    let inside = |(theirs, ours): &(&str, &str)| Some((*ours).to_owned() + name.strip_prefix(theirs)?);
    INSIDE.iter().find_map(inside).unwrap_or_else(|| name.to_owned())
}

/// Tensors of a layout on disk, in its order.
pub(super) struct Matched<'a> {
    pub needed: Vec<Stored<'a>>,
    /// The twin of the first, if there is one.
    pub twin: Option<Stored<'a>>,
    /// Those in bitsandbytes' 4 bits, with their places in the layout.
    pub packed: Vec<(usize, PackedOnDisk<'a>)>,
    /// Experts in MXFP4, which are never together with those.
    pub experts: Vec<ExpertsOnDisk<'a>>,
}

/// Matches a layout with the files' headers. Allocates for names only: sizes are unverified until this
/// returns.
pub(super) fn matched<'a>(
    layout: &Layout,
    path: &Path,
    files: &'a [WeightFile],
    twin: Option<&str>,
) -> Result<Matched<'a>, ModelError> {
    let tensors =
        files.iter().flat_map(|file| file.header.tensors().into_iter().map(move |(name, info)| (own_name(&name), (file, info))));
    let mut found: Found = tensors.collect();
    let mut unusable = Vec::new();
    let mut stored = |name: &str, entry: &Entry, found: Option<(&'a WeightFile, &'a TensorInfo)>| {
        let (file, info) = found?;
        Stored::new(name, entry, file, info).map_err(|problem| unusable.push(problem)).ok()
    };
    let (mut needed, mut packed, mut missing, mut experts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut joined, mut joint_names) = (0, Vec::new());
    for (at, entry) in layout.entries().iter().enumerate() {
        if entry.offset < joined {
            continue;
        }
        if let Some(on_disk) = PackedOnDisk::take(&mut found, entry) {
            packed.push((at, on_disk));
            continue;
        }
        if let Some(on_disk) = ExpertsOnDisk::take(&mut found, entry) {
            experts.push(on_disk);
            continue;
        }
        let joint = joint_experts(&layout.entries()[at..]).filter(|joint| found.contains_key(&joint.name));
        let entry = joint.as_ref().unwrap_or(entry);
        match found.remove(&entry.name) {
            None => missing.push(entry.name.clone()),
            tensor => needed.extend(stored(&entry.name, entry, tensor)),
        }
        joined = joint.as_ref().map_or(joined, |joint| joint.range().end);
        joint_names.extend(joint.map(|joint| joint.name));
    }
    let twin = twin.and_then(|name| stored(name, &layout.entries()[0], found.remove(name)));
    // Parts that a language model has no use for.
    found.retain(|name, _| !is_foreign(name));
    // Buffers of old checkpoints that are recomputed.
    found.retain(|name, _| !name.ends_with(".rotary_emb.inv_freq"));
    let mut fits = Vec::new();
    for on_disk in experts {
        on_disk.map_or_else(|problem| unusable.push(problem), |on_disk| fits.push(on_disk));
    }
    if let (Some(name), false) = (joint_names.first(), packed.is_empty()) {
        unusable.push(format!("{name}: of all experts, next to others in bitsandbytes' 4 bits"));
    }
    if let (Some(on_disk), false) = (fits.first(), packed.is_empty()) {
        unusable.push(format!("{} numbers in MXFP4, next to others in bitsandbytes' 4 bits", on_disk.range.len()));
    }
    ModelError::check_tensors(path, [missing, found.into_keys().collect(), unusable])?;
    Ok(Matched { needed, twin, packed, experts: fits })
}

/// The tensor that some folders have of these experts' matrices, the first of which is the first expert's: as
/// transformers 5 computes with them, `[experts, rows, columns]`.
fn joint_experts(entries: &[Entry]) -> Option<Entry> {
    let first = entries.first()?;
    let (module, matrix) = first.name.split_once(".experts.0.")?;
    let (name, parts): (_, &[_]) = match matrix {
        "gate_proj.weight" => ("gate_up_proj", &[".gate_proj.weight", ".up_proj.weight"]),
        "down_proj.weight" => ("down_proj", &[".down_proj.weight"]),
        _ => return None,
    };
    let is_part = |entry: &&Entry| {
        entry
            .name
            .strip_prefix(module)
            .is_some_and(|name| name.starts_with(".experts.") && parts.iter().any(|part| name.ends_with(part)))
    };
    let count = entries.iter().take_while(is_part).count() / parts.len();
    let shape = vec![count, parts.len() * first.shape[0], first.shape[1]];
    Some(Entry { name: format!("{module}.experts.{name}"), shape, offset: first.offset })
}
