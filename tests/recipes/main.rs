//! Recipes, documents, logs and metrics.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod aliases;
mod documents;
mod judged;
mod layers;
mod limits;
mod logs;
mod metrics;
#[cfg(target_os = "linux")]
mod metrics_memory;
mod no_statics;
mod plans;
mod recipe_errors;
mod recipe_keys;
#[path = "../support/mod.rs"]
mod support;
mod values;

use std::path::{Path, PathBuf};

/// Files below a folder, by the end of their names, in order.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|end| end == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}
