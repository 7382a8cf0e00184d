//! `[environment]`: what answers the model, where a rollout has several turns.

use std::path::PathBuf;

use crate::env::ToolFormat;
use crate::net::{RetryPauses, RetryPolicy, URL};
use crate::python::{OpenEnvEnvironment, PythonEnvironment, PythonError, VerifiersEnvironment, Workers};
use crate::rollout::AgentLimits;
use crate::sandbox::SandboxRule;
use crate::settings::declare::{section, tagged};
use crate::settings::setting::{GIVEN, Limit, PATH_GIVEN, SOME};

const A_CHOICE: Limit<u64> = Limit { text: "at least 2", holds: |value| *value >= 2 };

section! {
    /// Multi-turn rollouts: the model and its environment take turns until the task is done. Left
    /// out, rollouts have one turn. `generate.max_new_tokens` limits each turn. `reward.kind =
    /// "environment"` takes the grade of the environment.
    pub struct Environment {
        first kind: EnvironmentKind;
        /// Format of tool calls.
        parser: ToolFormat = ToolFormat::default();
        last limits: AgentLimits;
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
        /// a class or functions in a Python file, called in processes of your Python
        /// (docs/how_to/python.md).
        "python" => Python(PythonEnvironment),
        /// an environment of the package verifiers (docs/how_to/hubs.md).
        "verifiers" => Verifiers(VerifiersEnvironment),
        /// the environments of an OpenEnv server (docs/how_to/hubs.md).
        "openenv" => OpenEnv(OpenEnvEnvironment),
        /// a programming task: a tool `python` runs code in a sandbox, and the last turn must pass
        /// the tests of its prompt.
        "code" => Code(SandboxRule),
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

impl EnvironmentKind {
    /// Starts the Python processes of the environment; none if it has none.
    pub fn start_python(&self) -> Option<Result<Workers, PythonError>> {
        match self {
            EnvironmentKind::Python(of) if of.names_something() => Some(of.start()),
            EnvironmentKind::Verifiers(of) => Some(of.start()),
            EnvironmentKind::OpenEnv(of) => Some(of.start()),
            _ => None,
        }
    }

    /// Returns true if it may bring prompts: `task.kind = "environment"`.
    pub fn may_have_tasks(&self) -> bool {
        matches!(self, EnvironmentKind::Python(_) | EnvironmentKind::Verifiers(_))
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
