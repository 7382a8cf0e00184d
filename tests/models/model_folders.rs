//! A folder that can't be loaded says which key, which tensor, and all of them at once.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rollflow::model::{self, ModelConfig, ModelError, Weights, load_hf, load_hf_for, load_hf_in_4_bits, save_hf};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

/// A copy of a small model, to be damaged.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn copy_of(model: &str) -> Folder {
        // Tests run side by side, and teams of threads on the same cores spin against each other.
        tch::set_num_threads(1);
        let folder = Folder(tempfile::tempdir().unwrap());
        for entry in fs::read_dir(Path::new("tests/golden/models").join(model)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::write(folder.0.path().join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
            }
        }
        folder
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn config(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path("config.json")).unwrap()).unwrap()
    }

    /// Sets a key of `config.json`, or removes it.
    pub fn set(&self, key: &str, value: Option<Value>) -> &Self {
        let mut config = self.config();
        let object = config.as_object_mut().unwrap();
        match value {
            Some(value) => object.insert(key.into(), value),
            None => object.remove(key),
        };
        fs::write(self.path("config.json"), config.to_string()).unwrap();
        self
    }

    /// Rewrites `model.safetensors` as `change` leaves it.
    fn tensors(&self, change: impl FnOnce(&mut HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>)) {
        let bytes = fs::read(self.path("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut tensors: HashMap<_, _> = file
            .iter()
            .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
            .collect();
        change(&mut tensors);
        let views =
            tensors.iter().map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
        fs::write(self.path("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    pub fn load(&self) -> Result<(ModelConfig, Weights), ModelError> {
        load_hf(self.0.path())
    }

    fn error(&self) -> String {
        self.load().expect_err("the folder is refused").to_string()
    }
}

#[track_caller]
fn assert_names(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{error:?} doesn't say {part:?}");
    }
}

#[test]
fn a_key_that_is_missing_mistyped_or_unsupported_is_named_with_its_file() {
    for (key, value, parts) in [
        ("model_type", Some(json!("gpt2")), &["`model_type` = \"gpt2\" is not supported", "llama, qwen2, qwen3, mistral"][..]),
        ("model_type", None, &["`model_type` is missing"]),
        ("hidden_size", None, &["`hidden_size` is missing", "llama"]),
        ("hidden_size", Some(json!("64")), &["`hidden_size` is \"64\"; expected a whole number from 1 to 1048576"]),
        ("num_hidden_layers", Some(json!(0)), &["`num_hidden_layers` is 0"]),
        ("num_attention_heads", Some(json!(3)), &["`num_key_value_heads` is 2; expected a divisor"]),
        ("head_dim", Some(json!(31)), &["`head_dim` is 31"]),
        ("hidden_act", Some(json!("gelu")), &["`hidden_act` = \"gelu\" is not supported"]),
        ("eos_token_id", Some(json!(384)), &["`eos_token_id` is 384; expected an id below vocab_size"]),
        ("eos_token_id", Some(json!(["a"])), &["`eos_token_id` is [\"a\"]"]),
        (
            "rope_parameters",
            Some(json!({"rope_type": "proportional", "factor": 4})),
            &["`rope_type` = \"proportional\" is not supported"],
        ),
        ("partial_rotary_factor", Some(json!(0.75)), &["`partial_rotary_factor` = 0.75 is not supported"]),
        ("rope_parameters", Some(json!({"rope_type": "linear"})), &["`factor` is missing"]),
        ("rope_parameters", Some(json!({"rope_type": "longrope", "long_factor": [1.0]})), &["`short_factor` is missing"]),
        (
            "rope_parameters",
            Some(json!({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]})),
            &["as many numbers in short_factor and long_factor"],
        ),
        ("quantization_config", Some(json!({"bits": 4})), &["`quantization_config`", "in 4 bits by bitsandbytes"]),
    ] {
        let folder = Folder::copy_of("llama_tied");
        folder.set(key, value);
        assert_names(&folder.error(), parts);
        assert_names(&folder.error(), &["config.json"]);
    }
}

#[test]
fn windows_that_contradict_the_configuration_are_refused() {
    let folder = Folder::copy_of("llama_tied");
    folder.set("sliding_window", Some(json!(0)));
    assert_names(&folder.error(), &["`sliding_window`", "a positive integer"]);
    folder.set("sliding_window", None).set("layer_types", Some(json!("full_attention")));
    assert_names(&folder.error(), &["`layer_types`", "a list of strings"]);
    let folder = Folder::copy_of("qwen2_tied");
    folder.set("layer_types", Some(json!(["full_attention"])));
    assert_names(&folder.error(), &["`layer_types`", "one entry for each"]);
    folder.set("layer_types", Some(json!(vec!["sliding_attention"; 3])));
    assert_names(&folder.error(), &["`layer_types`", "use_sliding_window"]);
    folder.set("use_sliding_window", Some(json!(true))).set("sliding_window", Some(json!(4)));
    assert_eq!(folder.load().unwrap().0.windows, [Some(4); 3]);
    folder.set("layer_types", None).set("max_window_layers", Some(json!(2)));
    assert_eq!(folder.load().unwrap().0.windows, [None, None, Some(4)], "the first max_window_layers see everything");
}

#[test]
fn missing_unexpected_and_misshapen_tensors_are_all_listed_at_once() {
    let folder = Folder::copy_of("qwen3_tied");
    folder.tensors(|tensors| {
        tensors.remove("model.norm.weight");
        let moved = tensors.remove("model.layers.1.mlp.up_proj.weight").unwrap();
        tensors.insert("model.layers.7.mlp.up_proj.weight".into(), moved);
        tensors.get_mut("model.layers.0.self_attn.q_proj.weight").unwrap().1 = vec![64, 128];
        tensors.get_mut("model.layers.0.self_attn.k_norm.weight").unwrap().0 = Dtype::I32;
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    // A buffer that is always recomputed is not unexpected.
    let error = folder.error();
    let expected = [
        "  missing (2): model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "  unexpected (1): model.layers.7.mlp.up_proj.weight",
        "  unusable (2): model.layers.0.self_attn.q_proj.weight: shape [64, 128], expected [128, 64], \
         model.layers.0.self_attn.k_norm.weight: dtype I32, expected F32, F16 or BF16",
    ];
    assert!(error.lines().skip(1).eq(expected), "{error}");
}

#[test]
fn a_tied_head_may_be_there_if_it_is_the_embedding() {
    let folder = Folder::copy_of("llama_tied");
    folder.tensors(|tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".into(), embedding);
    });
    folder.load().unwrap();
    folder.tensors(|tensors| tensors.get_mut("lm_head.weight").unwrap().2[0] ^= 1);
    assert_names(&folder.error(), &["lm_head.weight", "tie_word_embeddings"]);
}

#[test]
fn a_shard_that_is_absent_or_damaged_is_named() {
    let folder = Folder::copy_of("qwen2_untied_sharded");
    folder.load().unwrap();
    let shard = folder.path("model-00003-of-00007.safetensors");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    assert_names(&folder.error(), &["model-00003-of-00007.safetensors", "not a readable safetensors file"]);
    fs::remove_file(&shard).unwrap();
    let error = folder.load().unwrap_err();
    assert_names(&error.to_string(), &["model-00003-of-00007.safetensors", "No such file"]);
    assert!(std::error::Error::source(&error).is_none(), "a chain of causes would repeat the message: {error}");
}

#[test]
fn a_folder_without_safetensors_is_refused_with_the_remedy_for_pickled_weights() {
    let folder = Folder::copy_of("llama_tied");
    fs::remove_file(folder.path("model.safetensors")).unwrap();
    fs::write(folder.path("training_args.bin"), "").unwrap();
    assert!(folder.error().ends_with(": it has no model.safetensors and no index"), "{}", folder.error());
    fs::write(folder.path("pytorch_model.bin"), "").unwrap();
    for error in [folder.load().unwrap_err(), model::check_folder(folder.0.path()).unwrap_err()] {
        assert!(matches!(error, ModelError::Malformed(..)), "{error:?}");
        assert_names(&error.to_string(), &["has no model.safetensors and no index", "pickled", "safe_serialization=True"]);
    }
}

#[test]
fn half_precision_weights_are_read_as_they_are() {
    let original = Folder::copy_of("mistral_swa").load().unwrap().1.flat;
    let exact: Vec<f32> = Vec::try_from(&original).unwrap();
    for (dtype, kind) in [(Dtype::F16, Kind::Half), (Dtype::BF16, Kind::BFloat16)] {
        let folder = Folder::copy_of("mistral_swa");
        folder.tensors(|tensors| {
            for (to, _, data) in tensors.values_mut() {
                let numbers = data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
                *data = match dtype {
                    Dtype::F16 => numbers.flat_map(|number| f16::from_f32(number).to_le_bytes()).collect(),
                    _ => numbers.flat_map(|number| bf16::from_f32(number).to_le_bytes()).collect(),
                };
                *to = dtype;
            }
        });
        let expected = Tensor::from_slice(&exact).to_kind(kind);
        let loaded = folder.load().unwrap().1;
        assert!(loaded.flat.kind() == Kind::Float && loaded.flat == expected.to_kind(Kind::Float), "{dtype:?}");
        // To be computed with in its own format it is kept; in another, nothing of it may be lost.
        let ours = if dtype == Dtype::F16 { model::Dtype::F16 } else { model::Dtype::Bf16 };
        for computed in model::Dtype::ALL.iter().copied() {
            let kept = if computed == ours { kind } else { Kind::Float };
            let (config, weights) = load_hf_for(folder.0.path(), computed).unwrap();
            assert!(config.dtype == ours && weights.flat.kind() == kept, "{dtype:?} for {computed:?}");
            assert!(weights.flat.to_kind(Kind::Float) == loaded.flat, "{dtype:?} for {computed:?}");
        }
    }
}

/// Of a folder in half precision no number is lost or gained by loading and saving it, whatever its parameters are computed in.
#[test]
fn a_folder_is_saved_in_its_own_precision() {
    for dtype in [model::Dtype::F16, model::Dtype::Bf16] {
        let (config, weights) = Folder::copy_of("mistral_swa").load().unwrap();
        let (half, again) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        save_hf(half.path(), &ModelConfig { dtype, ..config }, &weights).unwrap();
        let (config, rounded) = load_hf(half.path()).unwrap();
        assert_eq!(config.dtype, dtype);
        assert!(rounded.flat == weights.flat.to_kind(dtype.kind()).to_kind(tch::Kind::Float) && rounded.flat != weights.flat);
        save_hf(again.path(), &config, &rounded).unwrap();
        for file in ["model.safetensors", "config.json"] {
            assert_eq!(fs::read(half.path().join(file)).unwrap(), fs::read(again.path().join(file)).unwrap(), "{file}");
        }
    }
}

#[test]
fn fresh_weights_depend_on_the_seed_alone() {
    let config = Folder::copy_of("qwen2_untied_sharded").load().unwrap().0;
    let [first, again, other] = [1, 1, 2].map(|seed| Weights::random(&config, seed));
    assert!(first.flat == again.flat && first.flat != other.flat);
    for entry in first.layout.entries() {
        let part = first.flat.narrow(0, entry.offset as i64, entry.len() as i64);
        let (mean, deviation) = (part.mean(None).double_value(&[]), part.std(false).double_value(&[]));
        let expected = match entry.name.as_str() {
            name if name.ends_with("norm.weight") => (1.0, 0.0),
            name if name.ends_with(".bias") => (0.0, 0.0),
            _ => (0.0, config.initializer_range),
        };
        assert!(
            (mean - expected.0).abs() < 0.02 && (deviation - expected.1).abs() < 0.02,
            "{}: {mean} ± {deviation}",
            entry.name
        );
    }
}

/// Numbers of all kinds where a size belongs.
fn hostile_number() -> impl proptest::strategy::Strategy<Value = Option<Value>> {
    use proptest::prelude::*;
    let sizes = [0, 1, 2, 7, 1 << 16, (1 << 20) + 1, 1_000_000, 1_000_000_000, 1 << 31, 1 << 32, (1 << 63) - 1, u64::MAX];
    let odd = [json!(-1), json!(1.5), json!(1e300), json!("64"), json!([]), json!({}), json!(true), Value::Null];
    prop_oneof![
        prop::sample::select(sizes.map(|size: u64| Some(json!(size))).to_vec()),
        prop::sample::select(odd.map(Some).to_vec()),
        Just(None),
        any::<u64>().prop_map(|size| Some(json!(size))),
    ]
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(200))]

    /// What the headers of its files do not confirm is an error before anything of that size is allocated.
    #[test]
    fn no_number_in_a_configuration_panics_or_is_trusted(
        key in proptest::sample::select(vec![
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "max_position_embeddings", "sliding_window", "max_window_layers", "rope_theta", "rms_norm_eps", "eos_token_id",
        ]),
        number in hostile_number(),
    ) {
        let folder = Folder::copy_of("qwen2_tied");
        let before = folder.config()[key].clone();
        folder.set(key, number.clone());
        let checked = model::check_folder(folder.0.path());
        let sizes = !["max_position_embeddings", "sliding_window", "max_window_layers", "rope_theta", "rms_norm_eps", "eos_token_id"].contains(&key);
        let changed = number.unwrap_or(Value::Null) != before;
        let may_be_derived = ["head_dim", "num_attention_heads", "num_key_value_heads"].contains(&key);
        if let Ok(config) = checked {
            proptest::prop_assert!(!(sizes && changed) || may_be_derived, "{key} was trusted: {config:?}");
        }
        // Loading says the same, and no more of it.
        let loaded = load_hf(folder.0.path());
        proptest::prop_assert_eq!(loaded.is_ok(), model::check_folder(folder.0.path()).is_ok());
    }
}

#[test]
fn a_header_that_is_longer_than_its_file_is_an_error() {
    let folder = Folder::copy_of("qwen2_tied");
    for header in [u64::MAX, 1 << 40, 100_000_001] {
        let mut bytes = fs::read(folder.path("model.safetensors")).unwrap();
        bytes[..8].copy_from_slice(&header.to_le_bytes());
        fs::write(folder.path("model.safetensors"), bytes).unwrap();
        let error = model::check_folder(folder.0.path()).unwrap_err();
        assert!(error.to_string().contains("not a readable safetensors file"), "{error}");
    }
}

/// Published folders of Gemma 3 and Qwen3.5 also see images; their language model is the whole model here.
#[test]
fn the_language_model_of_a_folder_that_also_sees_images_is_that_of_a_folder_of_text() {
    let image = (Dtype::F32, vec![2], vec![0; 8]);
    for (model, outer, prefix, images) in [
        ("gemma3", "gemma3", "language_model.model.", "vision_tower.embeddings.weight"),
        ("qwen3_5_text", "qwen3_5", "model.language_model.", "model.visual.patch_embed.weight"),
        ("qwen3_5_moe", "qwen3_5_moe", "model.language_model.", "model.visual.patch_embed.weight"),
    ] {
        let (plain, folder) = (Folder::copy_of(model), Folder::copy_of(model));
        let mut text = plain.config();
        let tied = text.as_object_mut().unwrap().remove("tie_word_embeddings").unwrap();
        text.as_object_mut().unwrap().remove("architectures");
        let whole = json!({"model_type": outer, "architectures": ["ForConditionalGeneration"], "text_config": text,
            "vision_config": {"hidden_size": 16}, "tie_word_embeddings": tied});
        fs::write(folder.path("config.json"), whole.to_string()).unwrap();
        folder.tensors(|tensors| {
            let renamed = |(name, tensor): (String, _)| (name.replacen("model.", prefix, 1), tensor);
            *tensors = std::mem::take(tensors).into_iter().map(renamed).collect();
            tensors.insert(images.to_owned(), image.clone());
            tensors.insert("mtp.norm.weight".to_owned(), image.clone());
        });
        let ((config, weights), (expected, plain_weights)) = (folder.load().unwrap(), plain.load().unwrap());
        assert!(weights.flat == plain_weights.flat, "{model}");
        assert_eq!((config.family, config.tied, config.windows), (expected.family, expected.tied, expected.windows.clone()));
        let saved = tempfile::tempdir().unwrap();
        save_hf(saved.path(), &folder.load().unwrap().0, &weights).unwrap();
        assert!(load_hf(saved.path()).unwrap().1.flat == weights.flat, "it is saved as a folder of text");
        folder.tensors(|tensors| drop(tensors.insert("model.visible.weight".to_owned(), image.clone())));
        assert_names(&folder.error(), &["model.visible.weight"]);
    }
}

/// As published Qwen3.5 with experts has them.
#[test]
fn one_tensor_of_all_experts_is_read_as_one_of_each() {
    let (plain, folder) = (Folder::copy_of("qwen3_5_moe"), Folder::copy_of("qwen3_5_moe"));
    folder.tensors(|tensors| {
        let (config, _) = plain.load().unwrap();
        let experts = config.experts.as_ref().unwrap();
        for layer in 0..config.layers() {
            let module = format!("model.layers.{layer}.mlp.experts");
            for (joint, parts) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])] {
                let (mut numbers, mut shape) = (Vec::new(), Vec::new());
                for (expert, part) in (0..experts.count).flat_map(|expert| parts.iter().map(move |part| (expert, part))) {
                    let (_, of_one, data) = tensors.remove(&format!("{module}.{expert}.{part}.weight")).unwrap();
                    shape = vec![experts.count, parts.len() * of_one[0], of_one[1]];
                    numbers.extend(data);
                }
                tensors.insert(format!("{module}.{joint}"), (Dtype::F32, shape, numbers));
            }
        }
    });
    assert!(folder.load().unwrap().1.flat == plain.load().unwrap().1.flat);
    let [joint, single] =
        [&folder, &plain].map(|folder| load_hf_in_4_bits(folder.0.path(), model::Dtype::F32).unwrap().1.merged());
    assert!(joint.flat == single.flat && joint.flat != plain.load().unwrap().1.flat, "in 4 bits");
    folder.tensors(|tensors| tensors.get_mut("model.layers.1.mlp.experts.down_proj").unwrap().1.swap(1, 2));
    assert_names(&folder.error(), &["model.layers.1.mlp.experts.down_proj"]);
}

#[test]
fn a_few_tensors_in_f32_make_no_folder_of_f32() {
    let folder = Folder::copy_of("qwen3_5_long");
    let halved = |data: &[u8]| -> Vec<u8> {
        let numbers = data.as_chunks::<4>().0.iter().map(|bytes| bf16::from_f32(f32::from_le_bytes(*bytes)));
        numbers.flat_map(bf16::to_le_bytes).collect()
    };
    folder.tensors(|tensors| {
        for (_, (dtype, _, data)) in tensors.iter_mut().filter(|(name, _)| !name.ends_with("A_log")) {
            (*dtype, *data) = (Dtype::BF16, halved(data));
        }
    });
    let (config, weights) = load_hf_for(folder.0.path(), model::Dtype::Bf16).unwrap();
    assert_eq!((config.dtype, weights.flat.kind()), (model::Dtype::Bf16, Kind::Float), "no number of it is rounded");
}
