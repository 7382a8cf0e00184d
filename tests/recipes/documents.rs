//! Holds the documents to the code: their Rust is compiled, their recipes are read, their links and paths lead somewhere.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rollflow::recipe::parse;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

const TOP: [&str; 4] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];

/// Every page of the book and of the top folder, by its path from the root.
fn pages() -> Vec<(PathBuf, String)> {
    let mut paths = [TOP.map(|name| root().join(name)).to_vec(), crate::files(&root().join("docs"), "md")].concat();
    paths.sort();
    paths.into_iter().map(|path| (path.strip_prefix(root()).unwrap().to_owned(), fs::read_to_string(&path).unwrap())).collect()
}

/// The blocks in a page whose language begins so, each with the line that it begins on.
fn blocks(page: &str, language: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if let Some(of) = line.strip_prefix("```").filter(|of| !of.is_empty()) {
            let block: Vec<&str> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
            if of.starts_with(language) {
                found.push((at + 1, block.join("\n")));
            }
        }
    }
    found
}

#[test]
fn every_page_with_rust_in_it_is_compiled_with_the_doc_tests() {
    let libraries = ["src/lib.rs", "pipelines/src/lib.rs"].map(|path| fs::read_to_string(root().join(path)).unwrap()).concat();
    let with_rust: Vec<PathBuf> =
        pages().into_iter().filter(|(_, page)| !blocks(page, "rust").is_empty()).map(|(path, _)| path).collect();
    assert!(with_rust.len() > 10, "{with_rust:?}");
    for path in with_rust {
        assert!(libraries.contains(&format!("../{}\")]", path.display())), "{} is not in a library's docs", path.display());
    }
}

/// A block is a whole recipe, with `pipeline`, `[model]` and `[task]`, or goes over a small one.
#[test]
fn every_recipe_in_the_documents_is_read_without_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let base = "pipeline = \"grpo\"\n[model]\nkind = \"tiny\"\n[task]\nkind = \"arithmetic\"\n";
    let file = folder.path().join("shown.toml");
    let mut read = 0;
    for (path, page) in pages() {
        // Of other programs, of `rollflow deploy` and of `rollflow simulate --cluster`.
        let elsewhere = |block: &str| {
            block.contains("[dependencies]") || ["[env]", "[deploy]", "[cluster]"].iter().any(|first| block.starts_with(first))
        };
        for (line, block) in blocks(&page, "toml").into_iter().filter(|(_, block)| !elsewhere(block)) {
            // The tutorial's includes a recipe of this repository, from wherever the reader is.
            let shown: Vec<&str> = block.lines().filter(|line| !line.starts_with("include = ")).collect();
            let imitates = if block.contains("[mix]") { "[sft]\nsteps = 5\n" } else { "" };
            // A data set has no default reward, and pages about data do not repeat one.
            let rewards =
                if block.contains("data = ") && !block.contains("pipeline = ") { "[reward]\nkind = \"exact\"\n" } else { "" };
            let whole = ["pipeline = ", "[model]", "[task]"].iter().all(|part| block.contains(part));
            let base = if whole { String::new() } else { format!("{base}{imitates}{rewards}") };
            fs::write(folder.path().join("base.toml"), base).unwrap();
            let text = format!("include = \"base.toml\"\n{}", shown.join("\n"));
            if let Err(errors) = parse(file.to_str().unwrap(), &text, &[]) {
                panic!("{}:{line}: {errors}\n{text}", path.display());
            }
            read += 1;
        }
    }
    assert!(read > 10, "{read} recipes");
}

/// Anchor of a heading on GitHub and in the book.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
    kept.replace(' ', "-")
}

/// Targets of a page's links within the repository.
fn links(page: &str) -> Vec<String> {
    let link = regex::Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    let code = regex::Regex::new(r"(?s)```.*?\n```|`[^`\n]*`").unwrap();
    let page = code.replace_all(page, "code");
    link.captures_iter(&page).map(|found| found[1].to_owned()).filter(|target| !target.contains("://")).collect()
}

/// Pages of the book stay within it, because the built book holds nothing else.
#[test]
fn every_link_leads_to_a_file_and_a_heading_that_are_there() {
    let headings = |page: &str| -> Vec<String> {
        page.lines().filter(|line| line.starts_with('#')).map(|line| anchor(line.trim_start_matches('#'))).collect()
    };
    let mut broken = Vec::new();
    for (path, page) in pages() {
        for target in links(&page) {
            let (file, heading) = target.split_once('#').unwrap_or((&target, ""));
            let to = if file.is_empty() { root().join(&path) } else { root().join(&path).with_file_name(file) };
            let inside = !path.starts_with("docs")
                || to.canonicalize().is_ok_and(|to| to.starts_with(root().join("docs").canonicalize().unwrap()));
            let there =
                to.exists() && (heading.is_empty() || headings(&fs::read_to_string(&to).unwrap()).iter().any(|of| of == heading));
            if !there || !inside {
                broken.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert_eq!(broken, Vec::<String>::new());
}

#[test]
fn the_table_of_contents_lists_every_page_of_the_book_once() {
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let mut listed: Vec<PathBuf> = links(&summary).iter().map(|target| Path::new("docs").join(target)).collect();
    listed.sort();
    let there: Vec<PathBuf> = pages().into_iter().map(|(path, _)| path).filter(|path| path.starts_with("docs")).collect();
    let there: Vec<PathBuf> = there.into_iter().filter(|path| !path.ends_with("SUMMARY.md")).collect();
    assert_eq!(listed, there);
}

/// Paths of sources, tests and examples in code font. `src/main.rs` is the reader's own.
#[test]
fn every_path_that_a_page_names_is_there() {
    let named = regex::Regex::new(r"`((?:src|crates|tests|pipelines|examples|scripts|benches|docs)/[A-Za-z0-9_./-]+)`").unwrap();
    let mut missing = Vec::new();
    for (path, page) in pages() {
        for found in named.captures_iter(&page).filter(|found| &found[1] != "src/main.rs" && !root().join(&found[1]).exists()) {
            missing.push(format!("{}: {}", path.display(), &found[1]));
        }
    }
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn the_smallest_recipe_for_a_model_and_a_data_set_has_three_sections_and_six_keys_at_most() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let shown: Vec<String> = blocks(&readme, "toml").into_iter().map(|(_, block)| block).collect();
    let recipe = shown.iter().find(|block| block.contains("openai/gsm8k")).unwrap();
    let (sections, keys): (Vec<&str>, Vec<&str>) =
        recipe.lines().filter(|line| !line.is_empty()).partition(|line| line.starts_with('['));
    assert!(sections.len() <= 3 && keys.len() <= 6, "{recipe}");
    let plan = parse("recipe.toml", recipe, &[]).unwrap();
    assert_eq!((plan.train.lr, plan.generate.group_size), (1e-6, 8));
}

/// A claim without its test is worth nothing.
#[test]
fn every_test_that_the_page_of_claims_names_is_there() {
    let mut programs: BTreeMap<String, String> = BTreeMap::new();
    for tests in ["tests", "pipelines/tests", "crates/math_answers/tests"].map(|folder| root().join(folder)) {
        for program in
            fs::read_dir(tests).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.join("main.rs").exists())
        {
            let name = program.file_name().unwrap().to_string_lossy().into_owned();
            append(&program, programs.entry(name).or_default());
        }
    }
    let named = regex::Regex::new(r"`([a-z_]+)::((?:[a-z_0-9]+::)*)([a-z_0-9]+)`").unwrap();
    let (mut missing, mut seen) = (Vec::new(), 0);
    let page = fs::read_to_string(root().join("docs/develop/claims.md")).unwrap();
    for found in named.captures_iter(&page) {
        let Some(source) = programs.get(&found[1]) else { continue };
        seen += 1;
        if !["fn", "mod"].iter().any(|kind| source.contains(&format!("{kind} {}", &found[3]))) {
            missing.push(found[0].to_owned());
        }
    }
    assert!(missing.is_empty() && seen > 200, "{seen} named, not there: {missing:#?}");
}

fn append(folder: &Path, source: &mut String) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            append(&path, source);
        } else if path.extension().is_some_and(|end| end == "rs") {
            *source += &fs::read_to_string(path).unwrap();
        }
    }
}
