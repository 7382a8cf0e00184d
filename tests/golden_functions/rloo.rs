//! TRL's RLOO: leave-one-out advantages, with a divergence from the reference taken from rewards, and a loss that takes a whole answer for
//! one action.

use rollflow::algo::{
    Aggregation, BatchSize, Grpo, KlForm, Loss, LossInputs, Missing, PolicyLoss, Rules, kl_per_token, leave_one_out, masked_mean,
};

use crate::case::{Case, scalar};
use crate::packing::Packing;
use crate::rewards::combined;

pub fn advantages(case: &Case) -> Result<(), String> {
    const LOG_PROBS: [&str; 3] = ["old_per_token_logps", "ref_per_token_logps", "sampling_logps"];
    let texts = ["rewards_per_func", "prompt_ids", "completion_ids", "eos_token_id", "pad_token_id"];
    case.only("inputs", &[&texts[..], &LOG_PROBS].concat())?;
    // Truncated answers are those that the recorded mask leaves out.
    let known = ["normalize_advantages", "reward_weights", "reward_clip_range", "mask_truncated_completions"];
    case.only("config", &[&known[..], &["beta", "num_generations"]].concat())?;
    let config = &case.value["config"];
    let group_size = config["num_generations"].as_u64().ok_or("num_generations is missing")? as usize;
    let per_function = case.needed("rewards_per_func")?;
    let samples: Vec<&[f64]> = per_function.data.chunks(per_function.shape[1]).collect();
    let weights: Vec<f64> = match config["reward_weights"].as_array() {
        Some(weights) => weights.iter().filter_map(|weight| weight.as_f64()).collect(),
        None => vec![1.0; per_function.shape[1]],
    };
    let mut rewards = samples.iter().map(|rewards| combined(rewards, &weights)).collect::<Result<Vec<f64>, String>>()?;
    if let Some([low, high]) = config["reward_clip_range"].as_array().map(Vec::as_slice) {
        let (low, high) = low.as_f64().zip(high.as_f64()).ok_or("reward_clip_range holds no numbers")?;
        rewards.iter_mut().for_each(|reward| *reward = reward.clamp(low, high));
    }

    let packing = Packing::new(&case.expected("completion_mask")?);
    let own = packing.pack(&case.needed("old_per_token_logps")?);
    // Where the reference is not recorded apart, the one function that was stubbed gave the log-probabilities of both.
    let reference = case.input("ref_per_token_logps").map_or(own.clone(), |tensor| packing.pack(&tensor));
    let beta = config["beta"].as_f64().unwrap_or(0.0);
    if beta != 0.0 {
        let costs: Vec<f64> = kl_per_token(&own, &reference, &KlForm::K1).into_iter().map(|(value, _)| value).collect();
        for (reward, at) in rewards.iter_mut().zip(&packing.sequences) {
            *reward -= beta * costs[at.clone()].iter().sum::<f64>();
        }
        case.close_single("kl", masked_mean(&costs, &vec![1.0; own.len()]), scalar(&case.value["expected"]["metrics"]["kl"]))?;
    }

    let groups: Vec<&[f64]> = rewards.chunks(group_size).collect();
    let rules = Rules { missing: Missing::Zero, ..Rules::default() };
    let normalize = (config["normalize_advantages"] == true).then_some(1e-4);
    let values = leave_one_out(&groups, rules, normalize).map_err(|error| error.to_string())?;
    case.close("advantages", &values.concat(), &case.expected("advantages")?)
}

/// The clipped loss over answers: an answer's log-probability is the sum over its tokens, each of which moves it one to one.
pub fn loss(case: &Case) -> Result<(), String> {
    let columns = ["per_token_logps", "completion_mask", "advantages", "old_logps", "entropies"];
    // TRL takes a count of items for it and reads it nowhere.
    case.only("inputs", &[&columns[..], &["epsilon_low", "epsilon_high", "num_items_in_batch"]].concat())?;
    let bound = |name: &str| case.value["inputs"][name].as_f64().ok_or_else(|| format!("input {name} is missing"));
    let packing = Packing::new(&case.needed("completion_mask")?);
    let tokens = packing.pack(&case.needed("per_token_logps")?);
    let answers: Vec<f64> = packing.sequences.iter().map(|at| tokens[at.clone()].iter().sum()).collect();
    let old = case.needed("old_logps")?.data;
    let each = vec![[1.0f32]; answers.len()];
    let inputs = LossInputs {
        log_probs: &answers,
        behaviour: Some(&old),
        entropies: &vec![0.0; answers.len()],
        advantages: &case.needed("advantages")?.data,
        weights: &Aggregation::TokenMean.token_weights(&each, &BatchSize::of(&each)).concat(),
        sequences: &(0..answers.len()).map(|at| at..at + 1).collect::<Vec<_>>(),
        batch_tokens: answers.len(),
        ..LossInputs::default()
    };
    let clipped = Grpo { epsilon: bound("epsilon_low")?, epsilon_high: bound("epsilon_high")?, ..Grpo::default() };
    // TRL bounds no log-ratio.
    let clipped = PolicyLoss { log_ratio_limits: [f64::NEG_INFINITY, f64::INFINITY], ..clipped.into() };
    let output = clipped.evaluate(&inputs).map_err(|error| error.to_string())?;
    case.close("loss", &[output.loss], &case.expected("loss")?)?;
    let of_token: Vec<f64> = packing.sequences.iter().zip(&output.grad).flat_map(|(at, &grad)| vec![grad; at.len()]).collect();
    case.close("grad_per_token_logps", &packing.unpack(&of_token), &case.expected("grad_per_token_logps")?)?;

    let (metrics, count) = (&output.metrics, answers.len() as f64);
    let entropies = packing.pack(&case.needed("entropies")?);
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "entropy" => masked_mean(&entropies, &vec![1.0; entropies.len()]),
            "clip_ratio/low_mean" => metrics.clipped_low as f64 / count,
            "clip_ratio/high_mean" => metrics.clipped_high as f64 / count,
            "clip_ratio/region_mean" => metrics.clip_fraction(),
            "clip_ratio/low_min" => metrics.clip_low_min.unwrap_or(f64::NAN),
            "clip_ratio/high_max" => metrics.clip_high_max.unwrap_or(f64::NAN),
            name => return Err(format!("metric {name} is unknown")),
        };
        case.close_single(name, actual, scalar(expected))?;
    }
    Ok(())
}
