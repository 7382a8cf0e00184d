//! verl's sums, means and deviations under a mask.

use rollflow::algo::{masked_mean, masked_sum, masked_variance, whiten};

use crate::case::{Case, tensor};

pub fn statistics(case: &Case) -> Result<(), String> {
    case.only("inputs", &["values", "mask", "axis", "unbiased", "shift_mean"])?;
    let (values, mask) = (case.needed("values")?, case.needed("mask")?);
    let mask: Vec<f32> = mask.data.iter().map(|&mask| mask as f32).collect();
    let inputs = &case.value["inputs"];
    let by_row = match inputs["axis"].as_i64() {
        None => false,
        Some(-1 | 1) => true,
        Some(axis) => return Err(format!("axis is {axis}")),
    };
    let each = |of: fn(&[f64], &[f32]) -> f64| -> Vec<f64> {
        let part = if by_row { values.shape[1] } else { values.data.len() };
        values.data.chunks(part).zip(mask.chunks(part)).map(|(values, mask)| of(values, mask)).collect()
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
