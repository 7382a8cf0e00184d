//! `[environment]`: what answers the model, where a rollout has several turns.

pub use crate::env::ToolFormat;
use std::path::PathBuf;

use super::net::RetryPauses;
use super::reward::{SandboxRule, URL};
use crate::net::RetryPolicy;
use crate::settings::declare::{section, tagged};
use crate::settings::section::NoKeys;
use crate::settings::setting::{GIVEN, Limit, PATH_GIVEN, POSITIVE, SOME, SOME_IF_GIVEN};

const A_CHOICE: Limit<u64> = Limit { text: "at least 2", holds: |value| *value >= 2 };
const POSITIVE_IF_GIVEN: Limit<Option<f64>> =
    Limit { text: "above 0", holds: |value| value.is_none_or(|value| value > 0.0 && value.is_finite()) };

section! {
    /// Rollouts of several turns: the model answers, its environment answers what it said, until the task is done. Left out, an answer is all.
    /// `generate.max_new_tokens` is the longest turn. `reward.kind = "environment"` takes the environment's grade.
    pub struct Environment {
        first kind: EnvironmentKind;
        /// How the model writes calls of tools.
        parser: ToolFormat = ToolFormat::default();
        /// Most turns of the model.
        max_turns: usize = 8, SOME;
        /// Longest conversation in tokens, prompt and observations included; without it, what the model has positions for.
        max_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// Most calls of tools, after which no further turn begins.
        max_tool_calls: Option<usize> = None, SOME_IF_GIVEN;
        /// Seconds after which no further turn begins.
        max_time: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Seconds that a reset, a step or the grading may take. A step or a grading that takes longer ends the rollout with a grade of 0.
        step_timeout: f64 = 30.0, POSITIVE;
        /// How often a rollout whose environment failed is played again in a fresh one, before `flow.on_lost_sample` decides.
        replays: u32 = 2;
        /// Environments that may work at the same time.
        workers: usize = 32, SOME;
    }
}

tagged! {
    /// The environment.
    pub enum EnvironmentKind {
        /// a question, a tool `calculator`, and a tool `complete_task` for the answer, which must be the ground truth.
        "calculator" => Calculator(NoKeys),
        /// a text game: a number is to be found, and every guess is told to be too low or too high.
        "game" => Game(Game),
        /// a question, a tool `search` over texts of a file, and a tool `complete_task` for the answer, which must be the ground truth.
        "search" => Search(Search),
        /// code is to be written: a tool `python` runs it in a sandbox, and the last turn must pass the tests of its prompt.
        "python" => Python(SandboxRule),
        /// what another process serves; docs/agents_elsewhere.md has the protocol.
        "http" => Http(Served),
        /// an agent that lives elsewhere, and asks this run as it would any OpenAI-compatible server (docs/agents_elsewhere.md).
        "agent" => Agent(Elsewhere),
    }
}

section! {
    /// Environments behind a URL.
    pub struct Served {
        /// Where everything is posted.
        url: String = String::new(), URL;
        /// The environment variable that holds a token, sent as `Authorization: Bearer …`. The token itself stands nowhere.
        token_env: Option<String> = None;
        /// Most retries of a failed request, within `step_timeout`.
        retries: u32 = RetryPolicy::DEFAULT.retries;
        /// Most requests at the same time.
        concurrency: usize = 64, SOME;
        last retry: RetryPauses;
    }
}

section! {
    /// A command, or an agent that listens.
    pub struct Elsewhere {
        /// A program and its arguments, started for every rollout.
        command: Vec<String> = Vec::new();
        /// In its place: where every rollout's task is posted.
        url: Option<String> = None;
        /// The model's name, as the agent sees it.
        model: String = "policy".to_owned(), GIVEN;
    }
}

section! {
    /// A number is to be found. Fewer guesses earn more.
    pub struct Game {
        /// The largest number that it may be; the smallest is 1.
        highest: u64 = 100, A_CHOICE;
    }
}

section! {
    /// Texts are ranked by BM25.
    pub struct Search {
        /// A file in which every line is a text, relative to where the command runs.
        corpus: PathBuf = PathBuf::new(), PATH_GIVEN;
        /// Texts that a search shows.
        results: usize = 3, SOME;
    }
}
