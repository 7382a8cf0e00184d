//! Numbers in JSON files: `NaN`, `inf` and `-inf` are written as strings of these names, and read
//! back as numbers (law N4).
//!
//! serde_json writes them as `null`, which loses the value and which no `f64` field can read. Every
//! JSON file of a run writes its floating-point fields through this module: `#[serde(with =
//! "number::one")]` and its siblings for fields, [`to_json`] for values.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// Returns the value as JSON: a number, or the string `"NaN"`, `"inf"` or `"-inf"`.
pub fn to_json(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None => Value::String(value.to_string()),
    }
}

/// Returns the number that [`to_json`] wrote; `None` for anything else.
pub fn from_json(value: &Value) -> Option<f64> {
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

/// For `#[serde(with)]` on an `f64`.
pub mod one {
    use super::*;

    /// Writes it.
    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        Number(*value).serialize(serializer)
    }

    /// Reads it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Number::deserialize(deserializer).map(|number| number.0)
    }
}

/// For `#[serde(with)]` on a map from names to `f64`.
pub mod map {
    use std::collections::BTreeMap;

    use super::*;

    /// Writes it.
    pub fn serialize<S: Serializer>(values: &BTreeMap<String, f64>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(values.iter().map(|(name, value)| (name, Number(*value))))
    }

    /// Reads it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
        let values = BTreeMap::<String, Number>::deserialize(deserializer)?;
        Ok(values.into_iter().map(|(name, number)| (name, number.0)).collect())
    }
}

/// For `#[serde(with)]` on a list of `f64`: a `Vec` or a `VecDeque`.
pub mod many {
    use super::*;

    /// Writes it.
    pub fn serialize<'a, S: Serializer, L>(values: &'a L, serializer: S) -> Result<S::Ok, S::Error>
    where
        &'a L: IntoIterator<Item = &'a f64>,
    {
        serializer.collect_seq(values.into_iter().map(|value| Number(*value)))
    }

    /// Reads it.
    pub fn deserialize<'de, D: Deserializer<'de>, L: FromIterator<f64>>(deserializer: D) -> Result<L, D::Error> {
        Ok(Vec::<Number>::deserialize(deserializer)?.into_iter().map(|number| number.0).collect())
    }
}

/// For `#[serde(with)]` on an `Option<f64>`.
pub mod optional {
    use super::*;

    /// Writes it.
    pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Number).serialize(serializer)
    }

    /// Reads it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Number>::deserialize(deserializer)?.map(|number| number.0))
    }
}

/// For `#[serde(with)]` on a `Vec<f32>`.
pub mod list {
    use super::*;

    /// Writes it.
    pub fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        // The shortest decimal that reads back as the same f32, not the long one of its f64.
        serializer.collect_seq(values.iter().map(|value| Number(value.to_string().parse().unwrap_or(f64::NAN))))
    }

    /// Reads it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        Ok(Vec::<Number>::deserialize(deserializer)?.into_iter().map(|number| number.0 as f32).collect())
    }
}

/// For `#[serde(with)]` on an `Option<Vec<f32>>`.
pub mod optional_list {
    use super::*;

    /// Writes it.
    pub fn serialize<S: Serializer>(values: &Option<Vec<f32>>, serializer: S) -> Result<S::Ok, S::Error> {
        match values {
            Some(values) => list::serialize(values, serializer),
            None => serializer.serialize_none(),
        }
    }

    /// Reads it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<f32>>, D::Error> {
        Ok(Option::<Vec<Number>>::deserialize(deserializer)?.map(|list| list.into_iter().map(|number| number.0 as f32).collect()))
    }
}
