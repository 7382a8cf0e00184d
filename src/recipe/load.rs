//! From a file to a plan.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::chat;
use super::checks::{placed, problems};
use super::data::Source;
use super::defaults::{self, Derived};
use super::library_names::library_name;
#[cfg(feature = "torch")]
use super::memory;
#[cfg(feature = "torch")]
use super::model::DeviceName;
use super::model::ModelSource;
use super::model_folder::model_folder_from;
use super::names::visit;
use super::plan::Plan;
use super::reference::sections_with;
use super::reward::RewardRule;
use super::task::TaskData;
use super::trainer::TrainerBackend;
use super::{secrets, timeline};
use crate::data::source::DataSpec;
use crate::hub::Hub;
#[cfg(feature = "torch")]
use crate::model::{Compute, Dtype};
use crate::settings::document::{self, Node, Value};
use crate::settings::error::{Place, Problem, RecipeErrors};
use crate::settings::renames::Renames;
use crate::settings::section::Findings;
use crate::settings::setting::Setting;
use crate::util::reading;

/// Sections without a default, because training the wrong model is costly.
const REQUIRED: [(&str, &str); 3] = [
    (
        "pipeline",
        "write pipeline = \"grpo\", \"sft\", \"sft_then_grpo\", \"grpo_offline\", \"dpo\" or \"reward_model\" at the top",
    ),
    ("model", "write [model] with kind = \"tiny\" or \"folder\""),
    ("task", "write [task] with kind = \"arithmetic\", \"data\" or \"rollouts\""),
];

/// Reads, overrides (`section.key=value`) and checks a recipe. Also looks whether the files it names exist.
pub fn load(path: &Path, sets: &[String]) -> Result<Plan, RecipeErrors> {
    load_with(path, sets, Computes::Here, |_| Vec::new()).map(|(plan, _)| plan)
}

/// Where the pipeline of a recipe is to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computes {
    /// On this machine, which must have the devices that the recipe names and enough memory.
    Here,
    /// On another machine, or nowhere.
    Elsewhere,
}

/// Selects the environment variables that override keys, as [`load`] takes them:
/// `ROLLFLOW__TRAIN__LR=1e-4` is `train.lr`. One that is not UTF-8 is an error that names it.
pub fn variables(all: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Vec<String>, RecipeErrors> {
    let ours = all.into_iter().filter(|(name, _)| name.as_encoded_bytes().starts_with(document::VARIABLES.as_bytes()));
    let (mut sets, mut errors) = (Vec::new(), Vec::new());
    for (name, value) in ours {
        match (name.to_str(), value.to_str()) {
            (Some(name), Some(value)) => sets.push(format!("{name}={value}")),
            _ => {
                let problem = Problem::of("", "the environment variable is not UTF-8", "write it in UTF-8, or unset it");
                errors.push(problem.at(Place::Variable(name.to_string_lossy().into_owned())));
            }
        }
    }
    sets.sort();
    RecipeErrors::unless_empty(errors).map(|()| sets)
}

/// A plan, and the values that its recipe left out because they follow from others.
type Resolved = Result<(Plan, Vec<Derived>), RecipeErrors>;

/// [`load`], with the values that the recipe left out and the reason for each. `further` looks for more
/// problems, which are reported at their places among the others.
pub fn load_with(path: &Path, sets: &[String], computes: Computes, further: impl Fn(&Plan) -> Vec<Problem>) -> Resolved {
    let file = path.display().to_string();
    let text = reading::read_text(path).map_err(|error| {
        let problem = Problem::of("", format!("cannot read the recipe: {error}"), "give the path of a TOML file");
        RecipeErrors::of(vec![problem.at(Place::File { file: file.clone(), line: 1, column: 1 })])
    })?;
    let means = |plan: &Plan| {
        let mut out_of_range = Vec::new();
        plan.check("", &mut out_of_range);
        // The memory plan divides by counts of at least 1.
        if out_of_range.is_empty() { missing_means(plan, computes) } else { Vec::new() }
    };
    resolve(&file, &text, sets, |plan| [missing_files(plan), means(plan), further(plan)].concat())
}

/// [`load_with`] for text at hand; `file` names it in errors, and the files it names are not looked for.
pub fn parse_with(
    file: &str,
    text: &str,
    sets: &[String],
    further: impl Fn(&Plan) -> Vec<Problem>,
) -> Result<Plan, RecipeErrors> {
    resolve(file, text, sets, further).map(|(plan, _)| plan)
}

/// [`load`] for text at hand; `file` names it in errors, and the files it names are not looked for.
pub fn parse(file: &str, text: &str, sets: &[String]) -> Result<Plan, RecipeErrors> {
    parse_with(file, text, sets, |_| Vec::new())
}

/// Gives dotted keys of a recipe, as an earlier version wrote them, their current names.
pub fn with_current_names<V>(keys: BTreeMap<String, V>) -> BTreeMap<String, V> {
    let renames = Renames::of::<Plan>();
    keys.into_iter().map(|(key, value)| (renames.path(&key), value)).collect()
}

fn resolve(file: &str, text: &str, sets: &[String], further: impl Fn(&Plan) -> Vec<Problem>) -> Resolved {
    let renames = Renames::of::<Plan>();
    let mut root = document::parse::<Plan>(file, text, sets, &renames, defaults::displaced).map_err(RecipeErrors::of)?;
    let derived = defaults::fill(&mut root);
    let mut findings = Findings::of(sections_with, library_name);
    findings.note("", &root.place);
    defaults::steps_or_epochs(&root, &mut findings);
    let mut plan = Plan::read(&root, "", &mut findings).unwrap_or_default();
    timeline::rename_keys(&mut plan, &renames);
    require_and_refuse_sections(&root, &plan, &mut findings);
    findings.errors.extend(secrets::errors(&root));
    let mut found = [problems(&plan), further(&plan)].concat();
    // Two sections may read the same file.
    let mut known = BTreeSet::new();
    found.retain(|problem| known.insert((problem.key.clone(), problem.message.clone())));
    let later = placed(found, &findings);
    findings.errors.extend(later);
    RecipeErrors::unless_empty(findings.errors)?;
    let served = defaults::sequences(&root, &mut plan);
    let derived = [derived, plan.derived(), served].concat();
    Ok((plan, derived))
}

fn require_and_refuse_sections(root: &Node, plan: &Plan, findings: &mut Findings) {
    let Value::Table(table) = &root.value else { return };
    for (key, help) in REQUIRED {
        if !table.contains_key(key) {
            findings.error(&root.place, key, format!("the recipe has no `{key}`"), help.to_owned());
        }
    }
    if plan.judges_data() && !table.contains_key("reward") {
        let message = "the recipe has no `reward`: what a completion for a data set earns has no default".to_owned();
        let kinds: Vec<String> =
            RewardRule::KINDS.iter().filter(|kind| **kind != "none").map(|kind| format!("\"{kind}\"")).collect();
        let help = format!("write [reward] with a kind, one of {}; \"math\" compares final answers", kinds.join(", "));
        findings.error(&root.place, "reward", message, help);
    }
    for (section, key) in plan.unused_keys() {
        let Some(Value::Table(keys)) = table.get(section).map(|entry| &entry.node.value) else { continue };
        if let Some(entry) = keys.get(key) {
            let path = format!("{section}.{key}");
            let message = format!("`{path}` means nothing to pipeline = \"{}\", which samples nothing", plan.pipeline.word());
            findings.error(&entry.key_place, &path, message, "remove it".to_owned());
        }
    }
    for key in plan.unused_sections() {
        if let Some(entry) = table.get(key) {
            let message = format!("[{key}] means nothing to pipeline = \"{}\"", plan.pipeline.word());
            findings.error(&entry.key_place, key, message, "remove it, or choose another pipeline".to_owned());
        }
    }
}

/// A model that can't do what is asked of it, and a device that isn't there or has too little memory.
#[cfg(feature = "torch")]
fn missing_means(plan: &Plan, computes: Computes) -> Vec<Problem> {
    let mut problems = memory::limits(plan);
    if computes == Computes::Here {
        problems.extend(missing_device(plan));
    }
    problems
}

#[cfg(feature = "torch")]
fn missing_device(plan: &Plan) -> Vec<Problem> {
    let missing = |(key, device): (String, DeviceName)| {
        let DeviceName::Cuda(index) = device else { return None };
        let none = Compute::cuda(index, Dtype::F32).check().err()?;
        let message = format!("`{key}` is {:?}: {none}", device.word());
        Some(Problem::of(key, message, "name a device that is there; \"cpu\" always is"))
    };
    let missing: Vec<Problem> = plan.devices().into_iter().filter_map(missing).collect();
    if missing.is_empty() { memory::problems(plan) } else { missing }
}

#[cfg(not(feature = "torch"))]
fn missing_means(_plan: &Plan, _computes: Computes) -> Vec<Problem> {
    Vec::new()
}

/// Names that lead nowhere. Models and data sets of the hub are fetched if they are not here yet.
fn missing_files(plan: &Plan) -> Vec<Problem> {
    let (mut models, mut sources) = (Vec::new(), Vec::new());
    if let ModelSource::Folder(folder) = &plan.model.source {
        models.push((if folder.preset.is_some() { "model.preset" } else { "model.path" }.to_owned(), folder.name()));
    }
    visit(&mut plan.clone(), |key, path| models.push((key, path.clone())), |key, source| sources.push((key, source.clone())));
    let judges = plan.pipeline.reinforces() || plan.eval.is_some();
    models.retain(|(key, name)| !name.as_os_str().is_empty() && (judges || !key.starts_with("reward")));
    sources.retain(|(_, source)| !source.data.as_os_str().is_empty());
    let template = plan.chat.template.as_ref().filter(|template| *template != chat::PLAIN).map(PathBuf::from);
    let rollouts = if let TaskData::Rollouts { path, .. } = &plan.task.data { Some(path.clone()) } else { None };
    let files = [("task.path", rollouts), ("chat.template", template), ("net.ca_file", plan.net.ca_file.clone())];
    let hub = Hub::of_user().ca_file(plan.net.ca_file.clone());
    let missing = |(key, path): (&str, Option<PathBuf>)| {
        let path = path.filter(|path| !path.as_os_str().is_empty())?;
        let why = match reading::regular(&path).err()? {
            error if error.kind() == std::io::ErrorKind::NotFound => "which does not exist".to_owned(),
            error => format!("which can't be read: {error}"),
        };
        let help = "paths are relative to the folder that the command runs in";
        Some(Problem::of(key, format!("`{key}` is {}, {why}", path.display()), help))
    };
    let unusable = |(key, source): (String, Source)| {
        let error = DataSpec { hub: hub.clone(), ..source.spec() }.fetch().err()?;
        let message = format!("`{key}`: {error}");
        Some(Problem::of(key, message, "docs/how_to/data.md says what is found, and how"))
    };
    let served = |key: &str| plan.trainer.backend == TrainerBackend::Tinker && key.starts_with("model.");
    let unknown = |(key, name): (String, PathBuf)| {
        let message = format!("`{key}` is {}", unusable_model(&hub, &key, &name, !served(&key))?);
        let help = "give a folder, relative to where the command runs, or the id of a model on the hub (`rollflow models` lists those that are here)";
        Some(Problem::of(key, message, help))
    };
    let files = files.into_iter().filter_map(missing).chain(sources.into_iter().filter_map(unusable));
    models.into_iter().filter_map(unknown).chain(files).collect()
}

/// Returns the error of the model `name`, by its configuration and the headers of its files. Reads
/// no weights. A model whose `weights` a server has needs only a tokenizer here.
fn unusable_model(hub: &Hub, key: &str, name: &Path, weights: bool) -> Option<String> {
    let folder = match model_folder_from(hub, name) {
        Ok(folder) => folder,
        Err(error) => return Some(error.to_string()),
    };
    #[cfg(feature = "torch")]
    {
        if let Some(error) = weights.then(|| crate::model::check_folder(&folder).err()).flatten() {
            return Some(format!("{}, which can't be used: {error}", name.display()));
        }
        let tokenizer = match crate::train::tokenizer_folder(folder) {
            Ok(folder) => folder.join("tokenizer.json"),
            Err(error) => return Some(format!("{}, which can't be used: {error}", name.display())),
        };
        // A critic reads the policy's tokens.
        let error = reading::regular(&tokenizer).err().filter(|_| key != "critic.path")?;
        Some(format!("{}, whose tokenizer {} can't be read: {error}", name.display(), tokenizer.display()))
    }
    #[cfg(not(feature = "torch"))]
    {
        let _ = (key, folder, weights);
        None
    }
}
