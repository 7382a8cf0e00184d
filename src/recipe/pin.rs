//! Pins what a plan names by id to the commits that are in the hub's cache, so that a run can be repeated.

use std::path::{Path, PathBuf};

use super::data::{DataTask, Source};
use super::model::{ModelSource, with_revision};
use super::plan::Plan;
use super::reference_policy::{Frozen, ReferencePolicy};
use super::reward::RewardRule;
use super::task::TaskData;
use crate::data::source::dataset_commit;
use crate::hub::{self, Cache};

impl Plan {
    /// Returns the plan with every id of the hub pinned to the commit that `cache` holds.
    pub fn pinned(&self, cache: &Cache) -> Plan {
        let mut plan = self.clone();
        let model = |path: &Path| commit(&hub::locate_in(cache, path).ok()?, path);
        let pin_model = |path: &mut PathBuf| {
            if let Some(commit) = model(path) {
                *path = with_revision(path, &commit);
            }
        };
        let pin_data = |source: &mut Source| {
            if let Some(commit) = dataset_commit(&source.data, cache) {
                source.data = with_revision(&source.data, &commit);
            }
        };
        let pin_task = |task: &mut DataTask| {
            pin_data(&mut task.only);
            task.sources.iter_mut().for_each(pin_data);
        };
        if let ModelSource::Folder(folder) = &mut plan.model.source
            && let Some(commit) = model(&folder.name())
        {
            folder.revision = Some(commit);
        }
        if let TaskData::Data(task) = &mut plan.task.data {
            pin_task(task);
        }
        let asked = plan.eval.as_mut().and_then(|eval| eval.task.as_mut());
        if let Some(TaskData::Data(task)) = asked.map(|task| &mut task.data) {
            pin_task(task);
        }
        plan.critic.iter_mut().filter_map(|critic| critic.path.as_mut()).for_each(pin_model);
        let scorers = match &mut plan.reward.rule {
            RewardRule::Model(of) => vec![of],
            RewardRule::Parts(of) => of.part.iter_mut().filter_map(|part| part.rule.model_mut()).collect(),
            _ => Vec::new(),
        };
        scorers.into_iter().map(|of| &mut of.path).for_each(pin_model);
        if let Some(ReferencePolicy::Frozen(Frozen { path: Some(path) })) =
            plan.reference.as_mut().map(|reference| &mut reference.policy)
        {
            pin_model(path);
        }
        if let Some(sft) = &mut plan.sft {
            if let Some(data) = &mut sft.data
                && let Some(commit) = dataset_commit(data, cache)
            {
                *data = with_revision(data, &commit);
            }
            sft.sources.iter_mut().for_each(pin_data);
        }
        plan
    }
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
        let scorers: Vec<_> = pinned.reward.rule.folders().map(|(_, path)| path.clone()).collect();
        assert_eq!(scorers, [Path::new("org/thing").with_file_name(format!("thing@{COMMIT}"))]);
        let written = pinned.to_toml();
        assert!(written.contains(&format!("revision = \"{COMMIT}\"")), "{written}");
        // A pinned plan is the same when it is pinned again, and can be read.
        assert_eq!(pinned.pinned(&Cache::at(root.path())), pinned);
        assert_eq!(parse("recipe.toml", &written, &[]).unwrap(), pinned);
    }
}
