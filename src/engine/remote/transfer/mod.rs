//! Transfer of tensors from the trainer's memory to servers, without a folder.
//!
//! The tensors of a version lie end to end in memory, and are sent in [`Piece`]s. Each server has a
//! separate link, so that a server that fails or restarts delays no other: a group in which the
//! trainer broadcasts, or memory of a GPU that the server maps. Requests name the tensors of a piece
//! while the piece is sent.

mod pickle;
pub(super) mod sglang;
pub(super) mod vllm;

use std::fmt::Debug;
use std::sync::Arc;

use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::server::{CALL, Server};
use super::{Fault, RemoteError};

/// Tensors that lie end to end in memory and are sent together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Names in a model folder.
    pub names: Vec<String>,
    /// Number format of all, by torch's name, such as `bfloat16`.
    pub dtype: &'static str,
    /// Shape of each.
    pub shapes: Vec<Vec<usize>>,
    /// Bytes of each.
    pub bytes: Vec<usize>,
}

/// Arguments with which a server joins a group of torch's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupInvitation {
    /// Address of the store at which the group meets.
    pub address: String,
    /// Port of the store.
    pub port: u16,
    /// Name of the group.
    pub name: String,
    /// `nccl` or `gloo`.
    pub backend: &'static str,
}

/// Memory of a GPU that other processes can map (CUDA IPC).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    /// Handle by the driver (`cuIpcGetMemHandle`).
    pub handle: Vec<u8>,
    /// Bytes of the memory.
    pub bytes: usize,
    /// Number of the GPU in this process.
    pub device: usize,
    /// UUID of the GPU, as torch writes it.
    pub gpu: String,
}

/// Tensors of one version, and the links of this process to servers, which all versions share. A server is
/// named by its address. Calls block until [`TensorSource::close`] ends those of a link.
///
/// # Errors
///
/// Each call returns the reason as text. After an error the link must be closed.
pub trait TensorSource: Debug + Send + Sync {
    /// Pieces, in the order in which they are sent.
    fn pieces(&self) -> &[Piece];

    /// Name of the open link to a server.
    fn link(&self, server: &str) -> Option<String>;

    /// Opens a group with the `ranks` of a server at `host:port`: over NCCL from a GPU, over Gloo from a
    /// processor. It meets at a store that this process serves.
    fn open_group(&self, server: &str, host: &str, port: u16, ranks: usize) -> Result<GroupInvitation, String>;

    /// Opens a group of NCCL with the `ranks` of a server, and returns its id.
    fn open_nccl(&self, server: &str, ranks: usize) -> Result<Vec<u8>, String>;

    /// Memory for pieces that a server on the trainer's GPU maps; the same until the link is closed.
    fn share_memory(&self, server: &str) -> Result<SharedMemory, String>;

    /// Waits until the server has joined the group.
    fn join(&self, server: &str) -> Result<(), String>;

    /// Sends a piece to all ranks of the server, or writes it to the memory that it maps.
    fn send(&self, server: &str, piece: usize) -> Result<(), String>;

    /// Closes a link, if it is open.
    fn close(&self, server: &str);
}

/// Transfer to one server. Its link is closed unless the transfer is complete.
struct Transfer<'a> {
    server: &'a Server,
    source: &'a Arc<dyn TensorSource>,
    /// Path at which the server leaves a group, by its name.
    leave: Option<&'static str>,
    complete: bool,
}

impl<'a> Transfer<'a> {
    fn new(server: &'a Server, source: &'a Arc<dyn TensorSource>) -> Self {
        Transfer { server, source, leave: None, complete: false }
    }

    /// The server leaves the group of a closed link at this path.
    fn leaving_by(mut self, path: &'static str) -> Self {
        self.leave = Some(path);
        self
    }

    fn link(&self) -> Option<String> {
        self.source.link(self.server.client.base())
    }

    /// Runs a blocking call on a new thread, which does not keep the process from ending if the call hangs.
    async fn call<T: Send + 'static>(
        &self,
        what: &str,
        call: impl FnOnce(&dyn TensorSource, &str) -> Result<T, String> + Send + 'static,
    ) -> Result<T, RemoteError> {
        let (source, address, (done, result)) = (self.source.clone(), self.server.client.base().to_owned(), oneshot::channel());
        let spawned = std::thread::Builder::new().name("weight-transfer".into()).spawn(move || {
            done.send(call(source.as_ref(), &address)).ok();
        });
        let failed = |why: String| self.server.client.fault(Fault::Transfer(format!("{what}: {why}")));
        spawned.map_err(|error| failed(error.to_string()))?;
        match result.await {
            Ok(result) => result.map_err(failed),
            Err(_) => Err(failed("its thread panicked".to_owned())),
        }
    }

    async fn join(&self) -> Result<(), RemoteError> {
        self.call("waiting for the server to join", |source, address| source.join(address)).await
    }

    async fn send(&self, piece: usize) -> Result<(), RemoteError> {
        self.call("sending tensors", move |source, address| source.send(address, piece)).await
    }
}

impl Drop for Transfer<'_> {
    /// A timeout drops the future, too.
    fn drop(&mut self) {
        if self.complete {
            return;
        }
        let (group, runtime) = (self.link(), Handle::try_current());
        self.source.close(self.server.client.base());
        if let (Some(path), Some(group), Ok(runtime)) = (self.leave, group, runtime) {
            let server = self.server.clone();
            // A server that restarted knows no such group.
            runtime.spawn(async move {
                let left = server.client.post(path, &json!({ "group_name": group }), CALL).await;
                if let Err(error) = left {
                    tracing::debug!("{error}");
                }
            });
        }
    }
}

/// True if a failed transfer over a link that was open before may succeed over another: the server may have
/// restarted.
fn may_be_forgotten(error: &RemoteError) -> bool {
    matches!(error.fault, Fault::Refused { .. } | Fault::Failed { .. } | Fault::Transfer(_))
}
