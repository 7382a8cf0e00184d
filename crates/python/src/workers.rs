//! A number of equal Python processes, which are replaced when they end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{select_all, try_join_all};
use rollflow_net::Tasks;
use serde_json::Value;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, SemaphorePermit, oneshot};

use super::PythonError;
use super::process::{Command, Process, Traits};

/// Python processes that answer questions. Clones share them; the last one ends them.
#[derive(Clone)]
pub struct Workers(Arc<Inner>);

struct Inner {
    command: Command,
    places: Vec<Place>,
    traits: Traits,
    // Dropped after the processes, whose output its tasks read.
    tasks: Tasks,
}

/// Place of a process and, after its end, of the next.
struct Place {
    process: Mutex<Arc<Process>>,
    /// Calls that may begin.
    room: Arc<Semaphore>,
    /// Open sessions.
    sessions: AtomicUsize,
}

impl Workers {
    /// Starts the processes side by side, and waits until each has loaded its file.
    pub(super) fn start(command: Command, processes: usize, calls_in_flight: usize) -> Result<Self, PythonError> {
        let tasks =
            Tasks::new().map_err(|error| PythonError::Start { python: command.python.clone(), why: error.to_string() })?;
        let started = tasks.block_on(try_join_all((0..processes.max(1)).map(|_| command.start(&tasks))))?;
        let traits = started.first().map(Process::traits).cloned().unwrap_or_default();
        let calls = if traits.concurrent { calls_in_flight.clamp(1, Semaphore::MAX_PERMITS) } else { 1 };
        let place = |process| Place {
            process: Mutex::new(Arc::new(process)),
            room: Arc::new(Semaphore::new(calls)),
            sessions: AtomicUsize::new(0),
        };
        Ok(Workers(Arc::new(Inner { places: started.into_iter().map(place).collect(), command, traits, tasks })))
    }

    /// File and what it defines, for messages.
    pub fn name(&self) -> &str {
        &self.0.command.name
    }

    /// Returns the number of calls that can be in flight.
    pub fn capacity(&self) -> usize {
        self.0.places.iter().map(|place| place.room.available_permits()).sum()
    }

    /// Returns true if the reward function takes the tokens of completions.
    pub fn takes_tokens(&self) -> bool {
        self.0.traits.takes_tokens
    }

    /// Returns true if the reward function takes the completions of a group as a list.
    pub fn takes_groups(&self) -> bool {
        self.0.traits.takes_groups
    }

    /// Columns of the data that the reward function can't do without.
    pub fn needs(&self) -> &[String] {
        &self.0.traits.needs
    }

    /// Asks the first process that has room. A process that ended is replaced first. Waits for room
    /// without a limit; `limit` bounds the call. Dropping the future leaves the call to its process.
    pub async fn ask(&self, question: Value, limit: Duration) -> Result<Value, PythonError> {
        let rooms = self.0.places.iter().map(|place| Box::pin(async move { (place, place.room.acquire().await) }));
        let ((place, room), _, _) = select_all(rooms).await;
        let _room: SemaphorePermit<'_> = room.map_err(|_| self.ended("the run ends"))?;
        self.process(place).await?.ask(question, limit).await
    }

    /// Asks the process with the fewest episodes about a whole one, which lasts as long as `limit` and
    /// mostly waits. Bounds no number of such calls.
    pub async fn play(&self, question: Value, limit: Duration) -> Result<Value, PythonError> {
        self.session().await?.process.ask(question, limit).await
    }

    /// Begins an episode in the process with the fewest of them.
    pub async fn session(&self) -> Result<Session, PythonError> {
        let places = self.0.places.iter().enumerate();
        let fewest = places.min_by_key(|(_, place)| place.sessions.load(Ordering::Relaxed));
        let (at, place) = fewest.ok_or_else(|| self.ended("no process was started"))?;
        place.sessions.fetch_add(1, Ordering::Relaxed);
        let counted = Counted { workers: self.clone(), at };
        Ok(Session { process: self.process(place).await?, counted })
    }

    /// Returns the process of a place, after starting another if it has ended.
    async fn process(&self, place: &Place) -> Result<Arc<Process>, PythonError> {
        let mut process = place.process.lock().await;
        if let Some(why) = process.ended() {
            tracing::warn!("{}: its Python process ended ({why}) and starts again", self.name());
            let (tell, told) = oneshot::channel();
            let inner = self.0.clone();
            // On the tasks' runtime, which outlives that of the caller.
            self.0.tasks.spawn(async move { drop(tell.send(inner.command.start(&inner.tasks).await)) });
            *process = Arc::new(told.await.map_err(|_| self.ended("the run ends"))??);
        }
        Ok(process.clone())
    }

    /// Runs `future` on the calling thread, which may block.
    ///
    /// # Panics
    /// In a task, which must not wait.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.tasks.block_on(future)
    }

    /// Starts `future` as a task that ends with these workers.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.0.tasks.spawn(future);
    }

    fn ended(&self, why: &str) -> PythonError {
        PythonError::Ended { name: self.name().to_owned(), why: why.to_owned() }
    }
}

/// An episode, all of whose questions go to the same process. If that ends, the episode is lost.
pub struct Session {
    process: Arc<Process>,
    counted: Counted,
}

/// One of a place's open sessions.
struct Counted {
    workers: Workers,
    at: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.workers.0.places[self.at].sessions.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Session {
    /// Waits until the process of the episode may be asked. Dropping the future or the permit lets
    /// others ask.
    pub async fn room(&self) -> Result<OwnedSemaphorePermit, PythonError> {
        let Counted { workers, at } = &self.counted;
        workers.0.places[*at].room.clone().acquire_owned().await.map_err(|_| workers.ended("the run ends"))
    }

    /// Asks the process of the episode. The caller holds [`room`](Self::room).
    ///
    /// # Errors
    /// [`PythonError::Late`] if the call took too long, and [`PythonError::Ended`] if the process ended.
    pub async fn ask(&self, question: Value, limit: Duration) -> Result<Value, PythonError> {
        self.process.ask(question, limit).await
    }
}
