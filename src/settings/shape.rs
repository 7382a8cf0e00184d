//! The JSON schema of a section, from its declaration.

use serde_json::{Map, Value, json};

use super::section::sentence;
use super::setting::{Setting, Written};

/// Keys of a section, and those that a `kind` brings along.
#[derive(Default)]
pub(crate) struct Shape {
    keys: Map<String, Value>,
    kinds: Vec<Kind>,
}

struct Kind {
    word: &'static str,
    implied_by: &'static [&'static str],
    doc: String,
    shape: Shape,
}

impl Shape {
    /// Adds a key, and its old name as deprecated.
    pub(crate) fn key<T: Setting>(&mut self, name: &str, default: &T, limit: &[&str], formerly: &[&str], doc: &[&str]) {
        let mut schema = T::schema();
        if let Some(schema) = schema.as_object_mut() {
            let limit: String = limit.iter().map(|limit| format!(" Takes {limit}.")).collect();
            schema.insert("description".to_owned(), (sentence(doc) + &limit).into());
            if let Some(default) = written(default) {
                schema.insert("default".to_owned(), default);
            }
        }
        for old in formerly {
            let mut deprecated = T::schema();
            deprecated["deprecated"] = true.into();
            deprecated["description"] = format!("Old name of `{name}`.").into();
            self.keys.insert((*old).to_owned(), deprecated);
        }
        self.keys.insert(name.to_owned(), schema);
    }

    /// One more kind.
    pub(crate) fn kind(&mut self, word: &'static str, implied_by: &'static [&'static str], doc: String, shape: Shape) {
        self.kinds.push(Kind { word, implied_by, doc, shape });
    }

    /// Adds a key with a schema of the caller's.
    pub(crate) fn extend(&mut self, name: &str, schema: Value) {
        self.keys.insert(name.to_owned(), schema);
    }

    /// Adds another section's keys.
    pub(crate) fn join(&mut self, other: Shape) {
        self.keys.extend(other.keys);
        self.kinds.extend(other.kinds);
    }

    /// The section as JSON schema.
    pub(crate) fn schema(&self) -> Value {
        let of = |keys: &Map<String, Value>| json!({"type": "object", "properties": keys, "additionalProperties": false});
        if self.kinds.is_empty() {
            return of(&self.keys);
        }
        let kinds = self.kinds.iter().map(|Kind { word, implied_by, doc, shape }| {
            let mut keys = Map::from_iter([("kind".to_owned(), json!({"const": word, "description": doc}))]);
            keys.extend(shape.keys.clone());
            keys.extend(self.keys.clone());
            let mut of = of(&keys);
            match implied_by {
                [] => of["required"] = json!(["kind"]),
                keys => {
                    let ways = ["kind"].iter().chain(keys.iter()).map(|key| json!({"required": [key]}));
                    of["anyOf"] = ways.collect();
                }
            }
            of
        });
        json!({"oneOf": kinds.collect::<Vec<_>>()})
    }
}

/// A default, where JSON has it.
fn written<T: Setting>(value: &T) -> Option<Value> {
    match value.write() {
        Written::Inline(text) if text != "\"\"" => {
            let table: toml::Table = format!("value = {text}").parse().ok()?;
            let value = serde_json::to_value(table.get("value")?).ok()?;
            Some(value).filter(|value| !value.is_null())
        }
        _ => None,
    }
}
