//! TRL's GRPO-family losses: value, gradient and metrics.

use rollflow::algo::{
    Aggregation, BatchSize, Cispo, Grpo, KlLoss, Level, Loss, LossChoice, LossInputs, LossMetrics, PolicyLoss, Sapo, Vespo,
};

use crate::case::{Case, Tensor, scalar};
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
    "tool_mask",
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
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
];

/// What TRL made of a case's config.
struct Resolved<'a>(&'a Case);

impl Resolved<'_> {
    fn setting(&self, name: &str) -> Option<f64> {
        self.0.value["resolved"][name].as_f64()
    }

    fn needed(&self, name: &str) -> Result<f64, String> {
        self.setting(name).ok_or_else(|| format!("resolved {name} is missing"))
    }

    fn word(&self, name: &str) -> Result<&str, String> {
        self.0.value["resolved"][name].as_str().ok_or_else(|| format!("resolved {name} is missing"))
    }

    fn level(&self) -> Result<Level, String> {
        match self.word("importance_sampling_level")? {
            "token" => Ok(Level::Token),
            "sequence" => Ok(Level::Geometric),
            level => Err(format!("importance_sampling_level {level} is unknown")),
        }
    }

    fn unbiased(&self) -> bool {
        self.0.value["resolved"]["use_bias_correction_kl"] == true
    }

    /// TRL's CISPO may have a bound below 1, ours has none: ratios are divided by this number, and their factors multiplied by it.
    fn scale(&self) -> Result<f64, String> {
        let cispo = self.word("loss_type")? == "cispo";
        Ok(if cispo { self.needed("epsilon_high")?.min(1.0) } else { 1.0 })
    }

    fn loss(&self) -> Result<PolicyLoss, String> {
        let (level, scale) = (self.level()?, self.scale()?);
        let (low, high) = (self.needed("epsilon_low")?, self.needed("epsilon_high")?);
        // What TRL chooses by the advantage's sign (`torch.where` of two numbers) is in single precision.
        let single = |name: &str| self.needed(name).map(|value| f64::from(value as f32));
        let surrogate = match self.word("loss_type")? {
            "grpo" | "bnpo" | "dr_grpo" | "dapo" | "luspo" => {
                let delta = self.setting("delta");
                LossChoice::Grpo(Grpo { epsilon: low, epsilon_high: high, delta, dual_clip: None, level })
            }
            // TRL bounds from above alone, and its epsilon is the bound itself.
            "cispo" => LossChoice::Cispo(Cispo { epsilon: 1.0, epsilon_high: high / scale - 1.0, level }),
            "sapo" => LossChoice::Sapo(Sapo {
                tau_pos: single("sapo_temperature_pos")?,
                tau_neg: single("sapo_temperature_neg")?,
                level,
            }),
            "vespo" => LossChoice::Vespo(Vespo {
                k_pos: single("vespo_k_pos")?,
                lambda_pos: single("vespo_lambda_pos")?,
                k_neg: single("vespo_k_neg")?,
                lambda_neg: single("vespo_lambda_neg")?,
            }),
            loss_type => return Err(format!("loss_type {loss_type} is unknown")),
        };
        let unbiased = self.unbiased();
        let beta = self.needed("beta")? * if unbiased { scale } else { 1.0 };
        Ok(PolicyLoss {
            surrogate,
            log_ratio_limits: [f64::NEG_INFINITY, f64::INFINITY],
            kl_loss: (beta != 0.0).then(|| KlLoss { beta, unbiased, ..KlLoss::default() }),
            top_entropy: self.needed("top_entropy_quantile")?,
            off_policy_threshold: self.setting("off_policy_mask_threshold"),
            // TRL's bonus is a mean over each micro-batch, of which one case is one.
            entropy_coef: self.needed("entropy_coef")? / self.needed("gradient_accumulation_steps")?,
        })
    }

    /// One case is one micro-batch of TRL's. Some losses divide by the whole batch's tokens, which are given; the others by the
    /// micro-batch's own denominator times the number of micro-batches.
    fn weights(&self, packing: &Packing) -> Result<Vec<f64>, String> {
        let masks: Vec<Vec<f32>> = packing.sequences.iter().map(|sequence| vec![1.0; sequence.len()]).collect();
        let micro_batches = self.needed("gradient_accumulation_steps")?;
        let own = 1.0 / micro_batches;
        let (aggregation, share) = match self.word("loss_type")? {
            "grpo" | "sapo" => (Aggregation::SeqMeanTokenMean, own),
            "bnpo" => (Aggregation::TokenMean, own),
            "luspo" => (Aggregation::SeqMeanTokenSum, own),
            "dr_grpo" => (Aggregation::DrGrpo { max_len: self.needed("max_completion_length")? as usize }, own),
            _ => {
                let items = self.0.count("num_items_in_batch").ok_or("input num_items_in_batch is missing")?.max(1.0);
                // TRL's count is in single precision.
                let tokens = items as f32 * micro_batches as f32 / self.needed("steps_per_generation")? as f32;
                let averaged_ranks = self.setting("num_processes").unwrap_or(1.0) as usize;
                let batch = BatchSize { tokens: f64::from(tokens), averaged_ranks, ..BatchSize::of(&masks) };
                return Ok(Aggregation::TokenMean.token_weights(&masks, &batch).concat());
            }
        };
        Ok(aggregation.token_weights(&masks, &BatchSize::of(&masks)).into_iter().flatten().map(|weight| weight * share).collect())
    }
}

pub fn loss(case: &Case) -> Result<(), String> {
    case.only("inputs", INPUTS)?;
    case.only("config", CONFIG)?;
    let resolved = Resolved(case);
    let loss = resolved.loss()?;
    let scale = resolved.scale()?;

    let mut mask = case.needed("completion_mask")?;
    if let Some(own) = case.input("tool_mask") {
        mask.data.iter_mut().zip(own.data).for_each(|(trained, own)| *trained *= own);
    }
    let packing = Packing::new(&mask);
    let column = |name: &str| case.input(name).map(|tensor| packing.pack(&tensor));
    let log_probs = packing.pack(&case.needed("per_token_logps")?);
    let entropies = packing.pack(&case.needed("entropies")?);
    let advantages = packing.pack(&case.needed("advantages")?);
    let weights = resolved.weights(&packing)?;
    let old = column("old_per_token_logps").unwrap_or_else(|| log_probs.clone());
    let behaviour = column("sampling_per_token_logps").unwrap_or_else(|| old.clone());
    let proximal: Vec<f64> = old.iter().map(|log_prob| log_prob + scale.ln()).collect();
    let reference = column("ref_per_token_logps");
    let given = case.input("importance_sampling_ratio").map(|ratios| importance(&loss, &packing, &ratios));
    let given = given.unwrap_or_else(|| vec![1.0; log_probs.len()]);
    let importance: Vec<f64> = given.iter().map(|weight| weight * scale).collect();
    let inputs = LossInputs {
        log_probs: &log_probs,
        behaviour: Some(&behaviour),
        proximal: Some(&proximal),
        reference: reference.as_deref(),
        importance: Some(&importance),
        entropies: &entropies,
        advantages: &advantages,
        weights: &weights,
        sequences: &packing.sequences,
        batch_tokens: packing.kept.len(),
        ..LossInputs::default()
    };
    let output = loss.evaluate(&inputs).map_err(|error| error.to_string())?;

    case.close("loss", &[output.loss], &case.expected("loss")?)?;
    case.close("grad_per_token_logps", &packing.unpack(&output.grad), &case.expected("grad_per_token_logps")?)?;

    let (tokens, metrics) = (packing.kept.len().max(1) as f64, &output.metrics);
    // One ratio and one advantage for a sequence: TRL counts sequences then, not tokens.
    let by_sequence = resolved.word("importance_sampling_level")? == "sequence" && case.needed("advantages")?.shape.len() == 1;
    let clipped = |count: fn(&LossMetrics) -> usize| match by_sequence {
        false => count(metrics) as f64 / tokens,
        true => {
            let is_clipped = |at: &&std::ops::Range<usize>| {
                let only = LossInputs { sequences: std::slice::from_ref(*at), ..inputs };
                count(&loss.evaluate(&only).unwrap().metrics) > 0
            };
            packing.sequences.iter().filter(is_clipped).count() as f64 / packing.sequences.len() as f64
        }
    };
    // At sequence level TRL counts a sequence without tokens, as not clipped.
    let of_empty = (by_sequence && packing.sequences.iter().any(std::ops::Range::is_empty)).then_some(0.0);
    for (name, expected) in case.value["expected"]["metrics"].as_object().into_iter().flatten() {
        let actual = match name.as_str() {
            "kl" => metrics.kl() * if resolved.unbiased() { scale } else { 1.0 },
            "entropy" => entropies.iter().sum::<f64>() / tokens,
            "entropy_coef" => resolved.needed("entropy_coef")?,
            // TRL's is that of the micro-batch alone.
            "policy_loss" => match resolved.word("loss_type")? {
                "dapo" | "cispo" | "vespo" => metrics.policy_loss,
                _ => metrics.policy_loss * resolved.needed("gradient_accumulation_steps")?,
            },
            "clip_ratio/low_mean" => clipped(|metrics| metrics.clipped_low),
            "clip_ratio/high_mean" | "cispo_clip_ratio" => clipped(|metrics| metrics.clipped_high),
            "clip_ratio/region_mean" => clipped(|metrics| metrics.clipped_low + metrics.clipped_high),
            "clip_ratio/low_min" => of_empty.or(metrics.clip_low_min).unwrap_or(f64::NAN),
            "clip_ratio/high_max" => metrics.clip_high_max.or(of_empty).unwrap_or(f64::NAN),
            // A factor of the gradient, which was compared.
            "vespo/phi_seq_mean" => continue,
            name => return Err(format!("metric {name} is unknown")),
        };
        let expected = scalar(expected);
        // TRL counts clipped tokens in single precision.
        match name.contains("clip_ratio") {
            true => case.close_single(name, actual, expected)?,
            false => case.close_number(name, actual, expected)?,
        }
    }
    Ok(())
}

/// VESPO multiplies a sequence's weights: one that is given for the whole must count once, and TRL's product runs over padding too.
fn importance(loss: &PolicyLoss, packing: &Packing, ratios: &Tensor) -> Vec<f64> {
    let mut importance = packing.pack(ratios);
    if matches!(loss.surrogate, LossChoice::Vespo(_)) {
        let columns = ratios.shape[1];
        for (row, at) in packing.sequences.iter().enumerate().filter(|(_, at)| !at.is_empty()) {
            importance[at.clone()].fill(1.0);
            importance[at.start] = ratios.data[row * columns..(row + 1) * columns].iter().product();
        }
    }
    importance
}
