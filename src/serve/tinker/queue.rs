//! A model's thread: operations in the order of their numbers, however they arrive, and their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::journal::{Journal, ModelRecord};
use super::operation::{Answer, Operation};
use super::trained::{Ground, Install, Trained};
use crate::flow::caught;

/// Updates after which a snapshot shortens the journal.
const SNAPSHOT: u64 = 16;

/// Answers that are kept.
const KEPT: usize = 4096;

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
}

struct State {
    journal: Journal,
    /// Number of the next operation.
    next: u64,
    /// Largest number so far.
    highest: u64,
    waiting: BTreeMap<u64, Operation>,
    answers: BTreeMap<u64, Arc<Answer>>,
    /// Operations whose answer was asked for.
    delivered: BTreeSet<u64>,
    /// True once the model is there, or failed; its answer has the number 0.
    begun: bool,
    ends: bool,
}

impl ModelQueue {
    /// Starts the thread of a model. `journaled` are operations that it repeats first.
    pub fn start(ground: Ground, journal: Journal, journaled: Vec<(u64, Operation)>, install: Install) -> io::Result<Self> {
        let record = journal.record.clone();
        let highest = journaled.last().map_or(record.done, |(number, _)| *number);
        let state = State {
            journal,
            next: record.done + 1,
            highest,
            waiting: journaled.into_iter().collect(),
            answers: BTreeMap::new(),
            delivered: BTreeSet::new(),
            begun: false,
            ends: false,
        };
        let shared = Arc::new(QueueShared { state: Mutex::new(state), work: Condvar::new(), answered: Notify::new() });
        let (own, of) = (shared.clone(), record.clone());
        let work = move || {
            tch::set_num_threads(i32::try_from(ground.threads).unwrap_or(i32::MAX));
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
                    state.delivered.insert(number);
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
        let mut updates = record.step;
        {
            let mut state = self.state.lock();
            let answer = match &model {
                Ok(model) => model.created(),
                Err(why) => Answer::refused(why.clone()),
            };
            state.answers.insert(0, Arc::new(answer));
            state.begun = true;
        }
        self.answered.notify_waiters();
        loop {
            let (number, operation) = {
                let mut state = self.state.lock();
                loop {
                    if state.ends {
                        return;
                    }
                    let next = state.next;
                    match state.waiting.get(&next) {
                        Some(operation) => break (next, operation.clone()),
                        None => self.work.wait(&mut state),
                    }
                }
            };
            let answer = match &mut model {
                Ok(model) => caught(|| model.run(&operation)).unwrap_or_else(Answer::failed),
                Err(why) => Answer::refused(why.clone()),
            };
            if let Answer::Failed { why, .. } = &answer {
                tracing::warn!("{}, operation {number}: {why}", record.id);
            }
            let quiet = {
                let mut state = self.state.lock();
                state.waiting.remove(&number);
                state.answers.insert(number, Arc::new(answer));
                while state.answers.len() > KEPT {
                    state.answers.pop_first();
                }
                state.next = number + 1;
                state.waiting.is_empty()
            };
            self.answered.notify_waiters();
            if let Ok(model) = &model
                && quiet
                && !model.has_gradient
                && model.step >= updates + SNAPSHOT
            {
                match self.shorten(model, number) {
                    Ok(true) => updates = model.step,
                    Ok(false) => {}
                    Err(why) => tracing::warn!("{}: no snapshot: {why}", record.id),
                }
            }
        }
    }

    /// Writes a snapshot after operation `number`, unless an operation arrives meanwhile or an answer
    /// was not asked for yet: a restart could not give it.
    fn shorten(&self, model: &Trained, number: u64) -> Result<bool, String> {
        let settled = |state: &State| {
            let asked = |answer: &u64| *answer == 0 || state.delivered.contains(answer);
            state.highest == number && state.answers.keys().all(asked)
        };
        if !settled(&self.state.lock()) {
            return Ok(false);
        }
        let snapshot = model.snapshot(number)?;
        let mut state = self.state.lock();
        if !settled(&state) {
            return Ok(false);
        }
        state.journal.shorten(number, model.step, snapshot).map_err(|error| error.to_string())?;
        Ok(true)
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
