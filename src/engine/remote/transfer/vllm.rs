//! vLLM's weight transfer (tested with 0.32), whose backend the server's flag `--weight-transfer-config`
//! names.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{Piece, TensorSource, Transfer, may_be_forgotten, pickle};
use crate::engine::remote::server::{CALL, Server};
use crate::engine::remote::{Fault, RemoteError};

const INIT: &str = "/init_weight_transfer_engine";
const UPDATE: &str = "/update_weights";

/// Broadcasts the tensors to a paused server with the backend `nccl`. A link that the server has forgotten,
/// such as after a restart, is replaced.
pub(in crate::engine::remote) async fn broadcast(server: &Server, source: &Arc<dyn TensorSource>) -> Result<(), RemoteError> {
    let known = source.link(server.client.base()).is_some();
    match broadcast_once(server, source).await {
        Err(error) if known && may_be_forgotten(&error) => broadcast_once(server, source).await,
        done => done,
    }
}

async fn broadcast_once(server: &Server, source: &Arc<dyn TensorSource>) -> Result<(), RemoteError> {
    let mut transfer = Transfer::new(server, source);
    if transfer.link().is_none() {
        let page = server.client.get("/get_world_size", CALL).await?;
        let ranks = page["world_size"].as_u64().unwrap_or(1).max(1) as usize;
        let open = transfer.call("opening a group", move |source, address| source.open_nccl(address, ranks));
        let info = json!({
            "rank_offset": 1, "world_size": 1 + ranks, "nccl_unique_id_b64": STANDARD.encode(open.await?),
            // Each request is one broadcast.
            "packed": true, "packed_buffer_size_bytes": i64::MAX, "packed_num_buffers": 1,
        });
        let init = json!({ "init_info": info });
        tokio::try_join!(server.post_control(INIT, &init), transfer.join())?;
    }
    start(server).await?;
    for (at, piece) in source.pieces().iter().enumerate() {
        let update = json!({ "update_info": update_info(piece) });
        tokio::try_join!(server.post_control(UPDATE, &update), transfer.send(at))?;
    }
    finish(server).await?;
    transfer.complete = true;
    Ok(())
}

/// Gives a paused server on the trainer's GPU the tensors with the backend `ipc`, through memory of the GPU.
pub(in crate::engine::remote) async fn share(server: &Server, source: &Arc<dyn TensorSource>) -> Result<(), RemoteError> {
    let mut transfer = Transfer::new(server, source);
    let memory = transfer.call("taking memory to share", |source, address| source.share_memory(address)).await?;
    server.post_control(INIT, &json!({ "init_info": { "packed": true } })).await?;
    start(server).await?;
    let handles = STANDARD.encode(pickle::handles(&memory));
    for (at, piece) in source.pieces().iter().enumerate() {
        transfer.send(at).await?;
        let mut info = update_info(piece);
        info["tensor_sizes"] = json!(piece.bytes);
        info["ipc_handles_pickled"] = handles.as_str().into();
        server.post_control(UPDATE, &json!({ "update_info": info })).await?;
    }
    finish(server).await?;
    transfer.complete = true;
    Ok(())
}

/// Starts an update. One that an earlier failure left open is ended first.
async fn start(server: &Server) -> Result<(), RemoteError> {
    let started = server.post_control("/start_weight_update", &Value::Null).await;
    if let Err(RemoteError { fault: Fault::Refused { status: 400, .. } | Fault::Failed { .. }, .. }) = started {
        // vLLM ends an update whose tensors it cannot read. After its error it closes the connection, which may be
        // noticed with the next request.
        let unreadable = json!({ "update_info": {} });
        for _ in 0..3 {
            match server.post_control(UPDATE, &unreadable).await {
                Err(RemoteError { fault: Fault::Broke(_), .. }) => {}
                _ => break,
            }
        }
        return server.post_control("/start_weight_update", &Value::Null).await.map(drop);
    }
    started.map(drop)
}

async fn finish(server: &Server) -> Result<(), RemoteError> {
    server.post_control("/finish_weight_update", &json!({})).await.map(drop)
}

fn update_info(piece: &Piece) -> Value {
    json!({ "names": piece.names, "dtype_names": vec![piece.dtype; piece.names.len()], "shapes": piece.shapes })
}
