//! Models and data sets that a plan names. Those of the hub are pinned to the commits in its cache, so
//! that a run can be repeated.

use std::path::{Path, PathBuf};

use super::data::Source;
use super::model::{ModelSource, with_revision};
use super::plan::Plan;
use super::reference_policy::{FixedPolicy, ReferencePolicy};
use super::task::TaskData;
use crate::data::source::dataset_commit;
use crate::hub::Cache;

impl Plan {
    /// Returns the models that the plan names next to the policy's own, each with its key.
    pub fn models(&self) -> Vec<(String, PathBuf)> {
        let mut all = Vec::new();
        visit(&mut self.clone(), |key, path| all.push((key, path.clone())), |_, _| {});
        all
    }

    /// Returns the plan with every id of the hub pinned to the commit that `cache` holds.
    pub fn pinned(&self, cache: &Cache) -> Plan {
        let mut plan = self.clone();
        let model = |path: &Path| commit(&cache.locate(path).ok()?, path);
        let pin = |path: &mut PathBuf, commit: Option<String>| {
            if let Some(commit) = commit {
                *path = with_revision(path, &commit);
            }
        };
        if let ModelSource::Folder(folder) = &mut plan.model.source
            && let Some(commit) = model(&folder.name())
        {
            folder.revision = Some(commit);
        }
        let data = |path: &Path| dataset_commit(path, cache);
        visit(&mut plan, |_, path| pin(path, model(path)), |_, Source { data: path, .. }| pin(path, data(path)));
        plan
    }
}

/// Calls `model` for each model that the plan names next to its own, and `data` for each data set, with
/// their keys.
pub(super) fn visit(plan: &mut Plan, mut model: impl FnMut(String, &mut PathBuf), mut data: impl FnMut(String, &mut Source)) {
    if let Some(path) = plan.critic.as_mut().and_then(|critic| critic.path.as_mut()) {
        model("critic.path".to_owned(), path);
    }
    let reference = plan.reference.iter_mut().map(|of| ("reference", &mut of.policy));
    for (section, policy) in reference.chain(plan.teacher.iter_mut().map(|of| ("teacher", &mut of.policy))) {
        match policy {
            ReferencePolicy::Frozen { path: Some(path) } => model(format!("{section}.path"), path),
            ReferencePolicy::BySource { part } => {
                for (at, of) in part.iter_mut().enumerate() {
                    if let FixedPolicy::Frozen { path: Some(path) } = &mut of.policy {
                        model(format!("{section}.part[{at}].path"), path);
                    }
                }
            }
            _ => {}
        }
    }
    for (key, of) in plan.reward.rule.models_mut() {
        model(format!("{key}.path"), &mut of.path);
    }
    let tasks = [("task", Some(&mut plan.task)), ("eval.task", plan.eval.as_mut().and_then(|eval| eval.task.as_mut()))];
    for (section, task) in tasks {
        if let Some(TaskData::Data(of)) = task.map(|task| &mut task.data) {
            data(format!("{section}.data"), &mut of.only);
            numbered(section, &mut of.sources).for_each(|(key, source)| data(key, source));
        }
    }
    if let Some(sft) = &mut plan.sft {
        numbered("sft", &mut sft.sources).for_each(|(key, source)| data(key, source));
        if let Some(path) = &mut sft.data {
            let mut source = Source::of(&*path);
            data("sft.data".to_owned(), &mut source);
            *path = source.data;
        }
    }
}

fn numbered<'a>(section: &'a str, sources: &'a mut [Source]) -> impl Iterator<Item = (String, &'a mut Source)> {
    sources.iter_mut().enumerate().map(move |(at, source)| (format!("{section}.sources[{at}].data"), source))
}

/// The commit of a folder `snapshots/COMMIT` of a cache; none for a folder that `path` itself names.
fn commit(folder: &Path, path: &Path) -> Option<String> {
    if path.exists() || folder.parent()?.file_name()? != "snapshots" {
        return None;
    }
    Some(folder.file_name()?.to_str()?.to_owned())
}
