//! A recipe's document: TOML in which every key and value has its place, with `--set key=value`
//! applied.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{Place, Problem, RecipeError};
use super::keys::Keys;
use super::renames::{Renames, warn};
use super::section::{Section, join};
use rollflow_util::{reading, secrets::masked};

/// A value and where it was written.
#[derive(Clone, Debug)]
pub struct Node {
    /// Value.
    pub value: Value,
    /// Place of the value.
    pub place: Place,
}

/// A key's value and where the key itself was written.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Place of the key.
    pub key_place: Place,
    /// Value and its place.
    pub node: Node,
}

/// Keys and values.
pub type Table = BTreeMap<String, Entry>;

/// A TOML value.
#[derive(Clone, Debug)]
pub enum Value {
    /// A string.
    Text(String),
    /// A whole number.
    Integer(i128),
    /// A number; infinite if it is a whole number that 128 bits cannot hold.
    Float(f64),
    /// A truth value.
    Flag(bool),
    /// A date or a time, as it was written.
    Date(String),
    /// An array.
    List(Vec<Node>),
    /// A table.
    Table(Table),
}

impl Value {
    /// For messages: what stands there.
    pub fn describe(&self) -> String {
        match self {
            Value::Text(text) => format!("the text {:?}", masked(text)),
            Value::Integer(number) => format!("the whole number {number}"),
            Value::Float(number) => format!("the number {number:?}"),
            Value::Flag(flag) => format!("{flag}"),
            Value::Date(date) => format!("the date {date}"),
            Value::List(_) => "a list".to_owned(),
            Value::Table(_) => "a table".to_owned(),
        }
    }
}

/// Prefix of environment variables that override keys.
pub const VARIABLES: &str = "ROLLFLOW__";

/// Keys of the same section that a dotted key displaces where it is laid over them, by an including recipe
/// over an included one, a variable over files, or `--set` over both.
pub type Displaced = fn(&str) -> &'static [&'static str];

/// How layers of a document become one.
struct Layers<'a> {
    renames: &'a Renames,
    /// Keys of the whole document.
    keys: fn() -> Keys,
    displaced: Displaced,
}

/// Parses a recipe of the keys `S` with its includes and applies the `--set` arguments, all under current
/// names. Reports every syntax error.
pub fn parse<S: Section>(
    file: &str,
    text: &str,
    sets: &[String],
    renames: &Renames,
    displaced: Displaced,
) -> Result<Node, Vec<RecipeError>> {
    let (mut errors, layers) = (Vec::new(), Layers { renames, keys: S::keys, displaced });
    let mut root = document(file, text, &layers, &mut vec![canonical(Path::new(file))], &mut errors);
    for argument in sets {
        set(&mut root, argument, &layers, &mut errors);
    }
    if errors.is_empty() { Ok(root) } else { Err(errors) }
}

/// Path without symbolic links, `.` and `..`, or `path` itself if there is no such file.
fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Parses one file over the files that it includes. `open`: canonical paths of the files being read, each
/// included by the previous one.
fn document(file: &str, text: &str, layers: &Layers, open: &mut Vec<PathBuf>, errors: &mut Vec<RecipeError>) -> Node {
    let place_at = |offset: usize| {
        let before = &text[..text.floor_char_boundary(offset)];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let (line, column) = (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1);
        Place::File { file: file.to_owned(), line, column }
    };
    let (document, syntax) = DeTable::parse_recoverable(text);
    errors.extend(syntax.iter().map(|error| syntax_error(place_at(error.span().map_or(0, |span| span.start)), error.message())));
    let mut keys = table(document.get_ref(), &place_at);
    layers.renames.apply_to_table("", &mut keys, errors);
    let included = keys.remove("include");
    let root = Node { place: place_at(0), value: Value::Table(keys) };
    match included {
        None => root,
        Some(entry) => {
            let (bases, keys) = (bases(file, &entry.node, layers, open, errors), (layers.keys)());
            bases.into_iter().rev().fold(root, |node, base| over(node, base, "", &keys, layers.displaced))
        }
    }
}

/// The documents that `include` names, in its order.
fn bases(file: &str, include: &Node, layers: &Layers, open: &mut Vec<PathBuf>, errors: &mut Vec<RecipeError>) -> Vec<Node> {
    let items = match &include.value {
        Value::List(items) => items.iter().collect(),
        _ => vec![include],
    };
    let mut found = Vec::new();
    for item in items {
        let mut refuse = |message: String, help: &str| {
            errors.push(Problem::of("include", message, help).at(item.place.clone()));
        };
        let Value::Text(name) = &item.value else {
            refuse(
                format!("`include` is {}", item.value.describe()),
                "name a recipe, as in include = \"base.toml\", or a list of them",
            );
            continue;
        };
        let path = Path::new(file).parent().unwrap_or(Path::new("")).join(name);
        let read = canonical(&path);
        if open.contains(&read) {
            refuse(format!("{} includes itself", path.display()), "remove one of the includes");
            continue;
        }
        match reading::read_text(&path) {
            Err(error) => {
                let help = "what is included is looked for from the folder of the recipe that includes it";
                refuse(format!("cannot read {}, which it includes: {error}", path.display()), help);
            }
            Ok(text) => {
                open.push(read);
                found.push(document(&path.display().to_string(), &text, layers, open, errors));
                open.pop();
            }
        }
    }
    found
}

/// Merges `node` over `base`, which are the section `keys` at `path`: sections key by key, without keys that
/// are displaced, unless their kinds differ; everything else is replaced.
fn over(node: Node, base: Node, path: &str, keys: &Keys, displaced: Displaced) -> Node {
    match (node.value, base.value) {
        (Value::Table(mut table), Value::Table(mut under)) if !other_kind(&table, &under, keys) => {
            under.retain(|key, _| !table.keys().any(|over| displaced(&join(path, over)).contains(&key.as_str())));
            for (key, entry) in under {
                let merged = match table.remove(&key) {
                    None => entry,
                    Some(of) => {
                        let node = over(of.node, entry.node, &join(path, &key), &keys.inside(&key), displaced);
                        Entry { key_place: of.key_place, node }
                    }
                };
                table.insert(key, merged);
            }
            Node { value: Value::Table(table), place: node.place }
        }
        (value, _) => Node { value, place: node.place },
    }
}

fn other_kind(table: &Table, base: &Table, keys: &Keys) -> bool {
    let kind = |table: &Table| match table.get("kind").map(|entry| &entry.node.value) {
        Some(Value::Text(kind)) => Some(kind.clone()),
        Some(_) => None,
        None => keys.implied_kind(|key| table.contains_key(key)).map(str::to_owned),
    };
    matches!((kind(table), kind(base)), (Some(kind), Some(base)) if kind != base)
}

fn syntax_error(place: Place, message: &str) -> RecipeError {
    Problem::of("", format!("not valid TOML: {}", message.trim().replace('\n', ", ")), "").at(place)
}

fn table(source: &DeTable<'_>, place_at: &dyn Fn(usize) -> Place) -> Table {
    let entry = |(key, value): (&Spanned<_>, _)| Entry { key_place: place_at(key.span().start), node: node(value, place_at) };
    source.iter().map(|(key, value)| (key.get_ref().to_string(), entry((key, value)))).collect()
}

fn node(source: &Spanned<DeValue<'_>>, place_at: &dyn Fn(usize) -> Place) -> Node {
    let value = match source.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        // No recipe needs a number that 128 bits can't hold; as a float it meets the same range checks.
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Float(f64::INFINITY),
        },
        DeValue::Float(number) => Value::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Datetime(date) => Value::Date(date.to_string()),
        DeValue::Array(items) => Value::List(items.iter().map(|item| node(item, place_at)).collect()),
        DeValue::Table(entries) => Value::Table(table(entries, place_at)),
    };
    Node { value, place: place_at(source.span().start) }
}

/// Applies `section.key=value` to the document, or `ROLLFLOW__SECTION__KEY=value` of the
/// environment.
fn set(root: &mut Node, argument: &str, layers: &Layers, errors: &mut Vec<RecipeError>) {
    let variable = argument.strip_prefix(VARIABLES).and_then(|rest| rest.split_once('='));
    let place = match variable {
        Some((name, _)) => Place::Variable(format!("{VARIABLES}{name}")),
        None => Place::Set(masked(argument)),
    };
    let renamed = variable.map(|(name, value)| format!("{}={value}", name.to_lowercase().replace("__", ".")));
    let argument = renamed.as_deref().unwrap_or(argument);
    let mut refuse = |key: &str, message: String, help: &str| {
        errors.push(Problem::of(key, message, help).at(place.clone()));
    };
    let form = "write --set section.key=value, for example --set train.lr=1e-4";
    let Some((path, text)) = argument.split_once('=') else {
        return refuse("", "there is no `=`".to_owned(), form);
    };
    let given = path.trim();
    if given.split('.').any(str::is_empty) {
        return refuse("", format!("`{given}` is not a key"), form);
    }
    let path = layers.renames.path(given);
    if path != given {
        warn(&place.to_string(), given, &path);
    }
    let mut value = match override_value(text.trim(), &place) {
        Ok(value) => value,
        Err(message) => return refuse(&path, message, "quote texts that are not a single word"),
    };
    layers.renames.apply(&path, &mut value, errors);
    let keys: Vec<&str> = path.split('.').collect();
    let mut node = root;
    for (depth, key) in keys.iter().enumerate() {
        let Value::Table(table) = &mut node.value else {
            let message = format!("`{}` is not a section", keys[..depth].join("."));
            return errors.push(Problem::of(&*path, message, form).at(place));
        };
        if depth + 1 == keys.len() {
            // Two arguments that contradict each other are left to be reported.
            let alike = |other: &Place| std::mem::discriminant(other) == std::mem::discriminant(&place);
            let displaced = (layers.displaced)(&path);
            table.retain(|key, entry| !displaced.contains(&key.as_str()) || alike(&entry.key_place));
            table.insert((*key).to_owned(), Entry { key_place: place, node: value });
            return;
        }
        let empty = || Node { value: Value::Table(Table::new()), place: place.clone() };
        let entry = table.entry((*key).to_owned()).or_insert_with(|| Entry { key_place: place.clone(), node: empty() });
        node = &mut entry.node;
    }
}

/// The value of an override: TOML, or else bare text, so that a shell user need not quote twice.
fn override_value(text: &str, place: &Place) -> Result<Node, String> {
    match DeValue::parse(text) {
        Ok(value) => Ok(node(&value, &|_| place.clone())),
        Err(error) if text.is_empty() || text.starts_with(['"', '\'', '[', '{']) => {
            Err(format!("not valid TOML: {}", error.message().trim().replace('\n', ", ")))
        }
        Err(_) => Ok(Node { value: Value::Text(text.to_owned()), place: place.clone() }),
    }
}
