//! verl's sums, means and deviations under a mask.

use rollflow::algo::{masked_mean, masked_sum, masked_variance, whiten};

use crate::case::{Case, tensor};

pub fn statistics(case: &Case) -> Result<(), String> {
    case.only("inputs", &["values", "mask", "axis", "unbiased", "shift_mean"])?;
    let (values, mask) = (case.needed("values")?, case.needed("mask")?);
    let mask: Vec<f32> = mask.data.iter().map(|&mask| mask as f32).collect();
    let inputs = &case.value["inputs"];
    let columns = values.shape.get(1).copied().unwrap_or(1);
    let whole = 0..values.data.len();
    // The stretch of each part, and the distance from one of its numbers to the next.
    let (parts, step) = match inputs["axis"].as_i64() {
        None => (vec![whole], 1),
        Some(-1 | 1) => ((0..values.shape[0]).map(|row| row * columns..(row + 1) * columns).collect(), 1),
        Some(-2 | 0) => ((0..columns).map(|column| column..values.data.len()).collect(), columns),
        Some(axis) => return Err(format!("axis is {axis}")),
    };
    let each = |of: fn(&[f64], &[f32]) -> f64| -> Vec<f64> {
        let part = |at: &std::ops::Range<usize>| -> (Vec<f64>, Vec<f32>) {
            at.clone().step_by(step).map(|at| (values.data[at], mask[at])).unzip()
        };
        parts.iter().map(part).map(|(values, mask)| of(&values, &mask)).collect()
    };
    let called = case.value["called"].as_str().ok_or("what was called is missing")?;
    let found = match called.trim_start_matches("torch_functional.") {
        "masked_sum" => each(masked_sum),
        "masked_mean" => each(masked_mean),
        "masked_var" => vec![masked_variance(&values.data, &mask, inputs["unbiased"] != false)],
        "masked_whiten" => whiten(&values.data, &mask, inputs["shift_mean"] != false),
        called => return Err(format!("{called} is unknown")),
    };
    case.close(case.kind(), &found, &tensor(&case.value["expected"]))
}
