//! Reading, writing and description of one value: the types that keys of a recipe may have.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde_json::{Value as Json, json};

use super::document::{Node, Value};
use super::error::Problem;
use super::keys::Keys;
use super::section::Findings;

/// A type that a key may have.
pub trait Setting: Sized {
    /// For messages and the reference: what may be written.
    fn expects() -> String;

    /// The value, or `None` after noting what is wrong with it.
    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self>;

    /// Converts the value to TOML.
    fn write(&self) -> Written;

    /// JSON schema of the type; by default any value.
    fn schema() -> Json {
        json!({})
    }

    /// Notes every value inside that is out of its range.
    fn check(&self, _path: &str, _problems: &mut Vec<Problem>) {}

    /// Returns the keys inside a section, with `[]` for sections of a list.
    fn inside() -> Option<(String, Keys)> {
        None
    }
}

/// A value in TOML.
#[derive(Clone, Debug, PartialEq)]
pub enum Written {
    /// Nothing: the key is left out.
    Absent,
    /// After the `=`.
    Inline(String),
    /// Keys and values, in the order of the schema.
    Table(Vec<(String, Written)>),
    /// One table after another.
    Tables(Vec<Vec<(String, Written)>>),
}

/// Range of a type's values.
pub struct Limit<T: 'static> {
    /// For messages and the reference: `at least 1`.
    pub text: &'static str,
    /// Returns true for a value in the range.
    pub holds: fn(&T) -> bool,
}

/// A count of at least 1.
pub const SOME: Limit<usize> = Limit { text: "at least 1", holds: |value| *value >= 1 };
/// A count of steps of at least 1.
pub const SOME_STEPS: Limit<u64> = Limit { text: "at least 1", holds: |value| *value >= 1 };
/// An optional count of at least 1.
pub const SOME_IF_GIVEN: Limit<Option<usize>> = Limit { text: "at least 1", holds: |value| value.is_none_or(|n| n >= 1) };
/// A finite number above 0.
pub const POSITIVE: Limit<f64> = Limit { text: "above 0 and finite", holds: |value| *value > 0.0 && value.is_finite() };
/// An optional finite number above 0.
pub const POSITIVE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0 and finite", holds: |value| value.is_none_or(|number| number > 0.0 && number.is_finite()) };
/// A finite number of 0 or more.
pub const NOT_NEGATIVE: Limit<f64> = Limit { text: "0 or more and finite", holds: |value| *value >= 0.0 && value.is_finite() };
/// A finite number of 1 or more.
pub const FROM_ONE: Limit<f64> = Limit { text: "1 or more and finite", holds: |value| *value >= 1.0 && value.is_finite() };
/// A finite number.
pub const FINITE: Limit<f64> = Limit { text: "finite", holds: |value| value.is_finite() };
/// An optional finite number.
pub const FINITE_IF_GIVEN: Limit<Option<f64>> = Limit { text: "finite", holds: |value| value.is_none_or(f64::is_finite) };
/// A number from 0 to 1, both included.
pub const UP_TO_ONE: Limit<f64> = Limit { text: "0 to 1", holds: |value| (0.0..=1.0).contains(value) };
/// A number above 0, at most 1.
pub const SHARE: Limit<f64> = Limit { text: "above 0, at most 1", holds: |value| *value > 0.0 && *value <= 1.0 };
/// A number of 0 or more, below 1.
pub const BELOW_ONE: Limit<f64> = Limit { text: "0 or more, below 1", holds: |value| (0.0..1.0).contains(value) };
/// A text that is not empty.
pub const GIVEN: Limit<String> = Limit { text: "not empty", holds: |value| !value.is_empty() };
/// A path that is not empty.
pub const PATH_GIVEN: Limit<PathBuf> = Limit { text: "not empty", holds: |value| !value.as_os_str().is_empty() };

fn mismatch<T: Setting, U>(node: &Node, path: &str, findings: &mut Findings) -> Option<U> {
    let mut help = format!("it takes {}", T::expects());
    // Only a whole number that is out of the type's range comes here as one.
    if matches!(node.value, Value::Integer(_)) && T::expects() == WHOLE {
        let largest = if size_of::<T>() == size_of::<u32>() { i64::from(u32::MAX) } else { i64::MAX };
        help += &format!(" from 0 to {largest}");
    }
    findings.error(&node.place, path, format!("`{path}` is {}", node.value.describe()), help);
    None
}

const WHOLE: &str = "a whole number";

/// Converts a whole number that a TOML file can hold, whose integers are `i64`.
fn whole<T: TryFrom<i64>>(number: i128) -> Option<T> {
    i64::try_from(number).ok()?.try_into().ok()
}

/// `number` in TOML. Debug keeps `1e-8` short and `1.0` a float, and TOML reads both.
fn float(number: f64) -> String {
    if number.is_nan() { "nan".to_owned() } else { format!("{number:?}") }
}

/// `text` as TOML quotes it.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// Implements [`Setting`] for a scalar from its name, the shapes it is read from and its TOML.
macro_rules! scalar {
    ($Type:ty, $expects:expr, $schema:tt, $($shape:pat => $value:expr),+; $write:expr) => {
        impl Setting for $Type {
            fn expects() -> String {
                $expects.to_owned()
            }
            fn schema() -> Json {
                json!($schema)
            }
            fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
                let value: Option<Self> = match &node.value {
                    $($shape => $value,)+
                    _ => None,
                };
                value.or_else(|| mismatch::<Self, Self>(node, path, findings))
            }
            fn write(&self) -> Written {
                let write: fn(&Self) -> String = $write;
                Written::Inline(write(self))
            }
        }
    };
}

scalar!(String, "text", {"type": "string"}, Value::Text(text) => Some(text.clone()); |text| quoted(text));
scalar!(PathBuf, "a path, as text", {"type": "string"}, Value::Text(text) => Some(text.into()); |path| quoted(&path.to_string_lossy()));
scalar!(bool, "true or false", {"type": "boolean"}, Value::Flag(flag) => Some(*flag); bool::to_string);
scalar!(f64, "a number", {"type": "number"}, Value::Float(number) => Some(*number), Value::Integer(number) => Some(*number as f64);
    |number| float(*number));
scalar!(u64, WHOLE, {"type": "integer", "minimum": 0}, Value::Integer(number) => whole(*number); u64::to_string);
scalar!(u32, WHOLE, {"type": "integer", "minimum": 0}, Value::Integer(number) => whole(*number); u32::to_string);
scalar!(usize, WHOLE, {"type": "integer", "minimum": 0}, Value::Integer(number) => whole(*number); usize::to_string);
scalar!(SocketAddr, "an address and a port, such as \"127.0.0.1:9464\"", {"type": "string"}, Value::Text(text) => text.parse().ok();
    |address| quoted(&address.to_string()));

impl Setting for [f64; 2] {
    fn expects() -> String {
        "two numbers, such as [0.9, 0.95]".to_owned()
    }

    fn schema() -> Json {
        json!({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2})
    }

    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
        match &node.value {
            Value::List(items) if items.len() == 2 => Vec::<f64>::read(node, path, findings)?.try_into().ok(),
            _ => mismatch::<Self, Self>(node, path, findings),
        }
    }

    fn write(&self) -> Written {
        let [first, second] = self.map(float);
        Written::Inline(format!("[{first}, {second}]"))
    }
}

impl<T: Setting> Setting for Option<T> {
    fn expects() -> String {
        T::expects()
    }

    fn schema() -> Json {
        T::schema()
    }

    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
        T::read(node, path, findings).map(Some)
    }

    fn write(&self) -> Written {
        self.as_ref().map_or(Written::Absent, T::write)
    }

    fn check(&self, path: &str, problems: &mut Vec<Problem>) {
        if let Some(value) = self {
            value.check(path, problems);
        }
    }

    fn inside() -> Option<(String, Keys)> {
        T::inside()
    }
}

impl<T: Setting> Setting for Vec<T> {
    fn expects() -> String {
        format!("a list, each {}", T::expects())
    }

    fn schema() -> Json {
        json!({"type": "array", "items": T::schema()})
    }

    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
        let Value::List(items) = &node.value else {
            return mismatch::<Self, Self>(node, path, findings);
        };
        let read: Vec<Option<T>> = items
            .iter()
            .enumerate()
            .map(|(at, item)| {
                let path = format!("{path}[{at}]");
                findings.note(&path, &item.place);
                T::read(item, &path, findings)
            })
            .collect();
        read.into_iter().collect()
    }

    fn write(&self) -> Written {
        let mut tables = Vec::new();
        let mut values = Vec::new();
        for item in self {
            match item.write() {
                Written::Table(rows) => tables.push(rows),
                Written::Inline(value) => values.push(value),
                Written::Absent | Written::Tables(_) => {}
            }
        }
        if tables.is_empty() { Written::Inline(format!("[{}]", values.join(", "))) } else { Written::Tables(tables) }
    }

    fn check(&self, path: &str, problems: &mut Vec<Problem>) {
        for (at, item) in self.iter().enumerate() {
            item.check(&format!("{path}[{at}]"), problems);
        }
    }

    fn inside() -> Option<(String, Keys)> {
        T::inside().map(|(list, keys)| (format!("[]{list}"), keys))
    }
}

#[cfg(test)]
mod tests {
    use super::{Setting, Written};

    #[test]
    fn every_float_is_written_as_toml_reads_it() {
        let numbers = [(f64::NAN, "nan"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf"), (1e-8, "1e-8"), (1.0, "1.0")];
        for (number, text) in numbers {
            assert_eq!(number.write(), Written::Inline(text.to_owned()));
            assert!(format!("key = {text}").parse::<toml::Table>().is_ok(), "{text}");
        }
        assert_eq!([0.5, f64::NAN].write(), Written::Inline("[0.5, nan]".to_owned()));
    }
}
