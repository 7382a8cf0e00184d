//! Checkpoint folders are whole or invisible, and the newest is the one with the largest number (law C1's file part).

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rollflow::train::TrainError;
use rollflow::train::checkpoint::{self, CheckpointMetadata};

fn save(root: &Path, step: u64) -> PathBuf {
    let metadata = CheckpointMetadata { step, weight_version: step / 2, ..Default::default() };
    checkpoint::write(root, step, metadata, |folder| {
        fs::write(folder.join("model.safetensors"), format!("weights {step}")).map_err(TrainError::io(folder))
    })
    .unwrap()
}

fn newest(root: &Path) -> Option<String> {
    checkpoint::latest(root).unwrap().map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
}

#[test]
fn a_saved_checkpoint_is_complete_and_pointed_to() {
    let root = tempfile::tempdir().unwrap();
    let path = save(root.path(), 123);
    assert_eq!(path, root.path().join("step_000123"));
    let metadata = checkpoint::read_metadata(&path).unwrap();
    assert_eq!((metadata.step, metadata.weight_version, metadata.files["model.safetensors"].bytes), (123, 61, 11));
    assert!(metadata.timestamp > 1_700_000_000);
    assert_eq!(fs::read_to_string(root.path().join("latest")).unwrap(), "step_000123\n");
}

#[test]
fn nine_comes_before_ten_padded_or_not() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 9);
    fs::rename(root.path().join("step_000009"), root.path().join("step_9")).unwrap();
    assert_eq!(newest(root.path()).unwrap(), "step_9");
    save(root.path(), 10);
    fs::rename(root.path().join("step_000010"), root.path().join("step_10")).unwrap();
    assert_eq!(newest(root.path()).unwrap(), "step_10");
    save(root.path(), 1_000_000);
    assert_eq!(newest(root.path()).unwrap(), "step_1000000");
}

#[test]
fn a_save_that_fails_or_is_killed_leaves_the_old_one_in_charge() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 5);
    let refused = checkpoint::write(root.path(), 6, CheckpointMetadata::default(), |folder| {
        fs::write(folder.join("model.safetensors"), "half").unwrap();
        Err(TrainError::malformed(folder, "the disk is full"))
    });
    assert!(refused.unwrap_err().to_string().contains("the disk is full"));
    assert_eq!(newest(root.path()).unwrap(), "step_000005");
    save(root.path(), 6);
    assert_eq!(newest(root.path()).unwrap(), "step_000006");
    assert!(!root.path().join(".step_000006.writing").exists());
}

#[test]
fn incomplete_folders_are_passed_over() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 1);
    for (step, damage) in [(2, "metadata.json"), (3, "model.safetensors")] {
        fs::remove_file(save(root.path(), step).join(damage)).unwrap();
    }
    fs::write(save(root.path(), 4).join("model.safetensors"), "cut").unwrap();
    fs::create_dir(root.path().join("step_99")).unwrap();
    fs::create_dir(root.path().join("step_x")).unwrap();
    assert_eq!(newest(root.path()).unwrap(), "step_000001");
    let cut = checkpoint::read_metadata(&root.path().join("step_000004")).unwrap_err();
    assert!(cut.to_string().ends_with("model.safetensors: 3 bytes; metadata.json says 9: the file was cut or changed"), "{cut}");
}

#[test]
fn saving_a_step_again_replaces_it() {
    let root = tempfile::tempdir().unwrap();
    save(root.path(), 7);
    fs::write(root.path().join("step_000007/stale"), "").unwrap();
    let path = save(root.path(), 7);
    assert!(!path.join("stale").exists());
    assert_eq!(checkpoint::list(root.path()).unwrap(), [(7, path)]);
}

#[test]
fn no_folder_means_no_checkpoint() {
    assert_eq!(newest(Path::new("/nonexistent/checkpoints")), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn the_newest_is_the_numeric_maximum(steps in prop::collection::btree_set(0u64..2_000_000, 1..5)) {
        let root = tempfile::tempdir().unwrap();
        for step in steps.iter().rev() {
            save(root.path(), *step);
        }
        let listed: Vec<u64> = checkpoint::list(root.path()).unwrap().into_iter().map(|(step, _)| step).collect();
        prop_assert_eq!(listed, steps.iter().copied().collect::<Vec<_>>());
        prop_assert_eq!(newest(root.path()), steps.last().map(|step| checkpoint::step_folder(*step)));
    }
}

#[test]
fn pruning_keeps_the_newest_and_touches_nothing_unfinished() {
    let root = tempfile::tempdir().unwrap();
    (1..=4).for_each(|step| drop(save(root.path(), step)));
    // What looks like a checkpoint but isn't complete doesn't count, and isn't ours to remove.
    fs::create_dir(root.path().join("step_000003_notes")).unwrap();
    fs::remove_file(root.path().join("step_000002").join(checkpoint::METADATA)).unwrap();
    let removed = checkpoint::prune(root.path(), 4, 2).unwrap();
    assert_eq!(removed, [root.path().join("step_000001")]);
    let mut left: Vec<String> =
        fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    left.sort();
    assert_eq!(left, ["latest", "step_000002", "step_000003", "step_000003_notes", "step_000004"]);
    assert_eq!(checkpoint::prune(root.path(), 4, 1).unwrap(), [root.path().join("step_000003")]);
    assert_eq!(newest(root.path()).unwrap(), "step_000004");
    // Those of later steps are another run's, and the step that was just saved stays.
    [90, 91].iter().for_each(|step| drop(save(root.path(), *step)));
    for keep in [0, usize::MAX] {
        assert!(checkpoint::prune(root.path(), 4, keep).unwrap().is_empty());
    }
    assert!(checkpoint::prune(&root.path().join("none"), 4, 1).unwrap().is_empty(), "a backend that writes elsewhere");
}
