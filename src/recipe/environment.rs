//! `[environment]`: what answers the model, where a rollout has several turns.

use std::path::PathBuf;

use crate::env::ToolFormat;
use crate::net::RetryPolicy;
use crate::sandbox::SandboxRule;
use crate::settings::declare::{section, tagged};
use crate::settings::remote::{RetryPauses, URL};
use crate::settings::setting::{GIVEN, Limit, PATH_GIVEN, POSITIVE, POSITIVE_IF_GIVEN, SOME, SOME_IF_GIVEN};

const A_CHOICE: Limit<u64> = Limit { text: "at least 2", holds: |value| *value >= 2 };

section! {
    /// Multi-turn rollouts: the model and its environment take turns until the task is done. Left
    /// out, rollouts have one turn. `generate.max_new_tokens` limits each turn. `reward.kind =
    /// "environment"` takes the grade of the environment.
    pub struct Environment {
        first kind: EnvironmentKind;
        /// Format of tool calls.
        parser: ToolFormat = ToolFormat::default();
        /// Most turns of the model.
        max_turns: usize = 8, SOME;
        /// Longest rollout in tokens, prompt and observations included. Left out: what the model
        /// and its server read.
        max_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// Number of tool calls after which no further turn begins.
        max_tool_calls: Option<usize> = None, SOME_IF_GIVEN;
        /// Seconds after which no further turn begins.
        max_time: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Timeout of a reset, a step or the grading, in seconds. A step or a grading that exceeds
        /// it ends the rollout with a grade of 0.
        step_timeout: f64 = 30.0, POSITIVE;
        /// Retries of a rollout whose environment failed, each in a fresh environment, before
        /// `flow.on_lost_sample` decides.
        replays: u32 = 2;
        /// Environments that work in parallel.
        workers: usize = 32, SOME;
    }
}

tagged! {
    /// Environment.
    pub enum EnvironmentKind {
        /// a question, a tool `calculator`, and a tool `complete_task` for the answer, which must
        /// equal the reference answer.
        "calculator" => Calculator,
        /// a text game: guess a number, and learn after each guess that it is too low or too high.
        "game" => Game {
            /// Largest number; the smallest is 1.
            highest: u64 = 100, A_CHOICE;
        },
        /// a question, a tool `search` over the texts of a file, and a tool `complete_task` for the
        /// answer, which must equal the reference answer.
        "search" => Search {
            /// File with a text per line, relative to where the command runs.
            corpus: PathBuf = PathBuf::new(), PATH_GIVEN;
            /// Texts per search result.
            results: usize = 3, SOME;
        },
        /// a programming task: a tool `python` runs code in a sandbox, and the last turn must pass
        /// the tests of its prompt.
        "python" => Python(SandboxRule),
        /// an environment of another process; docs/reference/protocols.md has the protocol.
        "http" => Http(Served),
        /// an agent of another process, which uses this run as an OpenAI-compatible server
        /// (docs/reference/protocols.md).
        "agent" => Agent {
            /// Program and arguments, started for every rollout.
            command: Vec<String> = Vec::new();
            /// Address that every rollout's task is posted to, instead of `command`.
            url: Option<String> = None;
            /// Model name that the agent uses.
            model: String = "policy".to_owned(), GIVEN;
        },
    }
}

section! {
    /// Environments with a URL.
    pub struct Served {
        /// Address that every request is posted to.
        url: String = String::new(), URL;
        /// Environment variable with a token, sent as `Authorization: Bearer …`. The token itself
        /// is never written.
        token_env: Option<String> = None;
        /// Most retries of a failed request, within `step_timeout`.
        retries: u32 = RetryPolicy::DEFAULT.retries;
        /// Most requests in flight.
        concurrency: usize = 64, SOME;
        last retry: RetryPauses;
    }
}
