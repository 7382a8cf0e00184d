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
    /// Several parts, and how they become one reward. Each part's mean is written down as `reward_part_` and its name.
    pub struct Composition {
        /// How the parts become one reward.
        combine: Combine = Combine::default();
        /// With `combine = "custom"`: the name that the aggregator was registered under.
        aggregator: Option<String> = None;
        /// What it is made with.
        aggregator_params: Params = Params::default();
        /// Values of a part that `combine = "lexicographic"` tells apart.
        levels: u32 = 101, LEVELS;
        /// One part of the reward; may stand several times.
        part: Vec<RewardPart> = Vec::new();
    }
}

choices! {
    /// How the parts of a reward become one.
    pub enum Combine {
        /// their sum, each times its weight.
        "sum" => Sum,
        /// the smallest.
        "min" => Min,
        /// their product.
        "product" => Product,
        /// the first decides, the next only among equals; parts from 0 to 1, and so is the reward.
        "lexicographic" => Lexicographic,
        /// what an aggregator makes of them that was registered by a name.
        "custom" => Custom,
    }
}

section! {
    /// One part of a reward.
    pub struct RewardPart {
        first rule: PartRule;
        /// Its name in metrics.
        name: String = String::new(), NAME;
        /// What it is multiplied by in a sum.
        weight: f64 = 1.0, FINITE;
        /// The whole reward is 0 where this part is below.
        at_least: Option<f64> = None, FINITE_IF_GIVEN;
    }
}

tagged! {
    /// What a part looks at.
    pub enum PartRule {
        /// 1 if the answer is the ground truth, letter by letter.
        "exact" => Exact(NoKeys),
        /// 1 if its last number is the ground truth's.
        "numeric" => Numeric(Numeric),
        /// 1 if it matches a pattern, and the pattern's first group, if it has one, is the ground truth.
        "regex" => Regex(RegexRule),
        /// 1 if its final answer says the same as the ground truth.
        "math" => Math(NoKeys),
        /// what a reward model says: its score, which is any number.
        "model" => Model(ModelRule),
        /// 1 if it is one tagged section after the other, each once, and nothing else.
        "format" => Format(FormatRule),
        /// the share of words that it contains, whatever their case.
        "keywords" => Keywords(KeywordsRule),
        /// 1 if it has so many tokens.
        "length" => Length(LengthRule),
        /// DAPO's penalty: 0, from `buffer` tokens before `generate.max_new_tokens` on falling to −1.
        "overlong" => Overlong(OverlongRule),
        /// the share of distinct runs of `n` tokens less 1: 0 without repetition, near −1 where all is one.
        "repetition" => Repetition(RepetitionRule),
        /// what another process answers.
        "http" => Http(HttpRule),
        /// what a language model behind a URL says of it, as a grade from 0 to 1.
        "judge" => Judge(JudgeRule),
        /// what the environment makes of the rollout.
        "environment" => Environment(NoKeys),
        /// what its code earns by the tests of its prompt, in a sandbox.
        "code" => Code(CodeRule),
        /// what a function gives that was registered by a name.
        "custom" => Custom(CustomPart),
    }
}

section! {
    /// A function of the user's own.
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
