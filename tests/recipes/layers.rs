//! The library's layers: a folder of `src` uses the folders above it in this list, never those
//! below. A crate in `crates` uses nothing of rollflow.

use std::collections::BTreeSet;
use std::path::Path;

/// Folders of `src`, from the ground up.
const LAYERS: [&str; 17] = [
    "util", "net", "settings", "flow", "hub", "data", "observe", "algo", "judge", "model", "sandbox", "env", "engine", "train",
    "rollout", "stages", "recipe",
];

/// Position of a module of the crate's root in the list.
fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == module)
}

/// Modules that `crate::` paths of this code name; comments and unit tests do not count.
fn used(code: &str) -> BTreeSet<&str> {
    let code = code.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let paths = lines.flat_map(|line| line.split("crate::").skip(1));
    paths.filter_map(|path| path.split(|c: char| !c.is_alphanumeric() && c != '_').next()).collect()
}

#[test]
fn folders_use_only_the_layers_below_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut against = Vec::new();
    for entry in std::fs::read_dir(&root).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if name == "lib" {
            continue;
        }
        let own = layer(&name).unwrap_or_else(|| panic!("src/{name} is in no layer: add it to LAYERS"));
        let files = if path.is_dir() { crate::files(&path, "rs") } else { vec![path] };
        for file in files.iter().filter(|file| !file.ends_with("tests.rs")) {
            let code = std::fs::read_to_string(file).unwrap();
            let above = used(&code).into_iter().filter(|module| layer(module).is_some_and(|layer| layer > own));
            against.extend(above.map(|module| format!("{}: {name} uses {module}", file.display())));
        }
    }
    assert!(against.is_empty(), "against the layers:\n{}", against.join("\n"));
}

#[test]
fn a_crate_apart_uses_nothing_of_rollflow() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    for folder in std::fs::read_dir(crates).unwrap() {
        let manifest = folder.unwrap().path().join("Cargo.toml");
        assert!(!std::fs::read_to_string(&manifest).unwrap().contains("rollflow"), "{}", manifest.display());
    }
}

#[test]
fn a_path_in_code_counts_and_one_in_a_comment_does_not() {
    let code = "use crate::data::Group;\n// crate::recipe\nfn f() -> crate::algo::Loss {}\n#[cfg(test)]\nmod tests {\n use crate::stages::X;";
    assert_eq!(used(code), BTreeSet::from(["algo", "data"]));
    assert!(layer("data") < layer("algo") && layer("nowhere").is_none());
}
