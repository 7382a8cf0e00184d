//! Laws F1, F3, F5 and F7 on random graphs: whatever the shape, capacities, failures and shutdowns,
//! no item is lost or repeated, all token credit comes back, and every run ends. One that can't go
//! on ends with what each stage waits for, and no other ends so.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence};
use rollflow::flow::{
    Capacity, Control, Ended, Flow, Message, Port, Report, RunError, Simulation, StageError, StageWait, State, Until, Window,
    batch, filter, flat_map, from_iter, map_async, try_map,
};

/// No run takes anywhere near as long.
const DEADLOCK: Duration = Duration::from_secs(60);
/// Each attempt to simplify a deadlock takes that long.
const SIMPLIFICATIONS: u32 = 8;

/// An item that says where it is from, and weighs as much as its number makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Item(u64);

impl Message for Item {
    fn tokens(&self) -> usize {
        (self.0 % 11) as usize
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Passes all on, with workers, on a thread or as tasks.
    Pass {
        on_tokio: bool,
        workers: usize,
        ordered: bool,
    },
    /// Keeps items whose number is no multiple.
    Filter {
        multiple: u64,
    },
    /// Gathers items and spreads them again.
    Batch {
        n: usize,
    },
    Tee {
        branches: usize,
    },
    Merge {
        with: usize,
    },
}

/// What goes wrong, at the n-th item of some stage.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    None,
    Error(u64),
    Panic(u64),
    Drain(u64),
    Stop(u64),
    /// A sink has enough.
    Enough(u64),
    /// The admitted sources' windows are raised so often, and no more.
    Starve(u64),
    /// The same, and the run is drained when they were.
    StarveAndDrain(u64),
}

#[derive(Clone, Debug)]
struct Plan {
    /// Items per source, and whether the source is admitted one by one.
    sources: Vec<(u64, bool)>,
    /// What happens to which of the open ports, and the capacity of the edge that goes in.
    ops: Vec<(Op, usize, Capacity)>,
    trouble: Trouble,
    /// Which open port meets it, after how many operations.
    meets: (usize, usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (any::<bool>(), 1..4usize, any::<bool>()).prop_map(|(on_tokio, workers, ordered)| Op::Pass { on_tokio, workers, ordered }),
        2 => (2..6u64).prop_map(|multiple| Op::Filter { multiple }),
        1 => (1..9usize).prop_map(|n| Op::Batch { n }),
        2 => (1..4usize).prop_map(|branches| Op::Tee { branches }),
        2 => (2..4usize).prop_map(|with| Op::Merge { with }),
    ]
}

fn plan() -> impl Strategy<Value = Plan> {
    let capacity = (1..5usize, 1..30usize).prop_map(|(items, tokens)| Capacity::items(items).tokens(tokens));
    let trouble = prop_oneof![
        3 => Just(Trouble::None),
        1 => (0..200u64).prop_map(Trouble::Error),
        1 => (0..200u64).prop_map(Trouble::Panic),
        1 => (0..200u64).prop_map(Trouble::Drain),
        1 => (0..200u64).prop_map(Trouble::Stop),
        1 => (1..200u64).prop_map(Trouble::Enough),
        2 => (0..100u64).prop_map(Trouble::Starve),
        1 => (0..100u64).prop_map(Trouble::StarveAndDrain),
    ];
    let sources = prop::collection::vec((0..200u64, any::<bool>()), 1..4);
    let ops = prop::collection::vec((op(), any::<usize>(), capacity), 0..9);
    (sources, ops, trouble, (any::<usize>(), 0..9usize)).prop_map(|(sources, ops, trouble, meets)| Plan {
        sources,
        ops,
        trouble,
        meets,
    })
}

/// How often each item passes an open port if nothing goes wrong.
type Expected = BTreeMap<Item, usize>;
type Collected = Arc<Mutex<Vec<Item>>>;

struct Built {
    flow: Flow,
    /// By sink.
    expected: Vec<Expected>,
    collected: Vec<Collected>,
    /// Stages that pass every item on: their counts must agree.
    passing: Vec<String>,
}

fn build(plan: &Plan) -> Built {
    let mut flow = Flow::new("random");
    let mut open: Vec<(Port<Item>, Expected)> = Vec::new();
    let mut passing = Vec::new();
    for (index, &(items, admitted)) in plan.sources.iter().enumerate() {
        let numbers = (0..items).map(move |n| Item((index as u64) << 32 | n));
        let mut source = from_iter(numbers.clone());
        let window = Window::new(1);
        if admitted {
            source = source.with(|spec| spec.window(window.clone()));
        }
        let port = flow.source(&format!("source{index}"), source);
        let (trouble, control, mut raised) = (plan.trouble, flow.handle(), 0);
        flow.tap(&port, 1, move |_| {
            match trouble {
                Trouble::Starve(at) if raised >= at => return,
                Trouble::StarveAndDrain(at) if raised >= at => return control.drain(),
                _ => {}
            }
            raised += 1;
            window.raise(1);
        });
        open.push((port, numbers.map(|item| (item, 1)).collect()));
    }
    for (step, (op, which, capacity)) in plan.ops.iter().enumerate() {
        if step == plan.meets.1 {
            meet_trouble(plan, &mut flow, &mut open);
        }
        let (port, mut expected) = open.swap_remove(which % open.len());
        flow.edge(&port, *capacity);
        let name = format!("{step}");
        match *op {
            Op::Pass { on_tokio, workers, ordered } => {
                passing.push(name.clone());
                let port = if on_tokio {
                    let stage = map_async(async |item: Item| {
                        if item.0.is_multiple_of(3) {
                            tokio::task::yield_now().await;
                        }
                        Ok(item)
                    });
                    let stage = stage.workers(workers);
                    flow.stage(&name, port, if ordered { stage.ordered() } else { stage })
                } else {
                    let stage = try_map(|item: Item| Ok(item)).workers(workers);
                    flow.stage(&name, port, if ordered { stage.ordered() } else { stage })
                };
                open.push((port, expected));
            }
            Op::Filter { multiple } => {
                expected.retain(|item, _| !item.0.is_multiple_of(multiple));
                open.push((flow.stage(&name, port, filter(move |item: &Item| !item.0.is_multiple_of(multiple))), expected));
            }
            Op::Batch { n } => {
                let rows = flow.stage(&name, port, batch(n));
                flow.edge(&rows, *capacity);
                open.push((flow.stage(&format!("{step}'"), rows, flat_map(|row: Vec<Item>| row)), expected));
            }
            Op::Tee { branches } => {
                open.extend(flow.tee(&name, port, branches).into_iter().map(|port| (port, expected.clone())));
            }
            Op::Merge { with } => {
                passing.push(name.clone());
                let mut inputs = vec![port];
                while inputs.len() < with && !open.is_empty() {
                    let (port, more) = open.swap_remove(which % open.len());
                    more.into_iter().for_each(|(item, times)| *expected.entry(item).or_default() += times);
                    inputs.push(port);
                }
                open.push((flow.merge(&name, inputs), expected));
            }
        }
    }
    if plan.meets.1 >= plan.ops.len() {
        meet_trouble(plan, &mut flow, &mut open);
    }
    let (mut all_expected, mut all_collected) = (Vec::new(), Vec::new());
    for (index, (port, expected)) in open.into_iter().enumerate() {
        let collected = Collected::default();
        let keep = Arc::clone(&collected);
        flow.sink(&format!("sink{index}"), port, move |item: Item| keep.lock().unwrap().push(item));
        all_expected.push(expected);
        all_collected.push(collected);
    }
    Built { flow, expected: all_expected, collected: all_collected, passing }
}

fn meet_trouble(plan: &Plan, flow: &mut Flow, open: &mut Vec<(Port<Item>, Expected)>) {
    let (port, expected) = open.swap_remove(plan.meets.0 % open.len());
    let (trouble, control) = (plan.trouble, flow.handle());
    let mut seen = 0;
    let stage = try_map(move |item: Item| {
        seen += 1;
        cause(trouble, seen - 1, &control).map(|()| item)
    });
    open.push((flow.stage("trouble", port, stage), expected));
}

fn cause(trouble: Trouble, seen: u64, control: &Control) -> Result<(), StageError> {
    match trouble {
        Trouble::Error(at) if at == seen => Err(StageError::new("as planned")),
        Trouble::Panic(at) if at == seen => panic!("as planned"),
        Trouble::Drain(at) if at == seen => {
            control.drain();
            Ok(())
        }
        Trouble::Stop(at) if at == seen => {
            control.stop();
            Ok(())
        }
        _ => Ok(()),
    }
}

fn run_within_the_guard(mut flow: Flow, until: Until, seed: Option<u64>) -> Result<Report, RunError> {
    let drawing = flow.graph().to_mermaid();
    let (done, result) = channel();
    // Nothing outside helps these graphs, so a run that can't go on ends at once, and one that can must never be taken for it.
    flow.stall_timeout(Duration::ZERO);
    let run = move || match seed {
        None => flow.run(until),
        Some(seed) => flow.simulate(&Simulation::new(seed), until),
    };
    std::thread::spawn(move || done.send(run()).is_ok());
    result.recv_timeout(DEADLOCK).unwrap_or_else(|_| panic!("deadlock in\n{drawing}"))
}

/// The sources whose windows are not raised as often as they ask for credit: once for each item,
/// and once to find out that it was the last.
fn starved(plan: &Plan) -> Vec<String> {
    let Trouble::Starve(raised) = plan.trouble else { return Vec::new() };
    let starves = |(_, (items, admitted)): &(usize, &(u64, bool))| *admitted && *items > raised;
    plan.sources.iter().enumerate().filter(starves).map(|(index, _)| format!("source{index}")).collect()
}

fn check_stall(plan: &Plan, waits: &[StageWait]) {
    let credit = |wait: &&StageWait| wait.state == State::Credit;
    let named: Vec<String> = waits.iter().filter(credit).map(|wait| wait.stage.clone()).collect();
    assert_eq!(named, starved(plan), "law F7: those that wait for credit are named");
    let rest = waits.iter().filter(|wait| !credit(wait));
    assert!(rest.clone().all(|wait| wait.state == State::Starved), "{waits:?}");
    assert!(rest.count() > 0, "someone waits for the source");
}

fn check(plan: &Plan, seed: Option<u64>) {
    let Built { flow, expected, collected, passing } = build(plan);
    let until = match plan.trouble {
        Trouble::Enough(n) => Until::items("sink0", n),
        _ => Until::finished(),
    };
    let result = run_within_the_guard(flow, until, seed);
    assert_eq!(matches!(result, Err(RunError::Stalled { .. })), !starved(plan).is_empty(), "law F7: {result:?}");
    let (report, failures) = match result {
        Err(RunError::Stalled { waits, report, .. }) => {
            check_stall(plan, &waits);
            (*report, Vec::new())
        }
        Ok(report) => (report, Vec::new()),
        Err(RunError::Failed { failures, report }) => (*report, failures),
        Err(other) => panic!("{other}"),
    };
    if matches!(plan.trouble, Trouble::Error(_) | Trouble::Panic(_)) {
        assert!(failures.iter().all(|failure| failure.stage == "trouble") && failures.len() <= 1, "{failures:?}");
    } else {
        assert!(failures.is_empty(), "{failures:?}");
    }
    for edge in &report.edges {
        assert_eq!(edge.credit_out, 0, "credit is missing: {edge:?}");
        assert_eq!(edge.sent, edge.received + edge.depth_items, "items are missing: {edge:?}");
    }
    for worker in report.stages.iter().flat_map(|stage| &stage.workers) {
        assert_eq!(worker.total(), worker.wall);
    }
    let whole = match plan.trouble {
        Trouble::None => true,
        Trouble::Drain(_) | Trouble::StarveAndDrain(_) => false,
        Trouble::Enough(_) => false,
        _ => failures.is_empty() && report.ended == Ended::Finished,
    };
    for (expected, collected) in expected.iter().zip(&collected) {
        let mut times = Expected::new();
        for item in collected.lock().unwrap().iter() {
            *times.entry(*item).or_default() += 1;
        }
        if whole {
            assert_eq!(&times, expected, "lost or repeated");
        } else {
            assert!(
                times.iter().all(|(item, times)| expected.get(item).is_some_and(|most| times <= most)),
                "repeated: {times:?}"
            );
        }
    }
    if whole || matches!(plan.trouble, Trouble::Drain(_)) {
        assert!(
            report.edges.iter().all(|edge| edge.depth_items == 0 && edge.depth_tokens == 0),
            "a drain leaves nothing in flight"
        );
        for name in passing {
            let stage = report.stage(&name).unwrap();
            assert_eq!((stage.items_in, stage.tokens_in), (stage.items_out, stage.tokens_out), "{name}");
        }
    }
    if let Trouble::Enough(n) = plan.trouble {
        assert!(report.stage("sink0").unwrap().items_in <= n);
    }
}

proptest! {
    #![proptest_config(Config {
        cases: 150,
        max_shrink_iters: SIMPLIFICATIONS,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..Config::default()
    })]

    #[test]
    fn random_graphs_lose_nothing_repeat_nothing_and_end(plan in plan()) {
        check(&plan, None);
    }

    /// The same on a machine whose scheduler is drawn by a seed.
    #[test]
    fn simulated_graphs_lose_nothing_repeat_nothing_and_end(plan in plan(), seed in any::<u64>()) {
        check(&plan, Some(seed));
    }
}
