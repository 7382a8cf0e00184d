//! TRL's GRPO-family losses: value, gradient and metrics.

use rollflow::algo::{Aggregation, Grpo, Loss, LossInputs};

use crate::case::Case;
use crate::packing::Packing;

const INPUTS: &[&str] = &[
    "per_token_logps",
    "entropies",
    "completion_mask",
    "advantages",
    "num_items_in_batch",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
];

const CONFIG: &[&str] = &[
    "loss_type",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "use_bias_correction_kl",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "entropy_coef",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "max_completion_length",
    "importance_sampling_level",
];

pub fn loss(case: &Case) -> Result<(), String> {
    case.only("inputs", INPUTS)?;
    case.only("config", CONFIG)?;
    let setting = |name: &str| case.value["resolved"][name].as_f64();
    let needed = |name: &str| setting(name).ok_or_else(|| format!("resolved {name} is missing"));
    if case.value["resolved"]["importance_sampling_level"] != "token" {
        return Err("importance_sampling_level is not token".into());
    }
    let grpo = Grpo {
        clip_low: needed("epsilon_low")?,
        clip_high: needed("epsilon_high")?,
        delta: setting("delta"),
        beta: needed("beta")?,
        unbiased_kl: case.value["resolved"]["use_bias_correction_kl"] == true,
        top_entropy: needed("top_entropy_quantile")?,
        off_policy_threshold: setting("off_policy_mask_threshold"),
        entropy_coef: needed("entropy_coef")?,
    };

    let mask = case.needed("completion_mask")?;
    let packing = Packing::new(&mask);
    let column = |name: &str| case.input(name).map(|tensor| packing.pack(&tensor));
    let log_probs = packing.pack(&case.needed("per_token_logps")?);
    let entropies = packing.pack(&case.needed("entropies")?);
    let advantages = packing.pack(&case.needed("advantages")?);
    let weights = weights(case, &packing, needed("gradient_accumulation_steps")?, needed("max_completion_length")?)?;
    let (behaviour, proximal) = (column("sampling_per_token_logps"), column("old_per_token_logps"));
    let (reference, importance) = (column("ref_per_token_logps"), column("importance_sampling_ratio"));
    let inputs = LossInputs {
        log_probs: &log_probs,
        behaviour: behaviour.as_deref(),
        proximal: proximal.as_deref(),
        reference: reference.as_deref(),
        importance: importance.as_deref(),
        entropies: &entropies,
        advantages: &advantages,
        weights: &weights,
        sequences: &packing.sequences,
        batch_tokens: packing.kept.len(),
    };
    let output = grpo.evaluate(&inputs).map_err(|error| error.to_string())?;

    case.close("loss", &[output.loss], &case.expected("loss")?)?;
    case.close("grad_per_token_logps", &packing.unpack(&output.grad), &case.expected("grad_per_token_logps")?)?;
    let tokens = packing.kept.len() as f64;
    let metrics = &output.metrics;
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "kl" => metrics.kl(),
            "entropy" => entropies.iter().sum::<f64>() / tokens,
            "entropy_coef" => grpo.entropy_coef,
            "policy_loss" => metrics.policy_loss,
            "clip_ratio/low_mean" => metrics.clipped_low as f64 / tokens,
            "clip_ratio/high_mean" => metrics.clipped_high as f64 / tokens,
            "clip_ratio/region_mean" => metrics.clip_fraction(),
            "clip_ratio/low_min" => metrics.clip_low_min.unwrap_or(f64::NAN),
            "clip_ratio/high_max" => metrics.clip_high_max.unwrap_or(f64::NAN),
            name => return Err(format!("metric {name} is unknown")),
        };
        let expected = expected.as_f64().unwrap_or(f64::NAN);
        // TRL counts clipped tokens in single precision.
        match name.starts_with("clip_ratio/") {
            true => case.close_single(name, actual, expected)?,
            false => case.close_number(name, actual, expected)?,
        }
    }
    Ok(())
}

/// One case is one micro-batch of TRL's. Its `dapo` divides by the whole batch's tokens, which are given; the other three divide
/// by the micro-batch's own denominator times the number of micro-batches.
fn weights(case: &Case, packing: &Packing, micro_batches: f64, max_len: f64) -> Result<Vec<f64>, String> {
    let masks: Vec<Vec<f32>> = packing.sequences.iter().map(|sequence| vec![1.0; sequence.len()]).collect();
    let (aggregation, share) = match case.kind() {
        "grpo" => (Aggregation::SeqMeanTokenMean, 1.0 / micro_batches),
        "bnpo" => (Aggregation::TokenMean, 1.0 / micro_batches),
        "dr_grpo" => (Aggregation::DrGrpo { max_len: max_len as usize }, 1.0 / micro_batches),
        "dapo" => (Aggregation::TokenMean, packing.kept.len() as f64 / case.needed("num_items_in_batch")?.data[0]),
        kind => return Err(format!("{kind} has no aggregation")),
    };
    Ok(aggregation.token_weights(&masks).into_iter().flatten().map(|weight| weight * share).collect())
}
