//! TRL's and verl's corrections for tokens of another policy: importance weights, rejection masks, and their metrics.

use rollflow::algo::{ComparedToken, Divergence, Importance, Level, LogProbGap, OffPolicy, Over, Rejection, Spread};
use serde_json::Value;

use crate::aggregation::GUARD;
use crate::case::{Case, Tensor, scalar};
use crate::packing::Packing;

/// TRL's `vllm_importance_sampling_mode`. Without a log-probability from the engine a token counts as on policy.
pub fn trl(case: &Case) -> Result<(), String> {
    let known = ["vllm_importance_sampling_mode", "clip_min", "clip_max", "mask_truncated_completions"];
    case.only("config", &[&known[..], &["beta", "num_generations"]].concat())?;
    let config = &case.value["config"];
    // `null` is no bound.
    let max = match config.get("clip_max") {
        Some(Value::Null) => f64::INFINITY,
        max => max.and_then(Value::as_f64).ok_or("clip_max is missing")?,
    };
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
    // Padding has ratio 1 in TRL, which its bounds hold for too.
    let (lowest, highest) = (min.unwrap_or(0.0), max);
    let padding = match mask {
        true => f64::from(u8::from((lowest..=highest).contains(&1.0))),
        false => 1f64.max(lowest).min(highest),
    };
    let found = match level {
        Level::Token => packing.unpack_over(&factors, padding),
        _ => packing.sequences.iter().map(|at| if at.is_empty() { padding } else { factors[at.start] }).collect(),
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
            "sampling/importance_sampling_ratio/mean" => weights.iter().sum::<f64>() / weights.len() as f64,
            // What the rewards were is `trl_grpo_advantages`'s matter.
            name if name.starts_with("reward") || name == "frac_reward_zero_std" => continue,
            name => return Err(format!("metric {name} is unknown")),
        };
        case.close_single(name, actual, scalar(expected))?;
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
    let bounds = thresholds(&inputs["rollout_is_threshold"])?;
    let [(min, max)] = bounds[..] else { return Err("there are several thresholds".into()) };
    let normalize = inputs["rollout_is_batch_normalize"] == true;
    let weigh = Some(Importance { level, min, max, mask: min.is_some(), normalize });
    let correction = OffPolicy { weigh, ..OffPolicy::default() };
    let packing = Packing::new(&case.needed("response_mask")?);
    let log_ratios = packing.pack(&case.needed("log_ratio")?);
    let on_policy = vec![0.0; log_ratios.len()];
    let (factors, metrics) = correction.factors(&log_ratios, &log_ratios, &on_policy, &packing.sequences);
    case.close("weights", &packing.unpack(&factors), &case.expected("weights")?)?;
    let seen = &metrics.weights;
    let (of_tokens, of_units) = (guarded(&packing), if level == Level::Token { guarded(&packing) } else { 1.0 });
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let of = name.strip_prefix("rollout_is_").unwrap_or(name);
        let actual = match of {
            "ratio_fraction_high" => seen.units.high() * of_units,
            "ratio_fraction_low" => seen.units.low() * of_units,
            "eff_sample_size" => seen.effective_sample_share(),
            "oob_ratio" => metrics.dropped_token_share() * of_tokens,
            "batch_norm_factor" => {
                let of_sequences = seen.sequences.mean() * packing.sequences.len() as f64 / trained(&packing);
                let mean = if level == Level::Token { seen.mean() } else { of_sequences };
                if mean > GUARD { mean } else { 1.0 }
            }
            of => spread(seen, of, 1.0)?,
        };
        close(case, name, actual, scalar(expected), max)?;
    }
    Ok(())
}

/// verl's `compute_rollout_rejection_mask`, of one option or of several, each of which must hold.
pub fn rejection(case: &Case) -> Result<(), String> {
    case.only("inputs", &["log_ratio", "response_mask", "rollout_rs", "rollout_rs_threshold"])?;
    let inputs = &case.value["inputs"];
    let mut modes: Vec<&str> = Vec::new();
    for mode in inputs["rollout_rs"].as_str().ok_or("rollout_rs is missing")?.split(',').map(str::trim) {
        if !mode.is_empty() && !modes.contains(&mode) {
            modes.push(mode);
        }
    }
    let bounds = thresholds(&inputs["rollout_rs_threshold"])?;
    if ![1, modes.len()].contains(&bounds.len()) {
        return Err(format!("{} options have {} thresholds", modes.len(), bounds.len()));
    }
    let options = modes.iter().zip(bounds.iter().cycle());
    let reject = options.map(|(mode, bounds)| option(mode, *bounds)).collect::<Result<Vec<Rejection>, String>>()?;

    let packing = Packing::new(&case.needed("response_mask")?);
    let log_ratios = packing.pack(&case.needed("log_ratio")?);
    let on_policy = vec![0.0; log_ratios.len()];
    let judged = |reject: Vec<Rejection>| {
        OffPolicy { reject, ..OffPolicy::default() }.factors(&log_ratios, &log_ratios, &on_policy, &packing.sequences)
    };
    let (factors, whole) = judged(reject.clone());
    case.close("mask", &packing.unpack(&factors), &case.expected("mask")?)?;
    let each: Vec<_> = reject.iter().map(|of| judged(vec![of.clone()]).1).collect();
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let expected = scalar(expected);
        let of_option = |at: usize| Some((at, name.strip_prefix(&format!("rollout_rs_{}_", modes[at]))?));
        let Some((at, of)) = (0..modes.len()).find_map(of_option) else {
            let actual = match name.as_str() {
                "rollout_rs_masked_fraction" => whole.dropped_token_share() * guarded(&packing),
                "rollout_rs_seq_masked_fraction" => whole.dropped_sequence_share(),
                name => return Err(format!("metric {name} is unknown")),
            };
            case.close_number(name, actual, expected)?;
            continue;
        };
        let (rejection, metrics) = (&reject[at], &each[at]);
        let seen = &metrics.rejections[0];
        let of_units = if rejection.over == Over::Token { guarded(&packing) } else { 1.0 };
        let actual = match of {
            "masked_fraction" => metrics.dropped_token_share() * guarded(&packing),
            "seq_masked_fraction" => metrics.dropped_sequences as f64 / trained(&packing),
            "fraction_high" => seen.units.high() * of_units,
            "fraction_low" => seen.units.low() * of_units,
            of => spread(seen, of, 0.0)?,
        };
        let bound = match rejection.divergence {
            Divergence::K1 => rejection.max.ln().abs().max(rejection.min.map_or(0.0, |min| min.ln().abs())),
            _ => rejection.max,
        };
        close(case, name, actual, expected, bound)?;
    }
    Ok(())
}

/// The rejection that verl calls `mode`.
fn option(mode: &str, (min, max): (Option<f64>, f64)) -> Result<Rejection, String> {
    let (over, divergence) = mode.rsplit_once('_').ok_or_else(|| format!("{mode} is unknown"))?;
    // verl's words are ours, but for `seq_` in front of a reduction.
    let known = Over::ALL.iter().find(|known| known.word() == over.trim_start_matches("seq_"));
    let over = *known.ok_or_else(|| format!("{over} is unknown"))?;
    let known = Divergence::ALL.iter().find(|known| known.word() == divergence);
    let divergence = *known.ok_or_else(|| format!("{divergence} is unknown"))?;
    Ok(Rejection { divergence, over, min, max })
}

/// verl's `compute_offpolicy_metrics`.
pub fn off_policy(case: &Case) -> Result<(), String> {
    case.only("inputs", &["old_log_prob", "rollout_log_prob", "response_mask"])?;
    let packing = Packing::new(&case.needed("response_mask")?);
    let column = |name: &str| case.needed(name).map(|tensor: Tensor| packing.pack(&tensor));
    let gap = gap(&packing, &column("old_log_prob")?, &column("rollout_log_prob")?);
    let sequences = &gap.sequences;
    // A sequence without trained tokens has perplexity 1 in verl; ours leaves it out.
    let (rows, seen) = (packing.sequences.len() as f64, sequences.sequences as f64);
    let mean = |sum: f64, of_empty: f64| (sum + (rows - seen) * of_empty) / rows;
    let (least, most) = sequences.range.ok_or("no sequence was compared")?;
    let (least, most) = if seen < rows { (least.min(0.0), most.max(0.0)) } else { (least, most) };
    for (name, expected) in case.value["expected"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "training_ppl" => mean(sequences.trainer.1, 1.0),
            "training_log_ppl" => mean(sequences.trainer.0, 0.0),
            "rollout_ppl" => mean(sequences.behaviour.1, 1.0),
            "rollout_log_ppl" => mean(sequences.behaviour.0, 0.0),
            "kl" => gap.k1() * guarded(&packing),
            "k3_kl" => gap.approx_kl() * guarded(&packing),
            "log_ppl_diff" => mean(sequences.trainer.0 - sequences.behaviour.0, 0.0),
            "log_ppl_abs_diff" => mean(sequences.abs_sum, 0.0),
            "log_ppl_diff_max" => most,
            "log_ppl_diff_min" => least,
            "ppl_ratio" => mean(sequences.perplexity_ratio() * seen, 1.0),
            "chi2_token" => gap.chi2(),
            "chi2_seq" => mean(sequences.chi2() * seen, 0.0),
            name => return Err(format!("metric {name} is unknown")),
        };
        case.close_number(name, actual, scalar(expected))?;
    }
    Ok(())
}

/// Lower and upper bounds: `2.0`, `"2.0"`, `"0.5_2.0"`, or several with commas between them.
fn thresholds(value: &Value) -> Result<Vec<(Option<f64>, f64)>, String> {
    let number = |text: &str| text.parse::<f64>().map_err(|error| format!("threshold {text}: {error}"));
    let bounds = |text: &str| -> Result<(Option<f64>, f64), String> {
        match text.split_once('_') {
            Some((min, max)) => Ok((Some(number(min)?), number(max)?)),
            None => Ok((None, number(text)?)),
        }
    };
    match value {
        Value::String(all) => all.split(',').map(str::trim).filter(|text| !text.is_empty()).map(bounds).collect(),
        value => Ok(vec![(None, value.as_f64().ok_or("the threshold is missing")?)]),
    }
}

/// verl divides by the count of tokens and a guard: its means over tokens are this much smaller.
fn guarded(packing: &Packing) -> f64 {
    let tokens = packing.kept.len() as f64;
    tokens / (tokens + GUARD)
}

/// Sequences with trained tokens.
fn trained(packing: &Packing) -> f64 {
    packing.sequences.iter().filter(|at| !at.is_empty()).count() as f64
}

/// A deviation of values up to `bound` is the root of a difference of squares: if it is small, rounding may be all of it.
fn close(case: &Case, name: &str, actual: f64, expected: f64, bound: f64) -> Result<(), String> {
    let rounding = bound * bound * if case.is_single(expected) { 1e-6 } else { 1e-13 };
    if name.ends_with("_std") && (actual * actual - expected * expected).abs() <= rounding {
        return Ok(());
    }
    case.close_number(name, actual, expected)
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
