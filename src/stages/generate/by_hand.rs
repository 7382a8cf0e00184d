//! Generation by hand, without a graph: prompts in, groups out, on any engine.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::assembly::Assembly;
use crate::data::{Group, Partial, Prompt, Tokenizer};
use crate::engine::{EngineError, Request, SamplingParams, TokenEngine};

/// Answers each prompt `group_size` times and gives the groups in the order of the prompts, when the last answer has ended.
pub(super) fn answer<E: TokenEngine>(
    engine: &mut E,
    tokenizer: &Tokenizer,
    prompts: Vec<Prompt>,
    group_size: usize,
    params: &SamplingParams,
) -> Result<Vec<Group>, EngineError> {
    let (samples, params) = (group_size as u32, Arc::new(params.clone()));
    let mut open = Assembly::new(false);
    let mut places = BTreeMap::new();
    if let Some((_, twice)) = prompts.iter().enumerate().find(|(place, prompt)| places.insert(prompt.ordinal, *place).is_some()) {
        let problem =
            "another prompt has the same ordinal: take prompts from a `DataBuffer`, or set `Prompt::ordinal`".to_owned();
        return Err(EngineError::Prompt { ordinal: twice.ordinal, problem });
    }
    for mut prompt in prompts {
        let (ordinal, tokens): (_, Arc<[u32]>) = (prompt.ordinal, tokenizer.encode_prompt(&prompt)?.into());
        let Partial { completions: answers, .. } = std::mem::take(&mut prompt.partial);
        engine.submit(Request { answers, ..Request::new(ordinal, tokens.clone(), samples, params.clone()) })?;
        open.open(prompt, tokens, samples, params.temperature);
    }
    let mut groups = Vec::new();
    while !engine.is_idle() {
        for finished in engine.step()? {
            groups.extend(open.add(finished, tokenizer)?);
        }
    }
    groups.sort_by_key(|group: &Group| places.get(&group.id()).copied());
    Ok(groups)
}
