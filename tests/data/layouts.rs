//! Folders and repositories: the files of a subset and a split, and those that are no data.

use rollflow::data::source::{DataSpec, Hub, HubCache};

use crate::data_sources::{folder, lines, prompts, prompts_of, refusal, spec};

#[test]
fn a_folder_without_splits_in_its_names_is_all_train() {
    let folder = folder(&[("b.jsonl", &lines("b")), ("a/x.json", &lines("a")), ("c/y.txt", "c")]);
    assert_eq!(prompts(folder.path(), "train").concat(), "abc");
    assert!(refusal(folder.path(), "test").contains("all of it is \"train\""));
}

#[test]
fn one_of_several_subsets_must_be_named() {
    let folder = folder(&[("main/train.jsonl", &lines("a")), ("socratic/train.jsonl", &lines("b"))]);
    assert!(refusal(folder.path(), "train").contains("several subsets; name one of: main, socratic"));
    let of = |subset: &str| prompts_of(&DataSpec { subset: Some(subset.into()), ..spec(folder.path(), "train") });
    assert_eq!(of("socratic").unwrap(), ["b"]);
    assert!(of("other").unwrap_err().to_string().contains("no subset \"other\"; it has: main, socratic"));
}

#[test]
fn files_of_no_subsets_folder_are_the_default_subset() {
    let folder = folder(&[
        ("data/train-00000-of-00001.jsonl", &lines("a")),
        ("metadata/train-00000-of-00001.jsonl", &lines("b")),
        ("metadata/test-00000-of-00001.jsonl", &lines("c")),
    ]);
    let of = |subset: Option<&str>| prompts_of(&DataSpec { subset: subset.map(str::to_owned), ..spec(folder.path(), "train") });
    assert_eq!((of(None).unwrap(), of(Some("default")).unwrap()), (vec!["a".to_owned()], vec!["a".to_owned()]));
    assert_eq!(of(Some("metadata")).unwrap(), ["b"]);
    assert!(of(Some("other")).unwrap_err().to_string().contains("it has: default, metadata"));
    assert_eq!(spec(folder.path(), "train").subsets().unwrap(), ["default", "metadata"]);
    // It has no such split.
    assert!(refusal(folder.path(), "test").contains("several subsets; name one of: default, metadata"));
}

#[test]
fn texts_about_a_data_set_are_no_records() {
    let about = ["LICENSE.txt", "license-MIT.txt", "Readme.text", "NOTICE.txt", "citation.txt"].map(|name| (name, "words\n"));
    let folder = folder(&[&about[..], &[("data.jsonl", &*lines("a")), ("notices.txt", "b\n")]].concat());
    assert_eq!(prompts(folder.path(), "train"), ["a", "b"]);
}

#[test]
fn a_missing_part_is_found_also_if_names_end_with_checksums() {
    let part = "datasets--org--sums/snapshots/only/data/train-00000-of-00002-a3ecf92756993583.jsonl";
    let cache = folder(&[(part, &lines("a"))]);
    let hub = Hub::at("http://127.0.0.1:9", HubCache::at(cache.path())).offline(true);
    let error = prompts_of(&DataSpec { hub, ..DataSpec::new("org/sums") }).unwrap_err().to_string();
    assert!(error.contains("holds 1 of the 2 parts of train"), "{error}");
}
