//! Positions of JSON values in a file, found one after the other without holding them.
//!
//! A list of records may be larger than memory, on a single line. Only strings and brackets are
//! matched; a value is validated when its bytes are parsed.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

use memchr::memchr_iter;

use crate::data::DataError;
use crate::util::reading;

/// Bytes per read.
const BLOCK: usize = 1 << 20;

/// Position of a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub start: u64,
    pub len: u64,
    /// The line it begins on, from 1.
    pub line: usize,
    /// First byte, from which its type follows.
    pub first: u8,
}

/// Goes through a file once, from its beginning.
pub(super) struct Scanner<'a> {
    path: &'a Path,
    file: BufReader<File>,
    at: u64,
    line: usize,
}

impl<'a> Scanner<'a> {
    /// Opens a file, after the byte-order mark if there is one.
    pub fn open(path: &'a Path) -> Result<Self, DataError> {
        let file = BufReader::with_capacity(BLOCK, reading::open(path).map_err(DataError::read(path))?);
        let mut scanner = Scanner { path, file, at: 0, line: 1 };
        if scanner.buffer()?.starts_with("\u{feff}".as_bytes()) {
            scanner.pass(3);
        }
        Ok(scanner)
    }

    /// Continues from a place that was found before.
    pub fn back_to(&mut self, place: &Place) -> Result<(), DataError> {
        self.file.seek(SeekFrom::Start(place.start)).map_err(DataError::read(self.path))?;
        (self.at, self.line) = (place.start, place.line);
        // What is passed over next must have been read.
        self.buffer().map(drop)
    }

    /// The line that was reached, from 1.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The next byte that is no white space, which stays to be read; `None` at the end.
    pub fn next(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            let buffer = self.buffer()?;
            let blank = buffer.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let (found, ends) = (buffer.get(blank).copied(), buffer.is_empty());
            let lines = memchr_iter(b'\n', &buffer[..blank]).count();
            self.line += lines;
            self.pass(blank);
            if found.is_some() || ends {
                return Ok(found);
            }
        }
    }

    /// The next value, of any kind.
    pub fn value(&mut self) -> Result<Place, DataError> {
        let next = self.next()?;
        let (start, line) = (self.at, self.line);
        let first = match next {
            Some(b',' | b':' | b']' | b'}') | None => return Err(self.expected("a value", next)),
            Some(first) => first,
        };
        let whole = if matches!(first, b'"' | b'{' | b'[') { self.nested()? } else { self.word()? };
        if !whole {
            return Err(self.wrong(line, "the file ends within what begins here; is all of it there?"));
        }
        Ok(Place { start, len: self.at - start, line, first })
    }

    /// The values of the list that begins here.
    pub fn list(&mut self, mut each: impl FnMut(Place) -> Result<(), DataError>) -> Result<(), DataError> {
        self.between(b']', |scanner| each(scanner.value()?))
    }

    /// The fields of the object that begins here, by name.
    pub fn fields(&mut self, mut each: impl FnMut(String, Place) -> Result<(), DataError>) -> Result<(), DataError> {
        self.between(b'}', |scanner| {
            let next = scanner.next()?;
            if next != Some(b'"') {
                return Err(scanner.expected("the name of a field", next));
            }
            let name = scanner.value()?;
            let mut bytes = vec![0; name.len as usize];
            scanner.file.get_ref().read_exact_at(&mut bytes, name.start).map_err(DataError::read(scanner.path))?;
            let name = serde_json::from_slice(&bytes).map_err(|error| scanner.wrong(name.line, &error.to_string()))?;
            match scanner.next()? {
                Some(b':') => scanner.pass(1),
                other => return Err(scanner.expected("`:`", other)),
            }
            each(name, scanner.value()?)
        })
    }

    /// Refuses to find anything more.
    pub fn end(&mut self) -> Result<(), DataError> {
        match self.next()? {
            None => Ok(()),
            more => Err(self.expected("nothing more", more)),
        }
    }

    /// Calls `each` for every item between this bracket and its closing one.
    fn between(&mut self, close: u8, mut each: impl FnMut(&mut Self) -> Result<(), DataError>) -> Result<(), DataError> {
        self.pass(1);
        if self.next()? == Some(close) {
            self.pass(1);
            return Ok(());
        }
        loop {
            each(self)?;
            match self.next()? {
                Some(b',') => self.pass(1),
                Some(found) if found == close => break self.pass(1),
                other => return Err(self.expected(&format!("`,` or `{}`", char::from(close)), other)),
            }
        }
        Ok(())
    }

    /// Skips a text, a list or an object; `false` if the file ends within it.
    fn nested(&mut self) -> Result<bool, DataError> {
        let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
        loop {
            let buffer = self.buffer()?;
            let (len, mut lines) = (buffer.len(), 0);
            let ends = |byte: &u8| {
                lines += usize::from(*byte == b'\n');
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' => escaped = quoted,
                    b'"' => quoted = !quoted,
                    _ if quoted => {}
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' => depth -= 1,
                    _ => {}
                }
                !quoted && depth == 0
            };
            let end = buffer.iter().position(ends);
            self.line += lines;
            self.pass(end.map_or(len, |at| at + 1));
            if end.is_some() || len == 0 {
                return Ok(end.is_some());
            }
        }
    }

    /// Skips a number, a truth value, or what is none.
    fn word(&mut self) -> Result<bool, DataError> {
        loop {
            let buffer = self.buffer()?;
            let ends = |byte: &u8| byte.is_ascii_whitespace() || b",:\"{}[]".contains(byte);
            let (len, end) = (buffer.len(), buffer.iter().position(ends));
            self.pass(end.unwrap_or(len));
            if end.is_some() || len == 0 {
                return Ok(true);
            }
        }
    }

    fn buffer(&mut self) -> Result<&[u8], DataError> {
        self.file.fill_buf().map_err(DataError::read(self.path))
    }

    fn pass(&mut self, bytes: usize) {
        self.file.consume(bytes);
        self.at += bytes as u64;
    }

    fn expected(&self, what: &str, found: Option<u8>) -> DataError {
        let found = match found {
            None => "the end of the file".to_owned(),
            Some(byte) if byte.is_ascii() => format!("`{}`", char::from(byte)),
            Some(_) => "something else".to_owned(),
        };
        self.wrong(self.line, &format!("expected {what}, found {found}"))
    }

    fn wrong(&self, line: usize, problem: &str) -> DataError {
        DataError::in_line(self.path, line, format!("not JSON: {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Result<Vec<String>, String> {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        let mut scanner = Scanner::open(file.path()).map_err(|error| error.to_string())?;
        let mut places = Vec::new();
        assert_eq!(scanner.next().map_err(|error| error.to_string())?, Some(b'['));
        let list = |place| {
            places.push(place);
            Ok(())
        };
        let scanned = scanner.list(list).and_then(|()| scanner.end());
        let slice = |place: &Place| text[place.start as usize..(place.start + place.len) as usize].to_owned();
        let name = format!("{}:", file.path().display());
        scanned.map(|()| places.iter().map(slice).collect()).map_err(|error| error.to_string().replace(&name, ""))
    }

    #[test]
    fn values_of_a_list_are_found_whatever_stands_in_their_texts() {
        let values = ["{\"a\": \"}],\\\"{\\\\\"}", "[[], {\"b\": [1, {}]}]", "-1.5e3", "null", "\"é\\u0041\"", "{}"];
        assert_eq!(found(&format!("\u{feff} [ {} ] \n", values.join(" ,\n"))).unwrap(), values);
        assert_eq!(found("[]").unwrap(), Vec::<String>::new());
    }

    #[test]
    fn what_is_no_list_says_where() {
        for (text, problem) in [
            ("[\n1\n2]", "3: not JSON: expected `,` or `]`, found `2`"),
            ("[1,\n]", "2: not JSON: expected a value, found `]`"),
            ("[1,\n{\"a\": \"b]", "2: not JSON: the file ends within what begins here; is all of it there?"),
            ("[1", "1: not JSON: expected `,` or `]`, found the end of the file"),
            ("[1]\n\nx", "3: not JSON: expected nothing more, found `x`"),
        ] {
            assert_eq!(found(text).unwrap_err(), problem);
        }
    }

    /// Quotes, escapes and brackets at the boundary of two reads.
    #[test]
    fn a_value_may_be_longer_than_what_is_read_at_once() {
        let long = |shift: usize| format!("{{\"a\": \"{}\\\"}}{}\"}}", "x".repeat(BLOCK - 12 + shift), "\\\\".repeat(BLOCK));
        for shift in 0..6 {
            let text = format!("[{}, 7]", long(shift));
            assert_eq!(found(&text).unwrap(), [long(shift), "7".to_owned()], "{shift}");
        }
    }
}
