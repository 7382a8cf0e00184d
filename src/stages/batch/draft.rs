//! The batch that is being collected, and what finished too early for it. Who may go into it, and when it is complete.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::data::{Batch, Dropped, Group, Scored, Version};
use crate::rollout::Due;
use crate::rollout::{Admission, Fate, STALE, SURPLUS};
use crate::stages::train::{OnStale, staleness};

/// The ids in the order of their entry.
struct Turns {
    again: VecDeque<u64>,
    next: u64,
}

impl Turns {
    fn pass(&mut self) -> u64 {
        self.again.pop_front().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }
}

/// The oldest groups that are in no batch yet and were not dropped.
struct Choice {
    turns: Turns,
    size: usize,
    ids: BTreeSet<u64>,
}

impl Choice {
    /// Up to what is left to choose from, where `sent` groups of the batch are gone already.
    fn refill(&mut self, sent: usize) {
        while self.ids.len() + sent < self.size {
            self.ids.insert(self.turns.pass());
        }
    }
}

pub(super) struct Draft {
    size: usize,
    /// What the batch chooses from; none: whatever is finished.
    choice: Option<Choice>,
    admission: Option<Admission>,
    on_stale: OnStale,
    /// Finished, and not to be chosen from yet.
    early: BTreeMap<u64, Scored>,
    /// Finished, kept and to be chosen from.
    ready: BTreeMap<u64, Group>,
    /// Ids of those among them that a filter had rejected.
    spared: BTreeSet<u64>,
    /// Groups in batches so far, those of a run that this one resumes included.
    taken: u64,
    /// Fewest groups that are sent ahead of the rest of their batch; none: batches are sent whole.
    part: Option<usize>,
    /// Groups of the present batch that were.
    sent: usize,
    /// If true, rounds have more groups than their steps train, and the rest of each is dropped.
    over_samples_rounds: bool,
    batch: Batch,
}

impl Draft {
    /// Goes on where the admission stands.
    pub fn new(size: usize, choice: Option<usize>, admission: Option<Admission>, on_stale: OnStale) -> Self {
        let (again, next) = admission.as_ref().map(Admission::interrupted_groups).unwrap_or_default();
        let trained = |admission: &Admission| admission.totals().groups.get(&Fate::Trained).copied();
        let turns = Turns { again: again.into(), next };
        let in_rounds = admission.as_ref().is_some_and(Admission::in_rounds);
        let over_samples_rounds = in_rounds && choice.is_some_and(|choice| choice > size);
        // What a step takes of a round must not depend on what finishes first (law V3): it is the oldest groups.
        let choice = if over_samples_rounds { Some(size) } else { choice };
        Draft {
            size,
            choice: choice.map(|size| Choice { turns, size, ids: BTreeSet::new() }),
            taken: admission.as_ref().and_then(trained).unwrap_or_default(),
            admission,
            on_stale,
            early: BTreeMap::new(),
            ready: BTreeMap::new(),
            spared: BTreeSet::new(),
            part: None,
            sent: 0,
            over_samples_rounds,
            batch: Batch::default(),
        }
    }

    /// Sends what is certain to be in a batch ahead of the rest, `least` groups or more at a time. Certain is what is ready only where a batch
    /// takes all that it chooses from and nothing expires; elsewhere batches stay whole.
    pub fn in_parts(mut self, least: usize) -> Self {
        let certain = self.choice.as_ref().is_some_and(|choice| choice.size == self.size) && self.on_stale == OnStale::Wait;
        // The last part of an over-sampled round could be empty.
        self.part = (certain && !self.over_samples_rounds).then_some(least.max(1));
        self
    }

    /// Judges a finished group, and lets those in that have their turn.
    pub fn arrive(&mut self, scored: Scored) {
        let id = scored.group().id();
        if let Some(admission) = &self.admission {
            let dropped = u64::from(scored.dropped().is_some());
            admission.judged(1 - dropped, dropped);
            admission.batched(scored.dropped().map(|_| id));
        }
        self.early.insert(id, scored);
        self.admit();
    }

    /// The batch, once it is complete, ordered by id: the oldest groups that are ready. Or a part of it.
    pub fn close(&mut self) -> Option<Batch> {
        self.expire();
        let missing = self.size - self.sent;
        let round = self.ending_round();
        let more = self.ready.len() < missing || self.must_wait() || round.is_some_and(|round| !round.round_is_judged());
        let ends_round = round.is_some() && !more;
        if more && self.part.is_none_or(|least| self.ready.len() < least) {
            return None;
        }
        let rest = self.ready.keys().nth(missing).copied();
        let later = rest.map(|first| self.ready.split_off(&first)).unwrap_or_default();
        let groups: Vec<Group> = std::mem::replace(&mut self.ready, later).into_values().collect();
        groups.iter().for_each(|group| self.leave(group.id()));
        if let Some(admission) = &self.admission {
            admission.batched(groups.iter().map(Group::id));
        }
        self.sent += groups.len();
        let id = self.batch.id + u64::from(!more);
        if !more {
            self.taken += std::mem::take(&mut self.sent) as u64;
        }
        if ends_round {
            self.drop_surplus();
        }
        let following = Batch { id, ..Batch::default() };
        let spared = groups.iter().map(Group::id).filter(|id| self.spared.remove(id)).collect();
        let mut batch = Batch { groups, spared, more, ..std::mem::replace(&mut self.batch, following) };
        batch.dropped.sort_by_key(|dropped| dropped.id);
        self.admit();
        Some(batch)
    }

    /// Moves what has its turn out of `early`.
    fn admit(&mut self) {
        loop {
            let id = match &mut self.choice {
                Some(choice) => {
                    choice.refill(self.sent);
                    self.early.keys().find(|id| choice.ids.contains(id)).copied()
                }
                None => self.early.keys().next().copied(),
            };
            let Some(scored) = id.and_then(|id| self.early.remove(&id)) else { return };
            if scored.is_spared() {
                self.spared.insert(scored.group().id());
            }
            match scored.settle() {
                Ok(group) => drop(self.ready.insert(group.id(), group)),
                Err(dropped) => {
                    self.leave(dropped.id);
                    self.batch.dropped.push(*dropped);
                }
            }
        }
    }

    /// The admission of an over-sampled round if the present batch is the last that its version trains.
    fn ending_round(&self) -> Option<&Admission> {
        let admission = self.admission.as_ref().filter(|_| self.over_samples_rounds)?;
        let taken = self.taken + self.size as u64;
        taken.is_multiple_of(admission.pace().groups_per_version.max(1)).then_some(admission)
    }

    /// Drops what is left of a round, all of which is here: under the next version it would be too old (law V2).
    fn drop_surplus(&mut self) {
        let mut surplus = Vec::new();
        self.admit();
        while !self.ready.is_empty() {
            for group in std::mem::take(&mut self.ready).into_values() {
                self.spared.remove(&group.id());
                self.leave(group.id());
                surplus.push(Dropped::new(&group, SURPLUS));
            }
            self.admit();
        }
        if let Some(admission) = &self.admission {
            admission.surplus(surplus.len() as u64);
            admission.batched(surplus.iter().map(|dropped| dropped.id));
        }
        self.batch.dropped.extend(surplus);
    }

    fn leave(&mut self, id: u64) {
        if let Some(choice) = &mut self.choice {
            choice.ids.remove(&id);
        }
    }

    /// The bound on staleness, and the version under which this batch will be trained.
    fn bound(&self) -> Option<(&Admission, u64, Version)> {
        let admission = self.admission.as_ref()?;
        Some((admission, admission.bound()?, admission.pace().trained_under(self.taken)))
    }

    /// Whether groups are missing for which there would be no room before they are too old, if the batch went without them.
    fn must_wait(&self) -> bool {
        let Some((admission, _, _)) = self.bound().filter(|_| self.on_stale == OnStale::Wait) else { return false };
        let chosen: BTreeSet<u64> = self.ready.keys().take(self.size).copied().collect();
        let left_behind: Vec<Due> = admission.due().into_iter().filter(|due| !chosen.contains(&due.id)).collect();
        let taken = self.taken + self.size as u64;
        let room = |due: &Due| admission.pace().trained_by_the_end_of(due.last).saturating_sub(taken);
        let Some(late) = (0..left_behind.len()).find(|&rank| rank as u64 >= room(&left_behind[rank])) else { return false };
        // If all are here, waiting would not help; the trainer will say what is wrong.
        left_behind[..=late].iter().any(|due| !self.ready.contains_key(&due.id) && !self.early.contains_key(&due.id))
    }

    /// Gives up what has become too old, where that is the policy.
    fn expire(&mut self) {
        while let Some(dropped) = self.expired() {
            if let Some(admission) = &self.admission {
                admission.gave_up(1);
                admission.batched([dropped.id]);
            }
            self.ready.remove(&dropped.id);
            self.spared.remove(&dropped.id);
            self.leave(dropped.id);
            self.batch.dropped.push(dropped);
            self.admit();
        }
    }

    fn expired(&self) -> Option<Dropped> {
        let (_, bound, version) = self.bound().filter(|_| self.on_stale == OnStale::Drop)?;
        let lag = |group: &Group| group.samples.iter().filter_map(|sample| staleness(sample, version)).max();
        self.ready.values().find(|group| lag(group) > Some(bound)).map(|group| Dropped::new(group, STALE))
    }
}
