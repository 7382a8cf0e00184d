//! PEFT's folders of adapters: what is read, and what is refused by its key.

use rollflow::model::{Lora, Weights, base_of, export_adapter, load_adapter, load_hf, save_adapter, save_hf};

/// As PEFT writes what it was asked for: names, paths of all modules, or a pattern; and with the scale of rsLoRA.
#[test]
fn adapters_are_read_however_peft_names_their_modules() {
    let (config, folder) = (crate::tiny::model(), tempfile::tempdir().unwrap());
    let lora = Lora::new(4, 8.0, &["q_proj", "down_proj"]).unwrap();
    let adapter = crate::tiny::weights(1).adapted(&config, lora, 7).adapter.unwrap();
    save_adapter(folder.path(), &adapter).unwrap();
    let path = folder.path().join("adapter_config.json");
    let plain: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let read = |changes: serde_json::Value| {
        let mut settings = plain.clone();
        settings.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        std::fs::write(&path, settings.to_string()).unwrap();
        load_adapter(folder.path(), &config)
    };
    let paths: Vec<String> = (0..config.layers())
        .flat_map(|layer| ["self_attn.q_proj", "mlp.down_proj"].map(|module| format!("model.layers.{layer}.{module}")))
        .collect();
    let pattern = r"(?:.*\.)?(self_attn|mlp)\.(q_proj|down_proj)";
    for named in [serde_json::json!(["down_proj", "q_proj"]), serde_json::json!(paths), serde_json::json!(pattern)] {
        let found = read(serde_json::json!({"target_modules": named})).unwrap();
        assert!(found.flat == adapter.flat && found.lora.to_string() == adapter.lora.to_string(), "{named}");
    }
    let scaled = read(serde_json::json!({"use_rslora": true})).unwrap();
    assert_eq!(scaled.lora.alpha, adapter.lora.alpha * 2.0, "the scale is alpha / √4");
    let some = read(serde_json::json!({"target_modules": ".*q_proj", "layers_to_transform": [0]})).unwrap_err().to_string();
    assert!(some.contains("layers_to_transform"), "{some}");
}

/// PEFT finds no module of other names, and changes nothing then.
#[test]
fn adapters_of_a_gemma_3_that_takes_images_have_the_names_of_its_language_model() {
    let (config, base, folder) = (crate::tiny::model(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(base.path().join("config.json"), r#"{"model_type": "gemma3", "text_config": {}}"#).unwrap();
    let mut lora = Lora::new(4, 8.0, &["q_proj", "down_proj"]).unwrap();
    lora.base = Some(base.path().to_owned());
    let adapter = crate::tiny::weights(1).adapted(&config, lora, 7).adapter.unwrap();
    save_adapter(folder.path(), &adapter).unwrap();
    let text = std::fs::read_to_string(folder.path().join("adapter_config.json")).unwrap();
    let settings: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(settings["target_modules"][0], "model.language_model.layers.0.self_attn.q_proj");
    let file = std::fs::read(folder.path().join("adapter_model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert!(tensors.names().iter().all(|name| name.starts_with("base_model.model.model.language_model.layers.")));
    let again = load_adapter(folder.path(), &config).unwrap();
    assert!(again.flat == adapter.flat && again.lora.to_string() == adapter.lora.to_string());
}

/// vLLM serves all of such a folder; `AutoModelForCausalLM` loads its language model alone.
#[test]
fn adapters_of_a_qwen_3_5_that_takes_images_are_exported_with_the_names_of_the_whole_model() {
    let (config, base, folder) = (crate::tiny::nets(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = serde_json::json!({"model_type": "qwen3_5", "text_config": config.to_json()});
    std::fs::write(base.path().join("config.json"), whole.to_string()).unwrap();
    let mut lora = Lora::new(4, 8.0, &["q_proj", "down_proj", "in_proj_qkv"]).unwrap();
    lora.base = Some(base.path().to_owned());
    let adapter = Weights::random(&config, 1).adapted(&config, lora, 7).adapter.unwrap();
    let [saved, exported] = ["saved", "exported"].map(|name| folder.path().join(name));
    save_adapter(&saved, &adapter).unwrap();
    assert!(export_adapter(&saved, None, &exported).unwrap(), "they have other names");
    for (of, layers) in [(&saved, "model.layers."), (&exported, "model.language_model.layers.")] {
        let file = std::fs::read(of.join("adapter_model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let prefix = format!("base_model.model.{layers}");
        assert!(tensors.names().iter().all(|name| name.starts_with(&prefix)), "{:?}", tensors.names());
        let again = load_adapter(of, &config).unwrap();
        assert!(again.flat == adapter.flat && again.lora.to_string() == adapter.lora.to_string(), "{layers}");
    }
    let text = std::fs::read_to_string(exported.join("adapter_config.json")).unwrap();
    let settings: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(settings["target_modules"][0], "model.language_model.layers.0.linear_attn.in_proj_qkv");
}

/// Adapters name a base that no hub has by its path.
#[test]
fn adapters_of_a_run_that_was_moved_are_loaded_over_the_base_in_its_folder() {
    let (config, weights, folder) = (crate::tiny::model(), crate::tiny::weights(1), tempfile::tempdir().unwrap());
    let [run, moved] = ["run", "moved"].map(|name| folder.path().join(name));
    save_hf(&run.join("base"), &config, &weights).unwrap();
    let mut lora = Lora::new(4, 8.0, &["q_proj"]).unwrap();
    lora.base = Some(run.join("base"));
    let adapter = weights.adapted(&config, lora, 7).adapter.unwrap();
    save_adapter(&run.join("checkpoints/step_000001"), &adapter).unwrap();
    std::fs::rename(&run, &moved).unwrap();
    let saved = moved.join("checkpoints/step_000001");
    assert_eq!(base_of(&saved).unwrap(), Some(moved.join("base")));
    assert!(load_hf(&saved).unwrap().1.adapter.unwrap().flat == adapter.flat);
    // Adapters that no run saved are not searched for.
    std::fs::rename(&saved, moved.join("checkpoints/../alone")).unwrap();
    let lost = base_of(&moved.join("alone")).unwrap_err().to_string();
    assert!(lost.contains("--base FOLDER") && !lost.contains("paths are relative"), "{lost}");
}

/// axolotl saves the configuration of the base, too.
#[test]
fn adapters_with_the_configuration_of_their_base_are_loaded_over_it() {
    let (config, base, folder) = (crate::tiny::model(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let weights = crate::tiny::weights(1);
    save_hf(base.path(), &config, &weights).unwrap();
    let mut lora = Lora::new(4, 8.0, &["q_proj"]).unwrap();
    lora.base = Some(base.path().to_owned());
    let adapter = weights.adapted(&config, lora, 7).adapter.unwrap();
    save_adapter(folder.path(), &adapter).unwrap();
    std::fs::copy(base.path().join("config.json"), folder.path().join("config.json")).unwrap();
    assert!(base_of(folder.path()).unwrap().is_some());
    assert!(load_hf(folder.path()).unwrap().1.adapter.unwrap().flat == adapter.flat);
    // With weights of a model, it is a model.
    std::fs::copy(base.path().join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    assert!(load_hf(folder.path()).unwrap().1.adapter.is_none());
}

#[test]
fn adapters_that_are_pickled_are_refused_with_the_remedy() {
    let (config, folder) = (crate::tiny::model(), tempfile::tempdir().unwrap());
    let adapter = crate::tiny::weights(1).adapted(&config, Lora::new(4, 8.0, &["q_proj"]).unwrap(), 7).adapter.unwrap();
    save_adapter(folder.path(), &adapter).unwrap();
    std::fs::rename(folder.path().join("adapter_model.safetensors"), folder.path().join("adapter_model.bin")).unwrap();
    let error = load_adapter(folder.path(), &config).unwrap_err().to_string();
    assert!(error.contains("it has no adapter_model.safetensors; its weights are pickled"), "{error}");
}

#[test]
fn what_is_no_plain_lora_is_refused_by_name() {
    let unknown = Lora::new(4, 8.0, &["q_proj", "c_attn"]).unwrap_err().to_string();
    assert!(unknown.contains("c_attn") && unknown.contains("gate_proj"), "{unknown}");
    let folder = tempfile::tempdir().unwrap();
    let refused = |keys: serde_json::Value| {
        let mut config = serde_json::json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        load_adapter(folder.path(), &crate::tiny::model()).unwrap_err().to_string()
    };
    for (keys, named) in [
        (serde_json::json!({"use_dora": true}), "use_dora"),
        (serde_json::json!({"peft_type": "IA3"}), "peft_type"),
        (serde_json::json!({"init_lora_weights": "pissa_niter_16"}), "init_lora_weights"),
        (serde_json::json!({"init_lora_weights": "olora"}), "init_lora_weights"),
        (serde_json::json!({"rank_pattern": {"q_proj": 2}}), "rank_pattern"),
        (serde_json::json!({"target_modules": ["q_proj", "lm_head"]}), "lm_head"),
        (serde_json::json!({"modules_to_save": []}), "adapter_model.safetensors"),
        (serde_json::json!({"init_lora_weights": "gaussian"}), "adapter_model.safetensors"),
    ] {
        let error = refused(keys);
        assert!(error.contains(named), "{named}: {error}");
    }
}
