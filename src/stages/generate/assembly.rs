//! Finished answers become whole groups again (law D2), in whatever order they end.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::data::{Group, Prompt, Sample, Status, Tokenizer, TokenizerError};
use crate::engine::Finished;

/// Where the metadata of a sample that an engine refused say why.
pub const REFUSED: &str = "refused";

/// Where the metadata of a rollout whose environment failed say why.
pub const ENVIRONMENT_FAILURE: &str = "environment_failure";

/// Why an engine or an environment lost a sample, if one did: the sample is not whole and earns nothing.
pub fn why_lost(sample: &Sample) -> Option<&str> {
    let said = |key| sample.metadata.get(key).and_then(|why| why.as_str());
    let engine = said(REFUSED).filter(|_| sample.status == Status::Aborted);
    engine.or_else(|| said(ENVIRONMENT_FAILURE))
}

/// Groups of which some answers are missing.
#[derive(Debug)]
pub(in crate::stages) struct Assembly {
    open: BTreeMap<u64, Open>,
    mask_older: bool,
}

#[derive(Debug)]
struct Open {
    prompt: Arc<Prompt>,
    prompt_tokens: Arc<[u32]>,
    temperature: f32,
    samples: Vec<Option<Sample>>,
}

impl Assembly {
    /// Nothing yet. `mask_older`: only what the newest weights of an answer sampled is to be trained.
    pub fn new(mask_older: bool) -> Self {
        Assembly { open: BTreeMap::new(), mask_older }
    }

    /// Expects `size` answers to this prompt, sampled at this temperature.
    pub fn open(&mut self, prompt: Prompt, prompt_tokens: Arc<[u32]>, size: u32, temperature: f32) {
        let samples = vec![None; size as usize];
        self.open.insert(prompt.ordinal, Open { prompt: Arc::new(prompt), prompt_tokens, temperature, samples });
    }

    /// Takes one answer; gives the group when it was the last. An answer nobody asked for is ignored.
    pub fn add(&mut self, finished: Finished, tokenizer: &Tokenizer) -> Result<Option<Group>, TokenizerError> {
        let ordinal = finished.ordinal;
        let Some(open) = self.open.get_mut(&ordinal) else { return Ok(None) };
        let index = finished.index as usize;
        if let Some(place) = open.samples.get_mut(index) {
            let mut sample = sample(&open.prompt, &open.prompt_tokens, finished, tokenizer)?;
            // Greedy tokens have no distribution of their own to be scored by.
            sample.temperature = Some(open.temperature).filter(|temperature| *temperature > 0.0);
            if self.mask_older {
                sample.mask_older();
            }
            *place = Some(sample);
        }
        if open.samples.iter().any(Option::is_none) {
            return Ok(None);
        }
        let Some(Open { prompt, samples, .. }) = self.open.remove(&ordinal) else { return Ok(None) };
        Ok(Some(Group { prompt, samples: samples.into_iter().flatten().collect(), ..Group::default() }))
    }
}

/// Tokens in, tokens out (law D1): the text is decoded beside them, for rewards and logs only.
fn sample(prompt: &Prompt, prompt_tokens: &[u32], finished: Finished, tokenizer: &Tokenizer) -> Result<Sample, TokenizerError> {
    let mut sample = Sample::begin(prompt, finished.index, prompt_tokens);
    sample.response = tokenizer.decode(&finished.tokens)?;
    sample.status = finished.finish.into();
    if let Some(why) = finished.refused {
        sample.metadata.insert(REFUSED.to_owned(), why.into());
    }
    sample.answered(&finished.tokens, &finished.log_probs, &finished.versions);
    Ok(sample)
}
