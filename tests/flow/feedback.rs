//! Laws F2 and V1 on the weights edge: newest wins, nothing blocks, versions only rise. And the
//! generic part of V2: admission.

use std::sync::Arc;

use rollflow::flow::{
    Ended, Flow, Io, OutdatedVersion, RunError, Stage, StageError, Until, WeightsRx, WeightsTx, Window, from_iter, weights,
};

#[test]
fn the_newest_version_wins_and_publishing_never_waits() {
    let (tx, rx) = weights::<&str>();
    assert!(rx.latest().is_none() && !rx.has_newer_than(0));
    for (version, name) in [(0, "first"), (3, "third"), (4, "fourth")] {
        tx.publish(version, Arc::new(name)).unwrap();
    }
    assert_eq!(rx.clone().latest().map(|(version, name)| (version, *name)), Some((4, "fourth")));
    assert!(rx.has_newer_than(3) && !rx.has_newer_than(4));
}

#[test]
fn a_version_is_never_reused() {
    let (tx, rx) = weights::<u64>();
    tx.publish(7, Arc::new(70)).unwrap();
    for offered in [7, 3] {
        assert_eq!(tx.publish(offered, Arc::new(0)), Err(OutdatedVersion { offered, current: 7 }));
    }
    assert_eq!(rx.latest().map(|(version, weights)| (version, *weights)), Some((7, 70)));
}

struct Wants(WeightsRx<u64>, u64);

impl Stage for Wants {
    type In = u64;
    type Out = u64;

    fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
        while io.recv()?.is_some() {
            let (version, _) = io.wait_weights(&mut self.0, self.1)?;
            io.send(version)?;
        }
        Ok(())
    }
}

#[test]
fn whoever_waits_gets_what_it_waits_for_or_newer() {
    let (tx, rx) = weights::<u64>();
    let mut flow = Flow::new("wait");
    let numbers = flow.source("numbers", from_iter(0..3u64));
    // Published one by one as items come in: the first item waits for the third version.
    flow.tap(&numbers, 1, move |n| tx.publish(*n + 1, Arc::new(0)).unwrap());
    let versions = flow.stage("wants", numbers, Wants(rx, 3));
    flow.sink("sink", versions, |version: u64| assert_eq!(version, 3));
    assert_eq!(flow.run(Until::finished()).unwrap().stage("sink").unwrap().items_in, 3);
}

#[test]
fn weights_that_can_no_longer_come_are_an_error_that_says_so() {
    let (tx, rx) = weights::<u64>();
    tx.publish(2, Arc::new(0)).unwrap();
    drop(tx);
    let mut flow = Flow::new("gone");
    let numbers = flow.source("numbers", from_iter(0..3u64));
    let versions = flow.stage("wants", numbers, Wants(rx, 3));
    flow.sink("sink", versions, |_: u64| {});
    let Err(RunError::Failed { failures, .. }) = flow.run(Until::finished()) else { panic!("it must fail") };
    let told = r#"stage "wants" failed: waited for weights of version 3, but their publisher ended at version 2"#;
    assert_eq!(failures[0].to_string(), told);
}

/// Generates with the weights of the step before: always ahead of a trainer that has enough.
struct Generate(WeightsRx<u64>);

impl Stage for Generate {
    type In = u64;
    type Out = u64;

    fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
        while let Some(step) = io.recv()? {
            io.wait_weights(&mut self.0, step)?;
            io.send(step)?;
        }
        Ok(())
    }
}

struct Train(WeightsTx<u64>, u64);

impl Stage for Train {
    type In = u64;
    type Out = u64;

    fn run(&mut self, io: &mut Io<u64, u64>) -> Result<(), StageError> {
        self.0.publish(0, Arc::new(0))?;
        while let Some(step) = io.recv()? {
            if step == self.1 {
                break;
            }
            self.0.publish(step + 1, Arc::new(0))?;
            io.send(step)?;
        }
        Ok(())
    }
}

#[test]
fn a_trainer_that_has_enough_ends_the_run_also_of_those_who_wait_for_its_weights() {
    for _ in 0..100 {
        let (tx, rx) = weights::<u64>();
        let mut flow = Flow::new("loop");
        let prompts = flow.source("prompts", from_iter(0u64..));
        let rollouts = flow.stage("generate", prompts, Generate(rx));
        let steps = flow.stage("train", rollouts, Train(tx, 7));
        flow.sink("sink", steps, |_: u64| {});
        let report = flow.run(Until::finished()).unwrap();
        assert_eq!((report.stage("sink").unwrap().items_in, report.ended), (7, Ended::Finished));
    }
}

#[test]
fn a_window_admits_no_more_than_its_limit_which_only_rises() {
    let window = Window::new(2);
    window.raise(3);
    window.limit_to(4);
    assert_eq!(window.limit(), 5);
    window.limit_to(8);
    let mut flow = Flow::new("window");
    let numbers = flow.source("numbers", from_iter(0u64..).with(|spec| spec.window(window.clone())));
    let handle = flow.handle();
    flow.tap(&numbers, 1, move |n| {
        if *n == 7 {
            handle.drain()
        }
    });
    flow.sink("sink", numbers, |_: u64| {});
    let report = flow.run(Until::finished()).unwrap();
    assert_eq!((report.stage("sink").unwrap().items_in, window.admitted()), (8, 8));
}

#[test]
fn a_source_is_admitted_as_fast_as_others_raise_its_window() {
    let window = Window::new(1);
    let mut flow = Flow::new("lockstep");
    let numbers = flow.source("numbers", from_iter(0..100u64).with(|spec| spec.window(window.clone())));
    let raised = window.clone();
    // With one admitted at a time, the source is never ahead of the sink.
    flow.sink("sink", numbers, move |n: u64| {
        assert_eq!(raised.admitted(), n + 1);
        raised.raise(1);
    });
    flow.run(Until::finished()).unwrap();
    assert_eq!(window.admitted(), 100, "the credit of the item that never came was given back");
}
