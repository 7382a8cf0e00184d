//! Training stage.

mod critic;
mod gate;
mod kl_reward;
mod saving;
mod stale;
mod step;
mod step_config;
mod trainer;
mod updates;

pub use critic::{Critic, CriticStep};
pub use gate::CheckpointGate;
pub use kl_reward::{KlCost, NoReference, RewardKl};
pub use saving::Resumed;
pub use stale::{OnStale, StaleSample, staleness, within_bound};
pub use step_config::{Minibatches, StepConfig, StepConfigError};
pub use trainer::{FewerSteps, Trained, Trainer};
