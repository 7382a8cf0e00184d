//! One recorded case: reading it, and comparing numbers within the file's tolerance.

use std::path::Path;

use serde_json::Value;

#[derive(Clone, Debug)]
pub struct Case {
    /// The file's name without extension.
    pub family: String,
    pub name: String,
    pub value: Value,
    tolerance: Value,
}

#[derive(Clone, Debug)]
pub struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

/// Every case of every JSON file that holds cases, in order of file name.
pub fn read_folder(folder: &Path) -> Vec<Case> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|e| e == "json")).collect();
    files.sort();
    files.iter().flat_map(|path| read_file(path)).collect()
}

fn read_file(path: &Path) -> Vec<Case> {
    let text = std::fs::read_to_string(path).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let case = |value: &Value| Case {
        family: path.file_stem().unwrap().to_string_lossy().into_owned(),
        name: value["name"].as_str().unwrap_or("?").to_owned(),
        value: value.clone(),
        tolerance: file["tolerance"].clone(),
    };
    file["cases"].as_array().map_or(Vec::new(), |cases| cases.iter().map(case).collect())
}

impl Case {
    /// What comes before the variant: `kind/variant`, or, where kinds have no variants, the name before its number (`top_k5`).
    pub fn kind(&self) -> &str {
        let kind = self.name.split('/').next().unwrap_or(&self.name);
        match self.family.as_str() {
            "transformers_logits_processors" => {
                kind[..kind.find(|c: char| c.is_ascii_digit()).unwrap_or(kind.len())].trim_end_matches('_')
            }
            _ => kind,
        }
    }

    pub fn input(&self, name: &str) -> Option<Tensor> {
        self.value["inputs"].get(name).filter(|value| !value.is_null()).map(tensor)
    }

    pub fn needed(&self, name: &str) -> Result<Tensor, String> {
        self.input(name).ok_or_else(|| format!("input {name} is missing"))
    }

    /// A count that may be a number or a tensor of one.
    pub fn count(&self, name: &str) -> Option<f64> {
        count(&self.value["inputs"][name])
    }

    pub fn expected(&self, name: &str) -> Result<Tensor, String> {
        self.value["expected"].get(name).map(tensor).ok_or_else(|| format!("expected {name} is missing"))
    }

    /// Fails on the first key of `section` that is not among `known`: a setting we would silently ignore.
    pub fn only(&self, section: &str, known: &[&str]) -> Result<(), String> {
        let keys = self.value[section].as_object().into_iter().flat_map(|section| section.keys());
        match keys.into_iter().find(|key| !known.contains(&key.as_str())) {
            Some(key) => Err(format!("{section} holds {key}, which this runner doesn't know")),
            None => Ok(()),
        }
    }

    pub fn close(&self, what: &str, actual: &[f64], expected: &Tensor) -> Result<(), String> {
        self.close_as(&expected.dtype, what, actual, &expected.data)
    }

    /// A bare JSON number: held to the single-precision tolerance where it or an input is in single precision.
    pub fn close_number(&self, what: &str, actual: f64, expected: f64) -> Result<(), String> {
        let dtype = if self.is_single(expected) { "float32" } else { "float64" };
        self.close_as(dtype, what, &[actual], &[expected])
    }

    /// If true, an expected number was computed in single precision. Counts, which have no shape, say nothing about it.
    pub fn is_single(&self, number: f64) -> bool {
        let column =
            |value: &Value| value["dtype"] == "float32" && value["shape"].as_array().is_some_and(|shape| !shape.is_empty());
        let mut inputs = self.value["inputs"].as_object().into_iter().flatten();
        f64::from(number as f32) == number || inputs.any(|(_, value)| column(value))
    }

    /// A number that was computed in single precision.
    pub fn close_single(&self, what: &str, actual: f64, expected: f64) -> Result<(), String> {
        self.close_as("float32", what, &[actual], &[expected])
    }

    fn close_as(&self, dtype: &str, what: &str, actual: &[f64], expected: &[f64]) -> Result<(), String> {
        if actual.len() != expected.len() {
            return Err(format!("{what} has {} values, {} expected", actual.len(), expected.len()));
        }
        let of = |kind: &str| self.tolerance[dtype][kind].as_f64().unwrap_or(0.0);
        let (rtol, atol) = (of("rtol"), of("atol"));
        for (at, (a, e)) in actual.iter().zip(expected).enumerate() {
            let equal = a == e || (a.is_nan() && e.is_nan()) || (a - e).abs() <= atol + rtol * e.abs();
            if !equal {
                return Err(format!("{what}[{at}] is {a}, expected {e} ({dtype})"));
            }
        }
        Ok(())
    }
}

/// A number, or a tensor of one.
pub fn count(value: &Value) -> Option<f64> {
    match value {
        Value::Null => None,
        Value::Object(_) => tensor(value).data.first().copied(),
        value => Some(number(value)),
    }
}

/// A number of the results; NaN where there is none.
pub fn scalar(value: &Value) -> f64 {
    count(value).unwrap_or(f64::NAN)
}

pub fn tensor(value: &Value) -> Tensor {
    let numbers = value["data"].as_array().expect("a tensor has data").iter();
    let shape = value["shape"].as_array().expect("a tensor has a shape").iter();
    Tensor {
        dtype: value["dtype"].as_str().expect("a tensor has a dtype").to_owned(),
        shape: shape.map(|n| n.as_u64().expect("a size") as usize).collect(),
        data: numbers.map(number).collect(),
    }
}

/// JSON has no word for NaN and infinities; the files spell them.
fn number(value: &Value) -> f64 {
    match value {
        Value::String(word) => word.parse().expect("nan, inf or -inf"),
        Value::Bool(flag) => f64::from(*flag),
        value => value.as_f64().expect("a number"),
    }
}
