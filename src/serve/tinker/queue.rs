//! A model's thread: operations in the order of their numbers, however they arrive, and their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::journal::{Journal, ModelRecord, Snapshot};
use super::operation::{Answer, Operation};
use super::trained::{Ground, Install, Trained};
use crate::flow::caught;
use crate::model::{release_helpers, use_threads};

/// Updates after which a snapshot shortens the journal.
const SNAPSHOT: u64 = 16;

/// Answers that are kept for clients that ask again.
const KEPT: usize = 64;

/// Answers that are kept for clients that never asked.
const UNASKED: usize = 4096;

pub(super) struct ModelQueue {
    pub record: ModelRecord,
    shared: Arc<QueueShared>,
    thread: Option<JoinHandle<()>>,
}

struct QueueShared {
    state: Mutex<State>,
    /// Wakes the thread.
    work: Condvar,
    /// Wakes those that wait for answers.
    answered: Notify,
    /// Operations up to this number are repeated after a restart.
    repeated: u64,
}

struct State {
    journal: Journal,
    /// Number of the next operation.
    next: u64,
    /// Largest number so far.
    highest: u64,
    waiting: BTreeMap<u64, Operation>,
    answers: BTreeMap<u64, Arc<Answer>>,
    /// Operations whose answer was asked for and is kept.
    asked: BTreeSet<u64>,
    /// True once the model is there, or failed; its answer has the number 0.
    begun: bool,
    ends: bool,
}

impl State {
    fn answer(&mut self, number: u64, answer: Answer) {
        self.answers.insert(number, Arc::new(answer));
        while self.answers.len() > UNASKED {
            self.answers.pop_first();
        }
    }

    fn asked(&mut self, number: u64) {
        self.asked.insert(number);
        while self.asked.len() > KEPT {
            let oldest = self.asked.pop_first();
            oldest.and_then(|oldest| self.answers.remove(&oldest));
        }
    }
}

impl ModelQueue {
    /// Starts the thread of a model. `journaled` are operations that it repeats first.
    pub fn start(ground: Ground, journal: Journal, journaled: BTreeMap<u64, Operation>, install: Install) -> io::Result<Self> {
        let record = journal.record.clone();
        let highest = journaled.keys().next_back().copied().unwrap_or(record.base.done);
        let state = State {
            journal,
            next: record.base.done + 1,
            highest,
            waiting: journaled,
            answers: BTreeMap::new(),
            asked: BTreeSet::new(),
            begun: false,
            ends: false,
        };
        let shared =
            Arc::new(QueueShared { state: Mutex::new(state), work: Condvar::new(), answered: Notify::new(), repeated: highest });
        let (own, of) = (shared.clone(), record.clone());
        let work = move || {
            use_threads(ground.threads);
            own.run(ground, &of, install);
        };
        let thread = std::thread::Builder::new().name("tinker-model".to_owned()).spawn(work)?;
        Ok(ModelQueue { record, shared, thread: Some(thread) })
    }

    /// Takes an operation, and returns its number. One whose number was taken before is not done
    /// again. Without a number it is the next.
    ///
    /// # Errors
    /// It can't be written to the journal.
    pub fn submit(&self, number: Option<u64>, operation: Operation) -> io::Result<u64> {
        let mut state = self.shared.state.lock();
        let number = number.filter(|number| *number > 0).unwrap_or(state.highest + 1);
        if number < state.next || state.waiting.contains_key(&number) {
            return Ok(number);
        }
        state.journal.append(number, &operation)?;
        state.highest = state.highest.max(number);
        state.waiting.insert(number, operation);
        self.shared.work.notify_one();
        Ok(number)
    }

    /// The answer to an operation, if it is there within `limit`; an error if it was never submitted
    /// or is forgotten.
    pub async fn answer(&self, number: u64, limit: Duration) -> Result<Option<Arc<Answer>>, ()> {
        let until = tokio::time::Instant::now() + limit;
        loop {
            let answered = self.shared.answered.notified();
            tokio::pin!(answered);
            answered.as_mut().enable();
            {
                let mut state = self.shared.state.lock();
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
        let created = model.as_ref().map_or_else(|why| Answer::refused(why.clone()), Trained::created);
        {
            let mut state = self.state.lock();
            state.answer(0, created);
            state.begun = true;
        }
        self.answered.notify_waiters();
        let mut kept = record.newest.as_ref().unwrap_or(&record.base).step;
        while let Some((number, operation)) = self.next() {
            if let Ok(model) = &model
                && !model.has_gradient
                && model.step >= kept + SNAPSHOT
            {
                match self.snapshot(model, number - 1) {
                    Ok(()) => kept = model.step,
                    Err(why) => tracing::warn!("{}: no snapshot: {why}", record.id),
                }
            }
            let answer = match &mut model {
                Ok(model) => caught(|| model.run(&operation, number <= self.repeated)).unwrap_or_else(Answer::failed),
                Err(why) => Answer::refused(why.clone()),
            };
            if let Answer::Failed { why, .. } = &answer {
                tracing::warn!("{}, operation {number}: {why}", record.id);
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
        loop {
            if state.ends {
                return None;
            }
            let next = state.next;
            match state.waiting.get(&next) {
                Some(operation) => return Some((next, operation.clone())),
                None => {
                    release_helpers();
                    self.work.wait(&mut state);
                }
            }
        }
    }

    /// Writes a snapshot after operation `done`.
    fn snapshot(&self, model: &Trained, done: u64) -> Result<(), String> {
        let snapshot = Snapshot { done, step: model.step, folder: Some(model.snapshot(done)?) };
        let State { journal, waiting, .. } = &mut *self.state.lock();
        journal.snapshot(snapshot, waiting).map_err(|error| error.to_string())
    }
}

impl Drop for ModelQueue {
    fn drop(&mut self) {
        self.shared.state.lock().ends = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
