//! Free-form parameters of a registered part, read as the type of the part's author.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error, Visitor};
use toml::{Table, Value as Toml};

use super::declare::section;
use super::document::{Node, Value};
use super::section::{Findings, nearest};
use super::setting::{GIVEN, Setting, Written};

section! {
    /// A part of the user's own, by the name that it was registered under.
    pub struct Custom {
        /// The name that it was registered under.
        name: String = String::new(), GIVEN;
        /// Parameters of the part.
        params: Params = Params::default();
    }
}

/// Names and values that only their reader knows.
///
/// ```
/// use rollflow_settings::Params;
///
/// #[derive(serde::Deserialize)]
/// #[serde(default)]
/// struct Settings {
///     beta: f64,
/// }
/// impl Default for Settings {
///     fn default() -> Self {
///         Settings { beta: 0.1 }
///     }
/// }
///
/// assert_eq!(Params::parse("beta = 0.5").unwrap().read::<Settings>().unwrap().beta, 0.5);
/// let slip = Params::default().with("betta", 0.5).read::<Settings>().err().unwrap();
/// assert_eq!(slip.to_string(), "unknown parameter `betta`; did you mean `beta`? known here: beta");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct Params(Table);

/// Parameters that are not what their reader asks for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParamsError(String);

impl Params {
    /// From TOML: `name = value`, a line each.
    pub fn parse(text: &str) -> Result<Self, ParamsError> {
        text.parse().map(Params).map_err(|error: toml::de::Error| ParamsError(error.message().to_owned()))
    }

    /// One more.
    pub fn with(mut self, name: &str, value: impl Into<Toml>) -> Self {
        self.0.insert(name.to_owned(), value.into());
        self
    }

    /// Reads them as `P`. A name that the struct lacks is an error, with or without
    /// `deny_unknown_fields`.
    pub fn read<P: DeserializeOwned>(&self) -> Result<P, ParamsError> {
        if let Err(Fields(Some(known))) = P::deserialize(Asked)
            && let Some(name) = self.0.keys().find(|name| !known.contains(&name.as_str()))
        {
            let listed = match known {
                [] => "it takes none".to_owned(),
                known => format!("known here: {}", known.join(", ")),
            };
            let help = nearest(name, known).map_or(listed.clone(), |meant| format!("did you mean `{meant}`? {listed}"));
            return Err(ParamsError(format!("unknown parameter `{name}`; {help}")));
        }
        Toml::Table(self.0.clone()).try_into().map_err(|error: toml::de::Error| {
            let text = error.to_string();
            ParamsError(text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(", "))
        })
    }
}

/// Converts a node to TOML, without its places. Numbers that TOML cannot hold become the nearest
/// that it can.
fn toml(node: &Node) -> Toml {
    match &node.value {
        Value::Text(text) => Toml::String(text.clone()),
        Value::Integer(number) => i64::try_from(*number).map_or(Toml::Float(*number as f64), Toml::Integer),
        Value::Float(number) => Toml::Float(*number),
        Value::Flag(flag) => Toml::Boolean(*flag),
        Value::Date(date) => date.parse().map_or_else(|_| Toml::String(date.clone()), Toml::Datetime),
        Value::List(items) => Toml::Array(items.iter().map(toml).collect()),
        Value::Table(table) => Toml::Table(table.iter().map(|(name, entry)| (name.clone(), toml(&entry.node))).collect()),
    }
}

impl Setting for Params {
    fn expects() -> String {
        "a table of whatever it asks for".to_owned()
    }

    fn schema() -> serde_json::Value {
        serde_json::json!({"type": "object"})
    }

    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
        match toml(node) {
            Toml::Table(table) => Some(Params(table)),
            _ => {
                let help = "write them as a table: { name = value }".to_owned();
                findings.error(&node.place, path, format!("`{path}` is {}", node.value.describe()), help);
                None
            }
        }
    }

    fn write(&self) -> Written {
        if self.0.is_empty() { Written::Absent } else { Written::Inline(Toml::Table(self.0.clone()).to_string()) }
    }
}

/// Asks a type for the names of its fields by offering it nothing.
struct Asked;

/// The answer; `None` from a type that is no struct.
#[derive(Debug, thiserror::Error)]
#[error("asked for its fields only")]
struct Fields(Option<&'static [&'static str]>);

impl Error for Fields {
    fn custom<T: fmt::Display>(_message: T) -> Self {
        Fields(None)
    }
}

impl<'de> Deserializer<'de> for Asked {
    type Error = Fields;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Fields> {
        Err(Fields(None))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Fields> {
        Err(Fields(Some(fields)))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}
