//! Positions of the records of a JSON file. One record is held at a time: a list may be larger than
//! memory, on a single line.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use memchr::memchr_iter;
use serde::Deserializer;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::data::DataError;
use crate::data::jsonl::bare;
use crate::util::reading;

/// Bytes per read.
const BLOCK: usize = 1 << 20;
/// Fields of an object that may contain the list of records, after the split's name.
const LISTS: [&str; 5] = ["data", "rows", "examples", "instances", "records"];

/// Position of a record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub start: u64,
    pub len: u64,
}

/// Returns the records of `[{…}, …]`, or of `{"data": [{…}, …], …}` with the split's name or a usual
/// one for the list; any other value is one record. `None` if the file has an object per line: the
/// first ends on its line, and more lines follow.
pub(super) fn records(path: &Path, split: &str) -> Result<Option<Vec<Place>>, DataError> {
    let failed = DataError::read(path);
    let file = BufReader::with_capacity(BLOCK, reading::open(path).map_err(&failed)?);
    let (read, lines) = (Cell::new(0), Cell::new(1));
    let mut file = Counted { file, read: &read, lines: &lines };
    if file.file.fill_buf().map_err(&failed)?.starts_with("\u{feff}".as_bytes()) {
        file.read_exact(&mut [0; 3]).map_err(&failed)?;
    }
    let first = file.next().map_err(&failed)?.ok_or_else(|| DataError::invalid(path, "not JSON: the file is empty"))?;
    let (start, line) = (read.get(), lines.get());
    let lists = Lists { read: &read, split: Some(split) };
    let list = lists.deserialize(&mut serde_json::Deserializer::from_reader(&mut file)).map_err(|error| {
        if error.is_io() {
            return failed(error.into());
        }
        let cut = if error.is_eof() { "; is all of it there?" } else { "" };
        let problem = format!("not JSON: {} (column {}){cut}", bare(&error), error.column());
        DataError::in_line(path, line + error.line() - 1, problem)
    })?;
    let (end, last) = (read.get(), lines.get());
    match file.next().map_err(&failed)? {
        Some(_) if first == b'{' && line == last && lines.get() > last => return Ok(None),
        Some(found) => {
            let found = if found.is_ascii() { format!("`{}`", char::from(found)) } else { "something else".to_owned() };
            return Err(DataError::in_line(path, lines.get(), format!("not JSON: expected nothing more, found {found}")));
        }
        None => {}
    }
    Ok(Some(list.unwrap_or_else(|| vec![Place { start, len: end - start }])))
}

/// A file whose bytes and lines are counted as they are read.
struct Counted<'a> {
    file: BufReader<File>,
    read: &'a Cell<u64>,
    /// Number of the current line, from 1.
    lines: &'a Cell<usize>,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.read.set(self.read.get() + read as u64);
        self.lines.set(self.lines.get() + memchr_iter(b'\n', &buffer[..read]).count());
        Ok(read)
    }
}

impl Counted<'_> {
    /// The next byte that is no white space, which stays to be read; `None` at the end.
    fn next(&mut self) -> io::Result<Option<u8>> {
        while let Some(&byte) = self.file.fill_buf()?.first() {
            if !byte.is_ascii_whitespace() {
                return Ok(Some(byte));
            }
            self.read_exact(&mut [0])?;
        }
        Ok(None)
    }
}

/// Reads a value: the places of its items if it is a list; if it is an object and there is a `split`,
/// those of the list among its fields.
struct Lists<'a> {
    read: &'a Cell<u64>,
    split: Option<&'a str>,
}

impl<'de> DeserializeSeed<'de> for Lists<'_> {
    type Value = Option<Vec<Place>>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Lists<'_> {
    type Value = Option<Vec<Place>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut places = Vec::new();
        while let Some(item) = items.next_element::<Box<RawValue>>()? {
            // The end of a number shows in the byte after it.
            let after = u64::from(item.get().ends_with(|c: char| c.is_ascii_digit()));
            let len = item.get().len() as u64;
            places.push(Place { start: self.read.get() - after - len, len });
        }
        Ok(Some(places))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut lists = Vec::new();
        while let Some(name) = fields.next_key::<String>()? {
            let usual = |split| [split].iter().chain(&LISTS).position(|usual| *usual == name);
            match self.split.and_then(usual) {
                Some(rank) => lists.extend(fields.next_value_seed(Lists { split: None, ..self })?.map(|list| (rank, list))),
                None => drop(fields.next_value::<IgnoredAny>()?),
            }
        }
        Ok(lists.into_iter().min_by_key(|(rank, _)| *rank).map(|(_, list)| list))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Result<Option<Vec<String>>, String> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        let slice = |place: Place| text[place.start as usize..(place.start + place.len) as usize].to_owned();
        let name = format!("{}:", file.path().display());
        let found = records(file.path(), "dev").map_err(|error| error.to_string().replace(&name, ""));
        Ok(found?.map(|places| places.into_iter().map(slice).collect()))
    }

    #[test]
    fn records_are_found_whatever_stands_in_their_texts() {
        let values = ["{\"a\": \"}],\\\"{\\\\\"}", "[[], {\"b\": [1, {}]}]", "-1.5e3", "null", "\"é\\u0041\"", "{}", "7"];
        assert_eq!(found(&format!("\u{feff} [ {} ] \n", values.join(" ,\n"))).unwrap().unwrap(), values);
        for (text, records) in [
            ("[]", Some(vec![])),
            ("{\"rows\": [1],\n \"x\": [2], \"dev\": [{}, 3], \"data\": 4}", Some(vec!["{}", "3"])),
            (" {\"data\": {\"rows\": [1]}}\n", Some(vec!["{\"data\": {\"rows\": [1]}}"])),
            ("{\"data\": [1]}\n\n{", None),
        ] {
            assert_eq!(found(text).unwrap(), records.map(|all| all.into_iter().map(str::to_owned).collect()), "{text}");
        }
    }

    #[test]
    fn what_is_no_json_says_where() {
        for (text, problem) in [
            ("[\n1\n2]", "3: not JSON: expected `,` or `]` (column 1)"),
            ("\n[1,\n]", "3: not JSON: trailing comma (column 1)"),
            ("[1,\n{\"a\": \"b]", "2: not JSON: EOF while parsing a string (column 9); is all of it there?"),
            ("[1]\n\nx", "3: not JSON: expected nothing more, found `x`"),
        ] {
            assert_eq!(found(text).unwrap_err(), problem);
        }
    }

    /// Quotes, escapes and brackets at the boundary of two reads.
    #[test]
    fn a_record_may_be_longer_than_what_is_read_at_once() {
        let long = |shift: usize| format!("{{\"a\": \"{}\\\"}}{}\"}}", "x".repeat(BLOCK - 12 + shift), "\\\\".repeat(BLOCK));
        for shift in 0..6 {
            let text = format!("[{}, 7]", long(shift));
            assert_eq!(found(&text).unwrap().unwrap(), [long(shift), "7".to_owned()], "{shift}");
        }
    }
}
