//! Adapters of a mixture's experts and routers, against PEFT (scripts/golden_expert_adapters.py).

use std::path::Path;
use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::Sample;
use rollflow::model::{Decoder, Lora, Packed, Weights, load_adapter, load_hf, save_adapter};
use rollflow::train::{LocalBackend, LocalConfig, TrainingBackend, collate};

/// PEFT's adapters of a mixture's experts, with gate and up as one matrix of twice the rank, and those of its all-linear, which adapts
/// routers, too (scripts/golden_expert_adapters.py).
#[test]
fn adapters_of_mixtures_have_pefts_loss_and_gradient_and_go_through_its_folders() {
    let experts = ["gate_up_proj", "down_proj"];
    compare("expert_adapters", "qwen3_moe", &experts);
    let all = [&experts[..], &["gate.weight"]].concat();
    compare("router_adapters", "olmoe", &all);
    // Of this family it is no experts and routers, but the gate of the expert of every token.
    compare("shared_adapters", "qwen3_5_moe", &[]);
}

fn compare(folder: &str, model: &str, parameters: &[&str]) {
    let (folder, model) = (Path::new("tests/golden").join(folder), Path::new("tests/golden/models").join(model));
    let folder = folder.as_path();
    let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    let rows: Vec<Vec<u32>> = serde_json::from_value(golden["rows"].clone()).unwrap();
    let samples: Vec<Sample> = rows.iter().map(|row| Sample::supervised(&row[..1], &row[1..])).collect();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
    let (config, base) = load_hf(&model).unwrap();
    let adapter = load_adapter(folder, &config).unwrap();
    let expected = golden["gradient_norm"].as_f64().unwrap();
    for (in_4_bits, gradient_checkpointing) in [(false, false), (false, true), (true, true)] {
        let weights = if in_4_bits { base.quantised() } else { base.share() }.under(load_adapter(folder, &config).unwrap());
        let of = |weights: Weights| {
            let settings = LocalConfig {
                gradient_checkpointing,
                max_grad_norm: None,
                ..LocalConfig::new(CrossEntropy, Schedule::constant(0.02))
            };
            let backend = LocalBackend::new(settings, config.clone(), weights).unwrap();
            let loss = backend.forward_backward(batch.clone()).wait().unwrap().loss;
            (loss, backend.optim_step().wait().unwrap().grad_norm)
        };
        let (loss, norm) = of(weights.share());
        let (merged, _) = of(weights.merged());
        assert!((loss - merged).abs() < 1e-5, "merged: {merged}, and {loss} under adapters");
        if !in_4_bits {
            assert!((loss - golden["loss"].as_f64().unwrap()).abs() < 1e-5, "{loss}");
            assert!((norm / expected - 1.0).abs() < 3e-5, "{norm}");
        }
    }
    let saved = tempfile::tempdir().unwrap();
    save_adapter(saved.path(), &adapter).unwrap();
    assert!(load_adapter(saved.path(), &config).unwrap().flat == adapter.flat);
    let settings = |folder: &Path| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join("adapter_config.json")).unwrap()).unwrap()
    };
    let (ours, theirs) = (settings(saved.path()), settings(folder));
    for key in ["r", "rank_pattern"] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    if parameters.is_empty() {
        let all = Lora::new(2, 6.0, &[Lora::ALL]).unwrap().on_model(&config).unwrap();
        return assert_eq!(adapter.lora.targets(), all.targets());
    }
    assert_eq!(ours["alpha_pattern"][r".*\.gate_up_proj"].as_f64(), Some(12.0));
    assert_eq!(ours["target_parameters"], serde_json::json!(parameters));
    // Parts of experts and what is unknown are refused.
    for parameters in
        [serde_json::json!(["down_proj"]), serde_json::json!(["gate.weight", "up_proj"]), serde_json::json!("gate.weight")]
    {
        let mut settings = ours.clone();
        settings["target_parameters"] = parameters;
        std::fs::write(saved.path().join("adapter_config.json"), settings.to_string()).unwrap();
        let refused = load_adapter(saved.path(), &config).unwrap_err().to_string();
        assert!(refused.contains("target_parameters"), "{refused}");
    }
}

#[test]
fn fresh_adapters_of_experts_change_nothing_and_models_without_experts_have_none() {
    let (config, base) = load_hf(Path::new("tests/golden/models/olmoe")).unwrap();
    let decoder = Decoder::new(&config, base.layout.clone());
    let hidden = |weights: &Weights| decoder.hidden(&decoder.views_of(weights), &Packed::new([&[2u32, 5, 3, 9][..], &[7, 7, 1]]));
    let asked = Lora::new(4, 8.0, &[Lora::ALL, Lora::EXPERTS, Lora::ROUTERS]).unwrap().on_model(&config).unwrap();
    let adapted = base.adapted(&config, asked, 7);
    assert!(hidden(&adapted) == hidden(&base));
    let mut moved = adapted.copy();
    let flat = moved.trained_mut();
    *flat = &*flat + crate::tiny::noise(flat, 5) * 0.15;
    assert!((hidden(&moved) - hidden(&base)).abs().max().double_value(&[]) > 1e-2);
    for target in [Lora::EXPERTS, Lora::ROUTERS] {
        let error = Lora::new(4, 8.0, &[target]).unwrap().on_model(&crate::tiny::model()).unwrap_err().to_string();
        assert!(error.contains(&format!("{target} of a")), "{error}");
    }
}
