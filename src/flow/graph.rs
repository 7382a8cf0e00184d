//! Declaration of a graph: typed [`Port`]s over plain data.
//!
//! Ports carry the types, so wrong wiring does not compile. A node is plain data and a closure that
//! makes its jobs once the edges exist.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::edge::{Gauge, Slot, Tap};
use super::launch::Job;
use super::nodes::{self, IntoSink, IntoStage};
use super::plan::{EdgePlan, Kind, NodePlan, WeightsPlan};
use super::{
    Capacity, Control, Graph, GraphError, Interrupts, Message, Port, Report, RunContext, RunError, Simulation, Source, StageSpec,
    Stats, runner,
};

type BuildJobs = Box<dyn FnOnce(&Until) -> Vec<Job> + Send>;

pub(crate) struct Node {
    plan: NodePlan,
    pub(crate) jobs: BuildJobs,
}

pub(crate) struct Edge {
    plan: EdgePlan,
    /// Capacity that was set by hand.
    capacity: Option<Capacity>,
    pub(crate) build: Box<dyn FnOnce(Capacity) -> Arc<Gauge> + Send>,
}

/// Goal at which a run ends.
#[derive(Clone)]
pub struct Until(pub(crate) Goal);

#[derive(Clone)]
pub(crate) enum Goal {
    Finished,
    Items(String, u64),
    When(Arc<dyn Fn() -> bool + Send + Sync>),
}

impl Until {
    /// Ends after the sources, once everything was delivered.
    pub fn finished() -> Self {
        Until(Goal::Finished)
    }

    /// Ends when the named sink has taken exactly `n` items. Items in flight are dropped.
    pub fn items(sink: impl Into<String>, n: u64) -> Self {
        Until(Goal::Items(sink.into(), n))
    }

    /// Ends each sink when `reached` returns true after one of its items. Items in flight are
    /// dropped.
    pub fn when(reached: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Until(Goal::When(Arc::new(reached)))
    }

    /// Returns true if this sink takes no item.
    pub(crate) fn takes_none(&self, sink: &str) -> bool {
        matches!(&self.0, Goal::Items(name, 0) if name == sink)
    }

    /// Returns true if this sink is done after `taken` items.
    pub(crate) fn is_reached(&self, taken: u64, sink: &str) -> bool {
        match &self.0 {
            Goal::Finished => false,
            Goal::Items(name, n) => name == sink && taken >= *n,
            Goal::When(reached) => reached(),
        }
    }
}

/// Dataflow graph: declares stages, checks the graph and runs it.
pub struct Flow {
    name: String,
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    default_capacity: Capacity,
    misuse: Vec<GraphError>,
    context: RunContext,
    identity: Arc<()>,
    control: Control,
    interrupts: Option<Interrupts>,
    ignores_signals: bool,
    stall_timeout: Duration,
    stats: Stats,
}

/// Default of [`Flow::stall_timeout`]: longer than code outside a graph takes to raise a window.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

impl Flow {
    /// Returns an empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Flow {
            name: name.into(),
            nodes: Vec::new(),
            edges: Vec::new(),
            default_capacity: Capacity::default(),
            misuse: Vec::new(),
            context: RunContext::default(),
            identity: Arc::new(()),
            control: Control::new(),
            interrupts: None,
            ignores_signals: false,
            stall_timeout: STALL_TIMEOUT,
            stats: Stats::default(),
        }
    }

    /// Sets the seed of the run's randomness. Call it before the stages are put on the graph.
    pub fn seed(mut self, seed: u64) -> Self {
        self.context_for("seed").seed = Some(seed);
        self
    }

    /// Sets the folder that the run writes to. Call it before the stages are put on the graph.
    pub fn run_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.context_for("run_folder").folder = Some(folder.into());
        self
    }

    /// Shares `value` with the stages ([`RunContext::get`]). Call it before the stages are put on
    /// the graph.
    pub fn share<T: Any + Send>(self, value: T) -> Self {
        self.share_as("share", value)
    }

    /// [`Flow::share`] by the method `call`, which errors name.
    pub(crate) fn share_as<T: Any + Send>(mut self, call: &'static str, value: T) -> Self {
        if self.context.holds::<T>() {
            self.misuse.push(GraphError::SharedTwice(call));
        }
        self.context_for(call).insert(value);
        self
    }

    fn context_for(&mut self, call: &'static str) -> &mut RunContext {
        if !self.nodes.is_empty() {
            self.misuse.push(GraphError::LateContext(call));
        }
        &mut self.context
    }

    /// Adds a source.
    pub fn source<S: Source>(&mut self, name: &str, mut source: S) -> Port<S::Out> {
        source.attach(&mut self.context);
        let node = self.node(name, Kind::Source, source.spec(), false);
        let (port, slot) = self.output(node);
        self.jobs(node, move |_| vec![nodes::source(source, slot.tx())]);
        port
    }

    /// Adds a stage after `input`: any [`Stage`](super::Stage) or
    /// [`AsyncStage`](super::AsyncStage), such as [`map`](super::map). A port of another type does
    /// not compile:
    ///
    /// ```compile_fail
    /// # use rollflow::flow::{Flow, from_iter, map};
    /// # let mut flow = Flow::new("wrong");
    /// let words = flow.source("words", from_iter([String::from("one")]));
    /// let doubled = flow.stage("double", words, map(|n: u64| 2 * n));
    /// ```
    pub fn stage<I, O, S, Place>(&mut self, name: &str, input: Port<I>, stage: S) -> Port<O>
    where
        I: Message,
        O: Message,
        S: IntoStage<I, O, Place>,
    {
        let stage = stage.into_node(&mut self.context);
        let kind = if stage.task { Kind::Task } else { Kind::Stage };
        let node = self.node(name, kind, stage.spec, stage.replicable);
        self.connect(node, &input);
        let (port, slot) = self.output(node);
        self.jobs(node, move |_| (stage.jobs)(input.slot.rx(), slot.tx()));
        port
    }

    /// Adds a sink after `input`: any [`Sink`](super::Sink), or a closure.
    pub fn sink<T: Message, S: IntoSink<T, By>, By>(&mut self, name: &str, input: Port<T>, sink: S) {
        let sink = sink.into_node(&mut self.context);
        let node = self.node(name, Kind::Sink, sink.spec, false);
        self.connect(node, &input);
        self.jobs(node, move |until| vec![(sink.job)(input.slot.rx(), until.clone())]);
    }

    /// Copies every item of `input` to `branches` ports. The slowest branch holds back the others
    /// (law F1).
    pub fn tee<T: Message + Clone>(&mut self, name: &str, input: Port<T>, branches: usize) -> Vec<Port<T>> {
        let node = self.node(name, Kind::Tee, StageSpec::default(), false);
        self.connect(node, &input);
        let (ports, slots): (Vec<_>, Vec<_>) = (0..branches).map(|_| self.output(node)).unzip();
        self.jobs(node, move |_| vec![nodes::tee(input.slot.rx(), slots.iter().map(|slot| slot.tx()).collect())]);
        ports
    }

    /// Joins `inputs`. Each keeps its order; there is no order between them.
    pub fn merge<T: Message>(&mut self, name: &str, inputs: Vec<Port<T>>) -> Port<T> {
        let node = self.node(name, Kind::Merge, StageSpec::default().workers(inputs.len()), true);
        for input in &inputs {
            self.connect(node, input);
        }
        let (port, slot) = self.output(node);
        self.jobs(node, move |_| inputs.iter().map(|input| nodes::merge(input.slot.rx(), slot.tx())).collect());
        port
    }

    /// Sets the capacity of one edge.
    pub fn edge<T>(&mut self, port: &Port<T>, capacity: Capacity) -> &mut Self {
        if self.owns(port) {
            self.edges[port.edge].capacity = Some(capacity);
        } else {
            self.misuse.push(GraphError::ForeignPort("edge".into()));
        }
        self
    }

    /// Sets the capacity of all edges that have none of their own.
    pub fn capacity(&mut self, capacity: Capacity) -> &mut Self {
        self.default_capacity = capacity;
        self
    }

    /// Calls `look` with the first item and every `every_n`-th after it, before it enters the edge.
    /// `look` runs in the producer, in the state *busy*, so it must return quickly.
    pub fn tap<T: Message>(&mut self, port: &Port<T>, every_n: u64, look: impl FnMut(&T) + Send + 'static) -> &mut Self {
        let tap = Tap { every: every_n.max(1), seen: 0, look: Box::new(look) };
        port.slot.taps.lock().push(tap);
        self
    }

    /// Returns the graph as plain data, for drawings.
    pub fn graph(&self) -> Graph {
        let capacity = |edge: &Edge| edge.capacity.unwrap_or(self.default_capacity);
        let edges = self.edges.iter().map(|edge| EdgePlan { capacity: capacity(edge), ..edge.plan.clone() }).collect();
        let nodes = self.nodes.iter().map(|node| node.plan.clone()).collect();
        let mut graph = Graph { name: self.name.clone(), nodes, edges, weights: Vec::new() };
        for (from, publisher) in self.nodes.iter().enumerate() {
            for (to, subscriber) in self.nodes.iter().enumerate() {
                if publisher.plan.spec.publishes.iter().any(|id| subscriber.plan.spec.subscribes.contains(id)) {
                    graph.weights.push(WeightsPlan { from, to });
                }
            }
        }
        graph
    }

    /// Checks the graph. Reports all errors together, as [`RunError::Graph`], and returns warnings.
    pub fn check(&self) -> Result<Vec<String>, RunError> {
        self.check_for(&Until::finished())
    }

    /// Returns a handle that drains or stops the run from another thread. Valid before, during and
    /// after the run.
    pub fn handle(&self) -> Control {
        self.control.clone()
    }

    /// Takes Ctrl-C and SIGTERM from `interrupts`, also those before the run. Default: the run
    /// listens by itself while it lasts.
    pub fn interrupted_by(&mut self, interrupts: &Interrupts) -> &mut Self {
        self.interrupts = Some(interrupts.clone());
        self
    }

    /// Leaves Ctrl-C and SIGTERM to the program, for a flow within a server or another flow:
    /// [`Flow::handle`] ends it. After a run that took signals, neither ends the process by itself any more: such
    /// a program holds [`Interrupts`] and looks at [`Interrupts::pressed`].
    pub fn ignore_signals(&mut self) -> &mut Self {
        self.ignores_signals = true;
        self
    }

    /// Time limit of a run in which no stage can make progress, before it ends with
    /// [`RunError::Stalled`]. Default: 30 seconds.
    ///
    /// Within it, code outside the graph may raise a [`Window`](super::Window) or publish weights.
    /// `Duration::MAX` is no limit, for a flow that is driven from outside. A stage that computes,
    /// or awaits a timer or a socket, makes progress. If the stages wait only for each other, the
    /// run ends immediately.
    pub fn stall_timeout(&mut self, time: Duration) -> &mut Self {
        self.stall_timeout = time;
        self
    }

    /// Returns a live view of the run for another thread. Empty until the run starts.
    pub fn stats(&self) -> Stats {
        self.stats.clone()
    }

    /// Checks the graph, runs it and joins everything that it started (law F3). Afterwards the flow
    /// is empty.
    ///
    /// The first Ctrl-C drains the run, the second stops it, and the third ends the process with
    /// code 130 ([`Flow::ignore_signals`] leaves them to the program). The signal handler stays
    /// installed after the run: a program with several runs gives them one [`Interrupts`].
    ///
    /// # Panics
    /// When called from async code, because it blocks its thread. Use `tokio::task::spawn_blocking`
    /// there.
    pub fn run(&mut self, until: Until) -> Result<Report, RunError> {
        self.run_on(None, until)
    }

    /// Runs the graph like [`Flow::run`], on a simulated machine and in its time.
    ///
    /// Every stage runs, closures included. Time passes only in waits at edges, for admission and
    /// for weights, and where [`Simulation`] says so. A stage that waits for a socket or a timer of
    /// tokio can't be simulated. Signals are the program's, unless [`Flow::interrupted_by`] gives them.
    pub fn simulate(&mut self, simulation: &Simulation, until: Until) -> Result<Report, RunError> {
        self.run_on(Some(simulation), until)
    }

    fn run_on(&mut self, simulation: Option<&Simulation>, until: Until) -> Result<Report, RunError> {
        let warnings = self.check_for(&until)?;
        let interrupts = match &self.interrupts {
            None if !self.ignores_signals && simulation.is_none() => Some(Interrupts::listen().map_err(RunError::Start)?),
            given => given.clone(),
        };
        let _steered = interrupts.as_ref().map(|interrupts| interrupts.steer(self.control.clone()));
        let graph = self.graph();
        let (nodes, edges) = (std::mem::take(&mut self.nodes), std::mem::take(&mut self.edges));
        // From here on, only stages hold the ends of weights edges.
        self.context = RunContext::default();
        let declared = runner::Declared { graph, edges, nodes, stall_timeout: self.stall_timeout, warnings };
        runner::run(declared, &until, &self.control, &self.stats, simulation)
    }

    fn check_for(&self, until: &Until) -> Result<Vec<String>, RunError> {
        let graph = self.graph();
        let mut errors = graph.errors();
        errors.extend(self.misuse.iter().cloned());
        if let Goal::Items(sink, _) = &until.0 {
            let sinks = graph.nodes.iter().filter(|node| node.kind == Kind::Sink);
            let sinks: Vec<String> = sinks.map(|node| node.name.clone()).collect();
            if !sinks.contains(sink) {
                errors.push(GraphError::UnknownSink { sink: sink.clone(), sinks });
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if errors.is_empty() { Ok(graph.warnings(cores)) } else { Err(RunError::Graph(errors)) }
    }

    fn node(&mut self, name: &str, kind: Kind, spec: StageSpec, replicable: bool) -> usize {
        let plan = NodePlan { name: name.to_owned(), kind, replicable, spec };
        self.nodes.push(Node { plan, jobs: Box::new(|_| Vec::new()) });
        self.nodes.len() - 1
    }

    fn jobs(&mut self, node: usize, jobs: impl FnOnce(&Until) -> Vec<Job> + Send + 'static) {
        self.nodes[node].jobs = Box::new(jobs);
    }

    fn output<T: Message>(&mut self, from: usize) -> (Port<T>, Arc<Slot<T>>) {
        let slot = Slot::new();
        let plan = EdgePlan { from, to: None, carries: T::label(), capacity: self.default_capacity };
        let built = Arc::clone(&slot);
        self.edges.push(Edge { plan, capacity: None, build: Box::new(move |capacity| built.build(capacity)) });
        let port = Port { edge: self.edges.len() - 1, flow: Arc::clone(&self.identity), slot: Arc::clone(&slot) };
        (port, slot)
    }

    fn connect<T>(&mut self, node: usize, port: &Port<T>) {
        if self.owns(port) {
            self.edges[port.edge].plan.to = Some(node);
        } else {
            self.misuse.push(GraphError::ForeignPort(self.nodes[node].plan.name.clone()));
        }
    }

    fn owns<T>(&self, port: &Port<T>) -> bool {
        Arc::ptr_eq(&self.identity, &port.flow) && port.edge < self.edges.len()
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Flow").field(&self.graph()).finish()
    }
}
