//! Law F7: a graph that could never make progress is rejected before it starts, with the name of
//! the stage.

use std::sync::Arc;
use std::time::Duration;

use rollflow::engine::{Load, SimulatedEngine};
use rollflow::flow::from_iter;
use rollflow::flow::{GraphError, RunError, Simulation};
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::stages::generate::EngineSettings;
use rollflow::train::SimulatedBackend;

/// Stages that a loop is declared with.
#[derive(Clone, Copy, PartialEq)]
enum Loop {
    Whole,
    WithoutBatcher,
    WithoutSync,
}

fn errors(flow: &Flow) -> Vec<GraphError> {
    match flow.check() {
        Ok(_) => Vec::new(),
        Err(RunError::Graph(errors)) => errors,
        Err(other) => panic!("{other}"),
    }
}

/// Duration of a step of the engine.
fn time(load: Load) -> Duration {
    Duration::from_millis(load.passes as u64)
}

fn check(mut flow: Flow, which: Loop) -> Vec<GraphError> {
    let simulation = Simulation::new(0);
    let engine = move |settings: &EngineSettings| SimulatedEngine::new(&simulation, settings.slots, time, |_, _| 3);
    let tokenizer = Arc::new(Tokenizer::characters("0123456789+=", 16).unwrap());
    let prompts = flow.source("prompts", Prompts::addition(1, 0).unwrap());
    let groups = flow.stage("generate", prompts, Generator::by(engine, &tokenizer));
    let scored = flow.stage("reward", groups, Reward::each(|_: &Sample| 1.0));
    let batches = match which {
        Loop::WithoutBatcher => flow.stage("batch", scored, map(|_: Scored| Batch::default())),
        _ => flow.stage("batch", scored, Batcher::groups(2)),
    };
    let trained = flow.stage("train", batches, Trainer::new(SimulatedBackend::default()));
    if which == Loop::WithoutSync {
        flow.sink("end", trained, |_: Trained<()>| {});
    } else {
        let synced = flow.stage("sync", trained, WeightSync::default());
        flow.sink("end", synced, |_: Trained<()>| {});
    }
    errors(&flow)
}

#[test]
fn admission_that_no_stage_releases_is_rejected_with_the_stage_that_would_wait() {
    assert_eq!(check(Flow::new("whole").max_staleness(1), Loop::Whole), []);
    for which in [Loop::WithoutBatcher, Loop::WithoutSync] {
        let rejected = check(Flow::new("unreleased").max_staleness(1), which);
        let waits = |error: &&GraphError| matches!(error, GraphError::NeverReleased { stage, .. } if stage == "prompts");
        let text = rejected.iter().find(waits).unwrap_or_else(|| panic!("{rejected:?}")).to_string();
        assert!(text.contains("\"prompts\" waits for admission") && text.contains("Admission::published"), "{text}");
    }
    // Code outside the graph holds this admission, and may release it.
    let outside = Admission::max_staleness(1, 2);
    let unpublished = GraphError::UnpublishedWeights("generate".into());
    assert_eq!(check(Flow::new("outside").admission(&outside), Loop::WithoutSync), [unpublished]);
}

#[test]
fn a_bound_that_comes_after_the_stages_it_concerns_is_rejected() {
    let mut flow = Flow::new("late");
    let prompts = flow.source("prompts", Prompts::addition(1, 0).unwrap());
    let mut flow = flow.max_staleness(1);
    flow.sink("end", prompts, |_: Prompt| {});
    assert_eq!(errors(&flow), [GraphError::LateContext("max_staleness")]);
}

#[test]
fn a_second_admission_is_rejected_instead_of_replacing_the_first() {
    let restored = Admission::new(1, 1, None);
    let flow = Flow::new("twice").admission(&restored).max_staleness(1);
    let errors = errors(&flow);
    assert!(errors.contains(&GraphError::SharedTwice("max_staleness")), "{errors:?}");
}

#[test]
fn weights_that_nothing_can_publish_are_rejected_with_the_stage_that_would_wait() {
    let declare = |published| {
        let simulation = Simulation::new(0);
        let engine = move |settings: &EngineSettings| SimulatedEngine::new(&simulation, settings.slots, time, |_, _| 3);
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+=", 16).unwrap());
        let mut flow = Flow::new("unpublished");
        let prompts = flow.source("prompts", Prompts::addition(1, 0).unwrap());
        let groups = flow.stage("generate", prompts, Generator::by(engine, &tokenizer).weights(published));
        flow.sink("end", groups, |_: Group| {});
        flow
    };
    let (publisher, published) = weights();
    let flow = declare(published);
    assert!(flow.check().is_ok(), "someone outside may publish them");
    drop(publisher);
    assert_eq!(errors(&flow), [GraphError::UnpublishedWeights("generate".into())]);
    let (publisher, published) = weights();
    publisher.publish(1, Arc::new(())).unwrap();
    drop(publisher);
    assert!(declare(published).check().is_ok(), "they are there already");
}

#[test]
fn weights_that_two_stages_publish_are_rejected_with_the_second() {
    let mut flow = Flow::new("twice");
    let batches = flow.source("samples", from_iter([Batch::default()]));
    let trained = flow.stage("train", batches, Trainer::new(SimulatedBackend::default()));
    let synced = flow.stage("sync", trained, WeightSync::default());
    let again = flow.stage("again", synced, WeightSync::default());
    flow.sink("end", again, |_: Trained<()>| {});
    let unread = |stage: &str| GraphError::UnreadWeights(stage.into());
    assert_eq!(errors(&flow), [unread("sync"), unread("again")]);
}

#[test]
fn weights_that_nothing_can_read_are_rejected() {
    let (publisher, published) = weights();
    let mut flow = Flow::new("unread");
    let batches = flow.source("samples", from_iter([Batch::default()]));
    let trained = flow.stage("train", batches, Trainer::new(SimulatedBackend::default()));
    let synced = flow.stage("sync", trained, WeightSync::to(publisher));
    flow.sink("end", synced, |_: Trained<()>| {});
    assert!(flow.check().is_ok(), "someone outside may read them");
    drop(published);
    assert_eq!(errors(&flow), [GraphError::UnreadWeights("sync".into())]);
}
