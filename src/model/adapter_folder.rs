//! PEFT adapter folders, in and out: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use super::config_json::says_4_bits;
use super::folder::{Kept, WeightFile, load_hf_as, no_weights, read_tensors, write_tensors};
use super::folder_files::{ADAPTER_CONFIG as CONFIG, holds_adapter};
use super::keys::{Keys, read_object};
use super::{Adapter, Dtype, Entry, Lora, ModelConfig, ModelError, Weights};
use crate::hub::{Cache, Hub, hub_id};
use crate::util::atomic_file;

const WEIGHTS: &str = "adapter_model.safetensors";

/// PEFT keys that change the computation in unsupported ways. Only neutral values are accepted.
const NEUTRAL: [&str; 10] = [
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "trainable_token_indices",
    "layer_replication",
    "lora_bias",
    "alora_invocation_tokens",
];

/// The matrices of experts in transformers, whose adapters PEFT makes for parameters.
const EXPERT_PARAMETERS: [&str; 2] = ["gate_up_proj", "down_proj"];
/// The matrix of routers there.
const ROUTER_PARAMETER: &str = "gate.weight";
/// PEFT's pattern of gate and up.
const GATE_UP: &str = r".*\.gate_up_proj";

/// Initial adapters that leave the base as its folder has it. PEFT changes the base for others, and again
/// when it loads them.
const INITIAL: [&str; 4] = ["gaussian", "orthogonal", "mica", "eva"];

/// Modules that PEFT trains in full for a sequence classifier: possible names of its head.
const SCORE_HEADS: [&str; 2] = ["classifier", "score"];

/// Types of models that also take images, which transformers' `AutoModelForCausalLM` loads whole.
const LOADED_WHOLE: [&str; 1] = ["gemma3"];
/// Types of which it loads the language model alone. `AutoModelForImageTextToText` and vLLM load them whole.
const LOADED_ALONE: [&str; 2] = ["qwen3_5", "qwen3_5_moe"];

/// Writes adapters into `dir`, in PEFT's format, and creates the folder if it is missing. Not
/// atomic: write into a temporary folder and rename it.
///
/// Tensors have the names that `AutoModelForCausalLM` gives the base.
pub fn save_adapter(dir: &Path, adapter: &Adapter) -> Result<(), ModelError> {
    save_named(dir, adapter, takes_images(adapter, &LOADED_WHOLE))
}

/// [`save_adapter`] with the names of the whole base, if it also takes images. Returns true if `save_adapter`
/// gives other names.
pub(super) fn save_adapter_of_whole(dir: &Path, adapter: &Adapter) -> Result<bool, ModelError> {
    let renamed = takes_images(adapter, &LOADED_ALONE);
    save_named(dir, adapter, renamed || takes_images(adapter, &LOADED_WHOLE))?;
    Ok(renamed)
}

/// Writes adapters with the names of a language model, or of one `inside` a model that also takes images.
fn save_named(dir: &Path, adapter: &Adapter, inside: bool) -> Result<(), ModelError> {
    atomic_file::create_folder(dir).map_err(ModelError::io(dir))?;
    let lora = &adapter.lora;
    let (task, whole) = if adapter.layout.score_head().is_some() { ("SEQ_CLS", Some(SCORE_HEADS)) } else { ("CAUSAL_LM", None) };
    let is_module = |name: &&str| ![Lora::EXPERTS, Lora::ROUTERS].contains(name);
    let entries = named(adapter, inside);
    let mut modules: Vec<String> = lora.targets().iter().copied().filter(is_module).map(String::from).collect();
    if inside {
        // Paths, for images have projections of these names, too.
        let down = |entry: &Entry| {
            let module = entry.name.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight")?;
            is_linear(module).then(|| module.to_owned())
        };
        modules = entries.iter().filter_map(down).collect();
    }
    let of_experts = EXPERT_PARAMETERS.into_iter().filter(|_| lora.adapts_experts());
    let parameters: Vec<&str> = of_experts.chain(lora.adapts_routers().then_some(ROUTER_PARAMETER)).collect();
    let parameters = Some(parameters).filter(|parameters| !parameters.is_empty());
    // As PEFT writes them: of the same scale.
    let pattern = |value: Value| if lora.adapts_experts() { json!({ GATE_UP: value }) } else { json!({}) };
    let alpha_of_gate_up = lora.alpha * lora.gate_up_rank() as f64 / lora.rank as f64;
    // A path into the user's cache of the hub leads nowhere on another machine.
    let in_cache = |base: &Path| {
        let (id, commit) = hub_id(base)?;
        let found = Cache::of_user().locate(Path::new(&format!("{id}@{commit}")));
        found.is_ok_and(|found| found == base).then_some((id, commit))
    };
    let (base, revision) = match lora.base.as_deref().and_then(in_cache) {
        Some((id, commit)) => (Some(PathBuf::from(id)), Some(commit)),
        None => (lora.base.clone(), None),
    };
    let config = json!({
        "peft_type": "LORA",
        "target_parameters": parameters,
        "rank_pattern": pattern(lora.gate_up_rank().into()),
        "alpha_pattern": pattern(alpha_of_gate_up.into()),
        "task_type": task,
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": false,
        "modules_to_save": whole,
        "use_rslora": false,
        "use_dora": false,
        "init_lora_weights": true,
        "inference_mode": true,
    });
    let path = dir.join(CONFIG);
    atomic_file::write_unsynced(&path, format!("{config:#}\n")).map_err(ModelError::io(&path))?;
    write_tensors(&dir.join(WEIGHTS), &entries, &adapter.flat, Dtype::F32)
}

/// Where the layers of a language model are in PEFT's names, and in those of a model that also takes images.
const LAYERS: [&str; 2] = ["base_model.model.model.layers.", "base_model.model.model.language_model.layers."];

/// Returns true if the base of adapters also takes images and has one of these types.
fn takes_images(adapter: &Adapter, types: &[&str]) -> bool {
    let is_one = |base: &PathBuf| {
        let config = read_object(&base.join("config.json")).unwrap_or_default();
        let model_type = config.get("model_type").and_then(Value::as_str);
        config.contains_key("text_config") && model_type.is_some_and(|of| types.contains(&of))
    };
    adapter.lora.base.as_ref().is_some_and(is_one)
}

/// Tensors of adapters as PEFT names them for a language model, or for one `inside` a model that takes
/// images.
fn named(adapter: &Adapter, inside: bool) -> Vec<Entry> {
    let named = |entry: &Entry| match entry.name.strip_prefix(LAYERS[0]).filter(|_| inside) {
        Some(rest) => Entry { name: format!("{}{rest}", LAYERS[1]), ..entry.clone() },
        None => entry.clone(),
    };
    adapter.layout.entries().iter().map(named).collect()
}

/// The adapters in `dir`, of a model of this shape. They name its folder as [`Lora::base`].
pub fn load_adapter(dir: &Path, config: &ModelConfig) -> Result<Adapter, ModelError> {
    let lora = read_config(&dir.join(CONFIG))?.0.on_model(config)?;
    let layout = lora.layout(config);
    let (path, kept) = (weights_file(dir)?, Kept { dtype: Dtype::F32, in_4_bits: false });
    let (flat, ..) = read_tensors(&layout, &path, vec![path.clone()], None, kept)?;
    Ok(Adapter { lora: Arc::new(lora), layout: Arc::new(layout), flat })
}

/// The model's configuration and the adapters in `dir` over the model in the folder `base`, which need not be
/// the one that they name and becomes their [`Lora::base`].
pub(super) fn load_adapter_over(dir: &Path, base: &Path) -> Result<(ModelConfig, Adapter), ModelError> {
    let (config, scores) = (ModelConfig::from_dir(base)?, read_config(&dir.join(CONFIG))?.1);
    let config = if scores { config.scoring() } else { config };
    let adapter = load_adapter(dir, &config)?;
    let mut lora = Lora::clone(&adapter.lora);
    lora.base = Some(base.to_owned());
    Ok((config, Adapter { lora: Arc::new(lora), ..adapter }))
}

/// Returns the base model's folder of the adapters in `dir`, if they name one. A model of the hub is fetched
/// if it is not in the cache.
///
/// # Errors
/// It is not there, or is no model's folder.
pub fn base_of(dir: &Path) -> Result<Option<PathBuf>, ModelError> {
    if !holds_adapter(dir) || read_config(&dir.join(CONFIG))?.0.base.is_none() {
        return Ok(None);
    }
    named_base(dir).map(|(base, _)| Some(base))
}

/// Reads the configuration of the model in `dir`; for adapters, the base model's, adapted. Reads no
/// weights.
pub fn folder_config(dir: &Path) -> Result<ModelConfig, ModelError> {
    if !holds_adapter(dir) {
        return ModelConfig::from_dir(dir);
    }
    let (base, scores) = named_base(dir)?;
    let config = ModelConfig::from_dir(&base)?;
    Ok(if scores { config.scoring() } else { config })
}

/// Returns true if the model in `dir`, or the base of its adapters, is in 4 bits. Reads no weights.
pub(crate) fn is_in_4_bits(dir: &Path) -> bool {
    let base = if holds_adapter(dir) { named_base(dir).ok().map(|(base, _)| base) } else { Some(dir.to_owned()) };
    base.is_some_and(|base| says_4_bits(&base))
}

/// Folder of the model that the adapters of `dir` name, by its path or by its id on the hub, and whether they
/// include a score head. Fails if it is none.
pub(super) fn named_base(dir: &Path) -> Result<(PathBuf, bool), ModelError> {
    let path = dir.join(CONFIG);
    let (lora, scores) = read_config(&path)?;
    // No edit of the file: a checkpoint has its checksum.
    let remedy = format!("name its folder: rollflow export {} OUT --base FOLDER (--adapter: they stay adapters)", dir.display());
    let Some(named) = lora.base else {
        return Err(ModelError::malformed(&path, format!("its adapters name no base model; {remedy}")));
    };
    let refuse = |why: String| {
        let named = named.display().to_string();
        ModelError::malformed(&path, format!("its adapters belong to the model {named:?}, {why}; put it there, or {remedy}"))
    };
    let base = Hub::of_user().open(&named).map_err(|error| refuse(format!("which can't be opened ({error})")))?;
    if !base.is_dir() || holds_adapter(&base) {
        return Err(refuse("which is no folder of a model".to_owned()));
    }
    Ok((base, scores))
}

/// Loads adapters with their base model, which is kept so. If the adapters include a score
/// head, it replaces a language model's head.
pub(super) fn load_with_base(dir: &Path, kept: Kept) -> Result<(ModelConfig, Weights), ModelError> {
    let (base, scores) = named_base(dir)?;
    let (config, weights) = load_hf_as(&base, kept)?;
    let (config, weights) = match scores && !config.scores {
        true => (config.scoring(), weights.scoring(&config, None)),
        false => (config, weights),
    };
    let adapter = load_adapter(dir, &config)?;
    Ok((config, weights.under(adapter)))
}

/// Whether `target_parameters` have the matrices of experts, and routers; nothing else is known.
fn of_mixtures(keys: &Keys, parameters: Option<&Value>) -> Result<[bool; 2], ModelError> {
    let names: Vec<&str> = match parameters {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(names)) => names.iter().map(|name| name.as_str().unwrap_or_default()).collect(),
        Some(_) => vec![""],
    };
    let plain = |name: &str| name.strip_prefix("mlp.experts.").or(name.strip_prefix("mlp.")).unwrap_or(name).to_owned();
    let names: Vec<String> = names.into_iter().map(plain).collect();
    let has = |name: &str| names.iter().any(|found| found == name);
    let (experts, router) = (EXPERT_PARAMETERS.map(has), has(ROUTER_PARAMETER));
    let known = |name: &String| EXPERT_PARAMETERS.contains(&name.as_str()) || name == ROUTER_PARAMETER;
    if experts[0] != experts[1] || !names.iter().all(known) {
        return Err(
            keys.unsupported("target_parameters", "none, gate_up_proj and down_proj of experts, and gate.weight of routers")
        );
    }
    Ok([experts[0], router])
}

/// A pattern's number for gate and up of experts, which no other pattern may be with.
fn of_gate_up(keys: &Keys, given: Option<&Value>, key: &'static str, is_known: bool) -> Result<Option<f64>, ModelError> {
    match given {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(map)) if map.is_empty() => Ok(None),
        Some(Value::Object(map)) if is_known && map.len() == 1 && map.contains_key(GATE_UP) => Ok(map[GATE_UP].as_f64()),
        Some(_) => Err(keys.unsupported(key, "empty, or for the experts' gate_up_proj alone")),
    }
}

/// The file of adapters in `dir`, which is there.
fn weights_file(dir: &Path) -> Result<PathBuf, ModelError> {
    let path = dir.join(WEIGHTS);
    if path.exists() { Ok(path) } else { Err(no_weights(dir, WEIGHTS)) }
}

/// Returns true if a module with adapters is a linear layer, not the experts of a mixture or their router.
fn is_linear(module: &str) -> bool {
    !module.contains(".mlp.experts") && !module.ends_with(".mlp.gate")
}

/// Names of the modules whose adapters a file of tensors has.
fn adapted_modules(path: PathBuf) -> Result<Vec<String>, ModelError> {
    let tensors = WeightFile::open(path)?.names();
    let modules = tensors.iter().filter_map(|name| name.strip_suffix(".lora_A.weight")).filter(|module| is_linear(module));
    let names: BTreeSet<String> = modules.map(|module| module.rsplit('.').next().unwrap_or(module).to_owned()).collect();
    Ok(names.into_iter().collect())
}

/// Settings of adapters, and whether a score head is trained alongside them.
fn read_config(path: &Path) -> Result<(Lora, bool), ModelError> {
    let map = read_object(path)?;
    let keys = Keys { path, map: &map, family: "LoRA" };
    if keys.required::<String>("peft_type", "a string")? != "LORA" {
        return Err(keys.unsupported("peft_type", "LORA"));
    }
    if keys.optional::<String>("bias", "a string")?.is_some_and(|bias| bias != "none") {
        return Err(keys.unsupported("bias", "none"));
    }
    let is_neutral = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    if let Some(key) = NEUTRAL.into_iter().find(|key| map.get(*key).is_some_and(|value| !is_neutral(value))) {
        return Err(keys.unsupported(key, "null, false or empty: plain LoRA"));
    }
    match map.get("init_lora_weights") {
        None | Some(Value::Null | Value::Bool(_)) => {}
        Some(Value::String(name)) if INITIAL.contains(&name.as_str()) => {}
        Some(_) => {
            let remedy = "save it as plain LoRA with PEFT's path_initial_model_for_weight_conversion";
            return Err(keys.unsupported("init_lora_weights", &format!("true, false, {}; {remedy}", INITIAL.join(", "))));
        }
    }
    let whole: Vec<&str> = match map.get("modules_to_save") {
        Some(Value::Array(names)) => names.iter().map(|name| name.as_str().unwrap_or_default()).collect(),
        Some(value) if !is_neutral(value) => return Err(keys.unsupported("modules_to_save", "null, or a list")),
        _ => Vec::new(),
    };
    let scores = map.get("task_type").and_then(Value::as_str) == Some("SEQ_CLS");
    if scores != whole.contains(&"score") || !whole.iter().all(|name| SCORE_HEADS.contains(name)) {
        return Err(
            keys.unsupported("modules_to_save", "null or empty, and [\"classifier\", \"score\"] with \"task_type\": \"SEQ_CLS\"")
        );
    }
    let mut targets = match map.get("target_modules") {
        Some(Value::String(all)) if all == Lora::ALL => vec![all.clone()],
        // A pattern: what it means is what there is.
        Some(Value::String(_)) => adapted_modules(weights_file(path.parent().unwrap_or(path))?)?,
        // Where names are not plain, PEFT writes the paths of all.
        _ => {
            let names: Vec<String> = keys.required("target_modules", "a list of projections, a pattern, or \"all-linear\"")?;
            names.iter().map(|name| name.rsplit('.').next().unwrap_or(name).to_owned()).collect()
        }
    };
    let [adapts_experts, adapts_routers] = of_mixtures(&keys, map.get("target_parameters"))?;
    targets.extend(adapts_experts.then(|| Lora::EXPERTS.to_owned()));
    targets.extend(adapts_routers.then(|| Lora::ROUTERS.to_owned()));
    let (rank, mut alpha): (usize, f64) = (keys.required("r", "a positive integer")?, keys.required("lora_alpha", "a number")?);
    if map.get("use_rslora") == Some(&Value::Bool(true)) {
        // Their scale is alpha / √rank (Kalajdzievski, 2023).
        if adapts_experts {
            return Err(keys.unsupported("use_rslora", "false with adapters of experts, whose rank is another"));
        }
        alpha *= (rank as f64).sqrt();
    }
    let mut lora = Lora::new(rank, alpha, &targets).map_err(|_| {
        keys.unsupported(
            "target_modules",
            "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, qkv_proj, gate_up_proj, and those of delta nets",
        )
    })?;
    let [gate_up_rank, gate_up_alpha] = [("rank_pattern", lora.rank as f64), ("alpha_pattern", lora.alpha)]
        .map(|(key, plain)| of_gate_up(&keys, map.get(key), key, adapts_experts).map(|given| given.unwrap_or(plain)));
    let gate_up_rank = gate_up_rank? as usize;
    if gate_up_rank == 0 || (gate_up_alpha? / gate_up_rank as f64 - lora.alpha / lora.rank as f64).abs() > 1e-9 {
        return Err(keys.unsupported("alpha_pattern", "the scale alpha / rank of all"));
    }
    lora = lora.with_gate_up_rank(gate_up_rank);
    let (base, revision): (Option<PathBuf>, Option<String>) =
        (keys.optional("base_model_name_or_path", "a string")?, keys.optional("revision", "a string")?);
    let at_revision = |base: PathBuf| match revision {
        Some(revision) if !base.exists() && base.is_relative() => PathBuf::from(format!("{}@{revision}", base.display())),
        _ => base,
    };
    let dir = path.parent().unwrap_or(path);
    let found = |base: PathBuf| Cache::of_user().locate(&base).ok().or_else(|| moved_base(dir, &base)).unwrap_or(base);
    lora.base = base.map(at_revision).map(found);
    Ok((lora, scores))
}

/// The base in the folder of the run that saved the adapters in `dir` (`RUN/checkpoints/step_N`, or
/// `RUN/sft/checkpoints/step_N`), if they name the place that it had before the run was moved.
fn moved_base(dir: &Path, named: &Path) -> Option<PathBuf> {
    let dir = std::path::absolute(dir).ok().filter(|_| named.is_absolute())?;
    let run = dir.parent().filter(|folder| folder.ends_with("checkpoints"))?.parent()?;
    let whole = run.parent().filter(|_| run.ends_with("sft"));
    [Some(run), whole].into_iter().flatten().find_map(|run| {
        let ends = named.ancestors().skip(1).filter_map(|above| named.strip_prefix(above).ok());
        ends.map(|end| run.join(end)).filter(|folder| folder.join("config.json").is_file()).last()
    })
}
