//! A graph can be drawn before it runs, with its feedback dashed (law F2), and everything that is
//! wrong with it is told at once.

use rollflow::flow::{
    Capacity, Flow, GraphError, Io, RunError, Sink, Stage, StageError, StageSpec, Until, WeightsRx, WeightsTx, Window, batch,
    from_iter, map, map_async, weights,
};

struct Generate(WeightsRx<Vec<f32>>);

impl Stage for Generate {
    type In = String;
    type Out = Vec<u32>;

    fn run(&mut self, _: &mut Io<String, Vec<u32>>) -> Result<(), StageError> {
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default().threads(1).subscribes(&self.0).knob("threads or slots")
    }
}

struct Train(WeightsTx<Vec<f32>>);

impl Sink for Train {
    type In = Vec<Vec<u32>>;

    fn accept(&mut self, _: Vec<Vec<u32>>) -> Result<(), StageError> {
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default().threads(2).publishes(&self.0)
    }
}

/// All that can be drawn: a source with a window, threads, tasks, ordered workers, a tee, a merge,
/// and the weights edge.
fn loop_with_everything() -> Flow {
    let (tx, rx) = weights();
    let mut flow = Flow::new("loop \"with\" everything");
    flow.capacity(Capacity::items(4).tokens(4096));
    let source = from_iter(["one".to_owned()]).with(|spec| spec.window(Window::new(2)));
    let prompts = flow.source("prompts", source);
    let rollouts = flow.stage("generate", prompts, Generate(rx));
    flow.edge(&rollouts, Capacity::items(2).tokens(50_000));
    let mut branches = flow.tee("tee", rollouts, 2).into_iter();
    let local = flow.stage("local", branches.next().unwrap(), map(|tokens: Vec<u32>| tokens).workers(3).ordered());
    let remote = flow.stage("remote", branches.next().unwrap(), map_async(async |tokens: Vec<u32>| Ok(tokens)).workers(16));
    let scored = flow.merge("scored", vec![local, remote]);
    let batches = flow.stage("batch", scored, batch(32));
    flow.sink("train", batches, Train(tx));
    flow
}

#[test]
fn mermaid() {
    insta::assert_snapshot!(loop_with_everything().graph().to_mermaid());
}

#[test]
fn dot() {
    insta::assert_snapshot!(loop_with_everything().graph().to_dot());
}

#[test]
fn json() {
    insta::assert_snapshot!(loop_with_everything().graph().to_json());
}

#[test]
fn a_sound_graph_passes() {
    assert!(loop_with_everything().check().is_ok());
}

#[test]
fn all_problems_are_told_at_once() {
    let mut other = Flow::new("other");
    let foreign = other.source("foreign", from_iter(0..3u64));
    let mut flow = Flow::new("wrong");
    let numbers = flow.source("numbers", from_iter(0..3u64));
    flow.edge(&numbers, Capacity::items(0).tokens(0));
    let same = flow.stage("same", numbers, map(|n: u64| n).with(|spec| spec.workers(2).window(Window::new(1))));
    let none = flow.stage("same", same, map(|n: u64| n).workers(0));
    let _dangling = flow.stage("", none, map(|n: u64| n.to_string()));
    let nothing = flow.merge::<u64>("nothing", vec![]);
    assert!(flow.tee("nowhere", nothing, 0).is_empty());
    flow.sink("sink", foreign, |_: u64| {});
    insta::assert_snapshot!(flow.run(Until::items("sinc", 3)).unwrap_err());
}

#[test]
fn an_empty_flow_and_one_that_has_run_are_refused() {
    let mut flow = Flow::new("empty");
    let is_empty = |flow: &Flow| matches!(flow.check(), Err(RunError::Graph(errors)) if errors == [GraphError::Empty]);
    assert!(is_empty(&flow));
    let numbers = flow.source("numbers", from_iter(0..3u64));
    flow.sink("sink", numbers, |_: u64| {});
    flow.run(Until::finished()).unwrap();
    assert!(is_empty(&flow));
}
