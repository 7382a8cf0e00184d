//! verl's advantage estimators.

use rollflow::algo::{
    GroupMean, KlForm, Lone, Missing, Returns, Rules, Scale, ScoredGroup, best_of_group, gae, gpg, group_mean, kl_per_token,
    leave_one_out, optimal_baseline, reinforce_plus_plus, reinforce_plus_plus_baseline, whiten,
};
use serde_json::Value;

use crate::case::{Case, Tensor, tensor};

/// verl compares a lone sample with nothing.
const VERL: Rules = Rules { missing: Missing::Refuse, lone: Lone::Nothing };

/// A batch of verl's: padded rows.
struct Rows {
    rewards: Tensor,
    mask: Vec<f32>,
    sequences: Vec<std::ops::Range<usize>>,
}

impl Rows {
    fn new(case: &Case) -> Result<Self, String> {
        let (rewards, mask) = (case.needed("token_level_rewards")?, case.needed("response_mask")?);
        let columns = rewards.shape[1];
        let sequences = (0..rewards.shape[0]).map(|row| row * columns..(row + 1) * columns).collect();
        Ok(Rows { rewards, mask: mask.data.iter().map(|&mask| mask as f32).collect(), sequences })
    }

    /// One value a row, at the tokens that are trained.
    fn spread(&self, per_row: &[f64]) -> Vec<f64> {
        let columns = self.rewards.shape[1];
        self.mask.iter().enumerate().map(|(at, &mask)| per_row[at / columns] * f64::from(mask)).collect()
    }
}

/// Rewards by token.
pub fn by_token(case: &Case) -> Result<(), String> {
    case.only("inputs", &["token_level_rewards", "values", "response_mask", "gamma", "lam", "reward_baselines"])?;
    let Rows { rewards, mask, sequences } = Rows::new(case)?;
    let number = |name: &str| case.value["inputs"][name].as_f64().ok_or_else(|| format!("input {name} is missing"));
    let of = match called(case)? {
        "compute_gae_advantage_return" => {
            let values = case.needed("values")?;
            gae(&rewards.data, &values.data, &mask, &sequences, number("gamma")?, number("lam")?)
                .map(|of| Returns { advantages: whiten(&of.advantages, &mask, true), ..of })
        }
        "compute_reinforce_plus_plus_outcome_advantage" => {
            reinforce_plus_plus(&rewards.data, &mask, &sequences, number("gamma")?)
        }
        "compute_remax_outcome_advantage" => {
            let greedy = case.needed("reward_baselines")?.data;
            let of_token = greedy.iter().flat_map(|reward| vec![*reward; rewards.shape[1]]);
            let baselines: Vec<f64> = of_token.zip(&mask).map(|(reward, mask)| reward * f64::from(*mask)).collect();
            gae(&rewards.data, &vec![0.0; mask.len()], &mask, &sequences, 1.0, 1.0).map(|of| {
                let advantages = of.returns.iter().zip(&baselines).map(|(reward, baseline)| reward - baseline).collect();
                Returns { advantages, ..of }
            })
        }
        called => return Err(format!("{called} is unknown")),
    };
    let of = of.map_err(|error| error.to_string())?;
    case.close("advantages", &of.advantages, &case.expected("advantages")?)?;
    case.close("returns", &of.returns, &case.expected("returns")?)
}

/// One reward a sample, compared within groups.
pub fn by_group(case: &Case) -> Result<(), String> {
    const SETTINGS: [&str; 3] = ["norm_adv_by_std_in_grpo", "epsilon", "f_norm"];
    case.only("inputs", &[&["token_level_rewards", "response_mask", "index"][..], &SETTINGS].concat())?;
    case.only("config", &SETTINGS)?;
    let setting =
        |name: &str| [&case.value["inputs"][name], &case.value["config"][name]].into_iter().find(|value| !value.is_null());
    let number =
        |name: &str, default: f64| setting(name).map_or(Some(default), Value::as_f64).ok_or(format!("{name} is no number"));
    let by_std = setting("norm_adv_by_std_in_grpo").is_none_or(|flag| *flag == true);
    let epsilon = number("epsilon", 1e-6)?;

    let rows = Rows::new(case)?;
    let index = case.value["inputs"]["index"].as_array().ok_or("index is missing")?;
    let mut members: Vec<(&Value, Vec<usize>)> = Vec::new();
    for (row, id) in index.iter().enumerate() {
        match members.iter_mut().find(|(known, _)| *known == id) {
            Some((_, rows)) => rows.push(row),
            None => members.push((id, vec![row])),
        }
    }
    let grouped = |per_row: &dyn Fn(usize) -> f64| -> Vec<Vec<f64>> {
        members.iter().map(|(_, rows)| rows.iter().map(|&row| per_row(row)).collect()).collect()
    };
    let rewards = grouped(&|row| rows.rewards.data[rows.sequences[row].clone()].iter().sum());
    let lengths = grouped(&|row| rows.mask[rows.sequences[row].clone()].iter().map(|&mask| f64::from(mask)).sum());

    let scored: Vec<ScoredGroup> =
        rewards.iter().zip(&lengths).map(|(rewards, lengths)| ScoredGroup { rewards, lengths }).collect();

    let config = GroupMean { std: if by_std { Scale::Group } else { Scale::None }, epsilon };
    let lone = |row: usize| members.iter().any(|(_, rows)| *rows == [row]);
    let (values, in_single): (_, &dyn Fn(usize) -> bool) = match called(case)? {
        // The deviation of a lone sample is a single-precision 1.
        "compute_grpo_outcome_advantage" => (group_mean(&rewards, &config, VERL), &lone),
        "compute_grpo_vectorized_outcome_advantage" => (group_mean(&rewards, &config, VERL), &|_| true),
        "compute_rloo_outcome_advantage" => (leave_one_out(&rewards, VERL, None), &|_| false),
        "compute_rloo_vectorized_outcome_advantage" => (leave_one_out(&rewards, Rules::default(), None), &|_| false),
        "compute_reinforce_plus_plus_baseline_outcome_advantage" => (reinforce_plus_plus_baseline(&scored, VERL), &|_| false),
        "compute_opo_outcome_advantage" => (optimal_baseline(&scored, VERL), &|_| false),
        // The share of rewards that are not 0 is a quotient of whole numbers, which torch takes in single precision.
        "compute_gpg_outcome_advantage" => (gpg(&rewards, VERL, number("f_norm", 1.0)?), &|_| true),
        "compute_grpo_passk_outcome_advantage" => {
            (best_of_group(&rewards, Missing::Refuse, by_std.then_some(epsilon)), &|_| false)
        }
        called => return Err(format!("{called} is unknown")),
    };
    let values = values.map_err(|error| error.to_string())?;
    let mut per_row = vec![f64::NAN; rows.sequences.len()];
    members.iter().zip(&values).for_each(|((_, rows), values)| {
        rows.iter().zip(values).for_each(|(&row, &value)| per_row[row] = value);
    });
    let found = rows.spread(&per_row);
    for name in ["advantages", "returns"] {
        let expected = case.expected(name)?;
        for (row, at) in rows.sequences.iter().enumerate() {
            let dtype = if in_single(row) { "float32".to_owned() } else { expected.dtype.clone() };
            let of_row = Tensor { dtype, shape: vec![at.len()], data: expected.data[at.clone()].to_vec() };
            case.close(&format!("{name} of row {row}"), &found[at.clone()], &of_row)?;
        }
    }
    Ok(())
}

/// The divergence from a reference as a cost in the reward.
pub fn rewards(case: &Case) -> Result<(), String> {
    case.only("inputs", &["token_level_scores", "old_log_prob", "ref_log_prob", "kl_ratio"])?;
    let [scores, own, reference] = ["token_level_scores", "old_log_prob", "ref_log_prob"].map(|name| case.needed(name));
    let coef = case.value["inputs"]["kl_ratio"].as_f64().ok_or("kl_ratio is missing")?;
    let costs = kl_per_token(&own?.data, &reference?.data, &KlForm::K1);
    let found: Vec<f64> = scores?.data.iter().zip(costs).map(|(score, (cost, _))| score - coef * cost).collect();
    case.close("rewards", &found, &tensor(&case.value["expected"]))
}

fn called(case: &Case) -> Result<&str, String> {
    case.value["called"].as_str().ok_or_else(|| "what was called is missing".into())
}
