//! Warnings for values far from common practice, which are allowed but probably mistakes.

use super::model::ModelSource;
use super::plan::{Pipeline, Plan};
use crate::algo::{Advantage, Level, LossChoice};

/// A key, its value in a plan (none if it has no effect), and the range of published runs.
struct Practice {
    key: &'static str,
    value: fn(&Plan) -> Option<f64>,
    usual: [f64; 2],
    why: &'static str,
}

const PRACTICES: [Practice; 16] = [
    Practice {
        key: "train.lr",
        value: |plan| policy_lr(plan, false),
        usual: [1e-8, 2e-5],
        why: "full fine-tuning by reinforcement or preferences takes about 1e-6; far above, the policy collapses",
    },
    Practice {
        key: "train.lr",
        value: |plan| policy_lr(plan, true),
        usual: [1e-7, 5e-4],
        why: "adapters take about 1e-5 to 1e-4",
    },
    Practice {
        key: "sft.lr",
        value: |plan| sft_lr(plan, false),
        usual: [1e-7, 1e-4],
        why: "supervised full fine-tuning takes about 2e-5; far above, the model forgets what it knew",
    },
    Practice {
        key: "sft.lr",
        value: |plan| sft_lr(plan, true),
        usual: [1e-6, 2e-3],
        why: "supervised training of adapters takes about 2e-4",
    },
    Practice {
        key: "train.loss.epsilon",
        value: |plan| clips(plan).map(|clips| clips[0]),
        usual: [0.05, 0.5],
        why: "ratios of single tokens are clipped at 0.2 as a rule (PPO, GRPO, DAPO)",
    },
    Practice {
        key: "train.loss.epsilon_high",
        value: |plan| clips(plan).map(|clips| clips[1]),
        usual: [0.05, 1.0],
        why: "ratios of single tokens are clipped at 0.2 to 0.28 as a rule (PPO, GRPO, DAPO)",
    },
    Practice {
        key: "train.loss.epsilon_high",
        value: |plan| if let LossChoice::Gspo(of) = policy_loss(plan)? { Some(of.epsilon_high) } else { None },
        usual: [1e-5, 1e-2],
        why: "GSPO clips ratios of whole completions, at about 4e-4",
    },
    Practice {
        key: "train.loss.beta",
        value: |plan| if let LossChoice::Dpo(of) = policy_loss(plan)? { Some(of.beta) } else { None },
        usual: [0.005, 5.0],
        why: "losses of pairs take 0.1 as a rule, and 0.01 to 2.5 in papers",
    },
    Practice {
        key: "train.kl_loss.beta",
        value: |plan| trains(plan).then_some(plan.train.kl_loss.as_ref()?.beta),
        usual: [0.0, 0.2],
        why: "0.001 (verl) to 0.04 (DeepSeekMath) are common; far above, the policy stays where it is",
    },
    Practice {
        key: "train.kl_reward.beta",
        value: |plan| trains(plan).then_some(plan.train.kl_reward.as_ref()?.beta),
        usual: [0.0, 0.5],
        why: "0.001 to 0.2 are common; far above, the penalty outweighs the reward",
    },
    Practice {
        key: "train.entropy_coef",
        value: |plan| trains(plan).then_some(plan.train.entropy_coef),
        usual: [-0.1, 0.1],
        why: "0 to 0.01 are common; far above, the policy becomes random",
    },
    Practice {
        key: "train.max_grad_norm",
        value: |plan| trains(plan).then_some(plan.train.optimization.max_grad_norm),
        usual: [0.01, 10.0],
        why: "0.1 to 1 are common",
    },
    Practice {
        key: "train.ppo_epochs",
        value: |plan| trains(plan).then_some(plan.train.ppo_epochs as f64),
        usual: [1.0, 10.0],
        why: "1 to 4 passes over a batch are common; with more, most ratios are clipped",
    },
    Practice {
        key: "generate.temperature",
        value: |plan| plan.pipeline.reinforces().then_some(plan.generate.temperature),
        usual: [0.3, 1.5],
        why: "completions are sampled at 0.6 to 1.2 for training: below they hardly differ, above they fall apart",
    },
    Practice {
        key: "generate.group_size",
        value: |plan| compares_siblings(plan).then_some(plan.generate.group_size as f64),
        usual: [4.0, 256.0],
        why: "groups have 8 to 64 completions as a rule: advantages against a mean of 2 or 3 are mostly noise",
    },
    Practice {
        key: "flow.max_staleness",
        value: |plan| plan.pipeline.reinforces().then_some(plan.flow.max_staleness as f64),
        usual: [0.0, 16.0],
        why: "asynchronous runs stay within 1 to 8 versions",
    },
];

fn trains(plan: &Plan) -> bool {
    plan.pipeline.trains_by_train()
}

fn adapts(plan: &Plan, adapters: bool) -> bool {
    matches!(plan.model.source, ModelSource::Folder(_)) && plan.lora.is_some() == adapters
}

fn policy_lr(plan: &Plan, adapters: bool) -> Option<f64> {
    (trains(plan) && adapts(plan, adapters)).then_some(plan.train.lr)
}

fn sft_lr(plan: &Plan, adapters: bool) -> Option<f64> {
    plan.sft.as_ref().filter(|_| adapts(plan, adapters)).map(|sft| sft.lr)
}

fn policy_loss(plan: &Plan) -> Option<&LossChoice> {
    trains(plan).then_some(&plan.train.loss)
}

/// Returns both clip ε of token-level ratios.
fn clips(plan: &Plan) -> Option<[f64; 2]> {
    match policy_loss(plan)? {
        LossChoice::Grpo(of) if of.level == Level::Token => Some([of.epsilon, of.epsilon_high]),
        LossChoice::Dapo(of) => Some([of.epsilon, of.epsilon_high]),
        LossChoice::ClipCov(of) => Some([of.epsilon, of.epsilon_high]),
        _ => None,
    }
}

/// Returns true if advantages are relative to the mean of a group with several completions.
fn compares_siblings(plan: &Plan) -> bool {
    let of_group = matches!(plan.train.advantage, Advantage::GroupMean(_));
    let pairs = matches!(plan.train.loss, LossChoice::Dpo(_));
    plan.pipeline == Pipeline::Grpo && plan.critic.is_none() && of_group && !pairs && plan.generate.group_size > 1
}

/// Returns a warning for each value outside its usual range.
pub(super) fn warnings(plan: &Plan) -> Vec<String> {
    let unusual = |Practice { key, value, usual: [low, high], why }: &Practice| {
        let value = value(plan)?;
        (!(*low..=*high).contains(&value)).then(|| format!("{key} is {value:?}, far from what is common: {why}"))
    };
    PRACTICES.iter().filter_map(unusual).collect()
}
