//! `[[reward.part]]`: several parts, and how they become one reward.

use super::rules::{
    CodeRule, FormatRule, HttpRule, JudgeRule, KeywordsRule, LengthRule, ModelRule, Numeric, OverlongRule, RegexRule,
    RepetitionRule,
};
use crate::settings::declare::{choices, section, tagged};
use crate::settings::params::Params;
use crate::settings::section::NoKeys;
use crate::settings::setting::{FINITE, FINITE_IF_GIVEN, GIVEN, Limit};

const NAME: Limit<String> = Limit {
    text: "letters, digits and `_`",
    holds: |name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'),
};
const LEVELS: Limit<u32> = Limit { text: "at least 2", holds: |levels| *levels >= 2 };

section! {
    /// A combination of parts. Each part's mean is logged as `reward_part_` and its name.
    pub struct Composition {
        /// Combination of the parts.
        combine: Combine = Combine::default();
        /// With `combine = "custom"`: name of a registered aggregator.
        aggregator: Option<String> = None;
        /// The aggregator's parameters.
        aggregator_params: Params = Params::default();
        /// Number of values of a part that `combine = "lexicographic"` distinguishes.
        levels: u32 = 101, LEVELS;
        /// One part of the reward; may be repeated.
        part: Vec<RewardPart> = Vec::new();
    }
}

choices! {
    /// Combination of the parts of a reward.
    pub enum Combine {
        /// the sum of the parts, each times its weight.
        "sum" => Sum,
        /// the smallest part.
        "min" => Min,
        /// the product of the parts.
        "product" => Product,
        /// the first part decides, the next one only among equals; parts and reward are from 0 to
        /// 1.
        "lexicographic" => Lexicographic,
        /// an aggregator that was registered by a name.
        "custom" => Custom,
    }
}

section! {
    /// One part of a reward.
    pub struct RewardPart {
        first rule: PartRule;
        /// Name in metrics.
        name: String = String::new(), NAME;
        /// Weight in a sum.
        weight: f64 = 1.0, FINITE;
        /// Threshold: the whole reward is 0 if this part is below.
        at_least: Option<f64> = None, FINITE_IF_GIVEN;
    }
}

tagged! {
    /// Kind of a part.
    pub enum PartRule {
        /// 1 if the completion equals the reference answer, character by character.
        "exact" => Exact(NoKeys),
        /// 1 if the completion's last number equals that of the reference answer.
        "numeric" => Numeric(Numeric),
        /// 1 if the completion matches a pattern, and the pattern's first group, if it has one,
        /// equals the reference answer.
        "regex" => Regex(RegexRule),
        /// 1 if the completion's final answer means the same as the reference answer.
        "math" => Math(NoKeys),
        /// the score of a reward model, which is any number.
        "model" => Model(ModelRule),
        /// 1 if the completion is the tagged sections in order, each once, and nothing else.
        "format" => Format(FormatRule),
        /// the share of words that the completion contains, in any case.
        "keywords" => Keywords(KeywordsRule),
        /// 1 if the completion has between `min` and `max` tokens.
        "length" => Length(LengthRule),
        /// DAPO's penalty: 0, falling to −1 over the last `buffer` tokens before
        /// `generate.max_new_tokens`.
        "overlong" => Overlong(OverlongRule),
        /// the share of distinct runs of `n` tokens, minus 1: 0 without repetition, near −1 if all
        /// runs are equal.
        "repetition" => Repetition(RepetitionRule),
        /// the reward of a service.
        "http" => Http(HttpRule),
        /// a grade from 0 to 1 by a language model with a URL (judge).
        "judge" => Judge(JudgeRule),
        /// the environment's grade of the rollout.
        "environment" => Environment(NoKeys),
        /// the reward for passing the tests of its prompt, in a sandbox.
        "code" => Code(CodeRule),
        /// a function that was registered by a name.
        "custom" => Custom(CustomPart),
    }
}

section! {
    /// A registered function.
    pub struct CustomPart {
        /// The name that it was registered under.
        function: String = String::new(), GIVEN;
        /// What it is made with.
        params: Params = Params::default();
    }
}

impl PartRule {
    pub(super) fn compares(&self) -> bool {
        match self {
            PartRule::Exact(_) | PartRule::Numeric(_) | PartRule::Math(_) => true,
            PartRule::Judge(of) => of.prompt.contains("{answer}"),
            _ => false,
        }
    }

    /// The reward model that it asks, if any.
    pub(in crate::recipe) fn model_mut(&mut self) -> Option<&mut ModelRule> {
        match self {
            PartRule::Model(of) => Some(of),
            _ => None,
        }
    }

    /// Where it is asked for, if another process answers.
    pub fn served(&self) -> Option<&HttpRule> {
        match self {
            PartRule::Http(of) => Some(of),
            PartRule::Judge(of) => Some(&of.http),
            _ => None,
        }
    }
}
