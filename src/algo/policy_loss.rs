//! Policy-gradient losses: REINFORCE and the clipped GRPO family.

use serde::{Deserialize, Serialize};

use super::{Loss, LossError, LossInputs, LossMetrics, LossOutput};

/// `−Σ w · importance · A θ`: plain policy gradient, with the sampled log-probabilities themselves as the surrogate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyGradient;

impl Loss for PolicyGradient {
    fn name(&self) -> &str {
        "policy_gradient"
    }

    fn ignores_zero_advantage(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let importance = |t: usize| inputs.importance.map_or(1.0, |ratio| ratio[t]);
        let slope = |t: usize| -inputs.weights[t] * importance(t) * inputs.advantages[t];
        let grad: Vec<f64> = (0..inputs.log_probs.len()).map(slope).collect();
        let loss = grad.iter().zip(inputs.log_probs).map(|(grad, log_prob)| grad * log_prob).sum();
        let metrics = LossMetrics { tokens: inputs.log_probs.len(), policy_loss: loss, ..Default::default() };
        Ok(LossOutput { loss, grad, entropy_grad: None, metrics })
    }
}

/// The clipped surrogate of PPO and GRPO, per token, with ρ = exp(θ − anchor) ([`LossInputs::anchor`]):
///
/// `w · ( −min(min(ρ, δ) A, clip(ρ, 1 − ε_low, 1 + ε_high) A) · keep · importance + β·KL )  −  entropy_coef · mean entropy`
///
/// with KL = k3 = exp(ref − θ) − (ref − θ) − 1, times ρ when `unbiased_kl`. Which aggregation makes the weights decides whether
/// it is TRL's `grpo`, `bnpo`, `dr_grpo` or `dapo` (`GRPOTrainer.compute_loss`, TRL 1.16). `keep` is 0 where one of the two masks
/// below drops a token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grpo {
    /// ε_low: how far the ratio may fall.
    pub clip_low: f64,
    /// ε_high: how far the ratio may rise (DAPO's clip-higher sets it above `clip_low`).
    pub clip_high: f64,
    /// δ: a bound on the ratio itself, also where the advantage is negative (INTELLECT-2's two-sided clip).
    pub delta: Option<f64>,
    /// β: weight of the divergence from the reference model. Above 0 it needs reference log-probabilities.
    pub beta: f64,
    /// Multiplies the divergence by ρ, which makes its gradient unbiased off policy (DeepSeek-V3.2).
    pub unbiased_kl: bool,
    /// Trains only this share of the tokens, those of highest entropy in the whole optimizer batch. 1 trains all.
    pub top_entropy: f64,
    /// Drops sequences of negative advantage whose mean `behaviour − θ` exceeds this (DeepSeek-V3.2's off-policy mask).
    pub off_policy_threshold: Option<f64>,
    /// Weight of an entropy bonus: the mean over all trained tokens, whatever the aggregation.
    pub entropy_coef: f64,
}

impl Default for Grpo {
    fn default() -> Self {
        Grpo {
            clip_low: 0.2,
            clip_high: 0.2,
            delta: None,
            beta: 0.0,
            unbiased_kl: true,
            top_entropy: 1.0,
            off_policy_threshold: None,
            entropy_coef: 0.0,
        }
    }
}

impl Loss for Grpo {
    fn name(&self) -> &str {
        "grpo"
    }

    fn whole_batch(&self) -> bool {
        self.top_entropy < 1.0
    }

    fn ignores_zero_advantage(&self) -> bool {
        self.beta == 0.0 && self.entropy_coef == 0.0 && !self.whole_batch()
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let tokens = inputs.log_probs.len();
        let missing = |column, why| LossError::Missing { loss: "grpo", column, why };
        if self.beta != 0.0 && inputs.reference.is_none() {
            return Err(missing("reference log-probabilities", "beta above 0"));
        }
        let mut metrics = LossMetrics { tokens, ..Default::default() };
        let (mut loss, mut grad) = (0.0, vec![0.0; tokens]);
        let entropy_floor = self.entropy_floor(inputs.entropies);
        for sequence in inputs.sequences {
            let keep_sequence = self.keeps(inputs, sequence.clone());
            let (mut low, mut high) = (0, 0);
            for t in sequence.clone() {
                let kept = keep_sequence(inputs.advantages[t]) && inputs.entropies[t] >= entropy_floor;
                let scale = if kept { inputs.importance.map_or(1.0, |ratio| ratio[t]) } else { 0.0 };
                let (value, slope) =
                    self.surrogate(inputs.log_probs[t] - inputs.anchor()[t], inputs.advantages[t], &mut low, &mut high);
                let (kl, kl_slope) = match inputs.reference {
                    Some(reference) if self.beta != 0.0 => self.divergence(inputs.log_probs[t], reference[t], inputs.anchor()[t]),
                    _ => (0.0, 0.0),
                };
                metrics.kl_sum += kl;
                loss += inputs.weights[t] * (scale * value + self.beta * kl);
                grad[t] = inputs.weights[t] * (scale * slope + self.beta * kl_slope);
            }
            let share = |count: usize| Some(count as f64 / sequence.len().max(1) as f64);
            let of_sequence = LossMetrics {
                clipped_low: low,
                clipped_high: high,
                clip_low_min: share(low),
                clip_high_max: share(high),
                ..Default::default()
            };
            metrics.merge(&of_sequence);
        }
        metrics.policy_loss = loss;
        let mut entropy_grad = None;
        if self.entropy_coef != 0.0 {
            let slope = -self.entropy_coef / inputs.batch_tokens as f64;
            loss += slope * inputs.entropies.iter().sum::<f64>();
            entropy_grad = Some(vec![slope; tokens]);
        }
        Ok(LossOutput { loss, grad, entropy_grad, metrics })
    }
}

impl Grpo {
    /// The clipped term at log-ratio `log_ratio` and its derivative with respect to θ.
    fn surrogate(&self, log_ratio: f64, advantage: f64, low: &mut usize, high: &mut usize) -> (f64, f64) {
        let ratio = log_ratio.exp();
        let (floor, ceiling) = (1.0 - self.clip_low, 1.0 + self.clip_high);
        *low += usize::from(ratio < floor && advantage < 0.0);
        *high += usize::from(ratio > ceiling && advantage > 0.0);
        let bound = self.delta.unwrap_or(f64::INFINITY);
        let (free, clipped) = (ratio.min(bound) * advantage, ratio.clamp(floor, ceiling) * advantage);
        // dρ/dθ = ρ, and a bound that holds has no slope; 0 · A rather than 0, so that a NaN advantage shows.
        let slope = |moves: bool| if moves { -ratio * advantage } else { 0.0 * advantage };
        if free <= clipped { (-free, slope(ratio <= bound)) } else { (-clipped, slope((floor..=ceiling).contains(&ratio))) }
    }

    /// k3, times the ratio when unbiased, and its derivative with respect to θ.
    fn divergence(&self, theta: f64, reference: f64, anchor: f64) -> (f64, f64) {
        let d = reference - theta;
        let (k3, slope) = (d.exp() - d - 1.0, 1.0 - d.exp());
        if self.unbiased_kl {
            let ratio = (theta - anchor).exp();
            (ratio * k3, ratio * (k3 + slope))
        } else {
            (k3, slope)
        }
    }

    /// Whether a token of this sequence with a given advantage stays, by the off-policy mask.
    fn keeps(&self, inputs: &LossInputs, sequence: std::ops::Range<usize>) -> impl Fn(f64) -> bool + use<> {
        let drifted = self.off_policy_threshold.is_some_and(|threshold| {
            let sampled = inputs.behaviour.unwrap_or(inputs.anchor());
            let drift: f64 = sequence.clone().map(|t| sampled[t] - inputs.log_probs[t]).sum();
            drift / sequence.len().max(1) as f64 > threshold
        });
        move |advantage| advantage >= 0.0 || !drifted
    }

    /// The entropy from which on a token is trained: the `1 − top_entropy` quantile, interpolated linearly (torch's `quantile`).
    fn entropy_floor(&self, entropies: &[f64]) -> f64 {
        if self.top_entropy >= 1.0 || entropies.is_empty() {
            return f64::NEG_INFINITY;
        }
        let mut sorted = entropies.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = (1.0 - self.top_entropy) * (sorted.len() - 1) as f64;
        let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
        // Entropies come from single-precision tensors, and so does TRL's threshold; a double would cut the median token itself.
        f64::from((below + (above - below) * at.fract()) as f32)
    }
}

#[cfg(test)]
mod tests;
