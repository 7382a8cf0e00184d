//! How many prompts may have entered by now: the arithmetic that bounds staleness (law V2's first half). Pure.
//!
//! When version `v` is published, `(v − 1) · P` groups have been trained, `P` being the groups trained under each version. A window of `W`
//! groups lets `(v − 1) · P + W` enter in all, and one more for every group that was dropped. The group trained `r`-th has thus entered under
//! version `⌈(r − W) / P⌉ + 1` or later and is trained under `⌊(r − 1) / P⌋ + 1`, so none of its tokens lags by more than `⌊(W − 1) / P⌋`.
//!
//! Where groups are trained in another order, a late one may lag further: one that entered under `v` must be trained by the end of version
//! `v + S`. There is room for all of them if the oldest go first: by version `v` at most `(v − 1) · P + W` groups had entered, which for
//! `W ≤ (S + 1) · P` is no more than the `(v + S) · P` that are trained until then. A batch that takes younger ones must leave that much
//! room to those it passes over: a schedule by earliest deadline.
//!
//! A run in rounds (`S` = 0) may over-sample: its window is wider than `P`. Every group that enters under a version is judged before that
//! version's last step, and what the steps do not need is dropped then, so that nothing enters under one version and is trained under the
//! next. The dropped groups' places come back with the next publish.

use crate::data::Version;

/// The constants of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Groups trained under each version, `P`.
    pub groups_per_version: u64,
    /// Groups between their prompt and the publish that follows their training, `W`.
    pub in_flight: u64,
    /// Groups that the whole run trains, where that is known: nothing is generated beyond it.
    pub total: Option<u64>,
}

impl Pace {
    /// Prompts that may have entered under `version`, when `dropped` groups were dropped so far. None before the first publish (law V4).
    pub fn limit(&self, version: Version, dropped: u64) -> u64 {
        if version == 0 {
            return 0;
        }
        let paced = (version - 1).saturating_mul(self.groups_per_version).saturating_add(self.in_flight);
        self.total.map_or(paced, |total| paced.min(total)) + dropped
    }

    /// The version that trains the group before which `taken` others are trained.
    pub fn trained_under(&self, taken: u64) -> Version {
        taken / self.groups_per_version.max(1) + 1
    }

    /// Groups that are trained under that version and those before it.
    pub fn trained_by_the_end_of(&self, version: Version) -> u64 {
        version.saturating_mul(self.groups_per_version)
    }

    /// Most versions that a trained token can lag behind when groups are trained in the order of their entry.
    pub fn worst_lag(&self) -> u64 {
        self.in_flight.saturating_sub(1) / self.groups_per_version.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Law V2: whatever the window, the lag of the group trained r-th is what `worst_lag` says at most, and is reached.
        #[test]
        fn no_group_lags_more_than_the_worst_case(groups_per_version in 1u64..9, in_flight in 1u64..40) {
            let pace = Pace { groups_per_version, in_flight, total: None };
            let entered_under = |rank: u64| (1..).find(|version| pace.limit(*version, 0) >= rank).unwrap();
            // A window narrower than a version's groups would wait for a publish that never comes.
            prop_assume!(in_flight >= groups_per_version);
            let worst = (1..200).map(|rank| pace.trained_under(rank - 1) - entered_under(rank)).max().unwrap();
            prop_assert_eq!(worst, pace.worst_lag());
        }
    }

    #[test]
    fn a_prompt_enters_only_after_the_first_publish_and_within_the_window() {
        let pace = Pace { groups_per_version: 32, in_flight: 64, total: Some(80) };
        assert_eq!(pace.limit(0, 0), 0, "law V4: no rollout before the first publish");
        assert_eq!(pace.limit(1, 0), 64);
        assert_eq!(pace.limit(1, 1), 65, "a dropped group gives its place back");
        assert_eq!(pace.limit(2, 1), 81, "no more than the run trains, and what was dropped");
    }
}
