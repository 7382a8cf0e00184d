//! Signs of life of the ranks, and the end of all when one is gone.
//!
//! Each rank raises a number in the store twice a second. Rank 0 looks at all numbers, the others at
//! rank 0's. With it goes the number of exchanges that the rank has begun: when one waits too long,
//! the rank with the fewest is the one that hangs. A rank that ends the run writes the reason into
//! the store, where all others find it.
//!
//! Gloo notices a process that ended during an exchange immediately, without its name: then a shorter
//! silence names it. NCCL may not notice it within a host.
//!
//! A rank that gets SIGTERM asks rank 0 through the store to drain the run.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{CollectiveError, Signals, Store};

/// Time between two signs of life.
pub(super) const BEAT: Duration = Duration::from_millis(500);

/// Silence that names a rank after an exchange has failed.
pub(super) const SUSPECT: Duration = Duration::from_secs(4);

/// Key of the reason for which all ranks end.
pub(super) const ENDED: &str = "ended";

/// Key by which another rank asks rank 0 to drain the run.
const DRAIN: &str = "drain";

type Callback = Box<dyn FnOnce() + Send>;

/// Callbacks of an event that happens once.
#[derive(Default)]
pub(super) struct Event(Mutex<(bool, Vec<Callback>)>);

impl Event {
    /// Calls `callback` when it happens; now if it has happened.
    pub fn on(&self, callback: Callback) {
        let mut event = self.0.lock();
        if !event.0 {
            return event.1.push(callback);
        }
        drop(event);
        callback();
    }

    fn happens(&self) {
        let callbacks = {
            let mut event = self.0.lock();
            event.0 = true;
            std::mem::take(&mut event.1)
        };
        callbacks.into_iter().for_each(|callback| callback());
    }
}

/// State that a rank's threads share.
#[derive(Default)]
pub(super) struct Shared {
    /// Makes waiting exchanges fail, and counts them.
    pub signals: Arc<Signals>,
    /// Set after an exchange has failed.
    pub suspicious: AtomicBool,
    /// The run ends in order, so that silence means nothing.
    pub over: AtomicBool,
    reason: Mutex<Option<String>>,
    /// The run ends because a rank is lost or failed.
    pub lost: Event,
    /// A rank asks rank 0 to drain the run.
    pub drained: Event,
    /// Returns true once this rank asks for that.
    pub asks_to_drain: Mutex<Option<Box<dyn Fn() -> bool + Send>>>,
}

impl Shared {
    /// Reason for which the run ends, if it does.
    pub fn reason(&self) -> Option<String> {
        self.reason.lock().clone()
    }

    /// Ends the run for this reason, unless it ends already.
    pub fn end(&self, reason: String) {
        if self.over.load(Acquire) {
            return;
        }
        self.reason.lock().get_or_insert(reason);
        self.signals.cancelled.store(true, Release);
        self.lost.happens();
    }
}

/// A rank that is watched, and its sign of life when that last changed.
struct Watched {
    rank: usize,
    seen: (Vec<u8>, Instant),
}

/// Gives a rank's signs of life, and looks for those of others.
pub(super) struct Watch {
    /// A separate connection.
    pub store: Store,
    pub shared: Arc<Shared>,
    /// This rank.
    pub own: usize,
    /// Names of the ranks in messages.
    pub labels: Vec<String>,
    /// Silence after which a rank counts as gone.
    pub lost: Duration,
}

impl Watch {
    /// Watches `others` until the run is over.
    pub fn run(self, others: impl IntoIterator<Item = usize>) {
        let mut others: Vec<_> = others.into_iter().map(|rank| Watched { rank, seen: (Vec::new(), Instant::now()) }).collect();
        let (mut beats, mut looked, mut stopped) = (0u64, Instant::now(), None);
        let mut waited = self.store.waited();
        while !self.shared.over.load(Acquire) && self.shared.reason().is_none() {
            beats += 1;
            let away = time_away(&mut looked, Instant::now());
            others.iter_mut().for_each(|other| other.seen.1 = (other.seen.1 + away).min(looked));
            // While the store does not answer, rank 0 may be the one that is stopped.
            let before = std::mem::replace(&mut waited, self.store.waited());
            if away.saturating_sub(waited - before) > self.lost / 2 {
                stopped = Some((away, looked));
            }
            if let Err(error) = self.look(beats, &mut others, stopped) {
                // The store lives in rank 0's process or in its launcher's.
                let gone = format!("{} is gone or hangs: its store does not answer ({error})", self.labels[0]);
                self.shared.end(self.blaming(gone, stopped));
            }
            std::thread::sleep(BEAT);
        }
    }

    /// The reason `gone`, which names another rank. It begins with this one if this one was just stopped, so
    /// that the others may have ended without it. `stopped`: for how long, and until when.
    fn blaming(&self, gone: String, stopped: Option<(Duration, Instant)>) -> String {
        match stopped.filter(|(_, until)| until.elapsed() < 2 * self.lost) {
            Some((time, _)) => {
                format!("{} was stopped for more than {} seconds; {gone}", self.labels[self.own], time.as_secs())
            }
            None => gone,
        }
    }

    fn look(&self, beats: u64, others: &mut [Watched], stopped: Option<(Duration, Instant)>) -> Result<(), CollectiveError> {
        let (store, shared) = (&self.store, &self.shared);
        let sign = [beats, shared.signals.exchanges.load(Acquire)];
        store.set(&key(self.own), sign.map(u64::to_le_bytes).as_flattened())?;
        if let Some(reason) = store.get(ENDED)? {
            shared.end(String::from_utf8_lossy(&reason).into_owned());
            return Ok(());
        }
        if self.own == 0 {
            store.get(DRAIN)?.iter().for_each(|_| shared.drained.happens());
        } else if shared.asks_to_drain.lock().as_ref().is_some_and(|asks| asks()) {
            store.set(DRAIN, b"")?;
        }
        let limit = if shared.suspicious.load(Acquire) { self.lost.min(SUSPECT) } else { self.lost };
        for Watched { rank, seen } in others {
            let sign = store.get(&key(*rank))?.unwrap_or_default();
            if sign != seen.0 {
                *seen = (sign, Instant::now());
            } else if seen.1.elapsed() > limit {
                let silence = seen.1.elapsed().as_secs();
                let gone = format!("{} is gone or hangs: no sign of life for {silence} seconds", self.labels[*rank]);
                let reason = self.blaming(gone, stopped);
                store.set(ENDED, reason.as_bytes())?;
                shared.end(reason);
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Time for which this process did not look, as when it was stopped: others are not silent meanwhile.
fn time_away(looked: &mut Instant, now: Instant) -> Duration {
    now.saturating_duration_since(std::mem::replace(looked, now)).saturating_sub(4 * BEAT)
}

/// The rank that has begun the fewest exchanges, if some have begun more, and how many both have begun.
pub(super) fn slowest(store: &Store, ranks: usize) -> Result<Option<(usize, [u64; 2])>, CollectiveError> {
    let begun = |rank| -> Result<u64, CollectiveError> {
        let sign = store.get(&key(rank))?.unwrap_or_default();
        Ok(sign.get(8..).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes))
    };
    let begun = (0..ranks).map(begun).collect::<Result<Vec<_>, _>>()?;
    let most = begun.iter().copied().max().unwrap_or(0);
    let least = begun.iter().copied().enumerate().min_by_key(|(_, begun)| *begun);
    Ok(least.filter(|(_, begun)| *begun < most).map(|(rank, begun)| (rank, [begun, most])))
}

fn key(rank: usize) -> String {
    format!("beat/{rank}")
}

impl Shared {
    /// Marks the run as over; returns false if it was before.
    pub fn finish(&self) -> bool {
        !self.over.swap(true, AcqRel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_which_a_process_is_stopped_is_no_silence_of_the_others() {
        let mut looked = Instant::now();
        let [usual, stopped] = [BEAT, Duration::from_secs(60)].map(|after| {
            let now = looked + after;
            time_away(&mut looked, now)
        });
        assert_eq!((usual, stopped), (Duration::ZERO, Duration::from_secs(60) - 4 * BEAT));
    }
}
