//! Verification of an engine's weights by log-probabilities and checksums: pure functions.

use std::collections::BTreeMap;
use std::fmt;

use crate::algo::{Disagreement, compare_log_probs};

/// Expected log-probabilities of some texts under the new weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probe {
    /// Texts to score.
    pub texts: Vec<Vec<u32>>,
    /// Trainer's log-probability of each token but the first, for every text.
    pub expected: Vec<Vec<f64>>,
    /// Log-probabilities with the output head that the servers were started with, for a model with
    /// a tied head. A server that reloads only the embedding returns these.
    pub old_head: Option<Vec<Vec<f64>>>,
    /// Largest mean difference, in nats.
    pub tolerance: f64,
}

/// Evidence that an engine holds other weights.
#[derive(Clone, Debug, PartialEq)]
pub enum WrongWeights {
    /// New weights with the old output head.
    OldHead {
        /// Mean difference from the trainer, in nats.
        mean: f64,
    },
    /// Log-probabilities that differ from the trainer's.
    Differs(Disagreement),
    /// Wrong number of scored tokens.
    Misaligned {
        /// Expected number.
        tokens: usize,
        /// Scored number.
        scored: usize,
    },
    /// Wrong label.
    Label {
        /// Given label.
        given: String,
        /// Reported label.
        says: Option<String>,
    },
    /// Missing adapter.
    NoAdapter {
        /// Given adapter.
        given: String,
        /// Listed adapters.
        has: Vec<String>,
    },
    /// Checksums that did not change with the weights.
    Unchanged,
    /// Checksum that differs from the other engines'.
    Unlike {
        /// Name of a differing tensor.
        tensor: String,
    },
}

impl fmt::Display for WrongWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WrongWeights::OldHead { mean } => write!(
                f,
                "it serves the new weights under the output head that it was started with ({mean:.4} nats off on average). The model's head is its \
                 embedding, and this server reloads one without the other and reports success. Set engine.untie = true and start the server \
                 from a folder that was exported so (`rollflow engine launch` does both)"
            ),
            WrongWeights::Differs(Disagreement { tokens, mean, max, tolerance, .. }) => write!(
                f,
                "its log-probabilities of {tokens} tokens differ from the trainer's by {mean:.5} nats on average and {max:.5} at most; {tolerance} are allowed. \
                 Either it did not load the weights, or it computes in another precision: then raise engine.tolerance"
            ),
            WrongWeights::Misaligned { tokens, scored } => write!(f, "it scored {scored} tokens where there are {tokens}"),
            WrongWeights::Label { given, says } => {
                write!(
                    f,
                    "it was labelled {given:?} and reports {:?}: does another run load weights into it?",
                    says.as_deref().unwrap_or("nothing")
                )
            }
            WrongWeights::NoAdapter { given, has } => {
                write!(
                    f,
                    "it was given the adapter {given:?} and has {has:?}: its limit of adapters is too low, or another client unloads them"
                )
            }
            WrongWeights::Unchanged => {
                write!(f, "its checksums are those from before, though the weights changed: it loaded nothing, or another folder")
            }
            WrongWeights::Unlike { tensor } => {
                write!(f, "its checksum of {tensor} differs from that of the other engines, which loaded the same weights")
            }
        }
    }
}

impl Probe {
    /// Compares the log-probabilities of an engine with the expected ones.
    pub fn judge(&self, found: &[Vec<f32>]) -> Result<(), WrongWeights> {
        let (tokens, scored) = (self.expected.iter().map(Vec::len).sum(), found.iter().map(Vec::len).sum());
        if found.iter().map(Vec::len).ne(self.expected.iter().map(Vec::len)) {
            return Err(WrongWeights::Misaligned { tokens, scored });
        }
        let found: Vec<f64> = found.iter().flatten().map(|log_prob| f64::from(*log_prob)).collect();
        let Err(differs) = compare_log_probs(&found, &self.expected.concat(), self.tolerance) else { return Ok(()) };
        let stale = self.old_head.as_ref().is_some_and(|old| compare_log_probs(&found, &old.concat(), self.tolerance).is_ok());
        Err(if stale { WrongWeights::OldHead { mean: differs.mean } } else { WrongWeights::Differs(differs) })
    }
}

/// Checksum of each tensor, by name.
pub type Checksums = BTreeMap<String, String>;

/// Rejects checksums that did not change although the weights did.
pub(super) fn check_changed(before: Option<&Checksums>, after: Option<&Checksums>, changed: bool) -> Result<(), WrongWeights> {
    match (before, after) {
        (Some(before), Some(after)) if changed && before == after => Err(WrongWeights::Unchanged),
        _ => Ok(()),
    }
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

    fn probe() -> Probe {
        Probe {
            texts: vec![vec![1, 2, 3], vec![4, 5]],
            expected: vec![vec![-1.0, -2.0], vec![-3.0]],
            old_head: Some(vec![vec![-1.5, -1.0], vec![-4.0]]),
            tolerance: 1e-3,
        }
    }

    #[test]
    fn the_old_head_is_recognised_as_what_it_is() {
        assert_eq!(probe().judge(&[vec![-1.0004, -2.0], vec![-2.9996]]), Ok(()));
        let told = probe().judge(&[vec![-1.5, -1.0], vec![-4.0]]).unwrap_err();
        assert!(matches!(told, WrongWeights::OldHead { .. }) && told.to_string().contains("engine.untie"), "{told}");
        assert!(matches!(probe().judge(&[vec![-1.5, -1.0], vec![-3.0]]), Err(WrongWeights::Differs(_))));
        assert!(matches!(probe().judge(&[vec![f32::NAN, -2.0], vec![-3.0]]), Err(WrongWeights::Differs(_))));
        assert_eq!(probe().judge(&[vec![-1.0], vec![-2.0, -3.0]]), Err(WrongWeights::Misaligned { tokens: 3, scored: 3 }));
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
        assert_eq!(check_changed(a.as_ref(), a.as_ref(), true), Err(WrongWeights::Unchanged));
        assert_eq!((check_changed(a.as_ref(), a.as_ref(), false), check_changed(None, a.as_ref(), true)), (Ok(()), Ok(())));
    }
}
