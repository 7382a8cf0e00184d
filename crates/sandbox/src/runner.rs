//! Runs code against tests, and caches the results.
//!
//! The process that runs the code never decides its result. Programs are compared here by their
//! output. Asserts and calls are checked by another sandboxed process, which receives plain data from
//! the first (`referee`).

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use super::referee::{NOT_REACHED, Referee, Verdicts, is_overdue};
use super::{CodeTests, Ended, Job, Limits, Sandbox, SandboxError, left};

/// Most tests whose results are cached; at this number the cache is cleared.
const CAPACITY: usize = 1 << 18;

/// Results of a program with its tests; none if the sandbox failed.
type Cached = Arc<OnceLock<Option<Verdicts>>>;

/// Processes for tests, and results by the hash of code and tests.
#[derive(Default)]
pub(super) struct Results {
    referee: Referee,
    known: Mutex<Known>,
    hashers: [RandomState; 2],
}

#[derive(Default)]
struct Known {
    results: HashMap<[u64; 2], Cached>,
    /// Number of tests of all results.
    tests: usize,
}

impl Known {
    /// Returns the place for the results of `tests` tests.
    fn place(&mut self, key: [u64; 2], tests: usize) -> Cached {
        if self.tests >= CAPACITY {
            *self = Known::default();
        }
        if !self.results.contains_key(&key) {
            self.tests += tests;
        }
        self.results.entry(key).or_default().clone()
    }

    fn remove(&mut self, key: [u64; 2], tests: usize) {
        if self.results.remove(&key).is_some() {
            self.tests -= tests;
        }
    }
}

impl Sandbox {
    /// Runs `code` against the tests of a task, or returns the cached results: for each test, `Ok` or
    /// its failure. The same code with the same tests runs once. Fails if the value holds no tests or
    /// the sandbox fails, never because of the code.
    ///
    /// The program must be Python. The limits apply to all asserts of a task together, and to each
    /// pair of input and output, whose expected output adds to the limit on output.
    /// docs/how_to/sandbox.md lists the forms of tests.
    pub fn test(&self, code: &str, tests: &Value) -> Result<Vec<Result<(), String>>, SandboxError> {
        self.run_tests(code, &CodeTests::from_json(tests)?, rollflow_util::deadline(Duration::MAX))
    }

    /// Runs like [`Sandbox::test`], tests that were read before, until `deadline`. Tests that are not
    /// done by then have failed, and such results are not cached. Fails if other programs took the time.
    pub fn run_tests(&self, code: &str, tests: &CodeTests, deadline: Instant) -> Result<Verdicts, SandboxError> {
        let Results { known, hashers, .. } = &self.0.results;
        let key = [0, 1].map(|at| hashers[at].hash_one((code, tests)));
        let place = known.lock().place(key, tests.len());
        let (mut broken, mut cut) = (None, false);
        let results = place.get_or_init(|| match self.run_uncached(code, tests, deadline) {
            Ok((verdicts, cut_off)) => {
                cut = cut_off;
                Some(verdicts)
            }
            Err(error) => {
                broken = Some(error);
                None
            }
        });
        if cut || broken.is_some() {
            known.lock().remove(key, tests.len());
        }
        match (results, broken) {
            (Some(results), _) => Ok(results.clone()),
            (None, Some(error)) => Err(error),
            // Another caller's run of the same tests failed.
            (None, None) => self.run_uncached(code, tests, deadline).map(|(verdicts, _)| verdicts),
        }
    }

    /// Returns the results, and true if the deadline decided some of them.
    fn run_uncached(&self, code: &str, tests: &CodeTests, deadline: Instant) -> Result<(Verdicts, bool), SandboxError> {
        let (slot, limit) = (self.slot(deadline)?, self.0.config.limits.wall);
        let (verdicts, cut) = match tests {
            CodeTests::Judged(tests) => {
                let verdicts = self.0.results.referee.verdicts(self, code, tests, limit.min(slot.time), deadline)?;
                let overdue = verdicts.iter().any(is_overdue);
                (verdicts, overdue && slot.time < limit)
            }
            CodeTests::Pairs(tests) => self.pairs(code, tests, deadline)?,
        };
        slot.check(cut)?;
        Ok((verdicts, cut))
    }

    /// Compares the output of a program with the expected one for each input. Returns true if the
    /// deadline decided a result.
    fn pairs(&self, code: &str, tests: &[(String, String)], deadline: Instant) -> Result<(Verdicts, bool), SandboxError> {
        let limits = self.0.config.limits;
        // A pair that hangs takes half of what the shares of later ones leave, the last one all.
        let share = left(deadline).div_f64(2.0 * (tests.len() + 2) as f64);
        let mut cut = false;
        let result = |(at, (input, output)): (usize, &(String, String))| {
            let (left, later) = (left(deadline), tests.len() - at - 1);
            if left.is_zero() {
                cut = true;
                return Ok(Err(NOT_REACHED.to_owned()));
            }
            let most = left.saturating_sub(share.mul_f64(later as f64)) / if later > 0 { 2 } else { 1 };
            let wall = limits.wall.min(share.max(most)).min(left);
            let limits = Limits { wall, output: limits.output.saturating_add(2 * output.len() as u64), ..limits };
            let ran = self.run_in_slot(&Job::quick_python(code).stdin(input.as_str()).limits(limits))?;
            cut |= ran.ended == Ended::Overdue && wall < self.0.config.limits.wall;
            Ok(match ran.ended {
                Ended::Exited(0) if same(&ran.text(), output) => Ok(()),
                Ended::Exited(0) => Err(format!("it printed {:?} instead of {:?}", short(&ran.text()), short(output))),
                _ => Err(format!("it {ran}")),
            })
        };
        let verdicts = tests.iter().enumerate().map(result).collect::<Result<_, SandboxError>>()?;
        Ok((verdicts, cut))
    }
}

/// Compares line by line, without white space at the ends of lines and of the text.
fn same(printed: &str, expected: &str) -> bool {
    printed.trim_end().lines().map(str::trim_end).eq(expected.trim_end().lines().map(str::trim_end))
}

fn short(text: &str) -> String {
    text.trim_end().chars().take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_bounded_by_the_tests_of_its_results() {
        let mut known = Known::default();
        let first = known.place([0, 0], 2);
        assert!(Arc::ptr_eq(&first, &known.place([0, 0], 2)));
        known.remove([0, 0], 2);
        assert_eq!((known.results.len(), known.tests), (0, 0));
        known.place([1, 1], CAPACITY);
        known.place([2, 2], 3);
        assert_eq!((known.results.len(), known.tests), (1, 3));
    }
}
