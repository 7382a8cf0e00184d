//! A graph can be drawn before it runs, with its feedback dashed (law F2), and everything that is
//! wrong with it is told at once.

use rollflow::flow::{
    Capacity, EdgePlan, Flow, Graph, GraphError, GraphErrors, GraphWarning, Io, Kind, NodePlan, Sink, Stage, StageError,
    StageSpec, Until, WeightsRx, WeightsTx, Window, batch, from_iter, map, map_async, weights,
};

struct Generate(WeightsRx<Vec<f32>>);

impl Stage for Generate {
    type In = String;
    type Out = Vec<u32>;

    fn run(&mut self, _: &mut Io<String, Vec<u32>>) -> Result<(), StageError> {
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::thread().threads(1).subscribes(self.0.id()).knob("threads or slots")
    }
}

struct Train(WeightsTx<Vec<f32>>);

impl Sink for Train {
    type In = Vec<Vec<u32>>;

    fn accept(&mut self, _: Vec<Vec<u32>>) -> Result<(), StageError> {
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::thread().threads(2).publishes(self.0.id())
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
    assert!(loop_with_everything().graph().check(3).0.is_empty());
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
    assert_eq!(flow.check(), Err(GraphErrors(vec![GraphError::Empty])));
    let numbers = flow.source("numbers", from_iter(0..3u64));
    flow.sink("sink", numbers, |_: u64| {});
    flow.run(Until::finished()).unwrap();
    assert_eq!(flow.check(), Err(GraphErrors(vec![GraphError::Empty])));
}

/// Typed ports can't make a circle, so this goes by plain data.
fn plain(names: &[&str], edges: &[(usize, usize)]) -> Graph {
    let node = |name: &&str| NodePlan {
        name: (*name).to_owned(),
        kind: if *name == "source" { Kind::Source } else { Kind::Stage },
        workers: 1,
        replicable: false,
        ordered: false,
        threads: 0,
        window: false,
        knob: None,
    };
    let edge =
        |&(from, to): &(usize, usize)| EdgePlan { from, to: Some(to), carries: "u64".into(), capacity: Capacity::items(1) };
    Graph {
        name: "plain".into(),
        nodes: names.iter().map(node).collect(),
        edges: edges.iter().map(edge).collect(),
        weights: Vec::new(),
    }
}

fn chains(graph: &Graph) -> Vec<String> {
    let (errors, _) = graph.check(1);
    errors.iter().map(ToString::to_string).filter(|text| text.contains("circle")).collect()
}

#[test]
fn a_circle_is_told_with_its_chain() {
    let told = chains(&plain(&["source", "a", "b", "c"], &[(0, 1), (1, 2), (2, 3), (3, 1)]));
    assert_eq!(told, ["the data goes in a circle: a → b → c → a; feedback goes over a weights edge"]);
}

#[test]
fn every_circle_is_told_and_a_diamond_is_none() {
    let diamond = [(0, 1), (0, 2), (1, 3), (2, 3)];
    assert!(chains(&plain(&["source", "a", "b", "c"], &diamond)).is_empty());
    let told = chains(&plain(&["source", "a", "b", "c"], &[(0, 1), (1, 1), (0, 2), (2, 3), (3, 2)]));
    assert_eq!(told.len(), 2);
    assert!(told[0].contains("a → a;") && told[1].contains("b → c → b;"), "{told:?}");
}

#[test]
fn more_threads_than_cores_are_a_warning_that_says_who_asks_for_them() {
    let graph = loop_with_everything().graph();
    assert!(graph.check(3).1.is_empty());
    let (errors, warnings) = graph.check(2);
    assert!(errors.is_empty());
    assert_eq!(warnings, [GraphWarning::ThreadBudget { asked: 3, cores: 2, shares: "generate 1, train 2".into() }]);
}
