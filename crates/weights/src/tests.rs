//! Artefacts in a store of this machine: exact to the bit, complete or refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};

use super::*;

/// Bytes of a chunk, so small that tensors have several.
const CHUNK: u64 = 64;

struct Scene {
    _root: tempfile::TempDir,
    root: PathBuf,
}

impl Scene {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        Scene { root: root.path().to_owned(), _root: root }
    }

    fn store(&self) -> Store {
        Store::open(self.root.join("store").to_str().unwrap(), None).unwrap()
    }

    fn publisher(&self, anchor_every: u64, keep: usize) -> Publisher {
        Publisher::new(self.store(), anchor_every, keep).chunked(CHUNK)
    }

    fn puller(&self, name: &str) -> Puller {
        Puller::open(self.store(), &self.root.join(name), 2).unwrap()
    }

    /// A model folder of two tensors of 16 bits, in one file or in two.
    fn model(&self, version: u64, tensors: &[Vec<u16>; 2], split: bool) -> Arc<Path> {
        let folder = self.root.join(format!("model-{version}"));
        fs::create_dir(&folder).unwrap();
        let bytes = tensors.each_ref().map(|words| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
        let view = |at: usize| {
            let name = ["embed.weight", "norm.weight"][at];
            (name, TensorView::new(Dtype::BF16, vec![tensors[at].len()], &bytes[at]).unwrap())
        };
        let save = |name: &str, tensors: Vec<(&str, TensorView<'_>)>| {
            fs::write(folder.join(name), safetensors::serialize(tensors, None).unwrap()).unwrap();
        };
        match split {
            true => (0..2).for_each(|at| save(&format!("model-{at}.safetensors"), vec![view(at)])),
            false => save("model.safetensors", vec![view(0), view(1)]),
        }
        fs::write(folder.join("config.json"), format!("{{\"hidden_size\": 8, \"seen\": {}}}", version / 3)).unwrap();
        fs::write(folder.join("tokenizer.json"), "t".repeat(300)).unwrap();
        folder.into()
    }
}

/// Files of a folder, without hidden ones.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let names = entries.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path));
    names.filter(|(name, _)| !name.starts_with('.')).map(|(name, path)| (name, fs::read(path).unwrap())).collect()
}

/// All files below a folder.
fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(below(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn words(seed: u16, count: usize) -> Vec<u16> {
    (0..count).map(|at| (at as u16).wrapping_mul(40_503).wrapping_add(seed)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Random updates, versions missed, chains across anchors, tensors that move between files, a trainer
    /// that begins again.
    #[test]
    fn every_version_is_restored_to_the_bit_whatever_was_missed(
        steps in prop::collection::vec(
            (prop::collection::vec((any::<u16>(), any::<u16>()), 0..12), any::<bool>(), any::<bool>(), prop::bool::weighted(0.1)), 2..14,
        ),
        anchor_every in 1u64..6, keep in 1usize..4,
    ) {
        let scene = Scene::new();
        let (mut publisher, puller) = (scene.publisher(anchor_every, keep), scene.puller("pulled"));
        let mut tensors = [words(1, 200), words(2, 41)];
        let mut deltas = 0;
        for (at, (changes, split, pulls, again)) in steps.iter().enumerate() {
            if *again {
                publisher = scene.publisher(anchor_every, keep);
            }
            for (place, bits) in changes {
                let tensor = &mut tensors[usize::from(place & 1)];
                let place = usize::from(place >> 1) % tensor.len();
                tensor[place] ^= bits;
            }
            let version = at as u64 + 1;
            let folder = scene.model(version, &tensors, *split);
            let published = publisher.publish(version, &folder).unwrap();
            deltas += usize::from(published.delta);
            if *pulls {
                let pulled = puller.pull(None).unwrap();
                prop_assert_eq!((pulled.id, files(&pulled.folder)), (published.id, files(&folder)));
                let link = fs::canonicalize(scene.root.join("pulled").join(LATEST)).unwrap();
                prop_assert_eq!(link, fs::canonicalize(&pulled.folder).unwrap());
            }
            // A host that has never pulled.
            let fresh = scene.puller(&format!("fresh-{version}")).pull(None).unwrap();
            prop_assert_eq!(files(&fresh.folder), files(&folder));
        }
        prop_assert!(anchor_every > 1 || deltas == 0);
    }
}

#[test]
fn a_version_that_was_asked_for_stays_though_newer_ones_are_kept() {
    let scene = Scene::new();
    let (mut publisher, puller) = (scene.publisher(1, 3), scene.puller("pulled"));
    for version in 1..=3 {
        publisher.publish(version, &scene.model(version, &[words(version as u16, 20), words(2, 4)], false)).unwrap();
        puller.pull(None).unwrap();
    }
    let older = puller.pull(Some(1)).unwrap();
    let latest = fs::canonicalize(scene.root.join("pulled").join(LATEST)).unwrap();
    assert_eq!(latest, fs::canonicalize(&older.folder).unwrap());
    assert_eq!(files(&older.folder), files(&scene.root.join("model-1")));
}

#[test]
fn an_artefact_that_is_deleted_leaves_no_folder() {
    let scene = Scene::new();
    let mut publisher = scene.publisher(1, 1);
    for version in 1..=5 {
        publisher.publish(version, &scene.model(version, &[words(version as u16, 20), words(2, 4)], false)).unwrap();
    }
    assert_eq!(fs::read_dir(scene.root.join("store/data")).unwrap().count(), 1);
}

#[test]
fn a_member_that_missed_ten_versions_catches_up_with_deltas_alone() {
    let scene = Scene::new();
    let (mut publisher, puller) = (scene.publisher(40, 2), scene.puller("pulled"));
    let mut tensors = [words(1, 4000), words(2, 40)];
    for version in 1..=12 {
        tensors[0][version as usize * 7] ^= 1;
        let folder = scene.model(version, &tensors, false);
        let published = publisher.publish(version, &folder).unwrap();
        assert_eq!(published.delta, version > 1, "{published:?}");
        if version == 1 {
            let first = puller.pull(None).unwrap();
            assert!(first.fetched > 1000, "{first:?}");
        }
        if version == 12 {
            let pulled = puller.pull(None).unwrap();
            assert_eq!(files(&pulled.folder), files(&folder));
            assert!(pulled.fetched < 1000, "eleven deltas of a few numbers: {pulled:?}");
            assert_eq!(puller.pull(None).unwrap().fetched, 0);
        }
    }
    // The first is needed by the chain; nothing is deleted before the next whole one.
    assert_eq!(fs::read_dir(scene.root.join("store/manifests")).unwrap().count(), 12);
}

#[test]
fn chains_that_no_kept_version_needs_are_deleted_and_so_are_objects_of_a_killed_writer() {
    let scene = Scene::new();
    let mut publisher = scene.publisher(3, 1);
    let tensors = [words(1, 300), words(2, 40)];
    let orphan = scene.root.join("store/data/w0000000001-v0000000099/000000");
    fs::create_dir_all(orphan.parent().unwrap()).unwrap();
    fs::write(&orphan, "half").unwrap();
    for version in 1..=4 {
        publisher.publish(version, &scene.model(version, &tensors, false)).unwrap();
    }
    let names: Vec<String> = below(&scene.root.join("store/manifests")).iter().map(|path| path.display().to_string()).collect();
    assert!(names.len() == 1 && names[0].ends_with("w0000000001-v0000000004-whole.jsonl"), "{names:?}");
    assert!(!orphan.exists());
    let (mut second, folder) = (scene.publisher(3, 1), scene.model(9, &tensors, false));
    let published = second.publish(2, &folder).unwrap();
    assert_eq!(published.id, Id { writer: 2, version: 2 });
    assert_eq!(scene.puller("p").pull(None).unwrap().id, published.id, "a later writer is newer than a higher version");
    let told = publisher.publish(5, &scene.model(10, &tensors, false)).unwrap_err();
    assert!(matches!(told, WeightsError::Superseded { own: 1, newer: 2, .. }), "{told}");
}

#[test]
fn a_lower_version_after_one_that_failed_is_the_newest() {
    let scene = Scene::new();
    let mut publisher = scene.publisher(3, 1);
    let publish = |publisher: &mut Publisher, version: u64| {
        publisher.publish(version, &scene.model(version, &[words(version as u16, 300), words(2, 40)], false))
    };
    publish(&mut publisher, 4).unwrap();
    // A file has the name of the artefact's folder.
    let obstacle = scene.root.join("store/data/w0000000001-v0000000005");
    fs::write(&obstacle, "").unwrap();
    publish(&mut publisher, 5).unwrap_err();
    fs::remove_file(&obstacle).unwrap();
    let lower = publish(&mut publisher, 1).unwrap();
    assert_eq!((lower.id, scene.puller("p").pull(None).unwrap().id), (Id { writer: 2, version: 1 }, lower.id));
}

/// A run's upload has its checkpoint, in a folder of another name each time, and the weights that it began
/// from.
#[test]
fn tensors_of_the_same_names_in_several_files_are_each_their_own() {
    let scene = Scene::new();
    let (mut publisher, puller) = (scene.publisher(40, 2), scene.puller("pulled"));
    let mut tensors = [words(1, 4000), words(2, 40)];
    let before = scene.model(0, &tensors, false);
    for version in 1..=3 {
        tensors[0][version as usize * 7] ^= 1;
        let (model, whole) = (scene.model(version, &tensors, false), scene.root.join(format!("whole-{version}")));
        for (from, to) in [(&model, "checkpoints/step_9"), (&before, "checkpoints/step_9/critic"), (&before, "sft/step_9")] {
            fs::create_dir_all(whole.join(to)).unwrap();
            files(from).iter().for_each(|(name, bytes)| fs::write(whole.join(to).join(name), bytes).unwrap());
        }
        let reference = whole.join("checkpoints/step_9/reference.safetensors");
        fs::copy(before.join("model.safetensors"), reference).unwrap();
        let published = publisher.publish(version, &whole.clone().into()).unwrap();
        assert_eq!(published.delta, version > 1, "{published:?}");
        let pulled = puller.pull(None).unwrap().folder;
        for path in below(&whole) {
            let restored = fs::read(pulled.join(path.strip_prefix(&whole).unwrap())).unwrap();
            assert!(restored == fs::read(&path).unwrap(), "{}", path.display());
        }
    }
}

#[test]
fn a_delta_larger_than_a_third_is_stored_whole() {
    let scene = Scene::new();
    let mut publisher = scene.publisher(20, 2);
    let mut tensors = [words(1, 3000), words(2, 3000)];
    publisher.publish(1, &scene.model(1, &tensors, false)).unwrap();
    tensors[0].iter_mut().take(600).for_each(|word| *word ^= 1);
    assert!(publisher.publish(2, &scene.model(2, &tensors, false)).unwrap().delta);
    tensors[0].iter_mut().for_each(|word| *word ^= 1);
    assert!(!publisher.publish(3, &scene.model(3, &tensors, false)).unwrap().delta);
}

/// Every file of the store, with a bit flipped, cut, or gone: refused by name, or not needed.
#[test]
fn a_damaged_artefact_is_never_loaded_and_what_was_pulled_stays() {
    let scene = Scene::new();
    let mut publisher = scene.publisher(20, 4);
    let mut tensors = [words(1, 200), words(2, 40)];
    for version in 1..=3 {
        tensors[0][version as usize] ^= 3;
        publisher.publish(version, &scene.model(version, &tensors, false)).unwrap();
    }
    let wanted = files(&scene.root.join("model-3"));
    let (mut refused, mut unharmed) = (0, 0);
    for (at, path) in below(&scene.root.join("store")).into_iter().enumerate() {
        let intact = fs::read(&path).unwrap();
        for (how, damaged) in [("flipped", flipped(&intact)), ("cut", intact[..intact.len() / 2].to_vec()), ("empty", Vec::new())]
        {
            fs::write(&path, damaged).unwrap();
            let folder = format!("pulled-{at}-{how}");
            match scene.puller(&folder).pull(Some(3)) {
                Ok(pulled) => {
                    assert_eq!(files(&pulled.folder), wanted);
                    unharmed += 1;
                }
                Err(error) => {
                    let told = error.to_string();
                    assert!(told.contains("v0000000") || told.contains("version "), "{told}");
                    assert!(!scene.root.join(&folder).join("v0000000003").exists(), "{told}");
                    refused += 1;
                }
            }
        }
        fs::write(&path, intact).unwrap();
    }
    assert!(refused >= 15 && unharmed >= 3, "{refused} refused, {unharmed} not needed");
}

fn flipped(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    bytes
}

/// A writer that is killed before any of its objects, and a manifest without one of them.
#[test]
fn a_half_written_artefact_is_not_seen_or_refused() {
    let scene = Scene::new();
    let mut publisher = scene.publisher(20, 4);
    let tensors = [words(1, 200), words(2, 40)];
    publisher.publish(1, &scene.model(1, &tensors, false)).unwrap();
    publisher.publish(2, &scene.model(2, &[words(9, 200), words(2, 40)], false)).unwrap();
    let store = scene.root.join("store");
    let manifest = below(&store.join("manifests")).pop().unwrap();
    let object = below(&store.join("data")).pop().unwrap();
    let kept = (fs::read(&manifest).unwrap(), fs::read(&object).unwrap());
    fs::remove_file(&object).unwrap();
    let told = scene.puller("a").pull(None).unwrap_err().to_string();
    assert!(told.contains("w0000000001-v0000000002"), "{told}");
    fs::remove_file(&manifest).unwrap();
    assert_eq!(scene.puller("b").pull(None).unwrap().id.version, 1, "without a manifest it is not there");
    fs::write(&object, kept.1).unwrap();
    assert_eq!(scene.puller("c").pull(None).unwrap().id.version, 1);
    fs::write(&manifest, kept.0).unwrap();
    assert_eq!(scene.puller("d").pull(None).unwrap().id.version, 2);
}

#[test]
fn an_interrupted_pull_resumes_and_a_damaged_folder_is_no_base() {
    let scene = Scene::new();
    let mut publisher = scene.publisher(20, 4);
    let mut tensors = [words(1, 2000), words(2, 40)];
    publisher.publish(1, &scene.model(1, &tensors, false)).unwrap();
    let puller = scene.puller("pulled");
    let first = puller.pull(None).unwrap();
    tensors[0][3] ^= 1;
    publisher.publish(2, &scene.model(2, &tensors, false)).unwrap();
    // The folder that the delta refers to is cut: the whole chain is fetched.
    let file = first.folder.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let second = puller.pull(None).unwrap();
    assert!(second.fetched > first.fetched && files(&second.folder) == files(&scene.root.join("model-2")), "{second:?}");

    // A pull that ended after the objects arrived, and left a folder half written.
    let other = scene.puller("other");
    let staged = scene.root.join("other/.objects");
    fs::create_dir_all(&staged).unwrap();
    for object in below(&scene.root.join("store/data")) {
        let folder = object.parent().unwrap().file_name().unwrap().to_str().unwrap();
        fs::copy(&object, staged.join(format!("{folder}-{}", object.file_name().unwrap().to_str().unwrap()))).unwrap();
    }
    fs::create_dir(scene.root.join("other/.v0000000002.writing")).unwrap();
    let resumed = other.pull(None).unwrap();
    assert_eq!((resumed.fetched, files(&resumed.folder)), (0, files(&scene.root.join("model-2"))));
    assert!(!staged.exists());
    let told = Puller::open(scene.store(), &scene.root.join("other"), 2).unwrap_err().to_string();
    assert!(told.contains("another process pulls"), "{told}");
}

#[test]
fn a_host_reports_what_it_holds_and_missing_versions_are_named() {
    let scene = Scene::new();
    let puller = scene.puller("pulled");
    assert!(matches!(puller.pull(None), Err(WeightsError::Empty { .. })));
    scene.publisher(1, 1).publish(7, &scene.model(7, &[words(1, 9), words(2, 9)], true)).unwrap();
    let told = puller.pull(Some(8)).unwrap_err().to_string();
    assert!(told.contains("no version 8") && told.contains("it has 7"), "{told}");
    let pulled = puller.pull(Some(7)).unwrap();
    puller.report("[::1]/x", &pulled).unwrap();
    let report = scene.store().report_of("[::1]/x").unwrap().unwrap();
    assert_eq!((report.id, report.folder), (pulled.id, pulled.folder));
    assert_eq!(scene.store().report_of("other").unwrap(), None);
}
