//! `rollflow rollouts`: recorded rollouts as a person, a check or another training run reads them.

use std::borrow::Borrow;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use rollflow::algo::rollouts::{batch_issues, inspect_sample};
use rollflow::data::jsonl::{load_samples, save_samples};
use rollflow::data::source::export_conversations;
use rollflow::data::{Batch, Group, Prompt, PromptText, Sample, conversation_to_markdown, last_message};
use rollflow::observe::logs::{Rollout, read_whole_lines};
use rollflow::util::{atomic_file, untrusted};
use serde::Serialize;

use super::condition::Condition;
use super::export::refuse_existing;
use super::{End, out, refused};

/// Longest prompt or response in the list, in characters.
const CELL: usize = 48;

/// Show the rollouts that a run trained on, check them, or write them as samples or as a data set
/// for [sft].
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow rollouts runs/mine --where 'step == 40' --show tokens\n\
\x20 rollflow rollouts runs/mine --where 'reward >= 1' --conversations best/train.jsonl")]
pub struct Rollouts {
    /// A run, its rollouts.jsonl or replayed.jsonl, or a file that --samples wrote.
    source: PathBuf,
    /// Only those that fit, as in 'step == 40 && reward < 0.5'. Fields: step, group, sample, reward,
    /// reward.PART, advantage, length, status, metadata.KEY.
    #[arg(long = "where", value_name = "CONDITION", value_parser = Condition::parse)]
    condition: Option<Condition>,
    /// Show the last so many.
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,
    /// Form in which they are shown.
    #[arg(long, value_enum, default_value_t = Form::List)]
    show: Form,
    /// Report inconsistent rollouts instead of showing them; exit code 1 if there are any.
    #[arg(long, conflicts_with_all = ["samples", "conversations"])]
    check: bool,
    /// Write all that fit to this file, as samples: one JSON object a line, with every column; `group` is
    /// named `group_index`. The file must not exist yet; its folder is made.
    #[arg(long, value_name = "FILE")]
    samples: Option<PathBuf>,
    /// Write all that fit to this file, as conversations. The file must not exist yet. Its folder is made, and
    /// is then a data set for [sft].
    #[arg(long, value_name = "FILE")]
    conversations: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// A line each: prompt, response and reward.
    List,
    /// The conversation, as Markdown.
    Chat,
    /// A line for every token, with its weight, log-probability and version.
    Tokens,
}

/// A sample, with the columns of its line that samples lack. A file of samples is read without them.
#[derive(Default, Serialize)]
struct Recorded {
    /// The optimizer step that trained it.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u64>,
    #[serde(flatten)]
    sample: Sample,
    #[serde(skip_serializing_if = "Option::is_none")]
    trainer_log_probs: Option<Vec<Option<f32>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    entropies: Option<Vec<Option<f32>>>,
    #[serde(skip_serializing_if = "String::is_empty")]
    source: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    spared: bool,
}

impl From<Rollout> for Recorded {
    fn from(mut rollout: Rollout) -> Self {
        Recorded {
            step: Some(rollout.step),
            trainer_log_probs: rollout.trainer_log_probs.take(),
            entropies: rollout.entropies.take(),
            source: std::mem::take(&mut rollout.source),
            spared: rollout.spared,
            sample: rollout.into_sample(),
        }
    }
}

impl Borrow<Sample> for Recorded {
    fn borrow(&self) -> &Sample {
        &self.sample
    }
}

/// Checks that a file of JSON lines may be written, and makes its folder.
fn prepare(file: &Path) -> Result<()> {
    refuse_existing(file)?;
    let end = file.extension().and_then(|end| end.to_str()).unwrap_or_default();
    if ["parquet", "gz", "zst"].iter().any(|other| end.eq_ignore_ascii_case(other)) {
        let why = format!("{}: JSON lines are written, neither Parquet nor compressed; end the name in .jsonl", file.display());
        return Err(refused(why));
    }
    atomic_file::create_folder_of(file).with_context(|| format!("making the folder of {}", file.display()))
}

impl Rollouts {
    pub fn run(self) -> Result<()> {
        let recorded = recorded(&self.source)?;
        let writes = self.samples.is_some() || self.conversations.is_some();
        if writes && self.samples == self.conversations {
            return Err(refused("--samples and --conversations name the same file; choose another for one"));
        }
        self.samples.iter().chain(&self.conversations).try_for_each(|file| prepare(file))?;
        if self.check {
            return self.report(recorded);
        }
        let (mut kept, mut fitting) = (VecDeque::new(), 0);
        for rollout in recorded {
            let rollout = rollout?;
            if self.fits(&rollout) {
                fitting += 1;
                kept.push_back(rollout);
                kept.drain(..kept.len().saturating_sub(self.limit));
            }
        }
        ensure!(fitting > 0, "no rollout fits in {}", self.source.display());
        if let Some(file) = &self.samples {
            save_samples(file, self.again(fitting)?)?;
            out::line(&format!("{fitting} samples: {}", file.display()))?;
        }
        if let Some(file) = &self.conversations {
            // The same file may have two names.
            prepare(file)?;
            export_conversations(file, self.again(fitting)?)?;
            out::line(&format!("{fitting} conversations: {}", file.display()))?;
        }
        if writes { Ok(()) } else { out::text(&shown(&kept, self.show)) }
    }

    /// Reads the first `count` samples that fit once more, so that they are not held in memory.
    fn again(&self, count: usize) -> Result<impl Iterator<Item = Recorded>> {
        let fitting = recorded(&self.source)?.filter_map(Result::ok).filter(|rollout| self.fits(rollout));
        Ok(fitting.take(count))
    }

    fn fits(&self, Recorded { step, sample, .. }: &Recorded) -> bool {
        self.condition.as_ref().is_none_or(|condition| condition.holds(*step, sample))
    }

    /// Prints the issues of each step's batch. It reads one step at a time.
    fn report(&self, recorded: impl Iterator<Item = Result<Recorded>>) -> Result<()> {
        let (mut step, mut samples, mut seen, mut issues) = (None, Vec::new(), 0, 0);
        for rollout in recorded {
            let rollout = rollout?;
            if rollout.step != step {
                issues += said(step, std::mem::take(&mut samples))?;
                step = rollout.step;
            }
            if self.fits(&rollout) {
                seen += 1;
                samples.push(rollout.sample);
            }
        }
        issues += said(step, samples)?;
        out::line(&format!("{issues} issues in {seen} rollouts"))?;
        if issues == 0 { Ok(()) } else { Err(End::Said(1).into()) }
    }
}

/// Reads the rollouts of a run or a file, in its order; of a run, in constant memory, and without a
/// last line that a killed run left incomplete.
fn recorded(source: &Path) -> Result<Box<dyn Iterator<Item = Result<Recorded>>>> {
    let file = if source.is_dir() { source.join("rollouts.jsonl") } else { source.to_owned() };
    if !file.is_file() {
        return Err(refused(format!("there is no {}; observe.rollouts_every = 1 records a run's rollouts", file.display())));
    }
    let mut first = String::new();
    BufReader::new(File::open(&file)?).read_line(&mut first).with_context(|| format!("reading {}", file.display()))?;
    let is_sample = serde_json::from_str::<serde_json::Value>(&first).is_ok_and(|line| line.get("group_index").is_some());
    if is_sample {
        return Ok(Box::new(load_samples(&file)?.into_iter().map(|sample| Ok(Recorded { sample, ..Recorded::default() }))));
    }
    Ok(Box::new(read_whole_lines::<Rollout>(file)?.map(|line| Ok(line.map(Recorded::from)?))))
}

/// Prints the issues of a step's samples, and returns their number.
fn said(step: Option<u64>, samples: Vec<Sample>) -> Result<usize> {
    let mut groups: BTreeMap<u64, Vec<Sample>> = BTreeMap::new();
    for sample in samples {
        groups.entry(sample.group_index).or_default().push(sample);
    }
    let group =
        |(id, samples)| Group { prompt: Arc::new(Prompt { ordinal: id, ..Prompt::default() }), samples, ..Group::default() };
    let issues = batch_issues(&Batch { groups: groups.into_iter().map(group).collect(), ..Batch::default() });
    let at = step.map_or_else(String::new, |step| format!("step {step}: "));
    issues.iter().try_for_each(|issue| out::line(&format!("{at}{}", untrusted::line(issue))))?;
    Ok(issues.len())
}

/// The prompt of a sample in short: of a chat, the user's last message.
pub fn asked(sample: &Sample) -> &str {
    match &sample.prompt {
        PromptText::Text(text) => text,
        PromptText::Chat(turns) => last_message(turns, Some("user")).map_or("", |turn| &turn.content),
    }
}

fn shown(rollouts: &VecDeque<Recorded>, form: Form) -> String {
    let of_step = |step: &Option<u64>| step.map_or_else(|| "–".to_owned(), |step| step.to_string());
    match form {
        Form::List => {
            let head = ["step", "group", "sample", "reward", "tokens", "prompt", "response"];
            let row = |Recorded { step, sample, .. }: &Recorded| {
                let cell = |text: &str| untrusted::line_of(text, CELL);
                let reward = sample.reward.map_or_else(|| "–".to_owned(), |reward| format!("{reward:.3}"));
                let [group, index] = [sample.group_index, u64::from(sample.index)].map(|number| number.to_string());
                vec![
                    of_step(step),
                    group,
                    index,
                    reward,
                    sample.generated().to_string(),
                    cell(asked(sample)),
                    cell(&sample.response),
                ]
            };
            let head = head.map(str::to_owned).to_vec();
            out::aligned(&[head].into_iter().chain(rollouts.iter().map(row)).collect::<Vec<_>>())
        }
        Form::Chat => {
            let page = |Recorded { step, sample, .. }: &Recorded| {
                let reward = sample.reward.map_or_else(|| "none".to_owned(), |reward| reward.to_string());
                let Sample { group_index, index, .. } = sample;
                let turns = conversation_to_markdown(&sample.conversation());
                format!("## step {}, group {group_index}, sample {index}, reward {reward}\n\n{turns}", of_step(step))
            };
            rollouts.iter().map(page).collect::<Vec<_>>().join("\n")
        }
        Form::Tokens => {
            let page = |Recorded { step, sample, .. }: &Recorded| format!("step {}, {}", of_step(step), inspect_sample(sample));
            rollouts.iter().map(page).collect::<Vec<_>>().join("\n")
        }
    }
}
