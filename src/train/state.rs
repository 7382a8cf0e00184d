//! A worker's state as a whole: published and replaced. Where ranks hold parts of it, rank 0 gathers
//! or sends them.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::error::shorten;
use super::passes::Accumulated;
use super::team::Command;
use super::worker::Worker;
use super::{Snapshot, TrainError};
use crate::model::{Entry, FrozenWeights, Layout, Weights};

impl Worker {
    pub fn snapshot(&mut self) -> Result<Snapshot<FrozenWeights>, TrainError> {
        self.version += 1;
        self.current()
    }

    pub fn current(&mut self) -> Result<Snapshot<FrozenWeights>, TrainError> {
        let (rounded, adapted, compute) = (self.config.publish_rounded, self.weights.adapter.is_some(), self.config.compute);
        let weights = match adapted && self.config.merge {
            _ if self.divided.is_some() => {
                self.command(|| Ok(Command::Gather { computed: rounded }))?;
                FrozenWeights::of_own(self.whole(rounded)?)
            }
            true if rounded => FrozenWeights::of_own(self.weights.merged().on(compute)),
            true => FrozenWeights::of_own(self.weights.merged()),
            false if rounded && !adapted => self.computed.freeze(),
            false => self.weights.freeze(),
        };
        Ok(Snapshot { version: self.version, step: self.optimizer.step, weights: Arc::new(weights) })
    }

    /// The masters, or the weights of the computation, gathered on rank 0 if they are divided. The
    /// others get none of the numbers.
    pub fn whole(&mut self, computed: bool) -> Result<Weights, TrainError> {
        let (Some(divided), Some(shards), Some(team)) = (&self.divided, &self.shards, &self.team) else {
            return Ok(if computed { self.computed.share() } else { self.weights.share() });
        };
        let own = if computed { divided.gathered.computed() } else { divided.masters.shallow_clone() };
        let len = if team.leads() { self.weights.layout.total() as i64 } else { 0 };
        let whole = Tensor::empty([len], (own.kind(), own.device()));
        shards.gather(&own, Some(&whole).filter(|_| team.leads())).map_err(|error| team.explain(error))?;
        Ok(Weights::new(self.weights.layout.clone(), whole))
    }

    pub fn load_weights(&mut self, weights: &Weights) -> Result<(), TrainError> {
        let (ours, theirs) = (self.weights.trained().0, weights.trained().0);
        if ours != theirs {
            let shape = |of: &Layout, name: &str| of.find(name).map_or("none".to_owned(), |entry| format!("{:?}", entry.shape));
            let added = theirs.entries().iter().filter(|entry| ours.find(&entry.name).is_none());
            let both =
                ours.entries().iter().chain(added).map(|Entry { name, .. }| (name, shape(ours, name), shape(theirs, name)));
            let differing = both.filter(|(_, here, there)| here != there);
            let tensors = differing.map(|(name, here, there)| format!("{name} ({here} here, {there} there)"));
            return Err(TrainError::Shape(shorten(tensors.collect())));
        }
        self.command(|| Ok(Command::LoadWeights))?;
        self.take_weights(Some(weights.trained().1))
    }

    /// Replaces the trained numbers by rank 0's, which has `numbers`.
    pub fn take_weights(&mut self, numbers: Option<&Tensor>) -> Result<(), TrainError> {
        let _guard = tch::no_grad_guard();
        let device = self.config.compute.device;
        match (&mut self.divided, &self.shards, &mut self.team) {
            (Some(divided), Some(shards), Some(team)) => {
                let whole = numbers.map(Tensor::detach);
                let own = shards.sent_by_first(whole.as_ref(), device).map_err(|error| team.explain(error))?;
                divided.masters = own.to_kind(self.config.masters.kind());
            }
            (_, _, team) => {
                let own = self.weights.trained_mut();
                numbers.into_iter().for_each(|numbers| own.copy_(numbers));
                team.as_mut().map_or(Ok(()), |team| team.share(own))?;
            }
        }
        self.round();
        Ok(())
    }

    /// Replaces the optimizer by rank 0's after `step` updates, which has the `moments`.
    pub fn take_moments(&mut self, step: u64, moments: Option<Vec<Tensor>>) -> Result<(), TrainError> {
        self.accumulated = Accumulated::default();
        let (len, device) = (self.weights.trained().0.total() as i64, self.config.compute.device);
        let Some(team) = &mut self.team else {
            self.optimizer.restore(step, moments.unwrap_or_default(), device);
            return Ok(());
        };
        let mut given = moments.into_iter().flatten();
        let shards = &self.shards;
        let taken = (0..self.optimizer.names().count()).map(|_| match (given.next(), shards) {
            (moment, Some(shards)) => shards.sent_by_first(moment.as_ref(), device).map_err(|error| team.explain(error)),
            (moment, None) => {
                let zeros = || Tensor::zeros([len], (Kind::Float, device));
                let mut moment = moment.map_or_else(zeros, |moment| moment.to_device(device));
                team.share(&mut moment).map(|()| moment)
            }
        });
        let taken = taken.collect::<Result<Vec<_>, TrainError>>()?;
        self.optimizer.restore(step, taken, device);
        Ok(())
    }
}
