//! Runs code against tests, and remembers what came of it.
//!
//! Standard input and output are compared out here, where the code can't reach. Asserts run beside it, in one process: it says what they gave with a
//! mark that it is told apart from everything else, and that is new each time. Leaving early, printing "passed" or patching `print` gains nothing;
//! code that redefines equality can still deceive an `assert`.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde_json::json;

use super::{CodeTests, Ended, Job, Limits, Sandbox, SandboxError};

/// Verdicts that are remembered; when there are so many, they are forgotten.
const REMEMBERED: usize = 1 << 16;
const DRIVER: &str = include_str!("driver.py");

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
    verdicts: Mutex<HashMap<[u64; 2], Remembered>>,
    hashers: [RandomState; 2],
}

impl CodeJudge {
    /// In this sandbox, whose program must be Python. Its limits are for all asserts of a task together, and for each pair of input and output.
    pub fn new(sandbox: Sandbox) -> Self {
        CodeJudge { sandbox, verdicts: Mutex::default(), hashers: [RandomState::new(), RandomState::new()] }
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
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, code: &str, tests: &CodeTests) -> Result<Verdict, SandboxError> {
        match tests {
            CodeTests::Asserts(tests) => self.asserts(code, tests),
            CodeTests::Pairs(tests) => self.pairs(code, tests),
        }
    }

    fn asserts(&self, code: &str, tests: &[String]) -> Result<Verdict, SandboxError> {
        let limits = self.sandbox.config().limits;
        let mark = [0, 1].map(|at| format!("{:016x}", RandomState::new().hash_one(at))).concat();
        // One that hangs leaves time for the others.
        let seconds = limits.wall.as_secs_f64() / (tests.len() + 2) as f64;
        // What JSON says of texts, numbers and lists, Python reads as the same.
        let told = json!([mark, seconds, code, tests]).to_string();
        // Room for what the driver has to say.
        let limits = Limits { output: limits.output + 512 * tests.len() as u64, ..limits };
        let ran = self.sandbox.run(&Job::quick_python(DRIVER).stdin(told).limits(limits))?;
        let printed = ran.text();
        let mut said: Vec<Option<&str>> = vec![None; tests.len()];
        for line in printed.lines().filter_map(|line| line.strip_prefix(&mark)?.strip_prefix(' ')) {
            if let Some((at, what)) = line.split_once(' ')
                && let Some(place) = at.parse().ok().and_then(|at: usize| said.get_mut(at))
            {
                *place = Some(what);
            }
        }
        let failed = said.iter().find(|said| **said != Some("passed"));
        Ok(Verdict {
            passed: said.iter().filter(|said| **said == Some("passed")).count(),
            total: tests.len(),
            complaint: failed.map(|said| said.map_or_else(|| format!("no test was reached: it {ran}"), str::to_owned)),
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
