//! Rewards as pure functions of samples.
//!
//! Each kind of reward is one file: the keys that a recipe gives it, and the function that they
//! build. [`Parts`] combines several into one reward with named parts.

mod aggregate;
mod answer;
mod environment;
mod format;
mod keywords;
mod length;
mod output;
mod parts;
mod pattern;

mod repetition;
mod rule;

pub use aggregate::{Aggregator, Combine, DEFAULT_LEVELS};
pub use answer::{NumericRule, exact_match, exact_reward, math_reward};
pub use environment::environment_reward;
pub use format::FormatRule;
pub use keywords::KeywordsRule;
pub use length::{LengthRule, OverlongRule};
pub use output::{IntoReward, RewardOutput};
pub use parts::Parts;
pub use pattern::RegexRule;
pub use repetition::RepetitionRule;
pub use rule::{PartReward, RuleError};
