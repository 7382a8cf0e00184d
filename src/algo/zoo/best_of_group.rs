//! Advantage of the best sample of a group alone (pass@k).

use crate::algo::advantages::{AdvantageError, Missing, over_scored, std, zero_missing};
use crate::settings::declare::section;
use crate::settings::setting::POSITIVE;

section! {
    /// Difference between best and second best.
    pub struct BestOfGroup {
        /// If true, it is divided by the group's standard deviation.
        scale: bool = true;
        /// ε added to that standard deviation.
        epsilon: f64 = 1e-6, POSITIVE;
    }
}

/// `r_max − r_second` for the best sample of a group and 0 for all others, with `scale = Some(ε)`
/// divided by `std_group + ε` (Walder and Karkhanis, Pass@K Policy Optimization, 2025).
///
/// Shapes: groups × samples in, the same out. Equal best samples get 0, and so does a lone sample.
/// Equals verl 0.9's `grpo_passk` (`norm_adv_by_std_in_grpo` off: `None`), which rejects groups of
/// one.
pub fn best_of_group<G: AsRef<[f64]>>(
    groups: &[G],
    missing: Missing,
    scale: Option<f64>,
) -> Result<Vec<Vec<f64>>, AdvantageError> {
    let values = over_scored(groups, missing, |_, group| {
        let mut values = vec![0.0; group.rewards.len()];
        let mut order: Vec<usize> = (0..group.rewards.len()).collect();
        order.sort_by(|&a, &b| group.rewards[b].total_cmp(&group.rewards[a]));
        if let [best, second, ..] = order[..] {
            let divisor = scale.map_or(1.0, |epsilon| std(&group.rewards) + epsilon);
            values[best] = (group.rewards[best] - group.rewards[second]) / divisor;
        }
        values
    })?;
    Ok(zero_missing(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sole_best_earns() {
        let groups = [vec![0.1, 0.7, 0.3], vec![1.0, 0.0, 1.0], vec![0.5], vec![]];
        let values = best_of_group(&groups, Missing::Refuse, None).unwrap();
        assert_eq!(values, [vec![0.0, 0.7 - 0.3, 0.0], vec![0.0; 3], vec![0.0], vec![]]);
        assert_eq!(best_of_group(&[[0.1; 4]], Missing::Refuse, Some(1e-6)).unwrap(), [[0.0; 4]]);
        assert_eq!(best_of_group(&[[f64::NAN, 2.0, 1.0]], Missing::Zero, None).unwrap(), [[0.0, 1.0, 0.0]]);
        assert!(best_of_group(&[[f64::NAN, 2.0]], Missing::Refuse, None).is_err());
    }
}
