//! The page: tables and drawings between marks, and what people wrote around them, which stays.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::chart::{Chart, median};

/// The page's file; its drawings lie in the folder of the same name.
pub const NAME: &str = "asynchrony.md";
const DRAWINGS: &str = "asynchrony";

/// What a part of the page says.
#[derive(Default)]
pub struct Measured {
    /// Markdown.
    pub text: String,
    /// Drawings that it shows, by their names.
    pub drawings: Vec<(String, Chart)>,
}

impl Measured {
    /// One more table, with a heading above it. The first column is text, the others numbers.
    pub fn table(&mut self, title: &str, head: &[&str], rows: &[Vec<String>]) {
        let rules = ["---"].into_iter().chain(std::iter::repeat_n("---:", head.len() - 1)).collect::<Vec<_>>();
        // Writing to a string cannot fail.
        write!(self.text, "**{title}**\n\n| {} |\n| {} |\n", head.join(" | "), rules.join(" | ")).ok();
        for row in rows {
            writeln!(self.text, "| {} |", row.join(" | ")).ok();
        }
        self.text.push('\n');
    }

    /// One more paragraph.
    pub fn say(&mut self, text: &str) {
        write!(self.text, "{text}\n\n").ok();
    }

    /// One more drawing.
    pub fn draw(&mut self, name: &str, chart: Chart) {
        write!(self.text, "![{}]({DRAWINGS}/{name}.svg)\n\n", chart.title).ok();
        self.drawings.push((name.to_owned(), chart));
    }
}

/// The page on disk.
pub struct Page(PathBuf);

impl Page {
    /// The one in that folder, which must be there.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(NAME).canonicalize().with_context(|| format!("no {NAME} in {}", folder.display()))?;
        std::fs::create_dir_all(path.with_file_name(DRAWINGS))?;
        Ok(Page(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes what was measured between the marks of a part, and the drawings beside the page.
    pub fn put(&self, part: &str, measured: &Measured, took: Duration) -> Result<()> {
        for (name, chart) in &measured.drawings {
            std::fs::write(self.0.with_file_name(DRAWINGS).join(format!("{name}.svg")), chart.to_svg())?;
        }
        let text = format!("{}*{} in {:.0} s.*", measured.text, machine(), took.as_secs_f64());
        let page = std::fs::read_to_string(&self.0)?;
        let page = filled(&page, part, &text).with_context(|| format!("{} has no marks of {part}", self.0.display()))?;
        std::fs::write(&self.0, page).with_context(|| format!("writing {}", self.0.display()))
    }
}

fn filled(page: &str, part: &str, text: &str) -> Option<String> {
    let (begin, end) = (format!("<!-- measured: {part} -->\n"), format!("<!-- end of {part} -->"));
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}\n{text}\n\n{end}{after}"))
}

fn machine() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map_or("unknown CPU", |(_, name)| name);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    format!("Measured by version {} on {threads} threads of {model}", env!("CARGO_PKG_VERSION"))
}

/// The median of repeated measurements and, if there are several, their range.
pub fn spread(values: &[f64], decimals: usize) -> String {
    let (low, high) =
        values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
    let middle = median(values.to_vec());
    match values.len() {
        0 => "–".to_owned(),
        1 => format!("{middle:.decimals$}"),
        _ => format!("{middle:.decimals$} ({low:.decimals$}–{high:.decimals$})"),
    }
}

/// The same of shares, in percent.
pub fn percent(shares: &[f64]) -> String {
    let text = spread(&shares.iter().map(|share| 100.0 * share).collect::<Vec<_>>(), 0);
    match text.split_once(' ') {
        Some((middle, range)) => format!("{middle}% {range}"),
        None => format!("{text}%"),
    }
}
