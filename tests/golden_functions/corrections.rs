//! TRL's and verl's corrections for tokens of another policy: importance weights, rejection masks, and their metrics.

use rollflow::algo::{ComparedToken, Divergence, Importance, Level, LogProbGap, OffPolicy, Over, Rejection, Spread};
use serde_json::Value;

use crate::case::{Case, Tensor};
use crate::packing::Packing;

/// TRL's `vllm_importance_sampling_mode`. Without a log-probability from the engine a token counts as on policy.
pub fn trl(case: &Case) -> Result<(), String> {
    case.only("config", &["beta", "num_generations", "vllm_importance_sampling_mode", "clip_min", "clip_max"])?;
    let config = &case.value["config"];
    let max = config["clip_max"].as_f64().ok_or("clip_max is missing")?;
    let min = config["clip_min"].as_f64();
    let mode = config["vllm_importance_sampling_mode"].as_str().ok_or("the mode is missing")?;
    let (level, mask) = match mode {
        "token_truncate" => (Level::Token, false),
        "token_mask" => (Level::Token, true),
        "sequence_truncate" => (Level::Sequence, false),
        "sequence_mask" => (Level::Sequence, true),
        mode => return Err(format!("{mode} is unknown")),
    };
    let packing = Packing::new(&case.expected("completion_mask")?);
    let trainer = packing.pack(&case.needed("old_per_token_logps")?);
    let sampled = packing.pack(&case.expected("sampling_per_token_logps")?);
    let behaviour: Vec<f64> = sampled.iter().zip(&trainer).map(|(b, own)| if b.is_nan() { *own } else { *b }).collect();
    let weigh = Some(Importance { level, min, max, mask, normalize: false });
    let correction = OffPolicy { weigh, ..OffPolicy::default() };
    let (factors, metrics) = correction.factors(&trainer, &trainer, &behaviour, &packing.sequences);

    let expected = case.expected("importance_sampling_ratio")?;
    let found = match level {
        // TRL leaves padding at ratio 1.
        Level::Token => packing.unpack_over(&factors, 1.0),
        _ => packing.sequences.iter().map(|at| factors[at.start]).collect(),
    };
    case.close("importance_sampling_ratio", &found, &expected)?;

    let weights: Vec<f64> = if level == Level::Token { factors } else { found };
    let gap = gap(&packing, &trainer, &sampled);
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "sampling/sampling_logp_difference/mean" => gap.mean(),
            "sampling/sampling_logp_difference/max" => gap.max(),
            "sampling/importance_sampling_ratio/min" => weights.iter().copied().fold(f64::INFINITY, f64::min),
            "sampling/importance_sampling_ratio/max" => weights.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            "sampling/importance_sampling_ratio/mean" if level == Level::Token => metrics.weights.mean(),
            "sampling/importance_sampling_ratio/mean" => metrics.weights.sequences.mean(),
            // What the rewards were is `trl_grpo_advantages`'s matter.
            name if name.starts_with("reward") || name == "frac_reward_zero_std" => continue,
            name => return Err(format!("metric {name} is unknown")),
        };
        case.close_single(name, actual, expected.as_f64().unwrap_or(f64::NAN))?;
    }
    Ok(())
}

/// verl's `compute_rollout_correction_weights`.
pub fn weights(case: &Case) -> Result<(), String> {
    case.only("inputs", &["log_ratio", "response_mask", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"])?;
    let inputs = &case.value["inputs"];
    let level = match inputs["rollout_is"].as_str() {
        Some("token") => Level::Token,
        Some("sequence") => Level::Sequence,
        level => return Err(format!("level {level:?} is unknown")),
    };
    let (min, max) = threshold(&inputs["rollout_is_threshold"])?;
    let normalize = inputs["rollout_is_batch_normalize"] == true;
    let weigh = Some(Importance { level, min, max, mask: min.is_some(), normalize });
    let correction = OffPolicy { weigh, ..OffPolicy::default() };
    let packing = Packing::new(&case.needed("response_mask")?);
    let log_ratios = packing.pack(&case.needed("log_ratio")?);
    let on_policy = vec![0.0; log_ratios.len()];
    let (factors, metrics) = correction.factors(&log_ratios, &log_ratios, &on_policy, &packing.sequences);
    case.close("weights", &packing.unpack(&factors), &case.expected("weights")?)?;
    let seen = &metrics.weights;
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let of = name.strip_prefix("rollout_is_").unwrap_or(name);
        let actual = match of {
            "ratio_fraction_high" => seen.units.high(),
            "ratio_fraction_low" => seen.units.low(),
            "eff_sample_size" => seen.effective_sample_share(),
            "oob_ratio" => metrics.dropped_token_share(),
            "batch_norm_factor" if level == Level::Token => seen.mean(),
            "batch_norm_factor" => seen.sequences.mean(),
            of => spread(seen, of, 1.0)?,
        };
        case.close_number(name, actual, expected.as_f64().unwrap_or(f64::NAN))?;
    }
    Ok(())
}

/// verl's `compute_rollout_rejection_mask`.
pub fn rejection(case: &Case) -> Result<(), String> {
    case.only("inputs", &["log_ratio", "response_mask", "rollout_rs", "rollout_rs_threshold"])?;
    let inputs = &case.value["inputs"];
    let mode = inputs["rollout_rs"].as_str().ok_or("rollout_rs is missing")?;
    let (over, divergence) = mode.rsplit_once('_').ok_or_else(|| format!("{mode} is unknown"))?;
    // verl's words are ours, but for `seq_` in front of a reduction.
    let known = Over::ALL.iter().find(|known| known.word() == over.trim_start_matches("seq_"));
    let over = *known.ok_or_else(|| format!("{over} is unknown"))?;
    let known = Divergence::ALL.iter().find(|known| known.word() == divergence);
    let divergence = *known.ok_or_else(|| format!("{divergence} is unknown"))?;
    let (min, max) = threshold(&inputs["rollout_rs_threshold"])?;
    let correction = OffPolicy { reject: vec![Rejection { divergence, over, min, max }], ..OffPolicy::default() };
    let packing = Packing::new(&case.needed("response_mask")?);
    let log_ratios = packing.pack(&case.needed("log_ratio")?);
    let on_policy = vec![0.0; log_ratios.len()];
    let (factors, metrics) = correction.factors(&log_ratios, &log_ratios, &on_policy, &packing.sequences);
    case.close("mask", &packing.unpack(&factors), &case.expected("mask")?)?;
    let own = format!("rollout_rs_{mode}_");
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        // One rejection is both the option and the whole.
        let of = name.strip_prefix(&own).or(name.strip_prefix("rollout_rs_")).unwrap_or(name);
        let actual = match of {
            "masked_fraction" => metrics.dropped_token_share(),
            "seq_masked_fraction" => metrics.dropped_sequence_share(),
            "fraction_high" => metrics.rejections[0].units.high(),
            "fraction_low" => metrics.rejections[0].units.low(),
            of => spread(&metrics.rejections[0], of, 0.0)?,
        };
        case.close_number(name, actual, expected.as_f64().unwrap_or(f64::NAN))?;
    }
    Ok(())
}

/// verl's `compute_offpolicy_metrics`.
pub fn off_policy(case: &Case) -> Result<(), String> {
    case.only("inputs", &["old_log_prob", "rollout_log_prob", "response_mask"])?;
    let packing = Packing::new(&case.needed("response_mask")?);
    let column = |name: &str| case.needed(name).map(|tensor: Tensor| packing.pack(&tensor));
    let gap = gap(&packing, &column("old_log_prob")?, &column("rollout_log_prob")?);
    let sequences = &gap.sequences;
    let mean = |sum: f64| sum / sequences.sequences as f64;
    let range = sequences.range.ok_or("no sequence was compared")?;
    for (name, expected) in case.value["expected"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "training_ppl" => mean(sequences.trainer.1),
            "training_log_ppl" => mean(sequences.trainer.0),
            "rollout_ppl" => mean(sequences.behaviour.1),
            "rollout_log_ppl" => mean(sequences.behaviour.0),
            "kl" => gap.k1(),
            "k3_kl" => gap.approx_kl(),
            "log_ppl_diff" => mean(sequences.trainer.0) - mean(sequences.behaviour.0),
            "log_ppl_abs_diff" => mean(sequences.abs_sum),
            "log_ppl_diff_max" => range.1,
            "log_ppl_diff_min" => range.0,
            "ppl_ratio" => sequences.perplexity_ratio(),
            "chi2_token" => gap.chi2(),
            "chi2_seq" => sequences.chi2(),
            name => return Err(format!("metric {name} is unknown")),
        };
        case.close_number(name, actual, expected.as_f64().unwrap_or(f64::NAN))?;
    }
    Ok(())
}

/// `2.0`, or `"0.5_2.0"`.
fn threshold(value: &Value) -> Result<(Option<f64>, f64), String> {
    let number = |text: &str| text.parse::<f64>().map_err(|error| format!("threshold {text}: {error}"));
    match value {
        Value::String(both) => {
            let (min, max) = both.split_once('_').ok_or_else(|| format!("threshold {both}"))?;
            Ok((Some(number(min)?), number(max)?))
        }
        value => Ok((None, value.as_f64().ok_or("the threshold is missing")?)),
    }
}

/// The numbers that weights and divergences have in common.
fn spread(of: &Spread, name: &str, ideal: f64) -> Result<f64, String> {
    Ok(match name {
        "mean" => of.mean(),
        "min" => of.units.min,
        "max" => of.units.max,
        "std" => of.std(),
        "seq_mean" => of.sequences.mean(),
        "seq_std" => of.sequences.std(),
        "seq_min" => of.sequences.min,
        "seq_max" => of.sequences.max,
        "seq_max_deviation" => (of.sequences.max - ideal).abs().max((of.sequences.min - ideal).abs()),
        "seq_fraction_high" => of.sequences.high(),
        "seq_fraction_low" => of.sequences.low(),
        name => return Err(format!("metric {name} is unknown")),
    })
}

/// Over the tokens whose behaviour log-probability is known.
fn gap(packing: &Packing, trainer: &[f64], behaviour: &[f64]) -> LogProbGap {
    let mut gap = LogProbGap::default();
    for sequence in &packing.sequences {
        let known = sequence.clone().filter(|&at| !behaviour[at].is_nan());
        let token = |at| ComparedToken { trainer: trainer[at], behaviour: behaviour[at], ..ComparedToken::default() };
        gap.add_sequence(&known.map(token).collect::<Vec<_>>());
    }
    gap
}
