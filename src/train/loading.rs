//! Resuming from a checkpoint (law C1): every rank verifies a share of the files, and reads what it
//! holds of weights and moments, whatever the ranks were that wrote them.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::checkpoint::{self, METADATA};
use super::optimizer_files::{MASTERS, OptimizerFiles};
use super::shards::Shards;
use super::team::Command;
use super::worker::Worker;
use super::{CheckpointMetadata, FileMark, TrainError};
use crate::model::{StoredModel, load_adapter};

/// What a rank has read of a checkpoint.
struct Read {
    step: u64,
    weights: Tensor,
    moments: Vec<Tensor>,
}

impl Worker {
    pub fn load_checkpoint(&mut self, folder: &Path) -> Result<CheckpointMetadata, TrainError> {
        let metadata = checkpoint::read_metadata(folder)?;
        let mark = checkpoint::mark_of(&folder.join(METADATA))?;
        let path = std::path::absolute(folder).map_err(TrainError::io(folder))?;
        self.command(|| Ok(Command::Load { folder: path, mark }))?;
        self.take_checkpoint(folder, mark)?;
        self.version = self.version.max(metadata.weight_version);
        Ok(metadata)
    }

    /// Replaces the state by a checkpoint of this folder, whose metadata has this mark. Nothing changes
    /// before all ranks have read what they need.
    pub fn take_checkpoint(&mut self, folder: &Path, mark: FileMark) -> Result<(), TrainError> {
        let sees = checkpoint::mark_of(&folder.join(METADATA)).is_ok_and(|found| found == mark);
        let each = self.all_see(sees, folder)?;
        let (rank, size) = self.team.as_ref().map_or((0, 1), |team| (team.rank(), team.size()));
        let read = match (each, rank) {
            (true, _) => self.read_checkpoint(folder, true, [rank, size]).map(Some),
            (false, 0) => self.read_checkpoint(folder, false, [0, 1]).map(Some),
            (false, _) => Ok(None),
        };
        let read = match &mut self.team {
            Some(team) => {
                let (steps, read) = match read {
                    Ok(read) => (Ok(read.as_ref().map_or(0, |read| read.step)), read),
                    Err(error) => (Err(error), None),
                };
                let step = team.agree(steps)?[0];
                if !each {
                    let (weights, moments) = read.map(|read| (read.weights, read.moments)).unzip();
                    self.take_weights(weights.as_ref())?;
                    return self.take_moments(step, moments);
                }
                read
            }
            None => read?,
        };
        read.into_iter().for_each(|read| self.put(read));
        Ok(())
    }

    /// Reads a checkpoint: what this rank holds (`own`), or all of it. Verifies every `of`th of its
    /// files, from number `first`.
    fn read_checkpoint(&self, folder: &Path, own: bool, [first, of]: [usize; 2]) -> Result<Read, TrainError> {
        checkpoint::verify_part(folder, first, of)?;
        let layout = self.weights.trained().0;
        let len = layout.total();
        let whole = (vec![(0..len, 0)], len);
        let divided = |shards: &Shards| (shards.held().collect::<Vec<_>>(), shards.own_len());
        let of_moments = self.shards.as_ref().filter(|_| own).map_or_else(|| whole.clone(), divided);
        let of_weights = if self.divided.is_some() { of_moments.clone() } else { whole };
        let files = OptimizerFiles::open(folder, &self.optimizer.state().groups)?;
        let read = |name: &str, (held, room): &(Vec<_>, usize)| files.read(name, len, held, *room);
        let failed = TrainError::of_model(folder);
        let weights = match &self.weights.adapter {
            Some(ours) => {
                let saved = load_adapter(folder, &self.model);
                saved.and_then(|saved| saved.lora.check_is(&ours.lora, folder).map(|()| saved.flat)).map_err(failed)?
            }
            None if files.has(MASTERS) => read(MASTERS, &of_weights)?,
            None => {
                let weights = Tensor::zeros([of_weights.1 as i64], (Kind::Float, Device::Cpu));
                let stored = StoredModel::open(&self.model, folder);
                stored.and_then(|stored| stored.read(&of_weights.0, &weights)).map_err(failed)?;
                weights
            }
        };
        let moments = self.optimizer.names().map(|name| read(name, &of_moments));
        Ok(Read { step: files.state.step, weights, moments: moments.collect::<Result<Vec<_>, TrainError>>()? })
    }

    /// Replaces the state by what this rank has read for itself.
    fn put(&mut self, read: Read) {
        let _guard = tch::no_grad_guard();
        match &mut self.divided {
            Some(divided) => {
                divided.masters = read.weights.to_device(self.config.compute.device).to_kind(self.config.masters.kind());
            }
            None => self.weights.trained_mut().copy_(&read.weights),
        }
        self.round();
        self.accumulated = Default::default();
        self.optimizer.restore(read.step, read.moments, self.config.compute.device);
    }
}
