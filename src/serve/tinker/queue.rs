//! A model's thread: operations in the order of their numbers, however they arrive, and their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::Notify;

use super::journal::{Journal, ModelRecord, Snapshot};
use super::operation::{Answer, Operation};
use super::trained::{Ground, Install, Trained};
use crate::flow::caught;
use crate::model::{release_helpers, use_threads};
use crate::serve::reply::Refusal;

/// Updates after which a snapshot shortens the journal.
const SNAPSHOT: u64 = 16;

/// Operations after which a snapshot shortens the journal, if there are fewer updates.
const SNAPSHOT_OPERATIONS: u64 = 1024;

/// Bytes of operations after which a snapshot shortens the journal, if there are fewer updates.
const SNAPSHOT_BYTES: usize = 256 << 20;

/// Most bytes of operations that wait.
const WAITING_BYTES: usize = 256 << 20;

/// Answers that are kept for clients that ask again.
const KEPT: usize = 64;

/// Answers that are kept for clients that never asked, and most operations ahead of the next.
const UNASKED: usize = 4096;

/// Most bytes of a model's answers, as long as there are several.
const KEPT_BYTES: usize = 1 << 30;

/// Time for which a missing operation is waited for. Clients retry for five minutes.
const GAP: Duration = Duration::from_secs(600);

pub(super) struct ModelQueue {
    pub record: ModelRecord,
    shared: Arc<QueueShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct QueueShared {
    /// Locked before the state, which clients that wait for answers lock: they do not wait for the disk.
    journal: Mutex<Journal>,
    state: Mutex<State>,
    /// Wakes the thread.
    work: Condvar,
    /// Wakes those that wait for answers.
    answered: Notify,
    /// Operations up to this number are repeated after a restart.
    repeated: u64,
}

#[derive(Default)]
struct State {
    /// Number of the next operation.
    next: u64,
    /// Largest number so far.
    highest: u64,
    waiting: BTreeMap<u64, Operation>,
    /// Paths of the weights that operations load.
    loads: BTreeMap<u64, String>,
    answers: BTreeMap<u64, Arc<Answer>>,
    /// Bytes of the answers.
    bytes: usize,
    /// Operations whose answer was asked for and is kept.
    asked: BTreeSet<u64>,
    /// True once the model is there, or failed; its answer has the number 0.
    begun: bool,
    /// True if it failed, and a restart has no operations to repeat.
    failed: bool,
    ends: bool,
}

impl State {
    fn answer(&mut self, number: u64, answer: Answer) {
        self.bytes += answer.bytes();
        self.answers.insert(number, Arc::new(answer));
        while self.answers.len() > UNASKED || self.bytes > KEPT_BYTES {
            let others = self.asked.iter().chain(self.answers.keys()).copied();
            let Some(oldest) = others.into_iter().find(|other| *other != number) else { return };
            self.forget(oldest);
        }
    }

    fn forget(&mut self, number: u64) {
        self.asked.remove(&number);
        self.bytes -= self.answers.remove(&number).map_or(0, |answer| answer.bytes());
    }

    fn asked(&mut self, number: u64) {
        self.asked.insert(number);
        while self.asked.len() > KEPT
            && let Some(oldest) = self.asked.iter().copied().find(|asked| *asked != number)
        {
            self.forget(oldest);
        }
    }
}

impl ModelQueue {
    /// Starts the thread of a model. `journaled` are operations that it repeats first.
    pub fn start(ground: Ground, journal: Journal, journaled: BTreeMap<u64, Operation>, install: Install) -> io::Result<Self> {
        let record = journal.record.clone();
        let highest = journaled.keys().next_back().copied().unwrap_or(record.base.done);
        let state = State {
            next: record.base.done + 1,
            highest,
            loads: journaled.iter().filter_map(|(number, operation)| Some((*number, operation.loads()?.to_owned()))).collect(),
            waiting: journaled,
            ..State::default()
        };
        let (journal, state) = (Mutex::new(journal), Mutex::new(state));
        let shared = QueueShared { journal, state, work: Condvar::new(), answered: Notify::new(), repeated: highest };
        let shared = Arc::new(shared);
        let (own, of) = (shared.clone(), record.clone());
        let work = move || {
            use_threads(ground.threads);
            own.run(ground, &of, install);
        };
        let thread = std::thread::Builder::new().name("tinker-model".to_owned()).spawn(work)?;
        Ok(ModelQueue { record, shared, thread: Mutex::new(Some(thread)) })
    }

    /// Takes an operation, and returns its number. One whose number was taken before is not done
    /// again. Without a number it is the next.
    ///
    /// # Errors
    /// It can't be written to the journal, many operations before it are missing, or the model was unloaded.
    pub fn submit(&self, number: Option<u64>, operation: Operation) -> Result<u64, Refusal> {
        // Until it waits, so that no other takes its number.
        let mut journal = self.shared.journal.lock();
        let number = {
            let state = self.shared.state.lock();
            if state.ends {
                return Err(Refusal::new(404, format!("the model {:?} was unloaded", self.record.id)));
            }
            let number = number.filter(|number| *number > 0).unwrap_or(state.highest + 1);
            if number < state.next || state.waiting.contains_key(&number) {
                return Ok(number);
            }
            if number - state.next > UNASKED as u64 {
                let next = state.next;
                let why = format!("operation {number} is too far ahead, for operation {next} is next; submit it again later");
                return Err(Refusal::new(429, why));
            }
            // The next is taken, for the others wait for it.
            let waiting: usize = state.waiting.values().map(Operation::bytes).sum();
            if number > state.next && waiting + operation.bytes() > WAITING_BYTES {
                let why = format!("{} MiB of operations wait; submit operation {number} again later", waiting >> 20);
                return Err(Refusal::new(429, why));
            }
            number
        };
        journal.append(number, &operation).map_err(|error| {
            tracing::error!("{}: operation {number} is not in the journal: {error}", self.record.id);
            // Clients submit it again.
            Refusal::new(503, format!("the operation can't be written to the journal: {error}"))
        })?;
        let mut state = self.shared.state.lock();
        state.highest = state.highest.max(number);
        if let Some(path) = operation.loads() {
            state.loads.insert(number, path.to_owned());
        }
        state.waiting.insert(number, operation);
        self.shared.work.notify_one();
        Ok(number)
    }

    /// Returns true if the model could not be made, nothing that it did before a restart is lost with it, and its
    /// client has read why.
    pub fn failed(&self) -> bool {
        let state = self.shared.state.lock();
        state.failed && (state.asked.contains(&0) || !state.answers.contains_key(&0))
    }

    /// Returns true if a restart would load the weights at `path`.
    pub fn needs(&self, path: &str) -> bool {
        let journal = self.shared.journal.lock();
        let state = self.shared.state.lock();
        let ModelRecord { begins, base, .. } = &journal.record;
        let begins = begins.as_ref().filter(|_| base.folder.is_none()).map(|(path, _)| path);
        begins.into_iter().chain(state.loads.range(base.done + 1..).map(|(_, path)| path)).any(|of| of == path)
    }

    /// Lets a restart not save these weights again ([`Operation::saves`]), which are deleted.
    pub fn forget(&self, saved: &str) -> io::Result<()> {
        let mut journal = self.shared.journal.lock();
        let next = self.shared.state.lock().next;
        let refused = journal.forget(saved, self.shared.repeated.max(next - 1))?;
        let mut state = self.shared.state.lock();
        for (number, operation) in refused {
            // Those that are still to be repeated.
            if let Some(waits) = state.waiting.get_mut(&number) {
                *waits = operation;
            }
        }
        Ok(())
    }

    /// Ends the thread after the operation that runs. Clients that wait for answers get none.
    pub fn end(&self) {
        self.shared.state.lock().ends = true;
        self.shared.work.notify_one();
        self.shared.answered.notify_waiters();
        if let Some(thread) = self.thread.lock().take() {
            drop(thread.join());
        }
    }

    /// The answer to an operation, if it is there within `limit`; an error if it was never submitted, is
    /// forgotten, or the model was unloaded.
    pub async fn answer(&self, number: u64, limit: Duration) -> Result<Option<Arc<Answer>>, ()> {
        let until = tokio::time::Instant::now() + limit;
        loop {
            let answered = self.shared.answered.notified();
            tokio::pin!(answered);
            answered.as_mut().enable();
            {
                let mut state = self.shared.state.lock();
                if state.ends {
                    return Err(());
                }
                if let Some(answer) = state.answers.get(&number).cloned() {
                    state.asked(number);
                    return Ok(Some(answer));
                }
                let begins = number == 0 && !state.begun;
                if !begins && number < state.next || number > state.highest {
                    return Err(());
                }
            }
            if tokio::time::timeout_at(until, answered).await.is_err() {
                return Ok(None);
            }
        }
    }
}

impl QueueShared {
    fn run(&self, ground: Ground, record: &ModelRecord, install: Install) {
        let mut model = caught(|| Trained::begin(ground, record, install)).unwrap_or_else(Err);
        let created = model.as_ref().map_or_else(Answer::refused, Trained::created);
        {
            let mut state = self.state.lock();
            state.answer(0, created);
            state.begun = true;
            state.failed = model.is_err() && self.repeated == 0;
        }
        self.answered.notify_waiters();
        let newest = record.newest.as_ref().unwrap_or(&record.base);
        let (mut kept, mut last, mut bytes) = (newest.step, newest.done, 0);
        while let Some((number, operation)) = self.next() {
            if let Ok(model) = &model
                && !model.has_gradient
                && (model.step >= kept + SNAPSHOT || number > last + SNAPSHOT_OPERATIONS || bytes >= SNAPSHOT_BYTES)
            {
                match self.snapshot(model, number - 1) {
                    Ok(()) => (kept, last, bytes) = (model.step, number - 1, 0),
                    Err(why) => tracing::warn!("{}: no snapshot: {why}", record.id),
                }
            }
            // Those before the newest snapshot are repeated, and not in its journal.
            bytes += if number > last { operation.bytes() } else { 0 };
            let answer = match &mut model {
                Ok(model) => caught(|| model.run(&operation, number <= self.repeated)).unwrap_or_else(|panic| {
                    model.drop_gradient();
                    Answer::failed(panic)
                }),
                Err(why) => Answer::refused(why),
            };
            if let Answer::Failed { why, of_request } = &answer {
                tracing::warn!("{}, operation {number}: {why}", record.id);
                let of_files = matches!(operation, Operation::Save(_) | Operation::Load { .. } | Operation::Sampler { .. });
                // After a restart it may succeed, as after a lack of memory or with other files, and change later answers.
                let instead = match (number > self.repeated, &model) {
                    (true, Ok(model)) if !of_request => {
                        Some(Operation::Failed { why: why.clone(), has_gradient: model.has_gradient })
                    }
                    (true, Ok(_)) if !of_files => None,
                    (true, _) => Some(Operation::Refused(why.clone())),
                    (false, _) => None,
                };
                if let Some(instead) = instead
                    && let Err(error) = self.journal.lock().append(number, &instead)
                {
                    tracing::error!("{}: the failure of operation {number} is not in the journal: {error}", record.id);
                }
                if number <= self.repeated && !of_request && !matches!(operation, Operation::Failed { .. }) {
                    let differ =
                        "the weights differ from before the restart if it was done there; restart the server to try again";
                    tracing::error!("{}: operation {number} was not repeated: {differ}", record.id);
                }
            }
            {
                let mut state = self.state.lock();
                state.waiting.remove(&number);
                state.answer(number, answer);
                state.next = number + 1;
            }
            self.answered.notify_waiters();
        }
    }

    /// Waits for the next operation; `None` at the end.
    fn next(&self) -> Option<(u64, Operation)> {
        let mut state = self.state.lock();
        let mut until = None;
        loop {
            if state.ends {
                return None;
            }
            let next = state.next;
            if let Some(operation) = state.waiting.get(&next) {
                return Some((next, operation.clone()));
            }
            release_helpers();
            if state.waiting.is_empty() {
                self.work.wait(&mut state);
            } else {
                let until = *until.get_or_insert_with(|| Instant::now() + GAP);
                if self.work.wait_until(&mut state, until).timed_out() && !state.waiting.contains_key(&next) {
                    MutexGuard::unlocked(&mut state, || self.give_up_gap(next));
                }
            }
        }
    }

    /// Refuses the operations that wait, and those before them from number `missing` on: without these they
    /// would do something else.
    fn give_up_gap(&self, missing: u64) {
        let mut journal = self.journal.lock();
        let last = match &*self.state.lock() {
            state if state.waiting.contains_key(&missing) => return,
            state => state.waiting.last_key_value().map_or(0, |(last, _)| *last),
        };
        tracing::warn!("{}: operation {missing} never came; refusing up to operation {last}", journal.record.id);
        let why = format!("operation {missing} of this model never came, and operations run in order; submit this one again");
        let refused: BTreeMap<u64, Operation> =
            (missing..=last).map(|number| (number, Operation::Refused(why.clone()))).collect();
        if let Err(error) = journal.append_all(&refused) {
            tracing::error!("{}: refused operations are not in the journal: {error}", journal.record.id);
        }
        self.state.lock().waiting.extend(refused);
    }

    /// Writes a snapshot after operation `done`.
    fn snapshot(&self, model: &Trained, done: u64) -> Result<(), String> {
        let snapshot = Snapshot { done, step: model.step, folder: Some(model.snapshot(done)?) };
        let mut journal = self.journal.lock();
        let waiting = self.state.lock().waiting.clone();
        journal.snapshot(snapshot, &waiting).map_err(|error| error.to_string())
    }
}

impl Drop for ModelQueue {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::serve::tinker::journal::tests::new_record;
    use crate::serve::tinker::trained::tests::{ground, pass};

    /// Longer than a test takes.
    const LONG: Duration = Duration::from_secs(3600);

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn clients_wait_for_answers_while_the_journal_is_written_and_get_none_of_a_model_that_ends() {
        let state = tempfile::tempdir().unwrap();
        let ground = ground(state.path());
        let folder = ground.models.join("m");
        let journal = Journal::create(&folder, new_record()).unwrap();
        let queue = ModelQueue::start(ground, journal, BTreeMap::new(), Arc::new(|_, _, _| ())).unwrap();
        runtime().block_on(async {
            // The first is missing.
            queue.submit(Some(2), pass()).unwrap();
            let mut answer = Box::pin(queue.answer(2, LONG));
            {
                let _writes = queue.shared.journal.lock();
                assert!(answer.as_mut().now_or_never().is_none());
            }
            queue.end();
            assert!(answer.await.is_err());
            assert!(queue.submit(Some(1), pass()).unwrap_err().message().contains("was unloaded"));
        });
        drop(queue);
        let (_, read) = Journal::open(&folder).unwrap();
        assert!(read.keys().eq(&[2]));
    }

    #[test]
    fn operations_beyond_the_room_for_those_that_wait_are_to_be_submitted_again() {
        let state = tempfile::tempdir().unwrap();
        let ground = ground(state.path());
        let journal = Journal::create(&ground.models.join("m"), new_record()).unwrap();
        let queue = ModelQueue::start(ground, journal, BTreeMap::new(), Arc::new(|_, _, _| ())).unwrap();
        queue.shared.state.lock().waiting.insert(3, Operation::Pass(vec![0; WAITING_BYTES]));
        let refusal = queue.submit(Some(2), pass()).unwrap_err();
        assert!(refusal.message().contains("256 MiB of operations wait"), "{refusal:?}");
        assert_eq!(queue.submit(Some(1), pass()).unwrap(), 1, "the others wait for it");
    }

    #[test]
    fn answers_are_bounded_in_bytes_and_those_that_were_asked_for_go_first() {
        let state = tempfile::tempdir().unwrap();
        let ground = ground(state.path());
        let journal = Journal::create(&ground.models.join("m"), new_record()).unwrap();
        let queue = ModelQueue::start(ground, journal, BTreeMap::new(), Arc::new(|_, _, _| ())).unwrap();
        runtime().block_on(queue.answer(0, LONG)).unwrap();
        let mut state = queue.shared.state.lock();
        state.forget(0);
        (1..4).for_each(|number| state.answer(number, Answer::refused("x".repeat(10_000))));
        let Answer::Failed { why, .. } = &*state.answers[&1] else { panic!("it was refused") };
        assert!(why.len() < 5_000, "what a request is quoted with is bounded, too");
        state.asked(2);
        state.bytes += KEPT_BYTES - state.bytes;
        [4, 5].into_iter().for_each(|number| state.answer(number, Answer::refused("no")));
        assert_eq!(state.answers.keys().copied().collect::<Vec<u64>>(), [3, 4, 5]);
    }

    #[test]
    fn a_snapshot_shortens_the_journal_of_a_model_without_updates_too() {
        let state = tempfile::tempdir().unwrap();
        let ground = ground(state.path());
        let folder = ground.models.join("m");
        let mut journal = Journal::create(&folder, new_record()).unwrap();
        let last = SNAPSHOT_OPERATIONS + 1;
        let all: BTreeMap<u64, Operation> = (1..=last).map(|number| (number, Operation::Refused("no".to_owned()))).collect();
        journal.append_all(&all).unwrap();
        let queue = ModelQueue::start(ground, journal, all, Arc::new(|_, _, _| ())).unwrap();
        runtime().block_on(queue.answer(last, LONG)).unwrap().unwrap();
        drop(queue);
        let (journal, _) = Journal::open(&folder).unwrap();
        assert_eq!(journal.record.newest.as_ref().map(|newest| newest.done), Some(SNAPSHOT_OPERATIONS));
    }

    #[test]
    fn a_failure_of_the_server_is_repeated_after_a_restart_with_what_it_left_of_the_gradient() {
        let state = tempfile::tempdir().unwrap();
        let ground = ground(state.path());
        let folder = ground.models.join("m");
        let journal = Journal::create(&folder, new_record()).unwrap();
        // Weights can't be saved.
        std::fs::write(folder.join("weights"), "").unwrap();
        let queue = ModelQueue::start(ground, journal, BTreeMap::new(), Arc::new(|_, _, _| ())).unwrap();
        let operations = [Operation::Save("a".to_owned()), pass(), Operation::Save("b".to_owned())];
        for operation in operations {
            queue.submit(None, operation).unwrap();
        }
        let answer = runtime().block_on(queue.answer(3, LONG)).unwrap().unwrap();
        assert!(matches!(*answer, Answer::Failed { of_request: false, .. }), "{answer:?}");
        drop(queue);
        let (_, read) = Journal::open(&folder).unwrap();
        let failed = |number: u64| match &read[&number] {
            Operation::Failed { has_gradient, .. } => *has_gradient,
            other => panic!("{other:?}"),
        };
        assert_eq!((failed(1), &read[&2], failed(3)), (false, &pass(), true));
    }

    #[test]
    fn operations_after_one_that_never_came_are_refused_by_its_number_also_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path(), new_record()).unwrap();
        let pass = Operation::Pass(vec![1]);
        [1, 3, 4].into_iter().for_each(|number| journal.append(number, &pass).unwrap());
        let waiting = BTreeMap::from([(3, pass.clone()), (4, pass.clone())]);
        let state = State { next: 2, highest: 4, waiting, begun: true, ..State::default() };
        let (journal, state) = (Mutex::new(journal), Mutex::new(state));
        let shared = QueueShared { journal, state, work: Condvar::new(), answered: Notify::new(), repeated: 4 };
        shared.give_up_gap(2);
        let refused = |operation: &Operation| matches!(operation, Operation::Refused(why) if why.contains("operation 2 "));
        let waiting = std::mem::take(&mut shared.state.lock().waiting);
        assert!(waiting.keys().eq(&[2, 3, 4]) && waiting.values().all(refused), "{waiting:?}");
        drop(shared);
        let (_, mut read) = Journal::open(folder.path()).unwrap();
        assert_eq!(read.remove(&1), Some(pass));
        assert_eq!(read, waiting);
    }
}
