//! `[reward]`: what an answer earns, as one value or as several parts.

mod parts;
mod rules;

pub use crate::stages::reward::OnFailure;
use std::path::PathBuf;

use crate::settings::declare::{section, tagged};
use crate::settings::params::Custom;
use crate::settings::section::NoKeys;
pub use parts::{Combine, Composition, CustomPart, PartRule, RewardPart};
pub(super) use rules::URL;
pub use rules::{
    CodeRule, CodeScore, FormatRule, HttpRule, JudgeRule, KeywordsRule, LengthRule, ModelRule, Numeric, OverlongRule, RegexRule,
    RepetitionRule, SandboxRule,
};

section! {
    /// What an answer earns: 1 if it is right, else 0; or what its parts make together.
    pub struct Reward {
        first rule: RewardRule;
        /// Whether an answer that did not end by itself earns nothing for what it says: 0 from all kinds but `model`, whose 0 means nothing in
        /// particular, `length`, `overlong`, `repetition`, `judge`, `environment`, and `http`, which is told how it ended.
        require_end_of_text: bool = true;
        /// How often a reward that fails is called again for the same answer, before the answer is given up.
        retries: u32 = 2;
        /// What becomes of a group with an answer that was given up; of answers that were lost, rather than judged wrongly, `flow.on_lost_sample`
        /// says whether they cost their group.
        on_failure: OnFailure = OnFailure::default();
        /// Groups in a row that may be given up; one more, and the run ends, for the reward is broken.
        max_poisoned: u64 = 64;
    }
}

tagged! {
    /// When an answer is right.
    pub enum RewardRule {
        /// it is the ground truth, letter by letter.
        "exact" => Exact(NoKeys),
        /// its last number is the ground truth's.
        "numeric" => Numeric(Numeric),
        /// it matches a pattern, and the pattern's first group, if it has one, is the ground truth.
        "regex" => Regex(RegexRule),
        /// its final answer (after `####`, in `\boxed{}`, announced, or its last number) says the same as the ground truth: as a number, fraction,
        /// percentage, formula, list, interval or word.
        "math" => Math(NoKeys),
        /// what a reward model says: its score, which is any number.
        "model" => Model(ModelRule),
        /// what another process answers; docs/reward_service.md has the protocol.
        "http" => Http(HttpRule),
        /// what a language model behind a URL says of it, as a grade from 0 to 1.
        "judge" => Judge(JudgeRule),
        /// what the environment of `[environment]` makes of the rollout: its grade, and what the turns earned.
        "environment" => Environment(NoKeys),
        /// its code passes the tests of its prompt, in a sandbox (docs/sandbox.md).
        "code" => Code(CodeRule),
        /// what a function gives that was registered by a name.
        "custom" => Custom(Custom),
        /// several of these and others, each a `[[reward.part]]`, together.
        "parts" => Parts(Composition),
    }
}

impl RewardRule {
    /// What it looks at, if that is one thing; else its parts.
    pub fn alone(&self) -> Result<PartRule, &Composition> {
        Ok(match self {
            RewardRule::Exact(of) => PartRule::Exact(*of),
            RewardRule::Numeric(of) => PartRule::Numeric(of.clone()),
            RewardRule::Regex(of) => PartRule::Regex(of.clone()),
            RewardRule::Math(of) => PartRule::Math(*of),
            RewardRule::Model(of) => PartRule::Model(of.clone()),
            RewardRule::Http(of) => PartRule::Http(of.clone()),
            RewardRule::Judge(of) => PartRule::Judge(of.clone()),
            RewardRule::Environment(of) => PartRule::Environment(*of),
            RewardRule::Code(of) => PartRule::Code(of.clone()),
            RewardRule::Custom(of) => PartRule::Custom(CustomPart { function: of.name.clone(), params: of.params.clone() }),
            RewardRule::Parts(of) => return Err(of),
        })
    }

    /// The reward models that it asks, and where their keys stand.
    pub(crate) fn models(&self) -> Vec<(String, &ModelRule)> {
        match self {
            RewardRule::Model(of) => vec![("reward".to_owned(), of)],
            RewardRule::Parts(of) => of
                .part
                .iter()
                .enumerate()
                .filter_map(|(at, part)| match &part.rule {
                    PartRule::Model(of) => Some((format!("reward.part[{at}]"), of)),
                    _ => None,
                })
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Their folders.
    pub(crate) fn folders(&self) -> impl Iterator<Item = (String, &PathBuf)> {
        self.models().into_iter().map(|(key, model)| (format!("{key}.path"), &model.path))
    }

    /// Threads that they score with.
    pub fn threads(&self) -> usize {
        self.models().iter().map(|(_, model)| model.threads).sum()
    }

    /// Whether it asks the environment.
    pub(crate) fn asks_environment(&self) -> bool {
        let asks = |rule: &PartRule| matches!(rule, PartRule::Environment(_));
        match self.alone() {
            Ok(rule) => asks(&rule),
            Err(of) => of.part.iter().any(|part| asks(&part.rule)),
        }
    }

    /// Whether it needs the ground truth of every prompt.
    pub fn compares(&self) -> bool {
        match self.alone() {
            Ok(rule) => rule.compares(),
            Err(of) => of.part.iter().any(|part| part.rule.compares()),
        }
    }
}
