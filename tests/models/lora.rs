//! Adapters: they begin as the model they adapt, learn exactly what its gradient says of them, leave it alone, and go through checkpoints and
//! folders (laws C1, V1).

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::subsequence;
use rollflow::algo::{Aggregation, BradleyTerry, CrossEntropy, Grpo, Schedule};
use rollflow::data::Sample;
use rollflow::model::{
    Compute, Decoder, Dtype, Layout, Lora, ModelConfig, Packed, Weights, check_folder, load_hf, save_adapter, save_hf, save_hf_as,
};
use rollflow::recipe::load;
use rollflow::train::{
    LocalBackend, LocalConfig, SaveCheckpoint, SftConfig, TrainBatch, TrainingBackend, collate, run_sft_training,
};
use tch::{Device, Kind, Tensor};

fn config() -> LocalConfig {
    LocalConfig { threads: Some(1), ..LocalConfig::new(CrossEntropy, Schedule::constant(0.02)) }
}

fn lora(rank: usize, targets: &[&str]) -> Lora {
    Lora::new(rank, 2.0 * rank as f64, targets).unwrap()
}

fn fresh() -> Weights {
    crate::tiny::weights(1).adapted(&crate::tiny::model(), lora(4, &[Lora::ALL]), 7)
}

/// Adapters that have learned something.
fn learned(lora: Lora) -> Weights {
    moved(crate::tiny::weights(1).adapted(&crate::tiny::model(), lora, 7))
}

fn moved(mut weights: Weights) -> Weights {
    let flat = weights.trained_mut();
    *flat = &*flat + crate::tiny::noise(flat, 5) * 0.15;
    weights
}

fn hidden(weights: &Weights) -> Tensor {
    let decoder = Decoder::new(&crate::tiny::model(), weights.layout.clone());
    decoder.hidden(&decoder.views_of(weights), &Packed::new([&[2u32, 5, 3, 9][..], &[7, 7, 1]]))
}

fn matrix(flat: &Tensor, layout: &Layout, name: &str) -> Tensor {
    let entry = layout.find(name).unwrap_or_else(|| panic!("{name}"));
    let shape: Vec<i64> = entry.shape.iter().map(|size| *size as i64).collect();
    flat.narrow(0, entry.offset as i64, entry.len() as i64).view(shape.as_slice())
}

fn gap(a: &Tensor, b: &Tensor) -> f64 {
    let largest = |of: Tensor| f64::try_from(of.abs().max()).unwrap();
    largest(a - b) / largest(b.copy()).max(1e-3)
}

#[test]
fn a_model_under_fresh_adapters_says_what_it_said_before_to_the_bit() {
    let (base, adapted) = (crate::tiny::weights(1), fresh());
    assert!(hidden(&base) == hidden(&adapted));
    assert!(adapted.merged().flat == base.flat);
    let drawn = |seed| {
        let adapted = crate::tiny::weights(1).adapted(&crate::tiny::model(), lora(4, &["q_proj"]), seed);
        adapted.adapter.unwrap().flat
    };
    assert!(drawn(1) == drawn(1) && drawn(1) != drawn(2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn gradients_of_adapters_are_those_of_the_merged_weights_projected(
        rank in 1usize..6, targets in subsequence(Lora::PROJECTIONS.to_vec(), 1..=7)
    ) {
        let weights = learned(lora(rank, &targets));
        let mut merged = weights.merged();
        let cotangent = Tensor::randn([7, 16], (Kind::Float, Device::Cpu));
        let gradient = |mut weights: Weights| {
            *weights.trained_mut() = weights.trained().1.detach().copy().set_requires_grad(true);
            let (hidden, leaf) = (hidden(&weights), weights.trained().1.shallow_clone());
            let by = Tensor::run_backward(&[(&hidden * &cotangent).sum(Kind::Float)], &[leaf], false, false).swap_remove(0);
            (hidden.detach(), by)
        };
        let adapter = weights.adapter.as_ref().unwrap();
        let (flat, layout) = (adapter.flat.copy(), adapter.layout.clone());
        let (said, ours) = gradient(weights.share());
        let (same, full) = gradient(Weights::new(merged.layout.clone(), std::mem::replace(&mut merged.flat, Tensor::new())));
        prop_assert!(gap(&said, &same) < 1e-5, "what adapters add is what merging adds");
        let scale = 2.0;
        for entry in layout.entries() {
            let name = entry.name.strip_prefix("base_model.model.").unwrap();
            let (projection, _) = name.split_once(".lora_").unwrap();
            let by_weight = matrix(&full, &merged.layout, &format!("{projection}.weight"));
            let other = |side| matrix(&flat, &layout, &format!("base_model.model.{projection}.lora_{side}.weight"));
            let expected = match name.ends_with("lora_A.weight") {
                true => other('B').tr().matmul(&by_weight) * scale,
                false => by_weight.matmul(&other('A').tr()) * scale,
            };
            let found = matrix(&ours, &layout, &entry.name);
            prop_assert!(gap(&found, &expected) < 1e-4, "{}: {}", entry.name, gap(&found, &expected));
        }
    }
}

#[test]
fn training_moves_adapters_alone_and_learns() {
    let weights = fresh();
    let base = weights.flat.copy();
    let backend = LocalBackend::new(LocalConfig { merge: false, ..config() }, crate::tiny::model(), weights.share()).unwrap();
    assert_eq!(backend.state().parameters, weights.trained().0.total());
    let steps = run_sft_training(
        &backend,
        &crate::tiny::counting(),
        &SftConfig { num_steps: 80, batch_size: 10, ..SftConfig::default() },
        |_, _| {},
    )
    .unwrap();
    let loss = |at: usize| steps[at]["loss"];
    assert!(loss(79) < 0.5 * loss(0), "{} {}", loss(0), loss(79));
    let after = backend.snapshot().wait().unwrap().weights.read();
    assert!(after.flat == base && after.flat.data_ptr() == weights.flat.data_ptr(), "a publish shares what is under adapters");
    assert!(after.adapter.unwrap().flat != weights.adapter.unwrap().flat);
}

/// Layers computed anew: the same operations in the same order, so that in f32 not a bit differs; and in bf16, with masters in f32, adapters learn
/// too.
#[test]
fn adapters_learn_the_same_with_layers_computed_anew_and_in_half_precision() {
    let batch = Arc::new(collate(&crate::tiny::counting(), Aggregation::TokenMean).unwrap());
    for targets in [&[Lora::ALL][..], &["q_proj", "v_proj"], &["down_proj"]] {
        let learned = |gradient_checkpointing, dtype| {
            let weights = learned(lora(3, targets));
            let config = LocalConfig { gradient_checkpointing, compute: Compute::cpu(dtype), merge: false, ..config() };
            let backend = LocalBackend::new(config, crate::tiny::model(), weights).unwrap();
            backend.forward_backward(batch.clone()).wait().unwrap();
            let norm = backend.optim_step().wait().unwrap().grad_norm;
            let weights = backend.current().wait().unwrap().weights.read();
            (norm, weights.adapter.unwrap().flat)
        };
        let plain = learned(false, Dtype::F32);
        assert!(learned(true, Dtype::F32) == plain, "{targets:?}");
        let (half, again) = (learned(false, Dtype::Bf16), learned(true, Dtype::Bf16));
        assert!((half.0 - plain.0).abs() < 0.05 * plain.0, "{targets:?}: {} {}", half.0, plain.0);
        assert!(half == again && half.1.kind() == Kind::Float, "{targets:?}");
    }
}

/// Qwen3.5's delta nets have no `q_proj`, so that three of these four layers have no adapters.
#[test]
fn adapters_of_some_layers_learn_the_same_with_layers_computed_again_and_over_4_bits() {
    let (model, weights) = load_hf(Path::new("tests/golden/models/qwen3_5_text")).unwrap();
    let samples: Vec<Sample> = (2..6).map(|n| Sample::supervised(&[n], &[n + 1, n + 2, n + 3])).collect();
    let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
    let learned = |base: &Weights, gradient_checkpointing| {
        let adapted = moved(base.adapted(&model, lora(3, &["q_proj"]), 7));
        // An update by what is nearly the gradient.
        let adamw = rollflow::train::AdamW { beta1: 0.0, beta2: 0.0, epsilon: 1e6, ..Default::default() };
        let of = LocalConfig { gradient_checkpointing, adamw, max_grad_norm: None, merge: false, ..config() };
        let backend = LocalBackend::new(LocalConfig { schedule: Schedule::constant(1e6), ..of }, model.clone(), adapted).unwrap();
        let loss = backend.forward_backward(batch.clone()).wait().unwrap().loss;
        let norm = backend.optim_step().wait().unwrap().grad_norm;
        (loss, norm, backend.current().wait().unwrap().weights.read().adapter.unwrap().flat)
    };
    let assert_same = |what: &str, found: (f64, f64, Tensor), expected: (f64, f64, Tensor), within: f64| {
        assert!((found.0 - expected.0).abs() < within && expected.1 > 1e-4, "{what}: {found:?} {expected:?}");
        assert!((found.1 / expected.1 - 1.0).abs() < within, "{what}: norm {} and {}", found.1, expected.1);
        assert!(gap(&found.2, &expected.2) < within, "{what}: {}", gap(&found.2, &expected.2));
    };
    assert_same("computed again", learned(&weights, true), learned(&weights, false), 1e-5);
    let stored = weights.quantised();
    assert_same("over 4 bits", learned(&stored, false), learned(&stored.merged(), false), 1e-3);
}

/// A reward model under fresh adapters, over a language model.
fn judge() -> Weights {
    let config = crate::tiny::model();
    crate::tiny::weights(1).scoring(&config, Some(3)).adapted(&config.scoring(), lora(4, &[Lora::ALL]), 7)
}

/// Pairs of which the one that ends higher is better.
fn pairs() -> Arc<TrainBatch> {
    let asking = |of: &[u32], index| {
        let tokens = [of, &[0]].concat();
        let loss_mask = [vec![0.0; of.len()], vec![1.0]].concat();
        Sample { tokens, loss_mask, group_index: u64::from(of[0]), index, ..Sample::default() }
    };
    let samples: Vec<Sample> = (2..8).flat_map(|n| [asking(&[n, 5, n + 6], 0), asking(&[n, 5, n - 1], 1)]).collect();
    Arc::new(TrainBatch { pairs: true, ..collate(&samples, Aggregation::TokenMean).unwrap() })
}

fn of_judge(config: LocalConfig, weights: &Weights) -> LocalBackend {
    LocalBackend::new(config, crate::tiny::model().scoring(), weights.share()).unwrap()
}

fn judging() -> LocalConfig {
    LocalConfig { threads: Some(1), merge: false, ..LocalConfig::new(BradleyTerry::default(), Schedule::constant(0.02)) }
}

#[test]
fn a_reward_model_learns_by_adapters_and_its_head_and_its_trunk_stays_as_it_is() {
    let learned = |gradient_checkpointing| {
        let (weights, batch) = (judge(), pairs());
        let base = weights.flat.copy();
        let backend = of_judge(LocalConfig { gradient_checkpointing, ..judging() }, &weights);
        let mut losses = Vec::new();
        for _ in 0..30 {
            losses.push(backend.forward_backward(batch.clone()).wait().unwrap().loss);
            backend.optim_step().wait().unwrap();
        }
        assert!(losses[29] < 0.3 * losses[0], "{losses:?}");
        let after = backend.current().wait().unwrap().weights.read();
        assert!(after.flat == base, "the trunk stays as it was, to the bit");
        for entry in weights.trained().0.entries() {
            let of = |weights: &Weights| matrix(weights.trained().1, weights.trained().0, &entry.name);
            assert!(of(&weights) != of(&after), "{} does not learn", entry.name);
        }
        after.adapter.unwrap().flat
    };
    assert!(learned(false) == learned(true), "with layers computed anew");
}

/// Adapters that add nothing yet leave the hidden states as they are.
#[test]
fn a_head_beside_adapters_gets_the_gradient_of_a_head_that_is_trained_with_all_weights() {
    let (adapted, batch) = (judge(), pairs());
    let config = || LocalConfig {
        adamw: rollflow::train::AdamW { beta1: 0.0, beta2: 0.0, epsilon: 1e6, ..Default::default() },
        max_grad_norm: None,
        schedule: Schedule::constant(1e6),
        ..judging()
    };
    let moved = |weights: &Weights, name: &str| {
        let backend = of_judge(config(), weights);
        backend.forward_backward(batch.clone()).wait().unwrap();
        backend.optim_step().wait().unwrap();
        let after = backend.current().wait().unwrap().weights.read();
        let of = |weights: &Weights| matrix(weights.trained().1, weights.trained().0, name).copy();
        of(&after) - of(weights)
    };
    let whole = moved(&adapted.merged(), "score.weight");
    assert!(whole.abs().max().double_value(&[]) > 1e-4);
    assert!(moved(&adapted, "base_model.model.score.weight") == whole);
}

#[test]
fn adapters_of_a_reward_model_are_written_as_peft_writes_those_of_a_classifier_and_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let (base, saved, config) = (folder.path().join("base"), folder.path().join("saved"), crate::tiny::model());
    save_hf(&base, &config, &crate::tiny::weights(1)).unwrap();
    let backend = of_judge(judging(), &{
        let mut lora = lora(4, &[Lora::ALL]);
        lora.base = Some(base.clone());
        crate::tiny::weights(1).scoring(&config, Some(3)).adapted(&config.scoring(), lora, 7)
    });
    backend.forward_backward(pairs()).wait().unwrap();
    backend.optim_step().wait().unwrap();
    let learned = backend.current().wait().unwrap().weights.read();
    save_hf(&saved, &config.scoring(), &learned).unwrap();
    let written: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(saved.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&written["task_type"], &written["modules_to_save"][1]), (&"SEQ_CLS".into(), &"score".into()));

    // Of a language model they make a classifier.
    let (read, weights) = load_hf(&saved).unwrap();
    assert!(read.scores && check_folder(&saved).unwrap().scores);
    assert!(weights.adapter.as_ref().unwrap().flat == learned.adapter.as_ref().unwrap().flat);
    assert!(weights.merged().flat == learned.merged().flat);

    // Without their head they are not those of a classifier.
    let without = |key: &str, value: serde_json::Value| {
        let mut config = written.clone();
        config[key] = value;
        std::fs::write(saved.join("adapter_config.json"), config.to_string()).unwrap();
        load_hf(&saved).unwrap_err().to_string()
    };
    for error in [without("modules_to_save", serde_json::Value::Null), without("task_type", "CAUSAL_LM".into())] {
        assert!(error.contains("modules_to_save"), "{error}");
    }
    assert!(without("modules_to_save", serde_json::json!(["score", "embed_tokens"])).contains("embed_tokens"));
}

/// What is published, merged or not, makes the same policy.
#[test]
fn adapters_are_published_merged_or_by_themselves() {
    let snapshot = |merge| {
        let backend = LocalBackend::new(
            LocalConfig { merge, ..config() },
            crate::tiny::model(),
            learned(lora(2, &["v_proj", "down_proj"])),
        );
        let backend = backend.unwrap();
        let mut samples = crate::tiny::rollouts(&[(2, 3), (1, 5)], 3);
        samples.iter_mut().for_each(|sample| sample.advantage = Some(1.0));
        let algorithm = Some(Arc::new(rollflow::train::Algorithm::new(Grpo::default())));
        let batch = TrainBatch { algorithm, ..collate(&samples, Aggregation::TokenMean).unwrap() };
        backend.forward_backward(Arc::new(batch)).wait().unwrap();
        backend.optim_step().wait().unwrap();
        let snapshot = backend.snapshot().wait().unwrap();
        assert_eq!(snapshot.version, 1, "law V1");
        snapshot.weights.read()
    };
    let (whole, apart) = (snapshot(true), snapshot(false));
    assert!(whole.adapter.is_none() && whole.flat == apart.merged().flat);
    assert!(gap(&hidden(&whole), &hidden(&apart)) < 1e-5);
}

#[test]
fn a_checkpoint_holds_adapters_alone_and_training_goes_on_from_it_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base");
    save_hf(&base, &crate::tiny::model(), &crate::tiny::weights(1)).unwrap();
    let backend = |rank, alpha| {
        let mut lora = Lora::new(rank, alpha, &[Lora::ALL]).unwrap();
        lora.base = Some(base.clone());
        let weights = crate::tiny::weights(1).adapted(&crate::tiny::model(), lora, 7);
        LocalBackend::new(LocalConfig { merge: false, ..config() }, crate::tiny::model(), weights).unwrap()
    };
    let step = |backend: &LocalBackend| {
        backend.forward_backward(Arc::new(collate(&crate::tiny::counting(), Aggregation::TokenMean).unwrap())).wait().unwrap();
        backend.optim_step().wait().unwrap();
    };
    let adapters = |backend: &LocalBackend| backend.current().wait().unwrap().weights.read().adapter.unwrap().flat;
    let first = backend(4, 8.0);
    (0..3).for_each(|_| step(&first));
    let save = SaveCheckpoint { run_folder: folder.path().to_owned(), step: 3, ..SaveCheckpoint::default() };
    let saved = first.save_checkpoint(save).wait().unwrap();
    assert!(saved.join("adapter_model.safetensors").exists() && !saved.join("model.safetensors").exists());

    let resumed = backend(4, 8.0);
    resumed.load_checkpoint(&saved).wait().unwrap();
    (0..2).for_each(|_| step(&first));
    (0..2).for_each(|_| step(&resumed));
    assert!(adapters(&first) == adapters(&resumed), "law C1");

    let refused = backend(4, 9.0).load_checkpoint(&saved).wait().unwrap_err().to_string();
    assert!(refused.contains("alpha 8") && refused.contains("alpha 9"), "{refused}");
    // As a model by itself: what the base says, and what was learned.
    let (config, weights) = load_hf(&saved).unwrap();
    assert_eq!(config, crate::tiny::model());
    assert!(weights.flat == crate::tiny::weights(1).flat && weights.adapter.is_some());
    std::fs::remove_dir_all(&base).unwrap();
    let lost = load_hf(&saved).unwrap_err().to_string();
    assert!(
        lost.contains("rollflow export") && lost.contains("--base FOLDER") && lost.contains(&base.display().to_string()),
        "{lost}"
    );
}

#[test]
fn adapters_have_the_names_and_shapes_that_peft_gives_them() {
    let folder = tempfile::tempdir().unwrap();
    save_adapter(folder.path(), learned(lora(3, &["down_proj", "q_proj"])).adapter.as_ref().unwrap()).unwrap();
    let bytes = std::fs::read(folder.path().join("adapter_model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let shape = |name: &str| file.tensor(&format!("base_model.model.model.layers.1.{name}.weight")).unwrap().shape().to_vec();
    assert_eq!(file.len(), 2 * 2 * 2);
    assert_eq!([shape("self_attn.q_proj.lora_A"), shape("self_attn.q_proj.lora_B")], [[3, 16], [16, 3]]);
    assert_eq!([shape("mlp.down_proj.lora_A"), shape("mlp.down_proj.lora_B")], [[3, 32], [16, 3]]);
    let config: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(config["target_modules"], serde_json::json!(["q_proj", "down_proj"]));
    assert_eq!((&config["r"], &config["lora_alpha"]), (&3.into(), &6.0.into()));
}

/// Phi-3: what its folders hold as one tensor is adapted as one, as PEFT does.
#[test]
fn joint_projections_are_adapted_as_one() {
    let config = serde_json::json!({
        "model_type": "phi3", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
        "tie_word_embeddings": true, "rope_theta": 10000.0,
    });
    let config = ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap()).unwrap();
    let base = Weights::random(&config, 3);
    let decoder = Decoder::new(&config, base.layout.clone());
    let hidden = |weights: &Weights| decoder.hidden(&decoder.views_of(weights), &Packed::new([&[2u32, 5, 3, 9][..], &[7, 7, 1]]));
    for targets in [&[Lora::ALL][..], &["qkv_proj"], &["down_proj", "gate_up_proj"]] {
        let lora = lora(3, targets).on_model(&config).unwrap();
        let adapted = moved(base.adapted(&config, lora, 7));
        assert!(gap(&hidden(&adapted), &hidden(&base)) > 1e-2, "{targets:?}: it says something else");
        assert!(gap(&hidden(&adapted), &hidden(&adapted.merged())) < 1e-5, "{targets:?}");

        let folder = tempfile::tempdir().unwrap();
        let adapter = adapted.adapter.as_ref().unwrap();
        save_adapter(folder.path(), adapter).unwrap();
        let again = rollflow::model::load_adapter(folder.path(), &config).unwrap();
        assert!(again.flat == adapter.flat && again.lora.targets() == adapter.lora.targets());
        let bytes = std::fs::read(folder.path().join("adapter_model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let shape = |name: &str| {
            file.tensor(&format!("base_model.model.model.layers.1.{name}.weight")).ok().map(|of| of.shape().to_vec())
        };
        if adapter.lora.targets().contains(&"qkv_proj") {
            assert_eq!(
                [shape("self_attn.qkv_proj.lora_A"), shape("self_attn.qkv_proj.lora_B")],
                [Some(vec![3, 16]), Some(vec![32, 3])]
            );
        } else {
            assert_eq!(
                [shape("mlp.gate_up_proj.lora_A"), shape("mlp.gate_up_proj.lora_B")],
                [Some(vec![3, 16]), Some(vec![48, 3])]
            );
        }
    }
    let refused = lora(3, &["q_proj"]).on_model(&config).unwrap_err().to_string();
    assert!(
        refused.contains("q_proj of a phi3 model") && refused.contains("qkv_proj, o_proj, gate_up_proj, down_proj"),
        "{refused}"
    );
    assert!(lora(3, &["qkv_proj"]).on_model(&crate::tiny::model()).is_err());
}

/// Every golden folder: adapters of all projections, applied in passing and merged into the weights.
#[test]
fn adapters_of_every_family_are_those_that_merging_them_gives() {
    let _guard = tch::no_grad_guard();
    for entry in std::fs::read_dir("tests/golden/models").unwrap().map(|entry| entry.unwrap().path()) {
        let Some(name) = entry.is_dir().then(|| entry.file_name().unwrap().to_owned()) else { continue };
        let (config, weights) = load_hf(&entry).unwrap();
        let adapted = moved(weights.adapted(&config, lora(3, &[Lora::ALL]), 7));
        let packed = Packed::new([&[2u32, 5, 3, 9][..], &[7, 7, 1]]);
        let hidden = |weights: &Weights| {
            let decoder = Decoder::new(&config, weights.layout.clone());
            decoder.hidden(&decoder.views_of(weights), &packed)
        };
        let found = hidden(&adapted);
        assert!(gap(&found, &hidden(&weights)) > 1e-3, "{name:?}: they change the model");
        assert!(gap(&found, &hidden(&adapted.merged())) < 1e-4, "{name:?}");
        let (layout, folder) = (adapted.trained().0, tempfile::tempdir().unwrap());
        for layer in config.delta.iter().flat_map(|of| &of.layers) {
            let name = format!("base_model.model.model.layers.{layer}.linear_attn.in_proj_qkv.lora_A.weight");
            assert!(layout.find(&name).is_some(), "{name}");
        }
        save_adapter(folder.path(), adapted.adapter.as_ref().unwrap()).unwrap();
    }
}

#[test]
fn a_recipe_whose_adapters_have_no_place_in_its_model_is_refused_before_it_runs() {
    let recipe = |target: &str| {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/models/phi3");
        let text = format!(
            "pipeline = 'grpo'\nmodel = {{ kind = 'folder', path = '{model}' }}\ntask.kind = 'arithmetic'\nlora.targets = ['{target}']\n\
             generate.max_new_tokens = 8\n"
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        load(file.path(), &[])
    };
    let refused = recipe("q_proj").unwrap_err().to_string();
    assert!(refused.contains(":4:") && refused.contains("q_proj of a phi3 model"), "{refused}");
    assert!(recipe("qkv_proj").is_ok());
}

#[test]
fn a_model_is_exported_in_other_precisions_and_in_shards() {
    let folder = tempfile::tempdir().unwrap();
    let (config, weights) = (crate::tiny::model(), learned(lora(4, &[Lora::ALL])));
    let loaded = |name: &str, dtype: Dtype, max_shard: Option<u64>| {
        let path = folder.path().join(name);
        save_hf_as(&path, &config, &weights, dtype, max_shard).unwrap();
        let (config, weights) = load_hf(&path).unwrap();
        assert_eq!(config, ModelConfig { dtype, ..crate::tiny::model() });
        (path, weights.flat)
    };
    let merged = weights.merged().flat;
    let shards = |path: &Path| {
        let names = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".safetensors")).count()
    };
    let (whole, flat) = loaded("whole", Dtype::F32, None);
    assert!(flat == merged && shards(&whole) == 1);
    let (cut, flat) = loaded("cut", Dtype::F32, Some(8000));
    assert!(flat == merged && shards(&cut) > 2 && cut.join("model.safetensors.index.json").exists());
    for (dtype, kind) in [(Dtype::Bf16, Kind::BFloat16), (Dtype::F16, Kind::Half)] {
        let (path, flat) = loaded(&format!("{dtype:?}"), dtype, Some(4000));
        assert!(flat == merged.to_kind(kind).to_kind(Kind::Float) && shards(&path) > 2);
    }
}
