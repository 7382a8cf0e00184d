//! `rollflow diff`: where two runs differ, on one page.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use rollflow::observe::logs::{StepMetrics, metrics_rows};
use rollflow::util::untrusted;
use serde_json::{Value, json};

use super::out::{aligned, json_number, short, text};
use super::{End, read_runs};
use crate::run::recipe_keys::differences;
use crate::run::record::{Parent, Record, Session};

/// Curves whose ends are shown.
const CURVES: [&str; 5] = ["reward_mean", "loss", "entropy_nats", "log_prob_gap_mean_nats", "length_finished_mean_tokens"];

/// Metrics of the first step with a difference that the page shows; `--json` lists all.
const SHOWN: usize = 12;

/// Widest value of the page, in characters.
const CELL: usize = 60;

/// Compare two runs: recipe keys, code, machine, seed and models that differ, the first step whose
/// metrics differ, and the ends of the main curves. Exit code 1 if anything differs.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow diff runs/mine runs/other")]
pub struct Diff {
    /// The first run's folder.
    a: PathBuf,
    /// The second run's folder.
    b: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// A row of `metrics.jsonl`: step and numbers.
type Row = Result<(u64, StepMetrics)>;

/// Rows of a table: a name, and the values of both runs, `None` for absent.
type Pairs<T> = BTreeMap<String, [Option<T>; 2]>;

/// First step that the runs' `metrics.jsonl` disagree on.
#[derive(Debug, PartialEq)]
struct FirstStep {
    step: u64,
    /// Metrics that differ. A run without the step has none of them.
    metrics: Pairs<f64>,
    /// Metrics that either run has at this step.
    known: usize,
}

impl Diff {
    pub fn run(self) -> Result<()> {
        let folders = [self.a, self.b];
        let records = read_runs(&folders)?;
        let recipe = differences(&folders)?;
        let record = differing(facts(&records[0]), facts(&records[1]));
        let first = first_difference(rows(&folders[0])?, rows(&folders[1])?)?;
        let curves = CURVES.map(|name| (name, [0, 1].map(|run| records[run].metrics.get(name).map(|stats| stats.last_tenth))));
        let equal = recipe.is_empty() && record.is_empty() && first.is_none();
        text(&match self.json {
            true => {
                let first = first.map(|first| json!({"step": first.step, "metrics": numbers(first.metrics)}));
                let curves: Value = numbers(curves.map(|(name, ends)| (name.to_owned(), ends)));
                json!({"runs": folders, "equal": equal, "recipe": recipe, "record": record, "first_difference": first,
                    "last_tenth": curves})
                .to_string()
                    + "\n"
            }
            false => {
                let recipe: Pairs<String> = recipe.into_iter().map(|(key, of)| (key, [of[0].clone(), of[1].clone()])).collect();
                page(&folders, &recipe, &record, first.as_ref(), &curves)
            }
        })?;
        if equal { Ok(()) } else { Err(End::Said(1).into()) }
    }
}

/// The rows of a run in the order of steps; none if it has not come to a step.
fn rows(run: &Path) -> Result<Box<dyn Iterator<Item = Row>>> {
    let path = run.join("metrics.jsonl");
    Ok(match path.exists() {
        true => Box::new(metrics_rows(path)?.map(|row| Ok(row?))),
        false => Box::new(std::iter::empty()),
    })
}

/// Facts of a record that say which code ran, where, and from which models. Times are left out; the
/// recipe has pipeline and seed.
fn facts(record: &Record) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([
        ("state".to_owned(), record.state.word()),
        ("steps".to_owned(), record.steps.to_string()),
        ("resumes".to_owned(), record.sessions.len().saturating_sub(1).to_string()),
    ]);
    for Parent { key, path, .. } in &record.parents {
        facts.entry(key.clone()).and_modify(|all| *all += &format!(", {}", path.display())).or_insert(path.display().to_string());
    }
    if let Some(Session { version, git, machine, python, inputs, variables, error, .. }) = record.sessions.last() {
        facts.insert("version".to_owned(), version.clone());
        if let Some(git) = git {
            facts.insert("git commit".to_owned(), git.commit.clone());
            facts.insert("git uncommitted changes".to_owned(), git.changed.to_string());
        }
        let of_machine = [("host", &machine.host), ("system", &machine.system), ("processor", &machine.processor)];
        facts.extend(of_machine.map(|(name, value)| (format!("machine {name}"), value.clone())));
        facts.insert("machine threads".to_owned(), machine.threads.to_string());
        facts.insert("machine memory".to_owned(), format!("{} GiB", machine.memory_gib));
        let gpus = (!machine.gpus.is_empty()).then(|| ("machine GPUs".to_owned(), machine.gpus.join("; ")));
        facts.extend(gpus);
        facts.extend(inputs.iter().map(|(key, checksum)| (format!("contents of {key}"), checksum.clone())));
        facts.extend(variables.iter().map(|(name, value)| (format!("variable {name}"), value.clone())));
        facts.extend(python.iter().map(|(file, checksum)| (format!("python {file}"), checksum.clone())));
        facts.extend(error.iter().map(|error| ("error".to_owned(), error.clone())));
    }
    facts
}

/// Entries that differ, or that only one of both has.
fn differing<T: Clone + PartialEq>(a: BTreeMap<String, T>, b: BTreeMap<String, T>) -> Pairs<T> {
    let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let pairs = keys.into_iter().map(|key| (key.clone(), [a.get(key).cloned(), b.get(key).cloned()]));
    pairs.filter(|(_, [a, b])| a != b).collect()
}

/// The first step whose rows differ, or that only one of both has. It reads no further.
fn first_difference(mut a: impl Iterator<Item = Row>, mut b: impl Iterator<Item = Row>) -> Result<Option<FirstStep>> {
    loop {
        let (a, b) = match (a.next().transpose()?, b.next().transpose()?) {
            (None, None) => return Ok(None),
            rows => rows,
        };
        let step = a.iter().chain(&b).map(|(step, _)| *step).min().unwrap_or_default();
        // NaN equals NaN here, so bits are compared; 0 and -0 are one number.
        let at = |row: Option<(u64, StepMetrics)>| row.filter(|(at, _)| *at == step).map(|(_, row)| row).unwrap_or_default();
        let bits = |row: &StepMetrics| row.iter().map(|(name, value)| (name.clone(), (value + 0.0).to_bits())).collect();
        let both_have_it = [&a, &b].iter().all(|row| row.as_ref().is_some_and(|(at, _)| *at == step));
        let (a, b) = (at(a), at(b));
        let metrics: Pairs<u64> = differing(bits(&a), bits(&b));
        if !metrics.is_empty() || !both_have_it {
            let known = a.keys().chain(b.keys()).collect::<BTreeSet<_>>().len();
            let value = |(name, bits): (String, [Option<u64>; 2])| (name, bits.map(|bits| bits.map(f64::from_bits)));
            return Ok(Some(FirstStep { step, metrics: metrics.into_iter().map(value).collect(), known }));
        }
    }
}

/// Pairs of numbers as JSON.
fn numbers(pairs: impl IntoIterator<Item = (String, [Option<f64>; 2])>) -> Value {
    let pair = |(name, of): (String, [Option<f64>; 2])| (name, Value::from(of.map(|value| value.map(json_number)).to_vec()));
    pairs.into_iter().map(pair).collect::<serde_json::Map<_, _>>().into()
}

fn page(
    runs: &[PathBuf; 2],
    recipe: &Pairs<String>,
    record: &Pairs<String>,
    first: Option<&FirstStep>,
    curves: &[(&str, [Option<f64>; 2])],
) -> String {
    let absent = || "–".to_owned();
    let names = runs.each_ref().map(|run| untrusted::path(run));
    let row = |name: &str, cells: [String; 2]| {
        vec![format!("  {}", untrusted::line_of(name, CELL)), cells[0].clone(), cells[1].clone()]
    };
    let texts = |of: &[Option<String>; 2]| {
        of.each_ref().map(|text| text.as_ref().map_or_else(absent, |text| untrusted::line_of(text, CELL)))
    };
    let exact = |of: &[Option<f64>; 2]| of.map(|value| value.map_or_else(absent, |value| format!("{value:?}")));
    let title = |text: String| vec![text];
    let mut rows = vec![vec![String::new(), names[0].clone(), names[1].clone()]];
    for (what, pairs) in [("recipe", recipe), ("record", record)] {
        rows.push(title(format!("{what}: {}", count(pairs.len(), "difference"))));
        rows.extend(pairs.iter().map(|(name, of)| row(name, texts(of))));
    }
    match first {
        None => rows.push(title("metrics: no difference".to_owned())),
        Some(FirstStep { step, metrics, known }) => {
            rows.push(title(format!("metrics: first difference at step {step}, in {} of {known} metrics", metrics.len())));
            rows.extend(metrics.iter().take(SHOWN).map(|(name, of)| row(name, exact(of))));
            if metrics.len() > SHOWN {
                rows.push(title(format!("  and {} more, which --json lists", metrics.len() - SHOWN)));
            }
        }
    }
    rows.push(title("curves: mean over the last tenth of the steps".to_owned()));
    let known = curves.iter().filter(|(_, ends)| ends.iter().any(Option::is_some));
    rows.extend(known.map(|(name, ends)| row(name, ends.map(|end| end.map_or_else(absent, short)))));
    sections(&rows)
}

fn count(number: usize, what: &str) -> String {
    match number {
        0 => format!("no {what}"),
        1 => format!("1 {what}"),
        more => format!("{more} {what}s"),
    }
}

/// Rows with common columns. A row of one cell is a heading, whose width does not count.
fn sections(rows: &[Vec<String>]) -> String {
    let cells: Vec<Vec<String>> = rows.iter().filter(|row| row.len() > 1).cloned().collect();
    let table = aligned(&cells);
    let mut lines = table.lines();
    let line = |row: &Vec<String>| if row.len() > 1 { lines.next().unwrap_or_default().to_owned() } else { row[0].clone() };
    rows.iter().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64, of: &[(&str, f64)]) -> Row {
        Ok((step, of.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()))
    }

    fn first(a: Vec<Row>, b: Vec<Row>) -> Option<FirstStep> {
        first_difference(a.into_iter(), b.into_iter()).unwrap()
    }

    #[test]
    fn the_first_step_with_another_number_is_found_with_both_values() {
        let a = || vec![row(1, &[("loss", f64::NAN), ("zero", 0.0)]), row(2, &[("loss", 1.0), ("same", 2.0)])];
        let b = vec![row(1, &[("loss", f64::NAN), ("zero", -0.0)]), row(2, &[("loss", 3.0), ("same", 2.0), ("new", 4.0)])];
        let found = first(a(), b).unwrap();
        let metrics = [("loss".to_owned(), [Some(1.0), Some(3.0)]), ("new".to_owned(), [None, Some(4.0)])];
        assert_eq!(found, FirstStep { step: 2, metrics: metrics.into(), known: 3 });
        assert_eq!(first(a(), a()), None, "NaN equals NaN, and 0 equals -0");
    }

    #[test]
    fn a_step_that_only_one_run_has_is_a_difference() {
        let found = first(vec![row(1, &[("loss", 1.0)]), row(2, &[])], vec![row(1, &[("loss", 1.0)])]).unwrap();
        assert_eq!(found, FirstStep { step: 2, metrics: Pairs::new(), known: 0 });
        let found = first(vec![row(1, &[("loss", 1.0)])], vec![row(5, &[("loss", 1.0)])]).unwrap();
        assert_eq!((found.step, found.metrics["loss"]), (1, [Some(1.0), None]));
    }
}
