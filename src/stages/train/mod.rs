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
pub use kl_reward::{KlCost, NoReference, RewardKl};
pub use minibatches::Minibatches;
pub use saving::Resumed;
pub use stale::{OnStale, StaleSample, staleness, within_bound};
pub use step_config::{StepConfig, StepConfigError};
pub use trained::Trained;
pub use trainer::{FewerSteps, Trainer};
