//! Policy losses, composed: what shares a ratio × what is made of it × a divergence from a reference × an entropy bonus.
//!
//! Two more choices are made outside and arrive as columns: the aggregation as [`LossInputs::weights`] ([`Aggregation`]), and what is done about
//! tokens of another policy as [`LossInputs::proximal`] and [`LossInputs::importance`] ([`OffPolicy`]). So every surrogate goes with every
//! aggregation and every correction; what does not go together is refused with the reason ([`PolicyLoss::check`]).
//!
//! | method | [`RatioLevel`] | [`Surrogate`] | usual aggregation |
//! | --- | --- | --- | --- |
//! | GRPO, PPO (verl `vanilla`) | token | `Clip` (`dual` in verl) | sequence mean (GRPO), token mean |
//! | DAPO | token | `Clip`, `high` 0.28 | token mean |
//! | Dr. GRPO | token | `Clip` | constant |
//! | GSPO | geometric | `Clip`, 3e-4 and 4e-4 | sequence mean |
//! | LUSPO | geometric | `Clip` | sequence mean of token sums |
//! | CISPO | token | `Cispo` | token mean |
//! | SAPO | token | `Sapo` | sequence mean |
//! | GPG, REINFORCE | – | `Gpg` | token mean |
//! | GMPO | geometric | `GeoMean`, 0.4 each | sequence mean |
//! | DPPO | token | `Dppo` | token mean |
//! | VESPO | token | `Vespo` | token mean |
//! | Clip-Cov, KL-Cov | token | `ClipCov`, `KlCov` | token mean |
//! | DRO | token | `Dro` | token mean |
//!
//! [`Aggregation`]: crate::algo::Aggregation
//! [`OffPolicy`]: crate::algo::OffPolicy

mod check;
mod covariance;
mod presets;
mod ratio;
mod surrogate;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::correction::mean;
use super::{Kl, KlFunction, Loss, LossError, LossInputs, LossMetrics, LossOutput};
pub use presets::{Grpo, PolicyGradient};
pub use ratio::RatioLevel;
use ratio::{Ratios, differences};
pub use surrogate::{BinaryDivergence, Clip, Surrogate, Vespo};
use surrogate::{Clipped, Term, Token};

/// A policy loss, put together. Per token, with ρ = exp(θ − anchor) ([`LossInputs::anchor`]) at some level:
///
/// `w · ( surrogate(ρ, θ, A) · keep · importance + β·KL )  −  entropy_coef · mean entropy`
///
/// with KL any of [`Kl`]'s, k3 unless told otherwise, times ρ when `unbiased_kl`. `keep` is 0 where one of the two masks below drops a token.
/// Equal to TRL 1.16 (`GRPOTrainer.compute_loss`) and verl 0.9 (`core_algos.py`), loss and gradient.
///
/// ```
/// use rollflow::algo::{Clip, PolicyLoss, RatioLevel, Surrogate};
///
/// let clip = Surrogate::Clip(Clip { low: 3e-4, high: 4e-4, ..Clip::default() });
/// let gspo = PolicyLoss { level: RatioLevel::Geometric, entropy_coef: 0.01, ..clip.into() };
/// assert!(gspo.check().is_ok());
///
/// let refused = PolicyLoss { level: RatioLevel::Sequence, ..Surrogate::Gpg.into() }.check();
/// assert_eq!(refused.unwrap_err().to_string(), "gpg can't use this level: it has no ratio that a level could be of");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyLoss {
    /// What shares a ratio.
    pub level: RatioLevel,
    /// What is made of it.
    pub surrogate: Surrogate,
    /// Log-ratios are cut to this before `exp`, and have no gradient beyond. verl takes ±20, TRL nothing.
    pub log_ratio_limits: [f64; 2],
    /// β: weight of the divergence from the reference model. Above 0 it needs reference log-probabilities.
    pub beta: f64,
    /// Which divergence that is.
    pub kl: Kl,
    /// Multiplies the divergence by ρ, which makes its gradient unbiased off policy (DeepSeek-V3.2). One that is straight-through has that
    /// gradient on policy already, and takes ρ as a constant.
    pub unbiased_kl: bool,
    /// Trains only this share of the tokens, those of highest entropy in the whole optimizer batch. 1 trains all.
    pub top_entropy: f64,
    /// Drops sequences of negative advantage whose mean `behaviour − θ` exceeds this (DeepSeek-V3.2's off-policy mask).
    pub off_policy_threshold: Option<f64>,
    /// Weight of an entropy bonus: the mean over all trained tokens, of highest entropy if only those are trained, whatever the aggregation.
    pub entropy_coef: f64,
}

impl Default for PolicyLoss {
    fn default() -> Self {
        PolicyLoss {
            level: RatioLevel::Token,
            surrogate: Surrogate::default(),
            log_ratio_limits: [-20.0, 20.0],
            beta: 0.0,
            kl: Kl::default(),
            unbiased_kl: true,
            top_entropy: 1.0,
            off_policy_threshold: None,
            entropy_coef: 0.0,
        }
    }
}

impl From<Surrogate> for PolicyLoss {
    fn from(surrogate: Surrogate) -> Self {
        let level = if matches!(surrogate, Surrogate::GeoMean { .. }) { RatioLevel::Geometric } else { RatioLevel::Token };
        PolicyLoss { level, surrogate, ..PolicyLoss::default() }
    }
}

impl Loss for PolicyLoss {
    fn name(&self) -> &str {
        self.method()
    }

    fn whole_batch(&self) -> bool {
        self.top_entropy < 1.0 || matches!(self.surrogate, Surrogate::ClipCov { .. } | Surrogate::KlCov { .. })
    }

    fn is_sum(&self) -> bool {
        self.entropy_coef == 0.0 && !self.whole_batch()
    }

    fn ignores_zero_advantage(&self) -> bool {
        let pulls_anyway = matches!(self.surrogate, Surrogate::Dro { .. });
        self.beta == 0.0 && self.entropy_coef == 0.0 && !self.whole_batch() && !pulls_anyway
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        self.check()?;
        self.check_inputs(inputs)?;
        let tokens = inputs.log_probs.len();
        let kl_coef = (self.beta != 0.0).then_some(self.beta);
        let mut metrics = LossMetrics { tokens, kl_coef, ..Default::default() };
        let (mut loss, mut grad) = (0.0, vec![0.0; tokens]);
        let floor = covariance::entropy_floor(self.top_entropy, inputs.entropies);
        let singled_out = covariance::singled_out(&self.surrogate, inputs);
        for at in inputs.sequences {
            let sequence = Sequence::new(self, inputs, at.clone());
            let mut slopes = Vec::with_capacity(at.len());
            let (mut low, mut high) = (0, 0);
            for t in at.clone() {
                let singled_out = singled_out.get(t).is_some_and(|out| *out);
                let term = self.surrogate.term(&sequence.token(inputs, t, singled_out));
                match sequence.ratios.bounded.get(t - at.start).copied().unwrap_or(term.clipped) {
                    Clipped::No => {}
                    Clipped::Low => low += 1,
                    Clipped::High => high += 1,
                }
                let kept = sequence.keeps(inputs.advantages[t]) && inputs.entropies[t] >= floor;
                let scale = if kept { sequence.importance[t - at.start] } else { 0.0 };
                let kl = match inputs.reference {
                    Some(reference) if self.beta != 0.0 => {
                        self.divergence(sequence.ratios.log[t - at.start], inputs.log_probs[t], reference[t])
                    }
                    _ => Term::default(),
                };
                let (weight, beta) = (inputs.weights[t], self.beta);
                metrics.kl_sum += kl.value;
                loss += weight * (scale * term.value + beta * kl.value);
                grad[t] = weight * (scale * term.by_log_prob + beta * kl.by_log_prob);
                slopes.push(weight * (scale * term.by_log_ratio + beta * kl.by_log_ratio));
            }
            sequence.ratios.pull_back(&slopes, &mut grad[at.clone()]);
            let share = |count: usize| Some(count as f64 / at.len().max(1) as f64);
            metrics.merge(&LossMetrics {
                clipped_low: low,
                clipped_high: high,
                clip_low_min: share(low),
                clip_high_max: share(high),
                ..Default::default()
            });
        }
        metrics.policy_loss = loss;
        let (bonus, entropy_grad) = self.entropy_bonus(inputs, floor).unzip();
        loss += bonus.unwrap_or(0.0);
        Ok(LossOutput { loss, grad, entropy_grad, metrics })
    }
}

impl PolicyLoss {
    /// What the bonus adds to the loss, and its slope by each entropy; of tokens whose entropy is below the floor, none.
    fn entropy_bonus(&self, inputs: &LossInputs, floor: f64) -> Option<(f64, Vec<f64>)> {
        if self.entropy_coef == 0.0 {
            return None;
        }
        let kept: Vec<bool> = inputs.entropies.iter().map(|entropy| *entropy >= floor).collect();
        // A floor is that of the whole batch, which is here then.
        let count = if self.top_entropy < 1.0 { kept.iter().filter(|kept| **kept).count() } else { inputs.batch_tokens };
        let slope = -self.entropy_coef / count.max(1) as f64;
        let slopes: Vec<f64> = kept.into_iter().map(|kept| if kept { slope } else { 0.0 }).collect();
        Some((slopes.iter().zip(inputs.entropies).map(|(slope, entropy)| slope * entropy).sum(), slopes))
    }

    /// The divergence, times the ratio when unbiased.
    fn divergence(&self, log_ratio: f64, theta: f64, reference: f64) -> Term {
        let (value, slope) = self.kl.token(theta, reference);
        if !self.unbiased_kl {
            return Term { value, by_log_prob: slope, ..Term::default() };
        }
        let ratio = log_ratio.exp();
        let by_log_ratio = if self.kl.straight_through { 0.0 } else { ratio * value };
        Term { value: ratio * value, by_log_ratio, by_log_prob: ratio * slope, clipped: Clipped::No }
    }
}

/// What a sequence's tokens have in common.
struct Sequence {
    at: Range<usize>,
    ratios: Ratios,
    /// Factor of each token's term.
    importance: Vec<f64>,
    /// In the place of each token's own, where a surrogate takes their mean.
    advantage: Option<f64>,
    log_weight: f64,
    /// Whether it is too far from the policy that sampled it to learn from a negative advantage.
    drifted: bool,
}

impl Sequence {
    fn new(loss: &PolicyLoss, inputs: &LossInputs, at: Range<usize>) -> Self {
        let given = || inputs.importance.map_or_else(|| vec![1.0; at.len()], |importance| importance[at.clone()].to_vec());
        let mut sequence = Sequence {
            ratios: Ratios::new(loss.level, loss.log_ratio_limits, inputs, at.clone()),
            importance: Vec::new(),
            advantage: None,
            log_weight: 0.0,
            drifted: loss.off_policy_threshold.is_some_and(|threshold| drift(inputs, at.clone()) > threshold),
            at: at.clone(),
        };
        match loss.surrogate {
            Surrogate::GeoMean { low, high } => {
                sequence.ratios = Ratios::bounded_each([low, high], loss.log_ratio_limits, inputs, at.clone());
                sequence.advantage = Some(mean(&inputs.advantages[at.clone()]));
                let of_all = |importance: &[f64]| -> f64 {
                    // verl's guard against a weight of 0.
                    mean(&importance[at.clone()].iter().map(|weight| (weight + 1e-10).ln()).collect::<Vec<_>>()).exp()
                };
                sequence.importance = vec![inputs.importance.map_or(1.0, of_all); at.len()];
            }
            Surrogate::Vespo(_) => {
                // Bounds are TRL's.
                let lowest = 1e-8f64.ln();
                let own: f64 = differences(inputs, at.clone()).iter().map(|log_ratio| log_ratio.clamp(-20.0, 20.0)).sum();
                let given: f64 = given().iter().map(|weight| weight.ln().clamp(lowest, 20.0)).sum();
                sequence.log_weight = (own + given).clamp(lowest, 20.0);
                sequence.importance = vec![1.0; at.len()];
            }
            _ => sequence.importance = given(),
        }
        sequence
    }

    fn token(&self, inputs: &LossInputs, t: usize, singled_out: bool) -> Token {
        Token {
            log_ratio: self.ratios.log[t - self.at.start],
            log_prob: inputs.log_probs[t],
            anchor: inputs.anchor()[t],
            advantage: self.advantage.unwrap_or(inputs.advantages[t]),
            log_weight: self.log_weight,
            singled_out,
        }
    }

    fn keeps(&self, advantage: f64) -> bool {
        advantage >= 0.0 || !self.drifted
    }
}

/// Mean `behaviour − θ`; a token that nobody could score is no evidence.
fn drift(inputs: &LossInputs, at: Range<usize>) -> f64 {
    let sampled = inputs.behaviour.unwrap_or(inputs.anchor());
    let drift: f64 = at.clone().map(|t| sampled[t] - inputs.log_probs[t]).filter(|drift| !drift.is_nan()).sum();
    drift / at.len().max(1) as f64
}

#[cfg(test)]
mod tests;
