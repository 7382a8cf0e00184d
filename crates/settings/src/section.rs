//! Taking keys from a table by name, with a complaint for everything that is not as declared.

use std::collections::BTreeMap;

use super::document::{Node, Table, Value};
use super::error::{Place, Problem, RecipeError};
use super::keys::Keys;
use super::setting::{Limit, Setting, Written};

/// Errors and places of keys, collected while a document is read.
#[derive(Default)]
pub struct Findings {
    /// Errors so far.
    pub errors: Vec<RecipeError>,
    /// Names the sections of the whole document that have a key of this name, for messages about unknown keys.
    sections_with: Option<fn(&str) -> Vec<String>>,
    /// Names the key that an unknown key at this path is in another library, for the same messages.
    library_name: Option<fn(&str) -> Option<String>>,
    /// Place of each key that was read.
    places: BTreeMap<String, Place>,
}

impl Findings {
    /// Empty, of a document in which messages about unknown keys look up names by these functions: sections
    /// that have a key of a name, and what the key at a path is for another library.
    pub fn of(sections_with: fn(&str) -> Vec<String>, library_name: fn(&str) -> Option<String>) -> Self {
        Findings { sections_with: Some(sections_with), library_name: Some(library_name), ..Findings::default() }
    }

    /// Adds an error of a key at `place`.
    pub fn error(&mut self, place: &Place, key: &str, message: String, help: String) {
        self.errors.push(Problem::of(key, message, help).at(place.clone()));
    }

    /// Notes where a key was written.
    pub fn note(&mut self, key: &str, place: &Place) {
        self.places.insert(key.to_owned(), place.clone());
    }

    /// Returns the place of the first of these keys that was written, else that of the nearest
    /// section around the first.
    pub fn place<'k>(&self, keys: impl IntoIterator<Item = &'k str> + Clone) -> Option<&Place> {
        let around = |key: &'k str| {
            let outwards = std::iter::successors(Some(key), |key| key.rsplit_once(['.', '[']).map(|(around, _)| around));
            outwards.chain([""]).find_map(|key| self.places.get(key))
        };
        keys.clone().into_iter().find_map(|key| self.places.get(key)).or_else(|| keys.into_iter().next().and_then(around))
    }
}

/// Names in other systems for sharding a model over devices, for which the help names `ranks.shard`.
const SHARDING: [&str; 6] = ["fsdp", "shard", "parallel_size", "deepspeed", "zero_stage", "num_gpus"];

/// A group of keys. Implemented by the macros of `declare`.
pub trait Section: Default {
    /// Takes its keys.
    fn take(reader: &mut Reader<'_>) -> Self;
    /// Adds its keys and values, in order.
    fn rows(&self, rows: &mut Vec<(String, Written)>);
    /// Notes values out of range.
    fn check_rows(&self, path: &str, problems: &mut Vec<Problem>);
    /// Returns its keys, as declared.
    fn keys() -> Keys;
}

/// The rest of a kind that has no further keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoKeys;

impl Section for NoKeys {
    fn take(_reader: &mut Reader<'_>) -> Self {
        NoKeys
    }
    fn rows(&self, _rows: &mut Vec<(String, Written)>) {}
    fn check_rows(&self, _path: &str, _problems: &mut Vec<Problem>) {}
    fn keys() -> Keys {
        Keys::default()
    }
}

impl<T: Section> Setting for T {
    fn expects() -> String {
        "a table".to_owned()
    }

    fn schema() -> serde_json::Value {
        T::keys().schema()
    }

    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
        let Value::Table(table) = &node.value else {
            let message = format!("`{path}` is {}", node.value.describe());
            findings.error(&node.place, path, message, format!("it is a section: write [{path}] and its keys below"));
            return None;
        };
        let mut reader = Reader { table, place: &node.place, path, known: Vec::new(), lenient: false, findings };
        let section = T::take(&mut reader);
        reader.finish();
        Some(section)
    }

    fn write(&self) -> Written {
        let mut rows = Vec::new();
        self.rows(&mut rows);
        Written::Table(rows)
    }

    fn check(&self, path: &str, problems: &mut Vec<Problem>) {
        self.check_rows(path, problems);
    }

    fn inside() -> Option<(String, Keys)> {
        Some((String::new(), T::keys()))
    }
}

/// `key` inside `path`.
pub fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// A kind's word, and the keys that imply it where `kind` is left out.
pub type ImpliedKind = (&'static str, &'static [&'static str]);

/// Reads the keys of one table and, at the end, reports unknown ones.
pub struct Reader<'a> {
    table: &'a Table,
    place: &'a Place,
    path: &'a str,
    known: Vec<&'static str>,
    /// Set when it is unknown which keys belong here.
    lenient: bool,
    findings: &'a mut Findings,
}

impl Reader<'_> {
    /// The value of a key; `None` if it is absent or unreadable.
    pub fn key<T: Setting>(&mut self, key: &'static str) -> Option<T> {
        self.known.push(key);
        let entry = self.table.get(key)?;
        let path = join(self.path, key);
        self.findings.note(&path, &entry.node.place);
        T::read(&entry.node, &path, self.findings)
    }

    /// The word that says which keys belong here, or the one that another key implies; `None` after a complaint.
    pub fn tag(&mut self, key: &'static str, kinds: &[ImpliedKind]) -> Option<&'static str> {
        self.known.push(key);
        let path = join(self.path, key);
        let words = &kinds.iter().map(|(word, _)| *word).collect::<Vec<_>>();
        let implied = kinds.iter().find(|(_, by)| by.iter().any(|key| self.table.contains_key(*key)));
        let found = match (self.table.get(key), implied) {
            (Some(entry), _) => {
                self.findings.note(&path, &entry.node.place);
                read_word(&entry.node, &path, words, self.findings)
            }
            (None, Some((word, _))) => Some(*word),
            (None, None) => {
                let message = format!("`{}` needs `{key}`", self.path);
                self.findings.error(self.place, &path, message, format!("`{key}` is one of {}", quoted(words)));
                None
            }
        };
        self.lenient = found.is_none();
        found
    }

    fn finish(self) {
        for (key, entry) in self.table {
            if self.lenient || self.known.contains(&key.as_str()) {
                continue;
            }
            let within = match self.path {
                "" => "at the top".to_owned(),
                item if item.ends_with(']') => format!("in {item}"),
                section => format!("in [{section}]"),
            };
            let known = format!("known keys here: {}", self.known.join(", "));
            let mut elsewhere = self.findings.sections_with.map_or_else(Vec::new, |sections_with| sections_with(key));
            elsewhere.retain(|section| *section != format!("[{}]", self.path));
            let path = join(self.path, key);
            let library_name = self.findings.library_name.and_then(|library_name| library_name(&path));
            let help = match (library_name, nearest(key, &self.known)) {
                _ if SHARDING.iter().any(|word| key.contains(word)) => format!(
                    "several processes divide a model by `ranks.shard`; on each device that `train.replica_devices` and `generate.devices` name it is held whole; {known}"
                ),
                (Some(meaning), _) => meaning,
                (None, Some(name)) => format!("did you mean `{name}`? {known}"),
                (None, None) if !elsewhere.is_empty() => format!("`{key}` is a key of {}; {known}", elsewhere.join(" and ")),
                (None, None) => known,
            };
            self.findings.error(&entry.key_place, &path, format!("unknown key `{key}` {within}"), help);
        }
    }
}

/// One of `words`, or a complaint that lists them.
pub fn read_word(node: &Node, path: &str, words: &[&'static str], findings: &mut Findings) -> Option<&'static str> {
    let text = match &node.value {
        Value::Text(text) => text.as_str(),
        _ => "",
    };
    let found = words.iter().find(|word| **word == text);
    if found.is_none() {
        let exist = format!("it is one of {}", quoted(words));
        let help = match nearest(text, words) {
            Some(word) => format!("did you mean \"{word}\"? {exist}"),
            None => exist,
        };
        findings.error(&node.place, path, format!("`{path}` is {}", node.value.describe()), help);
    }
    found.copied()
}

/// The closest of `names`, if one is close enough to be a slip.
pub fn nearest<'a>(name: &str, names: &[&'a str]) -> Option<&'a str> {
    let near = names.iter().filter(|other| is_near(name, other));
    near.min_by_key(|other| strsim::damerau_levenshtein(name, other)).copied()
}

/// Returns true if `name` may be a slip of `other`, or part of it.
pub fn is_near(name: &str, other: &str) -> bool {
    let distance = strsim::damerau_levenshtein(name, other);
    distance <= 1 + other.len().min(name.len()) / 3 || other.contains(name) && name.len() > 2
}

fn quoted(words: &[&str]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ")
}

/// Notes values out of range: those inside `value`, and `value` if it is beyond `limit`.
pub fn check<T: Setting>(value: &T, path: &str, key: &str, limit: &[&Limit<T>], problems: &mut Vec<Problem>) {
    let key = join(path, key);
    value.check(&key, problems);
    let Some(limit) = limit.iter().find(|limit| !(limit.holds)(value)) else { return };
    problems.push(out_of_range(key, value.write(), limit.text, T::expects));
}

fn out_of_range(key: String, value: Written, limit: &str, expects: fn() -> String) -> Problem {
    let (message, help) = match value {
        Written::Inline(found) if found != "\"\"" => (format!("`{key}` is {found}"), format!("it must be {limit}")),
        _ => (format!("`{key}` is missing or empty"), format!("give it {}", expects())),
    };
    Problem::of(key, message, help)
}
