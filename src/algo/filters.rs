//! Group filters. A filter is any `Fn(&Group) -> Verdict`: pure, with a reason for each dropped
//! group.

use std::borrow::Cow;
use std::collections::HashSet;

use super::RangeError;
use crate::data::{Group, Sample, Status};

/// Decision of a filter on a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The group is trained on.
    Keep,
    /// The group is dropped; the reason is counted under this name.
    Drop(Cow<'static, str>),
}

impl Verdict {
    /// Keeps the group if `keep`, else drops it for `reason`.
    pub fn keep_if(keep: bool, reason: &'static str) -> Self {
        if keep { Verdict::Keep } else { Verdict::Drop(Cow::Borrowed(reason)) }
    }

    /// If true, the group is kept.
    pub fn kept(&self) -> bool {
        *self == Verdict::Keep
    }
}

/// Combinations of filters, for every closure `Fn(&Group) -> Verdict`.
pub trait GroupFilter: Fn(&Group) -> Verdict + Send + Sync + Sized + 'static {
    /// Keeps groups that both filters keep. The first to drop a group gives the reason.
    fn and<F: GroupFilter>(self, other: F) -> impl GroupFilter {
        move |group: &Group| match self(group) {
            Verdict::Keep => other(group),
            dropped => dropped,
        }
    }

    /// Keeps groups that either filter keeps. The reason names both.
    fn or<F: GroupFilter>(self, other: F) -> impl GroupFilter {
        move |group: &Group| match (self(group), other(group)) {
            (Verdict::Drop(a), Verdict::Drop(b)) => Verdict::Drop(Cow::Owned(format!("{a}_and_{b}"))),
            _ => Verdict::Keep,
        }
    }
}

impl<F: Fn(&Group) -> Verdict + Send + Sync + 'static> GroupFilter for F {}

/// Population standard deviations up to this count as zero in [`nonzero_std`].
pub const NONZERO_STD: f64 = 1e-6;

/// Keeps a group whose rewards differ: population standard deviation above [`NONZERO_STD`]. Equal
/// rewards make every advantage 0. A group of one sample is dropped, and so is one with a NaN
/// reward.
pub fn nonzero_std(group: &Group) -> Verdict {
    std_above(NONZERO_STD)(group)
}

/// Keeps a group whose rewards' population standard deviation is above `threshold`.
pub fn std_above(threshold: f64) -> impl GroupFilter + Clone {
    move |group: &Group| {
        let rewards: Vec<f64> = group.rollouts().map(|sample| sample.reward.unwrap_or(f64::NAN)).collect();
        let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
        let variance = rewards.iter().map(|reward| (reward - mean).powi(2)).sum::<f64>() / rewards.len() as f64;
        Verdict::keep_if(variance.sqrt() > threshold, "zero_std")
    }
}

/// Keeps a group in which some reward is strictly above `threshold`.
pub fn min_reward(threshold: f64) -> Result<impl GroupFilter + Clone, RangeError> {
    if !threshold.is_finite() {
        return Err(RangeError::new(format!("reward threshold {threshold} is not a finite number")));
    }
    Ok(move |group: &Group| Verdict::keep_if(group.rewards().iter().any(|reward| *reward > threshold), "low_reward"))
}

/// Keeps a group with at least `min_ratio` distinct responses per response. Responses are compared
/// as tokens.
pub fn diversity(min_ratio: f64) -> Result<impl GroupFilter + Clone, RangeError> {
    if !(min_ratio > 0.0 && min_ratio <= 1.0) {
        return Err(RangeError::new(format!("diversity ratio {min_ratio} is outside (0, 1]")));
    }
    Ok(move |group: &Group| {
        let distinct: HashSet<(&[u32], &str)> =
            group.samples.iter().map(|sample| (&sample.tokens[..], &sample.response[..])).collect();
        let ratio = distinct.len() as f64 / group.samples.len() as f64;
        Verdict::keep_if(ratio >= min_ratio, "low_diversity")
    })
}

/// Keeps a group whose responses all have `min` to `max` trained tokens.
pub fn length(min: usize, max: usize) -> Result<impl GroupFilter + Clone, RangeError> {
    RangeError::unless_lengths(min, max)?;
    Ok(move |group: &Group| {
        let mut lengths = group.samples.iter().map(Sample::response_length);
        Verdict::keep_if(lengths.all(|length| (min..=max).contains(&length)), "length")
    })
}

/// Keeps a group with a completed sample.
pub fn any_completed(group: &Group) -> Verdict {
    Verdict::keep_if(group.samples.iter().any(|sample| sample.status == Status::Completed), "none_completed")
}
