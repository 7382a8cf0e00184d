//! Groups of a trainer and a server, which may be programs in other languages: the trainer is rank 0 and
//! serves the store, whose keys are those of torch's Python library.

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Duration;

use super::group::Joining;
use super::{CollectiveError, DeviceGroups, Group, Signals, Store};

/// Longest wait for the other side: to join a group, and for each tensor.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// A group of a trainer and the ranks of a server, before it is joined.
pub(crate) struct Meeting {
    /// Store at which it meets, with the group's name as the prefix.
    store: Store,
    /// Prefix of the keys in the store.
    prefix: String,
    /// Address of this host for the other side.
    address: String,
    /// Rank of this process, and number of ranks.
    place: [usize; 2],
    /// Exchanges tensors of a GPU; `None` for tensors of the host.
    devices: Option<DeviceGroups>,
}

impl Meeting {
    /// The end of rank 0, whose store has a port of the system's choice.
    pub fn serve(name: &str, address: String, ranks: usize, devices: Option<DeviceGroups>) -> Result<Self, CollectiveError> {
        let store = Store::open(&address, 0, true, name, DEADLINE)?;
        Ok(Meeting { store, prefix: prefix(name, devices), address, place: [0, 1 + ranks], devices })
    }

    /// The end of another rank.
    pub fn attend(
        name: &str,
        (host, port): (&str, u16),
        place: [usize; 2],
        devices: Option<DeviceGroups>,
    ) -> Result<Self, CollectiveError> {
        let address = address_towards(host, port).map_err(CollectiveError)?;
        let store = Store::open(host, port, false, name, DEADLINE)?;
        Ok(Meeting { store, prefix: prefix(name, devices), address, place, devices })
    }

    /// Store at which it meets.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Key in the store with the id of the group's first communicator of NCCL.
    pub fn nccl_id(&self) -> String {
        format!("{}/0", self.prefix)
    }

    /// What exchanges tensors of a GPU.
    pub fn devices(&self) -> Option<DeviceGroups> {
        self.devices
    }

    /// Name of the library that exchanges tensors.
    pub fn backend(&self) -> &'static str {
        if self.devices.is_some() { "nccl" } else { "gloo" }
    }

    /// Joins the group. Over Gloo this waits for all ranks, over NCCL [`Group::connect`] does.
    pub fn join(&self, signals: &Arc<Signals>) -> Result<Group, CollectiveError> {
        let Meeting { store, prefix, address, place, devices } = self;
        let (place, devices) = (*place, *devices);
        Joining { store, name: prefix, address, place, deadline: DEADLINE, devices, alone: true }.join(signals)
    }
}

/// Prefix of a group's keys within the prefix that is its name.
fn prefix(name: &str, devices: Option<DeviceGroups>) -> String {
    let device = if devices.is_some() { "cuda" } else { "cpu" };
    format!("{name}//{device}/")
}

/// Address of this host through which it reaches another. Sends nothing.
pub(crate) fn address_towards(host: &str, port: u16) -> Result<String, String> {
    let found = ["0.0.0.0:0", "[::]:0"].into_iter().find_map(|own| {
        let socket = UdpSocket::bind(own).ok()?;
        socket.connect((host, port)).ok()?;
        socket.local_addr().ok()
    });
    found.map(|address| address.ip().to_string()).ok_or_else(|| format!("this host has no address that reaches {host}"))
}
