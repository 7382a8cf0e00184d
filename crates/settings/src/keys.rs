//! Keys of a section as data, from its declaration. The reference, the old names and the JSON schema
//! follow from it.

use serde_json::{Map, Value, json};

use super::renames::Renames;
use super::section::{ImpliedKind, join};
use super::setting::{Setting, Written};

/// Keys of a section, and those that a `kind` brings along.
#[derive(Default)]
pub struct Keys {
    /// Help of the section.
    doc: &'static [&'static str],
    all: Vec<Key>,
    kinds: Vec<Kind>,
}

/// A key, with what its type says on demand: every parse lists the keys.
struct Key {
    name: &'static str,
    /// Old name, still accepted with a warning.
    formerly: Option<&'static str>,
    /// Range, as text.
    limit: Option<&'static str>,
    default: Option<String>,
    doc: &'static [&'static str],
    expects: fn() -> String,
    schema: fn() -> Value,
    /// Keys of a section, with `[]` for sections of a list.
    inside: fn() -> Option<(String, Keys)>,
}

struct Kind {
    implied: ImpliedKind,
    doc: &'static [&'static str],
    keys: Keys,
}

/// A key in the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyDoc {
    /// Key, dotted from the top.
    pub path: String,
    /// Type and range, as text.
    pub expects: String,
    /// Default in TOML, `none` or `required`.
    pub default: String,
    /// Old name, still accepted with a warning.
    pub formerly: Option<&'static str>,
    /// Help.
    pub doc: String,
}

impl Keys {
    /// No keys yet, with the help of their section.
    pub fn of(doc: &'static [&'static str]) -> Self {
        Keys { doc, ..Keys::default() }
    }

    /// Adds a key.
    pub fn add<T: Setting>(
        &mut self,
        name: &'static str,
        default: &T,
        limit: &[&'static str],
        formerly: &[&'static str],
        doc: &'static [&'static str],
    ) {
        let default = match default.write() {
            Written::Inline(default) => Some(default),
            _ => None,
        };
        let (limit, formerly) = (limit.first().copied(), formerly.first().copied());
        let (expects, schema, inside) = (T::expects, T::schema, T::inside);
        self.all.push(Key { name, formerly, limit, default, doc, expects, schema, inside });
    }

    /// Adds a kind and its keys.
    pub fn kind(&mut self, implied: ImpliedKind, doc: &'static [&'static str], keys: Keys) {
        self.kinds.push(Kind { implied, doc, keys });
    }

    /// Adds another section's keys.
    pub fn join(&mut self, other: Keys) {
        self.all.extend(other.all);
        self.kinds.extend(other.kinds);
    }

    /// The kind that a key of a table implies. `has`: whether the table has a key.
    pub(crate) fn implied_kind(&self, has: impl Fn(&str) -> bool) -> Option<&'static str> {
        let implied = self.kinds.iter().map(|of| of.implied).find(|(_, by)| by.iter().any(|key| has(key)));
        implied.map(|(word, _)| word)
    }

    /// Keys of the section `name` in this one; no keys if there is no such section.
    pub(crate) fn inside(&self, name: &str) -> Keys {
        let mut all = self.all.iter().chain(self.kinds.iter().flat_map(|of| &of.keys.all));
        all.find(|key| key.name == name).and_then(|key| (key.inside)()).map_or_else(Keys::default, |(_, keys)| keys)
    }

    /// Help of the section `name` in this one; without one, help of this section.
    pub fn doc_of(&self, name: &str) -> &'static [&'static str] {
        let of = self.all.iter().find(|key| key.name == name);
        of.and_then(|key| (key.inside)()).map_or(self.doc, |(_, keys)| keys.doc)
    }

    /// Adds a row for each key of the section at `path`. A section has a row of its own only if it was
    /// renamed.
    pub fn rows(&self, path: &str, rows: &mut Vec<KeyDoc>) {
        if !self.kinds.is_empty() {
            let mut doc: Vec<String> =
                self.kinds.iter().map(|of| format!("`\"{}\"`: {}", of.implied.0, sentence(of.doc))).collect();
            for (word, by) in self.kinds.iter().map(|of| of.implied).filter(|(_, by)| !by.is_empty()) {
                let keys: Vec<String> = by.iter().map(|key| format!("`{key}`")).collect();
                doc.push(format!("Left out where {} implies `\"{word}\"`.", keys.join(" or ")));
            }
            let (expects, default) = ("a word".to_owned(), "required".to_owned());
            rows.push(KeyDoc { path: join(path, "kind"), expects, default, formerly: None, doc: doc.join(" ") });
        }
        for Kind { implied: (word, _), keys, .. } in &self.kinds {
            let own = rows.len();
            keys.rows(path, rows);
            rows[own..].iter_mut().for_each(|key| key.doc = format!("With `kind = \"{word}\"`: {}", key.doc));
        }
        for key in &self.all {
            let (path, before) = (join(path, key.name), rows.len());
            if let Some((list, keys)) = (key.inside)() {
                keys.rows(&format!("{path}{list}"), rows);
            }
            if rows.len() == before || key.formerly.is_some() {
                let default = match key.default.as_deref() {
                    None => "none",
                    Some("\"\"") => "required",
                    Some(default) => default,
                };
                let limit = key.limit.map_or(String::new(), |limit| format!(", {limit}"));
                let (expects, formerly, doc) = ((key.expects)() + &limit, key.formerly, sentence(key.doc));
                rows.insert(before, KeyDoc { path, expects, default: default.to_owned(), formerly, doc });
            }
        }
    }

    /// Collects the old names of the keys of the section at `path`.
    pub(crate) fn renames(&self, path: &str, renames: &mut Renames) {
        for key in &self.all {
            if let Some(old) = key.formerly {
                renames.add(path, old, key.name);
            }
            if let Some((list, keys)) = (key.inside)() {
                keys.renames(&(join(path, key.name) + &list), renames);
            }
        }
        self.kinds.iter().for_each(|kind| kind.keys.renames(path, renames));
    }

    /// The section as JSON schema.
    pub fn schema(&self) -> Value {
        let of = |keys: &Map<String, Value>| json!({"type": "object", "properties": keys, "additionalProperties": false});
        if self.kinds.is_empty() {
            return of(&self.properties());
        }
        let kinds = self.kinds.iter().map(|Kind { implied: (word, by), doc, keys: own }| {
            let mut keys = Map::from_iter([("kind".to_owned(), json!({"const": word, "description": sentence(doc)}))]);
            keys.extend(own.properties());
            keys.extend(self.properties());
            let mut of = of(&keys);
            match by {
                [] => of["required"] = json!(["kind"]),
                keys => of["anyOf"] = ["kind"].iter().chain(keys.iter()).map(|key| json!({"required": [key]})).collect(),
            }
            of
        });
        json!({"oneOf": kinds.collect::<Vec<_>>()})
    }

    /// Schemas of the keys, and of their old names as deprecated.
    fn properties(&self) -> Map<String, Value> {
        let mut keys = Map::new();
        for key in &self.all {
            if let Some(old) = key.formerly {
                let mut deprecated = (key.schema)();
                deprecated["deprecated"] = true.into();
                deprecated["description"] = format!("Old name of `{}`.", key.name).into();
                keys.insert(old.to_owned(), deprecated);
            }
            let mut schema = (key.schema)();
            let limit = key.limit.map_or(String::new(), |limit| format!(" Takes {limit}."));
            schema["description"] = (sentence(key.doc) + &limit).into();
            if let Some(default) = key.default.as_deref().filter(|text| *text != "\"\"").and_then(json_of) {
                schema["default"] = default;
            }
            keys.insert(key.name.to_owned(), schema);
        }
        keys
    }
}

/// A value of TOML, where JSON has it.
fn json_of(text: &str) -> Option<Value> {
    let table: toml::Table = format!("value = {text}").parse().ok()?;
    serde_json::to_value(table.get("value")?).ok().filter(|value| !value.is_null())
}

/// Doc lines as one line.
pub fn sentence(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}
