//! Bound on staleness, checked before training (law V2). Pure.

use crate::data::{Batch, Dropped, Group, Sample, Version};
use crate::rollout::STALE;
use crate::settings::declare::choices;

choices! {
    /// Policy for tokens older than `max_staleness`.
    pub enum OnStale {
        /// no tokens are stale, because admission holds prompts back. A stale token ends the run
        /// with an error.
        "wait" => Wait,
        /// the whole group is dropped and counted, and another prompt enters. Long completions are
        /// dropped more often than short ones.
        "drop" => Drop,
        /// stale tokens weigh nothing in the loss; a group without any other token is dropped.
        "mask" => Mask,
    }
}

/// `sample_staleness`: version trained − oldest version that sampled a token; `None` if no token
/// was sampled.
pub fn staleness(sample: &Sample, trained: Version) -> Option<u64> {
    sample.versions.oldest().map(|oldest| trained.saturating_sub(oldest))
}

/// The batch as it may be trained under `trained`, and how many groups that cost.
pub(super) fn within_bound(mut batch: Batch, trained: Version, bound: u64, policy: OnStale) -> Result<(Batch, u64), String> {
    let too_old = |sample: &Sample| staleness(sample, trained).is_some_and(|lag| lag > bound);
    match policy {
        OnStale::Wait => {
            let Some(stale) = batch.samples().find(|sample| too_old(sample)) else { return Ok((batch, 0)) };
            let (index, group, sampled) = (stale.index, stale.group_index, stale.versions.oldest().unwrap_or_default());
            Err(format!(
                "tokens are too old: sample {index} of group {group} has tokens of version {sampled}, {} before version {trained} that is \
                 trained, and at most {bound} are allowed; widen max_staleness or choose a policy for stale tokens (on_stale)",
                trained - sampled
            ))
        }
        OnStale::Drop => Ok(give_up(batch, |group| group.samples.iter().any(too_old))),
        OnStale::Mask => {
            for sample in batch.groups.iter_mut().flat_map(|group| &mut group.samples) {
                for (mask, version) in sample.loss_mask.iter_mut().zip(sample.versions.per_token()) {
                    if version.is_some_and(|version| trained.saturating_sub(version) > bound) {
                        *mask = 0.0;
                    }
                }
            }
            let was_masked = |group: &Group| group.samples.iter().any(too_old);
            Ok(give_up(batch, |group| was_masked(group) && group.samples.iter().all(|sample| sample.learned() == 0)))
        }
    }
}

/// The batch without these groups, and how many they were.
fn give_up(batch: Batch, stale: impl Fn(&Group) -> bool) -> (Batch, u64) {
    let Batch { groups, mut dropped, mut spared, more } = batch;
    let (stale, groups): (Vec<_>, Vec<_>) = groups.into_iter().partition(stale);
    dropped.extend(stale.iter().map(|group| Dropped::new(group, STALE)));
    spared.retain(|id| stale.iter().all(|group| group.id() != *id));
    (Batch { groups, dropped, spared, more }, stale.len() as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::Prompt;

    /// Two groups of one sample: tokens of versions 3 and 5, and of version 5 alone.
    fn batch() -> Batch {
        let group = |ordinal, versions: &[Version]| {
            let prompt = Prompt { ordinal, ..Prompt::default() };
            let mut sample = Sample::begin(&prompt, 0, &[1]);
            versions.iter().for_each(|version| sample.push(2, -0.5, *version));
            Group { samples: vec![Sample { reward: Some(1.0), ..sample }], prompt: Arc::new(prompt), ..Group::default() }
        };
        Batch { groups: vec![group(0, &[3, 5]), group(1, &[5])], ..Batch::default() }
    }

    #[test]
    fn what_is_within_the_bound_passes_untouched_under_every_policy() {
        for policy in [OnStale::Wait, OnStale::Drop, OnStale::Mask] {
            assert_eq!(within_bound(batch(), 5, 2, policy), Ok((batch(), 0)));
        }
    }

    #[test]
    fn what_is_older_is_an_error_dropped_or_masked() {
        let error = within_bound(batch(), 6, 2, OnStale::Wait).unwrap_err();
        assert!(error.contains("sample 0 of group 0 has tokens of version 3, 3 before version 6"), "{error}");
        let (dropped, groups) = within_bound(batch(), 6, 2, OnStale::Drop).unwrap();
        assert_eq!((groups, dropped.groups.len(), dropped.dropped[0].generated()), (1, 1, 2));
        let (masked, groups) = within_bound(batch(), 6, 2, OnStale::Mask).unwrap();
        assert_eq!(groups, 0);
        assert_eq!(masked.groups[0].samples[0].loss_mask, [0.0, 0.0, 1.0]);
        assert_eq!(masked.groups[1].samples[0].loss_mask, [0.0, 1.0]);
        let (masked, groups) = within_bound(batch(), 8, 2, OnStale::Mask).unwrap();
        assert_eq!((groups, masked.groups.len(), masked.dropped.len()), (2, 0, 2), "nothing is left to learn from");
    }
}
