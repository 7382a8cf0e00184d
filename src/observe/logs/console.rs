//! Lines on the console: the beginning of a run, and one line per step: `Step 12: reward=0.43
//! loss=0.0214 grad_norm=0.81 lr=2e-4`.

use std::fmt::Display;

use super::{Every, MetricsLogger, StepMetrics};
use crate::observe::Metric;

/// Metrics of the line in this order, with their names.
const SHOWN: [(Metric, &str); 6] = [
    (Metric::RewardMean, "reward"),
    (Metric::PairAccuracy, "accuracy"),
    (Metric::PairMargin, "margin"),
    (Metric::Loss, "loss"),
    (Metric::GradNorm, "grad_norm"),
    (Metric::LearningRate, "lr"),
];

/// Returns a logger that gives `print` a line for the first step and every `every`-th; 0 prints
/// none. With `|line| tracing::info!("{line}")`, a [`Console`](crate::observe::Console) or another
/// subscriber shows them.
pub fn log_to_console(every: impl Into<Every>, mut print: impl FnMut(&str) + Send) -> impl MetricsLogger {
    let every = every.into();
    move |step: u64, metrics: &StepMetrics| {
        if every.records(step) {
            print(&console_line(step, metrics));
        }
    }
}

/// Logs the beginning of training of this kind (`SFT`, `RL`), and a line for each fact about it, as
/// `tracing` events.
pub fn announce_training(kind: &str, facts: &[(&str, &dyn Display)]) {
    tracing::info!("Starting {kind} training…");
    facts.iter().for_each(|(name, value)| tracing::info!("  {name}: {value}"));
}

/// The line of one step; what the row lacks is left out.
pub fn console_line(step: u64, metrics: &StepMetrics) -> String {
    let shown = SHOWN.iter().filter_map(|(metric, name)| Some(format!(" {name}={}", short(*metrics.get(metric.key())?))));
    format!("Step {step}:{}", shown.collect::<String>())
}

/// About four digits: `0.0214`, `12.35`, `2e-5`.
pub fn short(value: f64) -> String {
    let trimmed = |digits: &str| match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => digits.to_owned(),
    };
    let size = value.abs();
    if value == 0.0 {
        // Of either sign.
        "0".to_owned()
    } else if !value.is_finite() {
        value.to_string()
    } else if (0.001..10_000.0).contains(&size) {
        let decimals = (3 - size.log10().floor() as i32).clamp(0, 4) as usize;
        trimmed(&format!("{value:.decimals$}"))
    } else {
        let digits = format!("{value:.2e}");
        digits.split_once('e').map_or(digits.clone(), |(number, power)| format!("{}e{power}", trimmed(number)))
    }
}
