//! Sources of non-finite numbers (law N4).

use super::{PackedColumns, TrainBatch};
use crate::algo::LossOutput;
use crate::model::Head;

/// Names listed in one error; the rest is counted.
const NAMED: usize = 5;

/// Samples whose part of a loss is not finite, with the first such number, which `head` names;
/// `None` if all are finite.
pub(super) fn bad_samples(
    head: Head,
    batch: &TrainBatch,
    part: &[usize],
    columns: &PackedColumns,
    log_probs: &[f64],
    output: &LossOutput,
) -> Option<Vec<String>> {
    if output.loss.is_finite() && output.grad.iter().all(|slope| slope.is_finite()) {
        return None;
    }
    let given = match head {
        Head::LanguageModel => "log-probabilities",
        Head::Score => "scores",
    };
    let mut names = Vec::new();
    for (&at, range) in part.iter().zip(&columns.sequences) {
        let id = batch.sequences[at].id;
        let bad = |values: &[f64]| values[range.clone()].iter().any(|value| !value.is_finite());
        if bad(log_probs) {
            names.push(format!("{id} (the model's {given})"));
        } else if bad(&output.grad) {
            let why = if bad(&columns.advantages) { "it has no advantage" } else { "the loss itself" };
            names.push(format!("{id} ({why})"));
        }
    }
    if names.is_empty() {
        names.push("the loss's sum".into());
    }
    Some(names)
}

/// The first few names, and how many more there are.
pub(super) fn shorten(mut names: Vec<String>) -> Vec<String> {
    let more = names.len().saturating_sub(NAMED);
    if more > 0 {
        names.truncate(NAMED);
        names.push(format!("{more} more"));
    }
    names
}
