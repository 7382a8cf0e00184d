//! `rollflow init`: a few questions, and a recipe with comments that `check` accepts.

mod ask;
mod texts;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use rollflow::data::Prompt;
use rollflow::data::source::{Columns, DataSet, DataSpec, Example};
use rollflow::model::ModelConfig;
use rollflow::prelude::Tokenizer;
use rollflow::recipe::Preset;
use rollflow::train::tokenizer_folder;
use rollflow::util::atomic_file;

use super::check::text_of;
use super::plans::{explained, show};
use super::{REFUSED, Refused, out};
use crate::assemble::models::model_folder;
use crate::registry::Registry;
use ask::Asker;

/// Fewer records are not divided into those that are trained and those that are held out.
const ENOUGH: usize = 50;

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
    /// Pipeline.
    #[arg(long, value_enum)]
    pipeline: Option<Kind>,
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
    /// Format of prompts that are plain text.
    #[arg(long, value_enum)]
    chat: Option<AskKind>,
    /// When an answer is right.
    #[arg(long, value_enum)]
    reward: Option<RewardKind>,
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

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    /// Learn from a reward.
    Grpo,
    /// Imitate answers.
    Sft,
    /// Imitate answers, then learn from a reward.
    SftThenGrpo,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum AskKind {
    /// A user's message if the model has a chat template, else the text itself.
    Auto,
    /// In the model's chat format, as its user.
    User,
    /// The text itself.
    AsWritten,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RewardKind {
    /// The answer is the ground truth, letter by letter.
    Exact,
    /// The last number equals the ground truth's.
    Numeric,
    /// The final answer equals the ground truth as a number, fraction or formula.
    Math,
}

impl Init {
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        let file = self.path.display().to_string();
        if self.path.exists() && !self.force {
            return Err(Refused::because(format!("{file} is there already; name another file, or say --force")));
        }
        let text = self.recipe()?;
        atomic_file::write(&self.path, &text).with_context(|| format!("writing {file}"))?;
        match explained(&self.path, &[], registry, |_| Vec::new()) {
            Ok(loaded) => {
                out::text(&format!("{}\nwritten to {file}; to run it: rollflow run {file}\n", text_of(&loaded)))?;
                Ok(ExitCode::SUCCESS)
            }
            Err(errors) => {
                out::complain(&format!("written to {file}, which is to be completed:"));
                show(&errors);
                Ok(ExitCode::from(REFUSED))
            }
        }
    }

    fn recipe(&self) -> Result<String> {
        let asker = Asker::new(!self.yes);
        let pipeline = asker.choose("What runs?", self.pipeline, Kind::Grpo)?;
        let model = asker.ask("Which model: tiny, a Hugging Face folder, a hub id or a preset?", self.model.clone(), "tiny")?;
        let task = asker.ask("What is asked: arithmetic, or which file, folder or data set?", self.task.clone(), "arithmetic")?;
        let (tiny, is_data) = (model == "tiny", task != "arithmetic");
        let word = asker.word(pipeline);
        let mut text = texts::OPENING.to_owned();
        text += &format!(
            "pipeline = \"{word}\"\nname = \"{}\"\n# Every random draw follows from it.\nseed = 0\n",
            word.replace('_', "-")
        );
        text += &model_section(&model);
        let held_out = if is_data {
            let data = self.data(&asker, pipeline, &task)?;
            if has_template(&model) {
                let how = asker.choose("How are questions asked that are plain text?", self.chat, AskKind::Auto)?;
                text += &format!("{}ask = \"{}\"\n", texts::CHAT, asker.word(how));
            }
            text += &data.section(pipeline);
            data.held_out()
        } else {
            text += texts::ARITHMETIC;
            None
        };
        let steps = |proposed: &str| -> Result<u64> {
            let said = asker.ask("How many optimizer steps?", self.steps.map(|steps| steps.to_string()), proposed)?;
            said.parse().map_err(|_| Refused::because(format!("{said:?} is no number of steps")))
        };
        // Other models have derived rates; a tiny one needs a larger one to learn in so few steps.
        let rate = |tiny_lr: &str| if tiny { format!("lr = {tiny_lr}\n") } else { String::new() };
        match pipeline {
            Kind::Sft => text += &format!("{}steps = {}\nbatch = 32\n{}", texts::SFT, steps("200")?, rate("1e-3")),
            Kind::SftThenGrpo => text += &format!("{}steps = 25\nbatch = 64\n{}", texts::SFT_FIRST, rate("1e-3")),
            Kind::Grpo if tiny => text += texts::WARM_UP,
            Kind::Grpo => {}
        }
        if pipeline != Kind::Sft {
            let proposed = if is_data { RewardKind::Math } else { RewardKind::Exact };
            let kind = asker.word(asker.choose("When is an answer right?", self.reward, proposed)?);
            let longest = if is_data { positions(&model).map_or(256, |most| 256.min(most / 2)) } else { 4 };
            let groups = if tiny { 32 } else { 8 };
            text +=
                &format!("{}group_size = 8\nmax_new_tokens = {longest}\n{}kind = \"{kind}\"\n", texts::GENERATE, texts::REWARD);
            text += &format!("{}groups = {groups}\n{}steps = {}\n", texts::FILTER, texts::TRAIN, steps("300")?);
            text += &format!("{}{}{}{}", rate("5e-4"), texts::FLOW, texts::EVAL, held_out.unwrap_or_default());
        }
        Ok(text + texts::CHECKPOINT)
    }

    /// Asks for the data set's subset and split, its number of records, and the fields whose names
    /// are unusual.
    fn data(&self, asker: &Asker, pipeline: Kind, name: &str) -> Result<Data> {
        let mut data = Data {
            name: name.to_owned(),
            subset: self.subset.clone(),
            split: self.split.clone(),
            prompt: self.prompt_key.clone(),
            answer: self.answer_key.clone(),
            ..Data::default()
        };
        self.cut(asker, &mut data)?;
        let Err(why) = data.look(pipeline) else { return Ok(data) };
        // A data set that is not there yet has no fields to ask for; `check` reports it.
        if data.spec().check().is_ok() {
            asker.say(&why);
            data.prompt = Some(asker.ask("Its field with the prompt?", data.prompt, "prompt")?);
            data.answer = Some(asker.ask("Its field with the answer?", data.answer, "answer")?);
            if let Err(why) = data.look(pipeline) {
                asker.say(&why);
            }
        }
        Ok(data)
    }

    /// Asks for the subset and the split, where there is a choice.
    fn cut(&self, asker: &Asker, data: &mut Data) -> Result<()> {
        let Ok(subsets) = data.spec().subsets() else { return Ok(()) };
        if data.subset.is_none() && !subsets.is_empty() {
            data.subset = Some(asker.pick(&format!("Which subset of {}", data.name), "--subset", &subsets)?);
        }
        let Ok(splits) = data.spec().splits() else { return Ok(()) };
        let has = |name: &str| splits.iter().any(|split| split == name);
        if let (None, Some(first), false) = (&data.split, splits.first(), splits.len() < 2) {
            let proposed = if has("train") { "train" } else { first };
            let question = format!("Which split is trained on ({})?", splits.join(", "));
            data.split = Some(asker.ask(&question, None, proposed)?).filter(|split| split != "train");
        }
        data.held_out = ["test", "validation", "dev"].into_iter().find(|split| has(split)).map(str::to_owned);
        Ok(())
    }
}

fn model_section(model: &str) -> String {
    if model == "tiny" {
        return texts::TINY.to_owned();
    }
    let key = if Preset::named(model).is_some() { "preset" } else { "path" };
    format!("{}{key} = {}\n", texts::MODEL, quoted(model))
}

/// Returns the sequence length of the model, prompt and completion together, if its configuration
/// is available.
fn positions(model: &str) -> Option<usize> {
    let folder = model_folder(Path::new(model)).ok()?;
    Some(ModelConfig::from_dir(&folder).ok()?.max_positions)
}

/// Returns true if the model has a chat template, as far as that is known here.
fn has_template(model: &str) -> bool {
    let tokenizer = || Tokenizer::from_dir(&tokenizer_folder(model_folder(Path::new(model)).ok()?)).ok();
    Preset::named(model).is_some() || tokenizer().is_some_and(|tokenizer| tokenizer.chat().is_ok())
}

/// A data set, and what was found in it.
#[derive(Default)]
struct Data {
    name: String,
    subset: Option<String>,
    /// The split that is trained on, unless it is `train`.
    split: Option<String>,
    /// Split of the data set that an evaluation uses.
    held_out: Option<String>,
    prompt: Option<String>,
    answer: Option<String>,
    records: Option<usize>,
}

impl Data {
    fn spec(&self) -> DataSpec {
        let columns = Columns { prompt: self.prompt.clone(), answer: self.answer.clone(), ..Columns::default() };
        let split = self.split.clone().unwrap_or_else(|| "train".to_owned());
        DataSpec { columns, split, subset: self.subset.clone(), ..DataSpec::new(&self.name) }
    }

    /// Counts the records that can be used, or says why there are none.
    fn look(&mut self, pipeline: Kind) -> Result<(), String> {
        let records = match pipeline {
            Kind::Sft => DataSet::<Example>::open(&self.spec()).map(|data| data.len()),
            _ => DataSet::<Prompt>::open(&self.spec()).map(|data| data.len()),
        };
        self.records = Some(records.map_err(|error| error.to_string())?);
        Ok(())
    }

    /// Returns true if the last records are held out: there are enough of them, and no split for
    /// evaluation.
    fn is_divided(&self) -> bool {
        self.held_out.is_none() && self.split.is_none() && self.records.is_some_and(|records| records >= ENOUGH)
    }

    fn keys(&self, split: Option<&str>) -> Vec<String> {
        let given = [("prompt", &self.prompt), ("answer", &self.answer)];
        let columns: Vec<String> =
            given.into_iter().filter_map(|(key, field)| Some(format!("{key} = {}", quoted(field.as_ref()?)))).collect();
        let mut keys = vec!["kind = \"data\"".to_owned(), format!("data = {}", quoted(&self.name))];
        keys.extend(self.subset.as_ref().map(|subset| format!("subset = {}", quoted(subset))));
        keys.extend(split.map(|split| format!("split = {}", quoted(split))));
        keys.extend((!columns.is_empty()).then(|| format!("columns = {{ {} }}", columns.join(", "))));
        keys
    }

    fn section(&self, pipeline: Kind) -> String {
        let split = if self.is_divided() && pipeline != Kind::Sft { Some("train[:90%]") } else { self.split.as_deref() };
        format!("{}{}\n", texts::DATA, self.keys(split).join("\n"))
    }

    /// The prompts of an evaluation.
    fn held_out(&self) -> Option<String> {
        let of = |split: &str| format!("limit = 64\ntask = {{ {} }}\n", self.keys(Some(split)).join(", "));
        Some(match &self.held_out {
            Some(split) => of(split),
            None if self.is_divided() => of("train[90%:]"),
            None => "limit = 64\n".to_owned(),
        })
    }
}

/// Quotes a text for TOML.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}
