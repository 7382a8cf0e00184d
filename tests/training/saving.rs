//! Laws C1 and N1 over ranks: each rank writes its part of a checkpoint while training goes on, any number of them resumes from it, and what is
//! wrong with a part is named.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, OffPolicy};
use rollflow::model::{Compute, Dtype, Lora, ModelConfig, Weights, export_hf, load_hf};
use rollflow::prelude::*;
use rollflow::ranks::Shard;
use rollflow::train::{
    MasterFormat, MomentFormat, SaveCheckpoint, TrainError, TrainFuture, TrainingBackend, checkpoint, collate, promise,
};

use crate::rank_threads::{led, led_copies};
use crate::ranks::{config, distance, rollouts};

/// Its weights are stored rounded, so that a checkpoint needs the f32 parameters, too.
fn rounded() -> LocalConfig {
    LocalConfig { save_dtype: Some(Dtype::Bf16), ..plain() }
}

fn plain() -> LocalConfig {
    config(Arc::new(CrossEntropy), OffPolicy::default())
}

fn backend(config: LocalConfig, seed: u64) -> LocalBackend {
    LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(seed)).unwrap()
}

fn step(backend: &LocalBackend, at: u64) {
    let batch = collate(&rollouts(at), Aggregation::TokenMean).unwrap();
    backend.forward_backward(Arc::new(batch)).wait().unwrap();
    backend.optim_step().wait().unwrap();
}

fn save(backend: &LocalBackend, folder: &Path, step: u64) -> PathBuf {
    backend.save_checkpoint(SaveCheckpoint { run_folder: folder.to_owned(), step, ..SaveCheckpoint::default() }).wait().unwrap()
}

fn current(backend: &LocalBackend) -> Vec<f32> {
    backend.current().wait().unwrap().weights.read().trained().1.to_kind(tch::Kind::Float).try_into().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The state in a checkpoint as one process writes it: model and optimizer in a file each.
fn gathered(config: LocalConfig, saved: &Path) -> [Vec<u8>; 2] {
    let (folder, alone) = (tempfile::tempdir().unwrap(), backend(config, 9));
    alone.load_checkpoint(saved).wait().unwrap();
    let whole = save(&alone, folder.path(), 1);
    ["model.safetensors", "optimizer.safetensors"].map(|file| fs::read(whole.join(file)).unwrap())
}

/// Saved by four ranks after three steps: the checkpoint, the weights then, and the weights three steps later.
fn saved_by_four(shard: Shard, config: fn() -> LocalConfig, folder: &Path) -> (PathBuf, Vec<f32>, Vec<f32>) {
    let (saved, ended) = led(4, shard, config, |config| {
        let backend = backend(config, 5);
        (0..3).for_each(|at| step(&backend, at));
        let (saved, then) = (save(&backend, folder, 3), current(&backend));
        (3..6).for_each(|at| step(&backend, at));
        (saved, then, current(&backend))
    });
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    saved
}

#[test]
fn c1_a_checkpoint_of_four_ranks_resumes_on_any_number_of_them_to_the_bit() {
    for (shard, config) in
        [(Shard::Parameters, plain as fn() -> LocalConfig), (Shard::Optimizer, rounded), (Shard::Parameters, rounded)]
    {
        let folder = tempfile::tempdir().unwrap();
        let (saved, then, later) = saved_by_four(shard, config, folder.path());
        let files = names(&saved);
        let of = |name: &str| files.iter().filter(|file| file.starts_with(name)).count();
        assert_eq!((of("optimizer-"), of("optimizer.")), (4, 0), "{files:?}");
        assert!(of("model-") > 1 && of("model.safetensors.index.json") == 1, "{files:?}");
        checkpoint::verify(&saved).unwrap();
        let expected = gathered(config(), &saved);
        // A folder that others load.
        assert_eq!(load_hf(&saved).unwrap().1.flat.numel(), then.len());
        for (size, shard) in [
            (1, Shard::Nothing),
            (1, Shard::Parameters),
            (2, Shard::Nothing),
            (2, Shard::Optimizer),
            (3, Shard::Parameters),
            (4, Shard::Optimizer),
        ] {
            let ((at_once, again), ended) = led(size, shard, config, |config| {
                let backend = backend(config, 9);
                backend.load_checkpoint(&saved).wait().unwrap();
                (current(&backend), save(&backend, &folder.path().join(format!("{size}-{}", shard.word())), 3))
            });
            assert!(ended.iter().all(Result::is_ok), "{ended:?}");
            assert!(at_once == then, "{size} ranks, {}: weights", shard.word());
            assert!(gathered(config(), &again) == expected, "{size} ranks, {}: saved again", shard.word());
        }
        // The same ranks take the same steps.
        let (found, _) = led(4, shard, config, |config| {
            let backend = backend(config, 9);
            backend.load_checkpoint(&saved).wait().unwrap();
            (3..6).for_each(|at| step(&backend, at));
            current(&backend)
        });
        assert!(found == later, "{}: three steps later", shard.word());
    }
}

fn in_8_bits() -> LocalConfig {
    LocalConfig { moments: MomentFormat::EightBit, ..plain() }
}

fn on_the_host() -> LocalConfig {
    LocalConfig { moments: MomentFormat::Host, ..plain() }
}

#[test]
fn c1_moments_in_8_bits_and_on_the_host_resume_to_the_bit_and_train_as_those_in_f32() {
    let trained = |config: fn() -> LocalConfig, size, shard| {
        let folder = tempfile::tempdir().unwrap();
        let ((saved, later), ended) = led(size, shard, config, |config| {
            let backend = backend(config, 5);
            (0..3).for_each(|at| step(&backend, at));
            let saved = save(&backend, folder.path(), 3);
            (3..6).for_each(|at| step(&backend, at));
            (saved, current(&backend))
        });
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        let (resumed, _) = led(size, shard, config, |config| {
            let backend = backend(config, 9);
            backend.load_checkpoint(&saved).wait().unwrap();
            (3..6).for_each(|at| step(&backend, at));
            current(&backend)
        });
        assert!(resumed == later, "{size} ranks, {}", shard.word());
        later
    };
    for (size, shard) in [(1, Shard::Nothing), (2, Shard::Optimizer), (2, Shard::Parameters)] {
        let plain = trained(plain, size, shard);
        assert!(trained(on_the_host, size, shard) == plain, "{size} ranks: on the host");
        let length = |other: Vec<f32>| plain.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        let (moved, gap) = (length(current(&backend(in_8_bits(), 5))), length(trained(in_8_bits, size, shard)));
        println!("{size} ranks: moved by {moved}, in 8 bits {gap} away");
        assert!(0.0 < gap && gap < 0.1 * moved, "{size} ranks: moved by {moved}, in 8 bits {gap} away");
    }
}

/// Parameters in bf16, computed with in bf16.
fn in_bf16(masters: MasterFormat, save_dtype: Dtype, lr: f64) -> LocalConfig {
    let (compute, schedule) = (Compute::cpu(Dtype::Bf16), Schedule::constant(lr));
    LocalConfig { masters, compute, schedule, save_dtype: Some(save_dtype), ..plain() }
}

/// Law C1. Only a format that rounds bf16 needs the parameters once more.
#[test]
fn c1_parameters_in_bf16_resume_to_the_bit_in_every_format_of_a_checkpoint_and_on_ranks() {
    for (size, shard, dtype) in [
        (1, Shard::Nothing, Dtype::F32),
        (1, Shard::Nothing, Dtype::Bf16),
        (1, Shard::Nothing, Dtype::F16),
        (2, Shard::Nothing, Dtype::Bf16),
        (2, Shard::Optimizer, Dtype::Bf16),
        (2, Shard::Gradients, Dtype::F32),
        (2, Shard::Parameters, Dtype::Bf16),
        (2, Shard::Parameters, Dtype::F16),
    ] {
        let (folder, what) = (tempfile::tempdir().unwrap(), format!("{size} ranks, {}, {}", shard.word(), dtype.name()));
        let config = move || in_bf16(MasterFormat::Bf16, dtype, 1e-3);
        let ((saved, then, later), ended) = led(size, shard, config, |config| {
            let backend = backend(config, 5);
            (0..3).for_each(|at| step(&backend, at));
            let (saved, then) = (save(&backend, folder.path(), 3), current(&backend));
            (3..6).for_each(|at| step(&backend, at));
            (saved, then, current(&backend))
        });
        assert!(ended.iter().all(Result::is_ok), "{what}: {ended:?}");
        let ((at_once, resumed), _) = led(size, shard, config, |config| {
            let backend = backend(config, 9);
            backend.load_checkpoint(&saved).wait().unwrap();
            let at_once = current(&backend);
            (3..6).for_each(|at| step(&backend, at));
            (at_once, current(&backend))
        });
        assert!(at_once == then && resumed == later && then != later, "{what}");
        let optimizers = names(&saved).into_iter().filter(|name| name.starts_with("optimizer"));
        for name in optimizers {
            let file = fs::read(saved.join(&name)).unwrap();
            let file = safetensors::SafeTensors::deserialize(&file).unwrap();
            let has_masters = file.names().iter().any(|name| name.starts_with("master"));
            assert_eq!(has_masters, dtype == Dtype::F16, "{what}: {name}");
        }
        let alone = backend(config(), 9);
        alone.load_checkpoint(&saved).wait().unwrap();
        assert!(current(&alone) == then, "{what}: one process reads it");
    }
}

/// Steps of an eighth of what bf16 tells apart: rounded to the nearest, most would be lost. Noise in the parameters is noise in
/// gradients, too, which AdamW's mean square makes shorter.
#[test]
fn parameters_in_bf16_move_nearly_as_far_as_those_in_f32() {
    let moved = |masters| {
        let backend = backend(in_bf16(masters, Dtype::F32, 1e-5), 5);
        let numbers = || tch::Tensor::from_slice(&current(&backend));
        let before = numbers();
        (0..40).for_each(|at| step(&backend, at));
        numbers() - before
    };
    let (exact, rounded) = (moved(MasterFormat::F32), moved(MasterFormat::Bf16));
    let along = (exact.dot(&rounded) / exact.dot(&exact)).double_value(&[]);
    println!("in bf16 {along:.3} of the way in f32");
    assert!((0.75..1.05).contains(&along), "{along} of the way");
}

#[test]
fn parameters_in_bf16_are_refused_where_something_else_is_computed_or_trained() {
    let of_f32 = LocalConfig { compute: Compute::cpu(Dtype::F32), ..in_bf16(MasterFormat::Bf16, Dtype::F32, 1e-3) };
    let model = crate::tiny::model();
    let refused = |config, weights| LocalBackend::new(config, model.clone(), weights).err().unwrap().to_string();
    assert!(refused(of_f32, crate::tiny::weights(1)).contains("computation in bf16"));
    let adapted = crate::tiny::weights(1).adapted(&model, Lora::new(4, 8.0, &[Lora::ALL]).unwrap(), 2);
    assert!(refused(in_bf16(MasterFormat::Bf16, Dtype::F32, 1e-3), adapted).contains("[lora]"));
}

#[test]
fn training_goes_on_from_a_checkpoint_on_another_number_of_ranks_as_without_an_interruption() {
    let folder = tempfile::tempdir().unwrap();
    let whole = {
        let backend = backend(plain(), 5);
        (0..6).for_each(|at| step(&backend, at));
        current(&backend)
    };
    let (saved, ..) = saved_by_four(Shard::Parameters, plain, folder.path());
    for (size, shard) in [(2, Shard::Nothing), (2, Shard::Optimizer), (3, Shard::Parameters)] {
        let (found, ended) = led(size, shard, plain, |config| {
            let backend = backend(config, 9);
            backend.load_checkpoint(&saved).wait().unwrap();
            (3..6).for_each(|at| step(&backend, at));
            current(&backend)
        });
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        let [found, whole] = [&found, &whole].map(|flat| tch::Tensor::from_slice(flat));
        assert!(distance(&found, &whole) < 1e-5, "{size} ranks: {}", distance(&found, &whole));
    }
}

#[test]
fn c1_of_several_copies_the_first_writes_the_moments_and_every_rank_a_part_of_the_model() {
    for shard in [Shard::Optimizer, Shard::Parameters] {
        let folder = tempfile::tempdir().unwrap();
        let ((saved, then), ended) = led_copies([2, 2], shard, rounded, |config| {
            let backend = backend(config, 5);
            (0..3).for_each(|at| step(&backend, at));
            (save(&backend, folder.path(), 3), current(&backend))
        });
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        let moments: Vec<String> = names(&saved).into_iter().filter(|name| name.starts_with("optimizer")).collect();
        assert_eq!(moments, ["optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"]);
        checkpoint::verify(&saved).unwrap();
        let expected = gathered(rounded(), &saved);
        for mesh in [[1, 1], [1, 3], [2, 2], [3, 1]] {
            let ((found, again), ended) = led_copies(mesh, shard, rounded, |config| {
                let backend = backend(config, 9);
                backend.load_checkpoint(&saved).wait().unwrap();
                (current(&backend), save(&backend, &folder.path().join(format!("{mesh:?}")), 3))
            });
            assert!(ended.iter().all(Result::is_ok), "{ended:?}");
            assert!(found == then && gathered(rounded(), &again) == expected, "{mesh:?}, {}", shard.word());
        }
    }
}

#[test]
fn adapters_are_one_file_and_their_moments_one_of_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let start = |config: LocalConfig| {
        let weights = crate::tiny::weights(5).adapted(&crate::tiny::model(), Lora::new(2, 4.0, &[Lora::ALL]).unwrap(), 3);
        LocalBackend::new(LocalConfig { merge: false, ..config }, crate::tiny::model(), weights).unwrap()
    };
    let ((saved, then), _) = led(3, Shard::Optimizer, plain, |config| {
        let backend = start(config);
        (0..3).for_each(|at| step(&backend, at));
        (save(&backend, folder.path(), 3), current(&backend))
    });
    assert!(saved.join("adapter_model.safetensors").exists() && saved.join("optimizer-00003-of-00003.safetensors").exists());
    for size in [1, 2] {
        let (found, ended) = led(size, Shard::Optimizer, plain, |config| {
            let backend = start(config);
            backend.load_checkpoint(&saved).wait().unwrap();
            current(&backend)
        });
        assert!(ended.iter().all(Result::is_ok) && found == then, "{size} ranks: {ended:?}");
    }
}

#[test]
fn a_damaged_a_missing_and_a_foreign_part_are_named_on_every_rank_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (saved, ..) = saved_by_four(Shard::Parameters, plain, folder.path());
    let other = tempfile::tempdir().unwrap();
    let (others, _) = led(4, Shard::Parameters, plain, |config| {
        let backend = backend(config, 5);
        step(&backend, 0);
        save(&backend, other.path(), 3)
    });
    let optimizer = saved.join("optimizer-00002-of-00004.safetensors");
    let model = saved.join(names(&saved).into_iter().rfind(|name| name.starts_with("model-")).unwrap());
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let refused = |path: &Path, reason: &str| {
        for (size, shard) in [(1, Shard::Nothing), (3, Shard::Parameters)] {
            let ((error, unchanged), ended) = led(size, shard, plain, |config| {
                let backend = backend(config, 9);
                let before = current(&backend);
                let error = backend.load_checkpoint(&saved).wait().unwrap_err().to_string();
                (error, current(&backend) == before)
            });
            assert!(error.contains(&path.display().to_string()) && error.contains(reason), "{size} ranks: {error}");
            assert!(unchanged && ended.iter().all(Result::is_ok), "{ended:?}");
        }
    };
    for path in [&optimizer, &model] {
        flip(path);
        refused(path, "its checksum is");
        flip(path);
    }
    let own = fs::read(&optimizer).unwrap();
    fs::copy(others.join("optimizer-00002-of-00004.safetensors"), &optimizer).unwrap();
    refused(&optimizer, "");
    fs::remove_file(&optimizer).unwrap();
    refused(&optimizer, "No such file");
    fs::write(&optimizer, own).unwrap();
    checkpoint::verify(&saved).unwrap();
}

/// The folder that holds a write up until `release` is called.
fn held_up(folder: &Path) -> (SaveCheckpoint, impl FnOnce()) {
    let (release, held): (_, TrainFuture<PathBuf>) = promise();
    let more = folder.join("more");
    fs::create_dir_all(&more).unwrap();
    let folders = [("more".to_owned(), held)].into();
    let request = SaveCheckpoint { run_folder: folder.to_owned(), step: 1, folders, ..SaveCheckpoint::default() };
    (request, move || assert!(release(Ok(more))))
}

#[test]
fn training_goes_on_while_a_checkpoint_is_written_which_holds_the_state_before() {
    for (size, shard) in [(1, Shard::Nothing), (3, Shard::Optimizer), (3, Shard::Parameters)] {
        let folder = tempfile::tempdir().unwrap();
        let ((saved, then), ended) = led(size, shard, plain, |config| {
            let backend = backend(config, 5);
            step(&backend, 0);
            let then = current(&backend);
            let (request, release) = held_up(folder.path());
            let saved = backend.save_checkpoint(request);
            saved.copied.wait().unwrap();
            // Two steps end although the checkpoint is not written.
            (1..3).for_each(|at| step(&backend, at));
            assert!(current(&backend) != then && !folder.path().join("checkpoints/step_000001").exists());
            release();
            let path = saved.wait().unwrap();
            (path, then)
        });
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        assert!(checkpoint::verify(&saved).is_ok() && saved.join("more").is_dir());
        let resumed = backend(plain(), 9);
        resumed.load_checkpoint(&saved).wait().unwrap();
        assert!(current(&resumed) == then && resumed.state().step == 1, "{size} ranks");
    }
}

/// Law F3.
#[test]
fn a_backend_that_ends_completes_the_checkpoint_that_it_writes() {
    let folder = tempfile::tempdir().unwrap();
    let (saved, ended) = led(3, Shard::Parameters, plain, |config| {
        let backend = backend(config, 5);
        step(&backend, 0);
        let request = SaveCheckpoint { run_folder: folder.path().to_owned(), step: 1, ..SaveCheckpoint::default() };
        let saved = backend.save_checkpoint(request);
        drop(backend);
        saved.wait().unwrap()
    });
    assert!(checkpoint::verify(&saved).is_ok() && ended.iter().all(Result::is_ok), "{ended:?}");
}

/// A file whose folder is a file.
fn unwritable() -> LocalConfig {
    let companions = ["missing", "missing/tokenizer.json"].map(|name| (name.to_owned(), b"{}".to_vec()));
    LocalConfig { companions: companions.to_vec(), ..plain() }
}

#[test]
fn a_write_that_fails_names_the_file_leaves_nothing_and_poisons_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (error, ended) = led(2, Shard::Parameters, unwritable, |config| {
        let backend = backend(config, 5);
        step(&backend, 0);
        let saved =
            backend.save_checkpoint(SaveCheckpoint { run_folder: folder.path().to_owned(), step: 1, ..Default::default() });
        saved.copied.wait().unwrap();
        let error = saved.wait().unwrap_err();
        step(&backend, 1);
        error
    });
    assert!(matches!(&error, TrainError::Io(path, _) if path.ends_with("missing/tokenizer.json")), "{error}");
    assert!(ended.iter().all(Result::is_ok) && names(&folder.path().join("checkpoints")).is_empty(), "{ended:?}");
}

#[test]
fn a_write_that_fails_in_the_background_ends_the_run_with_the_file() {
    let sample = |at: u64| Group { samples: crate::tiny::rollouts(&[(2, 3), (1, 4)], at), ..Group::default() };
    for (every, size, shard) in [(Some(1), 1, Shard::Nothing), (None, 1, Shard::Nothing), (Some(1), 2, Shard::Parameters)] {
        let folder = tempfile::tempdir().unwrap();
        let (error, ended) = led(size, shard, unwritable, |config| {
            let batches: Vec<Batch> = (0..4).map(|at| Batch { groups: vec![sample(at)], ..Batch::default() }).collect();
            let trainer = Trainer::new(backend(config, 5)).checkpoints(folder.path(), every);
            let mut flow = Flow::new("failing");
            let batches = flow.source("batches", rollflow::flow::from_iter(batches));
            let steps = flow.stage("train", batches, trainer);
            flow.sink("seen", steps, |_: Trained<rollflow::model::FrozenWeights>| ());
            format!("{:#}", flow.run(Until::finished()).unwrap_err())
        });
        let step = every.unwrap_or(4);
        for part in [&format!("the checkpoint of step {step} was not saved"), "missing/tokenizer.json", "resume the run"] {
            assert!(error.contains(part), "{size} ranks, {every:?}: {error}");
        }
        let visible = names(&folder.path().join("checkpoints")).into_iter().filter(|name| !name.starts_with('.')).count();
        assert!(ended.iter().all(Result::is_ok) && visible == 0, "{ended:?}");
    }
}

#[test]
fn an_error_of_a_write_that_no_caller_waits_for_is_the_error_of_the_next_save() {
    let folder = tempfile::tempdir().unwrap();
    let backend = backend(plain(), 5);
    let (refuse, refused): (_, TrainFuture<PathBuf>) = promise();
    let folders = [("more".to_owned(), refused)].into();
    let request = SaveCheckpoint { run_folder: folder.path().to_owned(), step: 1, folders, ..SaveCheckpoint::default() };
    drop(backend.save_checkpoint(request));
    refuse(Err(TrainError::Setting("refused")));
    let next = SaveCheckpoint { run_folder: folder.path().to_owned(), step: 2, ..SaveCheckpoint::default() };
    assert!(matches!(backend.save_checkpoint(next.clone()).wait(), Err(TrainError::Setting("refused"))));
    assert!(backend.save_checkpoint(next).wait().is_ok());
}

/// The whole model is never in memory of the exporter; here the result is what loading gives.
#[test]
fn a_folder_in_several_files_is_exported_as_one_with_the_same_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let (saved, then, _) = saved_by_four(Shard::Parameters, plain, folder.path());
    for (dtype, most) in [(Dtype::F32, None), (Dtype::Bf16, Some(4000))] {
        let to = folder.path().join(format!("exported {}", dtype.word()));
        export_hf(&saved, None, &to, dtype, most).unwrap();
        let (config, weights): (ModelConfig, Weights) = load_hf(&to).unwrap();
        let expected = tch::Tensor::from_slice(&then).to_kind(weights_kind(dtype)).to_kind(tch::Kind::Float);
        assert_eq!((config.dtype, weights.flat), (dtype, expected));
        assert_eq!(to.join("model.safetensors").exists(), most.is_none());
    }
}

fn weights_kind(dtype: Dtype) -> tch::Kind {
    if dtype == Dtype::F32 { tch::Kind::Float } else { tch::Kind::BFloat16 }
}
