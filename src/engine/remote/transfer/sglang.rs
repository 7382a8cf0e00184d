//! SGLang's protocol for tensors of a group (tested with 0.5.23), which `rollflow serve` has, too.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Piece, TensorSource, Transfer, may_be_forgotten};
use crate::engine::remote::server::{CALL, Server};
use crate::engine::remote::{Fault, RemoteError};

/// Sends a server the tensors, which [`end`] installs; SGLang must be paused. A link that the server has
/// forgotten, such as after a restart, is replaced.
pub(in crate::engine::remote) async fn send(server: &Server, source: &Arc<dyn TensorSource>) -> Result<(), RemoteError> {
    let known = source.link(server.client.base()).is_some();
    match attempt(server, source).await {
        Err(error) if known && may_be_forgotten(&error) => attempt(server, source).await,
        done => done,
    }
}

/// Ends an update. Returns the id of the server's process, if it has one.
pub(in crate::engine::remote) async fn end(server: &Server) -> Result<Option<Value>, RemoteError> {
    let ended = server.post_success("/end_weight_update", &json!({})).await?;
    Ok(ended.get("instance").cloned())
}

async fn attempt(server: &Server, source: &Arc<dyn TensorSource>) -> Result<(), RemoteError> {
    let mut transfer = Transfer::new(server, source).leaving_by("/destroy_weights_update_group");
    let group = match transfer.link() {
        Some(name) => name,
        None => join(&transfer).await?,
    };
    begin(server).await?;
    for (at, piece) in source.pieces().iter().enumerate() {
        let request = request(piece, &group);
        tokio::try_join!(server.post_success("/update_weights_from_distributed", &request), transfer.send(at))?;
    }
    transfer.complete = true;
    Ok(())
}

/// Makes a group with the server's ranks, and returns its name.
async fn join(transfer: &Transfer<'_>) -> Result<String, RemoteError> {
    let server = transfer.server;
    let page = server.client.get("/server_info", CALL).await?;
    let number = |key: &str| page[key].as_u64().unwrap_or(1).max(1) as usize;
    let (ranks, (host, port)) = (number("tp_size") * number("pp_size"), server.client.host_and_port());
    let open = transfer.call("opening a group", move |source, address| source.open_group(address, &host, port, ranks));
    let invitation = open.await?;
    let request = json!({
        "master_address": invitation.address, "master_port": invitation.port, "rank_offset": 1, "world_size": 1 + ranks,
        "group_name": invitation.name, "backend": invitation.backend,
    });
    tokio::try_join!(server.post_success("/init_weights_update_group", &request), transfer.join())?;
    Ok(invitation.name)
}

/// Begins an update. One that an earlier failure left open is ended first.
async fn begin(server: &Server) -> Result<(), RemoteError> {
    let begun = server.post_success("/begin_weight_update", &json!({})).await;
    if let Err(RemoteError { fault: Fault::Refused { status: 400, .. } | Fault::Failed { .. }, .. }) = begun {
        // It fails if tensors are missing, and is over.
        server.post_success("/end_weight_update", &json!({})).await.ok();
        return server.post_success("/begin_weight_update", &json!({})).await.map(drop);
    }
    begun.map(drop)
}

fn request(piece: &Piece, group: &str) -> Value {
    json!({
        "names": piece.names, "dtypes": vec![piece.dtype; piece.names.len()], "shapes": piece.shapes, "group_name": group,
        "load_format": "flattened_bucket", "flush_cache": false,
    })
}
