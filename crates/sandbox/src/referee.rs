//! Runs tests against code that lives in another process.
//!
//! This process passes lines between two sandboxed processes. The *answer* runs the code and executes
//! single requests: call this function with these arguments. The *tests* run the test programs, hold
//! the expected values and decide the results. Only plain data goes from the answer to the tests, so
//! code can make claims about values and nothing else.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::live::{Event, Live};
use super::{Ended, Job, Limits, MARGIN, Sandbox, SandboxError};
use rollflow_util::deadline;

const ANSWER: &str = include_str!("answer.py");
const TESTS: &str = concat!(include_str!("values.py"), include_str!("tests.py"));
/// Most bytes of all results of an answer together.
const RESULTS: u64 = 8 << 20;
/// Lifetime of a process for tests. Each job runs in a fork of it if the isolation allows processes.
const AGE: Duration = Duration::from_secs(600);
/// Interval of checks, while an answer computes, whether its tests still wait.
const LOOK: Duration = Duration::from_millis(20);
/// Extra time of the tests beyond the answer's limit.
const GRACE: Duration = Duration::from_secs(10);

/// Failure of a test that had no time left.
pub(super) const NOT_REACHED: &str = "the test was not reached";
/// Beginning of the failure of a test that took too long, as `tests.py` reports it.
const TOO_LONG: &str = "TimeoutError: it took too long";

/// `Ok` for each test that passed, and the failure of each that did not.
pub(super) type Verdicts = Vec<Result<(), String>>;

/// Returns true if a test failed because its time was up. Code can claim that, and can take the time as well.
pub(super) fn is_overdue(verdict: &Result<(), String>) -> bool {
    let overdue = format!("it {}", Ended::Overdue);
    verdict.as_ref().is_err_and(|why| why == NOT_REACHED || why.starts_with(TOO_LONG) || why.starts_with(&overdue))
}

/// Idle processes for tests.
#[derive(Default)]
pub(super) struct Referee {
    idle: Mutex<Vec<Tests>>,
}

/// A process for tests. Each job begins with a secret that no answer has, so that a late reply of an
/// earlier job is rejected.
struct Tests {
    process: Live,
    secret: String,
}

impl Referee {
    /// Runs the tests for a caller that holds a [`Sandbox::slot`]. The answer has the time `wall`;
    /// tests that are not done shortly before `until` have failed.
    pub(super) fn verdicts(
        &self,
        sandbox: &Sandbox,
        code: &str,
        tests: &[Value],
        wall: Duration,
        until: Instant,
    ) -> Result<Verdicts, SandboxError> {
        let until = until.checked_sub(MARGIN / 2).unwrap_or(until).min(deadline(wall.saturating_add(GRACE)));
        if let Some(waiting) = self.take()
            && let Some(verdicts) = self.run_job(sandbox, waiting, code, tests, wall, until)?
        {
            return Ok(verdicts);
        }
        // An idle process ends after some time.
        let limits = sandbox.config().limits;
        // Its time limit covers all its jobs.
        let time = (AGE + GRACE * 2).saturating_add(limits.wall);
        let limits = Limits { wall: time, cpu: time, output: i64::MAX as u64, ..limits };
        let process = sandbox.start(&Job::quick_python(TESTS).limits(limits), None)?;
        let secret = [0, 1].map(|at| format!("{:016x}", RandomState::new().hash_one(at))).concat();
        process.send(secret.as_bytes());
        let verdicts = self.run_job(sandbox, Tests { process, secret }, code, tests, wall, until)?;
        verdicts.ok_or_else(|| SandboxError::Broken("the process for tests did not begin".to_owned()))
    }

    fn take(&self) -> Option<Tests> {
        let mut idle = self.idle.lock();
        idle.retain(|tests| tests.process.age() < AGE);
        idle.pop()
    }

    /// Runs one job. Returns none if the process for tests ended before its first line.
    fn run_job(
        &self,
        sandbox: &Sandbox,
        tests: Tests,
        code: &str,
        programs: &[Value],
        wall: Duration,
        until: Instant,
    ) -> Result<Option<Verdicts>, SandboxError> {
        let limits = sandbox.config().limits;
        let answer = Job::quick_python(ANSWER).limits(Limits { wall, output: limits.output.saturating_add(RESULTS), ..limits });
        // A request has one reply.
        let answer = sandbox.start(&answer, Some(1))?;
        tests.process.send(format!("{}{}", tests.secret, json!([wall.as_secs_f64(), code, programs])).as_bytes());
        let mut verdicts = vec![Err(NOT_REACHED.to_owned()); programs.len()];
        let (mut begun, mut next) = (false, None);
        loop {
            let event = next.take().unwrap_or_else(|| tests.process.next(until));
            match event {
                Event::Line(line) => match line.split_first() {
                    Some((b'c', request)) => {
                        begun = true;
                        answer.send(request);
                        match reply(&answer, &tests.process, until) {
                            Ok(reply) => tests.process.send(&reply?),
                            // The test stopped waiting and did something else.
                            Err(event) => next = Some(event),
                        }
                    }
                    Some((b'v', verdict)) => {
                        let verdict = String::from_utf8_lossy(verdict);
                        if let Some((at, said)) = verdict.split_once(' ')
                            && let Some(place) = at.parse().ok().and_then(|at: usize| verdicts.get_mut(at))
                        {
                            *place = if said == "passed" { Ok(()) } else { Err(said.to_owned()) };
                        }
                    }
                    // The job is done; the process waits for the next.
                    _ => {
                        let mut idle = self.idle.lock();
                        if idle.len() < sandbox.config().concurrency {
                            idle.push(tests);
                        }
                        return Ok(Some(verdicts));
                    }
                },
                Event::Ended(_) if !begun => return Ok(None),
                Event::Ended(Err(error)) => return Err(error),
                // Without forks, the end of the process is the end of its job.
                Event::Ended(Ok(_)) | Event::Nothing => return Ok(Some(verdicts)),
            }
        }
    }
}

/// Returns the answer's next line, or the event of the tests that came first.
fn reply(answer: &Live, tests: &Live, deadline: Instant) -> Result<Result<Vec<u8>, SandboxError>, Event> {
    loop {
        match answer.next(deadline.min(Instant::now() + LOOK)) {
            Event::Line(line) => return Ok(Ok(line)),
            Event::Ended(Ok(ran)) => return Ok(Ok(format!("!it {ran}").replace('\n', " ").into_bytes())),
            Event::Ended(Err(error)) => return Ok(Err(error)),
            Event::Nothing => match tests.next(Instant::now()) {
                Event::Nothing if Instant::now() < deadline => {}
                event => return Err(event),
            },
        }
    }
}
