//! Conversations and rollouts without a graph, one call at a time. They drive any engine: another one is another argument.

use std::sync::Arc;
use std::time::Duration;

use super::Agent;
use super::conversations::{Conversations, Setup};
use super::dialogue::text_of;
use crate::data::chat::ChatInput;
use crate::data::{ChatMessage, Group, Prompt, Sample, Tokenizer};
use crate::engine::{Request, SamplingParams, TokenEngine};
use crate::env::{ToolExecutor, ToolParser, ToolSpec, Toolbox};
use crate::flow::StageError;

/// One more turn of the assistant: the conversation with it, and the turn as a sample, tokens and log-probabilities included. What was given is not
/// changed. `ordinal` keys the randomness together with the engine's seed (law N2).
pub fn generate_conversation_turn<E: TokenEngine>(
    engine: &mut E,
    tokenizer: &Tokenizer,
    conversation: &[ChatMessage],
    tools: &[ToolSpec],
    params: &SamplingParams,
    ordinal: u64,
) -> Result<(Vec<ChatMessage>, Sample), StageError> {
    let schemas: Vec<_> = tools.iter().map(ToolSpec::to_json).collect();
    let text = tokenizer.chat()?.render(&ChatInput::prompt(conversation).tools(&schemas))?;
    let tokens: Arc<[u32]> = tokenizer.encode_bare(&text)?.into();
    let params = Arc::new(params.clone());
    engine.submit(Request::new(ordinal, tokens.clone(), 1, params))?;
    while !engine.is_idle() {
        if let Some(finished) = engine.step()?.into_iter().find(|finished| finished.ordinal == ordinal) {
            let prompt = Prompt { ordinal, ..Prompt::from(conversation.to_vec()) };
            let mut sample = Sample::begin(&prompt, 0, &tokens);
            sample.answered(&finished.tokens, &finished.log_probs, &finished.versions);
            sample.status = finished.finish.into();
            sample.response = text_of(&finished.tokens, tokenizer)?;
            let said = ChatMessage::new("assistant", sample.response.clone());
            return Ok((conversation.iter().cloned().chain([said]).collect(), sample));
        }
    }
    Err(StageError::new("the engine became idle without answering; it has no weights, or lost the request"))
}

/// Prompts, answered in turns by a model and environments.
pub struct AgentRollouts<'a> {
    /// Whose turns, environments and limits.
    pub agent: &'a Agent,
    /// The model's.
    pub tokenizer: &'a Arc<Tokenizer>,
    /// How turns are sampled; `max_new_tokens` is the longest turn.
    pub params: &'a SamplingParams,
    /// Rollouts for each prompt.
    pub group_size: usize,
}

/// Rolls all prompts out, and gives their groups in the order of the prompts.
pub fn roll_out<E: TokenEngine>(
    engine: &mut E,
    prompts: Vec<Prompt>,
    rollouts: &AgentRollouts,
) -> Result<Vec<Group>, StageError> {
    let AgentRollouts { agent, tokenizer, params, group_size } = rollouts;
    let mut all = Conversations::new(Setup {
        agent: (*agent).clone(),
        tokenizer: Arc::clone(tokenizer),
        mask_older: false,
        admission: None,
        metrics: None,
    });
    let size = (*group_size).max(1) as u32;
    prompts.into_iter().for_each(|prompt| all.admit(prompt, size, (*params).clone()));
    let mut groups = Vec::new();
    while all.under_way() > 0 {
        all.submit(engine, true)?;
        all.environments(if engine.is_idle() { Duration::from_millis(10) } else { Duration::ZERO })?;
        if !engine.is_idle() {
            let finished = engine.step()?;
            all.hear(engine.sampled())?;
            finished.into_iter().try_for_each(|finished| all.finished(finished))?;
        }
        groups.extend(all.take_groups());
    }
    groups.sort_by_key(Group::id);
    Ok(groups)
}

/// One prompt, one rollout, as the sample that a trainer takes: the part of it that was said last, where the chat template rewrites what was read.
pub fn agent_rollout_to_sample<E: TokenEngine>(
    engine: &mut E,
    prompt: Prompt,
    rollouts: &AgentRollouts,
) -> Result<Sample, StageError> {
    let rollouts = AgentRollouts { group_size: 1, ..*rollouts };
    let group = roll_out(engine, vec![prompt], &rollouts)?.pop();
    let sample = group.and_then(|mut group| group.samples.pop());
    sample.ok_or_else(|| StageError::new("the rollout ended without a sample"))
}

/// A conversation of up to `turns` turns with tools and nothing else: the parser reads calls, the executor runs them, and the condition, asked
/// before each turn, ends it early. A turn without calls is the last. What it earned is the closure's to say.
#[expect(clippy::too_many_arguments, reason = "each is a decision of the caller's, and none has a default")]
pub fn create_multiturn_rollout<E, X>(
    engine: &mut E,
    tokenizer: &Arc<Tokenizer>,
    conversation: Vec<ChatMessage>,
    turns: usize,
    params: &SamplingParams,
    tools: Vec<ToolSpec>,
    parser: impl ToolParser + 'static,
    executor: X,
    stop_condition: impl Fn(&[ChatMessage]) -> bool + Send + Sync + 'static,
    reward: impl Fn(&Sample) -> f64,
) -> Result<Sample, StageError>
where
    E: TokenEngine,
    X: ToolExecutor + Clone + 'static,
{
    let make = move || Toolbox::new(tools.clone(), executor.clone());
    let agent = Agent::new(make).parser(parser).max_turns(turns).stop_condition(stop_condition);
    let rollouts = AgentRollouts { agent: &agent, tokenizer, params, group_size: 1 };
    let mut sample = agent_rollout_to_sample(engine, Prompt::from(conversation), &rollouts)?;
    sample.reward = Some(reward(&sample));
    Ok(sample)
}
