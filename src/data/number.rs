//! Numbers in JSON files: `NaN`, `inf` and `-inf` are written as strings of these names, and read
//! back as numbers (law N4).
//!
//! serde_json writes them as `null`, which loses the value and which no `f64` field can read. Every
//! JSON file of a run writes its floating-point fields through this module: `#[serde(with =
//! "number")]` for fields, [`to_json`] for values.

use std::collections::BTreeMap;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Returns the value as JSON: a number, or the string `"NaN"`, `"inf"` or `"-inf"`.
pub(crate) fn to_json(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None => Value::String(value.to_string()),
    }
}

/// Returns the number that [`to_json`] wrote; `None` for anything else.
pub(crate) fn from_json(value: &Value) -> Option<f64> {
    Number::deserialize(value).ok().map(|number| number.0)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(f64),
    Name(String),
}

/// A number that may be non-finite, for serde.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Number(pub(crate) f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(&self.0) }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Number(value) => Ok(Number(value)),
            Written::Name(name) => match name.as_str() {
                "NaN" => Ok(Number(f64::NAN)),
                "inf" => Ok(Number(f64::INFINITY)),
                "-inf" => Ok(Number(f64::NEG_INFINITY)),
                _ => Err(D::Error::custom(format!("{name:?} is no number; expected one, or \"NaN\", \"inf\" or \"-inf\""))),
            },
        }
    }
}

/// Writes a field of type `f64` or `f32`, or an option, list or map of them.
pub(crate) fn serialize<T: Numbers, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    value.written().serialize(to)
}

/// Reads such a field.
pub(crate) fn deserialize<'de, T: Numbers, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    T::Written::deserialize(from).map(T::of)
}

/// Types of fields, and their form in files.
pub(crate) trait Numbers {
    type Written: Serialize + DeserializeOwned;
    fn written(&self) -> Self::Written;
    fn of(written: Self::Written) -> Self;
}

impl Numbers for f64 {
    type Written = Number;
    fn written(&self) -> Number {
        Number(*self)
    }
    fn of(written: Number) -> Self {
        written.0
    }
}

impl Numbers for f32 {
    type Written = Number;
    /// The shortest decimal that reads back as the same f32, not the long one of its f64.
    fn written(&self) -> Number {
        Number(self.to_string().parse().unwrap_or(f64::NAN))
    }
    fn of(written: Number) -> Self {
        written.0 as f32
    }
}

impl<N: Numbers> Numbers for Option<N> {
    type Written = Option<N::Written>;
    fn written(&self) -> Self::Written {
        self.as_ref().map(N::written)
    }
    fn of(written: Self::Written) -> Self {
        written.map(N::of)
    }
}

impl<N: Numbers> Numbers for Vec<N> {
    type Written = Vec<N::Written>;
    fn written(&self) -> Self::Written {
        self.iter().map(N::written).collect()
    }
    fn of(written: Self::Written) -> Self {
        written.into_iter().map(N::of).collect()
    }
}

impl<N: Numbers> Numbers for BTreeMap<String, N> {
    type Written = BTreeMap<String, N::Written>;
    fn written(&self) -> Self::Written {
        self.iter().map(|(name, value)| (name.clone(), value.written())).collect()
    }
    fn of(written: Self::Written) -> Self {
        written.into_iter().map(|(name, value)| (name, N::of(value))).collect()
    }
}
