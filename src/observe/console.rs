//! The console of a run: lines that stay, and on a terminal the progress line that moves below them.
//!
//! The library reports events without numbers (a weight sync, a saved checkpoint, a skipped step)
//! through `tracing`. Any subscriber may show them; a [`Console`] is the plain one. Information
//! goes to standard output, warnings and errors to standard error. A closed stream loses its lines
//! and causes no error. An event is one line: control characters in it, which may come from a
//! service or a model, are escaped.

use std::fmt::{Debug, Write as _};
use std::io::{IsTerminal, Write};
use std::sync::Arc;

use indicatif::ProgressBar;
use parking_lot::{Mutex, MutexGuard};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::{SetGlobalDefaultError, set_global_default};
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::util::untrusted;

/// Prints lines, above the progress line where there is one. Clones are the same console.
///
/// ```
/// use rollflow::observe::Console;
///
/// Console::default().install()?;
/// tracing::info!("Saved checkpoint to {}", "runs/mine/checkpoints/step_000100");
/// # Ok::<(), tracing::subscriber::SetGlobalDefaultError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Console {
    /// The progress line, while a terminal shows one.
    bar: Arc<Mutex<Option<ProgressBar>>>,
    /// If true, events below `WARN` are not shown.
    quiet: bool,
}

impl Console {
    /// A console that shows warnings and errors only.
    pub fn quiet() -> Self {
        Console { quiet: true, ..Console::default() }
    }

    fn most(&self) -> Level {
        if self.quiet { Level::WARN } else { Level::INFO }
    }

    /// Shows the events of this process from now on, those of the library at level `INFO` or above,
    /// one line each. A program has one subscriber; a second one is an error.
    pub fn install(&self) -> Result<(), SetGlobalDefaultError> {
        set_global_default(self.clone())
    }

    /// Prints a line to standard output.
    pub fn print(&self, line: &str) {
        self.write(line, std::io::stdout());
    }

    /// Prints a line to standard error.
    pub fn warn(&self, line: &str) {
        self.write(line, std::io::stderr());
    }

    /// A terminal shows both streams, and only its bar knows where on it the progress line is.
    fn write(&self, line: &str, mut stream: impl Write + IsTerminal) {
        match &*self.bar() {
            Some(bar) if stream.is_terminal() => bar.println(line),
            _ => drop(writeln!(stream, "{line}")),
        }
    }

    /// Progress line, above which lines are printed. Its lock holder may write to the terminal.
    pub(super) fn bar(&self) -> MutexGuard<'_, Option<ProgressBar>> {
        self.bar.lock()
    }
}

/// Spans are not shown.
impl Subscriber for Console {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= self.most() && metadata.target().starts_with("rollflow")
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.most().into())
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        match *event.metadata().level() {
            Level::ERROR => self.warn(&format!("error: {}", untrusted::line(&text.0))),
            Level::WARN => self.warn(&format!("warning: {}", untrusted::line(&text.0))),
            _ => self.print(&untrusted::line(&text.0)),
        }
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// An event's message, and ` name=value` for what else it carries.
#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let written = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
        written.expect("a string takes everything");
    }
}
