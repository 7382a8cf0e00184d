//! `[reward]`: what an answer earns, as one value or as several parts.

use std::path::PathBuf;

use super::declare::{choices, section, tagged};
use super::params::{Custom, Params};
use super::section::NoKeys;
use super::setting::{FINITE, FINITE_IF_GIVEN, GIVEN, Limit, NOT_NEGATIVE, PATH_GIVEN, POSITIVE, SOME};
use crate::algo::rewards::{FormatTags, keywords};
use crate::stages::reward::service::{PROMPT, SCORE, Service, ServiceConfig};

const PATTERN: Limit<String> = Limit {
    text: "a regular expression in the syntax of Rust's regex crate (no look-around, no back-references)",
    holds: |pattern| !pattern.is_empty() && regex::Regex::new(pattern).is_ok(),
};
const NAME: Limit<String> = Limit {
    text: "letters, digits and `_`",
    holds: |name| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'),
};
const TAGS: Limit<Vec<String>> = Limit {
    text: "names of letters, digits, `-` and `_`, at least one",
    holds: |tags| FormatTags::new(tags.iter().cloned()).is_ok(),
};
const WORDS: Limit<Vec<String>> =
    Limit { text: "words, at least one and none empty", holds: |words| keywords(words.iter().cloned()).is_ok() };
pub(super) const URL: Limit<String> = Limit {
    text: "an address, as in http://127.0.0.1:9000/score, without TLS, and without a password (`token_env` names a token)",
    holds: |url| Service::new(ServiceConfig::new(url)).is_ok(),
};
const SCORE_PATTERN: Limit<String> = Limit {
    text: "a regular expression with a group, in round brackets",
    holds: |pattern| regex::Regex::new(pattern).is_ok_and(|pattern| pattern.captures_len() > 1),
};
const JUDGED: Limit<String> = Limit { text: "a text with `{response}` in it", holds: |text| text.contains("{response}") };
const TEMPLATE: Limit<String> = Limit { text: "a program with `{code}` in it", holds: |text| text.contains("{code}") };
const SCALE: Limit<[f64; 2]> =
    Limit { text: "two different numbers", holds: |[low, high]| low.is_finite() && high.is_finite() && low != high };
const LEVELS: Limit<u32> = Limit { text: "at least 2", holds: |levels| *levels >= 2 };

section! {
    /// What an answer earns: 1 if it is right, else 0; or what its parts make together.
    pub struct Reward {
        first rule: RewardRule;
        /// Whether an answer that did not end by itself earns nothing for what it says: 0 from all kinds but `model`, whose 0 means nothing in particular, `length`, `overlong`, `repetition`, `judge`, `environment`, and `http`, which is told how it ended.
        require_end_of_text: bool = true;
        /// How often a reward that fails is called again for the same answer, before the answer's group is given up.
        retries: u32 = 2;
        /// What becomes of a group that was given up.
        on_failure: OnFailure = OnFailure::default();
        /// Groups in a row that may be given up; one more, and the run ends, for the reward is broken.
        max_poisoned: u64 = 64;
    }
}

choices! {
    /// What becomes of a group that has an answer without a reward.
    pub enum OnFailure {
        /// it is dropped and written to `dead_letters.jsonl`, for `rollflow replay`.
        "dead_letter" => DeadLetter,
        /// it is dropped.
        "drop" => Drop,
        /// the answer earns 0.
        "zero" => Zero,
        /// the run ends.
        "fail" => Fail,
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
        /// its final answer (after `####`, in `\boxed{}`, announced, or its last number) says the same as the ground truth: as a number, fraction, percentage, formula, list, interval or word.
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

section! {
    /// Numbers are compared, not their spelling.
    pub struct Numeric {
        /// Largest difference that still counts as equal.
        tolerance: f64 = 0.0, NOT_NEGATIVE;
    }
}

section! {
    /// A pattern is searched.
    pub struct RegexRule {
        /// What to search for.
        pattern: String = String::new(), PATTERN;
    }
}

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
    /// A reward that another process serves.
    pub struct HttpRule {
        /// Where it takes a group's answers by POST.
        url: String = String::new(), URL;
        /// The environment variable that holds a token, sent as `Authorization: Bearer …`. The token itself stands nowhere.
        token_env: Option<String> = None;
        /// Most seconds for one request, from connecting to the end of its answer.
        timeout: f64 = 30.0, POSITIVE;
        /// Most groups that are asked for at the same time; of several services the smallest counts.
        concurrency: usize = 8, SOME;
        /// Seconds before a request that failed is made again, less up to half by chance; they double each time, up to 30.
        pause: f64 = 0.5, NOT_NEGATIVE;
        /// Seconds that a service which says it is busy (429, 503) is waited for, in one attempt.
        patience: f64 = 300.0, NOT_NEGATIVE;
    }
}

section! {
    /// A language model grades each answer by itself. Replies are remembered: the same answer to the same prompt is graded once. `url` is that
    /// of its chat completions, as in http://127.0.0.1:8000/v1/chat/completions.
    pub struct JudgeRule {
        first http: HttpRule;
        /// The model's name, as its server knows it.
        model: String = String::new(), GIVEN;
        /// What it is asked, with `{prompt}`, `{response}` and `{answer}`, the ground truth, in their places.
        prompt: String = PROMPT.to_owned(), JUDGED;
        /// Finds the score in its reply: the first group of the last match.
        score: String = SCORE.to_owned(), SCORE_PATTERN;
        /// The scores that stand for 0 and for 1; the judge must not leave them.
        scale: [f64; 2] = [0.0, 10.0], SCALE;
        /// Longest reply, in tokens.
        max_tokens: usize = 512, SOME;
        /// A file that remembers replies over runs, relative to where the command runs; without it one run's memory does.
        cache: Option<PathBuf> = None;
    }
}

section! {
    /// Python code, run against tests: the answer's last block of it, or the whole answer. The tests are asserts or pairs of input and output.
    pub struct CodeRule {
        first sandbox: SandboxRule;
        /// What passing some tests is worth.
        score: CodeScore = CodeScore::default();
        /// The program that is run, with `{code}`, and `{prompt}` where code goes on from its prompt, in their places.
        template: String = "{code}".to_owned(), TEMPLATE;
    }
}

section! {
    /// Python with tests, in a sandbox.
    pub struct SandboxRule {
        /// Field of the task's records with the tests.
        tests: String = "tests".to_owned(), GIVEN;
        /// The interpreter, by its path or by a name that is looked for in `PATH`.
        python: String = "python3".to_owned(), GIVEN;
        /// Most seconds of a program.
        timeout: f64 = 10.0, POSITIVE;
        /// Most memory of a program, in MiB.
        memory: usize = 512, SOME;
        /// Most processes and threads of a program.
        processes: usize = 16, SOME;
        /// Whether code may be run without walls on a machine that has none: it could do all that this run can.
        unsandboxed: bool = false;
    }
}

choices! {
    /// What passing some tests is worth.
    pub enum CodeScore {
        /// their share of all.
        "share" => Share,
        /// nothing, unless it is all of them.
        "all" => All,
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

section! {
    /// A reward model scores prompt and answer, in its own tokens. How the answer ended is no part of the text.
    pub struct ModelRule {
        /// A Hugging Face folder of a sequence classifier with one label, relative to where the command runs.
        path: PathBuf = PathBuf::new(), PATH_GIVEN;
        /// Taken from the score of an answer that did not end by itself.
        missing_end_penalty: f64 = 0.0, NOT_NEGATIVE;
        /// Threads that score.
        threads: usize = 1, SOME;
    }
}

section! {
    /// Tagged sections.
    pub struct FormatRule {
        /// The tags' names, in order.
        tags: Vec<String> = vec!["think".to_owned(), "answer".to_owned()], TAGS;
    }
}

section! {
    /// Words that are looked for.
    pub struct KeywordsRule {
        /// The words.
        words: Vec<String> = Vec::new(), WORDS;
    }
}

section! {
    /// Bounds of an answer's length.
    pub struct LengthRule {
        /// Shortest answer, in tokens.
        min: usize = 1;
        /// Longest answer, in tokens.
        max: usize = 2048, SOME;
    }
}

section! {
    /// A penalty for answers that come close to the limit.
    pub struct OverlongRule {
        /// Tokens before the limit over which the penalty grows.
        buffer: usize = 64, SOME;
    }
}

section! {
    /// A penalty for answers that repeat themselves.
    pub struct RepetitionRule {
        /// Tokens of a run.
        n: usize = 4, SOME;
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
    pub(crate) fn compares(&self) -> bool {
        match self.alone() {
            Ok(rule) => rule.compares(),
            Err(of) => of.part.iter().any(|part| part.rule.compares()),
        }
    }
}

impl PartRule {
    fn compares(&self) -> bool {
        match self {
            PartRule::Exact(_) | PartRule::Numeric(_) | PartRule::Math(_) => true,
            PartRule::Judge(of) => of.prompt.contains("{answer}"),
            _ => false,
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
