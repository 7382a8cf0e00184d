//! Training stage.

mod checkpoints;
mod critic;
mod distill;
mod gate;
mod kl_reward;
mod minibatches;
mod orders;
mod stale;
mod step;
mod step_config;
mod trained;
mod trainer;

pub use checkpoints::Resumed;
pub use critic::{Critic, CriticStep};
pub use distill::Distill;
pub use gate::CheckpointGate;
pub use kl_reward::{KlCost, RewardKl};
pub use orders::Orders;
pub use stale::{OnStale, staleness};
pub use step_config::StepConfig;
pub use trained::Trained;
pub use trainer::Trainer;
