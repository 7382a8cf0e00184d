//! Survey of a recipe's files for `rollflow check`: every source of data is opened, a bounded number of
//! its records are validated, and Python files are loaded, as the run would.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use rollflow::data::source::{DataSpec, Example, Recorded, Shape, Survey, survey};
use rollflow::data::{DataError, RankedPair};
use rollflow::model::ModelError;
use rollflow::prelude::*;
use rollflow::recipe::{Chat, EnvironmentKind, Pipeline, Plan, Problem, Source, TaskData, TrainerBackend};
use rollflow::train::{RouterReplay, score_pair};
use rollflow::util::causes::full_message;
use rollflow::util::untrusted;

use crate::assemble::policy::Reader;
use crate::assemble::supervised::{self, Imitation};
use crate::assemble::{conversations, data, policy, preferences};
use crate::run::trackers::Trackers;
use crate::tinker;

/// Judgement of a record, as [`survey`] takes it.
type Judged = Result<Result<(), String>, String>;

/// Records of a source that are made into tokens: a second's work.
const TOKENIZED: usize = 500;

/// Findings in a recipe's data.
#[derive(Clone, Debug, Default)]
pub struct Surveyed {
    /// Each source, as a key and what is in it.
    pub sources: Vec<(String, Survey)>,
    /// Each source in a sentence, with its steps per epoch where they are known, and each Python file.
    pub lines: Vec<String>,
    /// Errors that would end the run.
    pub complaints: Vec<Problem>,
}

/// Surveys every source that the plan's pipeline reads. Missing files are left to the recipe's checks.
pub fn of(plan: &Plan) -> Surveyed {
    let mut all = Surveyed::default();
    let reader = &match Reader::of_plan(plan) {
        Ok(reader) => Some(reader),
        Err(error) => {
            // What is wrong with the model's own files is found where they are checked.
            let is_of_the_model = error.downcast_ref::<ModelError>().is_some();
            if !is_of_the_model && policy::tokenizer(&plan.model, &Default::default()).is_ok() {
                let help = "docs/how_to/chat.md says what templates may contain";
                all.complaints.push(Problem::of("chat", format!("`[chat]`: {}", full_message(error.as_ref())), help));
            }
            None
        }
    };
    if let TaskData::Rollouts { path, limit, .. } = &plan.task.data {
        let spec = DataSpec { max_samples: *limit, ..DataSpec::new(path) };
        all.look::<Recorded>("task.path", "", &spec, 1, None, |_| Ok(Ok(())));
    }
    match plan.pipeline {
        Pipeline::Sft => {}
        Pipeline::RewardModel => {
            let batch = plan.reward_model.as_ref().map(|of| of.batch);
            all.look_at::<RankedPair>("task", "", plan.task.data.sources(), batch, scored(&plan.chat, reader));
        }
        Pipeline::Dpo => {
            all.look_at::<RankedPair>(
                "task",
                "",
                plan.task.data.sources(),
                Some(plan.batch.groups),
                preferred(&plan.chat, reader),
            );
        }
        Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill | Pipeline::GrpoOffline => {
            let columns = all.prompts(plan, reader);
            all.python(plan, columns.as_ref());
            all.trainer(plan);
        }
    }
    let dense = reader.as_ref().is_some_and(|reader| reader.config.experts.is_none());
    let losses = plan.optimizations().filter(|(_, of)| of.router_aux_loss > 0.0);
    let losses = losses.map(|(section, _)| format!("{section}.router_aux_loss"));
    let replay = (plan.train.router_replay != RouterReplay::Off).then(|| "train.router_replay".to_owned());
    for key in losses.chain(replay).filter(|_| dense) {
        let problem = format!("`{key}`: the model is no mixture of experts");
        all.complaints.push(Problem::of(&key, problem, "leave it out"));
    }
    for (key, why) in Trackers::missing(plan) {
        all.complaints.push(Problem::of(&key, format!("`{key}`: {why}"), "or leave the tracker out"));
    }
    if let Some(sft) = &plan.sft {
        all.imitated(Imitation::of(plan, sft), plan.pipeline, reader);
    }
    if let Some(eval) = &plan.eval {
        let (section, purpose, task) = eval.task.as_ref().map_or(("task", " (eval)", &plan.task), |task| ("eval.task", "", task));
        match plan.pipeline {
            // The same records that are trained on, judged above.
            Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill | Pipeline::RewardModel | Pipeline::Dpo
                if section == "task" => {}
            Pipeline::RewardModel => all.look_at(section, purpose, task.data.sources(), None, scored(&plan.chat, reader)),
            Pipeline::Dpo => all.look_at(section, purpose, task.data.sources(), None, preferred(&plan.chat, reader)),
            _ => all.look_at(section, purpose, task.data.sources(), None, asked(plan, reader, |_| Ok(()))),
        }
    }
    all
}

/// Judges by `judge` as many records as make a second's work; those after them are usable.
fn first<'a, T>(
    reader: &'a Option<Reader>,
    judge: impl Fn(&T, &Reader) -> Judged + Sync + 'a,
) -> impl Fn(&T) -> Judged + Sync + 'a {
    let done = AtomicUsize::new(0);
    move |record| match reader.as_ref().filter(|_| done.fetch_add(1, Ordering::Relaxed) < TOKENIZED) {
        Some(reader) => judge(record, reader),
        None => Ok(Ok(())),
    }
}

/// Checks prompts: their reference answer, their length by `fits`, then chat template and tokenizer unless an
/// environment opens the conversation.
fn asked<'a>(
    plan: &Plan,
    reader: &'a Option<Reader>,
    fits: impl Fn(&Prompt) -> Result<(), String> + Sync + 'a,
) -> impl Fn(&Prompt) -> Judged + Sync + 'a {
    let (chat, is_opened, compares) = (plan.chat.clone(), plan.environment.is_some(), plan.reward.rule.compares());
    let rendered = first(reader, move |prompt: &Prompt, reader| {
        let text = conversations::asked(&chat, prompt.text.clone());
        match reader.tokenizer.encode_prompt(&Prompt { text, ..prompt.clone() }) {
            Err(error) if !is_opened => Err(error.to_string()),
            _ => Ok(Ok(())),
        }
    });
    move |prompt| match data::answered(compares, prompt).and_then(|()| fits(prompt)) {
        Ok(()) => rendered(prompt),
        Err(skip) => Ok(Err(skip)),
    }
}

/// Judges examples as they are made into samples.
fn prepared<'a>(of: Imitation<'a>, reader: &'a Option<Reader>) -> impl Fn(&Example) -> Judged + Sync + 'a {
    first(reader, move |example: &Example, reader| {
        if of.demonstrates() && of.sft.sources().is_empty() {
            let Example::Pair(pair) = example else { return Ok(Ok(())) };
            let shown = of.demonstrations(std::slice::from_ref(pair), &reader.tokenizer);
            return shown.map(|_| Ok(())).map_err(|error| full_message(error.as_ref()));
        }
        let sft = supervised::bounded(of.sft, reader);
        supervised::judge(of.chat, &sft, example, &reader.tokenizer).map_err(|error| error.to_string())
    })
}

/// Judges pairs as preferences are learned from them.
fn preferred<'a>(chat: &Chat, reader: &'a Option<Reader>) -> impl Fn(&RankedPair) -> Judged + Sync + 'a {
    let chat = chat.clone();
    first(reader, move |pair: &RankedPair, reader| Ok(preferences::fits(&chat, reader)(pair)))
}

/// Column in which a run keeps an answer that is no text.
const RECORDED_ANSWER: &str = "answer_of_record";

/// Judges pairs as a reward model learns from them.
fn scored<'a>(chat: &Chat, reader: &'a Option<Reader>) -> impl Fn(&RankedPair) -> Judged + Sync + 'a {
    let chat = chat.clone();
    first(reader, move |pair: &RankedPair, Reader { tokenizer, config }| {
        let read = score_pair(tokenizer, config, &conversations::asked_pair(&chat, pair.clone()));
        read.map(|_| Ok(())).map_err(|error| error.to_string())
    })
}

impl Surveyed {
    /// Looks at the prompts of `[task]`, and returns the columns of those that were judged, if any were.
    fn prompts(&mut self, plan: &Plan, reader: &Option<Reader>) -> Option<BTreeSet<String>> {
        let fits = data::fits(&plan.chat, plan.environment.as_ref(), reader.as_ref(), plan.generate.max_new_tokens);
        let (judge, columns) = (asked(plan, reader, fits), Mutex::new(None));
        self.look_at("task", "", plan.task.data.sources(), Some(plan.batch.groups), |prompt: &Prompt| {
            columns.lock().get_or_insert_with(BTreeSet::new).extend(prompt.metadata.keys().cloned());
            judge(prompt)
        });
        columns.into_inner()
    }

    /// Loads the Python files of rewards and of the environment, and ends their processes. `columns` are those of
    /// the data, if it was read; environments add others.
    fn python(&mut self, plan: &Plan, columns: Option<&BTreeSet<String>>) {
        let rewards = plan.reward.rule.python().into_iter().map(|(key, of)| (key, of.start()));
        let rewards = rewards.map(|(key, loaded)| (format!("{key}.file"), loaded));
        let environment = plan.environment.as_ref().and_then(|of| {
            let key = match of.kind {
                EnvironmentKind::Verifiers(_) => "name",
                EnvironmentKind::OpenEnv(_) => "url",
                _ => "file",
            };
            Some((format!("environment.{key}"), of.kind.start_python()?))
        });
        for (key, loaded) in rewards.chain(environment) {
            match loaded {
                Ok(workers) => {
                    self.lines.push(format!("{key}: {} loaded", workers.name()));
                    let columns = columns.filter(|_| plan.environment.is_none());
                    let known = columns.into_iter().flatten().filter(|name| *name != RECORDED_ANSWER);
                    let known = known.map(String::as_str).collect::<Vec<_>>().join(", ");
                    let known = if known.is_empty() { "none" } else { &known };
                    let is_unknown = |name: &&String| columns.is_some_and(|columns| !columns.contains(*name));
                    for name in workers.needs().iter().filter(is_unknown) {
                        let problem = format!("`{key}`: the reward function takes `{name}`, which is no column of the data");
                        let help = format!("its columns are {}", untrusted::line(known));
                        self.complaints.push(Problem::of(&key, problem, help));
                    }
                }
                Err(error) => {
                    let help = "docs/how_to/python.md and docs/how_to/hubs.md say what can be loaded";
                    self.complaints.push(Problem::of(&key, format!("`{key}`: {error}"), help));
                }
            }
        }
    }

    /// Tries the operations of the server of `[trainer]`, once the rest of the recipe is sound.
    fn trainer(&mut self, plan: &Plan) {
        if plan.trainer.backend == TrainerBackend::Local || !self.complaints.is_empty() || plan.validate().is_err() {
            return;
        }
        match tinker::open(plan, tinker::A_MOMENT).and_then(|service| tinker::described(plan, &service)) {
            Ok(lines) => self.lines.extend(lines),
            Err(error) => {
                let help = "start the server, or see docs/how_to/tinker.md for servers and what they lack";
                self.complaints.push(Problem::of(
                    "trainer.url",
                    format!("`trainer.url`: {}", full_message(error.as_ref())),
                    help,
                ));
            }
        }
    }

    /// Looks at what `[sft]` imitates: its own data sets, or the task's.
    fn imitated(&mut self, of: Imitation, pipeline: Pipeline, reader: &Option<Reader>) {
        let (section, purpose, sources) = match (of.sft.sources(), pipeline) {
            (own, _) if !own.is_empty() => ("sft", "", own),
            (_, Pipeline::Sft) => ("task", "", of.task.data.sources()),
            _ => ("task", " (sft)", of.task.data.sources()),
        };
        let batch = Some(of.sft.batch).filter(|_| !of.sft.packs());
        self.look_at::<Example>(section, purpose, sources, batch, prepared(of, reader));
    }

    /// Looks at the sources of a section.
    fn look_at<T: Shape>(
        &mut self,
        section: &str,
        purpose: &str,
        sources: Vec<Source>,
        batch: Option<usize>,
        judge: impl Fn(&T) -> Judged + Sync,
    ) {
        for (at, source) in sources.iter().enumerate() {
            let key = if sources.len() == 1 { format!("{section}.data") } else { format!("{section}.sources[{at}].data") };
            self.look::<T>(&key, purpose, &source.spec(), source.repeat, batch.filter(|_| sources.len() == 1), &judge);
        }
    }

    fn look<T: Shape>(
        &mut self,
        key: &str,
        purpose: &str,
        spec: &DataSpec,
        repeat: u64,
        batch: Option<usize>,
        judge: impl Fn(&T) -> Judged + Sync,
    ) {
        match survey::<T>(spec, judge) {
            Ok(found) => {
                self.lines.push(described(&format!("{key}{purpose}"), &found, repeat, batch));
                self.sources.push((key.to_owned(), found));
            }
            // The recipe's own checks say so.
            Err(DataError::NotFound(_) | DataError::Layout { .. }) => {}
            Err(error) => {
                let help = "docs/how_to/data.md says what is read, and how";
                self.complaints.push(Problem::of(key, format!("`{key}`: {error}"), help));
            }
        }
    }
}

fn described(key: &str, found: &Survey, repeat: u64, batch: Option<usize>) -> String {
    let Survey { name, files, records, exact, judged, skips } = found;
    let (about, read) =
        if *exact { ("", String::new()) } else { ("about ", format!(", estimated from {judged} that were read")) };
    let files = if *files == 1 { "1 file".to_owned() } else { format!("{files} files") };
    let skipped = if skips.total() == 0 { String::new() } else { format!("; skipped: {skips}") };
    let epoch = batch.map_or_else(String::new, |batch| {
        format!("; {:.1} steps per epoch", *records as f64 * repeat as f64 / batch.max(1) as f64)
    });
    format!("{key}: {name}, {about}{records} records in {files}{read}{skipped}{epoch}")
}
