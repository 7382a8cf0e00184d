//! Verification of an engine's weights by log-probabilities and checksums: pure functions.

use std::collections::BTreeMap;

use super::Update;
use super::engine_sync::StepError;
use crate::algo::compare_log_probs;

impl Update {
    /// Compares the log-probabilities of an engine with the expected ones.
    pub(super) fn judge(&self, found: &[Vec<f32>]) -> Result<(), StepError> {
        if found.iter().map(Vec::len).ne(self.expected.iter().map(Vec::len)) {
            let (tokens, scored) = (self.expected.iter().map(Vec::len).sum(), found.iter().map(Vec::len).sum());
            return Err(StepError::Misaligned { tokens, scored });
        }
        let found: Vec<f64> = found.iter().flatten().map(|log_prob| f64::from(*log_prob)).collect();
        let Err(differs) = compare_log_probs(&found, &self.expected.concat(), self.tolerance) else { return Ok(()) };
        let stale = self.old_head.as_ref().is_some_and(|old| compare_log_probs(&found, &old.concat(), self.tolerance).is_ok());
        Err(if stale { StepError::OldHead { mean: differs.mean } } else { StepError::Differs(differs) })
    }
}

/// Checksum of each tensor, by name.
pub(super) type Checksums = BTreeMap<String, String>;

/// Rejects checksums that did not change although the weights did. `before` are those of another version.
pub(super) fn check_changed(before: Option<&Checksums>, after: Option<&Checksums>, changed: bool) -> Result<(), StepError> {
    if changed && before.is_some() && before == after { Err(StepError::Unchanged) } else { Ok(()) }
}

/// Engines whose checksums differ from the majority of engines with the same tensor names, with a
/// differing tensor each. In a tie, the first engine counts as correct.
pub(super) fn outliers(sums: &[Option<Checksums>]) -> Vec<(usize, String)> {
    let alike = |a: &Checksums, b: &Checksums| a.keys().eq(b.keys());
    let of = |place: usize| sums[place].as_ref();
    let agreeing = |place: usize| of(place).map_or(0, |mine| sums.iter().flatten().filter(|other| *other == mine).count());
    let mut odd = Vec::new();
    for place in 0..sums.len() {
        let Some(mine) = of(place) else { continue };
        let peers = (0..sums.len()).filter(|other| of(*other).is_some_and(|theirs| alike(mine, theirs)));
        let Some(best) = peers.max_by_key(|other| (agreeing(*other), std::cmp::Reverse(*other))) else { continue };
        let differs = of(best).into_iter().flatten().find(|(tensor, sum)| mine.get(*tensor) != Some(sum));
        odd.extend(differs.map(|(tensor, _)| (place, tensor.clone())));
    }
    odd
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_old_head_is_recognised_as_what_it_is() {
        let update = Update {
            expected: vec![vec![-1.0, -2.0], vec![-3.0]],
            old_head: Some(vec![vec![-1.5, -1.0], vec![-4.0]]),
            tolerance: 1e-3,
            ..Update::unprobed(1, std::path::Path::new("/nowhere"))
        };
        assert_eq!(update.judge(&[vec![-1.0004, -2.0], vec![-2.9996]]), Ok(()));
        let told = update.judge(&[vec![-1.5, -1.0], vec![-4.0]]).unwrap_err();
        assert!(matches!(told, StepError::OldHead { .. }) && told.to_string().contains("engine.untie"), "{told}");
        for other in [vec![vec![-1.5, -1.0], vec![-3.0]], vec![vec![f32::NAN, -2.0], vec![-3.0]]] {
            let told = update.judge(&other).unwrap_err();
            assert!(matches!(told, StepError::Differs(_)) && told.to_string().contains("of 3 tokens differ"), "{told}");
        }
        assert_eq!(update.judge(&[vec![-1.0], vec![-2.0, -3.0]]), Err(StepError::Misaligned { tokens: 3, scored: 3 }));
    }

    fn sums(of: &[(&str, &str)]) -> Option<Checksums> {
        Some(of.iter().map(|(tensor, sum)| (tensor.to_string(), sum.to_string())).collect())
    }

    #[test]
    fn the_one_that_differs_from_most_is_told_and_other_kinds_are_not_compared() {
        let (a, b) = (sums(&[("w", "1"), ("v", "2")]), sums(&[("w", "1"), ("v", "9")]));
        assert_eq!(outliers(&[a.clone(), b.clone(), a.clone()]), [(1, "v".to_owned())]);
        assert_eq!(outliers(&[b.clone(), a.clone(), a.clone()]), [(0, "v".to_owned())]);
        assert_eq!(outliers(&[a.clone(), b.clone()]), [(1, "v".to_owned())], "the first is believed");
        assert_eq!(outliers(&[a.clone(), None, sums(&[("other", "7")]), a.clone()]), []);
    }

    #[test]
    fn checksums_must_move_when_weights_do() {
        let a = sums(&[("w", "1")]);
        assert_eq!(check_changed(a.as_ref(), a.as_ref(), true), Err(StepError::Unchanged));
        assert_eq!((check_changed(a.as_ref(), a.as_ref(), false), check_changed(None, a.as_ref(), true)), (Ok(()), Ok(())));
        assert_eq!(check_changed(None, None, true), Ok(()));
    }
}
