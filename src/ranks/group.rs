//! torch's collectives (c10d): a store of keys, and groups of ranks over it (`group.cpp`).
//!
//! Tensors of the host are exchanged through Gloo, those of a GPU through NCCL (`device.rs`).

use std::ffi::{CString, c_char};
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use tch::Tensor;
use torch_sys::C_tensor;

use super::device::DeviceGroups;
use crate::model::c_text::taken;
use crate::model::fused::raw;

/// Opaque C++ objects.
#[repr(C)]
struct RawStore([u8; 0]);
#[repr(C)]
struct RawGroup([u8; 0]);
#[repr(C)]
struct RawWork([u8; 0]);

unsafe extern "C" {
    fn rollflow_store_open(
        out: *mut *mut RawStore,
        host: *const c_char,
        port: *mut u16,
        serves: bool,
        prefix: *const c_char,
        timeout_ms: i64,
    ) -> *mut c_char;
    fn rollflow_store_limit(store: *mut RawStore, limit_ms: i64);
    fn rollflow_store_waited(store: *const RawStore) -> i64;
    fn rollflow_store_close(store: *mut RawStore);
    fn rollflow_store_set(store: *mut RawStore, key: *const c_char, bytes: *const u8, len: usize) -> *mut c_char;
    fn rollflow_store_get(store: *mut RawStore, key: *const c_char, bytes: *mut *mut u8, len: *mut usize) -> *mut c_char;
    fn rollflow_store_has(store: *mut RawStore, key: *const c_char, has: *mut bool) -> *mut c_char;
    fn rollflow_store_count(store: *mut RawStore, key: *const c_char, count: *mut i64) -> *mut c_char;
    fn rollflow_group_join(
        out: *mut *mut RawGroup,
        store: *mut RawStore,
        name: *const c_char,
        address: *const c_char,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        cancelled: *const bool,
        device_group: Option<DeviceGroups>,
        alone: bool,
    ) -> *mut c_char;
    fn rollflow_group_connect(group: *mut RawGroup, device: i64) -> *mut c_char;
    fn rollflow_group_close(group: *mut RawGroup);
    fn rollflow_group_abort(group: *mut RawGroup);
    fn rollflow_all_reduce(group: *mut RawGroup, tensor: *mut C_tensor) -> *mut c_char;
    fn rollflow_reduce_scatter(group: *mut RawGroup, out: *mut C_tensor, whole: *mut C_tensor) -> *mut c_char;
    fn rollflow_all_gather(
        group: *mut RawGroup,
        begun: *mut *mut RawWork,
        out: *mut C_tensor,
        input: *mut C_tensor,
    ) -> *mut c_char;
    fn rollflow_work_wait(work: *mut RawWork) -> *mut c_char;
    fn rollflow_broadcast(group: *mut RawGroup, tensor: *mut C_tensor, timeout_ms: i64) -> *mut c_char;
    fn free(pointer: *mut std::ffi::c_void);
}

/// A collective operation or the store failed; the text is torch's own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CollectiveError(pub String);

fn check(error: *mut c_char) -> Result<(), CollectiveError> {
    taken(error).map_err(CollectiveError)
}

fn text(of: &str) -> Result<CString, CollectiveError> {
    CString::new(of).map_err(|_| CollectiveError(format!("{of:?} contains a zero byte")))
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}

/// torch's `TCPStore`: a table of keys and bytes that all ranks of a run share.
pub struct Store {
    raw: *mut RawStore,
    port: u16,
}

// SAFETY: TCPStore locks its connection; PrefixStore has no state but its prefix.
unsafe impl Send for Store {}
unsafe impl Sync for Store {}

impl Store {
    /// Connects to the store at `host:port`, or serves it there. A served port of 0 is chosen by
    /// the system. Keys are prefixed with `prefix`. Waits up to `deadline` for the server, and as long
    /// for each answer of it.
    pub fn open(host: &str, mut port: u16, serves: bool, prefix: &str, deadline: Duration) -> Result<Store, CollectiveError> {
        let (host, prefix, mut store) = (text(host)?, text(prefix)?, std::ptr::null_mut());
        check(unsafe { rollflow_store_open(&mut store, host.as_ptr(), &mut port, serves, prefix.as_ptr(), millis(deadline)) })?;
        Ok(Store { raw: store, port })
    }

    /// The store, whose calls fail when the server has not answered for `limit`. The time for which
    /// this process is stopped does not count.
    pub fn answering_within(self, limit: Duration) -> Store {
        unsafe { rollflow_store_limit(self.raw, millis(limit)) }
        self
    }

    /// Time that calls have waited for the server, without that for which this process was stopped.
    pub(super) fn waited(&self) -> Duration {
        Duration::from_millis(unsafe { rollflow_store_waited(self.raw) }.unsigned_abs())
    }

    /// The port in use.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets a key, which others may wait for.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), CollectiveError> {
        let key = text(key)?;
        check(unsafe { rollflow_store_set(self.raw, key.as_ptr(), value.as_ptr(), value.len()) })
    }

    /// A key's value, if it is set.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, CollectiveError> {
        if !self.has(key)? {
            return Ok(None);
        }
        let (key, mut bytes, mut len) = (text(key)?, std::ptr::null_mut(), 0);
        check(unsafe { rollflow_store_get(self.raw, key.as_ptr(), &mut bytes, &mut len) })?;
        // SAFETY: `len` bytes of `malloc`, which are ours.
        let value = unsafe { std::slice::from_raw_parts(bytes, len) }.to_vec();
        unsafe { free(bytes.cast()) };
        Ok(Some(value))
    }

    /// A key's value; waits for someone to set it until `until`, or until `given_up`. `None` if
    /// none did. Looks 20 times a second, so that the store's other users are not kept waiting.
    pub fn await_key(&self, key: &str, until: Instant, given_up: impl Fn() -> bool) -> Result<Option<Vec<u8>>, CollectiveError> {
        loop {
            let found = self.get(key)?;
            if found.is_some() || given_up() || Instant::now() >= until {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns true if the key is set.
    fn has(&self, key: &str) -> Result<bool, CollectiveError> {
        let (key, mut has) = (text(key)?, false);
        check(unsafe { rollflow_store_has(self.raw, key.as_ptr(), &mut has) })?;
        Ok(has)
    }

    /// Adds 1 to the number under `key`, which begins at 0, and returns it.
    pub fn count(&self, key: &str) -> Result<i64, CollectiveError> {
        let (key, mut count) = (text(key)?, 0);
        check(unsafe { rollflow_store_count(self.raw, key.as_ptr(), &mut count) })?;
        Ok(count)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        unsafe { rollflow_store_close(self.raw) }
    }
}

/// What a group shares with the watch over the ranks.
#[derive(Debug, Default)]
pub struct Signals {
    /// Makes waiting calls fail within a second.
    pub cancelled: AtomicBool,
    /// Number of calls that this rank has begun.
    pub exchanges: AtomicU64,
}

/// One rank's end of a group of processes. Every rank makes the same calls in the same order, with
/// tensors of the same sizes and types; a call fails on every rank that waits past the group's
/// deadline, or for a rank whose process ended. Calls of one group come from one thread.
pub struct Group {
    raw: *mut RawGroup,
    rank: usize,
    size: usize,
    signals: Arc<Signals>,
    /// Set by a failed call, after which the ranks are out of step.
    failed: Arc<AtomicBool>,
}

// SAFETY: the group may move between threads; calls are made through one owner.
unsafe impl Send for Group {}

/// A collective under way. It must be waited for, or dropped, which waits too.
#[must_use]
pub struct Pending {
    raw: *mut RawWork,
    result: Tensor,
    /// Read by the call until it ends.
    _signals: Arc<Signals>,
    failed: Arc<AtomicBool>,
}

// SAFETY: c10d's works may be waited for on any thread.
unsafe impl Send for Pending {}

/// A group before it is joined.
pub(super) struct Joining<'a> {
    pub store: &'a Store,
    /// Beginning of its keys in the store, which no other group has.
    pub name: &'a str,
    /// Address of this host, through which the others reach it.
    pub address: &'a str,
    /// This process's rank, and the number of ranks.
    pub place: [usize; 2],
    /// Deadline of each call.
    pub deadline: Duration,
    /// Makes the groups for tensors of a GPU; `None` if this rank has none.
    pub devices: Option<DeviceGroups>,
    /// If true, a group with `devices` is for tensors of a GPU alone, as those of other programs are. It does
    /// not wait for the other ranks.
    pub alone: bool,
}

impl Joining<'_> {
    /// Joins the group. Waits for all ranks, except in a group with `devices` that is `alone`.
    pub fn join(self, signals: &Arc<Signals>) -> Result<Group, CollectiveError> {
        let Joining { store, name, address, place: [rank, size], deadline, devices, alone } = self;
        let (name, address, mut group) = (text(name)?, text(address)?, std::ptr::null_mut());
        let (name, address) = (name.as_ptr(), address.as_ptr());
        let (signals, deadline) = (signals.clone(), millis(deadline));
        check(unsafe {
            let (rank, size, flag) = (rank as i32, size as i32, signals.cancelled.as_ptr());
            rollflow_group_join(&mut group, store.raw, name, address, rank, size, deadline, flag, devices, alone)
        })?;
        Ok(Group { raw: group, rank, size, signals, failed: Arc::default() })
    }
}

impl Group {
    /// Connects the ranks of a group for tensors of this GPU, which otherwise its first operation does. Waits
    /// for all ranks.
    pub(crate) fn connect(&mut self, device: usize) -> Result<(), CollectiveError> {
        let error = unsafe { rollflow_group_connect(self.begin(), device as i64) };
        self.done(error)
    }

    /// Counts a call.
    fn begin(&self) -> *mut RawGroup {
        self.signals.exchanges.fetch_add(1, AcqRel);
        self.raw
    }

    fn done(&mut self, error: *mut c_char) -> Result<(), CollectiveError> {
        check(error).inspect_err(|_| self.failed.store(true, Release))
    }

    /// This process's place, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// This process's number, from 0, and the number of ranks.
    pub fn place(&self) -> [usize; 2] {
        [self.rank, self.size]
    }

    /// The sum over all ranks, in place.
    pub fn all_reduce(&mut self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        let error = unsafe { rollflow_all_reduce(self.begin(), raw(tensor)) };
        self.done(error)
    }

    /// This rank's part of the sum over all ranks of `whole`, whose length is a multiple of the
    /// number of ranks.
    pub fn reduce_scatter(&mut self, whole: &Tensor) -> Result<Tensor, CollectiveError> {
        let part = Tensor::empty([whole.size()[0] / self.size as i64], (whole.kind(), whole.device()));
        let error = unsafe { rollflow_reduce_scatter(self.begin(), raw(&part), raw(whole)) };
        self.done(error)?;
        Ok(part)
    }

    /// Begins to gather every rank's `part`, end to end.
    pub fn gather(&mut self, part: &Tensor) -> Result<Pending, CollectiveError> {
        self.gather_into(part, Tensor::empty([part.size()[0] * self.size as i64], (part.kind(), part.device())))
    }

    /// [`Group::gather`] into a contiguous tensor of the sum of their lengths.
    pub fn gather_into(&mut self, part: &Tensor, result: Tensor) -> Result<Pending, CollectiveError> {
        let mut work = std::ptr::null_mut();
        let error = unsafe { rollflow_all_gather(self.begin(), &mut work, raw(&result), raw(part)) };
        self.done(error)?;
        Ok(Pending { raw: work, result, _signals: self.signals.clone(), failed: self.failed.clone() })
    }

    /// Every rank's bytes, by rank.
    pub fn gather_bytes(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let lengths = self.gather(&Tensor::from_slice(&[own.len() as i64]))?.wait()?;
        let lengths: Vec<usize> = lengths.iter::<i64>().map_err(of_tch)?.map(|length| length as usize).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
        let padded = [own, &vec![0; longest - own.len()]].concat();
        let all = self.gather(&Tensor::from_slice(&padded))?.wait()?;
        let all = bytes_of(&all);
        Ok(all.chunks(longest).zip(lengths).map(|(bytes, length)| bytes[..length].to_vec()).collect())
    }

    /// Sends rank 0's tensor to the others, whose tensors have the same size and type.
    pub fn broadcast(&mut self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        let error = unsafe { rollflow_broadcast(self.begin(), raw(tensor), 0) };
        self.done(error)
    }

    /// The bytes of rank 0, on every rank; the others' are ignored. The others wait for as long as
    /// rank 0 takes.
    pub fn broadcast_bytes(&mut self, own: &[u8]) -> Result<Vec<u8>, CollectiveError> {
        let length = Tensor::from_slice(&[own.len() as i64]);
        let error = unsafe { rollflow_broadcast(self.begin(), raw(&length), millis(NO_DEADLINE)) };
        self.done(error)?;
        let length = length.int64_value(&[0]) as usize;
        let mut bytes = if self.rank == 0 {
            Tensor::from_slice(own)
        } else {
            Tensor::zeros([length as i64], (tch::Kind::Uint8, tch::Device::Cpu))
        };
        if length > 0 {
            self.broadcast(&mut bytes)?;
        }
        Ok(bytes_of(&bytes))
    }
}

/// Longer than any run: a wait that only a cancelled group ends.
const NO_DEADLINE: Duration = Duration::from_secs(365 * 24 * 3600);

impl Drop for Group {
    fn drop(&mut self) {
        // Closing waits for calls in flight, which may never end after a failure.
        let given_up = self.failed.load(Acquire) || self.signals.cancelled.load(Acquire);
        let close = if given_up { rollflow_group_abort } else { rollflow_group_close };
        unsafe { close(self.raw) }
    }
}

impl Pending {
    /// Waits for the result.
    pub fn wait(mut self) -> Result<Tensor, CollectiveError> {
        let work = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        check(unsafe { rollflow_work_wait(work) }).inspect_err(|_| self.failed.store(true, Release))?;
        Ok(self.result.shallow_clone())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // The tensors are in use until then; the error is another call's to report.
            drop(check(unsafe { rollflow_work_wait(self.raw) }));
        }
    }
}

fn of_tch(error: tch::TchError) -> CollectiveError {
    CollectiveError(error.to_string())
}

fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0u8; tensor.numel()];
    tensor.copy_data(&mut bytes, tensor.numel());
    bytes
}

#[cfg(test)]
mod tests;
