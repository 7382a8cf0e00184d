//! Rollouts without a graph, on any engine: the calling thread drives it until all have ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Agent, RolloutContext, advance, multi_turn};
use crate::data::{ChatMessage, Group, Prompt, Sample, Tokenizer};
use crate::engine::{EngineError, SamplingParams, TokenEngine};
use crate::env::ToolSpec;

/// Samples `group_size` completions for each prompt and returns the groups in the order of the
/// prompts. Their ordinals, which key the randomness (law N2), must differ.
pub fn complete<E: TokenEngine>(
    engine: &mut E,
    tokenizer: &Arc<Tokenizer>,
    prompts: Vec<Prompt>,
    group_size: usize,
    params: &SamplingParams,
) -> Result<Vec<Group>, EngineError> {
    roll_out(engine, tokenizer, None, prompts, group_size, params)
}

/// Runs rollouts, multi-turn ones with an `agent`, `group_size` for each prompt, and returns the groups
/// in the order of the prompts. Their ordinals must differ. `max_new_tokens` is the longest turn. After an
/// error, none of them is left in the engine.
pub fn roll_out<E: TokenEngine>(
    engine: &mut E,
    tokenizer: &Arc<Tokenizer>,
    agent: Option<&Agent>,
    prompts: Vec<Prompt>,
    group_size: usize,
    params: &SamplingParams,
) -> Result<Vec<Group>, EngineError> {
    let places: BTreeMap<u64, usize> = prompts.iter().enumerate().map(|(place, prompt)| (prompt.ordinal, place)).collect();
    let run = || -> Result<Vec<Group>, EngineError> {
        let mut rollouts = RolloutContext::detached(tokenizer).rollouts(agent, engine);
        for prompt in prompts {
            rollouts.admit(engine, prompt, group_size.max(1) as u32, params.clone())?;
        }
        let mut groups = Vec::new();
        while !rollouts.is_idle(engine) {
            // Environments work while the engine is busy.
            rollouts.poll(Duration::ZERO)?;
            advance(&mut *rollouts, engine)?;
            groups.extend(rollouts.take_groups());
        }
        Ok(groups)
    };
    let ended = run();
    if ended.is_err() {
        places.keys().for_each(|ordinal| engine.cancel(*ordinal));
    }
    let mut groups = ended?;
    groups.sort_by_key(|group: &Group| places.get(&group.id()).copied());
    Ok(groups)
}

/// Runs one rollout, multi-turn with an `agent`, and returns its last sample: a chat template that
/// rewrites earlier turns makes several of one rollout.
pub fn agent_rollout_to_sample<E: TokenEngine>(
    engine: &mut E,
    tokenizer: &Arc<Tokenizer>,
    agent: Option<&Agent>,
    prompt: Prompt,
    params: &SamplingParams,
) -> Result<Sample, EngineError> {
    let ordinal = prompt.ordinal;
    let group = roll_out(engine, tokenizer, agent, vec![prompt], 1, params)?.pop();
    let sample = group.and_then(|mut group| group.samples.pop());
    sample.ok_or_else(|| EngineError::Prompt { ordinal, problem: "the rollout ended without a sample".to_owned() })
}

/// Runs one multi-turn rollout of `conversation`, and scores it with `reward`. The agent has the tools
/// ([`Toolbox`](crate::env::Toolbox)), their parser, the number of turns and the stop condition.
pub fn create_multiturn_rollout<E: TokenEngine>(
    engine: &mut E,
    tokenizer: &Arc<Tokenizer>,
    conversation: Vec<ChatMessage>,
    agent: &Agent,
    params: &SamplingParams,
    reward: impl Fn(&Sample) -> f64,
) -> Result<Sample, EngineError> {
    let mut sample = agent_rollout_to_sample(engine, tokenizer, Some(agent), Prompt::from(conversation), params)?;
    sample.reward = Some(reward(&sample));
    Ok(sample)
}

/// Samples one turn of the assistant. Returns the conversation with it, and the turn as a sample.
/// `ordinal` keys the randomness together with the engine's seed (law N2).
pub fn generate_conversation_turn<E: TokenEngine>(
    engine: &mut E,
    tokenizer: &Arc<Tokenizer>,
    conversation: &[ChatMessage],
    tools: &[ToolSpec],
    params: &SamplingParams,
    ordinal: u64,
) -> Result<(Vec<ChatMessage>, Sample), EngineError> {
    let mut prompt = Prompt { ordinal, ..Prompt::from(conversation.to_vec()) };
    if !tools.is_empty() {
        prompt.metadata.insert("tools".to_owned(), tools.iter().map(ToolSpec::to_json).collect());
    }
    let mut sample = agent_rollout_to_sample(engine, tokenizer, None, prompt, params)?;
    sample.response = multi_turn::text_of(&sample.tokens[sample.tokens.len() - sample.generated()..], tokenizer)?;
    let turn = ChatMessage::new("assistant", sample.response.clone());
    Ok((conversation.iter().cloned().chain([turn]).collect(), sample))
}
