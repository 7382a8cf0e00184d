//! Names of keys in TRL and verl, for errors about unknown keys. docs/how_to/from_trl.md and
//! docs/how_to/from_verl.md explain the differences.

use super::reference::keys;

/// A name there, and the keys that have its meaning.
type Name = (&'static str, &'static [&'static str]);

/// Names in TRL's `GRPOConfig`, `DPOConfig` and `GRPOTrainer`.
const TRL: [Name; 37] = [
    ("adam_beta1", &["train.betas"]),
    ("adam_beta2", &["train.betas"]),
    ("adam_epsilon", &["train.eps"]),
    ("beta", &["train.kl_loss.beta", "train.loss.beta"]),
    ("bf16", &["model.dtype"]),
    ("chat_template_kwargs", &["chat.variables"]),
    ("eval_steps", &["eval.every"]),
    ("fp16", &["model.dtype"]),
    ("importance_sampling_level", &["train.loss.level"]),
    ("learning_rate", &["train.lr"]),
    ("log_completions", &["observe.rollouts_every"]),
    ("logging_steps", &["observe.log_every"]),
    ("loss_type", &["train.loss.kind", "train.loss_aggregation"]),
    ("lr_scheduler_type", &["train.schedule.kind"]),
    ("mask_truncated_completions", &["train.mask_truncated"]),
    ("max_completion_length", &["generate.max_new_tokens"]),
    ("max_steps", &["train.steps"]),
    ("num_generations", &["generate.group_size"]),
    ("num_iterations", &["train.ppo_epochs"]),
    ("num_train_epochs", &["train.epochs"]),
    ("off_policy_mask_threshold", &["train.off_policy_threshold"]),
    ("ref_model_sync_steps", &["reference.every"]),
    ("reward_funcs", &["reward.kind", "reward.part[].kind"]),
    ("reward_weights", &["reward.part[].weight"]),
    ("router_aux_loss_coef", &["train.router_aux_loss"]),
    ("save_steps", &["checkpoint.every"]),
    ("save_total_limit", &["checkpoint.keep"]),
    ("scale_rewards", &["train.advantage.std"]),
    ("sync_ref_model", &["reference.kind"]),
    ("top_entropy_quantile", &["train.top_entropy"]),
    ("train_dataset", &["task.data", "sft.data"]),
    ("use_bias_correction_kl", &["train.kl_loss.unbiased"]),
    ("use_vllm", &["engine.kind"]),
    ("vllm_enable_sleep_mode", &["engine.sleep"]),
    ("vllm_gpu_memory_utilization", &["engine.gpu_memory"]),
    ("vllm_importance_sampling_correction", &["train.correction.kind"]),
    ("warmup_steps", &["train.schedule.warmup"]),
];

/// Names in verl's YAML.
const VERL: [Name; 24] = [
    ("adv_estimator", &["train.advantage.kind"]),
    ("clip_ratio", &["train.loss.epsilon", "train.loss.epsilon_high"]),
    ("clip_ratio_c", &["train.loss.dual_clip"]),
    ("clip_ratio_high", &["train.loss.epsilon_high"]),
    ("clip_ratio_low", &["train.loss.epsilon"]),
    ("entropy_coeff", &["train.entropy_coef"]),
    ("filter_groups", &["filter[].kind"]),
    ("gpu_memory_utilization", &["engine.gpu_memory"]),
    ("kl_coef", &["train.kl_reward.beta"]),
    ("kl_loss_coef", &["train.kl_loss.beta"]),
    ("kl_loss_type", &["train.kl_loss.estimator"]),
    ("loss_agg_mode", &["train.loss_aggregation"]),
    ("loss_mode", &["train.loss.kind"]),
    ("max_response_length", &["generate.max_new_tokens"]),
    ("norm_adv_by_std_in_grpo", &["train.advantage.std"]),
    ("ppo_max_token_len_per_gpu", &["train.micro_batch_tokens"]),
    ("prompt_key", &["task.columns.prompt"]),
    ("rollout_correction", &["train.correction.kind"]),
    ("save_freq", &["checkpoint.every"]),
    ("test_freq", &["eval.every"]),
    ("total_epochs", &["train.epochs"]),
    ("total_training_steps", &["train.steps"]),
    ("train_batch_size", &["batch.groups"]),
    ("train_files", &["task.data"]),
];

/// Names the key that has the meaning of an unknown key at `path`, if TRL or verl has one of that name.
/// Of the trainer's and the generator's keys, one of the same section comes first, as in `sft.lr`.
pub(crate) fn library_name(path: &str) -> Option<String> {
    let (section, name) = path.rsplit_once('.').unwrap_or(("", path));
    let of = |names: &[Name]| names.iter().find(|(known, _)| *known == name).map(|(_, keys)| *keys);
    let (library, keys_of) = of(&TRL).map(|keys| ("TRL", keys)).or_else(|| Some(("verl", of(&VERL)?)))?;
    let all = keys();
    let shown = |key: &&str| {
        let rest = ["train.", "generate."].iter().find_map(|section| key.strip_prefix(section));
        let own = rest.map(|rest| format!("{section}.{rest}")).filter(|own| all.iter().any(|key| key.path == *own));
        format!("`{}`", own.as_deref().unwrap_or(key))
    };
    let keys_of: Vec<String> = keys_of.iter().map(shown).collect();
    Some(format!("`{name}` of {library} is {}", keys_of.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_the_tables_is_a_key_of_recipes() {
        let all = keys();
        for (name, keys_of) in TRL.iter().chain(&VERL) {
            for key in *keys_of {
                assert!(all.iter().any(|known| known.path == *key), "{name}: {key}");
            }
        }
    }

    #[test]
    fn a_name_means_the_key_of_the_section_in_which_it_is_written() {
        for (path, key) in [
            ("train.learning_rate", "`learning_rate` of TRL is `train.lr`"),
            ("sft.learning_rate", "`learning_rate` of TRL is `sft.lr`"),
            ("sft.warmup_steps", "`warmup_steps` of TRL is `sft.schedule.warmup`"),
            ("eval.max_response_length", "`max_response_length` of verl is `eval.max_new_tokens`"),
            ("learning_rate", "`learning_rate` of TRL is `train.lr`"),
            ("reward.loss_type", "`loss_type` of TRL is `train.loss.kind` or `train.loss_aggregation`"),
            ("algorithm.adv_estimator", "`adv_estimator` of verl is `train.advantage.kind`"),
        ] {
            assert_eq!(library_name(path).as_deref(), Some(key));
        }
        assert_eq!(library_name("train.lrr"), None);
    }
}
