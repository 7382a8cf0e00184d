//! `[reward]`: the reward of a completion, as one kind or as a combination of parts.

use crate::algo::RangeError;
use crate::algo::rewards::{
    Combine, DEFAULT_LEVELS, PartReward, environment_reward, exact_reward, format_reward, keywords_reward, length_reward,
    math_reward, numeric_reward, overlong_reward, regex_reward, repetition_reward,
};
use crate::judge::{HttpRule, JudgeConfig};
use crate::python::PythonReward;
use crate::settings::declare::{section, tagged};
use crate::settings::params::{Custom, Params};
use crate::settings::setting::{FINITE, FINITE_IF_GIVEN, GIVEN, Limit, NOT_NEGATIVE, SOME};
use crate::stages::reward::{CodeRule, MAX_POISONED, ModelRule, OnFailure, RETRIES};

const NAME: Limit<String> = Limit {
    text: "letters, digits and `_`",
    holds: |name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'),
};
const LEVELS: Limit<u32> = Limit { text: "at least 2", holds: |levels| *levels >= 2 };
const TAGS: Limit<Vec<String>> =
    Limit { text: "names of letters, digits, `-` and `_`, at least one", holds: |tags| format_reward(tags).is_ok() };
const WORDS: Limit<Vec<String>> =
    Limit { text: "words, at least one and none empty", holds: |words| keywords_reward(words).is_ok() };
const PATTERN: Limit<String> = Limit {
    text: "a regular expression in the syntax of Rust's regex crate (no look-around, no back-references)",
    holds: |pattern| !pattern.is_empty() && regex_reward(pattern).is_ok(),
};

section! {
    /// Reward of a completion: 1 if it is right, else 0; or a combination of parts.
    pub struct Reward {
        first rule: RewardRule;
        /// If true, a completion that did not end by itself earns 0, whatever it says. The kinds
        /// `model`, `length`, `overlong`, `repetition`, `judge`, `environment`, `http` and `python`
        /// ignore this key: their 0 has no special meaning, or they receive how the completion ended.
        require_end_of_text: bool = true;
        /// Retries of a failed reward for the same completion.
        retries: u32 = RETRIES;
        /// Policy for a group with a completion whose reward failed after all retries. For
        /// completions that were lost, `flow.on_lost_sample` decides whether they cost their group.
        on_failure: OnFailure = OnFailure::default();
        /// Largest number of groups in a row whose rewards fail. One more ends the run, because the
        /// reward is broken.
        max_poisoned: u64 = MAX_POISONED;
    }
}

tagged! {
    /// Kind of reward: when a completion is right.
    pub enum RewardRule {
        /// the completion equals the reference answer, character by character.
        "exact" => Exact,
        /// the completion's last number equals that of the reference answer.
        "numeric" => Numeric {
            /// Largest difference that still counts as equal.
            tolerance: f64 = 0.0, NOT_NEGATIVE;
        },
        /// the completion matches a pattern, and the pattern's first group, if it has one, equals
        /// the reference answer.
        "regex" => Regex {
            /// Pattern to search for.
            pattern: String = String::new(), PATTERN;
        },
        /// the completion's final answer (after `####`, in `\boxed{}`, announced, or its last
        /// number) means the same as the reference answer: as a number, fraction, percentage,
        /// formula, list, interval or word.
        "math" => Math,
        /// the score of a reward model, which is any number.
        "model" => Model(ModelRule),
        /// the reward of a service; docs/reference/protocols.md has the protocol.
        "http" => Http(HttpRule),
        /// a grade from 0 to 1 by a language model with a URL (judge).
        "judge" => Judge(JudgeConfig),
        /// the environment's grade of the rollout, and the rewards of its turns.
        "environment" => Environment,
        /// the completion's code passes the tests of its prompt, in a sandbox (docs/how_to/sandbox.md).
        "code" => Code(CodeRule),
        /// a function that was registered by a name.
        "custom" => Custom(Custom),
        /// a function in a Python file, called in processes of your Python (docs/how_to/python.md).
        "python" => Python(PythonReward),
        /// a combination of parts, each a `[[reward.part]]`.
        "parts" => Parts(Composition),
        /// no reward: a `[teacher]` alone says what is learned. Default of pipeline = "distill".
        "none" => None,
    }
}

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
        levels: u32 = DEFAULT_LEVELS, LEVELS;
        /// One part of the reward; may be repeated.
        part: Vec<RewardPart> = Vec::new();
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
        "exact" => Exact,
        /// 1 if the completion's last number equals that of the reference answer.
        "numeric" => Numeric {
            /// Largest difference that still counts as equal.
            tolerance: f64 = 0.0, NOT_NEGATIVE;
        },
        /// 1 if the completion matches a pattern, and the pattern's first group, if it has one,
        /// equals the reference answer.
        "regex" => Regex {
            /// Pattern to search for.
            pattern: String = String::new(), PATTERN;
        },
        /// 1 if the completion's final answer means the same as the reference answer.
        "math" => Math,
        /// the score of a reward model, which is any number.
        "model" => Model(ModelRule),
        /// 1 if the completion is the tagged sections in order, each once, and nothing else.
        "format" => Format {
            /// Names of the tags, in order.
            tags: Vec<String> = vec!["think".to_owned(), "answer".to_owned()], TAGS;
        },
        /// the share of words that the completion contains, in any case.
        "keywords" => Keywords {
            /// The words.
            words: Vec<String> = Vec::new(), WORDS;
        },
        /// 1 if the completion has between `min` and `max` tokens.
        "length" => Length {
            /// Shortest completion, in tokens.
            min: usize = 1;
            /// Longest completion, in tokens.
            max: usize = 2048, SOME;
        },
        /// DAPO's penalty: 0, falling to −1 over the last `buffer` tokens before
        /// `generate.max_new_tokens`.
        "overlong" => Overlong {
            /// Tokens before the limit over which the penalty grows.
            buffer: usize = 64, SOME;
        },
        /// the share of distinct runs of `n` tokens, minus 1: 0 without repetition, near −1 if all
        /// runs are equal.
        "repetition" => Repetition {
            /// Length of a repeated run, in tokens.
            n: usize = 4, SOME;
        },
        /// the reward of a service.
        "http" => Http(HttpRule),
        /// a grade from 0 to 1 by a language model with a URL (judge).
        "judge" => Judge(JudgeConfig),
        /// the environment's grade of the rollout.
        "environment" => Environment,
        /// the reward for passing the tests of its prompt, in a sandbox.
        "code" => Code(CodeRule),
        /// the value of a function in a Python file; if it is None, the part does not apply.
        "python" => Python(PythonReward),
        /// a function that was registered by a name.
        "custom" => Custom {
            /// The name that it was registered under.
            function: String = String::new(), GIVEN;
            /// Parameters of the function.
            params: Params = Params::default();
        },
    }
}

impl RewardRule {
    /// Returns the rule as a single part, if there is one, or its composition if it has parts.
    pub fn alone(&self) -> Result<Option<PartRule>, &Composition> {
        Ok(Some(match self {
            RewardRule::Exact => PartRule::Exact,
            RewardRule::Numeric { tolerance } => PartRule::Numeric { tolerance: *tolerance },
            RewardRule::Regex { pattern } => PartRule::Regex { pattern: pattern.clone() },
            RewardRule::Math => PartRule::Math,
            RewardRule::Model(of) => PartRule::Model(of.clone()),
            RewardRule::Http(of) => PartRule::Http(of.clone()),
            RewardRule::Judge(of) => PartRule::Judge(of.clone()),
            RewardRule::Environment => PartRule::Environment,
            RewardRule::Code(of) => PartRule::Code(of.clone()),
            RewardRule::Custom(of) => PartRule::Custom { function: of.name.clone(), params: of.params.clone() },
            RewardRule::Python(of) => PartRule::Python(of.clone()),
            RewardRule::Parts(of) => return Err(of),
            RewardRule::None => return Ok(None),
        }))
    }

    /// Returns its reward models, each with the path of its keys.
    pub(crate) fn models_mut(&mut self) -> Vec<(String, &mut ModelRule)> {
        match self {
            RewardRule::Model(of) => vec![("reward".to_owned(), of)],
            RewardRule::Parts(of) => {
                let parts = of.part.iter_mut().enumerate();
                let models = parts.map(|(at, part)| match &mut part.rule {
                    PartRule::Model(of) => Some((format!("reward.part[{at}]"), of)),
                    _ => None,
                });
                models.flatten().collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns its functions in Python files, each with the path of its keys.
    pub fn python(&self) -> Vec<(String, &PythonReward)> {
        match self {
            RewardRule::Python(of) => vec![("reward".to_owned(), of)],
            RewardRule::Parts(of) => {
                let parts = of.part.iter().enumerate();
                let python = parts.filter_map(|(at, part)| match &part.rule {
                    PartRule::Python(of) => Some((format!("reward.part[{at}]"), of)),
                    _ => None,
                });
                python.collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the number of threads of its reward models.
    pub fn threads(&self) -> usize {
        self.rules().iter().map(|rule| if let PartRule::Model(of) = rule { of.threads } else { 0 }).sum()
    }

    /// Returns true if it uses the environment's grade.
    pub(crate) fn asks_environment(&self) -> bool {
        self.rules().contains(&PartRule::Environment)
    }

    /// Returns true if it needs the reference answer of every prompt.
    pub fn compares(&self) -> bool {
        self.rules().iter().any(|rule| match rule {
            PartRule::Exact | PartRule::Numeric { .. } | PartRule::Math => true,
            PartRule::Judge(of) => of.shows_answer(),
            _ => false,
        })
    }

    /// Returns its parts, or itself as the only one.
    fn rules(&self) -> Vec<PartRule> {
        match self.alone() {
            Ok(rule) => rule.into_iter().collect(),
            Err(of) => of.part.iter().map(|part| part.rule.clone()).collect(),
        }
    }
}

impl PartRule {
    /// Builds the reward of a kind that is a pure function of the sample. Returns `None` for kinds
    /// that need a model, a service, a sandbox or a registered function.
    pub fn function(&self, max_new_tokens: usize) -> Result<Option<PartReward>, RangeError> {
        Ok(Some(match self {
            PartRule::Exact => exact_reward(),
            PartRule::Numeric { tolerance } => numeric_reward(*tolerance),
            PartRule::Regex { pattern } => regex_reward(pattern)?,
            PartRule::Math => math_reward(),
            PartRule::Format { tags } => format_reward(tags)?,
            PartRule::Keywords { words } => keywords_reward(words)?,
            PartRule::Length { min, max } => length_reward(*min, *max)?,
            PartRule::Overlong { buffer } => overlong_reward(*buffer, max_new_tokens)?,
            PartRule::Repetition { n } => repetition_reward(*n)?,
            PartRule::Environment => environment_reward(),
            PartRule::Model(_)
            | PartRule::Http(_)
            | PartRule::Judge(_)
            | PartRule::Python(_)
            | PartRule::Code(_)
            | PartRule::Custom { .. } => return Ok(None),
        }))
    }

    /// Returns true if `require_end_of_text` applies to this kind.
    pub fn requires_end(&self) -> bool {
        use PartRule::{Code, Custom, Exact, Format, Keywords, Math, Numeric, Regex};
        matches!(self, Exact | Numeric { .. } | Regex { .. } | Math | Format { .. } | Keywords { .. } | Code(_) | Custom { .. })
    }

    /// Returns true if another process computes the reward.
    pub fn is_remote(&self) -> bool {
        matches!(self, PartRule::Http(_) | PartRule::Judge(_) | PartRule::Python(_))
    }
}
