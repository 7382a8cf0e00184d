//! Properties of the functions: derivatives, sums of parts (law N1), extremes, refused settings.

mod advantages;
mod corrections;
mod distillation;
mod groups;
mod kl;
mod pair_losses;
mod policy_losses;
mod rewards;
mod scores;
mod weights;
