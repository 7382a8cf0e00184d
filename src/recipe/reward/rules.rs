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
    /// Compares numbers, whatever their spelling.
    pub struct Numeric {
        /// Largest difference that still counts as equal.
        tolerance: f64 = 0.0, NOT_NEGATIVE;
    }
}

section! {
    /// Searches a pattern.
    pub struct RegexRule {
        /// Pattern to search for.
        pattern: String = String::new(), PATTERN;
    }
}

section! {
    /// Reward of a service.
    pub struct HttpRule {
        /// Address that takes a group's completions by POST.
        url: String = String::new(), URL;
        /// Environment variable with a token, sent as `Authorization: Bearer …`. The token itself
        /// is never written.
        token_env: Option<String> = None;
        /// Timeout of one request, in seconds, from connecting to the end of the response.
        timeout: f64 = 30.0, POSITIVE;
        /// Most groups in flight to the service. With several services the smallest number counts.
        concurrency: usize = 8, SOME;
        last retry: RetryPauses;
    }
}

section! {
    /// A language model grades each completion alone, or the completions of a prompt against each
    /// other. Grades are cached: the same completion of the same prompt is graded once. `url` is
    /// its chat completions endpoint, such as http://127.0.0.1:8000/v1/chat/completions.
    pub struct JudgeRule {
        first http: HttpRule;
        /// Model name in requests.
        model: String = String::new(), GIVEN;
        /// Question with the placeholders `{prompt}`, `{response}` and `{answer}`, the reference
        /// answer. With `{responses}` instead of `{response}` the judge is shown all completions of
        /// a prompt, numbered, and compares them.
        prompt: String = PROMPT.to_owned(), JUDGED;
        /// Pattern that finds the score in the reply: the first group of the last match. If
        /// completions are compared, the last matches count, one for each completion.
        score: String = SCORE.to_owned(), SCORE_PATTERN;
        /// Scores that stand for 0 and for 1. A score outside is an error.
        scale: [f64; 2] = [0.0, 10.0], SCALE;
        /// Longest reply, in tokens.
        max_tokens: usize = 512, SOME;
        /// A file that keeps grades across runs, relative to where the command runs. Left out:
        /// grades are cached for one run.
        cache: Option<PathBuf> = None;
    }
}

section! {
    /// Runs Python code against tests: the completion's last code block, or the whole completion.
    /// Tests are asserts, or pairs of input and output.
    pub struct CodeRule {
        first sandbox: SandboxRule;
        /// Reward for passing some of the tests.
        score: CodeScore = CodeScore::default();
        /// Program that is run, with the placeholders `{code}` and `{prompt}`; the latter is for
        /// code that continues its prompt.
        template: String = "{code}".to_owned(), TEMPLATE;
    }
}

section! {
    /// Python in a sandbox, with tests.
    pub struct SandboxRule {
        /// Field of the task's records with the tests.
        tests: String = "tests".to_owned(), GIVEN;
        /// Interpreter: a path, or a name that is searched in `PATH`.
        python: String = "python3".to_owned(), GIVEN;
        /// Time limit of a program, in seconds.
        timeout: f64 = 10.0, POSITIVE;
        /// Memory limit of a program, in MiB.
        memory: usize = 512, SOME;
        /// Most processes and threads of a program.
        processes: usize = 16, SOME;
        /// If true, code may run without a sandbox on a machine that has none. It can then do
        /// everything that this run can.
        unsandboxed: bool = false;
    }
}

section! {
    /// A reward model scores prompt and completion, in its own tokens. How the completion ended is
    /// not part of the text.
    pub struct ModelRule {
        /// A Hugging Face folder of a sequence classifier with one label, relative to where the command runs.
        path: PathBuf = PathBuf::new(), PATH_GIVEN;
        /// Penalty on the score of a completion that did not end by itself.
        missing_end_penalty: f64 = 0.0, NOT_NEGATIVE;
        /// Threads that score.
        threads: usize = 1, SOME;
    }
}

section! {
    /// Requires tagged sections.
    pub struct FormatRule {
        /// Names of the tags, in order.
        tags: Vec<String> = vec!["think".to_owned(), "answer".to_owned()], TAGS;
    }
}

section! {
    /// Looks for words.
    pub struct KeywordsRule {
        /// The words.
        words: Vec<String> = Vec::new(), WORDS;
    }
}

section! {
    /// Bounds a completion's length.
    pub struct LengthRule {
        /// Shortest completion, in tokens.
        min: usize = 1;
        /// Longest completion, in tokens.
        max: usize = 2048, SOME;
    }
}

section! {
    /// Penalises completions near the length limit (DAPO).
    pub struct OverlongRule {
        /// Tokens before the limit over which the penalty grows.
        buffer: usize = 64, SOME;
    }
}

section! {
    /// Penalises repetition.
    pub struct RepetitionRule {
        /// Length of a repeated run, in tokens.
        n: usize = 4, SOME;
    }
}
