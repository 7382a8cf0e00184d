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
    /// Reward of a completion: 1 if it is right, else 0; or a combination of parts.
    pub struct Reward {
        first rule: RewardRule;
        /// If true, a completion that did not end by itself earns 0, whatever it says. The kinds
        /// `model`, `length`, `overlong`, `repetition`, `judge`, `environment` and `http` ignore
        /// this key: their 0 has no special meaning, or they are told how the completion ended.
        require_end_of_text: bool = true;
        /// Retries of a failed reward for the same completion.
        retries: u32 = 2;
        /// Policy for a group with a completion whose reward failed after all retries. For
        /// completions that were lost, `flow.on_lost_sample` decides whether they cost their group.
        on_failure: OnFailure = OnFailure::default();
        /// Largest number of groups in a row whose rewards fail. One more ends the run, because the
        /// reward is broken.
        max_poisoned: u64 = 64;
    }
}

tagged! {
    /// Kind of reward: when a completion is right.
    pub enum RewardRule {
        /// the completion equals the reference answer, character by character.
        "exact" => Exact(NoKeys),
        /// the completion's last number equals that of the reference answer.
        "numeric" => Numeric(Numeric),
        /// the completion matches a pattern, and the pattern's first group, if it has one, equals
        /// the reference answer.
        "regex" => Regex(RegexRule),
        /// the completion's final answer (after `####`, in `\boxed{}`, announced, or its last
        /// number) means the same as the reference answer: as a number, fraction, percentage,
        /// formula, list, interval or word.
        "math" => Math(NoKeys),
        /// the score of a reward model, which is any number.
        "model" => Model(ModelRule),
        /// the reward of a service; docs/reference/protocols.md has the protocol.
        "http" => Http(HttpRule),
        /// a grade from 0 to 1 by a language model with a URL (judge).
        "judge" => Judge(JudgeRule),
        /// the environment's grade of the rollout, and the rewards of its turns.
        "environment" => Environment(NoKeys),
        /// the completion's code passes the tests of its prompt, in a sandbox (docs/how_to/sandbox.md).
        "code" => Code(CodeRule),
        /// a function that was registered by a name.
        "custom" => Custom(Custom),
        /// a combination of parts, each a `[[reward.part]]`.
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
