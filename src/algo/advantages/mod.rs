//! Advantages: the difference of a sample's, or a token's, reward from a baseline.
//!
//! Three shapes: rewards by group in, advantages by group out; columns of tokens tiled by
//! sequences; and [`Estimator`], which a trainer applies to a batch and a closure can replace. A
//! NaN reward means "not scored": an error that names the sample, or left out of all statistics
//! ([`Missing`]).
//!
//! | here | in recipes | TRL 1.16 | verl 0.9 | differences |
//! | --- | --- | --- | --- | --- |
//! | [`group_mean`] | the same | `scale_rewards` | `grpo` | ε: TRL 1e-4, verl 1e-6; lone: verl its reward |
//! | [`leave_one_out`] | `leave_one_out` | `RLOOTrainer` | `rloo` | lone: verl its reward |
//! | [`reinforce_plus_plus`] | `reinforce_plus_plus` (γ = 1) | | `reinforce_plus_plus` | |
//! | [`reinforce_plus_plus_baseline`] | the same | | the same | lone: verl its reward |
//! | [`optimal_baseline`](super::optimal_baseline) | the same | | `opo` | as above |
//! | [`gpg`](super::gpg) | `gpg` | | `gpg` | as above |
//! | [`best_of_group`](super::best_of_group) | the same | | `grpo_passk` | lone: verl rejects it |
//! | [`rank_based`](super::rank_based), [`normalized`](super::normalized) | `rank`, `normalized` | | | |
//! | [`subtract_baseline`](super::subtract_baseline) | `constant` | | | |
//! | [`gae`] | | | `gae`, `remax` | verl whitens `gae`: [`whiten`](crate::algo::whiten) |
//!
//! *lone*: a sample without siblings, which gets 0 here. verl's rule for it is [`Lone::Nothing`];
//! recipes take [`Lone::Itself`].

mod choice;
mod estimator;
mod group;
mod pass_at_k;
mod returns;
mod whitened;

pub use choice::Advantage;
pub(crate) use estimator::aligned;
pub use estimator::{AdvantageError, Estimator, Lone, Missing, Rules, ScoredGroup};
pub(super) use estimator::{each_scored, mean, over_scored, standardized, std, zero_missing};
pub use group::{GroupMean, Scale, group_mean, leave_one_out};
pub use pass_at_k::pass_at_k;
pub use returns::{Returns, gae, rewards_to_go};
pub use whitened::{reinforce_plus_plus, reinforce_plus_plus_baseline, reinforce_plus_plus_outcome};
