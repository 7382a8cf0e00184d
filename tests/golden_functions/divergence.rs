//! verl's divergence penalties, and the controller of their coefficient.

use rollflow::algo::{KlForm, KlLoss, KlReward, kl_per_token};

use crate::case::{Case, Tensor};

pub fn penalty(case: &Case) -> Result<(), String> {
    case.only("inputs", &["logprob", "ref_logprob", "response_mask_for_grad"])?;
    let variant = case.name.split('/').nth(1).ok_or("the case does not name its penalty")?;
    let word = variant.trim_end_matches("_clamps");
    let estimator = match word.trim_end_matches('+') {
        "kl" | "k1" => KlForm::K1,
        "abs" => KlForm::Abs,
        "mse" | "k2" => KlForm::K2,
        "low_var_kl" | "k3" => KlForm::LowVariance,
        other => return Err(format!("penalty {other} is unknown")),
    };
    let kl = KlLoss { estimator, straight_through: word.ends_with('+'), ..KlLoss::default() };
    let (values, slopes): (Vec<f64>, Vec<f64>) =
        kl_per_token(&case.needed("logprob")?.data, &case.needed("ref_logprob")?.data, &kl).into_iter().unzip();
    case.close("value", &values, &case.expected("value")?)?;
    if let Some(mask) = case.input("response_mask_for_grad") {
        let slopes: Vec<f64> = slopes.iter().zip(&mask.data).map(|(slope, mask)| slope * mask).collect();
        case.close("grad_of_masked_sum", &slopes, &case.expected("grad_of_masked_sum")?)?;
    }
    Ok(())
}

pub fn controller(case: &Case) -> Result<(), String> {
    case.only("inputs", &["init", "target", "horizon", "updates"])?;
    let inputs = &case.value["inputs"];
    let number = |name: &str| inputs[name].as_f64().ok_or_else(|| format!("input {name} is missing"));
    let control = KlReward { target: Some(number("target")?), horizon: number("horizon")?, ..KlReward::default() };
    let mut coef = number("init")?;
    let mut found = Vec::new();
    for update in inputs["updates"].as_array().ok_or("updates are missing")? {
        let (kl, samples) = update[0].as_f64().zip(update[1].as_u64()).ok_or("an update is a divergence and a count")?;
        coef = control.next_coef(coef, kl, samples);
        found.push(coef);
    }
    let expected = case.value["expected"].as_array().ok_or("expected is no list")?;
    let data: Vec<f64> = expected.iter().filter_map(|value| value.as_f64()).collect();
    case.close("coefficients", &found, &Tensor { dtype: "float64".into(), shape: vec![data.len()], data })
}
