//! Advantages: what a sample, or a token, earned above what was to be expected.
//!
//! Three shapes: rewards by group in, advantages by group out; columns of tokens tiled by sequences; and [`Estimator`], which is what a
//! trainer applies to a batch and what a closure can replace. A NaN reward means "not scored" and is refused by name, or left out of all
//! statistics, as [`Missing`] says.
//!
//! | here | in recipes | TRL 1.16 | verl 0.9 | where they disagree |
//! | --- | --- | --- | --- | --- |
//! | [`advantages`] | `group_mean` | `scale_rewards` | `grpo`, `grpo_vectorized` | ε: TRL 1e-4, verl 1e-6; a lone sample: TRL 0, verl its reward |
//! | [`leave_one_out`] | `leave_one_out` | `RLOOTrainer` | `rloo`, `rloo_vectorized` | a lone sample: `rloo` its reward, the others 0 |
//! | [`reinforce_plus_plus`] | `reinforce_plus_plus` (γ = 1) | | `reinforce_plus_plus` | |
//! | [`reinforce_plus_plus_baseline`] | the same | | the same | a lone sample: verl its reward, here 0 |
//! | [`optimal_baseline`] | the same | | `opo` | as above |
//! | [`gpg`] | `gpg` | | `gpg` | as above |
//! | [`best_of_group`] | the same | | `grpo_passk` | a lone sample: verl refuses it, here 0 |
//! | [`rank_based`], [`normalized`] | `rank`, `normalized` | | | |
//! | [`subtract_baseline`] | `constant` | | | |
//! | [`remax`], [`gae`] | | | `remax`, `gae` | verl whitens `gae`; here that is [`whiten`](crate::algo::whiten)'s |
//! | [`combine_rewards`], [`normalize_then_sum`] | | `multi_objective_aggregation` | | |
//!
//! What verl does with a lone sample is [`Lone::Nothing`]; recipes take [`Lone::Itself`].

mod centred;
mod error;
mod estimator;
mod group;
mod leave_one_out;
mod pass_at_k;
mod rank;
mod returns;
mod rules;
mod several;
mod statistics;
mod whitened;

pub use centred::{gpg, optimal_baseline, subtract_baseline};
pub use error::AdvantageError;
pub(super) use error::aligned;
pub use estimator::{Advantage, Estimator, ScoredGroup};
pub use group::{AdvantageConfig, Scale, advantages};
pub use leave_one_out::leave_one_out;
pub use pass_at_k::{best_of_group, pass_at_k};
pub use rank::{normalized, rank_based};
pub use returns::{Returns, gae, remax, rewards_to_go};
pub use rules::{Lone, Missing, Rules};
pub use several::{combine_rewards, normalize_then_sum};
pub use whitened::{reinforce_plus_plus, reinforce_plus_plus_baseline, reinforce_plus_plus_outcome};
