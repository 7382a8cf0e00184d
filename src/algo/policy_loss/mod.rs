//! Policy losses: a surrogate of ratio and advantage, a KL penalty and an entropy bonus.
//!
//! Two more choices arrive as columns: the aggregation as [`LossInputs::weights`]
//! ([`Aggregation`]), and the correction of off-policy tokens as [`LossInputs::proximal`] and
//! [`LossInputs::importance`] ([`OffPolicy`]). Every surrogate combines with every aggregation and
//! correction.
//!
//! | method | [`LossChoice`] | usual aggregation |
//! | --- | --- | --- |
//! | GRPO, PPO (verl `vanilla`) | `Grpo` (`dual_clip` in verl) | sequence mean (GRPO), token mean |
//! | DAPO | `Dapo` | token mean |
//! | Dr. GRPO | `Grpo` | constant |
//! | GSPO | `Gspo` | sequence mean |
//! | LUSPO | `Grpo`, level geometric | sequence mean of token sums |
//! | CISPO | `Cispo` | token mean |
//! | GPG, REINFORCE | `Gpg` | token mean |
//!
//! Surrogates that few use are in `algo/zoo`: SAPO, GMPO, DPPO, VESPO, DRO, Clip-Cov and KL-Cov.
//!
//! [`Aggregation`]: crate::algo::Aggregation
//! [`OffPolicy`]: crate::algo::OffPolicy

mod choice;
mod clip;
mod ratio;
mod surrogate;

use std::ops::Range;

use super::kl::KlLoss;
use super::{BuiltIn, KlFunction, Level, Loss, LossError, LossInputs, LossMetrics, LossOutput};
use crate::settings::section::Section;
pub use choice::LossChoice;
pub use clip::{Cispo, Dapo, Grpo, Gspo};
pub(super) use ratio::{Ratios, differences};
pub(super) use surrogate::{Clipped, Method, Sequence, Surrogate, Term, Token};

/// Policy loss of a trainer. Per token, with ρ = exp(θ − anchor) ([`LossInputs::anchor`]) at the
/// surrogate's level:
///
/// `w · ( surrogate(ρ, θ, A) · keep · importance + β·KL )  −  entropy_coef · mean entropy`
///
/// `keep` is 0 for tokens that `top_entropy` or `off_policy_threshold` drops. A token that a
/// rejection dropped ([`LossInputs::kept`]) is in none of the three terms. Equal to TRL 1.16
/// (`GRPOTrainer.compute_loss`) and verl 0.9 (`core_algos.py`), loss and gradient.
///
/// ```
/// use rollflow::algo::{Gspo, PolicyLoss};
///
/// let gspo = PolicyLoss { entropy_coef: 0.01, ..Gspo::default().into() };
/// assert!(gspo.check().is_ok());
///
/// let refused = PolicyLoss::from(Gspo { epsilon: -0.1, ..Gspo::default() }).check();
/// assert!(refused.unwrap_err().to_string().starts_with("gspo can't use this epsilon"));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyLoss {
    /// Surrogate with its settings. A loss of pairs and a registered loss are none, and are
    /// refused.
    pub surrogate: LossChoice,
    /// Bounds of log-ratios before `exp`; an active bound has no gradient. verl takes ±20, TRL
    /// none.
    pub log_ratio_limits: [f64; 2],
    /// KL penalty. It needs reference log-probabilities.
    pub kl_loss: Option<KlLoss>,
    /// Share of the tokens that are trained, those of highest entropy in the optimizer batch: 1
    /// trains all, 0 the highest alone.
    pub top_entropy: f64,
    /// Mean `behaviour − θ` above which a sequence of negative advantage is dropped
    /// (DeepSeek-V3.2's off-policy mask).
    pub off_policy_threshold: Option<f64>,
    /// Coefficient of the entropy bonus, the mean over all trained tokens, whatever the
    /// aggregation.
    pub entropy_coef: f64,
}

impl Default for PolicyLoss {
    fn default() -> Self {
        PolicyLoss {
            surrogate: LossChoice::default(),
            log_ratio_limits: [-20.0, 20.0],
            kl_loss: None,
            top_entropy: 1.0,
            off_policy_threshold: None,
            entropy_coef: 0.0,
        }
    }
}

impl Loss for PolicyLoss {
    fn name(&self) -> &str {
        self.method().name
    }

    fn whole_batch(&self) -> bool {
        self.top_entropy < 1.0 || self.method().whole_batch
    }

    fn is_sum(&self) -> bool {
        self.entropy_coef == 0.0 && !self.whole_batch()
    }

    fn ignores_zero_advantage(&self) -> bool {
        self.kl_loss.is_none() && self.is_sum() && self.method().ignores_zero_advantage
    }

    fn built_in(&self) -> Option<BuiltIn> {
        let plain =
            self.kl_loss.is_none() && self.off_policy_threshold.is_none() && (self.top_entropy, self.entropy_coef) == (1.0, 0.0);
        let clip = |name, low: f64, high: f64| BuiltIn { name, low: (1.0 - low).max(0.0), high: 1.0 + high };
        match &self.surrogate {
            _ if !plain => None,
            LossChoice::Grpo(Grpo { epsilon, epsilon_high, delta: None, dual_clip: None, level: Level::Token }) => {
                Some(clip("ppo", *epsilon, *epsilon_high))
            }
            LossChoice::Dapo(Dapo { epsilon, epsilon_high }) => Some(clip("ppo", *epsilon, *epsilon_high)),
            LossChoice::Cispo(Cispo { epsilon, epsilon_high, level: Level::Token }) => {
                Some(clip("cispo", *epsilon, *epsilon_high))
            }
            _ => None,
        }
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        let surrogate = self.checked()?;
        let (name, tokens) = (self.method().name, inputs.log_probs.len());
        let penalty = match &self.kl_loss {
            Some(of) => Some((of, inputs.needed_reference(name, "its KL penalty")?)),
            None => None,
        };
        if self.whole_batch() {
            inputs.check_whole(name)?;
        }
        let needs_entropies = self.top_entropy < 1.0 || self.entropy_coef != 0.0;
        if needs_entropies && inputs.entropies.iter().any(|entropy| entropy.is_nan()) {
            return Err(LossError::missing(name, "entropies", "its entropy bonus or top_entropy"));
        }
        let mut metrics = LossMetrics { tokens, kl_coef: self.kl_loss.as_ref().map(|of| of.beta), ..Default::default() };
        let (mut loss, mut grad) = (0.0, vec![0.0; tokens]);
        let floor = entropy_floor(self.top_entropy, inputs.entropies);
        let singled_out = surrogate.singled_out(inputs);
        for at in inputs.sequences {
            let sequence = surrogate.sequence(self.log_ratio_limits, inputs, at.clone());
            let drifted = self.off_policy_threshold.is_some_and(|threshold| drift(inputs, at.clone()) > threshold);
            let mut slopes = Vec::with_capacity(at.len());
            let (mut low, mut high) = (0, 0);
            for t in at.clone() {
                let singled_out = singled_out.get(t).is_some_and(|out| *out);
                let term = surrogate.term(&sequence.token(inputs, t, singled_out));
                match sequence.ratios.bounded.get(t - at.start).copied().unwrap_or(term.clipped) {
                    Clipped::No => {}
                    Clipped::Low => low += 1,
                    Clipped::High => high += 1,
                }
                let kept = (inputs.advantages[t] >= 0.0 || !drifted) && (self.top_entropy >= 1.0 || inputs.entropies[t] >= floor);
                let scale = if kept { sequence.importance[t - at.start] } else { 0.0 };
                let (beta, kl) = match penalty {
                    Some((of, reference)) => {
                        (of.beta, divergence(of, sequence.ratios.log[t - at.start], inputs.log_probs[t], reference[t]))
                    }
                    None => (0.0, Term::default()),
                };
                let weight = if inputs.keeps(t) { inputs.weights[t] } else { 0.0 };
                metrics.kl_sum += kl.value;
                loss += weight * (scale * term.value + beta * kl.value);
                grad[t] = weight * (scale * term.by_log_prob + beta * kl.by_log_prob);
                slopes.push(weight * (scale * term.by_log_ratio + beta * kl.by_log_ratio));
            }
            sequence.ratios.pull_back(&slopes, &mut grad[at.clone()]);
            let share = |count: usize| (!at.is_empty()).then(|| count as f64 / at.len() as f64);
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
        Ok(LossOutput { loss, grad, entropy_grad, metrics, ..LossOutput::default() })
    }
}

impl PolicyLoss {
    /// The bonus as a term of the loss, and its derivative by each entropy; 0 for tokens below the
    /// floor.
    fn entropy_bonus(&self, inputs: &LossInputs, floor: f64) -> Option<(f64, Vec<f64>)> {
        if self.entropy_coef == 0.0 {
            return None;
        }
        let kept: Vec<bool> = inputs.entropies.iter().map(|entropy| *entropy >= floor).collect();
        // With a floor the whole batch is here.
        let count = if self.top_entropy < 1.0 { kept.iter().filter(|kept| **kept).count() } else { inputs.batch_tokens };
        let slope = -self.entropy_coef / count.max(1) as f64;
        let slopes: Vec<f64> =
            kept.into_iter().enumerate().map(|(t, kept)| if kept && inputs.keeps(t) { slope } else { 0.0 }).collect();
        Some((slopes.iter().zip(inputs.entropies).map(|(slope, entropy)| slope * entropy).sum(), slopes))
    }

    fn method(&self) -> Method {
        let none = Method { ignores_zero_advantage: false, ..Method::named("policy_loss") };
        self.surrogate.policy().map_or(none, Surrogate::method)
    }

    /// Validates the ranges of all settings, and combinations of them.
    pub fn check(&self) -> Result<(), LossError> {
        self.checked().map(|_| ())
    }

    fn checked(&self) -> Result<&dyn Surrogate, LossError> {
        let refuse = |setting: &str, why: &str| Err(LossError::settings(self.method().name, setting, why));
        let Some(surrogate) = self.surrogate.policy() else {
            return refuse("surrogate", "a loss of pairs and a registered loss are losses by themselves");
        };
        let mut problems = Vec::new();
        self.surrogate.check_rows("", &mut problems);
        if let Some(kl) = &self.kl_loss {
            kl.check_rows("kl_loss", &mut problems);
        }
        if let Some(problem) = problems.first() {
            return refuse(&problem.key, &format!("{}; {}", problem.message, problem.help));
        }
        let [lowest, highest] = self.log_ratio_limits;
        let rules = [
            ((0.0..=1.0).contains(&self.top_entropy), "top_entropy", "it is a share, from 0 to 1"),
            (lowest < 0.0 && highest > 0.0, "log_ratio_limits", "they must lie on both sides of 0"),
            (self.entropy_coef.is_finite(), "entropy_coef", "it must be finite"),
        ];
        if let Some((_, setting, why)) = rules.into_iter().find(|(holds, ..)| !holds) {
            return refuse(setting, why);
        }
        if let Some((setting, why)) = surrogate.conflict() {
            return refuse(setting, why);
        }
        let masks = [("top_entropy", self.top_entropy < 1.0), ("off_policy_threshold", self.off_policy_threshold.is_some())];
        match masks.into_iter().find(|(_, masks)| *masks && self.method().whole_sequences) {
            Some((mask, _)) => {
                refuse(mask, "its ratio and its advantage are means over all tokens of a sequence, of which none can be left out")
            }
            None => Ok(surrogate),
        }
    }
}

/// KL penalty of one token, times the ratio if unbiased. A straight-through one takes the ratio as
/// a constant.
fn divergence(of: &KlLoss, log_ratio: f64, theta: f64, reference: f64) -> Term {
    let (value, slope) = of.token(theta, reference);
    if !of.unbiased {
        return Term { value, by_log_prob: slope, ..Term::default() };
    }
    let ratio = log_ratio.exp();
    let by_log_ratio = if of.straight_through { 0.0 } else { ratio * value };
    Term { value: ratio * value, by_log_ratio, by_log_prob: ratio * slope, clipped: Clipped::No }
}

/// Smallest entropy of a trained token: the `1 − share` quantile, interpolated linearly (torch's
/// `quantile`).
fn entropy_floor(share: f64, entropies: &[f64]) -> f64 {
    if share >= 1.0 || entropies.is_empty() {
        return f64::NEG_INFINITY;
    }
    let mut sorted = entropies.to_vec();
    sorted.sort_by(f64::total_cmp);
    // Rank and threshold are in single precision, as the entropies are: a double would cut tokens at the threshold itself.
    let at = (1.0 - share) as f32 * (sorted.len() - 1) as f32;
    let (below, above) = (sorted[at.floor() as usize] as f32, sorted[at.ceil() as usize] as f32);
    let (step, weight) = (above - below, at.fract());
    f64::from(if weight < 0.5 { below + step * weight } else { above - step * (1.0 - weight) })
}

/// Mean `behaviour − θ` over the tokens that have both.
fn drift(inputs: &LossInputs, at: Range<usize>) -> f64 {
    let sampled = inputs.behaviour.unwrap_or(inputs.anchor());
    let drift: f64 = at.clone().map(|t| sampled[t] - inputs.log_probs[t]).filter(|drift| !drift.is_nan()).sum();
    drift / at.len().max(1) as f64
}
