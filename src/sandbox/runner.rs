//! Runs code against tests, and caches the results.
//!
//! The process that runs the code never decides its result. Programs are compared here by their
//! output. Asserts and calls are checked by another sandboxed process, which receives plain data from
//! the first (`referee`).

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};

use super::referee::Referee;
use super::{CodeTests, Ended, Job, Sandbox, SandboxError};

/// Most cached results; at this number the cache is cleared.
const CAPACITY: usize = 1 << 16;

/// Test results of one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestResults {
    /// Number of tests that passed.
    pub passed: usize,
    /// Number of tests, at least 1.
    pub total: usize,
    /// Error of the first test that failed.
    pub complaint: Option<String>,
}

impl TestResults {
    /// Returns the share of tests that passed, from 0 to 1.
    pub fn share(&self) -> f64 {
        self.passed as f64 / self.total.max(1) as f64
    }

    /// Returns true if all tests passed.
    pub fn all(&self) -> bool {
        self.passed == self.total
    }
}

/// Cached results; none if the sandbox failed.
type Cached = Arc<OnceLock<Option<TestResults>>>;

/// Runs code against tests in a [`Sandbox`]. The same code with the same tests runs once.
pub struct TestRunner {
    sandbox: Sandbox,
    referee: Referee,
    results: Mutex<HashMap<[u64; 2], Cached>>,
    hashers: [RandomState; 2],
}

impl TestRunner {
    /// Runs in this sandbox, whose program must be Python. Its limits apply to all asserts of a task
    /// together, and to each pair of input and output.
    pub fn new(sandbox: Sandbox) -> Self {
        TestRunner {
            sandbox,
            referee: Referee::default(),
            results: Mutex::default(),
            hashers: [RandomState::new(), RandomState::new()],
        }
    }

    /// Returns the sandbox.
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Runs `code` against `tests`, or returns the cached results. Fails if the sandbox fails, never
    /// because of the code.
    pub fn run(&self, code: &str, tests: &CodeTests) -> Result<TestResults, SandboxError> {
        let key = [0, 1].map(|at| self.hashers[at].hash_one((code, tests)));
        let place = {
            let mut results = self.results();
            if results.len() >= CAPACITY {
                results.clear();
            }
            results.entry(key).or_default().clone()
        };
        let mut broken = None;
        let results = place.get_or_init(|| self.run_tests(code, tests).map_err(|error| broken = Some(error)).ok());
        match (results, broken) {
            (Some(results), _) => Ok(results.clone()),
            (None, Some(error)) => {
                self.results().remove(&key);
                Err(error)
            }
            // Another caller's run of the same tests failed.
            (None, None) => self.run_tests(code, tests),
        }
    }

    fn results(&self) -> MutexGuard<'_, HashMap<[u64; 2], Cached>> {
        self.results.lock()
    }

    fn run_tests(&self, code: &str, tests: &CodeTests) -> Result<TestResults, SandboxError> {
        match tests {
            CodeTests::Asserts(tests) => self.judged(code, tests.iter().map(|test| json!(test)).collect()),
            CodeTests::Calls { function, calls } => {
                let tests = calls.iter().map(|(arguments, expected)| json!([function, arguments, expected]));
                self.judged(code, tests.collect())
            }
            CodeTests::Pairs(tests) => self.pairs(code, tests),
        }
    }

    fn judged(&self, code: &str, tests: Vec<Value>) -> Result<TestResults, SandboxError> {
        let verdicts = self.referee.verdicts(&self.sandbox, code, &tests)?;
        let failed = verdicts.iter().find(|said| said.as_deref() != Some("passed"));
        Ok(TestResults {
            passed: verdicts.iter().filter(|said| said.as_deref() == Some("passed")).count(),
            total: tests.len(),
            complaint: failed.map(|said| said.clone().unwrap_or_else(|| "the test was not reached".to_owned())),
        })
    }

    fn pairs(&self, code: &str, tests: &[(String, String)]) -> Result<TestResults, SandboxError> {
        let mut results = TestResults { passed: 0, total: tests.len(), complaint: None };
        for (input, output) in tests {
            let ran = self.sandbox.run(&Job::quick_python(code).stdin(input.as_str()))?;
            let complaint = match ran.ended {
                Ended::Exited(0) if same(&ran.text(), output) => {
                    results.passed += 1;
                    continue;
                }
                Ended::Exited(0) => format!("it printed {:?} instead of {:?}", short(&ran.text()), short(output)),
                _ => format!("it {ran}"),
            };
            results.complaint.get_or_insert(complaint);
        }
        Ok(results)
    }
}

impl std::fmt::Debug for TestRunner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestRunner").field("sandbox", &self.sandbox).finish_non_exhaustive()
    }
}

/// Compares line by line, without white space at the ends of lines and of the text.
fn same(printed: &str, expected: &str) -> bool {
    let lines = |text: &str| text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
    lines(printed) == lines(expected)
}

fn short(text: &str) -> String {
    text.trim_end().chars().take(100).collect()
}
