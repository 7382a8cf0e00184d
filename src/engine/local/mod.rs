//! Engine in this process: continuous batching over the slots of a KV cache, and generation from
//! text to text, for inspecting a model.

mod ahead;
mod drafts;
mod draw;
mod engine;
mod graphs;
mod reading;
mod room;
mod sequence;

pub use engine::LocalEngine;

use std::sync::Arc;

use crate::engine::{EngineError, Finished, Request, SamplingParams, TokenEngine, text_before_stop};

/// Continues a prompt once. Returns the text up to the stop string or end-of-text token, without
/// it, and the whole completion, which is a function of weights, prompt, parameters, the engine's
/// seed and `ordinal`.
pub fn generate(
    engine: &mut LocalEngine,
    prompt: &str,
    params: &SamplingParams,
    ordinal: u64,
) -> Result<(String, Finished), EngineError> {
    batch_generate(engine, &[prompt], params, ordinal)?.pop().ok_or(EngineError::NoWeights)
}

/// Continues every prompt once, in the order given, as many at a time as the engine has slots.
/// Completion `i` has the tokens of [`generate`] with ordinal `first + i`; log-probabilities may
/// differ in their last bits. After an error, none of them is left in the engine.
pub fn batch_generate(
    engine: &mut LocalEngine,
    prompts: &[&str],
    params: &SamplingParams,
    first: u64,
) -> Result<Vec<(String, Finished)>, EngineError> {
    let params = Arc::new(params.clone());
    let ended = (first..).zip(prompts).try_for_each(|(ordinal, prompt)| {
        let tokens = engine.tokenizer().encode(prompt)?;
        engine.submit(Request::new(ordinal, tokens, 1, params.clone()))
    });
    let ended = ended.and_then(|()| engine.run());
    if ended.is_err() {
        (first..).zip(prompts).for_each(|(ordinal, _)| engine.cancel(ordinal));
    }
    let mut all = ended?;
    all.sort_by_key(|finished| finished.ordinal);
    let with_text = |finished: Finished| {
        let text = text_before_stop(&finished.tokens, &params.stop, engine.tokenizer(), true)?;
        Ok((text, finished))
    };
    all.into_iter().map(with_text).collect()
}
