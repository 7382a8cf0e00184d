//! Generation from text to text, for inspecting a model.

use std::sync::Arc;

use super::LocalEngine;
use crate::engine::{EngineError, FinishReason, Finished, Request, SamplingParams, TokenEngine};

/// One completion as text and as sampled tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Text up to the stop string or end-of-text token, without it.
    pub text: String,
    /// Sampled tokens, including those that ended the completion.
    pub tokens: Vec<u32>,
    /// Log-probability of each token under the distribution that it was drawn from.
    pub log_probs: Vec<f32>,
    /// Reason for the end.
    pub finish: FinishReason,
}

/// Continues a prompt once. The completion is a function of weights, prompt, parameters, the
/// engine's seed and `ordinal`.
pub fn generate(
    engine: &mut LocalEngine,
    prompt: &str,
    params: &SamplingParams,
    ordinal: u64,
) -> Result<Generation, EngineError> {
    let mut answers = run(engine, &[prompt], params, ordinal)?;
    answers.pop().ok_or(EngineError::NoWeights)
}

/// Continues every prompt once, in the order given, as many at a time as the engine has slots.
/// Completion `i` equals that of [`generate`] with ordinal `i`.
pub fn batch_generate(
    engine: &mut LocalEngine,
    prompts: &[&str],
    params: &SamplingParams,
) -> Result<Vec<Generation>, EngineError> {
    run(engine, prompts, params, 0)
}

fn run(engine: &mut LocalEngine, prompts: &[&str], params: &SamplingParams, first: u64) -> Result<Vec<Generation>, EngineError> {
    let params = Arc::new(params.clone());
    for (ordinal, prompt) in (first..).zip(prompts) {
        let tokens = engine.tokenizer().encode(prompt)?;
        engine.submit(Request::new(ordinal, tokens, 1, params.clone()))?;
    }
    let mut finished = engine.run()?;
    finished.sort_by_key(|finished| finished.ordinal);
    finished.into_iter().map(|finished| text_of(engine, finished, &params)).collect()
}

fn text_of(engine: &LocalEngine, finished: Finished, params: &SamplingParams) -> Result<Generation, EngineError> {
    let mut text = engine.tokenizer().decode(&finished.tokens)?;
    if let Some(end) = params.stop.iter().filter_map(|stop| text.find(stop.as_str())).min() {
        text.truncate(end);
    }
    let Finished { tokens, log_probs, finish, .. } = finished;
    Ok(Generation { text, tokens, log_probs, finish })
}
