//! `rollflow init`: a few questions, and a recipe with comments that `check` accepts.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use rollflow::recipe;

use super::plans::show;
use super::{REFUSED, out};
use crate::registry::Registry;

/// Write a recipe with comments. Asks what it is not told, on a terminal; elsewhere, and with --yes, it takes what it proposes.
#[derive(Args)]
pub struct Init {
    /// The recipe's file.
    #[arg(default_value = "recipe.toml")]
    path: PathBuf,
    /// What runs.
    #[arg(long, value_enum)]
    pipeline: Option<Kind>,
    /// `tiny`, or a Hugging Face folder.
    #[arg(long)]
    model: Option<String>,
    /// `arithmetic`, or a file of JSON lines.
    #[arg(long)]
    task: Option<String>,
    /// The file's field with the prompt.
    #[arg(long, value_name = "FIELD")]
    prompt_key: Option<String>,
    /// The file's field with the answer.
    #[arg(long, value_name = "FIELD")]
    answer_key: Option<String>,
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
enum Kind {
    /// Learn from a reward.
    Grpo,
    /// Imitate answers.
    Sft,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RewardKind {
    /// The answer is the ground truth, letter by letter.
    Exact,
    /// Its last number is the ground truth's.
    Numeric,
    /// Its final answer says the same, as a number, fraction or formula.
    Math,
}

/// Whoever answers.
struct Asker {
    asks: bool,
}

impl Asker {
    /// What was given, or said, or else proposed.
    fn ask(&self, question: &str, given: Option<String>, proposed: &str) -> Result<String> {
        if let Some(given) = given {
            return Ok(given);
        }
        if !self.asks {
            return Ok(proposed.to_owned());
        }
        eprint!("{question} [{proposed}] ");
        std::io::stderr().flush().ok();
        let mut said = String::new();
        std::io::stdin().lock().read_line(&mut said).context("reading an answer")?;
        Ok(if said.trim().is_empty() { proposed.to_owned() } else { said.trim().to_owned() })
    }

    /// One of a few words; asks again until it is.
    fn choose<T: ValueEnum>(&self, question: &str, given: Option<T>, proposed: &str) -> Result<T> {
        if let Some(given) = given {
            return Ok(given);
        }
        let words: Vec<String> =
            T::value_variants().iter().filter_map(|choice| Some(choice.to_possible_value()?.get_name().to_owned())).collect();
        loop {
            let said = self.ask(&format!("{question} ({})", words.join(", ")), None, proposed)?;
            match T::from_str(&said, true) {
                Ok(choice) => return Ok(choice),
                Err(_) if self.asks => eprintln!("one of {}, please", words.join(", ")),
                Err(_) => bail!("{proposed} is none of {}", words.join(", ")),
            }
        }
    }
}

impl Init {
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        if self.path.exists() && !self.force {
            eprintln!("error: {} is there already; name another file, or say --force", self.path.display());
            return Ok(ExitCode::from(REFUSED));
        }
        let text = self.recipe()?;
        let file = self.path.display().to_string();
        std::fs::write(&self.path, &text).with_context(|| format!("writing {file}"))?;
        match recipe::load_with(&self.path, &[], |plan| registry.complaints(plan)) {
            Ok(plan) => {
                out::text(&format!("{}\nwritten to {file}; to run it: rollflow run {file}\n", recipe::check_text(&plan)))?;
                Ok(ExitCode::SUCCESS)
            }
            Err(errors) => {
                eprintln!("written to {file}, which is to be completed:");
                show(&errors);
                Ok(ExitCode::from(REFUSED))
            }
        }
    }

    fn recipe(&self) -> Result<String> {
        let asker = Asker { asks: !self.yes && std::io::stdin().is_terminal() };
        let pipeline = asker.choose("What runs?", self.pipeline, "grpo")?;
        let model = asker.ask("Which model: tiny, or a Hugging Face folder?", self.model.clone(), "tiny")?;
        let task = asker.ask("What is asked: arithmetic, or a file of JSON lines?", self.task.clone(), "arithmetic")?;
        let tiny = model == "tiny";
        let mut text = OPENING.to_owned();
        let named = |kind: Kind| if kind == Kind::Grpo { "grpo" } else { "sft" };
        text += &format!("pipeline = \"{0}\"\nname = \"{0}\"\n# Every random draw follows from it.\nseed = 0\n", named(pipeline));
        text += &if tiny { TINY.to_owned() } else { format!("{MODEL}path = {}\n", quoted(&model)) };
        let is_file = task != "arithmetic";
        text += &if is_file {
            let prompt = asker.ask("Its field with the prompt?", self.prompt_key.clone(), "prompt")?;
            let answer = asker.ask("Its field with the answer?", self.answer_key.clone(), "answer")?;
            format!("{JSONL}path = {}\nprompt_key = {}\nanswer_key = {}\n", quoted(&task), quoted(&prompt), quoted(&answer))
        } else {
            ARITHMETIC.to_owned()
        };
        let steps = |proposed: &str| -> Result<u64> {
            let said = asker.ask("How many optimizer steps?", self.steps.map(|steps| steps.to_string()), proposed)?;
            said.parse().with_context(|| format!("{said} is no number of steps"))
        };
        let lr = if tiny { "5e-4" } else { "1e-6" };
        match pipeline {
            Kind::Sft => {
                text += &format!("{SFT}steps = {}\nbatch = 32\nlr = {}\n", steps("200")?, if tiny { "1e-3" } else { "1e-5" })
            }
            Kind::Grpo => {
                if tiny {
                    text += WARM_UP;
                }
                let proposed = if is_file { "math" } else { "exact" };
                let reward = asker.choose("When is an answer right?", self.reward, proposed)?;
                let kind = reward.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
                let longest = if is_file { 256 } else { 4 };
                text += &format!("{GENERATE}group_size = 8\nmax_new_tokens = {longest}\n{REWARD}kind = \"{kind}\"\n{FILTER}");
                text += &format!("{TRAIN}steps = {}\nlr = {lr}\n{LATER}", steps("300")?);
            }
        }
        Ok(text)
    }
}

/// As TOML has it.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

const OPENING: &str = "\
# A recipe of rollflow. docs/recipes.md has every key; what is left out has its default. To look at it before it runs: rollflow check
";
const TINY: &str = "
# A small random decoder with a character tokenizer, for experiments that take minutes.
[model]
kind = \"tiny\"
";
const MODEL: &str = "
# config.json, safetensors and tokenizer.json, as Hugging Face has them.
[model]
kind = \"folder\"
";
const ARITHMETIC: &str = "
# Sums such as 7+5=, made on the spot.
[task]
kind = \"arithmetic\"
digits = 1
";
const JSONL: &str = "
# One JSON object a line.
[task]
kind = \"jsonl\"
";
const SFT: &str = "
# Imitates the task's answers.
[sft]
";
const WARM_UP: &str = "
# A random model is never right: it imitates first, briefly. Remove this for a model that knows something.
[sft]
steps = 25
batch = 64
lr = 1e-3
";
const GENERATE: &str = "
# So many answers to a prompt, whose rewards are compared; and how long they may be, in tokens.
[generate]
";
const REWARD: &str = "
# What an answer earns.
[reward]
";
const FILTER: &str = "
# Groups whose answers all earned the same teach nothing.
[[filter]]
kind = \"nonzero_std\"

# Groups that an optimizer step learns from.
[batch]
groups = 32
";
const TRAIN: &str = "
[train]
";
const LATER: &str = "
# Generation may run ahead of training by so many versions; 0 is the synchronous algorithm.
[flow]
max_staleness = 1

# Every so many steps, what the newest weights know: greedy and sampled accuracy, pass@k.
[eval]
every = 50
samples = 4

[checkpoint]
every = 100
keep = 3
";
