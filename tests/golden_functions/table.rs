//! Which kinds of which family we claim, and what runs them.

use crate::case::Case;
use crate::{
    advantages, aggregation, chat, corrections, distillation, divergence, grpo, masked, optimizers, packed, preference, rewards,
    rloo, rows, schedules, supervised, verl, warpers,
};

pub type Runner = fn(&Case) -> Result<(), String>;

/// Every kind: the runner refuses what it doesn't know.
const ALL: &[&str] = &[];

/// Kinds that must pass, by family. Everything else is "not yet".
pub const CLAIMED: &[(&str, &[&str])] = &[
    ("trl_grpo_loss", ALL),
    (
        "verl_policy_losses",
        &["vanilla", "gspo", "sapo", "gpg", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro"],
    ),
    ("trl_dpo_loss", ALL),
    ("trl_reward_loss", ALL),
    (
        "trl_grpo_advantages",
        &["scale_rewards=group", "scale_rewards=batch", "scale_rewards=none", "normalize_then_sum", "mask_truncated_completions"],
    ),
    ("trl_rloo", &["rloo_loss", "rloo_advantages"]),
    (
        "verl_advantages",
        &[
            "gae",
            "gae_outcome",
            "gae_with_holes(observation tokens)",
            "grpo",
            "grpo_vectorized",
            "rloo",
            "rloo_vectorized",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "opo",
            "remax",
            "gpg",
            "grpo_passk",
            "compute_rewards(kl in reward)",
        ],
    ),
    (
        "verl_kl_agg_value",
        &[
            "kl_penalty",
            "adaptive_kl_controller",
            "agg_loss",
            "value_loss",
            "entropy_loss",
            "entropy_from_logits",
            "logprobs_from_logits_v2",
            "masked_mean",
            "masked_mean_axis",
            "masked_sum",
            "masked_var",
            "masked_var_biased",
            "masked_whiten",
            "masked_whiten_noshift",
        ],
    ),
    ("trl_vllm_is_correction", &["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
    ("verl_rollout_correction", &["is", "rs", "offpolicy_metrics"]),
    ("trl_sft_loss", ALL),
    ("trl_distillation", &["generalized_jsd", "top_k"]),
    ("trl_packing", &["bfd", "bfd_split", "wrapped"]),
    ("trl_utils", &["selective_log_softmax", "selective_log_softmax_f32", "entropy_from_logits"]),
    ("transformers_logits_processors", &["temperature", "top_k", "top_p", "min_p", "repetition"]),
    ("torch_optim", &["adamw", "adamw_amsgrad"]),
    // Of real models' templates, which are other people's files, there are cases in `ROLLFLOW_GOLDEN` alone.
    ("chat_templates", ALL),
    ("transformers_schedules", &["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"]),
];

pub fn runner(case: &Case) -> Option<Runner> {
    let (family, kinds) = CLAIMED.iter().find(|(family, _)| case.family == *family)?;
    if *kinds != ALL && !kinds.contains(&case.kind()) {
        return None;
    }
    Some(match *family {
        "trl_grpo_loss" => grpo::loss,
        "trl_distillation" => distillation::divergence,
        "trl_grpo_advantages" => rewards::advantages,
        "trl_rloo" if case.kind() == "rloo_loss" => rloo::loss,
        "trl_rloo" => rloo::advantages,
        "verl_advantages" => match case.kind() {
            "gae" | "gae_outcome" | "gae_with_holes(observation tokens)" | "reinforce_plus_plus" | "remax" => {
                advantages::by_token
            }
            "compute_rewards(kl in reward)" => advantages::rewards,
            _ => advantages::by_group,
        },
        "verl_kl_agg_value" => match case.kind() {
            "kl_penalty" => divergence::penalty,
            "adaptive_kl_controller" => divergence::controller,
            "agg_loss" => aggregation::losses,
            "value_loss" => aggregation::values,
            "entropy_loss" => aggregation::entropies,
            "entropy_from_logits" | "logprobs_from_logits_v2" => rows::utils,
            _ => masked::statistics,
        },
        "trl_vllm_is_correction" => corrections::trl,
        "verl_rollout_correction" => match case.kind() {
            "is" => corrections::weights,
            "rs" => corrections::rejection,
            _ => corrections::off_policy,
        },
        "trl_sft_loss" => supervised::loss,
        "verl_policy_losses" => verl::loss,
        "trl_dpo_loss" => preference::dpo,
        "trl_reward_loss" => preference::reward,
        "trl_utils" => rows::utils,
        "transformers_logits_processors" => warpers::warp,
        "torch_optim" => optimizers::adamw,
        "transformers_schedules" => schedules::schedule,
        "chat_templates" => chat::render,
        "trl_packing" => packed::rows,
        family => panic!("{family} is claimed and has no runner"),
    })
}
