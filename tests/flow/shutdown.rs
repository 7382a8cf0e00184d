//! Law F5: end, drain and stop. No wait outlives them: each test would hang otherwise.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rollflow::flow::{
    Ended, Flow, Interrupts, Io, Message, Signal, Sink, Stage, StageError, Until, Window, batch, flat_map, from_iter, map,
};

/// Tells what it took, and that it was finished.
struct Recorder<T> {
    took: Arc<AtomicU64>,
    finished: Arc<AtomicU64>,
    _type: std::marker::PhantomData<fn(T)>,
}

impl<T: Message> Sink for Recorder<T> {
    type In = T;

    fn accept(&mut self, _: T) -> Result<(), StageError> {
        self.took.fetch_add(1, SeqCst);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), StageError> {
        self.finished.fetch_add(1, SeqCst);
        Ok(())
    }
}

fn recorder<T>() -> (Recorder<T>, Arc<AtomicU64>, Arc<AtomicU64>) {
    let (took, finished) = (Arc::default(), Arc::default());
    (Recorder { took: Arc::clone(&took), finished: Arc::clone(&finished), _type: std::marker::PhantomData }, took, finished)
}

#[test]
fn an_exhausted_source_ends_the_run_and_everything_arrives() {
    let mut flow = Flow::new("end");
    let numbers = flow.source("numbers", from_iter(0..1000u64));
    let rows = flow.stage("rows", numbers, batch(7));
    let (sink, took, finished) = recorder();
    flow.sink("sink", rows, sink);
    let report = flow.run(Until::finished()).unwrap();
    assert_eq!((took.load(SeqCst), finished.load(SeqCst), report.ended), (143, 1, Ended::Finished));
    assert!(report.edges.iter().all(|edge| edge.sent == edge.received));
}

#[test]
fn a_drain_finishes_what_is_in_flight() {
    let mut flow = Flow::new("drain");
    let handle = flow.handle();
    let numbers = flow.source("numbers", from_iter(0u64..));
    let same = flow.stage("same", numbers, map(|n: u64| n));
    let (sink, took, finished) = recorder::<u64>();
    flow.tap(&same, 1, move |n| {
        if *n == 100 {
            handle.drain()
        }
    });
    flow.sink("sink", same, sink);
    let report = flow.run(Until::finished()).unwrap();
    assert_eq!((report.ended, finished.load(SeqCst)), (Ended::Drained, 1));
    assert_eq!(took.load(SeqCst), report.stage("numbers").unwrap().items_out);
    assert!(took.load(SeqCst) > 100);
}

#[test]
fn a_stop_drops_what_is_in_flight_and_still_finishes_the_sinks() {
    let mut flow = Flow::new("stop");
    let handle = flow.handle();
    let numbers = flow.source("numbers", from_iter(0u64..));
    let many = flow.stage("many", numbers, flat_map(|n: u64| std::iter::repeat(n)));
    let (sink, _, finished) = recorder::<u64>();
    let mut seen = 0;
    flow.tap(&many, 1, move |_| {
        seen += 1;
        if seen == 50 {
            handle.stop();
        }
    });
    flow.sink("sink", many, sink);
    let report = flow.run(Until::finished()).unwrap();
    assert_eq!((report.ended, finished.load(SeqCst)), (Ended::Stopped, 1));
}

#[test]
fn a_stop_drops_the_remainder_of_a_batch() {
    let mut flow = Flow::new("remainder");
    let handle = flow.handle();
    let numbers = flow.source("numbers", from_iter(0u64..));
    let stopping = flow.stage(
        "stopping",
        numbers,
        map(move |n: u64| {
            if n == 10 {
                handle.stop()
            }
        }),
    );
    let rows = flow.stage("rows", stopping, batch(1000));
    let (sink, took, _) = recorder();
    flow.sink("sink", rows, sink);
    assert_eq!(flow.run(Until::finished()).unwrap().ended, Ended::Stopped);
    assert_eq!(took.load(SeqCst), 0);
}

#[test]
fn a_run_until_n_items_delivers_exactly_n() {
    for n in [17, 0] {
        let mut flow = Flow::new("until");
        let numbers = flow.source("numbers", from_iter(0u64..).with(|spec| spec.window(Window::new(20))));
        let (sink, took, finished) = recorder::<u64>();
        flow.sink("sink", numbers, sink);
        let report = flow.run(Until::items("sink", n)).unwrap();
        assert_eq!((took.load(SeqCst), finished.load(SeqCst), report.ended), (n, 1, Ended::Finished));
    }
}

#[test]
fn a_run_until_a_condition_ends_when_it_holds() {
    let (sink, took, finished) = recorder::<u64>();
    let mut flow = Flow::new("when");
    let numbers = flow.source("numbers", from_iter(0u64..));
    flow.sink("sink", numbers, sink);
    let seen = Arc::clone(&took);
    flow.run(Until::when(move || seen.load(SeqCst) >= 9)).unwrap();
    assert_eq!((took.load(SeqCst), finished.load(SeqCst)), (9, 1));
}

/// A stage that has had enough: what it would still get is not worth making, also not by a source
/// that waits for admission.
#[test]
fn a_stage_that_returns_early_ends_the_run() {
    struct Takes(u64);
    impl Stage for Takes {
        type In = u64;
        type Out = u64;
        fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
            for _ in 0..self.0 {
                let Some(n) = io.recv()? else { break };
                io.send(n)?;
            }
            Ok(())
        }
    }
    let mut flow = Flow::new("early");
    let numbers = flow.source("numbers", from_iter(0u64..).with(|spec| spec.window(Window::new(5))));
    let five = flow.stage("five", numbers, Takes(5));
    let (sink, took, _) = recorder::<u64>();
    flow.sink("sink", five, sink);
    assert_eq!(flow.run(Until::finished()).unwrap().ended, Ended::Finished);
    assert_eq!(took.load(SeqCst), 5);
}

/// A goal is the run's, not only that of the part of the graph which reaches it.
#[test]
fn a_reached_goal_drains_what_is_not_upstream_of_it() {
    let mut flow = Flow::new("parts");
    let numbers = flow.source("numbers", from_iter(0u64..));
    flow.sink("sink", numbers, |_: u64| {});
    let others = flow.source("others", from_iter(0u64..));
    flow.sink("endless", others, |_: u64| {});
    let report = flow.run(Until::items("sink", 5)).unwrap();
    let others = report.edge("others", "endless").unwrap();
    assert_eq!((report.stage("sink").unwrap().items_in, others.depth_items), (5, 0));
}

#[test]
fn a_stage_sees_which_of_the_three_words_it_was() {
    struct Tells(Arc<std::sync::Mutex<Option<Signal>>>);
    impl Stage for Tells {
        type In = u64;
        type Out = u64;
        fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
            // A stop is told either as an end of the input or as an error of what waits: both are heard here.
            let ended = pass_on(io);
            *self.0.lock().unwrap() = Some(io.signal());
            ended
        }
    }
    fn pass_on(io: &mut Io<u64, u64>) -> Result<(), StageError> {
        while let Some(n) = io.recv()? {
            io.send(n)?;
        }
        Ok(())
    }
    for (word, expected) in [(0, Signal::Run), (1, Signal::Drain), (2, Signal::Stop)] {
        let told = Arc::default();
        let mut flow = Flow::new("words");
        let handle = flow.handle();
        let numbers = flow.source("numbers", from_iter(0..if word == 0 { 10u64 } else { u64::MAX }));
        flow.tap(&numbers, 1, move |n| match (word, n) {
            (1, 5) => handle.drain(),
            (2, 5) => handle.stop(),
            _ => {}
        });
        let out = flow.stage("tells", numbers, Tells(Arc::clone(&told)));
        flow.sink("sink", out, |_: u64| {});
        flow.run(Until::finished()).unwrap();
        assert_eq!(*told.lock().unwrap(), Some(expected));
    }
}

#[test]
fn a_run_asked_to_stop_before_it_starts_stops_at_once() {
    let mut flow = Flow::new("before");
    let numbers = flow.source("numbers", from_iter(0u64..));
    flow.sink("sink", numbers, |_: u64| {});
    flow.handle().stop();
    assert_eq!(flow.run(Until::finished()).unwrap().ended, Ended::Stopped);
}

const CHILD: &str = "ROLLFLOW_SHUTDOWN_CHILD";

/// Not a test of its own: the process that the tests below interrupt. Its first stage never
/// finishes an item when told not to.
#[test]
fn child() {
    let Ok(kind) = std::env::var(CHILD) else { return };
    if kind == "between" {
        return two_runs();
    }
    let mut flow = Flow::new("child");
    if kind == "unheard" {
        flow.ignore_signals();
    }
    let handle = flow.handle();
    let numbers = flow.source("numbers", from_iter(0u64..));
    let endless = kind == "endless";
    let many = flow.stage("many", numbers, flat_map(move |n: u64| std::iter::repeat_n(n, if endless { usize::MAX } else { 1 })));
    let (mut told, mut running) = (Signal::Run, false);
    flow.sink("sink", many, move |n: u64| {
        if n == 0 && !std::mem::replace(&mut running, true) {
            println!("\nstate running");
        }
        loop {
            if told != handle.signal() {
                told = handle.signal();
                // Whether a stopped sink gets one more item is chance, unless it holds one.
                if told == Signal::Drain || kind == "stuck" {
                    println!("\nstate {told:?}");
                }
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
            if kind != "stuck" {
                break;
            }
        }
    });
    let report = flow.run(Until::finished()).unwrap();
    println!("\nstate ended {:?}", report.ended);
}

/// Two runs of one program; it is interrupted after the first.
fn two_runs() {
    let interrupts = Interrupts::listen().unwrap();
    let run = |numbers: std::ops::Range<u64>| {
        let mut flow = Flow::new("one of two");
        flow.interrupted_by(&interrupts);
        let numbers = flow.source("numbers", from_iter(numbers));
        flow.sink("sink", numbers, |_: u64| {});
        println!("\nstate ended {:?}", flow.run(Until::finished()).unwrap().ended);
    };
    run(0..10);
    println!("\nstate between");
    std::io::stdin().lines().next();
    run(0..u64::MAX);
}

struct Running(Child, std::io::Lines<BufReader<std::process::ChildStdout>>);

impl Running {
    fn start(kind: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "shutdown::child", "--nocapture"])
            .env(CHILD, kind)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Running(child, lines)
    }

    fn expect(&mut self, state: &str) {
        let line = self.1.by_ref().map(Result::unwrap).find(|line| line.starts_with("state"));
        assert_eq!(line.as_deref(), Some(format!("state {state}").as_str()));
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.0.id().to_string()]).status().unwrap().success());
    }
}

/// Ctrl-C, and what a scheduler sends before it takes the machine away. Launchers send it twice at once: to a
/// process, and to its group.
#[cfg(unix)]
#[test]
fn ctrl_c_and_sigterm_drain_and_exit_with_0() {
    for signals in [&["-INT"][..], &["-TERM"], &["-TERM", "-TERM"]] {
        let mut child = Running::start("draining");
        child.expect("running");
        signals.iter().for_each(|signal| child.signal(signal));
        child.expect("Drain");
        child.expect("ended Drained");
        assert_eq!(child.0.wait().unwrap().code(), Some(0), "{signals:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_later_sigterm_stops_what_a_drain_would_not_end() {
    let mut child = Running::start("endless");
    child.expect("running");
    child.signal("-TERM");
    child.expect("Drain");
    std::thread::sleep(std::time::Duration::from_millis(1200));
    child.signal("-TERM");
    child.expect("ended Stopped");
}

#[cfg(unix)]
#[test]
fn ctrl_c_twice_stops_what_a_drain_would_not_end() {
    let mut child = Running::start("endless");
    child.expect("running");
    child.signal("-INT");
    child.expect("Drain");
    child.signal("-INT");
    child.expect("ended Stopped");
    assert_eq!(child.0.wait().unwrap().code(), Some(0));
}

#[cfg(unix)]
#[test]
fn ctrl_c_a_third_time_ends_a_process_whose_stage_never_comes_back() {
    let mut child = Running::start("stuck");
    child.expect("running");
    child.signal("-INT");
    child.expect("Drain");
    child.signal("-INT");
    child.expect("Stop");
    child.signal("-INT");
    assert_eq!(child.0.wait().unwrap().code(), Some(130));
}

/// The program of a server or of another flow decides what a signal does.
#[cfg(unix)]
#[test]
fn a_signal_ends_a_process_whose_flow_leaves_it_to_the_program() {
    use std::os::unix::process::ExitStatusExt;
    let mut child = Running::start("unheard");
    child.expect("running");
    child.signal("-TERM");
    assert_eq!(child.0.wait().unwrap().signal(), Some(15));
}

/// Law F5: pressed while no run is there to hear it.
#[cfg(unix)]
#[test]
fn ctrl_c_between_two_runs_is_the_second_ones() {
    let mut child = Running::start("between");
    child.expect("ended Finished");
    child.expect("between");
    child.signal("-INT");
    drop(child.0.stdin.take());
    child.expect("ended Drained");
    assert_eq!(child.0.wait().unwrap().code(), Some(0));
}
