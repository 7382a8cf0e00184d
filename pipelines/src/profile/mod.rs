//! Profile of a machine and a task for simulations: durations, and lengths and rewards of completions.
//! It is gathered from a real run or written by hand.

mod profiler;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rollflow::engine::Load;
use rollflow::engine::sampling::uniform;
use rollflow::util::atomic_file;
use serde::{Deserialize, Serialize};

pub use profiler::Profiler;

/// A machine and a task, in numbers. Times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Times of the generator's steps.
    pub decode: DecodeTimes,
    /// Times of other stages by name; a missing stage takes no time.
    pub stages: BTreeMap<String, ItemTimes>,
    /// Completions of the task.
    pub answers: Answers,
    /// Steps and duration of the recorded run, for comparison.
    pub recorded: Option<Recorded>,
}

/// Time that a stage takes for an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ItemTimes {
    /// For any.
    pub item: f64,
    /// For each of its tokens.
    #[serde(default)]
    pub token: f64,
}

impl ItemTimes {
    /// Time of an item with so many tokens.
    pub fn of(&self, tokens: usize) -> Duration {
        Duration::try_from_secs_f64(self.item + self.token * tokens as f64).unwrap_or_default()
    }
}

/// Lengths and rewards of completions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answers {
    /// Tokens and reward of each sample, prompt by prompt; starts again after the last.
    Recorded(Vec<Vec<(usize, f64)>>),
    /// Lengths from a log-normal distribution, rewards 1 with this probability and otherwise 0.
    Drawn {
        /// The median length, in tokens.
        median: f64,
        /// The spread of the logarithm: 0 makes all alike, 1 a heavy tail.
        sigma: f64,
        /// The probability of a reward.
        success: f64,
    },
}

impl Answers {
    /// Tokens and reward of a prompt's sample, always the same for the same seed.
    pub fn of(&self, seed: u64, ordinal: u64, index: u32) -> (usize, f64) {
        match self {
            Answers::Recorded(groups) => {
                let group = &groups[ordinal as usize % groups.len()];
                group[index as usize % group.len()]
            }
            Answers::Drawn { median, sigma, success } => {
                let draw = |position| uniform(seed, ordinal, index, position);
                let normal = (-2.0 * (1.0 - draw(0)).ln()).sqrt() * (std::f64::consts::TAU * draw(1)).cos();
                let tokens = (median * (sigma * normal).exp()).round().max(1.0);
                (tokens as usize, f64::from(draw(2) < *success))
            }
        }
    }

    /// Mean length of a completion, in tokens.
    pub fn mean(&self) -> f64 {
        match self {
            Answers::Recorded(groups) => {
                let lengths = groups.iter().flatten().map(|(tokens, _)| *tokens as f64);
                lengths.clone().sum::<f64>() / lengths.count().max(1) as f64
            }
            Answers::Drawn { median, sigma, .. } => median * (sigma * sigma / 2.0).exp(),
        }
    }
}

/// Size of a recorded run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// Number of steps.
    pub steps: u64,
    /// Wall-clock time in seconds.
    pub seconds: f64,
}

impl Profile {
    /// From a file of JSON.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("reading the profile {}", path.display()))?;
        let profile: Profile = serde_json::from_str(&text).with_context(|| format!("the profile {}", path.display()))?;
        match &profile.answers {
            Answers::Recorded(groups) if groups.is_empty() || groups.iter().any(Vec::is_empty) => {
                bail!("the profile {}: answers.recorded needs at least one group, and every group a sample", path.display())
            }
            Answers::Drawn { median, sigma, success } if !(*median >= 1.0 && *sigma >= 0.0 && (0.0..=1.0).contains(success)) => {
                bail!(
                    "the profile {}: answers.drawn needs a median of at least 1, a sigma of at least 0 and a success from 0 to 1",
                    path.display()
                )
            }
            _ => Ok(profile),
        }
    }

    /// To a file of JSON.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)?;
        atomic_file::write(path, text).with_context(|| format!("writing the profile {}", path.display()))
    }
}

/// Duration of an engine's steps, in seconds: linear in the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeTimes {
    /// Seconds for each pass through the model.
    pub pass: f64,
    /// Seconds for each generated token.
    pub row: f64,
    /// Seconds for each prefilled token.
    pub prefill: f64,
}

impl DecodeTimes {
    /// Seconds of one step of an engine that has this share of the rows and the prefill.
    pub fn step(&self, load: Load, share: f64) -> f64 {
        self.pass * load.passes as f64 + share * (self.row * load.rows as f64 + self.prefill * load.prefill as f64)
    }
}

/// Fits times to an engine's steps: their sum is exact, the parts are least squares.
pub fn fit_decode(steps: impl Iterator<Item = Load>) -> DecodeTimes {
    let row = |load: Load| ([load.passes, load.rows, load.prefill].map(|count| count as f64), load.time.as_secs_f64());
    let rows: Vec<([f64; 3], f64)> = steps.map(row).collect();
    let [pass, row, prefill] = fit(&rows);
    DecodeTimes { pass, row, prefill }
}

/// Solves non-negative least squares by coordinate descent, scaled so that predictions and
/// measurements have equal sums.
fn fit<const N: usize>(rows: &[([f64; N], f64)]) -> [f64; N] {
    let mut coefficients = [0.0; N];
    let predicted = |coefficients: &[f64; N], x: &[f64; N]| -> f64 { x.iter().zip(coefficients).map(|(x, c)| x * c).sum() };
    for _ in 0..1000 {
        for at in 0..N {
            let square: f64 = rows.iter().map(|(x, _)| x[at] * x[at]).sum();
            if square > 0.0 {
                let residual: f64 = rows.iter().map(|(x, y)| x[at] * (y - predicted(&coefficients, x))).sum();
                coefficients[at] = (coefficients[at] + residual / square).max(0.0);
            }
        }
    }
    let sum: f64 = rows.iter().map(|(x, _)| predicted(&coefficients, x)).sum();
    let measured: f64 = rows.iter().map(|(_, y)| y).sum();
    if sum > 0.0 {
        coefficients.iter_mut().for_each(|coefficient| *coefficient *= measured / sum);
    }
    coefficients
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_again_in_what_they_made() {
        let times = DecodeTimes { pass: 1e-3, row: 2e-5, prefill: 5e-6 };
        let step = |n: usize| {
            let prefill = if n.is_multiple_of(5) { 40 * (n % 3) } else { 0 };
            let load = Load { passes: 1 + n % 2, rows: (n * 7) % 64, prefill, ..Load::default() };
            Load { time: Duration::from_secs_f64(times.step(load, 1.0)), ..load }
        };
        let steps: Vec<Load> = (0..200).map(step).collect();
        let found = fit_decode(steps.into_iter());
        for (found, expected) in [(found.pass, times.pass), (found.row, times.row), (found.prefill, times.prefill)] {
            assert!((found - expected).abs() < 1e-2 * expected, "{found} is {expected}");
        }
    }

    #[test]
    fn drawn_answers_have_the_median_and_the_success_that_were_asked_for() {
        let answers = Answers::Drawn { median: 100.0, sigma: 1.0, success: 0.3 };
        let mut drawn: Vec<(usize, f64)> = (0..4000).map(|ordinal| answers.of(7, ordinal, 1)).collect();
        let success = drawn.iter().map(|(_, reward)| reward).sum::<f64>() / drawn.len() as f64;
        drawn.sort_by_key(|(tokens, _)| *tokens);
        assert!((90..110).contains(&drawn[2000].0), "{:?}", drawn[2000]);
        assert!(drawn[3600].0 > 300, "a heavy tail: {:?}", drawn[3600]);
        assert!((0.27..0.33).contains(&success), "{success}");
    }
}
