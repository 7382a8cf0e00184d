//! A configuration is read as transformers reads it, whatever its age, and saved so that it is read so again.

use std::fs;
use std::path::Path;

use rollflow::model::{Activation, Decoder, Dtype, ModelConfig, Packed, RopeScaling, export_hf, save_hf};
use serde_json::{Value, json};

use crate::model_folders::Folder;

#[test]
fn older_and_newer_rope_keys_say_the_same() {
    let llama3 = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let with = |more: Value| {
        let mut object = llama3.clone();
        object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Some(object)
    };
    let newer = Folder::copy_of("llama_tied");
    newer.set("rope_parameters", with(json!({"rope_type": "llama3", "rope_theta": 500000.0})));
    let older = Folder::copy_of("llama_tied");
    older
        .set("rope_parameters", None)
        .set("rope_theta", Some(json!(500000.0)))
        .set("rope_scaling", with(json!({"rope_type": "llama3"})));
    let (config, weights) = newer.load().unwrap();
    assert_eq!(older.load().unwrap().0, config);
    let expected = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 500000.0});
    assert_eq!(config.to_json()["rope_parameters"], expected);

    // What was written is what was read, and the scaling reaches the numbers.
    let dir = tempfile::tempdir().unwrap();
    save_hf(dir.path(), &config, &weights).unwrap();
    assert_eq!(ModelConfig::from_dir(dir.path()).unwrap().rope_scaling, config.rope_scaling);
    let hidden = |config: &ModelConfig| {
        let decoder = Decoder::new(config, weights.layout.clone());
        let ids: Vec<u32> = (0..40).collect();
        decoder.hidden(&decoder.views(&weights.flat), &Packed::new([ids.as_slice()]))
    };
    let plain = ModelConfig { rope_scaling: Default::default(), ..config.clone() };
    assert!(hidden(&config) != hidden(&plain));
}

#[test]
fn rope_scaling_wins_over_rope_parameters_as_in_transformers() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16});
    let folder = Folder::copy_of("llama_tied");
    folder
        .set("rope_parameters", Some(json!({"rope_type": "default", "rope_theta": 7000.0})))
        .set("rope_theta", Some(json!(5000.0)))
        .set("rope_scaling", Some(yarn.clone()));
    let config = folder.load().unwrap().0;
    assert_eq!((config.rope_theta, config.to_json()["rope_scaling"]["factor"].as_f64()), (5000.0, Some(4.0)));
    folder.set("rope_scaling", Some(json!({})));
    assert_eq!(folder.load().unwrap().0.rope_theta, 7000.0, "an empty object says nothing");
    folder.set("rope_scaling", Some(yarn.clone())).set("rope_theta", None);
    let error = folder.load().unwrap_err().to_string();
    assert!(error.contains("rope_scaling") && error.contains("rope_theta"), "{error}");

    let older = Folder::copy_of("olmo3_rotations");
    older.set("rope_parameters", None).set("rope_theta", Some(json!(7000.0)));
    let config = older.load().unwrap().0;
    assert_eq!((config.rope_theta, config.window_rope.unwrap().0), (7000.0, 500_000.0));

    // Where types of layers have rotations of their own, it is that of full attention.
    let folder = Folder::copy_of("olmo3_rotations");
    let before = folder.load().unwrap().0;
    folder.set("rope_scaling", Some(yarn));
    let after = folder.load().unwrap().0;
    assert_eq!((after.rope_theta, &after.window_rope), (before.rope_theta, &before.window_rope));
    assert_eq!(after.to_json()["rope_parameters"]["full_attention"]["rope_type"], "yarn");
}

/// Configurations as publishers wrote them, against the values that transformers' classes give them.
#[test]
fn what_a_configuration_leaves_out_is_what_transformers_takes() {
    let granite = Folder::copy_of("granite");
    granite.set("attention_dropout", Some(json!(0.1)));
    assert_eq!(granite.load().unwrap().0.to_json()["attention_dropout"], 0.1, "dropout is no part of any pass");

    let gemma = Folder::copy_of("gemma");
    gemma.set("hidden_act", Some(json!("gelu"))).set("pad_token_id", None);
    let config = gemma.load().unwrap().0;
    assert_eq!((config.activation, config.pad_token_id), (Activation::GeluTanh, Some(0)));
    gemma.set("pad_token_id", Some(Value::Null));
    assert_eq!(gemma.load().unwrap().0.pad_token_id, None);

    let qwen = Folder::copy_of("qwen2_tied");
    qwen.set("use_sliding_window", Some(json!(true))).set("max_window_layers", Some(json!(1)));
    qwen.set("sliding_window", None).set("layer_types", None);
    assert_eq!(qwen.load().unwrap().0.windows, [None, Some(4096), Some(4096)]);
    qwen.set("sliding_window", Some(Value::Null));
    assert_eq!(qwen.load().unwrap().0.windows, [None; 3]);

    let phi3 = Folder::copy_of("phi3_longrope");
    phi3.set("original_max_position_embeddings", None).set("max_position_embeddings", Some(json!(8192)));
    assert_eq!(phi3.load().unwrap().0.max_positions, 4096, "the number inside is not read");
    let llama = Folder::copy_of("qwen2_yarn");
    llama.set("original_max_position_embeddings", Some(json!(64)));
    assert_eq!(llama.load().unwrap().0.to_json()["rope_parameters"]["original_max_position_embeddings"], 16.0);
}

/// transformers 4 takes three keys of Phi-3's `rope_scaling` and derives the factor of attention; so does 5.
#[test]
fn a_saved_phi3_has_longrope_in_the_form_that_transformers_4_and_5_load() {
    let folder = Folder::copy_of("phi3_longrope");
    let saved_again = || {
        let ((config, weights), dir) = (folder.load().unwrap(), tempfile::tempdir().unwrap());
        save_hf(dir.path(), &config, &weights).unwrap();
        assert_eq!(ModelConfig::from_dir(dir.path()).unwrap(), config);
        config.to_json()
    };
    let json = saved_again();
    let expected = json!({"type": "longrope", "short_factor": [1.0, 1.3, 1.7], "long_factor": [2.0, 4.0, 8.0]});
    assert_eq!((&json["rope_scaling"], &json["original_max_position_embeddings"]), (&expected, &json!(64)));

    // A factor that is not derived is kept, for transformers 5.
    let mut rope = json["rope_parameters"].clone();
    rope["attention_factor"] = json!(1.5);
    folder.set("rope_parameters", Some(rope));
    let json = saved_again();
    let scaling = &json["rope_scaling"];
    assert_eq!((&scaling["rope_type"], &scaling["attention_factor"]), (&json!("longrope"), &json!(1.5)));
    assert_eq!(json["original_max_position_embeddings"], 64);
}

#[test]
fn a_share_of_rotated_columns_is_saved_where_readers_of_stretched_rotations_look() {
    let config = Folder::copy_of("qwen3_5_padded").load().unwrap().0.to_json();
    assert_eq!((&config["partial_rotary_factor"], &config["rope_scaling"]["rope_type"]), (&json!(0.5), &json!("yarn")));
    assert_eq!(config["rope_parameters"]["partial_rotary_factor"], 0.5);
}

#[test]
fn ids_of_the_end_may_be_one_or_many_and_generation_config_wins() {
    let folder = Folder::copy_of("llama_tied");
    folder.set("eos_token_id", Some(json!([5, 6])));
    assert_eq!(folder.load().unwrap().0.eos_token_ids, [5, 6]);
    fs::write(folder.path("generation_config.json"), r#"{"eos_token_id": [7, 8], "pad_token_id": 9}"#).unwrap();
    let (config, weights) = folder.load().unwrap();
    assert_eq!((config.eos_token_ids.as_slice(), config.pad_token_id), (&[7, 8][..], Some(381)), "padding is the model's own");
    let dir = tempfile::tempdir().unwrap();
    save_hf(dir.path(), &config, &weights).unwrap();
    assert_eq!(ModelConfig::from_dir(dir.path()).unwrap(), config);
}

/// vLLM and transformers sample by it unless they are given other numbers.
#[test]
fn a_saved_folder_keeps_the_generation_config_of_the_models_maker() {
    let folder = Folder::copy_of("llama_tied");
    let of_maker = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [7, 8], "bos_token_id": 5});
    fs::write(folder.path("generation_config.json"), of_maker.to_string()).unwrap();
    let ((config, weights), saved) = (folder.load().unwrap(), tempfile::tempdir().unwrap());
    let config = ModelConfig { eos_token_ids: vec![9], ..config };
    let read = |name: &str| -> Value {
        let text = fs::read_to_string(saved.path().join(name).join("generation_config.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    save_hf(&saved.path().join("saved"), &config, &weights).unwrap();
    export_hf(&saved.path().join("saved"), None, &saved.path().join("exported"), Dtype::F32, None).unwrap();
    for name in ["saved", "exported"] {
        let expected = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.95, "eos_token_id": 9, "bos_token_id": 5,
            "pad_token_id": 381});
        assert_eq!(read(name), expected, "{name}");
    }
}

#[test]
fn sizes_that_a_published_gemma_leaves_out_are_those_of_its_configuration_class() {
    let text = json!({"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024});
    let whole = json!({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text});
    let config = ModelConfig::from_json(Path::new("config.json"), whole.as_object().unwrap()).unwrap();
    assert_eq!((config.vocab_size, config.heads, config.kv_heads, config.head_dim), (262_208, 8, 4, 256));
    assert_eq!((config.max_positions, config.eos_token_ids.as_slice(), config.tied), (131_072, &[1, 106][..], true));
    assert_eq!((config.rope_theta, config.window_rope.clone()), (1e6, Some((1e4, RopeScaling::Default))));
    assert_eq!(config.windows.iter().filter(|window| window.is_none()).count(), 5);
    assert_eq!(config.rope_scaling, RopeScaling::Linear { factor: 8.0 });
}
