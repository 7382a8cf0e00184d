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
use super::{Job, Limits, Sandbox, SandboxError};
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

/// `Ok` for each test that passed, and the failure of each that did not.
pub(super) type Verdicts = Vec<Result<(), String>>;

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
    /// Runs the tests. Returns the failure of each that did not pass.
    pub(super) fn verdicts(&self, sandbox: &Sandbox, code: &str, tests: &[Value]) -> Result<Verdicts, SandboxError> {
        let _slot = sandbox.slot();
        if let Some(waiting) = self.take()
            && let Some(verdicts) = self.run_job(sandbox, waiting, code, tests)?
        {
            return Ok(verdicts);
        }
        // An idle process ends after some time.
        let limits = sandbox.config().limits;
        // Its time limit covers all its jobs.
        let time = (AGE + GRACE * 2).saturating_add(limits.wall);
        let limits = Limits { wall: time, cpu: time, output: i64::MAX as u64, ..limits };
        let process = sandbox.start(&Job::quick_python(TESTS).limits(limits))?;
        let secret = [0, 1].map(|at| format!("{:016x}", RandomState::new().hash_one(at))).concat();
        process.send(secret.as_bytes());
        let verdicts = self.run_job(sandbox, Tests { process, secret }, code, tests)?;
        verdicts.ok_or_else(|| SandboxError::Broken("the process for tests did not begin".to_owned()))
    }

    fn take(&self) -> Option<Tests> {
        let mut idle = self.idle.lock();
        idle.retain(|tests| tests.process.age() < AGE);
        idle.pop()
    }

    /// Runs one job. Returns none if the process for tests ended before its first line.
    fn run_job(&self, sandbox: &Sandbox, tests: Tests, code: &str, programs: &[Value]) -> Result<Option<Verdicts>, SandboxError> {
        let limits = sandbox.config().limits;
        let answer = Job::quick_python(ANSWER).limits(Limits { output: limits.output.saturating_add(RESULTS), ..limits });
        let answer = sandbox.start(&answer)?;
        // A test that hangs leaves time for the others.
        let seconds = limits.wall.as_secs_f64() / (programs.len() + 2) as f64;
        tests.process.send(format!("{}{}", tests.secret, json!([seconds, code, programs])).as_bytes());
        let deadline = deadline(limits.wall.saturating_add(GRACE));
        let mut verdicts = vec![Err("the test was not reached".to_owned()); programs.len()];
        let (mut begun, mut next) = (false, None);
        loop {
            let event = next.take().unwrap_or_else(|| tests.process.next(deadline));
            match event {
                Event::Line(line) => match line.split_first() {
                    Some((b'c', request)) => {
                        begun = true;
                        answer.send(request);
                        match reply(&answer, &tests.process, deadline) {
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
