//! Arithmetic of the admission window, which bounds staleness (first half of law V2). Pure.
//!
//! Let `P` groups be trained under each version, and `W` be the width of the window. When version
//! `v` is published, `(v − 1) · P` groups have been trained, and `(v − 1) · P + W` may have
//! entered, plus one for every dropped group. The group trained `r`-th has entered under version
//! `⌈(r − W) / P⌉ + 1` or later, and is trained under `⌊(r − 1) / P⌋ + 1`. So no token lags by more
//! than `⌊(W − 1) / P⌋`.
//!
//! In another order of training, a late group may lag further: one that entered under `v` must be
//! trained by the end of version `v + S`. All of them fit if the oldest go first, as
//! `W ≤ (S + 1) · P` admits no more than the `(v + S) · P` groups that are trained until then. A
//! batch that takes younger groups must leave room for those it passes over: a schedule by earliest
//! deadline.
//!
//! A run in rounds (`S` = 0) may over-sample, with `W` above `P`. Every group that enters under a
//! version is judged before that version's last step, which drops the surplus: nothing is trained
//! under a later version. The dropped groups' places come back with the next publish.

use crate::data::Version;

/// Constants of a run's admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Groups trained under each version, `P`.
    pub groups_per_version: u64,
    /// Groups between their prompt and the publish after their training, `W`.
    pub in_flight: u64,
    /// Groups that the whole run trains; none if unknown.
    pub total: Option<u64>,
}

impl Pace {
    /// Number of prompts that may have entered under `version`, after `dropped` dropped groups; 0
    /// before the first publish (law V4).
    pub fn limit(&self, version: Version, dropped: u64) -> u64 {
        if version == 0 {
            return 0;
        }
        let paced = (version - 1).saturating_mul(self.groups_per_version).saturating_add(self.in_flight);
        self.total.map_or(paced, |total| paced.min(total)).saturating_add(dropped)
    }

    /// Version that trains a group after `taken` others.
    pub fn trained_under(&self, taken: u64) -> Version {
        taken / self.groups_per_version.max(1) + 1
    }

    /// Number of groups that are trained under `version` and all before it.
    pub fn trained_by_the_end_of(&self, version: Version) -> u64 {
        version.saturating_mul(self.groups_per_version)
    }

    /// Largest token lag if groups are trained in the order of their entry.
    pub fn worst_lag(&self) -> u64 {
        self.in_flight.saturating_sub(1) / self.groups_per_version.max(1)
    }
}

/// Rule by which the window follows from steps that train `groups` groups each, chosen from
/// `candidates`. `P` is `groups · steps_per_version`, and `S` is `max_staleness`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PaceRule {
    pub groups: u64,
    pub candidates: u64,
    pub steps_per_version: u64,
    pub max_staleness: u64,
    /// Steps of the whole run; none if unknown.
    pub steps: Option<u64>,
}

impl PaceRule {
    pub fn groups_per_version(&self) -> u64 {
        self.groups.saturating_mul(self.steps_per_version)
    }

    /// Widest window that keeps law V2 in the order of entry: `(S + 1) · P`. Credit returns when the
    /// generator has loaded the weights of the next publish, so that the last of these groups is
    /// trained S publishes later.
    pub fn staleness_window(&self) -> u64 {
        self.max_staleness.saturating_add(1).saturating_mul(self.groups_per_version())
    }

    /// Window that lets every step choose: the last step before a publish has all candidates, after
    /// the groups of the steps before it are trained.
    pub fn choice_window(&self) -> u64 {
        self.groups_per_version().saturating_sub(self.groups).saturating_add(self.candidates)
    }

    /// Widest window in which no group becomes too old. A synchronous run drops the surplus of its
    /// steps, so that a round may contain all candidates.
    pub fn widest_window(&self) -> u64 {
        let choice = if self.max_staleness == 0 { self.choice_window() } else { 0 };
        self.staleness_window().max(choice)
    }

    /// Default window.
    pub fn window(&self) -> u64 {
        if self.candidates > self.groups { self.choice_window() } else { self.staleness_window() }
    }

    pub fn pace(&self) -> Pace {
        let in_flight = self.window().min(self.widest_window());
        let total = self.steps.map(|steps| steps.saturating_mul(self.groups));
        Pace { groups_per_version: self.groups_per_version(), in_flight, total }
    }
}
