//! Weights that a trainer broadcasts into this server, in SGLang's form: a group with the trainer, an
//! update that is begun, tensors piece by piece while completions continue, and its end, which installs
//! them between two tokens.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use axum::body::Bytes;
use axum::extract::State;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::control::{self, Sums, blocking};
use super::reply::{self, Refusal, Reply};
use super::shared::Shared;
use crate::model::{Dtype, Entry, FrozenWeights, Layout, Weights, part};
use crate::ranks::meeting::Meeting;
use crate::ranks::{DeviceGroups, Group, Signals, device_groups};
use crate::util::untrusted;

/// Most groups at a time. Trainers that ended leave theirs, of which the oldest are closed.
const MOST_GROUPS: usize = 16;

/// Groups with trainers, and an update that has begun.
#[derive(Default)]
pub(super) struct Receiver {
    /// By name, oldest first.
    groups: Vec<(String, Arc<TrainerGroup>)>,
    update: Option<Arc<Mutex<Arriving>>>,
}

impl Receiver {
    fn find(&self, name: &str) -> Option<Arc<TrainerGroup>> {
        self.groups.iter().find(|(known, _)| known == name).map(|(_, group)| group.clone())
    }

    fn remove(&mut self, name: &str) -> Option<Arc<TrainerGroup>> {
        let at = self.groups.iter().position(|(known, _)| known == name)?;
        Some(self.groups.remove(at).1)
    }
}

struct TrainerGroup {
    group: Mutex<Group>,
    /// Where its tensors arrive.
    device: Device,
}

/// Weights of an update, in the server's format.
struct Arriving {
    layout: Arc<Layout>,
    flat: Tensor,
    missing: BTreeSet<String>,
    /// Once none is missing: the weights and their checksums.
    complete: Option<(Arc<FrozenWeights>, Sums)>,
}

#[derive(Deserialize)]
struct Init {
    master_address: String,
    master_port: u16,
    rank_offset: usize,
    world_size: usize,
    group_name: String,
    #[serde(default = "nccl")]
    backend: String,
}

fn nccl() -> String {
    "nccl".to_owned()
}

/// Joins a group with a trainer.
pub(super) async fn init(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let init: Init = reply::read(&body)?;
    if init.rank_offset == 0 || init.rank_offset >= init.world_size {
        return Err(Refusal::bad("`rank_offset` must be at least 1 and below `world_size`: rank 0 is the trainer"));
    }
    let (devices, device) = exchange(&init.backend, shared.compute.device)?;
    let name = init.group_name.clone();
    let join = move || {
        let place = [init.rank_offset, init.world_size];
        let meeting = Meeting::attend(&init.group_name, (&init.master_address, init.master_port), place, devices);
        let group = meeting.and_then(|meeting| meeting.join(&Arc::new(Signals::default())));
        group.map_err(|error| format!("joining the group: {error}"))
    };
    let group = TrainerGroup { group: Mutex::new(blocking(join).await?), device };
    let mut receiver = shared.receiver.lock();
    receiver.remove(&name);
    receiver.groups.push((name, Arc::new(group)));
    let too_many = receiver.groups.len().saturating_sub(MOST_GROUPS);
    receiver.groups.drain(..too_many);
    Ok(reply::success("Succeeded to initialize custom process group."))
}

/// What exchanges the tensors of a backend, and where they arrive.
fn exchange(backend: &str, device: Device) -> Result<(Option<DeviceGroups>, Device), Refusal> {
    match (backend, device) {
        ("gloo", _) => Ok((None, Device::Cpu)),
        ("nccl", Device::Cuda(index)) => Ok((Some(device_groups(index).map_err(Refusal::bad)?), device)),
        ("nccl", _) => Err(Refusal::bad("this server computes on a processor, for which `backend` must be \"gloo\"")),
        (other, _) => {
            Err(Refusal::bad(format!("`backend` {} is unknown; use \"gloo\" or \"nccl\"", untrusted::line_of(other, 40))))
        }
    }
}

#[derive(Deserialize)]
struct Named {
    group_name: String,
}

/// Leaves a group.
pub(super) async fn destroy(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let Named { group_name } = reply::read(&body)?;
    match shared.receiver.lock().remove(&group_name) {
        Some(_) => Ok(reply::success("Succeeded to destroy custom process group.")),
        None => Err(Refusal::bad("there is no group of this name")),
    }
}

/// Begins an update, for which memory is taken.
pub(super) async fn begin(State(shared): State<Arc<Shared>>) -> Reply {
    let _order = shared.changing.lock().await;
    if shared.receiver.lock().update.is_some() {
        return Err(Refusal::bad("an update has begun already; end it by /end_weight_update"));
    }
    // Two versions in memory, and not three.
    shared.prepared.lock().take();
    let layout = Layout::new(&shared.model);
    let missing = layout.entries().iter().map(|entry| entry.name.clone()).collect();
    let flat = Tensor::empty([layout.total() as i64], (shared.compute.dtype.kind(), shared.compute.device));
    let arriving = Arriving { layout: Arc::new(layout), flat, missing, complete: None };
    shared.receiver.lock().update = Some(Arc::new(Mutex::new(arriving)));
    Ok(reply::success("Success"))
}

#[derive(Deserialize)]
struct Piece {
    names: Vec<String>,
    dtypes: Vec<String>,
    shapes: Vec<Vec<usize>>,
    group_name: String,
    #[serde(default)]
    load_format: Option<String>,
}

/// Receives tensors, end to end in one broadcast.
pub(super) async fn update(State(shared): State<Arc<Shared>>, body: Bytes) -> Reply {
    let piece: Piece = reply::read(&body)?;
    let _order = shared.changing.lock().await;
    let (group, update) = {
        let receiver = shared.receiver.lock();
        (receiver.find(&piece.group_name), receiver.update.clone())
    };
    let group = group.ok_or_else(|| Refusal::bad("there is no group of this name; call /init_weights_update_group before"))?;
    let update = update.ok_or_else(|| Refusal::bad("no update has begun; call /begin_weight_update before"))?;
    let dtype = shared.compute.dtype;
    blocking(move || receive(&group, &mut update.lock(), &piece, dtype)).await?;
    Ok(reply::success("Succeeded to update parameter online."))
}

fn receive(group: &TrainerGroup, update: &mut Arriving, piece: &Piece, dtype: Dtype) -> Result<(), String> {
    if update.complete.is_some() {
        return Err("all tensors of this update have come; end it by /end_weight_update".to_owned());
    }
    let tensors = piece.tensors(&update.layout)?;
    let bytes = tensors.iter().map(|(entry, dtype)| entry.len() * dtype.bytes()).sum::<usize>();
    let mut flat = Tensor::empty([bytes as i64], (Kind::Uint8, group.device));
    group.group.lock().broadcast(&mut flat).map_err(|error| format!("receiving tensors: {error}"))?;
    let _guard = tch::no_grad_guard();
    let mut at = 0;
    for (entry, dtype) in tensors {
        let length = (entry.len() * dtype.bytes()) as i64;
        let numbers = flat.narrow(0, at, length).view_dtype(dtype.kind());
        part(&update.flat, entry.range()).copy_(&numbers);
        update.missing.remove(&entry.name);
        at += length;
    }
    if update.missing.is_empty() {
        let weights = FrozenWeights::of_own(Weights::new(update.layout.clone(), update.flat.shallow_clone()));
        let sums = Sums::from(OnceLock::from(control::sums_of(&weights, dtype)));
        update.complete = Some((Arc::new(weights), sums));
    }
    Ok(())
}

impl Piece {
    /// Places and formats of the tensors. Nothing is received if one of them is wrong.
    fn tensors(&self, layout: &Layout) -> Result<Vec<(Entry, Dtype)>, String> {
        if self.load_format.as_deref() != Some("flattened_bucket") {
            return Err("`load_format` must be \"flattened_bucket\": the tensors come end to end".to_owned());
        }
        if self.names.len() != self.dtypes.len() || self.names.len() != self.shapes.len() {
            return Err("`names`, `dtypes` and `shapes` must have the same length".to_owned());
        }
        let tensors = self.names.iter().zip(&self.dtypes).zip(&self.shapes).map(|((name, dtype), shape)| {
            let shown = untrusted::line_of(name, 120);
            let entry = layout.find(name).ok_or_else(|| format!("this server's model has no tensor {shown}"))?;
            if *shape != entry.shape {
                return Err(format!("{shown} has the shape {shape:?}, and {:?} in this server's model", entry.shape));
            }
            let dtype = Dtype::named(dtype).ok_or_else(|| format!("{shown} has a format that this server does not read"))?;
            Ok((entry.clone(), dtype))
        });
        tensors.collect()
    }
}

/// Installs the weights of an update, unless tensors are missing.
pub(super) async fn end(State(shared): State<Arc<Shared>>) -> Reply {
    let _order = shared.changing.lock().await;
    let update = shared.receiver.lock().update.take();
    let update = update.ok_or_else(|| Refusal::bad("no update has begun; call /begin_weight_update before"))?;
    let (weights, sums) = {
        let mut update = update.lock();
        let missing = |update: &Arriving| {
            let name = update.missing.first().map_or("", String::as_str);
            format!("the update has no {name}, and {} tensors are missing in all; nothing changes", update.missing.len())
        };
        update.complete.take().ok_or_else(|| Refusal::bad(missing(&update)))?
    };
    let (label, folder) = {
        let served = shared.served.lock();
        (served.label.clone(), served.folder.clone())
    };
    control::install(&shared, label, folder, weights, sums).await?;
    Ok(reply::page(&json!({ "success": true, "message": "Success", "instance": shared.instance })))
}
