//! Membership of this process in a run of several: start, orders of rank 0, and end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::device::{self, DeviceGroups};
use super::group::Joining;
use super::place::attempt;
use super::start::{Hello, host_name, identities, lead, program, report, towards};
use super::watch::{BEAT, ENDED, SUSPECT, Shared, Watch, slowest};
use super::{CollectiveError, Mesh, Place, RankError, Ranks, Shard, Store};
use crate::util::secrets::masked;

/// Time that rank 0 gives the others to read its last word.
const FAREWELL: Duration = Duration::from_secs(10);

/// Time between two looks at a value that is to change.
const POLL: Duration = Duration::from_millis(50);

/// Longer than any run.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// An order of rank 0 to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Follow the trainer of this name, in the group of this number.
    Follow(String, u64),
    /// The run is over, and rank 0 ends with this exit code.
    End(u8),
}

/// Membership of this process in a run of several. Every rank has one; dropping it leaves the run.
/// Costs one thread, `ranks`, and connections to the store.
pub struct Member {
    place: Place,
    settings: Ranks,
    labels: Vec<String>,
    address: String,
    /// The GPU that it trains on, and what exchanges tensors there.
    gpu: Option<(usize, DeviceGroups)>,
    shared: Arc<Shared>,
    store: Store,
    /// Number of the next order.
    next: AtomicU64,
    watch: Option<JoinHandle<()>>,
}

impl Member {
    /// Joins the ranks of a run, and waits until all are there. `recipe` is the resolved recipe,
    /// which all ranks must share, as they must share the program. `models` has checksums of the models
    /// that this host has, by their keys: a rank may lack one, but not have another. `gpu`: index of
    /// the GPU that this rank trains on.
    ///
    /// # Errors
    /// The number of ranks is no multiple of `settings.replicas`, the port is in use, the store or a
    /// rank is missing after `settings.start_timeout`, two processes have one number or one GPU, a
    /// GPU or NCCL is missing, ranks that hold the same part of the state have GPUs of different types, a
    /// rank differs from rank 0, or the launcher ends the ranks. Every rank gets the same error.
    pub fn join(
        place: Place,
        settings: &Ranks,
        recipe: &str,
        models: BTreeMap<String, u32>,
        gpu: Option<usize>,
    ) -> Result<Arc<Self>, RankError> {
        let [copies, _] = settings.mesh(place.size)?;
        let devices = gpu.map(device::groups).transpose();
        let limit = seconds(settings.start_timeout);
        let until = Instant::now() + limit;
        let mut store = open(&place, place.rank == 0 && !place.store_exists, settings, limit)?;
        let host = host_name();
        let [machine, network] = identities(&host);
        let hello = Hello {
            size: place.size,
            host,
            machine,
            network,
            process: std::process::id(),
            address: towards(&place.host).unwrap_or_else(|| place.host.clone()),
            gpu: gpu.map(device::gpu_name),
            gpu_type: gpu.filter(|_| copies > 1 || settings.shard == Shard::Nothing).and_then(device::gpu_type),
            trouble: devices.as_ref().err().cloned(),
            program: program(),
            recipe: masked(recipe).lines().map(str::to_owned).collect(),
            checksum: crc32fast::hash(recipe.as_bytes()),
            models,
        };
        let mut waits = false;
        let verdict = loop {
            let found = match place.rank {
                0 => Some(lead(&store, &place, &hello, until, settings.start_timeout)?),
                _ => report(&store, &place, &hello, until, limit + FAREWELL)?,
            };
            if let Some(verdict) = found {
                break verdict;
            }
            if !std::mem::replace(&mut waits, true) {
                let (rank, limit) = (place.rank, settings.start_timeout);
                tracing::warn!(
                    "rank {rank} waits up to {limit} seconds for the end of an earlier start's ranks (ranks.start_timeout)"
                );
            }
            std::thread::sleep(BEAT);
            store = open(&place, false, settings, until.saturating_duration_since(Instant::now()))?;
        };
        if !verdict.problems.is_empty() {
            if place.rank == 0 {
                await_all(&store, place.size, FAREWELL);
            }
            return Err(RankError::Apart(verdict.problems));
        }
        let gpu = gpu.zip(devices.map_err(CollectiveError)?);
        let address = verdict.address_of(&hello).to_owned();
        let (shared, lost) = (Arc::new(Shared::default()), seconds(settings.lost_timeout));
        let (labels, own) = (verdict.labels.clone(), place.rank);
        let watch = Watch { store: open(&place, false, settings, limit)?, shared: shared.clone(), own, labels, lost };
        let others = if own == 0 { 1..place.size } else { 0..1 };
        let body = move || watch.run(others);
        let watch = std::thread::Builder::new().name("ranks".into()).spawn(body);
        let watch = watch.map_err(|error| CollectiveError(format!("the thread `ranks` cannot start: {error}")))?;
        let (labels, settings, next) = (verdict.labels, settings.clone(), AtomicU64::new(0));
        Ok(Arc::new(Member { place, settings, labels, address, gpu, shared, store, next, watch: Some(watch) }))
    }

    /// Number of this rank, from 0.
    pub fn rank(&self) -> usize {
        self.place.rank
    }

    /// Settings of the run.
    pub fn settings(&self) -> &Ranks {
        &self.settings
    }

    /// Name of a rank in messages: number, host and process.
    pub fn label(&self, rank: usize) -> &str {
        &self.labels[rank]
    }

    /// Reason for which the run ends although rank 0 has not ended it: a rank is lost or failed.
    pub fn lost(&self) -> Option<String> {
        self.shared.reason()
    }

    /// Calls `callback` once when a rank is lost, from another thread; now if one is lost already.
    pub fn on_loss(&self, callback: impl FnOnce() + Send + 'static) {
        self.shared.lost.on(Box::new(callback));
    }

    /// Calls `callback` once when another rank asks rank 0 to drain the run, from another thread; now if one
    /// has asked already. For rank 0.
    pub fn on_drain(&self, callback: impl FnOnce() + Send + 'static) {
        self.shared.drained.on(Box::new(callback));
    }

    /// Asks rank 0 to drain the run once `asked` returns true. For the other ranks.
    pub fn drain_when(&self, asked: impl Fn() -> bool + Send + 'static) {
        *self.shared.asks_to_drain.lock() = Some(Box::new(asked));
    }

    /// True if the run ends because of another rank, which is lost or failed.
    pub fn is_ended_by_another(&self) -> bool {
        // Reasons begin with the rank.
        self.lost().is_some_and(|reason| !reason.starts_with(self.label(self.place.rank)))
    }

    /// Makes the other ranks follow the trainer `name`, and joins them. For rank 0.
    pub fn lead(&self, name: &str) -> Result<Mesh, RankError> {
        let number = self.next.fetch_add(1, AcqRel);
        self.give(number, &Order::Follow(name.to_owned(), number))?;
        self.group(number)
    }

    /// Joins the groups of an order. Waits for all ranks.
    pub fn group(&self, number: u64) -> Result<Mesh, RankError> {
        let (own, size, limit) = (self.place.rank, self.place.size, seconds(self.settings.exchange_timeout));
        let ready = |rank: usize| format!("ready/{number}/{rank}");
        // Gloo itself could not be interrupted while it waits for a rank that never comes.
        self.store.set(&ready(own), b"")?;
        let until = Instant::now() + limit;
        for rank in 0..size {
            if self.store.await_key(&ready(rank), until, || self.lost().is_some())?.is_none() {
                let waited = format!("{} did not come to an exchange for {} seconds", self.label(rank), limit.as_secs());
                self.end_all(waited);
                return Err(self.ended());
            }
        }
        let store = open(&self.place, false, &self.settings, seconds(self.settings.start_timeout))?;
        let join = |name: String, place: [usize; 2]| {
            let (name, signals) = (format!("group/{number}/{name}"), &self.shared.signals);
            let devices = self.gpu.map(|(_, devices)| devices);
            let address = &self.address;
            let joining = Joining { store: &store, name: &name, address, place, deadline: limit, devices, alone: false };
            // Here, because the first exchange would wait for all ranks without a deadline.
            let connected = joining.join(signals).and_then(|mut group| {
                self.gpu.map_or(Ok(()), |(gpu, _)| group.connect(gpu))?;
                Ok(Arc::new(Mutex::new(group)))
            });
            connected.map_err(|error| self.explain(error))
        };
        let ([copies, parts], all) = (self.settings.mesh(size)?, join("all".into(), [own, size])?);
        if copies == 1 {
            return Ok(Mesh { parts: all.clone(), all, copies: None });
        }
        let (copy, part) = (own / parts, own % parts);
        let of_copy = join(format!("copy/{copy}"), [part, parts])?;
        let of_part = join(format!("part/{part}"), [copy, copies])?;
        Ok(Mesh { all, parts: of_copy, copies: Some(of_part) })
    }

    fn give(&self, number: u64, order: &Order) -> Result<(), RankError> {
        let text = serde_json::to_vec(order).map_err(|error| CollectiveError(error.to_string()))?;
        Ok(self.store.set(&format!("order/{number}"), &text)?)
    }

    /// Waits for the next order of rank 0, for as long as rank 0 lives.
    pub fn order(&self) -> Result<Order, RankError> {
        let (key, forever) = (format!("order/{}", self.next.fetch_add(1, AcqRel)), Instant::now() + NEVER);
        match self.store.await_key(&key, forever, || self.lost().is_some()) {
            Ok(Some(text)) => {
                let order = serde_json::from_slice(&text);
                order.map_err(|error| CollectiveError(format!("an order of rank 0: {error}")).into())
            }
            // The watch notices, too, when the store is gone.
            Ok(None) => Err(self.ended()),
            Err(error) => Err(self.explain(error)),
        }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.place.size
    }

    /// Leaves a value for the other ranks under `key`, instead of the one before.
    pub fn put(&self, key: &str, value: &[u8]) -> Result<(), RankError> {
        Ok(self.store.set(key, value)?)
    }

    /// Waits until `accept` takes the value that a rank leaves under `key`: for
    /// `ranks.exchange_timeout`, and only while all ranks live.
    pub fn await_value<T>(&self, key: &str, accept: impl Fn(&[u8]) -> Option<T>) -> Result<T, RankError> {
        let limit = seconds(self.settings.exchange_timeout);
        let until = Instant::now() + limit;
        loop {
            let value = self.store.await_key(key, until, || self.lost().is_some())?;
            if let Some(accepted) = value.as_deref().and_then(&accept) {
                return Ok(accepted);
            }
            if self.lost().is_some() {
                return Err(self.ended());
            }
            if Instant::now() >= until {
                let limit = limit.as_secs();
                return Err(CollectiveError(format!("no rank left {key} within {limit} seconds (ranks.exchange_timeout)")).into());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Turns the failure of an exchange into one that names the rank that is gone or hangs, and its
    /// host. Ends the run on all ranks. Takes a few seconds.
    pub fn explain(&self, error: CollectiveError) -> RankError {
        self.shared.suspicious.store(true, Release);
        let until = Instant::now() + SUSPECT + 12 * BEAT;
        while self.lost().is_none() && Instant::now() < until {
            std::thread::sleep(BEAT / 10);
        }
        if self.lost().is_none() {
            let hangs = |(rank, [begun, most]): (usize, [u64; 2])| {
                format!("{} hangs: it has begun {begun} exchanges, another rank {most} ({error})", self.label(rank))
            };
            match slowest(&self.store, self.place.size) {
                Ok(Some(slowest)) => self.end_all(hangs(slowest)),
                _ => self.fail(&error.0),
            }
        }
        self.ended()
    }

    /// Ends the run on all ranks, because this one failed.
    pub fn fail(&self, reason: &str) {
        self.end_all(format!("{}: {reason}", self.label(self.place.rank)));
    }

    fn end_all(&self, reason: String) {
        if self.shared.over.load(Acquire) || self.lost().is_some() {
            return;
        }
        // A store that is gone has no reader.
        drop(self.store.set(ENDED, reason.as_bytes()));
        self.shared.end(reason);
    }

    fn ended(&self) -> RankError {
        RankError::Ended(self.lost().unwrap_or_else(|| "the run is over".to_owned()))
    }

    /// Leaves the run in order. Rank 0 gives the others its exit code, and waits for them.
    pub fn end(&self, code: u8) {
        if self.lost().is_some() || !self.shared.finish() {
            return;
        }
        if self.place.rank > 0 {
            drop(self.store.set(&bye(self.place.rank), b""));
        } else if self.give(self.next.fetch_add(1, AcqRel), &Order::End(code)).is_ok() {
            await_all(&self.store, self.place.size, FAREWELL);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.end(1);
        self.shared.finish();
        if let Some(watch) = self.watch.take() {
            drop(watch.join());
        }
    }
}

/// The store of a run's ranks, served by their launcher, whose variables they inherit. Dropping it ends
/// the ranks.
pub struct Rendezvous(Store);

impl Rendezvous {
    /// Serves the store on a free port of this host.
    pub fn serve() -> Result<Self, RankError> {
        let prefix = prefix(&attempt(|name| std::env::var(name).ok()));
        Ok(Rendezvous(Store::open("127.0.0.1", 0, true, &prefix, FAREWELL)?))
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.0.port()
    }

    /// Ends all ranks, because one is gone.
    pub fn end(&self, reason: &str) {
        // A store that is gone has ended them already.
        drop(self.0.set(ENDED, reason.as_bytes()));
    }
}

/// Prefix of all keys of a start of a run.
fn prefix(attempt: &str) -> String {
    format!("rollflow/{attempt}")
}

fn seconds(number: f64) -> Duration {
    Duration::try_from_secs_f64(number).unwrap_or(Duration::from_secs(1 << 30))
}

pub(super) fn bye(rank: usize) -> String {
    format!("bye/{rank}")
}

/// Waits until all other ranks have left, for `limit` at most.
fn await_all(store: &Store, size: usize, limit: Duration) {
    let until = Instant::now() + limit;
    for rank in 1..size {
        if !matches!(store.await_key(&bye(rank), until, || false), Ok(Some(_))) {
            break;
        }
    }
}

/// Opens the store, waiting for its server for `limit`, and then `ranks.lost_timeout` for each answer.
fn open(place: &Place, serves: bool, settings: &Ranks, limit: Duration) -> Result<Store, RankError> {
    let opened = Store::open(&place.host, place.port, serves, &prefix(&place.attempt), limit);
    let opened = opened.map(|store| store.answering_within(seconds(settings.lost_timeout)));
    opened.map_err(|CollectiveError(why)| match serves {
        true if ["EADDRINUSE", "already in use"].iter().any(|text| why.contains(text)) => RankError::Port(place.port),
        _ => RankError::NoStore(place.rank, place.host.clone(), place.port, why),
    })
}
