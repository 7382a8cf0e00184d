//! What each kind of reward is told: the keys that stand beside its `kind`, alone or in a part.

pub use crate::stages::reward::CodeScore;
use std::path::PathBuf;

use crate::algo::rewards::{FormatTags, keywords};
use crate::net::check_url;
use crate::recipe::net::RetryPauses;
use crate::settings::declare::section;
use crate::settings::setting::{GIVEN, Limit, NOT_NEGATIVE, PATH_GIVEN, POSITIVE, SOME};
use crate::stages::reward::service::{PROMPT, SCORE};

const PATTERN: Limit<String> = Limit {
    text: "a regular expression in the syntax of Rust's regex crate (no look-around, no back-references)",
    holds: |pattern| !pattern.is_empty() && regex::Regex::new(pattern).is_ok(),
};
const TAGS: Limit<Vec<String>> = Limit {
    text: "names of letters, digits, `-` and `_`, at least one",
    holds: |tags| FormatTags::new(tags.iter().cloned()).is_ok(),
};
const WORDS: Limit<Vec<String>> =
    Limit { text: "words, at least one and none empty", holds: |words| keywords(words.iter().cloned()).is_ok() };
pub(in crate::recipe) const URL: Limit<String> = Limit {
    text: "an address, as in http://127.0.0.1:9000/score or https://judge.example.com/score, without a password (`token_env` names a token)",
    holds: |url| check_url(url).is_ok(),
};
const SCORE_PATTERN: Limit<String> = Limit {
    text: "a regular expression with a group, in round brackets",
    holds: |pattern| regex::Regex::new(pattern).is_ok_and(|pattern| pattern.captures_len() > 1),
};
const JUDGED: Limit<String> = Limit {
    text: "a text with either `{response}` or `{responses}` in it",
    holds: |text| text.contains("{response}") != text.contains("{responses}"),
};
const TEMPLATE: Limit<String> = Limit { text: "a program with `{code}` in it", holds: |text| text.contains("{code}") };
const SCALE: Limit<[f64; 2]> =
    Limit { text: "two different numbers", holds: |[low, high]| low.is_finite() && high.is_finite() && low != high };

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
        last retry: RetryPauses;
    }
}

section! {
    /// A language model grades each answer by itself, or those to the same prompt against each other. Replies are remembered: the same
    /// answer to the same prompt is graded once. `url` is that of its chat completions, as in http://127.0.0.1:8000/v1/chat/completions.
    pub struct JudgeRule {
        first http: HttpRule;
        /// The model's name, as its server knows it.
        model: String = String::new(), GIVEN;
        /// What it is asked, with `{prompt}`, `{response}` and `{answer}`, the ground truth, in their places. With `{responses}` instead of
        /// `{response}` it is shown all answers to a prompt at once, numbered, and compares them.
        prompt: String = PROMPT.to_owned(), JUDGED;
        /// Finds the score in its reply: the first group of the last match; where answers are compared, of as many last ones as there are
        /// answers.
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
