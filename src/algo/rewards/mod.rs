//! Rewards as pure functions of samples: single values, named parts that become one value, shaping and normalisation. A stage runs them and
//! names the sample when one fails.

mod aggregate;
mod builders;
mod compose;
mod earned;
mod matching;
mod normalize;
mod parts;
mod shaping;

pub use aggregate::{AggregateError, Aggregator, aggregate_vector_rewards};
pub use builders::{BuildError, FormatTags, format, keywords, length, math, overlong, regex, repetition};
pub use compose::Compose;
pub use earned::{Earned, Earnings, ScoreError, compute_batch_rewards, compute_scalar_reward, compute_vector_reward};
pub use matching::{compute_reward, exact_match, numeric_match, regex_match};
pub use normalize::{NormalizeError, Normalizer, normalize_rewards};
pub use parts::Parts;
pub use shaping::{
    apply_reward_shaping, entropy_bonus, kl_penalty, length_contrast, overlong_penalty, repetition_penalty, subtract_kl,
};
