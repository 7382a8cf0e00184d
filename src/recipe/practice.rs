//! Warnings for values far from common practice, which are allowed but probably mistakes.

use std::ops::RangeInclusive;

use super::model::ModelSource;
use super::plan::{Pipeline, Plan};
use crate::algo::{Advantage, Level, LossChoice};

/// Returns a warning for each value outside the range of published runs.
pub(super) fn warnings(plan: &Plan) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut usual = |range: RangeInclusive<f64>, key: &str, value: f64, why: &str| {
        if !range.contains(&value) {
            warnings.push(format!("{key} is {value:?}, far from what is common: {why}"));
        }
    };
    let (train, trains) = (&plan.train, plan.pipeline.trains_by_train());
    let pretrained = matches!(plan.model.source, ModelSource::Folder(_));
    let (full, adapters) = (pretrained && plan.lora.is_none(), pretrained && plan.lora.is_some());
    if trains && full {
        let why = "full fine-tuning by reinforcement or preferences takes about 1e-6; far above, the policy collapses";
        usual(1e-8..=2e-5, "train.lr", train.lr, why);
    }
    if trains && adapters {
        usual(1e-7..=5e-4, "train.lr", train.lr, "adapters take about 1e-5 to 1e-4");
    }
    // Without a supervised phase it has no rate.
    let sft = plan.sft.as_ref().filter(|_| plan.pipeline != Pipeline::GrpoOffline);
    if let Some(sft) = sft.filter(|_| full) {
        let why = "supervised full fine-tuning takes about 2e-5; far above, the model forgets what it knew";
        usual(1e-7..=1e-4, "sft.lr", sft.lr, why);
    }
    if let Some(sft) = sft.filter(|_| adapters) {
        usual(1e-6..=2e-3, "sft.lr", sft.lr, "supervised training of adapters takes about 2e-4");
    }
    if trains {
        let clips = match &train.loss {
            LossChoice::Grpo(of) if of.level == Level::Token => Some([of.epsilon, of.epsilon_high]),
            LossChoice::Dapo(of) => Some([of.epsilon, of.epsilon_high]),
            LossChoice::ClipCov(of) => Some([of.epsilon, of.epsilon_high]),
            _ => None,
        };
        if let Some([low, high]) = clips {
            let why = "ratios of single tokens are clipped at 0.2 as a rule (PPO, GRPO, DAPO)";
            usual(0.05..=0.5, "train.loss.epsilon", low, why);
            let why = "ratios of single tokens are clipped at 0.2 to 0.28 as a rule (PPO, GRPO, DAPO)";
            usual(0.05..=1.0, "train.loss.epsilon_high", high, why);
        }
        if let LossChoice::Gspo(of) = &train.loss {
            let why = "GSPO clips ratios of whole completions, at about 4e-4";
            usual(1e-5..=1e-2, "train.loss.epsilon_high", of.epsilon_high, why);
        }
        if let LossChoice::Dpo(of) = &train.loss {
            usual(0.005..=5.0, "train.loss.beta", of.beta, "losses of pairs take 0.1 as a rule, and 0.01 to 2.5 in papers");
        }
        if let Some(kl) = &train.kl_loss {
            let why = "0.001 (verl) to 0.04 (DeepSeekMath) are common; far above, the policy stays where it is";
            usual(0.0..=0.2, "train.kl_loss.beta", kl.beta, why);
        }
        if let Some(kl) = &train.kl_reward {
            let why = "0.001 to 0.2 are common; far above, the penalty outweighs the reward";
            usual(0.0..=0.5, "train.kl_reward.beta", kl.beta, why);
        }
        let why = "0 to 0.01 are common; far above, the policy becomes random";
        usual(-0.1..=0.1, "train.entropy_coef", train.entropy_coef, why);
        usual(0.01..=10.0, "train.max_grad_norm", train.optimization.max_grad_norm, "0.1 to 1 are common");
        let why = "1 to 4 passes over a batch are common; with more, most ratios are clipped";
        usual(1.0..=10.0, "train.ppo_epochs", train.ppo_epochs as f64, why);
    }
    if plan.pipeline.reinforces() {
        let why = "completions are sampled at 0.6 to 1.2 for training: below they hardly differ, above they fall apart";
        usual(0.3..=1.5, "generate.temperature", plan.generate.temperature, why);
        if compares_siblings(plan) {
            let why = "groups have 8 to 64 completions as a rule: advantages against a mean of 2 or 3 are mostly noise";
            usual(4.0..=256.0, "generate.group_size", plan.generate.group_size as f64, why);
        }
        let why = "asynchronous runs stay within 1 to 8 versions";
        usual(0.0..=16.0, "flow.max_staleness", plan.flow.max_staleness as f64, why);
    }
    warnings
}

/// Returns true if advantages are relative to the mean of a group with several completions.
fn compares_siblings(plan: &Plan) -> bool {
    let of_group = matches!(plan.train.advantage, Advantage::GroupMean(_));
    let pairs = matches!(plan.train.loss, LossChoice::Dpo(_));
    plan.pipeline == Pipeline::Grpo && plan.critic.is_none() && of_group && !pairs && plan.generate.group_size > 1
}
