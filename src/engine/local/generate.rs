//! Text in, text out: what one calls to look at a model.

use std::sync::Arc;

use super::LocalEngine;
use crate::engine::{EngineError, FinishReason, Finished, Request, SamplingParams, TokenEngine};

/// One answer as text and as it was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The answer up to the stop string or end-of-text token, without it.
    pub text: String,
    /// What was sampled, the tokens that ended it included.
    pub tokens: Vec<u32>,
    /// Log-probability of each token under the distribution it was drawn from.
    pub log_probs: Vec<f32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Continues a prompt once. The answer is a function of weights, prompt, parameters, the engine's seed and `ordinal`.
pub fn generate(
    engine: &mut LocalEngine,
    prompt: &str,
    params: &SamplingParams,
    ordinal: u64,
) -> Result<Generation, EngineError> {
    let mut answers = run(engine, &[prompt], params, ordinal)?;
    answers.pop().ok_or(EngineError::NoWeights)
}

/// Continues every prompt once, as many at a time as the engine has slots, in the order given. Answer `i` is what [`generate`] gives
/// with ordinal `i`.
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
