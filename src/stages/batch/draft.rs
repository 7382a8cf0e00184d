//! Collection of a batch: the groups that may enter it, the groups that finished early, and when it
//! is complete.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Batcher, MissingGroup, Repeated};
use crate::data::{Batch, Dropped, Group, Scored, Version};
use crate::rollout::{Admission, Fate, STALE, SURPLUS};
use crate::stages::train::{OnStale, staleness};

pub(super) struct Draft<'a> {
    batcher: &'a Batcher,
    /// Ids that enter again, in the order of their entry, and the next new id.
    again: VecDeque<u64>,
    next: u64,
    /// Oldest groups that are in no batch yet and were not dropped: the batch chooses from them.
    choice: BTreeSet<u64>,
    /// Number of groups in the choice.
    choice_size: usize,
    /// Finished groups that are not in the choice yet.
    early: BTreeMap<u64, Scored>,
    /// Finished and kept groups in the choice, each with true if a filter had rejected it.
    ready: BTreeMap<u64, (Group, bool)>,
    /// Groups in batches so far, including those before a resume.
    taken: u64,
    /// Smallest part of a batch, in groups, that is sent early; none: batches are sent whole.
    part: Option<usize>,
    /// Groups of the present batch that were sent early.
    sent: usize,
    /// If true, rounds have more groups than their steps train, and the rest of each is dropped.
    over_samples_rounds: bool,
    batch: Batch,
}

impl<'a> Draft<'a> {
    /// Starts from the state of the admission.
    pub fn new(batcher: &'a Batcher) -> Self {
        let Batcher { size, choice, admission, on_stale, part } = batcher;
        let admission = admission.as_ref();
        let (again, next) = admission.map(Admission::interrupted_groups).unwrap_or_default();
        let trained = |admission: &Admission| admission.totals().groups.get(&Fate::Trained).copied();
        let over_samples_rounds = admission.is_some_and(Admission::in_rounds) && choice > size;
        // The groups that a step takes of a round must not depend on timing (law V3): they are the oldest.
        let choice_size = if over_samples_rounds { *size } else { *choice };
        // Ready groups are certain only if a batch takes its whole choice and nothing expires. The
        // last part of an over-sampled round could be empty.
        let certain = choice_size == *size && *on_stale == OnStale::Wait && !over_samples_rounds;
        Draft {
            batcher,
            again: again.into(),
            next,
            choice: BTreeSet::new(),
            choice_size,
            early: BTreeMap::new(),
            ready: BTreeMap::new(),
            taken: admission.and_then(trained).unwrap_or_default(),
            part: part.map(|least| least.max(1)).filter(|_| certain),
            sent: 0,
            over_samples_rounds,
            batch: Batch::default(),
        }
    }

    /// Counts a finished group, and moves groups whose turn has come into the choice. Refuses one that came
    /// before.
    pub fn arrive(&mut self, scored: Scored) -> Result<(), Repeated> {
        let id = scored.group().id();
        let is_over = id < self.next && !self.choice.contains(&id) && !self.again.contains(&id);
        if is_over || self.early.contains_key(&id) || self.ready.contains_key(&id) {
            return Err(Repeated(id));
        }
        if let Some(admission) = &self.batcher.admission {
            let dropped = u64::from(scored.dropped().is_some());
            admission.judged(1 - dropped, dropped);
            admission.batched(scored.dropped().map(|_| id));
        }
        self.early.insert(id, scored);
        self.admit();
        Ok(())
    }

    /// Returns the complete batch, or a part of it: the oldest ready groups, ordered by id.
    pub fn close(&mut self) -> Option<Batch> {
        self.expire();
        let missing = self.batcher.size - self.sent;
        let round = self.ending_round();
        let more = self.ready.len() < missing || self.must_wait() || round.is_some_and(|round| !round.round_is_judged());
        let ends_round = round.is_some() && !more;
        if more && self.part.is_none_or(|least| self.ready.len() < least) {
            return None;
        }
        let rest = self.ready.keys().nth(missing).copied();
        let later = rest.map(|first| self.ready.split_off(&first)).unwrap_or_default();
        let ready = std::mem::replace(&mut self.ready, later);
        let spared = ready.iter().filter(|(_, (_, spared))| *spared).map(|(id, _)| *id).collect();
        let groups: Vec<Group> = ready.into_values().map(|(group, _)| group).collect();
        for group in &groups {
            self.choice.remove(&group.id());
        }
        if let Some(admission) = &self.batcher.admission {
            admission.batched(groups.iter().map(Group::id));
        }
        self.sent += groups.len();
        if !more {
            self.taken += std::mem::take(&mut self.sent) as u64;
        }
        if ends_round {
            self.drop_surplus();
        }
        let mut batch = Batch { groups, spared, more, ..std::mem::take(&mut self.batch) };
        batch.dropped.sort_by_key(|dropped| dropped.id);
        self.admit();
        Some(batch)
    }

    /// Returns the oldest group that has not arrived, if later ones wait for it.
    pub fn awaited(&self) -> Option<MissingGroup> {
        let missing = *self.choice.iter().find(|id| !self.ready.contains_key(id))?;
        let waiting = self.ready.keys().chain(self.early.keys()).filter(|id| **id > missing).count();
        (waiting > 0).then_some(MissingGroup { missing, waiting })
    }

    /// Moves groups whose turn has come out of `early`.
    fn admit(&mut self) {
        loop {
            while self.choice.len() + self.sent < self.choice_size {
                let next = self.again.pop_front().unwrap_or_else(|| {
                    self.next += 1;
                    self.next - 1
                });
                self.choice.insert(next);
            }
            let id = self.early.keys().find(|id| self.choice.contains(id)).copied();
            let Some(scored) = id.and_then(|id| self.early.remove(&id)) else { return };
            let spared = scored.is_spared();
            match scored.settle() {
                Ok(group) => drop(self.ready.insert(group.id(), (group, spared))),
                Err(dropped) => {
                    self.choice.remove(&dropped.id);
                    self.batch.dropped.push(*dropped);
                }
            }
        }
    }

    /// Returns the admission if the present batch is the last that the version of an over-sampled
    /// round trains.
    fn ending_round(&self) -> Option<&'a Admission> {
        let admission = self.batcher.admission.as_ref().filter(|_| self.over_samples_rounds)?;
        let taken = self.taken + self.batcher.size as u64;
        taken.is_multiple_of(admission.pace().groups_per_version.max(1)).then_some(admission)
    }

    /// Drops the rest of a round, which is complete: it would be too old under the next version
    /// (law V2).
    fn drop_surplus(&mut self) {
        let mut surplus = Vec::new();
        self.admit();
        while !self.ready.is_empty() {
            for (group, _) in std::mem::take(&mut self.ready).into_values() {
                self.choice.remove(&group.id());
                surplus.push(Dropped::new(&group, SURPLUS));
            }
            self.admit();
        }
        if let Some(admission) = &self.batcher.admission {
            admission.surplus(surplus.len() as u64);
            admission.batched(surplus.iter().map(|dropped| dropped.id));
        }
        self.batch.dropped.extend(surplus);
    }

    /// Returns the bound on staleness, and the version that this batch will be trained under.
    fn bound(&self) -> Option<(&'a Admission, u64, Version)> {
        let admission = self.batcher.admission.as_ref()?;
        Some((admission, admission.bound()?, admission.pace().trained_under(self.taken)))
    }

    /// Returns true if missing groups would find no room before they are too old, once the batch
    /// leaves without them.
    fn must_wait(&self) -> bool {
        let Some((admission, _, _)) = self.bound().filter(|_| self.batcher.on_stale == OnStale::Wait) else { return false };
        let chosen: BTreeSet<u64> = self.ready.keys().take(self.batcher.size).copied().collect();
        let left_behind: Vec<(u64, Version)> = admission.due().into_iter().filter(|(id, _)| !chosen.contains(id)).collect();
        let taken = self.taken + self.batcher.size as u64;
        let room = |last: Version| admission.pace().trained_by_the_end_of(last).saturating_sub(taken);
        let Some(late) = (0..left_behind.len()).find(|&rank| rank as u64 >= room(left_behind[rank].1)) else { return false };
        // If none is missing, a wait would not help; the trainer reports the error.
        left_behind[..=late].iter().any(|(id, _)| !self.ready.contains_key(id) && !self.early.contains_key(id))
    }

    fn expire(&mut self) {
        let Some((admission, bound, version)) = self.bound().filter(|_| self.batcher.on_stale == OnStale::Drop) else { return };
        let lag = |group: &Group| group.samples.iter().filter_map(|sample| staleness(sample, version)).max();
        while let Some((stale, _)) = self.ready.values().find(|(group, _)| lag(group) > Some(bound)) {
            let dropped = Dropped::new(stale, STALE);
            admission.gave_up(1);
            admission.batched([dropped.id]);
            self.ready.remove(&dropped.id);
            self.choice.remove(&dropped.id);
            self.batch.dropped.push(dropped);
            self.admit();
        }
    }
}
