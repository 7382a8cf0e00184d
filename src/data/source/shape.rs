//! Meaning of a record by the names of its fields.
//!
//! | a record with | is |
//! | --- | --- |
//! | `messages`, `conversations`, `conversation` | a conversation |
//! | `prompt`, `question`, `instruction` (with `input`), `problem`, `query` | a prompt |
//! | `completion`, `response`, `output`, `solution`, `answer` | and its completion |
//! | `answer`, `ground_truth`, `target`, `reward_model.ground_truth` | and the ground truth |
//! | `text` | text without prompt and completion |
//! | `chosen`, `rejected` | a better and a worse completion |
//!
//! Fields are tried in this order: a record with `messages` is a conversation, whatever else it
//! has. Turns have `role` and `content`, or ShareGPT's `from` and `value`. `tools` are a list, or its
//! JSON as text. Without a ground truth, the completion is it. Without a prompt, `chosen` and
//! `rejected` begin with it. Unused fields go to the prompt's metadata, and so do completion and
//! ground truth under their own names.

use serde_json::Value;

use super::turns;
use crate::data::{ChatMessage, Metadata, Pair, Prompt, PromptText, RankedPair, count_turns};
use crate::settings::declare::section;

const CONVERSATION: [&str; 3] = ["messages", "conversations", "conversation"];
const PROMPT: [&str; 5] = ["prompt", "question", "instruction", "problem", "query"];
const COMPLETION: [&str; 5] = ["completion", "response", "output", "solution", "answer"];
const ANSWER: [&str; 4] = ["answer", "ground_truth", "target", "reward_model.ground_truth"];

/// The metadata's name of a field `answer` that is no text, with the value that the record has.
const ANSWER_OF_RECORD: &str = "answer_of_record";

section! {
    /// Names of fields; a dot leads into an object, such as "reward_model.ground_truth". Fields
    /// that are left out are recognised.
    #[derive(Eq)]
    pub struct Columns {
        /// Prompt: text, or a list of messages.
        prompt: Option<String> = None;
        /// Completion to imitate.
        completion: Option<String> = None;
        /// Reference answer.
        answer: Option<String> = None;
        /// Whole conversation.
        messages: Option<String> = None;
        /// Raw text.
        text: Option<String> = None;
        /// Chosen completion of a pair.
        chosen: Option<String> = None;
        /// Rejected completion of a pair.
        rejected: Option<String> = None;
    }
}

/// Takes the first of these fields that is there and not null, with its name.
pub(super) fn take_first(record: &mut Metadata, names: &[&'static str]) -> Option<(&'static str, Value)> {
    names.iter().find_map(|name| Some((*name, take(record, name)?)))
}

/// Takes the field that a column map names, or else the first of `names`.
fn take_named(record: &mut Metadata, named: &Option<String>, names: &[&'static str]) -> Result<Option<Value>, String> {
    match named {
        Some(name) => take(record, name).map(Some).ok_or_else(|| format!("without `{name}`")),
        None => Ok(take_first(record, names).map(|(_, value)| value)),
    }
}

/// A field, or what a dotted path leads to; the latter stays where it is.
pub(super) fn take(record: &mut Metadata, name: &str) -> Option<Value> {
    let some = |value: &Value| !value.is_null();
    if record.get(name).is_some_and(some) {
        // `shift_remove` keeps the order of the fields that stay.
        return record.shift_remove(name);
    }
    let (first, rest) = name.split_once('.')?;
    rest.split('.').try_fold(record.get(first)?, |value, key| value.get(key)).filter(|value| some(value)).cloned()
}

/// Something that a record can be read as.
pub trait Shape: Sized + Send + Sync + 'static {
    /// Reads a record, or returns the reason to skip it: a few words, the same for all records of its
    /// kind, optionally with `: ` and details of this record.
    fn read(record: Metadata, columns: &Columns) -> Result<Self, String>;
}

/// Example of supervised training.
#[derive(Clone, Debug, PartialEq)]
pub enum Example {
    /// A conversation, of which the assistant's turns are trained.
    Chat {
        /// Turns in order, at least one of them the assistant's.
        turns: Vec<ChatMessage>,
        /// JSON schemas of the tools that the assistant was offered.
        tools: Vec<Value>,
        /// Number of turns of the prompt, which are not trained; 0 if all of it is trained.
        first: usize,
    },
    /// A prompt and its completion, which is trained.
    Pair(Pair),
    /// Text, of which every token is trained.
    Text(String),
}

/// Fields that were found in a record.
struct Found {
    said: Said,
    tools: Vec<Value>,
    /// The ground truth.
    answer: Option<Value>,
    rest: Metadata,
}

enum Said {
    Turns(Vec<ChatMessage>),
    /// A prompt and its completion.
    Asked(PromptText, Option<Value>),
    Text(String),
}

fn recognise(mut record: Metadata, columns: &Columns) -> Result<Found, String> {
    let asks = columns.prompt.is_some() || columns.text.is_some();
    let conversation: &[&str] = if asks { &[] } else { &CONVERSATION };
    if let Some(turns) = take_named(&mut record, &columns.messages, conversation)? {
        let turns = turns::with_system(turns::read(turns)?, &mut record);
        let (tools, answer) = (tools(&mut record)?, ground_truth(&mut record, columns)?);
        return Ok(Found { said: Said::Turns(turns), tools, answer, rest: record });
    }
    if columns.text.is_none()
        && let Some(prompt) = prompt(&mut record, columns)?
    {
        // The ground truth first: an `answer` in a record with a solution is no completion, and
        // without one it is both.
        let given = ground_truth(&mut record, columns)?;
        let completion = take_named(&mut record, &columns.completion, &COMPLETION)?
            .or_else(|| given.clone().filter(|given| !given.is_array() && !given.is_object()));
        let tools = tools(&mut record)?;
        return Ok(Found { said: Said::Asked(prompt, completion), tools, answer: given, rest: record });
    }
    match take_named(&mut record, &columns.text, &["text"])? {
        Some(Value::String(text)) if text.trim().is_empty() => Err("empty".into()),
        Some(Value::String(text)) => {
            let answer = ground_truth(&mut record, columns)?;
            Ok(Found { said: Said::Text(text), tools: Vec::new(), answer, rest: record })
        }
        Some(_) => Err("whose text is no text".into()),
        None => Err("of no known shape".into()),
    }
}

fn prompt(record: &mut Metadata, columns: &Columns) -> Result<Option<PromptText>, String> {
    let (name, value) = match &columns.prompt {
        Some(name) => (name.as_str(), take(record, name).ok_or_else(|| format!("without `{name}`"))?),
        None => match take_first(record, &PROMPT) {
            Some(found) => found,
            None => return Ok(None),
        },
    };
    let text = match value {
        Value::String(text) if text.trim().is_empty() => return Err("with an empty prompt".into()),
        Value::String(text) => text,
        list @ Value::Array(_) => return Ok(Some(PromptText::Chat(turns::with_system(turns::read(list)?, record)))),
        _ => return Err("whose prompt is neither text nor messages".into()),
    };
    let input = match name {
        "instruction" => take(record, "input").and_then(|input| input.as_str().map(str::to_owned)),
        _ => None,
    };
    let text = match input.filter(|input| !input.is_empty()) {
        Some(input) => format!("{text}\n\n{input}"),
        None => text,
    };
    Ok(Some(match take(record, "system") {
        Some(Value::String(system)) if !system.is_empty() => {
            vec![ChatMessage::new("system", system), ChatMessage::new("user", text)].into()
        }
        _ => PromptText::Text(text),
    }))
}

fn ground_truth(record: &mut Metadata, columns: &Columns) -> Result<Option<Value>, String> {
    take_named(record, &columns.answer, &ANSWER)
}

/// A text, or the JSON of another value.
fn text_of(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

/// Text of a completion: its last turn, or the JSON of a value that is no conversation.
fn last_turn(completion: Value) -> String {
    let last = turns::completion(completion.clone()).ok().and_then(|mut turns| turns.pop());
    last.map_or_else(|| text_of(completion), |turn| turn.content)
}

/// Takes the tools: a list, which some data sets write as text.
fn tools(record: &mut Metadata) -> Result<Vec<Value>, String> {
    let written = match take(record, "tools").unwrap_or_default() {
        Value::String(text) if text.trim().is_empty() => Some(Value::Null),
        Value::String(text) => serde_json::from_str(&text).ok(),
        written => Some(written),
    };
    match written {
        Some(Value::Array(tools)) => Ok(tools),
        Some(Value::Null) => Ok(Vec::new()),
        _ => Err("whose `tools` are neither a list nor one as JSON".into()),
    }
}

impl Shape for Example {
    fn read(record: Metadata, columns: &Columns) -> Result<Self, String> {
        let Found { said, tools, .. } = recognise(record, columns)?;
        match said {
            Said::Turns(turns) if count_turns(&turns, Some("assistant")) == 0 => Err("without a turn to learn".into()),
            Said::Turns(turns) => Ok(Example::Chat { turns, tools, first: 0 }),
            Said::Asked(PromptText::Chat(asked), Some(completion)) => {
                let (first, completion) = (asked.len(), turns::completion(completion)?);
                // Some data sets repeat the prompt in the completion, with or without its system turn.
                let after_system = asked.iter().position(|turn| turn.role != "system").unwrap_or(first);
                let repeats = |prompt: &&[ChatMessage]| completion.len() > prompt.len() && completion.starts_with(prompt);
                let repeated = [&asked[..], &asked[after_system..]].into_iter().find(repeats).map_or(0, <[_]>::len);
                Ok(Example::Chat { turns: [&asked[..], &completion[repeated..]].concat(), tools, first })
            }
            Said::Asked(prompt, Some(completion)) => {
                let completion = turns::text_alone(turns::completion(completion)?)?;
                Ok(Example::Pair(Pair { prompt, completion, tools }))
            }
            Said::Asked(_, None) => Err("without a completion".into()),
            Said::Text(text) => Ok(Example::Text(text)),
        }
    }
}

/// Reads a prompt; of a conversation, all turns before the assistant's last. The ground truth goes
/// to `metadata["answer"]` as text, as does the reference completion if there is no other; tools go
/// to `metadata["tools"]`. A field `answer` that is no text is in `metadata["answer_of_record"]`, too.
impl Shape for Prompt {
    fn read(record: Metadata, columns: &Columns) -> Result<Self, String> {
        let named = [&columns.completion, &columns.answer].into_iter().flatten().map(String::as_str);
        let own = named.chain(COMPLETION).chain(ANSWER).filter_map(|name| record.get_key_value(name));
        let own: Vec<_> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
        let Found { said, tools, answer, rest: mut metadata } = recognise(record, columns)?;
        metadata.extend(own);
        let mut answer = answer.map(text_of);
        let text = match said {
            Said::Turns(mut turns) => {
                let before = turns.iter().rposition(|turn| turn.role != "assistant").map_or(0, |last| last + 1);
                answer = answer.or_else(|| turns.split_off(before).pop().map(|turn| turn.content));
                turns.truncate(before);
                PromptText::Chat(turns)
            }
            Said::Asked(text, completion) => {
                answer = answer.or_else(|| completion.map(last_turn));
                text
            }
            Said::Text(text) => PromptText::Text(text),
        };
        if matches!(&text, PromptText::Chat(turns) if turns.is_empty()) {
            return Err("without a question".into());
        }
        metadata.extend(Some(tools).filter(|tools| !tools.is_empty()).map(|tools| ("tools".to_owned(), tools.into())));
        if let Some(answer) = answer {
            let own = metadata.insert("answer".to_owned(), answer.into());
            let is_answer = columns.answer.as_deref().is_none_or(|name| name == "answer");
            let own = own.filter(|own| is_answer && !own.is_string() && !own.is_null());
            metadata.extend(own.map(|own| (ANSWER_OF_RECORD.to_owned(), own)));
        }
        Ok(Prompt { text, metadata, ..Prompt::default() })
    }
}

/// Reads `chosen` and `rejected`, or the fields that the columns name, with the prompt. Each is a
/// text, or messages of which the last is the completion. Without a prompt, the common beginning of
/// both is the prompt, as in TRL. A `margin` is a number.
impl Shape for RankedPair {
    fn read(mut record: Metadata, columns: &Columns) -> Result<Self, String> {
        let (explicit, tools) = (prompt(&mut record, columns)?, tools(&mut record)?);
        let alone = |completion| turns::text_alone(turns::completion(completion)?);
        let mut take = |named: &Option<String>, usual: &str| {
            let name = named.as_deref().unwrap_or(usual);
            take(&mut record, name).ok_or_else(|| format!("without `{name}`"))
        };
        let (chosen, rejected) = (take(&columns.chosen, "chosen")?, take(&columns.rejected, "rejected")?);
        let margin = match record.get("margin") {
            None | Some(Value::Null) => None,
            Some(margin) => Some(margin.as_f64().ok_or("whose `margin` is no number")?),
        };
        let pair = match explicit {
            Some(prompt) => RankedPair { prompt, chosen: alone(chosen)?, rejected: alone(rejected)?, margin, tools },
            None => match shared_prompt(chosen, rejected)? {
                RankedPair { prompt: PromptText::Chat(turns), chosen, rejected, .. } => {
                    let prompt = turns::with_system(turns, &mut record).into();
                    RankedPair { prompt, chosen, rejected, margin, tools }
                }
                texts => RankedPair { margin, tools, ..texts },
            },
        };
        if pair.chosen == pair.rejected { Err("whose answers are the same".into()) } else { Ok(pair) }
    }
}

/// Splits two texts or conversations into their common beginning, the prompt, and the completions,
/// which keep a leading space.
fn shared_prompt(chosen: Value, rejected: Value) -> Result<RankedPair, String> {
    match (chosen, rejected) {
        (Value::String(chosen), Value::String(rejected)) => {
            let shared = chosen.char_indices().zip(rejected.chars()).find(|((_, one), other)| one != other);
            let at = shared.map_or(chosen.len().min(rejected.len()), |((at, _), _)| at);
            let prompt = chosen[..at].strip_suffix(' ').unwrap_or(&chosen[..at]);
            if prompt.trim().is_empty() {
                return Err("without a prompt".into());
            }
            let (chosen, rejected) = (chosen[prompt.len()..].to_owned(), rejected[prompt.len()..].to_owned());
            Ok(RankedPair { prompt: PromptText::Text(prompt.to_owned()), chosen, rejected, ..RankedPair::default() })
        }
        (chosen @ Value::Array(_), rejected @ Value::Array(_)) => {
            let (mut chosen, mut rejected) = (turns::read(chosen)?, turns::read(rejected)?);
            let shared = chosen.iter().zip(&rejected).take_while(|(one, other)| one == other).count();
            let (chosen_end, rejected_end) = (chosen.split_off(shared), rejected.split_off(shared));
            match (&chosen_end[..], &rejected_end[..]) {
                _ if chosen.is_empty() => Err("without a prompt".into()),
                ([one], [other]) if one.role == "assistant" && other.role == "assistant" => Ok(RankedPair {
                    prompt: PromptText::Chat(chosen),
                    chosen: turns::text_alone(chosen_end)?,
                    rejected: turns::text_alone(rejected_end)?,
                    ..RankedPair::default()
                }),
                _ => Err("whose conversations differ in more than the assistant's last turn".into()),
            }
        }
        _ => Err("whose completions are neither two texts nor two conversations".into()),
    }
}
