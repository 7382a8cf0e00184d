//! TRL's losses of pairs: the DPO family, and reward models.

use rollflow::algo::{
    Aggregation, BatchSize, Loss, LossInputs, PairLoss, PairMetrics, Preference, ScoreDivergence, pairwise_reward,
};
use serde_json::Value;

use crate::case::{Case, Tensor, scalar};
use crate::packing::Packing;

const CONFIG: &[&str] = &[
    "loss_type",
    "loss_weights",
    "beta",
    "label_smoothing",
    "ld_alpha",
    "f_divergence_type",
    "f_alpha_divergence_coef",
    "use_weighting",
    "discopop_tau",
];

pub fn dpo(case: &Case) -> Result<(), String> {
    // TRL takes a count of items for it and reads it nowhere.
    let columns = ["per_token_logps", "ref_per_token_logps", "completion_mask", "log_sum_sq_probs"];
    case.only("inputs", &[&columns[..], &["beta", "num_items_in_batch"]].concat())?;
    case.only("config", CONFIG)?;
    let loss = composed(case)?;
    // Position t scores token t + 1.
    let mask = case.needed("completion_mask")?;
    let (rows, columns) = (mask.shape[0], mask.shape[1]);
    let shifted = mask.data.chunks(columns).flat_map(|row| row[1..].to_vec()).collect();
    let packing = Packing::new(&Tensor { dtype: mask.dtype.clone(), shape: vec![rows, columns - 1], data: shifted });
    let column = |name: &str| case.needed(name).map(|tensor| packing.pack(&tensor));
    let (log_probs, reference) = (column("per_token_logps")?, column("ref_per_token_logps")?);
    let squares = case.input("log_sum_sq_probs").map(|tensor| packing.pack(&tensor));
    // TRL has all chosen completions before all rejected ones.
    let (chosen, rejected) = packing.sequences.split_at(rows / 2);
    let sequences: Vec<_> =
        chosen.iter().zip(rejected).flat_map(|(chosen, rejected)| [chosen.clone(), rejected.clone()]).collect();
    let masks: Vec<Vec<f32>> = packing.sequences.iter().map(|at| vec![1.0; at.len()]).collect();
    let weights = Aggregation::SeqMeanTokenMean.token_weights(&masks, &BatchSize::of(&masks)).concat();
    let inputs = LossInputs {
        log_probs: &log_probs,
        reference: Some(&reference),
        log_sum_squares: squares.as_deref(),
        weights: &weights,
        sequences: &sequences,
        batch_tokens: log_probs.len(),
        ..LossInputs::default()
    };
    let output = loss.evaluate(&inputs).map_err(|error| error.to_string())?;
    case.close("loss", &[output.loss], &case.expected("loss")?)?;
    case.close("grad_per_token_logps", &packing.unpack(&output.grad), &case.expected("grad_per_token_logps")?)?;
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = metric(name, &output.metrics.pairs)?;
        case.close_number(name, actual, scalar(expected))?;
    }
    Ok(())
}

fn metric(name: &str, seen: &PairMetrics) -> Result<f64, String> {
    let mean = |sum: f64| sum / seen.pairs as f64;
    Ok(match name {
        "rewards/chosen" => mean(seen.score_sums[0]),
        "rewards/rejected" => mean(seen.score_sums[1]),
        "rewards/accuracies" => seen.accuracy(),
        "rewards/margins" => seen.margin(),
        "logps/chosen" => mean(seen.log_prob_sums[0]),
        "logps/rejected" => mean(seen.log_prob_sums[1]),
        name => return Err(format!("metric {name} is unknown")),
    })
}

fn composed(case: &Case) -> Result<Preference, String> {
    let config = &case.value["config"];
    let number = |name: &str| config[name].as_f64();
    let names: Vec<&str> = match &config["loss_type"] {
        Value::Null => vec!["sigmoid"],
        Value::String(name) => vec![name],
        names => names.as_array().into_iter().flatten().filter_map(Value::as_str).collect(),
    };
    // TRL's names are ours.
    let term = |name: &str| {
        let known = PairLoss::ALL.iter().find(|term| term.word() == name);
        known.copied().ok_or_else(|| format!("loss_type {name} is unknown"))
    };
    let terms = names.into_iter().map(term).collect::<Result<Vec<PairLoss>, String>>()?;
    let weights: Vec<f64> = match config["loss_weights"].as_array() {
        Some(weights) => weights.iter().filter_map(Value::as_f64).collect(),
        None => vec![1.0; terms.len()],
    };
    let divergence = match config["f_divergence_type"].as_str() {
        None | Some("reverse_kl") => ScoreDivergence::ReverseKl,
        Some("forward_kl") => ScoreDivergence::ForwardKl,
        Some("js_divergence") => ScoreDivergence::JensenShannon,
        Some("alpha_divergence") => ScoreDivergence::Alpha(number("f_alpha_divergence_coef").unwrap_or(0.5)),
        Some(name) => return Err(format!("f_divergence_type {name} is unknown")),
    };
    Ok(Preference {
        terms: terms.into_iter().zip(weights).collect(),
        beta: case.value["inputs"]["beta"].as_f64().or(number("beta")).ok_or("beta is missing")?,
        label_smoothing: number("label_smoothing").unwrap_or(0.0),
        tau: number("discopop_tau").unwrap_or(0.05),
        divergence,
        tail_weight: number("ld_alpha"),
        weigh: config["use_weighting"] == true,
        reference_free: false,
    })
}

pub fn reward(case: &Case) -> Result<(), String> {
    case.only("inputs", &["rewards", "margin", "num_items_in_batch"])?;
    case.only("config", &["center_rewards_coefficient"])?;
    let scores = case.needed("rewards")?.data;
    let (chosen, rejected) = scores.split_at(scores.len() / 2);
    let margins = case.input("margin").map(|margins| margins.data);
    let center = case.value["config"]["center_rewards_coefficient"].as_f64().unwrap_or(0.0);
    let output = pairwise_reward(chosen, rejected, margins.as_deref(), center, chosen.len());
    case.close("loss", &[output.loss], &case.expected("loss")?)?;
    case.close("grad", &[output.chosen, output.rejected].concat(), &case.expected("grad")?)?;
    let pairs = || chosen.iter().zip(rejected);
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "accuracy" => pairs().filter(|(won, lost)| won > lost).count() as f64 / chosen.len() as f64,
            "margin" => pairs().map(|(won, lost)| won - lost).sum::<f64>() / chosen.len() as f64,
            // Of the scores themselves and of how they were made.
            "num_tokens" | "min_reward" | "mean_reward" | "max_reward" => continue,
            name => return Err(format!("metric {name} is unknown")),
        };
        case.close_number(name, actual, scalar(expected))?;
    }
    Ok(())
}
