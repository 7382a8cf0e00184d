//! Off-policy settings of a policy loss: the centre of its trust region, and the correction.
//!
//! Decoupled PPO (Hilton et al., 2022; AReaL): ratios are taken against a *proximal* policy near
//! the trained one. An importance weight exp(proximal − behaviour), bounded by a [`Correction`],
//! accounts for the rest. Both are constants for the gradient.

use std::ops::Range;

use super::correction::{Correction, CorrectionMetrics};
use crate::settings::declare::choices;

choices! {
    /// Policy that probability ratios are taken against.
    pub enum Proximal {
        /// the policy that sampled (PPO, GRPO).
        "behaviour" => Behaviour,
        /// the trainer's policy at the first update on the batch (decoupled PPO). Batches with
        /// several updates are scored once before.
        "recompute" => Recompute,
        /// between the policy that sampled, `b`, and the current one, θ, by token lag: `b + (1 −
        /// 1/lag)(θ − b)`, and `b` at lags 0 and 1 (A-3PO; AReaL's `loglinear`).
        "loglinear" => LogLinear,
    }
}

/// Centre of the trust region, and correction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OffPolicy {
    /// Policy that ratios are taken against.
    pub proximal: Proximal,
    /// Correction for the distance from there to the behaviour policy.
    pub correction: Correction,
}

/// Columns of a loss's inputs; `None` for those that are not needed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Anchors {
    /// p: proximal log-probabilities.
    pub proximal: Option<Vec<f64>>,
    /// Factor of each token's policy term.
    pub importance: Option<Vec<f64>>,
    /// Statistics of the correction.
    pub metrics: Option<CorrectionMetrics>,
}

impl OffPolicy {
    /// If true, it must see the whole optimizer batch.
    pub fn whole_batch(&self) -> bool {
        self.correction.whole_batch()
    }

    /// Columns for tokens with log-probabilities `trainer` now, `start` at the first update on the
    /// batch and `behaviour` when they were sampled, `lags` versions ago. All have one entry per
    /// token; `sequences` tile them.
    pub fn anchors(
        &self,
        trainer: &[f64],
        start: &[f64],
        behaviour: &[f64],
        lags: &[u64],
        sequences: &[Range<usize>],
    ) -> Anchors {
        let proximal: Option<Vec<f64>> = match self.proximal {
            Proximal::Behaviour => None,
            Proximal::Recompute => Some(start.to_vec()),
            Proximal::LogLinear => {
                let tokens = trainer.iter().zip(behaviour).zip(lags);
                Some(tokens.map(|((&theta, &b), &lag)| log_linear(theta, b, lag)).collect())
            }
        };
        if self.correction.is_nothing() {
            return Anchors { proximal, ..Anchors::default() };
        }
        let centre = proximal.as_deref().unwrap_or(behaviour);
        let (importance, metrics) = self.correction.apply(centre, start, behaviour, sequences);
        Anchors { proximal, importance: Some(importance), metrics: Some(metrics) }
    }
}

/// Policy one version before the current one, if log-probabilities moved linearly since sampling.
fn log_linear(theta: f64, behaviour: f64, lag: u64) -> f64 {
    let share = if lag == 0 { 0.0 } else { 1.0 - 1.0 / lag as f64 };
    behaviour + share * (theta - behaviour)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::correction::{Importance, Level};

    fn anchors(proximal: Proximal, correction: Correction) -> Anchors {
        let off_policy = OffPolicy { proximal, correction };
        off_policy.anchors(
            &[-1.0, -1.0, -1.0],
            &[-1.2, -1.2, -1.2],
            &[-2.0, -2.0, -2.0],
            &[0, 1, 4],
            std::slice::from_ref(&(0..3)),
        )
    }

    #[test]
    fn the_trust_region_lies_where_it_was_asked_for() {
        let of = |proximal| anchors(proximal, Correction::default()).proximal;
        assert_eq!(of(Proximal::Behaviour), None);
        assert_eq!(of(Proximal::Recompute), Some(vec![-1.2; 3]));
        // AReaL's test: versions 0, current 2 gives the middle; here lag 4 gives three quarters.
        assert_eq!(of(Proximal::LogLinear), Some(vec![-2.0, -2.0, -1.25]));
    }

    #[test]
    fn weights_span_from_behaviour_to_proximal_and_never_count_twice() {
        let correction = Correction { weigh: Some(Importance::truncated(Level::Token, 1e9)), reject: Vec::new() };
        let weights = |proximal| anchors(proximal, correction.clone()).importance.unwrap();
        assert_eq!(weights(Proximal::Behaviour), [1.0; 3]);
        weights(Proximal::Recompute).iter().for_each(|weight| assert!((weight - 0.8f64.exp()).abs() < 1e-12));
        assert_eq!(weights(Proximal::LogLinear), [1.0, 1.0, 0.75f64.exp()]);
    }
}
