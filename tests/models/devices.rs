//! Several devices (R127): copies of the model on several devices learn what one learns (law N1), whatever is trained and in which format. A machine's
//! processor may be named more than once, each time with a copy of its own; where GPUs are, they are.

use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::model::{Compute, Dtype, Lora, Weights};
use rollflow::train::{LocalBackend, LocalConfig, SaveCheckpoint, TrainBatch, TrainingBackend, collate};
use tch::{Cuda, Device, Kind, Tensor};

/// Two more GPUs where they are (tests that count what a device does have others), or the processor twice more.
fn replica_devices() -> Vec<Device> {
    let gpus = (1..Cuda::device_count().clamp(1, 3) as usize).map(Device::Cuda);
    if Cuda::device_count() > 1 { gpus.collect() } else { vec![Device::Cpu; 2] }
}

fn first() -> Device {
    let required = std::env::var_os("ROLLFLOW_REQUIRE_GPU").is_some();
    assert!(!required || Cuda::is_available(), "ROLLFLOW_REQUIRE_GPU is set, and libtorch finds no CUDA device");
    if Cuda::device_count() > 1 { Device::Cuda(0) } else { Device::Cpu }
}

fn backend(weights: &Weights, dtype: Dtype, replica_devices: Vec<Device>) -> LocalBackend {
    let compute = Compute { device: first(), dtype };
    let config =
        LocalConfig { threads: Some(1), compute, replica_devices, ..LocalConfig::new(CrossEntropy, Schedule::constant(5e-3)) };
    LocalBackend::new(config, crate::tiny::model(), weights.copy()).unwrap()
}

fn batch() -> Arc<TrainBatch> {
    Arc::new(collate(&crate::tiny::counting(), Aggregation::TokenMean).unwrap())
}

/// The losses of so many steps.
fn learn(backend: &LocalBackend, steps: usize) -> Vec<f64> {
    let step = |_| {
        let loss = backend.forward_backward(batch()).wait().unwrap().loss;
        backend.optim_step().wait().unwrap();
        loss
    };
    (0..steps).map(step).collect()
}

fn largest_gap(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn n1_devices_beside_each_other_learn_what_one_does() {
    let whole = crate::tiny::weights(3);
    let adapters = whole.adapted(&crate::tiny::model(), Lora::new(4, 8.0, &[Lora::ALL]).unwrap(), 7);
    for (what, weights, dtype, tolerance) in [
        ("all in f32", &whole, Dtype::F32, 1e-4),
        ("all in bf16", &whole, Dtype::Bf16, 0.05),
        ("adapters", &adapters, Dtype::F32, 1e-4),
    ] {
        let alone = learn(&backend(weights, dtype, Vec::new()), 30);
        let together = learn(&backend(weights, dtype, replica_devices()), 30);
        let gap = largest_gap(&alone, &together);
        assert!(gap < tolerance, "{what}: {gap}");
        assert!(
            alone[29] < alone[0] - 0.2,
            "{what}: it learns, so that copies which stay behind would show: {} {}",
            alone[0],
            alone[29]
        );
    }
}

#[test]
fn copies_follow_a_checkpoint_that_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let long = backend(&crate::tiny::weights(3), Dtype::F32, replica_devices());
    learn(&long, 10);
    let saved = SaveCheckpoint { run_folder: folder.path().to_owned(), step: 10, ..Default::default() };
    let path = long.save_checkpoint(saved).wait().unwrap();
    let expected = learn(&long, 5);
    let resumed = backend(&crate::tiny::weights(8), Dtype::F32, replica_devices());
    resumed.load_checkpoint(&path).wait().unwrap();
    assert_eq!(learn(&resumed, 5), expected);
}

#[test]
fn a_device_that_is_not_there_is_told_by_its_name() {
    let config =
        LocalConfig { replica_devices: vec![Device::Cuda(63)], ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-3)) };
    let error = LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(1)).map(drop).unwrap_err().to_string();
    assert!(error.contains("cuda:63 is not there"), "{error}");
}

/// What the tests above rely on where GPUs are, or stand-ins for them.
#[test]
fn operands_on_two_devices_are_refused() {
    if Cuda::device_count() < 2 {
        return eprintln!("skipped: libtorch finds no two CUDA devices here");
    }
    let ones = |device| Tensor::ones([2], (Kind::Float, device));
    let (here, first, second) = (ones(Device::Cpu), ones(Device::Cuda(0)), ones(Device::Cuda(1)));
    assert!(first.f_add(&here).is_err() && first.f_add(&second).is_err() && first.f_add(&first).is_ok());
    let rows = Tensor::zeros([1], (Kind::Int64, Device::Cpu));
    assert!(first.f_index_select(0, &rows).is_err() && first.f_index_select(0, &rows.to_device(Device::Cuda(0))).is_ok());
    assert_eq!(Vec::<f32>::try_from(first + second.to_device(Device::Cuda(0))).unwrap(), [2.0; 2]);
}
