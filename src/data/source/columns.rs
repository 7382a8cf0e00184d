//! Names of a record's fields, for data sets whose names are unusual.

use serde_json::{Map, Value};

use super::Skip;

/// Fields by their contents; those left out are recognised by their usual names. A dot leads into
/// an object: `reward_model.ground_truth`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// Prompt: text or a list of messages.
    pub prompt: Option<String>,
    /// Reference completion.
    pub completion: Option<String>,
    /// The ground truth.
    pub answer: Option<String>,
    /// A whole conversation.
    pub messages: Option<String>,
    /// Text without question and answer.
    pub text: Option<String>,
    /// Better one of two completions.
    pub chosen: Option<String>,
    /// Worse one of two completions.
    pub rejected: Option<String>,
}

/// Takes the first of these fields that is there and not null, with its name.
pub(super) fn take_first(record: &mut Map<String, Value>, names: &[&'static str]) -> Option<(&'static str, Value)> {
    names.iter().find_map(|name| Some((*name, take(record, name)?)))
}

/// Takes the field that a column map names, or else the first of `names`.
pub(super) fn take_named(
    record: &mut Map<String, Value>,
    named: &Option<String>,
    names: &[&'static str],
) -> Result<Option<Value>, Skip> {
    match named {
        Some(name) => take(record, name).map(Some).ok_or_else(|| format!("without `{name}`").into()),
        None => Ok(take_first(record, names).map(|(_, value)| value)),
    }
}

/// A field, or what a dotted path leads to; the latter stays where it is.
pub(super) fn take(record: &mut Map<String, Value>, name: &str) -> Option<Value> {
    let some = |value: &Value| !value.is_null();
    if record.get(name).is_some_and(some) {
        // `shift_remove` keeps the order of the fields that stay.
        return record.shift_remove(name);
    }
    let (first, rest) = name.split_once('.')?;
    rest.split('.').try_fold(record.get(first)?, |value, key| value.get(key)).filter(|value| some(value)).cloned()
}
