//! Law F3: a failing stage cancels its siblings; all are joined; the root cause comes first, every
//! other error after it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::flow::{
    AsyncIo, AsyncStage, Ended, Flow, Io, RunError, Sink, Source, Stage, StageError, StageFailure, Until, WeightsRx, Window,
    from_iter, map, map_async, try_map, weights,
};
use rollflow::train::TrainError;

fn failures(result: Result<rollflow::flow::Report, RunError>) -> Vec<StageFailure> {
    match result {
        Err(RunError::Failed { failures, report }) => {
            assert_eq!(report.ended, Ended::Failed);
            assert!(report.edges.iter().all(|edge| edge.credit_out == 0), "all credit came back");
            failures
        }
        other => panic!("expected a failed run, got {other:?}"),
    }
}

fn texts(failures: &[StageFailure]) -> Vec<String> {
    failures.iter().map(ToString::to_string).collect()
}

#[derive(Debug, thiserror::Error)]
#[error("the reward of sample {0} is not finite")]
struct NotFinite(u64);

#[test]
fn a_failing_stage_ends_the_run_and_is_named() {
    let mut flow = Flow::new("fails");
    let numbers = flow.source("numbers", from_iter(0u64..));
    let out = flow.stage("reward", numbers, try_map(|n: u64| if n == 40 { Err(NotFinite(n).into()) } else { Ok(n) }));
    flow.sink("sink", out, |_: u64| {});
    let failures = failures(flow.run(Until::finished()));
    assert_eq!(texts(&failures), [r#"stage "reward" failed: the reward of sample 40 is not finite"#]);
    assert!(!failures[0].panicked);
    let error = &failures[0].cause;
    assert_eq!(error.downcast_ref::<NotFinite>().unwrap().0, 40);
}

/// Errors that contain the text of their source, as most of the library's do, and one that does not.
#[test]
fn each_cause_of_a_failure_is_printed_once() {
    #[derive(Debug, thiserror::Error)]
    #[error("saving step 3")]
    struct Saving(#[source] TrainError);
    fn disk() -> TrainError {
        TrainError::io(Path::new("model"))(std::io::Error::other("the disk is full"))
    }
    let [failed, within] = [|| StageError::from(disk()), || StageError::from(Saving(disk()))].map(|error| {
        let mut flow = Flow::new("causes");
        let numbers = flow.source("numbers", from_iter(0u64..));
        let out = flow.stage("save", numbers, try_map(move |_: u64| Err::<u64, _>(error())));
        flow.sink("sink", out, |_: u64| {});
        failures(flow.run(Until::finished()))[0].to_string()
    });
    assert_eq!(failed.matches("the disk is full").count(), 1, "{failed}");
    assert!(within.starts_with("stage \"save\" failed: saving step 3: ") && within.matches("full").count() == 1, "{within}");
}

#[test]
fn a_panicking_stage_ends_the_run_and_is_named_on_threads_and_tasks() {
    for on_tokio in [false, true] {
        let mut flow = Flow::new("panics");
        let numbers = flow.source("numbers", from_iter(0u64..));
        let boom = |n: u64| if n == 40 { panic!("no {n}") } else { n };
        let out = match on_tokio {
            false => flow.stage("boom", numbers, map(boom).workers(3)),
            true => flow.stage("boom", numbers, map_async(move |n: u64| async move { Ok(boom(n)) }).workers(3)),
        };
        flow.sink("sink", out, |_: u64| {});
        let failures = failures(flow.run(Until::finished()));
        assert_eq!((failures.len(), failures[0].stage.as_str()), (1, "boom"));
        assert!(failures[0].panicked && failures[0].cause.to_string() == "no 40", "{failures:?}");
    }
}

#[test]
fn sources_and_sinks_fail_like_stages() {
    struct Empty;
    impl Source for Empty {
        type Out = u64;
        fn next(&mut self) -> Result<Option<u64>, StageError> {
            Err(StageError::new("the file is gone"))
        }
    }
    let mut flow = Flow::new("source");
    let numbers = flow.source("file", Empty);
    flow.sink("sink", numbers, |_: u64| {});
    assert_eq!(texts(&failures(flow.run(Until::finished()))), [r#"stage "file" failed: the file is gone"#]);

    let mut flow = Flow::new("sink");
    let numbers = flow.source("numbers", from_iter(0u64..).with(|spec| spec.window(Window::new(1))));
    flow.sink("disk", numbers, |_: u64| Err(StageError::new("the disk is full")));
    assert_eq!(texts(&failures(flow.run(Until::finished()))), [r#"stage "disk" failed: the disk is full"#]);
}

/// Fails on its own when its input ends: what a stage does that needs what another one should have
/// brought.
struct FailsAfterwards;

impl Stage for FailsAfterwards {
    type In = u64;
    type Out = u64;
    fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
        while io.recv()?.is_some() {}
        Err(StageError::new("nothing to save"))
    }
}

struct FailsAfterwardsToo;

impl AsyncStage for FailsAfterwardsToo {
    type In = u64;
    type Out = u64;
    async fn run(&mut self, io: &mut AsyncIo<u64, u64>) -> Result<(), StageError> {
        while io.recv().await?.is_some() {}
        panic!("nothing at all");
    }
}

struct NeverFlushes;

impl Sink for NeverFlushes {
    type In = u64;
    fn accept(&mut self, _: u64) -> Result<(), StageError> {
        Ok(())
    }
    fn finish(&mut self) -> Result<(), StageError> {
        Err(StageError::new("not flushed"))
    }
}

#[test]
fn the_root_cause_comes_first_and_every_other_error_after_it() {
    for _ in 0..50 {
        let mut flow = Flow::new("several");
        let numbers = flow.source("numbers", from_iter(0u64..));
        let bad = flow.stage("root", numbers, try_map(|n: u64| if n == 20 { Err(NotFinite(n).into()) } else { Ok(n) }));
        let mut branches = flow.tee("tee", bad, 2).into_iter();
        let first = flow.stage("first", branches.next().unwrap(), FailsAfterwards);
        let second = flow.stage("second", branches.next().unwrap(), FailsAfterwardsToo);
        let both = flow.merge("both", vec![first, second]);
        flow.sink("sink", both, NeverFlushes);
        let failures = failures(flow.run(Until::finished()));
        let mut others = texts(&failures);
        assert_eq!(others.remove(0), r#"stage "root" failed: the reward of sample 20 is not finite"#);
        others.sort();
        let afterwards = [
            r#"stage "first" failed: nothing to save"#,
            r#"stage "second" panicked: nothing at all"#,
            r#"stage "sink" failed: not flushed"#,
        ];
        assert_eq!(others, afterwards);
    }
}

#[test]
fn a_failed_run_says_the_root_cause_in_its_first_line() {
    let mut flow = Flow::new("message");
    let numbers = flow.source("numbers", from_iter(0u64..));
    let bad = flow.stage("root", numbers, map(|n: u64| if n > 3 { panic!("too much") } else { n }));
    flow.sink("sink", bad, NeverFlushes);
    let error = flow.run(Until::finished()).unwrap_err();
    assert_eq!(error.to_string(), "stage \"root\" panicked: too much\nafterwards: stage \"sink\" failed: not flushed");
}

#[test]
fn a_stage_that_fails_while_it_is_dropped_is_heard() {
    struct Fragile;
    impl Drop for Fragile {
        fn drop(&mut self) {
            panic!("dropped badly");
        }
    }
    let mut flow = Flow::new("drop");
    let numbers = flow.source("numbers", from_iter(0..10u64));
    let fragile = Fragile;
    let same = flow.stage(
        "fragile",
        numbers,
        map(move |n: u64| {
            let _keep = &fragile;
            n
        }),
    );
    flow.sink("sink", same, |_: u64| {});
    assert_eq!(texts(&failures(flow.run(Until::finished()))), [r#"stage "fragile" panicked: dropped badly"#]);
}

/// Whoever holds this is alive.
#[derive(Clone)]
struct Alive(#[expect(dead_code, reason = "counts its holders")] Arc<()>);

#[test]
fn nothing_outlives_the_run() {
    let alive = Arc::new(());
    let names = Arc::new(Mutex::new(Vec::new()));
    for fail in [false, true] {
        let mut flow = Flow::new("scope");
        let (one, two, three) = (Alive(Arc::clone(&alive)), Alive(Arc::clone(&alive)), Alive(Arc::clone(&alive)));
        let numbers = flow.source("numbers", from_iter(0..500u64));
        let thread_names = Arc::clone(&names);
        let on_thread = move |n: u64| {
            let _held = &one;
            thread_names.lock().unwrap().push(std::thread::current().name().unwrap_or("?").to_owned());
            if fail && n == 100 { Err(StageError::new("enough")) } else { Ok(n) }
        };
        let a = flow.stage("on-thread", numbers, try_map(on_thread).workers(2));
        let on_task = move |n: u64| {
            let held = two.clone();
            async move {
                tokio::task::yield_now().await;
                drop(held);
                Ok(n)
            }
        };
        let b = flow.stage("on-task", a, map_async(on_task).workers(4));
        flow.sink("sink", b, move |_: u64| {
            let _held = &three;
        });
        assert_eq!(flow.run(Until::finished()).is_err(), fail);
        assert_eq!(Arc::strong_count(&alive), 1, "stages, closures and messages are gone when run returns");
    }
    let mut names = Arc::into_inner(names).unwrap().into_inner().unwrap();
    names.sort();
    names.dedup();
    assert!(names.iter().all(|name| name.starts_with("on-thread")), "threads bear their stage's name: {names:?}");
}

/// A graph whose source is admitted twice and no more, unless someone raises its window.
fn admitted_twice(window: &Window) -> Flow {
    let mut flow = Flow::new("twice");
    let numbers = flow.source("numbers", from_iter(0..4u64).with(|spec| spec.window(window.clone())));
    let doubled = flow.stage("double", numbers, map_async(async |n: u64| Ok(2 * n)));
    flow.sink("sink", doubled, |_: u64| {});
    flow
}

/// Law F7.
#[test]
fn a_run_in_which_no_stage_can_go_on_ends_and_says_what_each_waits_for() {
    let window = Window::new(2).raised_by("the test");
    let mut flow = admitted_twice(&window);
    let error = flow.stall_timeout(Duration::ZERO).run(Until::finished()).unwrap_err();
    for part in [
        "no stage can make progress",
        "\"numbers\" waits for credit: its window has admitted 2 of 2 items, and nothing raises it (the test does)",
        "\"double\" waits for input from numbers",
        "\"sink\" waits for input from double",
        "Flow::stall_timeout",
    ] {
        assert!(error.to_string().contains(part), "{part} is missing: {error}");
    }
    let report = error.report().unwrap();
    assert_eq!((report.ended, report.stage("sink").unwrap().items_in), (Ended::Failed, 2));
}

#[test]
fn a_window_that_is_raised_from_outside_is_waited_for() {
    let window = Window::new(2);
    let mut flow = admitted_twice(&window);
    let raiser = std::thread::spawn(move || {
        while window.admitted() < 2 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(50));
        window.raise(3);
    });
    flow.stall_timeout(Duration::MAX).run(Until::finished()).unwrap();
    raiser.join().unwrap();
}

/// Law F7: a stage that is held from outside, such as a trainer that is paused, has not stalled; a drain ends its wait (F5).
#[test]
fn a_stage_that_is_held_from_outside_is_no_stall_and_a_drain_ends_the_wait() {
    struct Held(Option<tokio::sync::oneshot::Receiver<()>>);
    impl Stage for Held {
        type In = u64;
        type Out = u64;
        fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
            let free = self.0.take().unwrap();
            io.hold(async { drop(free.await) });
            while let Some(number) = io.recv()? {
                io.send(number)?;
            }
            Ok(())
        }
    }
    for drains in [false, true] {
        let (release, free) = tokio::sync::oneshot::channel();
        let mut flow = Flow::new("held");
        let numbers = flow.source("numbers", from_iter(0..4u64));
        let held = flow.stage("held", numbers, Held(Some(free)));
        flow.sink("sink", held, |_: u64| {});
        let control = flow.handle();
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            if drains {
                control.drain();
                return Some(release);
            }
            release.send(()).unwrap();
            None
        });
        let report = flow.stall_timeout(Duration::ZERO).run(Until::finished()).unwrap();
        assert_eq!((report.ended == Ended::Drained, report.stage("sink").unwrap().items_in), (drains, 4));
        drop(other.join().unwrap());
    }
}

/// Law F5: the weights that it waits for never come, and a drain wakes nobody who waits for
/// weights.
#[test]
fn a_drain_ends_a_run_in_which_no_stage_can_go_on() {
    struct Patient(WeightsRx<u64>);
    impl Stage for Patient {
        type In = u64;
        type Out = u64;
        fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
            io.wait_weights(&mut self.0, 1).map(drop)
        }
    }
    let (_publisher, published) = weights::<u64>();
    let mut flow = Flow::new("patient");
    let numbers = flow.source("numbers", from_iter(0u64..));
    let waited = flow.stage("patient", numbers, Patient(published));
    flow.sink("sink", waited, |_: u64| {});
    flow.handle().drain();
    let report = flow.stall_timeout(Duration::ZERO).run(Until::finished()).unwrap();
    assert_eq!(report.ended, Ended::Drained);
}

/// Raises a window for every item, but only when a time has passed since it came.
struct Timed {
    window: Window,
    /// Whether it waits for the next item meanwhile, or for the time alone.
    beside: bool,
}

impl AsyncStage for Timed {
    type In = u64;
    type Out = u64;

    async fn run(&mut self, io: &mut AsyncIo<u64, u64>) -> Result<(), StageError> {
        while let Some(n) = io.recv().await? {
            let time = tokio::time::sleep(Duration::from_millis(20));
            if self.beside {
                let mut time = std::pin::pin!(time);
                let mut next = std::pin::pin!(io.recv());
                let early = tokio::select! {
                    early = &mut next => Some(early?),
                    () = &mut time => None,
                };
                assert_eq!(early, None, "nothing is admitted before the time is over");
                self.window.raise(1);
                // Nothing is lost: what came next is waited for to its end.
                if next.await?.is_some() {
                    self.window.raise(1);
                }
            } else {
                time.await;
                self.window.raise(1);
            }
            io.send(n).await?;
        }
        Ok(())
    }
}

/// Law F7: what awaits a timer is not stalled, alone or beside a receive.
#[test]
fn a_task_that_awaits_a_timer_makes_progress() {
    for beside in [false, true] {
        let window = Window::new(1);
        let mut flow = Flow::new("timed");
        let numbers = flow.source("numbers", from_iter(0..6u64).with(|spec| spec.window(window.clone())));
        let timed = flow.stage("timed", numbers, Timed { window, beside });
        flow.sink("sink", timed, |_: u64| {});
        let report = flow.stall_timeout(Duration::ZERO).run(Until::finished()).unwrap();
        assert_eq!(report.stage("timed").unwrap().items_in, 6, "beside: {beside}");
    }
}
