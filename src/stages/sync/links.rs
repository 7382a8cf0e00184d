//! Links of the trainer to servers that take tensors out of its memory: groups of torch's, and memory
//! of a GPU that both use.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use crate::engine::remote::transfer::{GroupInvitation, SharedMemory};
use crate::model::shared_memory::MappableMemory;
use crate::model::stream::synchronize;
use crate::ranks::meeting::{DEADLINE, Meeting, address_towards};
use crate::ranks::{CollectiveError, Group, Signals, device_groups};

/// Time between two looks whether a link was closed.
const LOOK: Duration = Duration::from_millis(100);

/// Links to servers, by their address, for tensors on one device.
#[derive(Debug)]
pub struct Links {
    device: Device,
    open: Mutex<HashMap<String, Arc<Link>>>,
    /// Number of groups so far.
    groups: AtomicU64,
}

#[derive(Debug)]
struct Link {
    name: String,
    signals: Arc<Signals>,
    end: End,
}

/// This process's end of a link.
enum End {
    Group(Box<GroupEnd>),
    Memory(Mutex<MappableMemory>),
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            End::Group(_) => "Group",
            End::Memory(_) => "Memory",
        })
    }
}

struct GroupEnd {
    meeting: Meeting,
    state: Mutex<State>,
}

enum State {
    Open,
    /// `connected`: NCCL connects with the first operation, which waits for the server.
    Joined {
        group: Group,
        connected: bool,
    },
    Failed(String),
}

impl Links {
    /// Links for tensors on `device`.
    pub fn new(device: Device) -> Self {
        Links { device, open: Mutex::default(), groups: AtomicU64::new(0) }
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }

    /// Name of the open link to a server.
    pub(super) fn name(&self, server: &str) -> Option<String> {
        self.open.lock().get(server).map(|link| link.name.clone())
    }

    pub(super) fn close(&self, server: &str) {
        if let Some(link) = self.open.lock().remove(server) {
            link.signals.cancelled.store(true, Release);
        }
    }

    fn get(&self, server: &str) -> Result<Arc<Link>, String> {
        self.open.lock().get(server).cloned().ok_or_else(|| "the link was closed".to_owned())
    }

    fn insert(&self, server: &str, name: String, end: End) -> Arc<Link> {
        self.close(server);
        let link = Arc::new(Link { name, signals: Arc::default(), end });
        self.open.lock().insert(server.to_owned(), link.clone());
        link
    }

    /// Opens a group that meets at `address` with the ranks of a server. No other group of a server has its name.
    fn new_group(&self, server: &str, address: String, ranks: usize) -> Result<Arc<Link>, String> {
        let devices = match self.device {
            Device::Cuda(index) => Some(device_groups(index)?),
            _ => None,
        };
        // Servers outlive a run, and in a container all runs may have the same process id.
        let nth = self.groups.fetch_add(1, Relaxed);
        let name = format!("rollflow-{:016x}-{nth}", RandomState::new().hash_one(nth));
        let meeting = Meeting::serve(&name, address, ranks, devices).map_err(told)?;
        Ok(self.insert(server, name, End::Group(Box::new(GroupEnd { meeting, state: Mutex::new(State::Open) }))))
    }

    /// Opens a group that servers join by its store.
    pub(super) fn open_group(&self, server: &str, host: &str, port: u16, ranks: usize) -> Result<GroupInvitation, String> {
        let address = address_towards(host, port)?;
        let link = self.new_group(server, address.clone(), ranks)?;
        let meeting = &link.group()?.meeting;
        Ok(GroupInvitation { address, port: meeting.store().port(), name: link.name.clone(), backend: meeting.backend() })
    }

    /// Opens a group that servers join by NCCL's id, which is returned.
    pub(super) fn open_nccl(&self, server: &str, ranks: usize) -> Result<Vec<u8>, String> {
        let Device::Cuda(_) = self.device else {
            return Err("NCCL sends tensors of GPUs only; set model.device = \"cuda\", or engine.carry = \"folder\"".to_owned());
        };
        let link = self.new_group(server, "127.0.0.1".to_owned(), ranks)?;
        // NCCL makes the id when it begins to connect, and then waits for the server, which needs the id.
        let (device, connecting) = (self.device, link.clone());
        let connect = move || {
            let Ok(end) = connecting.group() else { return };
            let mut state = end.state.lock();
            let joined = end.meeting.join(&connecting.signals).map_err(told).and_then(|mut group| {
                connect(&mut group, device)?;
                // vLLM's end does the same after it has joined.
                group.all_reduce(&mut Tensor::zeros([1], (Kind::Float, device))).map_err(told)?;
                Ok(State::Joined { group, connected: true })
            });
            *state = joined.unwrap_or_else(State::Failed);
        };
        let thread = std::thread::Builder::new().name("weight-transfer".into()).spawn(connect);
        let thread = thread.map_err(|error| error.to_string())?;
        let GroupEnd { meeting, state } = link.group()?;
        let ended = || link.signals.cancelled.load(Acquire) || thread.is_finished();
        let id = meeting.store().await_key(&meeting.nccl_id(), Instant::now() + DEADLINE, ended).map_err(told)?;
        id.ok_or_else(|| match state.try_lock().as_deref() {
            Some(State::Failed(why)) => why.clone(),
            _ => "NCCL made no id; NCCL_DEBUG=INFO shows why".to_owned(),
        })
    }

    /// Memory of `bytes` that a server maps.
    pub(super) fn share_memory(&self, server: &str, bytes: usize) -> Result<SharedMemory, String> {
        let Device::Cuda(device) = self.device else {
            return Err("the trainer is on a processor; set model.device = \"cuda\", or engine.carry = \"folder\"".to_owned());
        };
        let known = self.open.lock().get(server).cloned();
        let link = match known {
            Some(link) => link,
            None => self.insert(server, "memory".to_owned(), End::Memory(Mutex::new(MappableMemory::new(device, bytes)?))),
        };
        let End::Memory(memory) = &link.end else { return Err("the link to this server is a group".to_owned()) };
        let memory = memory.lock();
        Ok(SharedMemory { handle: memory.handle.to_vec(), bytes, device, gpu: memory.gpu.clone() })
    }

    /// Waits until the server has joined a group.
    pub(super) fn join(&self, server: &str) -> Result<(), String> {
        let link = self.get(server)?;
        let end = link.group()?;
        // NCCL may be connecting, which holds it.
        let mut state = loop {
            if let Some(state) = end.state.try_lock_for(LOOK) {
                break state;
            }
            if link.signals.cancelled.load(Acquire) {
                return Err("the link was closed".to_owned());
            }
        };
        if let State::Open = *state {
            let group = end.meeting.join(&link.signals).map_err(told)?;
            *state = State::Joined { group, connected: end.meeting.devices().is_none() };
        }
        match &*state {
            State::Failed(why) => Err(why.clone()),
            _ => Ok(()),
        }
    }

    /// Sends bytes to all ranks of the server, or writes them to the memory that it maps.
    pub(super) fn send(&self, server: &str, bytes: &Tensor) -> Result<(), String> {
        let link = self.get(server)?;
        match &link.end {
            End::Group(end) => match &mut *end.state.lock() {
                State::Joined { group, connected } => {
                    if !std::mem::replace(connected, true) {
                        connect(group, self.device)?;
                    }
                    group.broadcast(&mut bytes.shallow_clone()).map_err(told)
                }
                State::Failed(why) => Err(why.clone()),
                State::Open => Err("the server has not joined".to_owned()),
            },
            End::Memory(memory) => {
                let memory = memory.lock();
                memory.bytes.narrow(0, 0, bytes.size()[0]).f_copy_(bytes).map_err(|error| error.to_string())?;
                synchronize(self.device);
                Ok(())
            }
        }
    }
}

impl Link {
    fn group(&self) -> Result<&GroupEnd, String> {
        match &self.end {
            End::Group(end) => Ok(end),
            End::Memory(_) => Err("the link to this server is memory".to_owned()),
        }
    }
}

/// Connects the ranks of a group of GPUs.
fn connect(group: &mut Group, device: Device) -> Result<(), String> {
    match device {
        Device::Cuda(index) => group.connect(index).map_err(told),
        _ => Ok(()),
    }
}

fn told(error: CollectiveError) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_trainer_gives_its_groups_other_names_although_it_has_the_same_process_id() {
        let name = || Links::new(Device::Cpu).open_group("http://a", "127.0.0.1", 9, 1).unwrap().name;
        assert_ne!(name(), name());
    }
}
