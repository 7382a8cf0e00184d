//! Input and output of the command. A reader that closes its end early, as `head` does, is no failure.
//!
//! Output contains names, errors and completions of foreign origin. A terminal gets their control
//! characters as escapes; a file or a pipe gets the bytes unchanged.

use std::io::{self, ErrorKind, IsTerminal, Write};

use anyhow::{Context, Result};
use rollflow::util::untrusted;
use serde_json::{Number, Value};

use super::End;

/// Prints `text` without a delay, and without control characters on a terminal.
pub fn text(text: &str) -> Result<()> {
    if io::stdout().is_terminal() { escaped(&untrusted::block_of(text, usize::MAX)) } else { escaped(text) }
}

/// Prints `text` unchanged without a delay: colours, and text whose foreign parts are escaped.
pub fn escaped(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(End::Closed.into()),
        written => written.context("writing to standard output"),
    }
}

/// Returns true if output to this stream is coloured: on a terminal, unless `NO_COLOR` is set.
pub fn is_coloured(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// Prints `line` and its end.
pub fn line(line: &str) -> Result<()> {
    text(&format!("{line}\n"))
}

/// Standard input up to its end, without the last line's end, which is the shell's.
pub fn input() -> io::Result<String> {
    let text = io::read_to_string(io::stdin())?;
    Ok(text.strip_suffix('\n').map(str::to_owned).unwrap_or(text))
}

/// Prints lines to standard error, without control characters. A closed stream loses them.
pub fn complain(lines: &str) {
    writeln!(io::stderr(), "{}", untrusted::block(lines)).ok();
}

/// Rows with columns as wide as their widest cell, two spaces apart.
pub fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows.iter().filter_map(|row| Some(row.get(at)?.chars().count())).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// A number of a table, short: four decimals, or two digits of a small one.
pub fn short(value: f64) -> String {
    // No minus before a zero.
    let value = value + 0.0;
    if value != 0.0 && value.abs() < 1e-3 { format!("{value:.2e}") } else { format!("{value:.4}") }
}

/// A number as JSON. Those that JSON lacks are the strings `"NaN"`, `"inf"` and `"-inf"`.
pub fn json_number(value: f64) -> Value {
    Number::from_f64(value).map_or_else(|| value.to_string().into(), Value::Number)
}
