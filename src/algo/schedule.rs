//! Learning-rate schedules in closed form: a pure function of the step, without state.

use super::RangeError;
use crate::settings::declare::choices;
use serde::{Deserialize, Serialize};

choices! {
    /// Course of the learning rate after the warm-up.
    pub enum Decay {
        /// stays at the peak.
        "constant" => Constant,
        /// falls in a straight line to the floor at the last step.
        "linear" => Linear,
        /// falls along half a cosine to the floor at the last step.
        "cosine" => Cosine,
    }
}

/// Learning rate over the steps of a run.
///
/// With `w = warmup_steps`, `T = total_steps`, `f = floor`: `lr · s / w` while `s < w`, then `lr ·
/// (f + (1 − f) · d(x))` with `x = (s − w) / (T − w)` and d = 1, `1 − x` or `(1 + cos πx) / 2`.
/// Step 0 is the first update. Equals transformers' `constant`, `constant_with_warmup`, `linear`,
/// `cosine` and `cosine_with_min_lr`, also past the end, where a cosine rises again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Peak rate.
    pub lr: f64,
    /// Shape after the warm-up.
    #[serde(default)]
    pub decay: Decay,
    /// Steps of linear rise from 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// Steps of the whole run, warm-up included. A constant rate ignores them.
    #[serde(default)]
    pub total_steps: u64,
    /// Lowest rate after the warm-up, as a share of `lr`, 0 to 1.
    #[serde(default)]
    pub floor: f64,
}

impl Schedule {
    /// Constant rate `lr`.
    pub fn constant(lr: f64) -> Self {
        Schedule { lr, decay: Decay::Constant, warmup_steps: 0, total_steps: 0, floor: 0.0 }
    }

    /// Returns an error for rates, floors and lengths out of range.
    pub fn validate(&self) -> Result<(), RangeError> {
        let Schedule { lr, decay, warmup_steps: warmup, total_steps: total, floor } = *self;
        if !(lr.is_finite() && lr > 0.0) {
            return Err(RangeError::new(format!("lr is {lr}; it is a finite number above 0")));
        }
        if !(0.0..=1.0).contains(&floor) {
            return Err(RangeError::new(format!("floor is {floor}; it is a share of lr, from 0 to 1")));
        }
        if decay != Decay::Constant && total <= warmup {
            return Err(RangeError::new(format!(
                "total_steps is {total} with {warmup} warm-up steps; a {decay:?} decay needs more total steps than warm-up steps"
            )));
        }
        Ok(())
    }

    /// Rate of update `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.lr * step as f64 / self.warmup_steps as f64;
        }
        let length = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = (step - self.warmup_steps) as f64 / length;
        let fallen = match self.decay {
            Decay::Constant => return self.lr,
            // 0 without steps after the warm-up, as in transformers.
            Decay::Linear => ((self.total_steps as f64 - step as f64) / length).max(0.0),
            Decay::Cosine => (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0),
        };
        self.lr * (self.floor + (1.0 - self.floor) * fallen)
    }
}
