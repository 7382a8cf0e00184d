//! Settings of Python processes, as sections of a recipe.

use std::path::PathBuf;
use std::time::Duration;

use rollflow_net::URL;
use rollflow_settings::declare::section;
use rollflow_settings::params::Params;
use rollflow_settings::setting::{GIVEN, Limit, PATH_GIVEN, POSITIVE, SOME, SOME_IF_GIVEN};
use serde_json::{Value, json};

use super::{Command, PythonError, Workers};

const NAMES: Limit<Vec<String>> = Limit { text: "names, none empty", holds: |names| names.iter().all(|name| !name.is_empty()) };

section! {
    /// Processes of a Python interpreter.
    pub struct PythonProcesses {
        /// Interpreter: a path such as `.venv/bin/python`, or a name that is searched in `PATH`.
        python: String = "python3".to_owned(), GIVEN;
        /// Number of processes. Each loads the file, and calls functions that are not async one at
        /// a time.
        processes: usize = 1, SOME;
        /// Most calls in flight in a process if its functions are async.
        calls_in_flight: usize = 16, SOME;
        /// Memory limit of a process, in MiB. A call that needs more fails with a `MemoryError`.
        memory: Option<usize> = None, SOME_IF_GIVEN;
        /// Timeout for loading the file, in seconds.
        load_timeout: f64 = 120.0, POSITIVE;
    }
}

section! {
    /// A reward function in a Python file. docs/how_to/python.md has the signatures.
    pub struct PythonReward {
        /// Python file, relative to where the command runs, or the name of an installed module.
        file: PathBuf = PathBuf::new(), PATH_GIVEN;
        /// Function, or class whose instances are callable.
        function: String = "reward".to_owned(), GIVEN;
        /// Timeout of a call, in seconds. A process whose call takes longer is ended and replaced.
        timeout: f64 = 60.0, POSITIVE;
        last processes: PythonProcesses;
    }
}

section! {
    /// An environment or tools in a Python file. docs/how_to/python.md has the methods.
    pub struct PythonEnvironment {
        /// Python file, relative to where the command runs, or the name of an installed module.
        file: PathBuf = PathBuf::new(), PATH_GIVEN;
        /// Class, or function that makes an environment, called for every rollout.
        environment: Option<String> = None;
        /// Functions that the model may call, with type hints and docstrings.
        tools: Vec<String> = Vec::new(), NAMES;
        /// Function that grades a rollout, with a reward function's signature and the argument
        /// `environments`. Left out: the environment's `get_reward` or `grade`.
        reward_function: Option<String> = None;
        last processes: PythonProcesses;
    }
}

section! {
    /// An environment of the package verifiers, by name: its tasks, its programs and its scores.
    pub struct VerifiersEnvironment {
        /// Installed package, such as `gsm8k-v1`, or module that Python finds.
        name: String = String::new(), GIVEN;
        /// Program that plays an episode, by verifiers' name. Left out: the environment's own; else a
        /// chat in the process, or `null` if tasks have tools.
        harness: Option<String> = None;
        /// The environment's configuration, as verifiers' `[env]`: `taskset`, agents by their role,
        /// `timeout` and more.
        config: Params = Params::default();
        last processes: PythonProcesses;
    }
}

section! {
    /// Environments of an OpenEnv server.
    pub struct OpenEnvEnvironment {
        /// Address of the server.
        url: String = String::new(), URL;
        /// Timeout of one message, in seconds.
        timeout: f64 = 60.0, POSITIVE;
        last processes: PythonProcesses;
    }
}

impl PythonReward {
    /// Starts the processes. Waits until they have loaded the file.
    ///
    /// # Errors
    /// If the interpreter does not start, or the file does not load: the traceback.
    pub fn start(&self) -> Result<Workers, PythonError> {
        let name = format!("{}: {}", self.file.display(), self.function);
        self.processes.start(name, json!({ "serves": "reward", "file": self.file, "name": self.function }))
    }
}

impl PythonEnvironment {
    /// Returns true if it has a class or functions.
    pub fn names_something(&self) -> bool {
        self.environment.is_some() || !self.tools.is_empty()
    }

    /// Starts the processes. Waits until they have loaded the file.
    ///
    /// # Errors
    /// If the interpreter does not start, or the file does not load: the traceback.
    pub fn start(&self) -> Result<Workers, PythonError> {
        let names = self.environment.iter().chain(&self.tools).map(String::as_str).collect::<Vec<_>>();
        let loads = json!({
            "serves": "environment", "file": self.file, "name": self.environment, "tools": self.tools,
            "reward_function": self.reward_function,
        });
        self.processes.start(format!("{}: {}", self.file.display(), names.join(", ")), loads)
    }
}

impl VerifiersEnvironment {
    /// Starts the processes. Waits until they have loaded the environment.
    ///
    /// # Errors
    /// If the interpreter does not start, or verifiers does not load the environment: the traceback.
    pub fn start(&self) -> Result<Workers, PythonError> {
        let config = self.config.read::<Value>()?;
        let loads = json!({ "serves": "verifiers", "name": self.name, "config": config, "harness": self.harness });
        self.processes.start(format!("verifiers: {}", self.name), loads)
    }
}

impl OpenEnvEnvironment {
    /// Starts the processes. Waits until they have read the server's schema.
    ///
    /// # Errors
    /// If the interpreter does not start, or the server can't be reached.
    pub fn start(&self) -> Result<Workers, PythonError> {
        let loads = json!({ "serves": "openenv", "url": self.url, "timeout": self.timeout });
        self.processes.start(format!("openenv: {}", self.url), loads)
    }
}

impl PythonProcesses {
    fn start(&self, name: String, mut loads: Value) -> Result<Workers, PythonError> {
        loads["memory_mb"] = json!(self.memory);
        let load_timeout = Duration::try_from_secs_f64(self.load_timeout)?;
        let command = Command { python: self.python.clone(), name, loads, load_timeout };
        Workers::start(command, self.processes, self.calls_in_flight)
    }
}
