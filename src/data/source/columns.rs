//! Names of a record's fields, for data sets whose names are unusual.

use serde_json::{Map, Value};

use super::Skip;
use crate::settings::declare::section;

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
