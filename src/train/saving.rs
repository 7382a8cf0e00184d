//! Saving a checkpoint (law C1): every rank copies its part of the state to host memory, and writes it
//! in the background.
//!
//! If ranks divide the optimizer, each writes some of the model's tensors, and the moments that it
//! holds. The folder is a Hugging Face folder in several files. Each rank brings its files to the disk and
//! reports their checksums through the ranks' store. Rank 0 writes everything else, and the
//! metadata last. Copying may exchange numbers, writing never does.
//!
//! Ranks that do not see rank 0's folder cannot do that. Rank 0 then gathers the whole state in its
//! memory and writes it, and warns.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::checkpoint::{self, CHECKPOINTS, Unfinished};
use super::moments::pieces;
use super::optimizer_files::{self, MASTERS, OptimizerState};
use super::shards::Shards;
use super::team::Command;
use super::worker::{Divided, Worker};
use super::{CheckpointMetadata, FileMark, MasterFormat, SaveCheckpoint, TrainError};
use crate::flow::caught;
use crate::model::{Adapter, Dtype, Entry, FolderShards, part, release_helpers, save_adapter, write_tensors};
use crate::ranks::Member;
use crate::util::atomic_file;

/// Names the save of a checkpoint for the other ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SaveOrder {
    /// Where rank 0 has begun it. No two saves have the same.
    folder: PathBuf,
    /// Name of the trainer.
    trainer: String,
}

/// Writes a checkpoint that was copied.
pub(super) type WriteCheckpoint = Box<dyn FnOnce() -> Result<PathBuf, TrainError> + Send>;

type Marks = BTreeMap<String, FileMark>;

/// A rank's part of a checkpoint, in host memory.
struct Copied {
    /// Adapters, on rank 0.
    adapter: Option<Adapter>,
    /// File, tensors and numbers of this rank's shard of the model.
    shard: Option<(String, Vec<Entry>, Tensor)>,
    dtype: Dtype,
    optimizer: Option<CopiedOptimizer>,
}

struct CopiedOptimizer {
    file: String,
    state: OptimizerState,
    tensors: Vec<(&'static str, Tensor)>,
    held: Vec<(Range<usize>, usize)>,
    /// Trained numbers of all ranks.
    len: usize,
}

impl Worker {
    /// Copies the state of all ranks for a checkpoint, and returns what writes it. Waits for the
    /// checkpoint before.
    pub fn copy_checkpoint(&mut self, request: SaveCheckpoint) -> Result<WriteCheckpoint, TrainError> {
        self.background.wait()?;
        let metadata = CheckpointMetadata {
            step: request.step,
            weight_version: self.version,
            metrics: request.metrics.clone(),
            ..Default::default()
        };
        let unfinished = Unfinished::begin(&request.run_folder.join(CHECKPOINTS), request.step)?;
        let copied = self.order_save(&unfinished.folder);
        let (copied, reports) = copied.inspect_err(|_| drop(atomic_file::remove(&unfinished.folder)))?;
        let (config, model, layout) = (self.config.clone(), self.model.clone(), self.weights.layout.clone());
        let writers = reports.as_ref().map_or(1, |reports| reports.member.size());
        Ok(Box::new(move || {
            unfinished.finish(metadata, |folder| {
                let own = copied.write(folder);
                let others = reports.map_or(Ok(Vec::new()), |reports| reports.collect());
                // The others have stopped writing, whatever happened here.
                let mut marks = own?;
                marks.extend(others?.into_iter().flatten());
                if copied.adapter.is_none() {
                    let shards = FolderShards::new(&layout, writers);
                    shards.write_rest(folder, &model, copied.dtype).map_err(TrainError::of_model(folder))?;
                }
                let companions = config.companions.iter().map(|(name, content)| (name, content));
                for (name, content) in companions.chain(&request.files) {
                    let path = folder.join(name);
                    let parent = path.parent().unwrap_or(folder);
                    fs::create_dir_all(parent).and_then(|()| fs::write(&path, content)).map_err(TrainError::io(&path))?;
                }
                for (name, from) in &request.folders {
                    let from = from.wait()?;
                    fs::rename(&from, folder.join(name)).map_err(TrainError::io(&from))?;
                }
                Ok(marks)
            })
        }))
    }

    /// Rank 0's part of the copy: orders the other ranks to copy theirs, if they have one.
    fn order_save(&mut self, folder: &Path) -> Result<(Copied, Option<Reports>), TrainError> {
        let (Some(ranks), true) = (&self.config.ranks, self.shards.is_some()) else {
            return Ok((self.copy(false)?, None));
        };
        let folder = std::path::absolute(folder).map_err(TrainError::io(folder))?;
        let (member, order) = (ranks.member.clone(), SaveOrder { folder, trainer: ranks.name.to_owned() });
        self.command(|| Ok(Command::Save(order.clone())))?;
        let (copied, sliced) = self.copy_for(&order)?;
        Ok((copied, sliced.then(|| Reports { member, order })))
    }

    /// Another rank's part of a checkpoint: copied here, written in the background.
    pub fn save_part(&mut self, order: SaveOrder, member: &Arc<Member>) -> Result<(), TrainError> {
        self.background.wait()?;
        let (copied, sliced) = self.copy_for(&order)?;
        let reports = Reports { member: member.clone(), order };
        if sliced {
            self.background.start(move || {
                let written = caught(|| copied.write(&reports.order.folder));
                // An error is rank 0's to handle.
                reports.give(written.unwrap_or_else(|message| Err(TrainError::Tensor(message))));
                Ok(())
            });
        }
        Ok(())
    }

    /// Copies this rank's part. Returns true with it if every rank writes its own.
    fn copy_for(&mut self, order: &SaveOrder) -> Result<(Copied, bool), TrainError> {
        let sliced = self.all_see(order.folder.is_dir(), &order.folder)?;
        Ok((self.copy(sliced)?, sliced))
    }

    /// Returns true if all ranks see a folder of rank 0. If not, rank 0 warns once.
    pub fn all_see(&mut self, own: bool, folder: &Path) -> Result<bool, TrainError> {
        let Some(team) = &mut self.team else { return Ok(true) };
        let all = team.agree(Ok(own))?;
        let Some(blind) = all.iter().position(|sees| !sees) else { return Ok(true) };
        if team.leads() && !std::mem::replace(&mut self.warned, true) {
            tracing::warn!(
                "{} does not see {}: rank 0 gathers checkpoints in its memory; put the run's folder on a disk that all hosts share, \
                 under the same path",
                team.label(blind),
                folder.display()
            );
        }
        Ok(false)
    }

    /// Copies this rank's part of the state: what it writes if every rank does (`sliced`), else all of
    /// it on rank 0.
    fn copy(&self, sliced: bool) -> Result<Copied, TrainError> {
        let _guard = tch::no_grad_guard();
        let (rank, size) = self.team.as_ref().map_or((0, 1), |team| (team.rank(), team.size()));
        let writers = if sliced { size } else { 1 };
        let dtype = self.config.save_dtype.unwrap_or(self.model.dtype);
        let adapter = self.weights.adapter.as_ref().filter(|_| rank == 0);
        let adapter = adapter.map(|adapter| adapter.with(host_copy(&adapter.flat, Kind::Float)));
        let shard = match self.weights.adapter {
            Some(_) => None,
            None => self.copy_shard(rank, writers, dtype)?,
        };
        let optimizer = self.copy_optimizer(rank, sliced, dtype)?;
        Ok(Copied { adapter, shard, dtype, optimizer })
    }

    /// Copies a rank's shard of the model, gathered if the parameters are divided.
    fn copy_shard(&self, rank: usize, writers: usize, dtype: Dtype) -> Result<Option<(String, Vec<Entry>, Tensor)>, TrainError> {
        let layout = &self.weights.layout;
        let shard = FolderShards::new(layout, writers).of(rank);
        let span = shard.as_ref().map_or(0..0, |(_, entries)| span(entries));
        let numbers = match (&self.divided, &self.shards) {
            (Some(Divided { masters, .. }), Some(shards)) => {
                let numbers = Tensor::empty([span.len() as i64], (dtype.kind(), Device::Cpu));
                let take = |unit: Range<usize>, of_unit: &Tensor| {
                    let common = unit.start.max(span.start)..unit.end.min(span.end);
                    if !common.is_empty() {
                        let from = part(of_unit, common.start - unit.start..common.end - unit.start);
                        part(&numbers, common.start - span.start..common.end - span.start).copy_(&from);
                    }
                };
                shards.each_unit(masters, take).map_err(|error| self.explain(error))?;
                numbers
            }
            _ => host_copy(&part(&self.weights.flat, span.clone()), dtype.kind()),
        };
        let Some((name, entries)) = shard else { return Ok(None) };
        let placed = |entry: &Entry| Entry { offset: entry.offset - span.start, ..entry.clone() };
        Ok(Some((name, entries.iter().map(placed).collect(), numbers)))
    }

    /// Copies the moments that a rank writes, and the masters if the model's files have them rounded.
    /// The ranks of the first copy write them.
    fn copy_optimizer(&self, rank: usize, sliced: bool, dtype: Dtype) -> Result<Option<CopiedOptimizer>, TrainError> {
        let writers = self.shards.as_ref().filter(|_| sliced).map_or(1, |shards| shards.parts());
        let exact = dtype == Dtype::F32 || dtype == Dtype::Bf16 && self.config.masters == MasterFormat::Bf16;
        let rounded = !exact && self.weights.adapter.is_none();
        let masters = rounded.then(|| match (&self.divided, &self.shards) {
            (Some(divided), _) => divided.masters.shallow_clone(),
            (None, Some(shards)) => shards.own(&self.weights.flat),
            (None, None) => self.weights.flat.detach(),
        });
        let (device, len) = (self.config.compute.device, self.weights.trained().0.total());
        let gathered = |shards: &Shards, own: Tensor| {
            let whole = (rank == 0).then(|| Tensor::empty([len as i64], (Kind::Float, Device::Cpu)));
            shards.gather(&own.to_device(device).contiguous(), whole.as_ref()).map_err(|error| self.explain(error))?;
            Ok::<_, TrainError>(whole.unwrap_or_default())
        };
        let gathers = self.shards.as_ref().filter(|_| !sliced);
        let moments = self.optimizer.moments().map(|moment| match gathers {
            Some(shards) => Ok((moment.name, gathered(shards, moment.all(device))?)),
            None => Ok((moment.name, moment.copied())),
        });
        let masters = masters.map(|own| match gathers {
            Some(shards) => Ok((MASTERS, gathered(shards, own)?)),
            None => Ok((MASTERS, host_copy(&own, Kind::Float))),
        });
        let tensors = moments.chain(masters).collect::<Result<Vec<_>, TrainError>>()?;
        let held = if sliced { self.held() } else { vec![(0..len, 0)] };
        let file = optimizer_files::file_name(rank, writers);
        let optimizer = CopiedOptimizer { file, state: self.optimizer.state(), tensors, held, len };
        Ok((rank < writers).then_some(optimizer))
    }

    /// Places of this rank's moments among the trained numbers.
    fn held(&self) -> Vec<(Range<usize>, usize)> {
        match &self.shards {
            Some(shards) => shards.held().collect(),
            None => vec![(0..self.weights.trained().0.total(), 0)],
        }
    }
}

impl Copied {
    /// Writes this rank's files into `folder` and brings them to the disk. Returns sizes and checksums.
    fn write(&self, folder: &Path) -> Result<Marks, TrainError> {
        if let Some(adapter) = &self.adapter {
            save_adapter(folder, adapter).map_err(TrainError::of_model(folder))?;
        }
        let mut written = Vec::new();
        if let Some((name, entries, numbers)) = &self.shard {
            let fits = |entry: &Entry| self.dtype.check_rounded(&entry.name, &part(numbers, entry.range()));
            entries.iter().try_for_each(fits).map_err(TrainError::of_model(Path::new(name)))?;
            write_tensors(&folder.join(name), entries, numbers, self.dtype).map_err(TrainError::of_model(folder))?;
            written.push(name);
        }
        if let Some(CopiedOptimizer { file, state, tensors, held, len }) = &self.optimizer {
            optimizer_files::write(&folder.join(file), state, tensors, held, *len)?;
            written.push(file);
        }
        // The rest computes nothing.
        release_helpers();
        let settled = |name: &String| {
            let path = folder.join(name);
            atomic_file::sync(&path).map_err(TrainError::io(&path))?;
            Ok((name.clone(), checkpoint::mark_of(&path)?))
        };
        written.into_iter().map(settled).collect()
    }
}

/// Reports of the ranks about the files that they wrote.
struct Reports {
    member: Arc<Member>,
    order: SaveOrder,
}

/// A rank's report: the save, and the files or an error.
type Report = (SaveOrder, Result<Marks, String>);

impl Reports {
    fn key(&self, rank: usize) -> String {
        format!("saved/{}/{rank}", self.order.trainer)
    }

    /// Reports this rank's files to rank 0.
    fn give(&self, written: Result<Marks, TrainError>) {
        let report: Report = (self.order.clone(), written.map_err(|error| error.to_string()));
        let given = postcard::to_stdvec(&report).map_err(|error| error.to_string());
        let given =
            given.and_then(|text| self.member.put(&self.key(self.member.rank()), &text).map_err(|error| error.to_string()));
        // Rank 0 would wait.
        given.unwrap_or_else(|error| self.member.fail(&format!("a report about a checkpoint: {error}")));
    }

    /// Waits for the reports of all other ranks. The first error of a rank is the error of the save.
    fn collect(&self) -> Result<Vec<Marks>, TrainError> {
        let of_this = |text: &[u8]| postcard::from_bytes::<Report>(text).ok().filter(|(order, _)| *order == self.order);
        let report = |rank: usize| {
            let (_, written) =
                self.member.await_value(&self.key(rank), of_this).map_err(|error| TrainError::Ranks(error.to_string()))?;
            written.map_err(|text| TrainError::OnRank(self.member.label(rank).to_owned(), text))
        };
        let all: Vec<_> = (1..self.member.size()).map(report).collect();
        all.into_iter().collect()
    }
}

/// Place of neighbouring tensors in the flat buffer.
fn span(entries: &[Entry]) -> Range<usize> {
    entries.first().map_or(0, |first| first.offset)..entries.last().map_or(0, |last| last.range().end)
}

/// A copy of a flat tensor in host memory. A device converts numbers in pieces.
fn host_copy(of: &Tensor, kind: Kind) -> Tensor {
    let (of, copy) = (of.detach(), Tensor::empty(of.size(), (kind, Device::Cpu)));
    let converts = of.device() != Device::Cpu && of.kind() != kind;
    let at_once = std::iter::once(0..of.numel()).filter(|_| !converts);
    let in_pieces = pieces(of.numel()).filter(|_| converts);
    at_once.chain(in_pieces).for_each(|range| part(&copy, range.clone()).copy_(&part(&of, range)));
    copy
}
