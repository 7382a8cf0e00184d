//! Signs of life of the ranks, and the end of all when one is gone.
//!
//! Each rank raises a number in the store twice a second. Rank 0 looks at all numbers, the others at
//! rank 0's. With it goes the number of exchanges that the rank has begun: when one waits too long,
//! the rank with the fewest is the one that hangs. A rank that ends the run writes the reason into
//! the store, where all others find it.
//!
//! Gloo notices a process that ended during an exchange immediately, without its name: then a shorter
//! silence names it.

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

type Callback = Box<dyn FnOnce() + Send>;

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
    callbacks: Mutex<Vec<Callback>>,
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
        let callbacks = std::mem::take(&mut *self.callbacks.lock());
        callbacks.into_iter().for_each(|callback| callback());
    }

    /// Calls `callback` when the run ends because a rank is lost; now if it does already.
    pub fn on_end(&self, callback: Callback) {
        self.callbacks.lock().push(callback);
        if self.reason().is_some() {
            let callbacks = std::mem::take(&mut *self.callbacks.lock());
            callbacks.into_iter().for_each(|callback| callback());
        }
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
        let mut beats = 0u64;
        while !self.shared.over.load(Acquire) && self.shared.reason().is_none() {
            beats += 1;
            if let Err(error) = self.look(beats, &mut others) {
                // The store lives in rank 0's process or in its launcher's.
                self.shared.end(format!("{} is gone: the connection to its store was lost ({error})", self.labels[0]));
            }
            std::thread::sleep(BEAT);
        }
    }

    fn look(&self, beats: u64, others: &mut [Watched]) -> Result<(), CollectiveError> {
        let (store, shared) = (&self.store, &self.shared);
        let sign = [beats, shared.signals.exchanges.load(Acquire)];
        store.set(&key(self.own), sign.map(u64::to_le_bytes).as_flattened())?;
        if let Some(reason) = store.get(ENDED)? {
            shared.end(String::from_utf8_lossy(&reason).into_owned());
            return Ok(());
        }
        let limit = if shared.suspicious.load(Acquire) { self.lost.min(SUSPECT) } else { self.lost };
        for Watched { rank, seen } in others {
            let sign = store.get(&key(*rank))?.unwrap_or_default();
            if sign != seen.0 {
                *seen = (sign, Instant::now());
            } else if seen.1.elapsed() > limit {
                let silence = seen.1.elapsed().as_secs();
                let reason = format!("{} is gone or hangs: no sign of life for {silence} seconds", self.labels[*rank]);
                store.set(ENDED, reason.as_bytes())?;
                shared.end(reason);
                return Ok(());
            }
        }
        Ok(())
    }
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
