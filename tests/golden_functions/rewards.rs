//! TRL's group-relative advantages, with several reward functions, unscored samples and truncated completions.

use rollflow::algo::rewards::Aggregator;
use rollflow::algo::{Aggregation, BatchSize, GroupMean, Missing, Rules, Scale, group_mean, normalized};
use rollflow::data::{Sample, Status};

use crate::case::Case;

pub fn advantages(case: &Case) -> Result<(), String> {
    case.only("inputs", &["rewards_per_func", "prompt_ids", "completion_ids", "eos_token_id", "pad_token_id"])?;
    case.only(
        "config",
        &["scale_rewards", "num_generations", "reward_weights", "multi_objective_aggregation", "mask_truncated_completions"],
    )?;
    let config = &case.value["config"];
    let group_size = config["num_generations"].as_u64().ok_or("num_generations is missing")? as usize;
    let rewards = case.needed("rewards_per_func")?;
    let samples: Vec<Vec<f64>> = rewards.data.chunks(rewards.shape[1]).map(<[f64]>::to_vec).collect();
    let weights: Vec<f64> = match config["reward_weights"].as_array() {
        Some(weights) => weights.iter().filter_map(|weight| weight.as_f64()).collect(),
        None => vec![1.0; rewards.shape[1]],
    };
    let scale = match config["scale_rewards"].as_str().unwrap_or("group") {
        "group" => Scale::Group,
        "batch" => Scale::Batch,
        "none" => Scale::None,
        other => return Err(format!("scale_rewards is {other}")),
    };
    let (settings, rules) =
        (GroupMean { std: scale, ..GroupMean::default() }, Rules { missing: Missing::Zero, ..Rules::default() });
    let values = match config["multi_objective_aggregation"].as_str().unwrap_or("sum_then_normalize") {
        "sum_then_normalize" => {
            let rewards = samples.iter().map(|rewards| combined(rewards, &weights)).collect::<Result<Vec<f64>, String>>()?;
            let groups: Vec<&[f64]> = rewards.chunks(group_size).collect();
            group_mean(&groups, &settings, rules)
        }
        "normalize_then_sum" => {
            let unscored = |rewards: &Vec<f64>| rewards.iter().all(|reward| reward.is_nan());
            let mut sums: Vec<f64> = samples.iter().map(|rewards| if unscored(rewards) { f64::NAN } else { 0.0 }).collect();
            for (function, weight) in weights.iter().enumerate() {
                let column: Vec<f64> = samples.iter().map(|rewards| rewards[function]).collect();
                let groups: Vec<&[f64]> = column.chunks(group_size).collect();
                let values = group_mean(&groups, &GroupMean::default(), rules).map_err(|error| error.to_string())?;
                sums.iter_mut().zip(values.concat()).for_each(|(sum, value)| *sum += weight * value);
            }
            normalized(&sums.chunks(group_size).collect::<Vec<_>>(), Missing::Zero, settings.epsilon)
        }
        other => return Err(format!("multi_objective_aggregation is {other}")),
    };
    let values: Vec<f64> = values.map_err(|error| error.to_string())?.concat();
    case.close("advantages", &values, &case.expected("advantages")?)?;
    truncated_completions_are_masked(case)
}

/// The weighted sum over the functions that scored a sample; NaN if none did.
pub fn combined(rewards: &[f64], weights: &[f64]) -> Result<f64, String> {
    let scored = rewards.iter().zip(weights).filter(|(reward, _)| !reward.is_nan());
    let (rewards, weights): (Vec<f64>, Vec<f64>) = scored.unzip();
    if rewards.is_empty() { Ok(f64::NAN) } else { Aggregator::weighted(weights).aggregate(&rewards) }
}

/// The count of trained tokens: a completion that ends neither in end-of-text nor in padding is masked when the configuration says so,
/// and then carries no weight.
fn truncated_completions_are_masked(case: &Case) -> Result<(), String> {
    let ends = ["eos_token_id", "pad_token_id"].map(|name| &case.value["inputs"][name]);
    let drop = case.value["config"]["mask_truncated_completions"] == true;
    let completions = case.value["inputs"]["completion_ids"].as_array().ok_or("completion_ids is missing")?;
    let mask = |tokens: &serde_json::Value| {
        let tokens = tokens.as_array().map_or(&[][..], |tokens| tokens);
        let ended = tokens.last().is_some_and(|last| ends.contains(&last));
        let status = if ended { Status::Completed } else { Status::Truncated };
        let mut sample = Sample { loss_mask: vec![1.0; tokens.len()], status, ..Sample::default() };
        if drop {
            sample.mask_truncated();
        }
        sample.loss_mask
    };
    let masks: Vec<Vec<f32>> = completions.iter().map(mask).collect();
    let weights = Aggregation::TokenMean.token_weights(&masks, &BatchSize::of(&masks)).concat();
    let trained = weights.iter().filter(|&&weight| weight > 0.0).count();
    case.close("num_items_in_batch", &[trained as f64], &case.expected("num_items_in_batch")?)
}
