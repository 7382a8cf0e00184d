//! The ranks of one trainer: rank 0's commands, and agreement about their results.
//!
//! All ranks run the same commands in the same order, each on its share of the micro-batches. Rank
//! 0 sends a command to the others before it runs it. Results are gathered before gradients are
//! summed, so that an error on one rank is the same error on all.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::MutexGuard;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::algorithm::{Algorithm, AlgorithmKey};
use super::saving::SaveOrder;
use super::{FileMark, TrainBatch, TrainError};
use crate::algo::Schedule;
use crate::model::{Dtype, Form, Layout, Lora, ModelConfig, Weights};
use crate::ranks::{CollectiveError, Group, Member, Mesh, Shard};

/// The ranks of a run, and what a trainer needs to share its work with them.
#[derive(Clone)]
pub struct TrainerRanks {
    /// This process's membership.
    pub member: Arc<Member>,
    /// Name of the trainer, by which the other ranks find its settings.
    pub name: &'static str,
    /// Division of its state.
    pub shard: Shard,
}

/// Makes the algorithm at a place of the recipe, or says why it cannot.
pub type MakeAlgorithm<'a> = dyn Fn(AlgorithmKey) -> Result<Arc<Algorithm>, String> + 'a;

/// A command of rank 0 to the others.
#[derive(Serialize, Deserialize)]
pub(super) enum Command<'a> {
    ForwardBackward(Cow<'a, TrainBatch>, Option<AlgorithmKey>),
    Score(Cow<'a, TrainBatch>),
    Update {
        scale: f64,
        schedule: Option<Schedule>,
    },
    /// Take over rank 0's trained weights.
    LoadWeights,
    /// Copy and write a part of a checkpoint.
    Save(SaveOrder),
    /// Take over the checkpoint in a folder, whose metadata has this mark.
    Load {
        folder: PathBuf,
        mark: FileMark,
    },
    /// Give rank 0 the trained numbers, or those that passes compute with.
    Gather {
        computed: bool,
    },
    End,
}

/// The model that rank 0 trains, without its numbers.
#[derive(Serialize, Deserialize)]
struct Setup {
    /// Its `config.json`.
    config: String,
    /// Longest sequence, which `config.json` does not have with LongRoPE, and which decides how that rotates.
    max_positions: usize,
    dtype: String,
    /// Rank, alpha, projections and the rank of experts' gate and up of its adapters.
    adapters: Option<(usize, f64, Vec<String>, usize)>,
    shard: String,
    /// Form of each of its tensors that is in 4 bits, if any is.
    forms: Option<Vec<Option<Form>>>,
}

/// Source of the other ranks' model, in errors.
const SOURCE: &str = "the model of rank 0";

impl Setup {
    fn of(model: &ModelConfig, weights: &Weights, shard: Shard) -> Self {
        let adapters = weights.adapter.as_ref().map(|adapter| &adapter.lora);
        let targets = |lora: &Lora| lora.targets().iter().map(|target| (*target).to_owned()).collect();
        Setup {
            config: serde_json::Value::Object(model.to_json()).to_string(),
            max_positions: model.max_positions,
            dtype: dtype_of(&weights.flat).name().to_owned(),
            adapters: adapters.map(|lora| (lora.rank, lora.alpha, targets(lora), lora.gate_up_rank())),
            shard: shard.word().to_owned(),
            forms: weights.forms(),
        }
    }

    /// The model as rank 0 computes it, without what only rank 0 writes.
    fn model(&self) -> Result<ModelConfig, TrainError> {
        let path = Path::new(SOURCE);
        let config = serde_json::from_str(&self.config).map_err(|error| TrainError::malformed(path, error))?;
        let config = ModelConfig::from_json(path, &config).map_err(TrainError::of_model(path))?;
        Ok(ModelConfig { max_positions: self.max_positions, ..config })
    }
}

/// This rank's end of the ranks of one trainer.
pub(super) struct Team {
    mesh: Mesh,
    member: Arc<Member>,
    shard: Shard,
}

impl Team {
    /// Makes the other ranks follow this one, and describes the model. `weights` are the masters.
    pub fn lead(ranks: TrainerRanks, model: &ModelConfig, weights: &Weights) -> Result<Self, TrainError> {
        let TrainerRanks { member, name, shard } = ranks;
        let mesh = member.lead(name).map_err(|error| TrainError::Ranks(error.to_string()))?;
        let mut team = Team { mesh, member, shard };
        team.tell(&Setup::of(model, weights, shard))?;
        Ok(team)
    }

    /// Joins the ranks of a trainer. Returns its model, and room on `device` for its weights: without numbers
    /// if each rank will hold a part of the parameters. [`Team::share_weights`] fills it.
    pub fn follow(member: &Arc<Member>, number: u64, device: Device) -> Result<(Self, ModelConfig, Weights), TrainError> {
        let mesh = member.group(number).map_err(|error| TrainError::Ranks(error.to_string()))?;
        let mut team = Team { mesh, member: member.clone(), shard: Shard::default() };
        let setup: Setup = team.told()?;
        let model = setup.model()?;
        let Setup { dtype, adapters, shard, forms, .. } = setup;
        team.shard = Shard::ALL.iter().copied().find(|choice| choice.word() == shard).unwrap_or_default();
        let kind = Dtype::named(&dtype).unwrap_or_default().kind();
        let layout = Arc::new(Layout::new(&model));
        let held = if team.shard == Shard::Parameters { 0 } else { layout.total() };
        let mut weights = match forms {
            Some(forms) => Weights::room(layout, &forms, (kind, device)),
            None => Weights::new(layout, Tensor::empty([held as i64], (kind, device))),
        };
        if let Some((rank, alpha, targets, gate_up_rank)) = adapters {
            let lora = Lora::new(rank, alpha, &targets).map_err(TrainError::of_model(Path::new(SOURCE)))?;
            weights = weights.adapted(&model, lora.with_gate_up_rank(gate_up_rank), 0);
        }
        Ok((team, model, weights))
    }

    /// The groups, for exchanges of divided state.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The group of all ranks.
    fn all(&self) -> MutexGuard<'_, Group> {
        self.mesh.all.lock()
    }

    /// Division of the trainer's state.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Number of this rank.
    pub fn rank(&self) -> usize {
        self.all().rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.all().size()
    }

    /// This process's membership.
    pub fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// Name of a rank in messages.
    pub fn label(&self, rank: usize) -> &str {
        self.member.label(rank)
    }

    /// Returns true on rank 0.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// Sends a command to the other ranks.
    pub fn command(&mut self, command: &Command) -> Result<(), TrainError> {
        self.tell(command)
    }

    /// Waits for the next command of rank 0.
    pub fn next(&mut self) -> Result<Command<'static>, TrainError> {
        self.told()
    }

    fn tell(&mut self, message: &impl Serialize) -> Result<(), TrainError> {
        let bytes = postcard::to_stdvec(message).map_err(|error| TrainError::Ranks(error.to_string()))?;
        let sent = self.all().broadcast_bytes(&bytes);
        sent.map(drop).map_err(|error| self.explain(error))
    }

    fn told<T: DeserializeOwned>(&mut self) -> Result<T, TrainError> {
        let bytes = self.all().broadcast_bytes(&[]);
        let bytes = bytes.map_err(|error| self.explain(error))?;
        postcard::from_bytes(&bytes).map_err(|error| TrainError::Ranks(format!("a command of rank 0: {error}")))
    }

    /// Gathers the results of all ranks, by rank. The first error of a rank is the error of all.
    pub fn agree<T: Serialize + DeserializeOwned>(&mut self, own: Result<T, TrainError>) -> Result<Vec<T>, TrainError> {
        let own = own.as_ref().map_err(ToString::to_string);
        let bytes = postcard::to_stdvec(&own).map_err(|error| TrainError::Ranks(error.to_string()))?;
        let all = self.all().gather_bytes(&bytes);
        let all = all.map_err(|error| self.explain(error))?;
        let result = |(rank, bytes): (usize, Vec<u8>)| {
            let result: Result<T, String> = postcard::from_bytes(&bytes).map_err(|error| TrainError::Ranks(error.to_string()))?;
            result.map_err(|text| TrainError::OnRank(self.member.label(rank).to_owned(), text))
        };
        all.into_iter().enumerate().map(result).collect()
    }

    /// Checks that a number is the same to the bit in each copy of the state, that `parts` ranks share.
    pub fn check_equal(&self, what: &str, numbers: &[f64], parts: usize) -> Result<(), TrainError> {
        let differs = |number: &f64| number.to_bits() != numbers[0].to_bits();
        let Some(copy) = numbers.iter().position(differs) else { return Ok(()) };
        let ([own, first], rank) = ([numbers[copy], numbers[0]], copy * parts);
        let text =
            format!("its {what} is {own}, rank 0's is {first}: the ranks' weights differ; resume from the last checkpoint");
        Err(TrainError::OnRank(self.member.label(rank).to_owned(), text))
    }

    /// Replaces a tensor on all other ranks by rank 0's, in place.
    pub fn share(&mut self, tensor: &mut Tensor) -> Result<(), TrainError> {
        let sent = self.all().broadcast(tensor);
        sent.map_err(|error| self.explain(error))
    }

    /// Replaces the weights on all other ranks by rank 0's.
    pub fn share_weights(&mut self, weights: &Weights) -> Result<(), TrainError> {
        let _guard = tch::no_grad_guard();
        weights.packed_tensors().try_for_each(|tensor| self.share(&mut tensor.shallow_clone()))?;
        self.share(&mut weights.flat.detach())?;
        weights.adapter.as_ref().map_or(Ok(()), |adapter| self.share(&mut adapter.flat.detach()))
    }

    /// Ends the run on all ranks, which are out of step after this failure.
    pub fn abandon(&self, reason: &str) {
        self.member.fail(reason);
    }

    /// The error of an exchange that failed, with the rank that is gone.
    pub fn explain(&self, error: CollectiveError) -> TrainError {
        TrainError::Ranks(self.member.explain(error).to_string())
    }
}

fn dtype_of(flat: &Tensor) -> Dtype {
    Dtype::ALL.iter().copied().find(|dtype| dtype.kind() == flat.kind()).unwrap_or_default()
}

/// A batch as a command, without its algorithm.
pub(super) fn key_of(batch: &TrainBatch) -> Result<Option<AlgorithmKey>, TrainError> {
    let Some(algorithm) = &batch.algorithm else { return Ok(None) };
    algorithm.key.map(Some).ok_or_else(|| TrainError::NoKey(algorithm.loss.name().to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    #[test]
    fn every_rank_computes_with_the_configuration_of_rank_0_also_beyond_the_context_of_pre_training() {
        let mut rotates_long = 0;
        for entry in std::fs::read_dir("tests/golden/models").unwrap() {
            let folder = entry.unwrap().path();
            if !folder.is_dir() {
                continue;
            }
            let config = ModelConfig::from_dir(&folder).unwrap();
            let longest = config.contexts().map(|(_, longest)| longest);
            // Rank 0 alone writes the keys that have no effect on the computation.
            let config = ModelConfig { other: Map::new(), generation: Map::new(), ..config.within(longest).unwrap() };
            let weights = Weights::new(Arc::new(Layout::new(&config)), Tensor::empty([0], (tch::Kind::Float, Device::Cpu)));
            assert_eq!(Setup::of(&config, &weights, Shard::default()).model().unwrap(), config, "{}", folder.display());
            rotates_long += usize::from(config.rotates_long());
        }
        assert!(rotates_long > 0, "no folder has LongRoPE");
    }
}
