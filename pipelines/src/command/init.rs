//! `rollflow init`: a few questions, and a recipe with comments that `check` accepts.

mod ask;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use rollflow::data::Prompt;
use rollflow::data::source::{DataSet, DataSpec, Example};
use rollflow::model::ModelConfig;
use rollflow::prelude::Tokenizer;
use rollflow::recipe::{Computes, Plan, Preset};
use rollflow::train::tokenizer_folder;
use rollflow::util::atomic_file;

use super::check::text_of;
use super::plans::checked;
use super::{End, out, refused};
use crate::assemble::data;
use crate::assemble::models::model_folder;
use crate::registry::Registry;
use crate::survey;
use ask::Asker;

/// Fewer records are not divided into those that are trained and those that are held out.
const ENOUGH: usize = 50;

const PIPELINES: [&str; 3] = ["grpo", "sft", "sft_then_grpo"];
const FORMATS: [&str; 3] = ["auto", "user", "as_written"];
const REWARDS: [&str; 3] = ["exact", "numeric", "math"];

/// Write a recipe with comments, after a few questions.
///
/// Questions are answered on the terminal or by a pipe, one line each. An empty line, or none,
/// accepts the proposal, as --yes does for all. Values given as arguments are not asked for. A data
/// set's subset has no proposal: with --yes, name it with --subset. Subsets and splits of a hub id
/// are those that the hub lists.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow init mine.toml\n\
\x20 rollflow init mine.toml --yes --model qwen2.5-0.5b --task questions.jsonl\n\
\x20 rollflow init mine.toml --model qwen2.5-0.5b --task openai/gsm8k --subset main")]
pub struct Init {
    /// The recipe's file.
    #[arg(default_value = "recipe.toml")]
    path: PathBuf,
    /// Pipeline: grpo learns from a reward, sft imitates answers, sft_then_grpo does both.
    #[arg(long, value_parser = PIPELINES)]
    pipeline: Option<String>,
    /// `tiny`, a Hugging Face folder, a hub id, or a preset (see rollflow models).
    #[arg(long)]
    model: Option<String>,
    /// `arithmetic`, or a file, a folder or a hub id of a data set.
    #[arg(long)]
    task: Option<String>,
    /// The data set's subset (configuration); required with --yes if it has several.
    #[arg(long)]
    subset: Option<String>,
    /// The split to train on, as in `train` or `train[:90%]`.
    #[arg(long)]
    split: Option<String>,
    /// The data's field with the prompt, where its name does not say so.
    #[arg(long, value_name = "FIELD")]
    prompt_key: Option<String>,
    /// The data's field with the answer, where its name does not say so.
    #[arg(long, value_name = "FIELD")]
    answer_key: Option<String>,
    /// Format of prompts that are plain text: as a user's message (user), unchanged (as_written), or
    /// user if the model has a chat template (auto).
    #[arg(long, value_parser = FORMATS)]
    chat: Option<String>,
    /// When an answer is right: it is the ground truth, letter by letter (exact); its last number equals
    /// the ground truth's (numeric); its final answer equals it as a number, fraction or formula (math).
    #[arg(long, value_parser = REWARDS)]
    reward: Option<String>,
    /// Optimizer steps.
    #[arg(long)]
    steps: Option<u64>,
    /// Ask nothing.
    #[arg(long, short)]
    yes: bool,
    /// Overwrite the file if it is there.
    #[arg(long)]
    force: bool,
}

impl Init {
    pub fn run(self, registry: &Registry) -> Result<()> {
        let file = self.path.display().to_string();
        if self.path.exists() && !self.force {
            return Err(refused(format!("{file} is there already; name another file, or say --force")));
        }
        let text = self.recipe()?;
        atomic_file::create_folder_of(&self.path).with_context(|| format!("making the folder of {file}"))?;
        atomic_file::write(&self.path, &text).with_context(|| format!("writing {file}"))?;
        // The file alone: variables of the environment belong to a later call.
        let data = |plan: &Plan| survey::of(plan).complaints;
        let loaded = checked(&self.path, &[], Computes::Here, registry, data).map_err(|errors| {
            out::complain(&format!("written to {file}, which is to be completed:"));
            End::Recipe(errors)
        })?;
        out::text(&format!("{}\nwritten to {file}; to run it: rollflow run {file}\n", text_of(&loaded)))
    }

    fn recipe(&self) -> Result<String> {
        let asker = Asker::new(!self.yes);
        let pipeline = asker.choose("What runs?", self.pipeline.as_deref(), &PIPELINES, "grpo")?;
        let model =
            asker.ask("Which model: tiny, a Hugging Face folder, a hub id or a preset?", self.model.as_deref(), "tiny")?;
        let question = "What is asked: arithmetic, or which file, folder or data set?";
        let task = asker.ask(question, self.task.as_deref(), "arithmetic")?;
        let steps = |proposed: &str| -> Result<u64> {
            let said = asker.ask("How many optimizer steps?", self.steps.map(|steps| steps.to_string()).as_deref(), proposed)?;
            said.parse().map_err(|_| refused(format!("{said:?} is no number of steps")))
        };
        // Other models have derived rates; a tiny one needs a larger one to learn in so few steps.
        let tiny = model == "tiny";
        let rate = |tiny_lr: &str| if tiny { format!("lr = {tiny_lr}\n") } else { String::new() };

        let mut text = format!(
            "# A recipe of rollflow. docs/reference/recipe has every key; what is left out has its default. \
             To look at it before it runs: rollflow check\n\
             pipeline = \"{pipeline}\"\nname = \"{}\"\n# Every random draw follows from it.\nseed = 0\n",
            pipeline.replace('_', "-")
        );
        text += &model_section(&model);
        let data = if task == "arithmetic" { None } else { Some(self.data(&asker, &pipeline, &task)?) };
        match &data {
            None => text += "\n# Sums such as 7+5=, made on the spot.\n[task]\nkind = \"arithmetic\"\ndigits = 1\n",
            Some(data) => {
                if has_template(&model) {
                    let question = "How are questions asked that are plain text?";
                    let ask = asker.choose(question, self.chat.as_deref(), &FORMATS, "auto")?;
                    text += &format!(
                        "\n# Prompts that are plain text become a turn of the model's user where it has a chat template (auto). \
                         `system` adds a system turn.\n[chat]\nask = \"{ask}\"\n"
                    );
                }
                text += &data.section(&pipeline);
            }
        }
        text += &match pipeline.as_str() {
            "sft" => {
                let (steps, rate) = (steps("200")?, rate("1e-3"));
                format!("\n# Imitates the task's answers.\n[sft]\nsteps = {steps}\nbatch = 32\n{rate}")
            }
            "sft_then_grpo" => format!(
                "\n# Imitates the task's answers first, as a run of its own in the folder `sft` of this one's.\n\
                 [sft]\nsteps = 25\nbatch = 64\n{}",
                rate("1e-3")
            ),
            _ if tiny => {
                "\n# A random model is never right: it imitates first, briefly. Remove this for a model that knows something.\n\
                          [sft]\nsteps = 25\nbatch = 64\nlr = 1e-3\n"
                    .to_owned()
            }
            _ => String::new(),
        };
        if pipeline != "sft" {
            let proposed = if data.is_some() { "math" } else { "exact" };
            let reward = asker.choose("When is an answer right?", self.reward.as_deref(), &REWARDS, proposed)?;
            let longest = if data.is_some() { positions(&model).map_or(256, |most| 256.min(most / 2)) } else { 4 };
            let (groups, steps) = (if tiny { 32 } else { 8 }, steps("300")?);
            let (rate, held_out) = (rate("5e-4"), data.as_ref().map(Data::evaluation).unwrap_or_default());
            text += &format!(
                "\n# Answers to a prompt, whose rewards are compared; and their longest length, in tokens.\n\
                 [generate]\ngroup_size = 8\nmax_new_tokens = {longest}\n\
                 \n# What an answer earns.\n[reward]\nkind = \"{reward}\"\n\
                 \n# Groups whose answers all earned the same teach nothing.\n[[filter]]\nkind = \"nonzero_std\"\n\
                 \n# Groups that an optimizer step learns from.\n[batch]\ngroups = {groups}\n\
                 \n[train]\nsteps = {steps}\n{rate}\
                 \n# Versions by which generation may run ahead of training; 0 is the synchronous algorithm.\n\
                 [flow]\nmax_staleness = 1\n\
                 \n# Every 50 steps, what the newest weights know: greedy and sampled accuracy, pass@k.\n\
                 [eval]\nevery = 50\nsamples = 4\n{held_out}"
            );
        }
        Ok(text + "\n[checkpoint]\nevery = 100\nkeep = 3\n")
    }

    /// Asks for the data set's subset and split, its number of records, and the fields whose names
    /// are unusual.
    fn data(&self, asker: &Asker, pipeline: &str, name: &str) -> Result<Data> {
        let mut spec = DataSpec { subset: self.subset.clone(), ..DataSpec::new(name) };
        (spec.columns.prompt, spec.columns.answer) = (self.prompt_key.clone(), self.answer_key.clone());
        let mut data = Data { spec, split: self.split.clone(), held_out: None, records: None };
        self.cut(asker, &mut data)?;
        let Err(why) = data.look(pipeline) else { return Ok(data) };
        // A data set that is not there yet has no fields to ask for; `check` reports it.
        if data.spec.check().is_ok() {
            asker.say(&why);
            let given = data.spec.columns.clone();
            let columns = &mut data.spec.columns;
            columns.prompt = Some(asker.ask("Its field with the prompt?", columns.prompt.as_deref(), "prompt")?);
            columns.answer = Some(asker.ask("Its field with the answer?", columns.answer.as_deref(), "answer")?);
            if let Err(why) = data.look(pipeline) {
                asker.say(&why);
                // `check` reports the data's own fields.
                data.spec.columns = given;
            }
        }
        Ok(data)
    }

    /// Asks for the subset and the split, where there is a choice.
    fn cut(&self, asker: &Asker, data: &mut Data) -> Result<()> {
        let Ok(subsets) = data.spec.subsets() else { return Ok(()) };
        if data.spec.subset.is_none() && !subsets.is_empty() {
            let question = format!("Which subset of {}", data.spec.data.display());
            data.spec.subset = Some(asker.pick(&question, "--subset", &subsets)?);
        }
        let Ok(splits) = data.spec.splits() else { return Ok(()) };
        let has = |name: &str| splits.iter().any(|split| split == name);
        if let (None, Some(first)) = (&data.split, splits.iter().find(|split| *split != "train")) {
            let proposed = if has("train") { "train" } else { first };
            let question = format!("Which split is trained on ({})?", splits.join(", "));
            data.split = Some(asker.ask(&question, None, proposed)?).filter(|split| split != "train");
        }
        // Of a split by another name than the listed ones it is not known which of them it is.
        let trained = data.trained().split('[').next().unwrap_or_default();
        let others = ["test", "validation", "dev"].into_iter().filter(|split| *split != trained && has(trained));
        data.held_out = others.into_iter().find(|split| has(split)).map(str::to_owned);
        Ok(())
    }
}

fn model_section(model: &str) -> String {
    if model == "tiny" {
        return "\n# A small random decoder with a character tokenizer, for experiments that take minutes.\n[model]\nkind = \"tiny\"\n"
            .to_owned();
    }
    let key = if Preset::named(model).is_some() { "preset" } else { "path" };
    format!(
        "\n# config.json, safetensors and tokenizer.json, as Hugging Face has them: a folder, or an id or preset that the hub's \
         tools have fetched.\n[model]\nkind = \"folder\"\n{key} = {}\n",
        quoted(model)
    )
}

/// Returns the sequence length of the model, prompt and completion together, if its configuration
/// is available.
fn positions(model: &str) -> Option<usize> {
    let folder = model_folder(Path::new(model)).ok()?;
    Some(ModelConfig::from_dir(&folder).ok()?.max_positions)
}

/// Returns true if the model has a chat template, as far as that is known here.
fn has_template(model: &str) -> bool {
    let tokenizer = || Tokenizer::from_dir(&tokenizer_folder(model_folder(Path::new(model)).ok()?).ok()?).ok();
    Preset::named(model).is_some() || tokenizer().is_some_and(|tokenizer| tokenizer.chat().is_ok())
}

/// A data set, and what was found in it.
struct Data {
    spec: DataSpec,
    /// The split that is trained on, unless it is `train`.
    split: Option<String>,
    /// Split of the data set that an evaluation uses.
    held_out: Option<String>,
    records: Option<usize>,
}

impl Data {
    /// Counts the records that can be used, or says why there are none.
    fn look(&mut self, pipeline: &str) -> Result<(), String> {
        self.spec.split = self.trained().to_owned();
        let records = match pipeline {
            "sft" => DataSet::<Example>::open(&self.spec).map(|data| data.len()),
            // Each of `REWARDS` compares with a reference answer.
            _ => DataSet::<Prompt>::open_if(&self.spec, |prompt| data::answered(true, prompt)).map(|data| data.len()),
        };
        self.records = Some(records.map_err(|error| error.to_string())?);
        Ok(())
    }

    /// The split that is trained on.
    fn trained(&self) -> &str {
        self.split.as_deref().unwrap_or("train")
    }

    /// Returns true if the last records are held out: there are enough of them, all of a split, and
    /// no other split for evaluation.
    fn is_divided(&self) -> bool {
        let whole = !self.trained().contains('[');
        self.held_out.is_none() && whole && self.records.is_some_and(|records| records >= ENOUGH)
    }

    fn keys(&self, split: Option<&str>) -> Vec<String> {
        let DataSpec { data, subset, columns, .. } = &self.spec;
        let given = [("prompt", &columns.prompt), ("answer", &columns.answer)];
        let columns: Vec<String> =
            given.into_iter().filter_map(|(key, field)| Some(format!("{key} = {}", quoted(field.as_ref()?)))).collect();
        let mut keys = vec!["kind = \"data\"".to_owned(), format!("data = {}", quoted(&data.to_string_lossy()))];
        keys.extend(subset.as_ref().map(|subset| format!("subset = {}", quoted(subset))));
        keys.extend(split.map(|split| format!("split = {}", quoted(split))));
        keys.extend((!columns.is_empty()).then(|| format!("columns = {{ {} }}", columns.join(", "))));
        keys
    }

    fn section(&self, pipeline: &str) -> String {
        let divided = (self.is_divided() && pipeline != "sft").then(|| format!("{}[:90%]", self.trained()));
        let split = divided.as_deref().or(self.split.as_deref());
        format!(
            "\n# Fields are recognised by their names (docs/how_to/data.md); `columns` says which hold what where they are not.\n\
             [task]\n{}\n",
            self.keys(split).join("\n")
        )
    }

    /// Number and source of the prompts of an evaluation.
    fn evaluation(&self) -> String {
        let of = |split: &str| format!("limit = 64\ntask = {{ {} }}\n", self.keys(Some(split)).join(", "));
        match &self.held_out {
            Some(split) => of(split),
            None if self.is_divided() => of(&format!("{}[90%:]", self.trained())),
            None => "limit = 64\n".to_owned(),
        }
    }
}

/// Quotes a text for TOML.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}
