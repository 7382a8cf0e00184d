//! The library's layers: a crate in `crates` and a folder of `src` use only those before them in this
//! list. The compiler holds the order among crates; `math_answers` uses nothing of rollflow.

use std::collections::BTreeSet;
use std::path::Path;

/// Crates and folders of `src`, from the ground up.
const LAYERS: [&str; 22] = [
    "util", "settings", "net", "tinker", "python", "flow", "hub", "weights", "data", "observe", "algo", "judge", "model",
    "sandbox", "env", "engine", "ranks", "train", "serve", "rollout", "stages", "recipe",
];

/// Position of a crate, or of a module of the library's root, in the list.
fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == name)
}

/// Names that follow `prefix` in a text; comments and unit tests do not count.
fn used<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let paths = lines.flat_map(|line| line.split(prefix).skip(1));
    paths.filter_map(|path| path.split(|c: char| !c.is_alphanumeric() && c != '_').next()).collect()
}

/// Entries of a folder by their names without an ending.
fn entries(folder: &str) -> Vec<(String, std::path::PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), path)).collect()
}

#[test]
fn crates_and_folders_use_only_the_layers_below_them() {
    let mut against = Vec::new();
    let mut check = |name: &str, file: &Path, prefixes: &[&str]| {
        let own = layer(name).unwrap_or_else(|| panic!("{name} is in no layer: add it to LAYERS"));
        let text = std::fs::read_to_string(file).unwrap();
        let names = prefixes.iter().flat_map(|prefix| used(&text, prefix));
        let above = names.filter(|name| layer(name).is_some_and(|layer| layer > own));
        against.extend(above.map(|above| format!("{}: {name} uses {above}", file.display())));
    };
    for (name, path) in entries("src").iter().filter(|(name, _)| name != "lib") {
        let files = if path.is_dir() { crate::files(path, "rs") } else { vec![path.clone()] };
        for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
            check(name, file, &["crate::", "rollflow_"]);
        }
    }
    for (name, path) in entries("crates").iter().filter(|(name, _)| name != "math_answers") {
        check(name, &path.join("Cargo.toml"), &["rollflow_"]);
    }
    assert!(against.is_empty(), "against the layers:\n{}", against.join("\n"));
}

#[test]
fn math_answers_uses_nothing_of_rollflow() {
    let (_, path) = entries("crates").into_iter().find(|(name, _)| name == "math_answers").unwrap();
    assert!(!std::fs::read_to_string(path.join("Cargo.toml")).unwrap().contains("rollflow"));
}

#[test]
fn a_path_in_code_counts_and_one_in_a_comment_does_not() {
    let code = "use crate::data::Group;\n// crate::recipe\nfn f() -> crate::algo::Loss {}\n#[cfg(test)]\nmod tests {\n use crate::stages::X;";
    assert_eq!(used(code, "crate::"), BTreeSet::from(["algo", "data"]));
    assert_eq!(used("rollflow_net = { path = \"../net\" }", "rollflow_"), BTreeSet::from(["net"]));
    assert!(layer("data") < layer("algo") && layer("nowhere").is_none());
}
