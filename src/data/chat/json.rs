//! Filter `tojson` as transformers defines it: Python's `json.dumps` with its own spacing, not
//! escaped for HTML.

use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

use super::limits;

/// Most lists and maps inside each other. A namespace that holds itself has no end.
const DEPTH: usize = 128;

/// `value | tojson(ensure_ascii=…, indent=…, separators=…, sort_keys=…)`.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none() && !indent.is_undefined()) {
        None => None,
        Some(text) if text.as_str().is_some() => {
            limits::width("the indentation", text.as_str().unwrap_or_default().len())?;
            text.as_str().map(str::to_owned)
        }
        Some(count) => Some(" ".repeat(limits::width("the indentation", usize::try_from(count)?)?)),
    };
    let separators: Option<Serde<(String, String)>> = options.get("separators")?;
    let (item, key) = match separators {
        Some(given) => given.0,
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    check_depth(value, DEPTH)?;
    let mut value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, format!("can't be written as JSON: {error}")))?;
    if sorted {
        value.sort_all_objects();
    }
    let mut text = String::new();
    Layout { indent, item, key, ascii }.write(&value, 0, &mut text);
    Ok(Value::from(text))
}

/// Fails if more than `left` lists and maps are inside each other.
fn check_depth(value: &Value, left: usize) -> Result<(), Error> {
    let kind = value.kind();
    if !matches!(kind, ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
        return Ok(());
    }
    let problem = || format!("can't be written as JSON: more than {DEPTH} lists and maps are inside each other");
    let left = left.checked_sub(1).ok_or_else(|| Error::new(ErrorKind::BadSerialization, problem()))?;
    for item in value.try_iter()? {
        let inner = if kind == ValueKind::Map { value.get_item(&item)? } else { item };
        check_depth(&inner, left)?;
    }
    Ok(())
}

/// Python's layout of JSON.
struct Layout {
    indent: Option<String>,
    item: String,
    key: String,
    /// If true, strings are escaped but for ASCII.
    ascii: bool,
}

impl Layout {
    fn write(&self, value: &Json, level: usize, to: &mut String) {
        match value {
            Json::Array(items) => {
                self.enclose(['[', ']'], items, level, to, |item, to| self.write(item, level + 1, to));
            }
            Json::Object(fields) => self.enclose(['{', '}'], fields, level, to, |(name, value), to| {
                self.write(&Json::from(name.as_str()), level, to);
                *to += &self.key;
                self.write(value, level + 1, to);
            }),
            Json::Number(number) if number.is_f64() => *to += &float(&format!("{:?}", number.as_f64().unwrap_or_default())),
            Json::String(_) if self.ascii => *to += &escaped(&value.to_string()),
            other => *to += &other.to_string(),
        }
    }

    fn enclose<I: IntoIterator>(
        &self,
        ends: [char; 2],
        items: I,
        level: usize,
        to: &mut String,
        each: impl Fn(I::Item, &mut String),
    ) {
        let line = |level: usize| self.indent.as_ref().map_or(String::new(), |indent| format!("\n{}", indent.repeat(level)));
        to.push(ends[0]);
        let (mut separator, start) = ("", to.len());
        for item in items {
            *to += separator;
            *to += &line(level + 1);
            each(item, to);
            separator = &self.item;
        }
        if to.len() > start {
            *to += &line(level);
        }
        to.push(ends[1]);
    }
}

/// Python and Rust change to exponents at the same sizes, but Python writes them with a sign and two digits.
fn float(text: &str) -> String {
    let Some((digits, exponent)) = text.split_once('e') else { return text.to_owned() };
    let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |size| ('-', size));
    format!("{digits}e{sign}{size:0>2}")
}

/// JSON in which all but ASCII is escaped.
fn escaped(json: &str) -> String {
    let mut units = [0; 2];
    let escape = |c: char| match c {
        c if c.is_ascii() => c.to_string(),
        c => c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
    };
    json.chars().map(escape).collect()
}
