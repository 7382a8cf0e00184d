//! Runs code against tests, and remembers what came of it.
//!
//! No verdict is made in the process that runs the code. Programs are compared here by what they print. Asserts and calls are judged by another
//! sandboxed process, which receives plain data from the code's (`referee`).

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};

use super::referee::Referee;
use super::{CodeTests, Ended, Job, Sandbox, SandboxError};

/// Verdicts that are remembered; when there are so many, they are forgotten.
const REMEMBERED: usize = 1 << 16;

/// How code did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Tests that it passed.
    pub passed: usize,
    /// Tests that there were, one at least.
    pub total: usize,
    /// What went wrong with the first that failed.
    pub complaint: Option<String>,
}

impl Verdict {
    /// Passed tests of all, from 0 to 1.
    pub fn share(&self) -> f64 {
        self.passed as f64 / self.total.max(1) as f64
    }

    /// Whether it passed all.
    pub fn all(&self) -> bool {
        self.passed == self.total
    }
}

/// None where the sandbox broke.
type Remembered = Arc<OnceLock<Option<Verdict>>>;

/// Judges code by tests, in a [`Sandbox`]. The same code with the same tests is run once.
pub struct CodeJudge {
    sandbox: Sandbox,
    referee: Referee,
    verdicts: Mutex<HashMap<[u64; 2], Remembered>>,
    hashers: [RandomState; 2],
}

impl CodeJudge {
    /// In this sandbox, whose program must be Python. Its limits are for all asserts of a task together, and for each pair of input and output.
    pub fn new(sandbox: Sandbox) -> Self {
        CodeJudge {
            sandbox,
            referee: Referee::default(),
            verdicts: Mutex::default(),
            hashers: [RandomState::new(), RandomState::new()],
        }
    }

    /// Where code is run.
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Runs `code` against `tests`, unless that was done before. Fails where the sandbox does, never because of the code.
    pub fn judge(&self, code: &str, tests: &CodeTests) -> Result<Verdict, SandboxError> {
        let key = [0, 1].map(|at| self.hashers[at].hash_one((code, tests)));
        let place = {
            let mut verdicts = self.verdicts();
            if verdicts.len() >= REMEMBERED {
                verdicts.clear();
            }
            verdicts.entry(key).or_default().clone()
        };
        let mut broken = None;
        let verdict = place.get_or_init(|| self.run(code, tests).map_err(|error| broken = Some(error)).ok());
        match (verdict, broken) {
            (Some(verdict), _) => Ok(verdict.clone()),
            (None, Some(error)) => {
                self.verdicts().remove(&key);
                Err(error)
            }
            // Whoever asked for the same meanwhile has waited for nothing, and tries by himself.
            (None, None) => self.run(code, tests),
        }
    }

    fn verdicts(&self) -> MutexGuard<'_, HashMap<[u64; 2], Remembered>> {
        self.verdicts.lock()
    }

    fn run(&self, code: &str, tests: &CodeTests) -> Result<Verdict, SandboxError> {
        match tests {
            CodeTests::Asserts(tests) => self.judged(code, tests.iter().map(|test| json!(test)).collect()),
            CodeTests::Calls { function, calls } => {
                let tests = calls.iter().map(|(arguments, expected)| json!([function, arguments, expected]));
                self.judged(code, tests.collect())
            }
            CodeTests::Pairs(tests) => self.pairs(code, tests),
        }
    }

    fn judged(&self, code: &str, tests: Vec<Value>) -> Result<Verdict, SandboxError> {
        let verdicts = self.referee.verdicts(&self.sandbox, code, &tests)?;
        let failed = verdicts.iter().find(|said| said.as_deref() != Some("passed"));
        Ok(Verdict {
            passed: verdicts.iter().filter(|said| said.as_deref() == Some("passed")).count(),
            total: tests.len(),
            complaint: failed.map(|said| said.clone().unwrap_or_else(|| "the test was not reached".to_owned())),
        })
    }

    fn pairs(&self, code: &str, tests: &[(String, String)]) -> Result<Verdict, SandboxError> {
        let mut verdict = Verdict { passed: 0, total: tests.len(), complaint: None };
        for (input, output) in tests {
            let ran = self.sandbox.run(&Job::quick_python(code).stdin(input.as_str()))?;
            let complaint = match ran.ended {
                Ended::Exited(0) if same(&ran.text(), output) => {
                    verdict.passed += 1;
                    continue;
                }
                Ended::Exited(0) => format!("it printed {:?} in the place of {:?}", short(&ran.text()), short(output)),
                _ => format!("it {ran}"),
            };
            verdict.complaint.get_or_insert(complaint);
        }
        Ok(verdict)
    }
}

impl std::fmt::Debug for CodeJudge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CodeJudge").field("sandbox", &self.sandbox).finish_non_exhaustive()
    }
}

/// Line by line, whatever space is at the ends of lines and after the last.
fn same(printed: &str, expected: &str) -> bool {
    let lines = |text: &str| text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
    lines(printed) == lines(expected)
}

fn short(text: &str) -> String {
    text.trim_end().chars().take(100).collect()
}
