//! Typed reading of a JSON object whose errors name the file and the key.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::ModelError;
use crate::util::reading;

/// Reads a JSON object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    let text = reading::read_text(path).map_err(ModelError::io(path))?;
    serde_json::from_str(&text).map_err(|error| ModelError::malformed(path, format!("not a JSON object: {error}")))
}

/// An object, where it came from, and what it is needed for.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub path: &'a Path,
    pub map: &'a Map<String, Value>,
    pub family: &'static str,
}

impl Keys<'_> {
    /// The value, or `None` where the key is absent or null.
    pub fn optional<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<Option<T>, ModelError> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone()).map(Some).map_err(|_| self.bad(key, expected)),
        }
    }

    /// A number above 0, or `None` where the key is absent or null.
    pub fn positive<T: DeserializeOwned + Default + PartialOrd>(
        &self,
        key: &str,
        expected: &str,
    ) -> Result<Option<T>, ModelError> {
        match self.optional::<T>(key, expected)? {
            Some(value) if value <= T::default() => Err(self.bad(key, expected)),
            value => Ok(value),
        }
    }

    /// The value of a key that has to be there.
    pub fn required<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<T, ModelError> {
        self.optional(key, expected)?.ok_or_else(|| self.missing(key))
    }

    /// The value of a switch.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.optional(key, "true or false")
    }

    /// A size from 1 to `most`, so that no product of sizes overflows.
    pub fn size(&self, key: &str, most: usize) -> Result<usize, ModelError> {
        let expected = || format!("a whole number from 1 to {most}");
        match self.required(key, &expected())? {
            size if (1..=most).contains(&size) => Ok(size),
            _ => Err(self.bad(key, &expected())),
        }
    }

    /// One id, a list of ids, or none.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let expected = "a token id, a list of them, or null";
        match self.map.get(key) {
            Some(Value::Array(_)) => Ok(self.optional(key, expected)?.unwrap_or_default()),
            _ => Ok(self.optional::<u32>(key, expected)?.into_iter().collect()),
        }
    }

    pub fn missing(&self, key: &str) -> ModelError {
        ModelError::malformed(self.path, format!("key `{key}` is missing; a {} model needs it", self.family))
    }

    pub fn bad(&self, key: &str, expected: &str) -> ModelError {
        ModelError::bad_key(self.path, key, self.found(key), expected)
    }

    /// A value that transformers understands and this library does not.
    pub fn unsupported(&self, key: &str, supported: &str) -> ModelError {
        let found = self.found(key);
        ModelError::malformed(self.path, format!("`{key}` = {found} is not supported; supported: {supported}"))
    }

    fn found(&self, key: &str) -> String {
        self.map.get(key).map_or_else(|| "absent".into(), Value::to_string)
    }
}
