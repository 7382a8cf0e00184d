//! Measures what asynchrony is worth, and writes the numbers into `docs/explain/asynchrony.md`.
//!
//! `cargo bench --package rollflow-pipelines --bench asynchrony`, on a machine that does nothing else. `-- PART …` measures some parts only
//! and leaves the others as they stand. `-- --quick` tries everything in two minutes, and writes what it finds, which is worth nothing,
//! below `target` instead.
//!
//! Each part measures, then gives its tables and drawings; what stands around them in the page is written by hand.

mod chart;
mod learner;
mod page;
mod partials;
mod pipelining;
mod policies;
mod staleness;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::learner::Learner;
use crate::page::{Measured, Page};

type Part = fn(&Learner) -> Result<Measured>;

const PARTS: [(&str, Part); 4] = [
    ("staleness", staleness::measure),
    ("pipelining", pipelining::measure),
    ("policies", policies::measure),
    ("partials", partials::measure),
];

fn main() -> Result<()> {
    let mut chosen: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let quick = chosen.iter().position(|arg| arg == "--quick").map(|at| chosen.remove(at)).is_some();
    if let Some(unknown) = chosen.iter().find(|name| PARTS.iter().all(|(part, _)| part != name)) {
        bail!("there is no part {unknown}; there are {}, and --quick", PARTS.map(|(part, _)| part).join(", "));
    }
    let page = Page::open(&if quick { copy_below_target()? } else { docs() })?;
    let learner = Learner::new(quick)?;
    for (name, measure) in PARTS {
        if chosen.is_empty() || chosen.iter().any(|part| part == name) {
            eprintln!("== {name}");
            let started = Instant::now();
            let measured = measure(&learner).with_context(|| format!("measuring {name}"))?;
            // At once, so that a part which fails does not cost those before it.
            page.put(name, &measured, started.elapsed())?;
        }
    }
    println!("{}", page.path().display());
    Ok(())
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/explain")
}

fn copy_below_target() -> Result<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(&folder)?;
    std::fs::copy(docs().join(page::NAME), folder.join(page::NAME)).context("copying the page")?;
    Ok(folder)
}
