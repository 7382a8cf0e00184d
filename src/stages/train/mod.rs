//! Training stage.

mod critic;
mod gate;
mod kl_reward;
mod learner;
mod minibatches;
mod saving;
mod stale;
mod step_config;
mod trained;
mod trainer;

pub use critic::{Critic, CriticStep};
pub use gate::CheckpointGate;
pub use kl_reward::{KlCost, RewardKl};
pub use minibatches::Minibatches;
pub use saving::Resumed;
pub use stale::{OnStale, staleness};
pub use step_config::StepConfig;
pub use trained::Trained;
pub use trainer::{FewerSteps, Trainer};
