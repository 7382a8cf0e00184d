//! Models and data sets that a recipe names by id, against a local server that speaks the hub's paths.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::http::header::ETAG;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio::runtime::Runtime;

use super::network::{rollflow, said};
use super::running::command;

const OLD: &str = "0123456789abcdef0123456789abcdef01234567";
const NEW: &str = "fedcba9876543210fedcba9876543210fedcba98";
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/models/qwen2_tied");

type Files = BTreeMap<String, Vec<u8>>;

/// What the hub holds.
#[derive(Default)]
struct Shelf {
    /// The files of each commit, by `models/ID` or `datasets/ID`.
    repositories: BTreeMap<String, BTreeMap<&'static str, Files>>,
    /// The commit that `main` names.
    main: &'static str,
    /// The paths of all requests.
    asked: Vec<String>,
}

impl Shelf {
    fn answer(&mut self, path: &str) -> Response {
        self.asked.push(path.to_owned());
        let not_here = || StatusCode::NOT_FOUND.into_response();
        let path = path.trim_start_matches('/');
        if let Some((repository, revision)) = path.strip_prefix("api/").and_then(|rest| rest.split_once("/revision/")) {
            let commit = if revision == "main" { self.main } else { revision };
            let Some((commit, files)) = self.repositories.get(repository).and_then(|commits| commits.get_key_value(commit))
            else {
                return not_here();
            };
            let listed: Vec<_> = files.keys().map(|name| json!({ "rfilename": name })).collect();
            return json!({ "sha": commit, "siblings": listed }).to_string().into_response();
        }
        let Some((repository, file)) = path.split_once("/resolve/") else { return not_here() };
        let repository = if repository.starts_with("datasets/") { repository.to_owned() } else { format!("models/{repository}") };
        let Some((commit, name)) = file.split_once('/') else { return not_here() };
        let files = self.repositories.get(&repository).and_then(|commits| commits.get(commit));
        match files.and_then(|files| files.get(name)) {
            Some(bytes) => {
                let mut sum = DefaultHasher::new();
                sum.write(bytes);
                ([(ETAG, format!("\"{:016x}\"", sum.finish()))], bytes.clone()).into_response()
            }
            None => not_here(),
        }
    }
}

/// A hub in this process.
struct Hub {
    url: String,
    shelf: Arc<Mutex<Shelf>>,
    _runtime: Runtime,
}

impl Hub {
    /// The golden model as `org/tiny` and word problems as `org/problems`, of the commits `OLD` and `NEW`. `main` is `OLD`.
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let entries = fs::read_dir(GOLDEN).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        let model: Files =
            entries.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap())).collect();
        let problems = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/data/word_problems.jsonl")).unwrap();
        // The first commit holds 60 problems, the second 61.
        let data = |most: usize| -> Files {
            let text: String = problems.lines().take(most).map(|line| format!("{line}\n")).collect();
            let files = ["main", "socratic"].into_iter().flat_map(|subset| {
                ["train", "test"].map(|split| (format!("{subset}/{split}-00000-of-00001.jsonl"), text.clone().into_bytes()))
            });
            files.chain([("README.md".to_owned(), b"# about".to_vec())]).collect()
        };
        let shelf = Shelf {
            repositories: BTreeMap::from([
                ("models/org/tiny".to_owned(), BTreeMap::from([(OLD, model.clone()), (NEW, model)])),
                ("datasets/org/problems".to_owned(), BTreeMap::from([(OLD, data(60)), (NEW, data(61))])),
            ]),
            main: OLD,
            asked: Vec::new(),
        };
        let shelf = Arc::new(Mutex::new(shelf));
        let answers = shelf.clone();
        let routes = Router::new().fallback(move |uri: Uri| async move { answers.lock().unwrap().answer(uri.path()) });
        let url = runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            tokio::spawn(async move { axum::serve(listener, routes).await });
            url
        });
        Hub { url, shelf, _runtime: runtime }
    }

    /// Moves `main` of all repositories to `NEW`.
    fn advance(&self) {
        self.shelf.lock().unwrap().main = NEW;
    }

    /// The paths that were asked for since the last call.
    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.shelf.lock().unwrap().asked)
    }

    /// The command with this hub, and a cache in `home`.
    fn rollflow(&self, home: &Path, args: &[&str], variables: &[(&str, &str)]) -> Output {
        let hub = [("HF_HOME", home.to_str().unwrap()), ("HF_ENDPOINT", self.url.as_str()), ("HF_HUB_OFFLINE", "")];
        rollflow(args, &[&hub, variables].concat())
    }
}

#[test]
fn a_model_that_a_recipe_names_by_its_id_is_fetched_when_it_is_first_used() {
    let (hub, folder) = (Hub::start(), tempfile::tempdir().unwrap());
    let (recipe, home) = (folder.path().join("run.toml"), folder.path().join("hf"));
    let text = "pipeline = 'grpo'\n[model]\nkind = 'folder'\npath = 'org/tiny'\n[task]\nkind = 'arithmetic'\n[generate]\nmax_new_tokens = 4\n";
    fs::write(&recipe, text).unwrap();
    let check = |variables: &[(&str, &str)]| hub.rollflow(&home, &["check", recipe.to_str().unwrap()], variables);
    let offline = check(&[("HF_HUB_OFFLINE", "1")]);
    assert!(offline.status.code() == Some(2) && said(&offline).contains("HF_HUB_OFFLINE is set"), "{}", said(&offline));
    let fetched = check(&[]);
    assert!(fetched.status.success(), "{}", said(&fetched));
    assert!(home.join("hub/models--org--tiny/snapshots").join(OLD).join("model.safetensors").exists());
    let again = check(&[("HF_HUB_OFFLINE", "1")]);
    assert!(again.status.success(), "{}", said(&again));
}

#[test]
fn check_reports_a_hub_that_can_not_be_reached_after_one_retry() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, home) = (folder.path().join("run.toml"), folder.path().join("hf"));
    fs::write(&recipe, "pipeline = 'grpo'\n[model]\npath = 'org/tiny'\n[task]\nkind = 'arithmetic'\n").unwrap();
    let url = "http://127.0.0.1:1";
    let variables = [("HF_HOME", home.to_str().unwrap()), ("HF_ENDPOINT", url), ("HF_HUB_OFFLINE", "")];
    let checked = rollflow(&["check", recipe.to_str().unwrap()], &variables);
    let said = said(&checked);
    assert!(checked.status.code() == Some(2) && said.contains(&format!("hub {url}: cannot connect")), "{said}");
    assert!(said.contains(&format!("warning: waiting for hub {url} (attempt 2 of 2): cannot connect")), "{said}");
    assert!(!said.contains("of 6"), "{said}");
}

#[test]
fn a_run_pins_the_revisions_of_its_model_and_data_and_resume_uses_them_after_main_moved() {
    let (hub, folder) = (Hub::start(), tempfile::tempdir().unwrap());
    let (recipe, home, run) = (folder.path().join("run.toml"), folder.path().join("hf"), folder.path().join("run"));
    let text = "pipeline = 'grpo'\nfilter = []\n[model]\npath = 'org/tiny'\n[task]\ndata = 'org/problems'\nsubset = 'main'\n\
                [generate]\nmax_new_tokens = 2\ngroup_size = 2\n[reward]\nkind = 'numeric'\n[batch]\ngroups = 2\n\
                [train]\nsteps = 1\n[flow]\nmax_staleness = 0\n";
    fs::write(&recipe, text).unwrap();
    let (recipe, run) = (recipe.to_str().unwrap(), run.to_str().unwrap());
    let begun = hub.rollflow(&home, &["run", recipe, "--out", run], &[]);
    assert!(begun.status.success(), "{}", said(&begun));
    let pinned = fs::read_to_string(Path::new(run).join("recipe.toml")).unwrap();
    for part in [format!("revision = \"{OLD}\""), format!("\"org/problems@{OLD}\"")] {
        assert!(pinned.contains(&part), "{part}: {pinned}");
    }
    // Another command fetches the new state into a cache that has lost the old one.
    hub.advance();
    fs::remove_dir_all(&home).unwrap();
    let checked = hub.rollflow(&home, &["check", recipe], &[]);
    assert!(checked.status.success() && said(&checked).contains("61"), "{}", said(&checked));
    assert!(hub.asked().iter().any(|path| path.contains(NEW)));
    let resumed = hub.rollflow(&home, &["resume", run, "--set", "train.steps=2"], &[]);
    assert!(resumed.status.success(), "{}", said(&resumed));
    let asked = hub.asked();
    let files = |kind: &str| asked.iter().any(|path| path.contains(kind) && path.contains(&format!("/resolve/{OLD}/")));
    assert!(files("/org/tiny/") && files("/datasets/org/problems/"), "{asked:#?}");
    assert!(asked.iter().all(|path| !path.contains(NEW) && !path.ends_with("/main")), "{asked:#?}");
    assert_eq!(fs::read_to_string(Path::new(run).join("metrics.jsonl")).unwrap().lines().count(), 2);
}

#[test]
fn adapters_name_a_model_of_the_hub_by_its_id_and_are_merged_where_the_cache_is_another() {
    let (hub, folder) = (Hub::start(), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name);
    let text = "pipeline = 'grpo'\nfilter = []\n[model]\npath = 'org/tiny'\n[lora]\nrank = 2\n[task]\nkind = 'arithmetic'\n\
                [generate]\nmax_new_tokens = 2\ngroup_size = 2\n[batch]\ngroups = 2\n[train]\nsteps = 1\n";
    fs::write(path("run.toml"), text).unwrap();
    let paths = ["run.toml", "run", "apart", "whole"].map(|name| path(name).to_str().unwrap().to_owned());
    let [recipe, run, apart, whole] = paths.each_ref().map(String::as_str);
    for args in [&["run", recipe, "--out", run][..], &["export", run, apart, "--adapter"]] {
        let ended = hub.rollflow(&path("hf"), args, &[]);
        assert!(ended.status.success(), "{}", said(&ended));
    }
    for adapters in [path("run/checkpoints/step_000001"), path("apart")] {
        let settings = fs::read(adapters.join("adapter_config.json")).unwrap();
        let settings: serde_json::Value = serde_json::from_slice(&settings).unwrap();
        assert_eq!((&settings["base_model_name_or_path"], &settings["revision"]), (&json!("org/tiny"), &json!(OLD)));
    }
    // On another machine, after `main` moved.
    hub.advance();
    hub.asked();
    let offline = hub.rollflow(&path("elsewhere"), &["export", apart, whole], &[("HF_HUB_OFFLINE", "1")]);
    assert!(!offline.status.success() && said(&offline).contains("HF_HUB_OFFLINE is set"), "{}", said(&offline));
    let merged = hub.rollflow(&path("elsewhere"), &["export", apart, whole], &[]);
    assert!(merged.status.success() && path("whole/model.safetensors").is_file(), "{}", said(&merged));
    let asked = hub.asked();
    assert!(!asked.is_empty() && asked.iter().all(|path| path.contains(OLD)), "{asked:#?}");
}

#[test]
fn a_data_set_with_several_subsets_asks_for_one_even_if_only_one_is_in_the_cache() {
    let (hub, folder) = (Hub::start(), tempfile::tempdir().unwrap());
    let (recipe, home) = (folder.path().join("run.toml"), folder.path().join("hf"));
    let text = |subset: &str| {
        format!(
            "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\ndata = 'org/problems'\n{subset}\n[reward]\nkind = 'numeric'\n\
             [generate]\nmax_new_tokens = 4\n"
        )
    };
    let check = |subset: &str, variables: &[(&str, &str)]| {
        fs::write(&recipe, text(subset)).unwrap();
        hub.rollflow(&home, &["check", recipe.to_str().unwrap()], variables)
    };
    let all = "has several subsets; name one of: main, socratic";
    let named = check("subset = 'main'", &[]);
    assert!(named.status.success(), "{}", said(&named));
    for variables in [&[][..], &[("HF_HUB_OFFLINE", "1")]] {
        let unnamed = check("", variables);
        assert!(unnamed.status.code() == Some(2) && said(&unnamed).contains(all), "{}", said(&unnamed));
    }
    // Python's tools leave no list of the files; the hub has it.
    fs::remove_dir_all(home.join("hub/datasets--org--problems/.listings")).unwrap();
    let unnamed = check("", &[]);
    assert!(unnamed.status.code() == Some(2) && said(&unnamed).contains(all), "{}", said(&unnamed));
}

#[test]
fn a_mistyped_file_name_is_not_found_and_the_hub_is_not_asked() {
    let (hub, folder) = (Hub::start(), tempfile::tempdir().unwrap());
    let (recipe, home) = (folder.path().join("run.toml"), folder.path().join("hf"));
    for data in ["trian.jsonl", "trian", "data/trian.csv", "trian@v2"] {
        let text = format!("pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\ndata = '{data}'\n[reward]\nkind = 'numeric'\n");
        fs::write(&recipe, text).unwrap();
        let checked = hub.rollflow(&home, &["check", recipe.to_str().unwrap()], &[]);
        let said = said(&checked);
        assert!(checked.status.code() == Some(2) && said.contains(&format!("file not found: {data}")), "{said}");
        assert_eq!(hub.asked(), Vec::<String>::new());
    }
}

#[test]
fn init_lists_subsets_and_splits_of_the_hub_and_writes_a_recipe_that_check_accepts() {
    let (hub, folder) = (Hub::start(), tempfile::tempdir().unwrap());
    let (recipe, home) = (folder.path().join("mine.toml"), folder.path().join("hf"));
    let path = recipe.to_str().unwrap();
    let task = ["init", path, "--model", GOLDEN, "--task", "org/problems"];
    // Without an answer there is no subset.
    for args in [&[&task[..], &["--yes"]].concat(), &task[..]] {
        let refused = hub.rollflow(&home, args, &[]);
        let said = said(&refused);
        assert!(refused.status.code() == Some(2) && said.contains("--subset: main, socratic"), "{said}");
        assert!(!recipe.exists());
    }
    assert!(!home.join("hub/datasets--org--problems/snapshots").exists(), "listing fetches no data");
    let flag = hub.rollflow(&home, &[&task[..], &["--yes", "--subset", "main"]].concat(), &[]);
    assert!(flag.status.success(), "{}", said(&flag));
    let checked = hub.rollflow(&home, &["check", path], &[]);
    assert!(checked.status.success(), "{}", said(&checked));
    // A person, or a pipe, answers.
    let mut child = command(&[&task[..], &["--force", "--pipeline", "grpo", "--chat", "as_written"]].concat());
    let child = child.env("HF_HUB_OFFLINE", "").env("HF_HOME", &home).env("HF_ENDPOINT", &hub.url);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"socratic\n\n").unwrap();
    let asked = child.wait_with_output().unwrap();
    assert!(asked.status.success(), "{}", said(&asked));
    assert!(said(&asked).contains("Which subset of org/problems (main, socratic)? [main] socratic"), "{}", said(&asked));
    let text = fs::read_to_string(&recipe).unwrap();
    let test = "task = { kind = \"data\", data = \"org/problems\", subset = \"socratic\", split = \"test\" }";
    assert!(text.contains("subset = \"socratic\"\n") && text.contains(test), "{text}");
    let checked = hub.rollflow(&home, &["check", path], &[]);
    assert!(checked.status.success(), "{}", said(&checked));
}
