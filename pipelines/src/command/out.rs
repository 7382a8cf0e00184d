//! What the command prints. A reader that has seen enough and closes its end, as `head` does, is no failure.

use std::io::{self, ErrorKind, Write};

/// Nobody reads what is printed.
#[derive(Debug, thiserror::Error)]
pub enum Unread {
    /// The reader closed its end.
    #[error("standard output was closed")]
    Closed,
    /// The file or the terminal takes no more.
    #[error("writing to standard output: {0}")]
    Failed(io::Error),
}

/// Prints `text` as it is, at once.
pub fn text(text: &str) -> Result<(), Unread> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Unread::Closed,
        _ => Unread::Failed(error),
    })
}

/// Prints `line` and its end.
pub fn line(line: &str) -> Result<(), Unread> {
    text(&format!("{line}\n"))
}

/// Whether a command ended because nobody reads what it prints.
pub fn was_closed(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Unread::Closed))
}
