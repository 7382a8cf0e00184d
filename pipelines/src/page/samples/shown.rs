//! One group of samples with its texts, and the tokens of one sample with their numbers.

use anyhow::Result;
use rollflow::data::{ChatMessage, PromptText, Tokenizer};
use rollflow::observe::logs::Rollout;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::index::{Entry, SampleIndex};
use super::{SampleKey, TokenPlace};
use crate::command::tokens::pieces;

/// Characters of a text.
const CHARACTERS: usize = 20_000;
/// Samples of a group.
const SAMPLES: usize = 128;
/// Turns of a conversation.
const TURNS: usize = 200;
/// Tokens of an answer.
const TOKENS: usize = 2000;
/// Tokens before the first, on which a decoder's spaces depend.
const CONTEXT: usize = 8;

/// The group of a sample: what its samples share, and the samples. `None` if there is no such sample.
pub fn group(index: &SampleIndex, key: SampleKey) -> Result<Option<Value>> {
    let entries: Vec<&Entry> = index.group(key).collect();
    let Some(own) = entries.iter().position(|entry| key.names(entry)) else { return Ok(None) };
    let mut file = index.open()?;
    // Of a large group, those around the sample.
    let start = own.saturating_sub(SAMPLES / 2).min(entries.len().saturating_sub(SAMPLES));
    let rows = entries.iter().skip(start).take(SAMPLES).filter_map(|entry| entry.row(&mut file));
    let rows: Vec<Rollout> = rows.filter(|row| (row.step, row.group) == (key.step, key.group)).collect();
    let Some(first) = rows.first() else { return Ok(None) };
    let answer = first.metadata.get("answer").map(text_of);
    let turns = match &first.prompt {
        PromptText::Text(text) => vec![json!({ "role": "prompt", "text": cut(text) })],
        PromptText::Chat(turns) => turns.iter().take(TURNS).map(turn).collect(),
    };
    Ok(Some(json!({
        "step": key.step, "group": key.group, "size": entries.len(), "answer": answer, "source": first.source,
        "spared": rows.iter().any(|row| row.spared), "prompt": turns, "samples": rows.iter().map(shown).collect::<Vec<_>>(),
    })))
}

/// A sample of a group: its numbers, its text, and its turns if it has several.
fn shown(row: &Rollout) -> Value {
    // A conversation holds the prompt's turns, too.
    let asked = match &row.prompt {
        PromptText::Text(_) => 0,
        PromptText::Chat(turns) => turns.len(),
    };
    let conversation = row.metadata.get("conversation").and_then(|turns| Vec::<ChatMessage>::deserialize(turns).ok());
    let turns = conversation.filter(|turns| turns.len() > asked + 1);
    let turns = turns.map(|turns| turns.iter().skip(asked).take(TURNS).map(turn).collect::<Vec<_>>());
    json!({
        "step": row.step, "group": row.group, "index": row.index, "part": row.part, "status": row.status,
        "reward": row.reward, "parts": row.reward_parts, "advantage": row.advantage, "length": row.versions.generated(),
        "response": cut(&row.response), "turns": turns, "versions": [row.versions.oldest(), row.versions.newest()],
        "facts": facts(&row.metadata),
    })
}

/// Short facts about a rollout that stages wrote down.
fn facts(metadata: &Map<String, Value>) -> Vec<(&String, String)> {
    let is_short = |value: &&Value| !value.is_array() && !value.is_object() && !value.is_null();
    let hidden = ["answer", "conversation", "source"];
    let short = metadata.iter().filter(|(key, value)| !hidden.contains(&key.as_str()) && is_short(value));
    short.take(20).map(|(key, value)| (key, text_of(value).chars().take(200).collect())).collect()
}

/// A turn of a conversation, with its tool calls as text.
fn turn(message: &ChatMessage) -> Value {
    let written = serde_json::to_value(message).unwrap_or_default();
    let calls = written.get("tool_calls").and_then(Value::as_array).into_iter().flatten();
    let calls: Vec<String> = calls.take(TURNS).map(|call| cut(&call.to_string())).collect();
    json!({ "role": message.role, "text": cut(&message.content), "calls": calls })
}

fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => cut(text),
        other => cut(&other.to_string()),
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}

/// Tokens of a sample from a place on, each with its text and recorded numbers; a column that was not
/// recorded is null. `None` if there is no such sample.
pub fn tokens(index: &SampleIndex, key: SampleKey, place: TokenPlace, tokenizer: &Tokenizer) -> Result<Option<Value>> {
    let own = index.group(key).find(|entry| key.names(entry));
    let Some(own) = own else { return Ok(None) };
    let Some(rollout) = own.rollout(&mut index.open()?) else { return Ok(None) };
    let versions: Vec<Option<u64>> = rollout.versions.per_token().collect();
    let prompt = versions.iter().position(Option::is_some).unwrap_or(rollout.tokens.len());
    let from = place.from.unwrap_or(prompt).min(rollout.tokens.len());
    let range = from..(from + TOKENS).min(rollout.tokens.len());
    let context = from.saturating_sub(CONTEXT);
    let texts = pieces(&rollout.tokens[context..range.end], |tokens| Ok(tokenizer.decode_all(tokens)?))?;
    let column = |values: Option<Vec<Option<f32>>>| values.and_then(|values| Some(values.get(range.clone())?.to_vec()));
    let sampled = |values: Vec<f32>| values.into_iter().zip(&versions).map(|(value, version)| version.map(|_| value)).collect();
    Ok(Some(json!({
        "from": from, "prompt": prompt, "total": rollout.tokens.len(), "texts": &texts[from - context..],
        "ids": &rollout.tokens[range.clone()], "versions": versions.get(range.clone()), "advantage": rollout.advantage,
        "generator": column(rollout.log_probs.map(sampled)), "trainer": column(rollout.trainer_log_probs),
        "entropy": column(rollout.entropies),
        "masked": rollout.loss_mask.and_then(|mask| Some(mask.get(range.clone())?.iter().map(|of| *of == 0.0).collect::<Vec<_>>())),
    })))
}
