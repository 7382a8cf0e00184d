//! Lines that the page has read of runs, so that each request reads only what is new. It keeps the runs that
//! were asked for last.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rollflow::data::Tokenizer;
use rollflow::recipe::parse;

use super::samples::SampleIndex;
use crate::assemble::policy;
use crate::command::tokens::tokenizer_of;
use crate::run::RECIPE;
use crate::run::curves::RunCurves;

/// Runs that are kept.
const RUNS: usize = 16;

/// Read parts of one run. Requests for one part wait for each other.
pub(super) struct RunCache {
    folder: PathBuf,
    pub curves: Mutex<RunCurves>,
    samples: Mutex<Arc<SampleIndex>>,
    tokenizer: Mutex<Option<Arc<Tokenizer>>>,
}

impl RunCache {
    fn of(folder: &Path) -> Self {
        RunCache {
            folder: folder.to_owned(),
            curves: Mutex::new(RunCurves::of(folder)),
            samples: Mutex::new(Arc::new(SampleIndex::of(folder))),
            tokenizer: Mutex::default(),
        }
    }

    /// Index of the samples until now. A search in it does not hold up the next one.
    pub fn samples(&self) -> Result<Arc<SampleIndex>> {
        let mut samples = self.samples.lock();
        Arc::make_mut(&mut samples).refresh()?;
        Ok(samples.clone())
    }

    /// The tokenizer of the run's model: as its recipe names it, or else from its newest checkpoint.
    pub fn tokenizer(&self) -> Result<Arc<Tokenizer>> {
        let mut known = self.tokenizer.lock();
        if let Some(tokenizer) = &*known {
            return Ok(tokenizer.clone());
        }
        let recipe = || -> Result<Tokenizer> {
            let text = std::fs::read_to_string(self.folder.join(RECIPE))?;
            let plan = parse(RECIPE, &text, &[])?;
            policy::tokenizer(&plan.model, &plan.chat)
        };
        let saved = || -> Result<Tokenizer> { Ok(Tokenizer::from_dir(&tokenizer_of(&self.folder)?)?) };
        let tokenizer = recipe().or_else(|_| saved()).context("the run's tokenizer, which the texts of its tokens need")?;
        Ok(known.insert(Arc::new(tokenizer)).clone())
    }
}

/// Runs that were asked for last, the newest first.
#[derive(Default)]
pub(super) struct Caches(Mutex<Vec<Arc<RunCache>>>);

impl Caches {
    /// The cache of the run in `folder`.
    pub fn of(&self, folder: &Path) -> Arc<RunCache> {
        let mut caches = self.0.lock();
        let known = caches.iter().position(|cache| cache.folder == folder).map(|at| caches.remove(at));
        let cache = known.unwrap_or_else(|| Arc::new(RunCache::of(folder)));
        caches.insert(0, cache.clone());
        caches.truncate(RUNS);
        cache
    }
}
