//! Models and data sets that a plan names. Those of the hub are pinned to the commits in its cache, so
//! that a run can be repeated.

use std::path::{Path, PathBuf};

use super::data::Source;
use super::model::{ModelSource, with_revision};
use super::plan::Plan;
use super::reference_policy::ReferencePolicy;
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
    if let Some(ReferencePolicy::Frozen { path: Some(path) }) = plan.reference.as_mut().map(|of| &mut of.policy) {
        model("reference.path".to_owned(), path);
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::recipe::parse;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn what_is_named_by_id_is_pinned_and_folders_are_left_alone() {
        let root = tempfile::tempdir().unwrap();
        for (kind, files) in
            [("models", &["config.json", "tokenizer.json", "model.safetensors"][..]), ("datasets", &["train.jsonl"])]
        {
            let home = root.path().join(format!("{kind}--org--thing"));
            let folder = home.join("snapshots").join(COMMIT);
            fs::create_dir_all(&folder).unwrap();
            fs::create_dir_all(home.join("refs")).unwrap();
            fs::write(home.join("refs/main"), COMMIT).unwrap();
            files.iter().for_each(|file| fs::write(folder.join(file), "{}").unwrap());
        }
        let text = "pipeline = 'grpo'\n[model]\nkind = 'folder'\npath = 'org/thing'\n[task]\nkind = 'data'\n\
                    sources = [{ data = 'org/thing' }, { data = 'src' }, { data = 'org/other' }]\n\
                    [reward]\nkind = 'parts'\npart = [{ name = 'right', kind = 'math' }, { name = 'liked', kind = 'model', path = 'org/thing' }]\n[generate]\nmax_new_tokens = 4";
        let plan = parse("run.toml", text, &[]).unwrap();
        let pinned = plan.pinned(&Cache::at(root.path()));
        let ModelSource::Folder(model) = &pinned.model.source else { panic!("{:?}", pinned.model) };
        assert_eq!((model.path.to_str(), model.revision.as_deref()), (Some("org/thing"), Some(COMMIT)));
        assert_eq!(model.name(), Path::new("org/thing").with_file_name(format!("thing@{COMMIT}")));
        let TaskData::Data(task) = &pinned.task.data else { panic!("{:?}", pinned.task) };
        let named: Vec<_> = task.sources.iter().map(|source| source.data.to_str().unwrap().to_owned()).collect();
        assert_eq!(named, [format!("org/thing@{COMMIT}"), "src".to_owned(), "org/other".to_owned()]);
        let scorer = Path::new("org/thing").with_file_name(format!("thing@{COMMIT}"));
        assert_eq!(pinned.models(), [("reward.part[1].path".to_owned(), scorer)]);
        let written = pinned.to_toml();
        assert!(written.contains(&format!("revision = \"{COMMIT}\"")), "{written}");
        // A pinned plan is the same when it is pinned again, and can be read.
        assert_eq!(pinned.pinned(&Cache::at(root.path())), pinned);
        assert_eq!(parse("recipe.toml", &written, &[]).unwrap(), pinned);
    }
}
