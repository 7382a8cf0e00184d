//! Filter `tojson` as transformers defines it: Python's `json.dumps` with its own spacing, not
//! escaped for HTML.

use std::io;

use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;
use serde_json::ser::{CharEscape, Formatter};

use super::limits;

/// `value | tojson(ensure_ascii=…, indent=…, separators=…, sort_keys=…)`.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, format!("can't be written as JSON: {error}"));
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
    let value = serde_json::to_value(value).map_err(failed)?;
    let value = if sorted { with_sorted_keys(value) } else { value };
    let mut written = Vec::new();
    let python = Python { indent, item, key, ascii, level: 0, filled: false };
    serde::Serialize::serialize(&value, &mut serde_json::Serializer::with_formatter(&mut written, python)).map_err(failed)?;
    Ok(Value::from(String::from_utf8_lossy(&written).into_owned()))
}

fn with_sorted_keys(value: Json) -> Json {
    match value {
        Json::Object(fields) => {
            let mut fields: Vec<_> = fields.into_iter().map(|(key, value)| (key, with_sorted_keys(value))).collect();
            fields.sort_by(|(a, _), (b, _)| a.cmp(b));
            Json::Object(fields.into_iter().collect())
        }
        Json::Array(items) => Json::Array(items.into_iter().map(with_sorted_keys).collect()),
        other => other,
    }
}

/// Python's way to lay JSON out.
struct Python {
    indent: Option<String>,
    item: String,
    key: String,
    ascii: bool,
    level: usize,
    /// If true, the innermost list or object has an item.
    filled: bool,
}

impl Python {
    fn open<W: io::Write + ?Sized>(&mut self, to: &mut W, bracket: &[u8]) -> io::Result<()> {
        (self.level, self.filled) = (self.level + 1, false);
        to.write_all(bracket)
    }

    fn close<W: io::Write + ?Sized>(&mut self, to: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.filled {
            self.line(to)?;
        }
        self.filled = true;
        to.write_all(bracket)
    }

    fn next<W: io::Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if !first {
            to.write_all(self.item.as_bytes())?;
        }
        self.line(to)
    }

    fn line<W: io::Write + ?Sized>(&self, to: &mut W) -> io::Result<()> {
        match &self.indent {
            Some(indent) => write!(to, "\n{}", indent.repeat(self.level)),
            None => Ok(()),
        }
    }
}

impl Formatter for Python {
    fn write_f64<W: io::Write + ?Sized>(&mut self, to: &mut W, value: f64) -> io::Result<()> {
        // Python and Rust change to exponents at the same sizes, but Python writes them with a sign and two digits.
        let text = format!("{value:?}");
        match text.split_once('e') {
            Some((digits, exponent)) => {
                let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |size| ('-', size));
                write!(to, "{digits}e{sign}{size:0>2}")
            }
            None => to.write_all(text.as_bytes()),
        }
    }

    fn write_string_fragment<W: io::Write + ?Sized>(&mut self, to: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ascii {
            return to.write_all(fragment.as_bytes());
        }
        let mut units = [0; 2];
        for c in fragment.chars() {
            match c {
                c if c.is_ascii() => write!(to, "{c}")?,
                c => c.encode_utf16(&mut units).iter().try_for_each(|unit| write!(to, "\\u{unit:04x}"))?,
            }
        }
        Ok(())
    }

    fn write_char_escape<W: io::Write + ?Sized>(&mut self, to: &mut W, escape: CharEscape) -> io::Result<()> {
        serde_json::ser::CompactFormatter.write_char_escape(to, escape)
    }

    fn begin_array<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.open(to, b"[")
    }

    fn end_array<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.close(to, b"]")
    }

    fn begin_array_value<W: io::Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.next(to, first)
    }

    fn end_array_value<W: io::Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.open(to, b"{")
    }

    fn end_object<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.close(to, b"}")
    }

    fn begin_object_key<W: io::Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.next(to, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: io::Write + ?Sized>(&mut self, _: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}
