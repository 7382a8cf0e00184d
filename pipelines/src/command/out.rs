//! Input and output of the command. A reader that closes its end early, as `head` does, is no failure.
//!
//! Output contains names, errors and completions of foreign origin. A terminal gets their control
//! characters as escapes; a file or a pipe gets the bytes unchanged.

use std::io::{self, ErrorKind, IsTerminal, Write};

use rollflow::util::untrusted;

/// The reader of the output closed its end.
#[derive(Debug, thiserror::Error)]
pub enum Unread {
    /// The reader closed its end.
    #[error("standard output was closed")]
    Closed,
    /// The file or the terminal takes no more.
    #[error("writing to standard output: {0}")]
    Failed(io::Error),
}

/// Prints `text` without a delay, and without control characters on a terminal.
pub fn text(text: &str) -> Result<(), Unread> {
    let mut out = io::stdout().lock();
    let text = if out.is_terminal() { &untrusted::block_of(text, usize::MAX) } else { text };
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Unread::Closed,
        _ => Unread::Failed(error),
    })
}

/// Prints `line` and its end.
pub fn line(line: &str) -> Result<(), Unread> {
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

/// Returns true if a command ended because its output was closed.
pub fn was_closed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Unread::Closed))
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
