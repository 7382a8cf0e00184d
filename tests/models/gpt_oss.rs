//! gpt-oss beyond its golden folders: experts in MXFP4 as it is published (scripts/golden_mxfp4.py), sinks over long sequences, adapters.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::Sample;
use rollflow::model::{
    Compute, Dtype, Lora, ModelConfig, Weights, check_folder, load_hf, load_hf_for, load_hf_in_4_bits, save_hf,
};
use rollflow::train::{LocalBackend, LocalConfig, TrainingBackend, collate};
use tch::{Kind, Tensor};

use crate::quantised::{far, logits};

const PUBLISHED: &str = "tests/golden/mxfp4";
const WHOLE: &str = "tests/golden/models/gpt_oss";

#[test]
fn experts_in_mxfp4_become_the_numbers_of_transformers_to_the_bit_and_are_saved_whole() {
    let expected: HashMap<String, Tensor> =
        Tensor::read_safetensors(Path::new(PUBLISHED).join("expected.safetensors")).unwrap().into_iter().collect();
    check_folder(Path::new(PUBLISHED)).unwrap();
    let row: Vec<u32> = Vec::<i64>::try_from(expected["ids"].reshape([-1])).unwrap().into_iter().map(|id| id as u32).collect();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (config, weights) = load_hf_for(Path::new(PUBLISHED), dtype).unwrap();
        assert!(weights.flat.kind() == dtype.kind() && config.dtype == Dtype::Bf16 && !weights.is_quantised());
        let experts: Vec<_> = expected.iter().filter(|(name, _)| name.contains("experts")).collect();
        assert_eq!(experts.len(), 4);
        for (name, numbers) in experts {
            let entry = weights.layout.find(name).unwrap();
            let ours = weights.flat.narrow(0, entry.offset as i64, entry.len() as i64);
            assert!(ours.to_kind(Kind::Float) == numbers.reshape([-1]).to_kind(Kind::Float), "{name}");
        }
    }
    let (config, weights) = load_hf(Path::new(PUBLISHED)).unwrap();
    let largest = expected["logits"].abs().max().double_value(&[]);
    let gap = far(&logits(&config, &weights, &row), &expected["logits"]) / largest;
    assert!(gap < 2e-5, "{gap} of {largest}");
    let saved = tempfile::tempdir().unwrap();
    save_hf(saved.path(), &config, &weights).unwrap();
    let (again, whole) = load_hf(saved.path()).unwrap();
    assert!(again == config && whole.flat == weights.flat);
}

#[test]
fn experts_in_mxfp4_stay_so_under_adapters_and_are_the_same_numbers() {
    let row: Vec<u32> = (0..40).map(|at| (at * 37 + 11) % 380).collect();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let (config, stored) = load_hf_in_4_bits(Path::new(PUBLISHED), dtype).unwrap();
        let (_, widened) = load_hf_for(Path::new(PUBLISHED), dtype).unwrap();
        assert!(stored.is_quantised() && stored.flat.kind() == dtype.kind() && stored.flat.numel() < widened.flat.numel() / 2);
        let merged = stored.merged();
        for entry in widened.layout.entries() {
            let of = |weights: &Weights| weights.flat.narrow(0, entry.offset as i64, entry.len() as i64);
            let is_same = of(&merged) == of(&widened);
            // The attention's matrices are rounded to NF4.
            assert_eq!(is_same, !entry.name.ends_with("_proj.weight"), "{}", entry.name);
        }
        let mut computed = vec![Compute::cpu(dtype)];
        computed.extend(Compute::cuda(0, dtype).check().ok().map(|()| Compute::cuda(0, dtype)));
        for compute in computed {
            let of = |weights: &Weights| logits(&config, &weights.on(compute), &row);
            assert!(of(&stored) == of(&merged), "{compute:?}");
        }
        let adapted = stored.adapted(&config, Lora::new(4, 8.0, &[Lora::ALL]).unwrap().on_model(&config).unwrap(), 1);
        let (first, last) = trained(&config, &adapted);
        assert!(adapted.is_quantised() && last < 0.8 * first, "from {first} to {last}");
    }
}

#[test]
fn experts_in_mxfp4_that_lack_their_scales_are_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(Path::new(PUBLISHED).join("config.json"), folder.path().join("config.json")).unwrap();
    let tensors = Tensor::read_safetensors(Path::new(PUBLISHED).join("model.safetensors")).unwrap();
    let lacking = "model.layers.1.mlp.experts.down_proj_scales";
    let kept: Vec<_> = tensors.into_iter().filter(|(name, _)| name != lacking).collect();
    Tensor::write_safetensors(&kept, folder.path().join("model.safetensors")).unwrap();
    let refused = load_hf(folder.path()).unwrap_err().to_string();
    assert!(refused.contains(&format!("{lacking} is missing")), "{refused}");
}

/// Short sequences are computed by the fused attention, long ones with all scores.
#[test]
fn sinks_take_their_share_in_long_sequences_as_in_short_ones() {
    let (config, weights) = load_hf(Path::new(WHOLE)).unwrap();
    let config = ModelConfig { max_positions: 512, ..config };
    let long: Vec<u32> = (0..300).map(|at| (at * 37 + 11) % 380).collect();
    let (short, whole) = (logits(&config, &weights, &long[..120]), logits(&config, &weights, &long));
    let gap = far(&short, &whole.narrow(0, 0, 120));
    assert!(gap < 1e-4, "{gap}");
    // Control: without them the logits are others.
    let without = weights.copy();
    for entry in without.layout.entries().iter().filter(|entry| entry.name.ends_with(".sinks")) {
        drop(without.flat.narrow(0, entry.offset as i64, entry.len() as i64).fill_(-1e4));
    }
    assert!(far(&short, &logits(&config, &without, &long[..120])) > 0.05);
}

#[test]
fn adapters_go_on_the_attention_and_are_refused_for_experts_and_routers() {
    let (config, weights) = load_hf(Path::new(WHOLE)).unwrap();
    for target in ["experts", "routers"] {
        let refused = Lora::new(4, 8.0, &[target]).unwrap().on_model(&config).unwrap_err().to_string();
        assert!(refused.contains(target) && refused.contains("gpt_oss") && refused.contains("q_proj"), "{refused}");
    }
    let lora = Lora::new(4, 8.0, &[Lora::ALL]).unwrap().on_model(&config).unwrap();
    assert_eq!(lora.targets(), ["q_proj", "k_proj", "v_proj", "o_proj"]);
    let (first, last) = trained(&config, &weights.adapted(&config, lora, 1));
    assert!(last < 0.8 * first, "from {first} to {last}");
}

/// The first loss and that after some steps.
fn trained(config: &ModelConfig, weights: &Weights) -> (f64, f64) {
    let of = LocalConfig { max_grad_norm: None, ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-2)) };
    let trainer = LocalBackend::new(of, config.clone(), weights.share()).unwrap();
    let samples: Vec<Sample> = (1..6u32).map(|of| Sample::supervised(&[of], &[of + 7, of + 9, of + 2])).collect();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
    let loss = || {
        let loss = trainer.forward_backward(batch.clone()).wait().unwrap().loss;
        trainer.optim_step().wait().unwrap();
        loss
    };
    let first = loss();
    (first, (0..20).fold(first, |_, _| loss()))
}
