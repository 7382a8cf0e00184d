//! Pure functions over plain slices: advantages, losses with their derivatives, aggregation,
//! schedules, filters and rewards.
//!
//! No tensors and no state, so everything here runs and is tested without libtorch. A [`Loss`]
//! returns its value and its derivative by every log-probability; the trainer multiplies that into
//! its graph. Only [`Aggregation`] has a denominator, over the whole optimizer batch (law N1).
//!
//! A first reading needs `loss.rs`, `aggregation.rs`, `policy_loss/` (GRPO, DAPO, GSPO, CISPO,
//! REINFORCE), `advantages/` and `preference/`. Losses and advantages that few runs use are in
//! `zoo/`.

mod advantages;
mod aggregation;
mod correction;
mod distilled;
pub mod filters;
mod gap;
mod gap_limits;
mod kl;
mod loss;
mod masked;
mod pairs;
mod policy_loss;
mod preference;
mod probe;
mod range;
mod reward_model;
pub mod rewards;
pub mod rollouts;
mod schedule;
mod sft;
mod value_loss;
mod zoo;

pub(crate) use advantages::aligned;
pub use advantages::{
    Advantage, AdvantageError, Estimator, GroupMean, Lone, Missing, Returns, Rules, Scale, ScoredGroup, gae, group_mean,
    leave_one_out, pass_at_k, reinforce_plus_plus, reinforce_plus_plus_baseline, reinforce_plus_plus_outcome, rewards_to_go,
};
pub use aggregation::{Aggregation, BatchSize};
pub use correction::{Divergence, Importance, ImportanceChoice, Level, OffPolicy, Over, Proximal, Rejection, Spread};
pub use distilled::{Distilled, TeacherDivergence, TeacherInputs};
pub use gap::{ComparedToken, LogProbGap};
pub use gap_limits::{GapDiagnosis, GapLimits};
pub use kl::{KlForm, KlFunction, KlLoss, KlReward, kl_per_token, token_kl, with_kl};
pub use loss::{BuiltIn, Loss, LossError, LossInputs, LossMetrics, LossOutput, PairMetrics};
pub use masked::{masked_mean, masked_sum, masked_variance, whiten};
pub use math_answers::is_correct;
pub use pairs::{PairOf, Select, all_pairs, best_against_worst, first_against_second, random_pair};
pub(crate) use pairs::{PairSelector, Pairs};
pub use policy_loss::{Cispo, Dapo, Grpo, Gspo, LossChoice, PolicyLoss};
pub use preference::{Dpo, PairLoss, Preference, ScoreDivergence};
pub use probe::Disagreement;
pub(crate) use probe::compare as compare_log_probs;
pub use range::RangeError;
pub use reward_model::{BradleyTerry, pairwise_reward};
pub use schedule::{Decay, Schedule};
pub use sft::{CrossEntropy, perplexity};
pub use value_loss::{ValueLoss, value_loss};
pub use zoo::{
    BinaryDivergence, ClipCov, Dppo, Dro, GeoMean, KlCov, Sapo, Vespo, best_of_group, gpg, normalized, optimal_baseline,
    rank_based, subtract_baseline,
};
