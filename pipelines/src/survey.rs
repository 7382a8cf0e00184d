//! What `rollflow check` finds in a recipe's data without running: every source is opened and a bounded number of its records judged as the
//! run would.

use std::sync::atomic::{AtomicUsize, Ordering};

use rollflow::data::source::{DataError, DataSpec, Example, Judged, Recorded, Shape, Survey, survey};
use rollflow::data::{RankedPair, Tokenizer};
use rollflow::prelude::*;
use rollflow::recipe::data::Source;
use rollflow::recipe::task::{Sft, TaskData};
use rollflow::recipe::{Complaint, Pipeline, Plan};

use crate::{conversations, environments, parts};

/// Examples of supervised training that are made into tokens: a second's work.
const TOKENIZED: usize = 500;

/// What was found in a recipe's data.
#[derive(Clone, Debug, Default)]
pub struct Surveyed {
    /// Each source, as a key and what is in it.
    pub sources: Vec<(String, Survey)>,
    /// Each source in a sentence, with its steps per epoch where they are known.
    pub lines: Vec<String>,
    /// What the run would end with.
    pub complaints: Vec<Complaint>,
}

/// Looks at every source that the plan's pipeline reads. Files that are not there are left to the recipe's own checks.
pub fn of(plan: &Plan) -> Surveyed {
    let mut all = Surveyed::default();
    let groups = plan.batch.groups;
    match (&plan.task.data, plan.pipeline) {
        (TaskData::Rollouts(task), _) => {
            let spec = DataSpec { max_samples: task.limit, ..DataSpec::new(&task.path) };
            all.look::<Recorded>("task.path", &spec, 1, None, |_| Ok(Ok(())));
        }
        (TaskData::Data(task), Pipeline::RewardModel) => {
            let batch = plan.reward_model.as_ref().map(|of| of.batch);
            all.look_at::<RankedPair>("task", &task.sources(), batch, |_| Ok(Ok(())));
        }
        (TaskData::Data(task), Pipeline::Sft) => {
            if let Some(sft) = plan.sft.as_ref().filter(|sft| sft.sources().is_empty() && !environments::demonstrates(plan)) {
                all.look_at::<Example>("task", &task.sources(), batch_of(sft), imitated(plan, sft));
            }
        }
        (TaskData::Data(task), _) => {
            let answered = AtomicUsize::new(0);
            let judge = |prompt: &Prompt| {
                answered.fetch_add(usize::from(prompt.answer().is_some()), Ordering::Relaxed);
                Ok(Ok(()))
            };
            let looked = all.look_at::<Prompt>("task", &task.sources(), Some(groups), judge);
            if looked && answered.into_inner() == 0 && plan.reward.rule.compares() {
                let message = "the reward compares answers with a ground truth, and no record that was read has one".to_owned();
                let help = "name its field, as in columns = { answer = \"target\" }".to_owned();
                all.complaints.push(Complaint { key: "task".to_owned(), message, help });
            }
        }
        (TaskData::Arithmetic(_), _) => {}
    }
    if let Some(sft) = plan.sft.as_ref().filter(|sft| !sft.sources().is_empty()) {
        all.look_at::<Example>("sft", &sft.sources(), batch_of(sft), imitated(plan, sft));
    }
    if let Some(TaskData::Data(task)) = plan.eval.as_ref().and_then(|eval| eval.task.as_ref()).map(|task| &task.data) {
        all.look_at::<Prompt>("eval.task", &task.sources(), None, |_| Ok(Ok(())));
    }
    all
}

/// Records of a step, unless packing decides that.
fn batch_of(sft: &Sft) -> Option<usize> {
    Some(sft.batch).filter(|_| !sft.packs())
}

/// Judges examples by making the first few into tokens.
fn imitated<'a>(plan: &'a Plan, sft: &'a Sft) -> impl Fn(&Example) -> Judged + Sync + 'a {
    let (tokenizer, done): (Option<Tokenizer>, _) = (parts::tokenizer(plan).ok(), AtomicUsize::new(0));
    move |example| {
        if let Some(tokenizer) = tokenizer.as_ref().filter(|_| done.fetch_add(1, Ordering::Relaxed) < TOKENIZED) {
            conversations::prepare(&plan.chat, sft, example, tokenizer).map_err(|error| error.to_string())?;
        }
        Ok(Ok(()))
    }
}

impl Surveyed {
    /// Looks at the sources of a section. Gives whether all of them could be read.
    fn look_at<T: Shape>(
        &mut self,
        section: &str,
        sources: &[Source],
        batch: Option<usize>,
        judge: impl Fn(&T) -> Judged + Sync,
    ) -> bool {
        let looked: Vec<bool> = sources
            .iter()
            .enumerate()
            .map(|(at, source)| {
                let key = if sources.len() == 1 { format!("{section}.data") } else { format!("{section}.sources[{at}].data") };
                self.look::<T>(&key, &source.spec(), source.repeat, batch.filter(|_| sources.len() == 1), &judge)
            })
            .collect();
        looked.into_iter().all(|looked| looked)
    }

    fn look<T: Shape>(
        &mut self,
        key: &str,
        spec: &DataSpec,
        repeat: u64,
        batch: Option<usize>,
        judge: impl Fn(&T) -> Judged + Sync,
    ) -> bool {
        match survey::<T>(spec, judge) {
            Ok(found) => {
                self.lines.push(told(key, &found, repeat, batch));
                self.sources.push((key.to_owned(), found));
                true
            }
            // The recipe's own checks say so.
            Err(DataError::Missing { .. } | DataError::Layout { .. } | DataError::Split { .. }) => false,
            Err(error) => {
                let help = "docs/data.md says what is read, and how".to_owned();
                self.complaints.push(Complaint { key: key.to_owned(), message: format!("`{key}`: {error}"), help });
                false
            }
        }
    }
}

fn told(key: &str, found: &Survey, repeat: u64, batch: Option<usize>) -> String {
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
