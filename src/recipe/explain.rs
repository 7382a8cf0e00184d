//! Page of one recipe key, as `rollflow explain` prints it, from the same declarations as the reference.

use super::eval::Eval;
use super::plan::{Pipeline, Plan};
use super::reference::{keys, section_doc};
use crate::settings::keys::KeyDoc;
use crate::settings::renames::Renames;

/// Returns the page of a key or a section: type, range, default, pipelines, meaning, old name and
/// related keys. The error of an unknown key names the nearest keys.
pub fn explain(key: &str) -> Result<String, String> {
    let path = Renames::of::<Plan>().path(&key.trim().replace("reward.part.", "reward.part[]."));
    let keys = keys();
    let rows: Vec<&KeyDoc> = keys.iter().filter(|key| plain(&key.path) == plain(&path)).collect();
    let inside: Vec<&KeyDoc> = keys.iter().filter(|key| plain(&key.path).starts_with(&format!("{}.", plain(&path)))).collect();
    if rows.is_empty() && inside.is_empty() {
        return Err(unknown(&path, &keys));
    }
    let (section, _) = path.split_once('.').unwrap_or((&path, ""));
    let mut text = format!("{path}\n");
    for KeyDoc { expects, default, formerly, doc, .. } in &rows {
        text += &format!("\n  {doc}\n\n  takes      {expects}\n  default    {default}\n");
        text += &formerly.map(|old| format!("  formerly   {old}\n")).unwrap_or_default();
    }
    if rows.is_empty() && section == path {
        text += &format!("\n  {}\n\n", section_doc(section));
    }
    text += &format!("  pipelines  {}\n", readers(&path).join(", "));
    if inside.is_empty() {
        text += &related(&path, &keys);
    } else {
        text += &format!("  keys       {}\n", names(&inside).join(", "));
    }
    Ok(text)
}

/// A path without the marks of lists.
fn plain(path: &str) -> String {
    path.replace("[]", "")
}

/// Pipelines that read a key, an evaluation included.
fn readers(path: &str) -> Vec<&'static str> {
    let (section, name) = path.split_once('.').unwrap_or((path, ""));
    let reads = |pipeline: &Pipeline| {
        let plan = Plan { pipeline: *pipeline, eval: Some(Eval::default()), ..Plan::default() };
        !plan.unused_sections().contains(&plain(section).as_str()) && !plan.unused_keys().any(|key| key == (section, name))
    };
    Pipeline::ALL.iter().filter(|pipeline| reads(pipeline)).map(|pipeline| pipeline.word()).collect()
}

/// Keys of the same name elsewhere, and the other keys of the section.
fn related(path: &str, keys: &[KeyDoc]) -> String {
    let (within, name) = path.rsplit_once('.').unwrap_or(("", path));
    let split = |key: &KeyDoc| key.path.rsplit_once('.').map_or((String::new(), key.path.clone()), |(a, b)| (plain(a), b.into()));
    let same_name: Vec<&KeyDoc> = keys.iter().filter(|key| plain(&key.path) != plain(path) && split(key).1 == name).collect();
    let siblings: Vec<&KeyDoc> = keys.iter().filter(|key| split(key).0 == plain(within) && split(key).1 != name).collect();
    let line = |what: &str, found: &[&KeyDoc]| match names(found) {
        found if found.is_empty() => String::new(),
        found => format!("  {what:<10} {}\n", found.join(", ")),
    };
    line("same name", &same_name) + &line("related", &siblings)
}

fn names(keys: &[&KeyDoc]) -> Vec<String> {
    let mut names: Vec<String> = keys.iter().map(|key| key.path.clone()).collect();
    names.dedup();
    names
}

/// Most names that an error about an unknown key lists.
const NEAREST: usize = 3;

fn unknown(path: &str, keys: &[KeyDoc]) -> String {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let distance = |key: &KeyDoc| {
        let of_name = strsim::damerau_levenshtein(&last(path), &last(&key.path));
        of_name.min(strsim::damerau_levenshtein(path, &key.path))
    };
    let mut near: Vec<&KeyDoc> = keys.iter().collect();
    near.sort_by_key(|key| (distance(key), strsim::damerau_levenshtein(path, &key.path)));
    let mut near = names(&near);
    near.truncate(NEAREST);
    format!("`{path}` is not a key of recipes; the nearest are {}", near.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_a_page_with_its_type_default_pipelines_and_relatives() {
        let page = explain("train.lr").unwrap();
        for part in ["Peak learning rate", "a number, above 0", "0.0003", "grpo_offline, dpo\n", "sft.lr", "train.ppo_epochs"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("pipelines  grpo, sft,"), "{page}");
        assert!(explain("train.updates").unwrap().starts_with("train.ppo_epochs\n"));
        assert!(explain("train.updates").unwrap().contains("formerly   updates"));
        assert!(explain("filter").unwrap().contains("filter[].threshold"));
        assert!(explain("seed").unwrap().contains("a whole number"));
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        assert_eq!(
            explain("train.lrr").unwrap_err(),
            "`train.lrr` is not a key of recipes; the nearest are train.lr, critic.lr, sft.lr"
        );
        assert!(explain("train.warmup").unwrap_err().contains("train.schedule.warmup"));
    }
}
