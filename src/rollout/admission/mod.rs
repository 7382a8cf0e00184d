//! Admission of prompts and the ledger of their tokens: one handle for all stages of a loop.
//!
//! The source enters prompts, the generator records sampled tokens, the batcher judges groups, the
//! trainer settles them, and the weight sync reports versions. Laws: V2 and V4 by [`Pace`], D4 and
//! C1's partial cache by [`Ledger`]. Cost: a lock and a few map look-ups a token.

mod ledger;
mod pace;

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

pub use ledger::{Fate, LOST, Ledger, OpenGroup, STALE, SURPLUS, TRUNCATED, TokensMissing, Totals};
pub use pace::Pace;
pub(crate) use pace::PaceRule;

use super::curriculum::{Census, Curriculum, CurriculumState};
use crate::data::source::Place;
use crate::data::{Answer, Batch, BufferState, Group, Partial, Prompt, SampledToken, Version};
use crate::engine::OlderVersions;
use crate::flow::{Flow, Window};
use crate::observe::Metrics;

/// Callers that admit prompts, for the error of a stalled run.
const RAISED_BY: &str = "`Admission::published` after each publish, called by the stage that publishes weights, and `Admission::judged` for \
                         dropped groups, called by the batcher";

/// Admission of prompts in one loop. Clones share their state.
#[derive(Clone, Debug)]
pub struct Admission {
    window: Window,
    /// Largest token lag, which the trainer asserts.
    max_staleness: Option<u64>,
    /// If true, places of dropped groups come back only after all admitted groups were judged.
    rounds: bool,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    pace: Pace,
    /// Set if the batcher and the trainer of a flow determine the pace.
    by_stages: Option<PaceRule>,
    /// Groups of a batch, once a batcher was attached.
    groups_per_batch: Option<u64>,
    /// If true, batches choose from more groups than they take, so that a group may be passed over.
    chooses: bool,
    version: Version,
    /// Groups that were settled before this process started.
    start: u64,
    /// Groups that reached the batcher.
    judged: u64,
    /// Groups that will never be trained.
    dropped: u64,
    /// Ids of unsettled groups that have left the batcher.
    batched: BTreeSet<u64>,
    /// Ids of the groups that were open when the run was interrupted, and the next new id.
    interrupted: (Vec<u64>, u64),
    ledger: Ledger,
    data: Option<BufferState>,
    curriculum: Option<Curriculum>,
    /// State of a curriculum that has not come yet.
    learned: Option<CurriculumState>,
    /// If true, a filter had rejected the newest trained group.
    spared: bool,
}

impl State {
    /// Version that trains an open group at the latest, if batches take the oldest groups from now on.
    fn will_train(&self, ordinal: u64) -> Version {
        let passed_over = self.batched.range(ordinal + 1..).count() as u64;
        // The batch that is being chosen may pass the group over, too.
        let choosing = if self.chooses { self.groups_per_batch.unwrap_or(0) } else { 0 };
        self.pace.trained_under(self.ledger.before(ordinal) + passed_over + choosing).max(self.version)
    }

    fn set_pace(&mut self, change: impl FnOnce(&mut PaceRule)) {
        if let Some(rule) = &mut self.by_stages {
            change(rule);
            self.pace = rule.pace();
        }
    }
}

/// The part of a checkpoint that is neither model nor optimizer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Position in the stream of prompts; none if the stream cannot be resumed.
    pub data: Option<BufferState>,
    /// Fates of the admitted prompts and their tokens.
    pub ledger: Ledger,
    /// Pass rates and position of the curriculum, if the run has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub curriculum: Option<CurriculumState>,
    /// If true, a filter had rejected the newest trained group, and keeps what it rejects until a
    /// group passes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spared: bool,
}

impl Admission {
    /// Admits at most `in_flight` groups between their prompt and the publish after their training,
    /// and `total` in the whole run; each version trains `groups_per_version` of them. Admits
    /// nothing before the first publish (law V4).
    pub fn new(groups_per_version: u64, in_flight: u64, total: Option<u64>) -> Self {
        Admission::paced(Pace { groups_per_version, in_flight, total }, None)
    }

    /// Admission whose pace the batcher and the trainer of a flow determine. Admits nothing without
    /// them.
    pub(super) fn paced_by_stages(max_staleness: u64) -> Self {
        let rule = PaceRule { steps_per_version: 1, max_staleness, ..PaceRule::default() };
        let admission = Admission::paced(Pace::default(), Some(rule)).bounded(max_staleness);
        Admission { window: admission.window.clone().raised_by_stages(), ..admission }
    }

    fn paced(pace: Pace, by_stages: Option<PaceRule>) -> Self {
        let state = State { pace, by_stages, ..State::default() };
        let window = Window::new(0).raised_by(RAISED_BY);
        Admission { window, max_staleness: None, rounds: false, state: Arc::new(Mutex::new(state)) }
    }

    /// Declares that batches have `groups` groups, each batch chosen from up to `candidates`
    /// groups. A batcher calls it in its `attach`.
    pub fn batches_of(&self, groups: u64, candidates: u64) {
        let mut state = self.state();
        (state.groups_per_batch, state.chooses) = (Some(groups), candidates > groups);
        state.set_pace(|rule| (rule.groups, rule.candidates) = (groups, candidates));
    }

    /// Declares that weights are published after every `steps_per_version` batches, and the number
    /// of steps of the run. A trainer calls it in its `attach`.
    pub fn versions_of(&self, steps_per_version: u64, steps: Option<u64>) {
        self.state().set_pace(|rule| (rule.steps_per_version, rule.steps) = (steps_per_version, steps));
    }

    /// Groups of a batch, if a batcher takes part.
    pub(crate) fn groups_per_batch(&self) -> Option<u64> {
        self.state().groups_per_batch
    }

    /// Admission that bounds the token lag by `versions`, if each version trains `groups` groups. 0
    /// is the synchronous run, which works in rounds.
    pub fn max_staleness(versions: u64, groups: usize) -> Self {
        let groups = groups as u64;
        Admission::new(groups, versions.saturating_add(1).saturating_mul(groups), None).bounded(versions)
    }

    /// Bounds the token lag by `versions`, which the trainer asserts (law V2). With 0 the run is
    /// synchronous to the bit (law V3): it works in rounds, whose prompts depend only on the groups
    /// that were dropped before.
    pub fn bounded(self, versions: u64) -> Self {
        Admission { max_staleness: Some(versions), rounds: versions == 0, ..self }
    }

    /// Window that the source waits on.
    pub fn window(&self) -> Window {
        self.window.clone()
    }

    /// The bound of [`Admission::bounded`].
    pub fn bound(&self) -> Option<u64> {
        self.max_staleness
    }

    /// Arithmetic of the window.
    pub fn pace(&self) -> Pace {
        self.state().pace
    }

    /// Returns true if prompts enter in rounds.
    pub fn in_rounds(&self) -> bool {
        self.rounds
    }

    /// Reports that the generators have the weights of `version`.
    pub fn published(&self, version: Version) {
        let mut state = self.state();
        state.version = version;
        state.curriculum.iter_mut().for_each(Curriculum::published);
        self.open_window(&state);
    }

    fn open_window(&self, state: &State) {
        self.window.limit_to(state.pace.limit(state.version, state.dropped));
    }

    /// Reports groups that reached the batcher: `kept` will be trained, `dropped` will not.
    pub fn judged(&self, kept: u64, dropped: u64) {
        let mut state = self.state();
        state.judged += kept + dropped;
        state.dropped += dropped;
        // A round with enough groups for its version admits no more.
        let short = || state.judged - state.dropped < state.pace.trained_by_the_end_of(state.version);
        if !self.rounds || (state.judged >= self.window.limit() && short()) {
            self.open_window(&state);
        }
    }

    /// Returns true if every group that may enter under the present version was judged.
    pub(crate) fn round_is_judged(&self) -> bool {
        self.state().judged >= self.window.limit()
    }

    /// Counts groups of a round that no step of its version needed. Their places come back with the
    /// next version: a prompt that entered in their place now would be too old when it is trained.
    pub(crate) fn surplus(&self, groups: u64) {
        self.state().dropped += groups;
    }

    /// Reports groups that left the batcher for the trainer, or were dropped.
    pub fn batched(&self, ids: impl IntoIterator<Item = u64>) {
        self.state().batched.extend(ids);
    }

    /// Ids of groups that are in no batch yet, oldest first, each with the last version that may train it.
    /// O(groups in flight).
    pub(crate) fn due(&self) -> Vec<(u64, Version)> {
        let Some(bound) = self.max_staleness else { return Vec::new() };
        let state = self.state();
        let open = state.ledger.open().filter(|group| !state.batched.contains(&group.prompt.ordinal));
        open.map(|group| (group.prompt.ordinal, group.oldest().saturating_add(bound))).collect()
    }

    /// Number of prompts that a generator is still to receive in this round, after `received` in
    /// the run.
    pub fn rest_of_round(&self, received: u64) -> u64 {
        self.window.limit().saturating_sub(self.state().start + received)
    }

    /// Admits a prompt.
    pub fn enter(&self, prompt: &Prompt) {
        let mut state = self.state();
        let version = state.version;
        state.ledger.enter(prompt, version);
    }

    /// Takes the partial completions off a prompt that a generator with `version` takes up, and
    /// returns those to be continued (law D7). Completions that are not `usable` are discarded and
    /// counted as truncated, and so are those that would be too old when they are trained (law V2).
    ///
    /// A run in rounds continues none: it samples them again and gets the same tokens, because only
    /// work that is computed together in the same way is the same to the bit (law V3).
    pub fn resume(&self, prompt: &mut Prompt, version: Version, usable: impl Fn(&Answer) -> bool) -> Partial {
        let (ordinal, mut partial) = (prompt.ordinal, std::mem::take(&mut prompt.partial));
        let mut state = self.state();
        let continues = |answer: &Answer| !self.rounds && usable(answer) && !self.expired(&state, ordinal, answer, version);
        for index in partial.retain(continues) {
            state.ledger.discard(ordinal, index);
        }
        partial
    }

    /// Returns true if the lag of a completion's oldest token would exceed the bound when its group
    /// is trained. `version` is the newest; dropped groups do not delay later ones.
    pub fn expires(&self, ordinal: u64, answer: &Answer, version: Version) -> bool {
        self.expired(&self.state(), ordinal, answer, version)
    }

    fn expired(&self, state: &State, ordinal: u64, answer: &Answer, version: Version) -> bool {
        let (Some(bound), Some(oldest)) = (self.max_staleness, answer.versions.oldest()) else { return false };
        let dropped = state.dropped.saturating_sub(state.ledger.dropped());
        let trained_under = state.pace.trained_under(state.ledger.before(ordinal).saturating_sub(dropped));
        trained_under.max(version).saturating_sub(oldest) > bound
    }

    /// Records sampled tokens, under one lock.
    pub fn sampled(&self, tokens: impl IntoIterator<Item = SampledToken>) {
        let mut ledger = self.ledger();
        tokens.into_iter().for_each(|token| ledger.sampled(token));
    }

    /// Gives back the places of groups that the trainer found too old.
    pub fn gave_up(&self, groups: u64) {
        let mut state = self.state();
        state.dropped += groups;
        self.open_window(&state);
    }

    /// Settles a trained batch. Fails if the ledger does not balance after it (law D4).
    pub fn settle(&self, batch: &Batch) -> Result<Totals, String> {
        let mut state = self.state();
        state.ledger.settle(batch);
        state.curriculum.iter_mut().for_each(|curriculum| curriculum.settle(batch));
        if !self.rounds
            && let Some(newest) = batch.groups.last()
        {
            state.spared = batch.spared.contains(&newest.id());
        }
        for id in batch.groups.iter().map(Group::id).chain(batch.dropped.iter().map(|dropped| dropped.id)) {
            state.batched.remove(&id);
        }
        state.ledger.totals().balanced()
    }

    /// Lets this curriculum choose the prompts. A restored state continues.
    pub(crate) fn learn_from(&self, curriculum: &Curriculum) {
        let mut state = self.state();
        let mut curriculum = curriculum.clone();
        match state.learned.take() {
            Some(learned) => curriculum.resume(learned),
            None => curriculum.begin_at(state.ledger.next()),
        }
        state.curriculum = Some(curriculum);
    }

    /// Chooses the record of the next prompt. `at` is the stream without a curriculum.
    pub(crate) fn choose(&self, at: impl FnMut(u64) -> Place) -> (u64, Place) {
        let mut state = self.state();
        let ordinal = state.ledger.next();
        let mut at = at;
        let place = state.curriculum.as_mut().map(|curriculum| curriculum.choose(ordinal, &mut at));
        (ordinal, place.unwrap_or_else(|| at(ordinal)))
    }

    /// Reports that a filter begins or ends to keep what it rejects. Groups reach it in any order: in rounds,
    /// where none is in flight at a checkpoint, its own state is restored, and else that of the newest group.
    pub(crate) fn spares(&self, spares: bool) {
        if self.rounds {
            self.state().spared = spares;
        }
    }

    /// Returns true if a filter kept what it rejected.
    pub(crate) fn has_spared(&self) -> bool {
        self.state().spared
    }

    /// Counts of the curriculum, if there is one.
    pub fn census(&self) -> Option<Census> {
        self.state().curriculum.as_ref().map(Curriculum::census)
    }

    /// Present sums of the ledger.
    pub fn totals(&self) -> Totals {
        self.ledger().totals()
    }

    /// Discards a completion that is restarted. Returns the number of its tokens, which count as
    /// truncated.
    pub fn discard(&self, ordinal: u64, index: u32) -> u64 {
        self.ledger().discard(ordinal, index)
    }

    /// The ledger, locked until the result is dropped: take it once in a statement.
    pub(crate) fn ledger(&self) -> MappedMutexGuard<'_, Ledger> {
        MutexGuard::map(self.state(), |state| &mut state.ledger)
    }

    /// Ids of the groups that re-enter after an interruption, oldest first, and the next new id.
    pub(crate) fn interrupted_groups(&self) -> (Vec<u64>, u64) {
        self.state().interrupted.clone()
    }

    /// Prompts that re-enter after an interruption, oldest first, each with its partial completions
    /// (law D7), and the position at which the stream resumes.
    pub(crate) fn interrupted(&self) -> (Vec<Prompt>, Option<BufferState>) {
        let state = self.state();
        (state.ledger.open().map(OpenGroup::reentering).collect(), state.data.clone())
    }

    /// Sets the position of the stream of prompts for checkpoints.
    pub(crate) fn data(&self, stream: BufferState) {
        self.state().data = Some(stream);
    }

    /// Present progress, for a checkpoint.
    pub fn progress(&self) -> Progress {
        let state = self.state();
        let next = state.ledger.next();
        Progress {
            data: state.data.clone().map(|data| BufferState { next, ..data }),
            ledger: state.ledger.clone(),
            curriculum: state.curriculum.as_ref().map(|curriculum| curriculum.state().clone()),
            spared: state.spared,
        }
    }

    /// Restores a checkpoint's progress before the run: settled groups stay settled, open ones
    /// re-enter first.
    pub fn restore(&self, progress: Progress) {
        let mut state = self.state();
        let curriculum = state.curriculum.take();
        let totals = progress.ledger.totals();
        let settled = totals.entered - totals.open_groups;
        *state = State {
            pace: state.pace,
            by_stages: state.by_stages,
            groups_per_batch: state.groups_per_batch,
            chooses: state.chooses,
            start: settled,
            judged: settled,
            dropped: totals.dropped(),
            interrupted: (progress.ledger.open().map(|group| group.prompt.ordinal).collect(), progress.ledger.next()),
            ledger: progress.ledger,
            data: progress.data,
            learned: progress.curriculum,
            spared: progress.spared,
            ..State::default()
        };
        self.window.start_at(settled);
        drop(state);
        curriculum.iter().for_each(|curriculum| self.learn_from(curriculum));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl OlderVersions for Admission {
    fn oldest(&self, ordinal: u64) -> Version {
        let state = self.state();
        let entered = state.ledger.open_group(ordinal).map_or(state.version, OpenGroup::oldest);
        let bound = self.max_staleness.unwrap_or(0);
        entered.min(state.will_train(ordinal).saturating_sub(bound))
    }

    fn claim(&self, ordinal: u64, version: Version) -> bool {
        let mut state = self.state();
        let bound = self.max_staleness.unwrap_or(0);
        let allowed = state.will_train(ordinal).saturating_sub(bound) <= version;
        let Some(group) = state.ledger.open_group_mut(ordinal) else { return version >= state.version };
        if allowed && version < group.oldest() {
            group.claimed = Some(version);
        }
        version >= group.oldest()
    }
}

/// Settings of a training loop, which its stages take from the flow. Call them before adding
/// stages.
pub trait TrainingFlow {
    /// Bounds the token lag by `versions`. 0 is the synchronous run, bit for bit on CPUs.
    ///
    /// The batcher and the trainer of the flow determine how many groups each version trains.
    fn max_staleness(self, versions: u64) -> Self;

    /// Paces prompts by this admission.
    fn admission(self, admission: &Admission) -> Self;

    /// Reports to these metrics.
    fn metrics(self, metrics: &Metrics) -> Self;
}

impl TrainingFlow for Flow {
    fn max_staleness(self, versions: u64) -> Self {
        self.share_as("max_staleness", Admission::paced_by_stages(versions))
    }

    fn admission(self, admission: &Admission) -> Self {
        self.share_as("admission", admission.clone())
    }

    fn metrics(self, metrics: &Metrics) -> Self {
        self.share_as("metrics", metrics.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Laws V2, V3: the window is the bound's, or as wide as an over-sampled step chooses from.
    #[test]
    fn the_batcher_and_the_trainer_of_a_flow_determine_the_pace() {
        let pace = |max_staleness, candidates| {
            let admission = Admission::paced_by_stages(max_staleness);
            assert_eq!(admission.pace().in_flight, 0, "nothing enters without a batcher");
            admission.batches_of(8, candidates);
            admission.versions_of(2, Some(10));
            let Pace { groups_per_version, in_flight, total } = admission.pace();
            assert_eq!((groups_per_version, total), (16, Some(80)));
            in_flight
        };
        assert_eq!((pace(1, 8), pace(0, 8)), (32, 16));
        assert_eq!((pace(1, 12), pace(0, 12)), (20, 20));
        assert_eq!((pace(1, 40), pace(0, 40)), (32, 48), "no more than the bound allows, unless a round drops the rest");
        let own = Admission::new(3, 6, None);
        own.batches_of(8, 8);
        assert_eq!((own.pace().groups_per_version, own.groups_per_batch()), (3, Some(8)), "an explicit pace stays");
    }
}
