//! Numbers that JSON cannot write: `NaN`, `inf` and `-inf` travel as strings of these names, and come back as the numbers they were.
//!
//! A `null` would hide which of them it was, and a non-finite value is the one that somebody will look for (law N4).

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

/// The value as JSON.
pub(crate) fn to_json(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None => Value::String(value.to_string()),
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(f64),
    Name(String),
}

/// A number that may be non-finite, for serde.
#[derive(Clone, Copy)]
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

/// For `#[serde(with)]` on an `Option<f64>`.
pub(crate) mod optional {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Number).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Number>::deserialize(deserializer)?.map(|number| number.0))
    }
}

/// For `#[serde(with)]` on a `Vec<f32>`.
pub(crate) mod list {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        // The shortest decimal that reads back as the same f32, not the long one of its f64.
        serializer.collect_seq(values.iter().map(|value| Number(value.to_string().parse().unwrap_or(f64::NAN))))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        Ok(Vec::<Number>::deserialize(deserializer)?.into_iter().map(|number| number.0 as f32).collect())
    }
}

/// For `#[serde(with)]` on an `Option<Vec<f32>>`.
pub(crate) mod optional_list {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(values: &Option<Vec<f32>>, serializer: S) -> Result<S::Ok, S::Error> {
        match values {
            Some(values) => list::serialize(values, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<f32>>, D::Error> {
        Ok(Option::<Vec<Number>>::deserialize(deserializer)?.map(|list| list.into_iter().map(|number| number.0 as f32).collect()))
    }
}
