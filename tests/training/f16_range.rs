//! Numbers beyond the range of f16, in checkpoints and exports.

use std::sync::Arc;

use rollflow::algo::{CrossEntropy, OffPolicy};
use rollflow::model::{Dtype, ModelConfig, Weights, export_hf, load_hf, save_hf};
use rollflow::ranks::Shard;
use rollflow::train::{LocalBackend, LocalConfig, SaveCheckpoint, TrainingBackend, checkpoint};

use crate::rank_threads::led;
use crate::ranks::config;

/// A model with a number that f16 lacks, at this place.
fn large_at(place: i64) -> Weights {
    let weights = crate::tiny::weights(5);
    tch::no_grad(|| drop(weights.flat.narrow(0, place, 1).fill_(7e4)));
    weights
}

/// The same in its embedding.
fn large() -> Weights {
    large_at(3)
}

#[track_caller]
fn assert_beyond_f16(error: &impl ToString) {
    assert_tensor_beyond_f16("model.embed_tokens.weight", error);
}

#[track_caller]
fn assert_tensor_beyond_f16(tensor: &str, error: &impl ToString) {
    let error = error.to_string();
    let beyond = format!("{tensor} has numbers beyond 65504");
    assert!([&*beyond, "write it in bf16"].iter().all(|part| error.contains(part)), "{error}");
}

/// Also where ranks divide the parameters, whichever of them has the tensor.
#[test]
fn a_checkpoint_in_f16_of_numbers_beyond_it_is_refused_and_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let in_f16 = || LocalConfig { save_dtype: Some(Dtype::F16), ..config(Arc::new(CrossEntropy), OffPolicy::default()) };
    let refused_at = |place: i64, config: LocalConfig| {
        let backend = LocalBackend::new(config, crate::tiny::model(), large_at(place)).unwrap();
        let request = SaveCheckpoint { run_folder: folder.path().to_owned(), step: 1, ..SaveCheckpoint::default() };
        backend.save_checkpoint(request).wait().unwrap_err()
    };
    assert_beyond_f16(&refused_at(3, in_f16()));
    for shard in [Shard::Parameters, Shard::Optimizer] {
        assert_beyond_f16(&led(2, shard, in_f16, |config| refused_at(3, config)).0);
        let last = crate::tiny::weights(5).flat.numel() as i64 - 1;
        assert_tensor_beyond_f16("model.norm.weight", &led(2, shard, in_f16, |config| refused_at(last, config)).0);
    }
    assert!(checkpoint::named(&folder.path().join(checkpoint::CHECKPOINTS)).unwrap().is_empty());
}

#[test]
fn an_export_in_f16_of_numbers_beyond_it_is_refused_and_one_in_bf16_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    let model = crate::tiny::model();
    save_hf(&from, &model, &large()).unwrap();
    assert_beyond_f16(&export_hf(&from, None, &to, Dtype::F16, None).unwrap_err());
    assert_beyond_f16(&save_hf(&to, &ModelConfig { dtype: Dtype::F16, ..model.clone() }, &large()).unwrap_err());
    export_hf(&from, None, &to, Dtype::Bf16, None).unwrap();
    // Infinities of the folder itself stay.
    let weights = large();
    tch::no_grad(|| drop(weights.flat.narrow(0, 3, 1).fill_(f64::INFINITY)));
    save_hf(&from, &model, &weights).unwrap();
    export_hf(&from, None, &to, Dtype::F16, None).unwrap();
    assert_eq!(load_hf(&to).unwrap().1.flat.double_value(&[3]), f64::INFINITY);
}
