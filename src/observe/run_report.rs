//! `report.md`: summary of a run on one page, with its learning curve in `curve.svg`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::catalog::Metric;
use super::chart::{Chart, smoothed};
use super::logs::{LogError, Rollout, StepMetrics, short};
use crate::util::atomic_file;
use crate::util::untrusted::{block, line, markdown};

/// Contents of the page. Texts are ready made: the flow's report gives the table and the
/// bottleneck.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// The pipeline's name.
    pub name: String,
    /// Outcome of the run, in a sentence.
    pub outcome: String,
    /// Rows of the summary: what, and how much.
    pub summary: Vec<(String, String)>,
    /// The learning curve.
    pub curve: Chart,
    /// One line that names the bottleneck and the knob that moves it.
    pub bottleneck: String,
    /// The table of stages and edges, as plain text.
    pub flow_table: String,
    /// The last step's row.
    pub final_metrics: StepMetrics,
    /// A few samples to look at.
    pub samples: Vec<Rollout>,
}

impl RunReport {
    /// The page. What is empty is left out.
    pub fn to_markdown(&self) -> String {
        let mut page = format!("# {}\n\n{}\n", markdown(&self.name), markdown(&self.outcome));
        let summary: Vec<_> = self.summary.iter().map(|(what, value)| (markdown(what), markdown(value))).collect();
        section(&mut page, "Summary", &table(["", ""], &summary));
        if let Some(learned) = self.learned() {
            section(&mut page, "Learning", &format!("![{}](curve.svg)\n\n{learned}\n", markdown(&self.curve.title)));
        }
        let flow = if self.flow_table.is_empty() {
            String::new()
        } else {
            format!("```text\n{}\n```\n", block(self.flow_table.trim_end()).replace("```", "'''"))
        };
        let flow = [markdown(&self.bottleneck), flow].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>();
        section(&mut page, "Where the time went", &flow.join("\n\n"));
        section(&mut page, "Samples", &self.samples());
        let rows: Vec<(String, String)> = self.final_metrics.iter().map(|(key, value)| (explained(key), short(*value))).collect();
        section(&mut page, "The last step", &table(["metric", "value"], &rows));
        page
    }

    /// Writes `report.md` and `curve.svg` into `folder` and returns the page's path.
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<PathBuf, LogError> {
        let put = |name: &str, text: String| {
            let path = folder.as_ref().join(name);
            match atomic_file::write(&path, text) {
                Ok(()) => Ok(path),
                Err(source) => Err(LogError::Io { path, source }),
            }
        };
        put("curve.svg", self.curve.to_svg())?;
        put("report.md", self.to_markdown())
    }

    /// The curve in words, from its smoothed line.
    fn learned(&self) -> Option<String> {
        let points = self.curve.series.iter().flat_map(|series| &series.points);
        let values: Vec<f64> = points.map(|point| point.1).filter(|value| value.is_finite()).collect();
        let tenth = values.len().div_ceil(10);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let best = smoothed(&values).into_iter().reduce(f64::max)?;
        let (first, last) = (mean(&values[..tenth]), mean(&values[values.len() - tenth..]));
        Some(format!("First tenth of the run {first:.3}, last tenth {last:.3}, best (smoothed) {best:.3}."))
    }

    fn samples(&self) -> String {
        let mut table = String::new();
        for sample in &self.samples {
            if table.is_empty() {
                table.push_str("| step | reward | prompt | response |\n| ---: | ---: | --- | --- |\n");
            }
            let reward = sample.reward.map_or_else(|| "–".to_owned(), |reward| format!("{reward:.3}"));
            let (prompt, response) = (quoted(&sample.prompt.render()), quoted(&sample.response));
            // Writing to a string cannot fail.
            writeln!(table, "| {} | {reward} | {prompt} | {response} |", sample.step).ok();
        }
        table
    }
}

fn section(page: &mut String, title: &str, text: &str) {
    if !text.is_empty() {
        write!(page, "\n## {title}\n\n{}\n", text.trim_end()).ok();
    }
}

/// A table of cells that are Markdown already.
fn table(head: [&str; 2], rows: &[(String, String)]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut table = format!("| {} | {} |\n| --- | ---: |\n", head[0], head[1]);
    for (what, value) in rows {
        writeln!(table, "| {what} | {value} |").ok();
    }
    table
}

/// A key of the row, with the catalogue's sentence where it has one.
fn explained(key: &str) -> String {
    match Metric::from_key(key) {
        Some(metric) => format!("`{key}`: {}", metric.spec().help.replace('|', "\\|")),
        None => quoted(key),
    }
}

/// Model output as code, so that no Markdown or HTML in it is rendered; long text keeps its beginning.
fn quoted(text: &str) -> String {
    const LONGEST: usize = 160;
    let mut begins: String = text.chars().take(LONGEST).collect();
    if text.chars().count() > LONGEST {
        begins.push('…');
    }
    // In code, a backslash escapes nothing but a bar of a table's.
    let shown = line(&begins.replace('\n', "⏎")).replace('`', "'").replace('|', "\\|");
    if shown.trim().is_empty() { String::new() } else { format!("`{shown}`") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> RunReport {
        RunReport {
            name: "grpo".into(),
            outcome: "Finished after 400 steps.".into(),
            summary: vec![("steps".into(), "400".into()), ("wall-clock time".into(), "1m32s".into())],
            curve: Chart::curve("Mean reward", "step", (0..20).map(|step| (f64::from(step), 0.05 * f64::from(step))).collect()),
            bottleneck: "generate limits the run (busy 93%): give it more slots".into(),
            flow_table: "stage     busy  starved\ngenerate  93%   7%\n".into(),
            final_metrics: [("loss".to_owned(), 0.0123), ("my_own".to_owned(), f64::NAN)].into(),
            samples: vec![
                Rollout {
                    step: 3,
                    prompt: "1+2=".into(),
                    response: "3|`4`\n<b>".into(),
                    reward: Some(1.0),
                    ..Rollout::default()
                },
                Rollout { step: 4, prompt: "x".repeat(200).into(), ..Rollout::default() },
            ],
        }
    }

    #[test]
    fn the_page_says_what_happened() {
        insta::assert_snapshot!("report_md", report().to_markdown());
    }

    #[test]
    fn what_is_empty_is_left_out() {
        let report = RunReport { name: "sft".into(), outcome: "Stopped.".into(), ..RunReport::default() };
        assert_eq!(report.to_markdown(), "# sft\n\nStopped.\n");
    }

    #[test]
    fn the_curve_lies_beside_the_page() {
        let folder = tempfile::tempdir().unwrap();
        let page = report().write(folder.path()).unwrap();
        assert!(std::fs::read_to_string(page).unwrap().contains("(curve.svg)"));
        assert_eq!(std::fs::read_to_string(folder.path().join("curve.svg")).unwrap(), report().curve.to_svg());
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = report().write("/no/such/folder").unwrap_err().to_string();
        assert!(error.starts_with("/no/such/folder/curve.svg: "), "{error}");
    }
}
