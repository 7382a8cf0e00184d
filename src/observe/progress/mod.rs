//! The line one watches while a run trains.
//!
//! `Meter` turns totals and elapsed time into a `Snapshot`, `render` turns that into a line,
//! and `Progress` shows it. Only the last uses a clock and a terminal. On a terminal the line is
//! redrawn; elsewhere a plain line is printed every few seconds.

mod line;
mod meter;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use line::duration;
use line::{Snapshot, render};
use meter::Meter;
pub use meter::step_rate;

use super::{Console, Metrics};

/// A redrawn line needs no more than the eye can follow.
const REDRAW: Duration = Duration::from_millis(100);
/// Lines in a file or a CI log: often enough to see life, seldom enough to read.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);
/// Wide enough for every part of the line. A narrower terminal that does not export its `COLUMNS`
/// cuts it at its edge.
const FULL_WIDTH: usize = 200;

/// Shows a run's progress on standard error, below the lines of a [`Console`].
pub struct Progress {
    started: Instant,
    shown: Option<Instant>,
    meter: Meter,
    /// If standard error is a terminal.
    terminal: Option<(ProgressBar, Console)>,
    columns: Option<usize>,
}

impl Progress {
    /// Makes the progress line of a run of `total` steps, which begins after `taken` steps, whatever
    /// `metrics` counted so far.
    pub fn new(console: &Console, total: u64, taken: u64, metrics: &Metrics) -> Self {
        let terminal = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(ProgressStyle::with_template("{wide_msg}").expect("a constant template"));
            *console.bar() = Some(bar.clone());
            (bar, console.clone())
        });
        let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        Progress { started: Instant::now(), shown: None, meter: Meter::new(total, taken, metrics), terminal, columns }
    }

    /// Takes the newest numbers, and shows them if the last time was long enough ago. `bottleneck` is
    /// a few words.
    pub fn update(&mut self, metrics: &Metrics, bottleneck: Option<&str>) {
        let interval = if self.terminal.is_some() { REDRAW } else { PLAIN_INTERVAL };
        let is_due = self.shown.is_none_or(|shown| shown.elapsed() >= interval);
        self.show(metrics, bottleneck, is_due);
    }

    /// Shows the newest numbers a last time and leaves the line standing.
    pub fn finish(mut self, metrics: &Metrics, bottleneck: Option<&str>) {
        self.show(metrics, bottleneck, true);
        if let Some((bar, console)) = &self.terminal {
            let mut printed_above = console.bar();
            *printed_above = None;
            bar.abandon();
            // The cursor stands at the line's end.
            print_plain("");
        }
    }

    fn show(&mut self, metrics: &Metrics, bottleneck: Option<&str>, is_due: bool) {
        let snapshot = self.meter.record(self.started.elapsed(), metrics, bottleneck);
        if !is_due {
            return;
        }
        self.shown = Some(Instant::now());
        match &self.terminal {
            Some((bar, _)) => {
                bar.set_message(render(snapshot, self.columns.unwrap_or(FULL_WIDTH)));
                bar.tick();
            }
            None => print_plain(&render(snapshot, FULL_WIDTH)),
        }
    }
}

/// Standard error may be closed; progress is not worth a run.
fn print_plain(line: &str) {
    writeln!(std::io::stderr(), "{line}").ok();
}
