//! Frames of a fixed view.

use std::collections::BTreeMap;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use rollflow::flow::{Capacity, State};
use rollflow::observe::{EdgeActivity, FlowActivity, StageShares};

use super::*;
use crate::page::{EngineActivity, LiveEvent};
use crate::top::view::ShownSample;

const STAGES: [&str; 8] = ["prompts", "generate", "reward", "filter", "batch", "train", "sync", "log"];

fn stage(at: usize) -> StageShares {
    let busy = [0.01, 0.97, 0.03, 0.0, 0.02, 0.6, 0.3, 0.1][at];
    let other = [State::Credit, State::Weights, State::Starved, State::Blocked][at.min(3)];
    let shares = State::ALL.map(|state| {
        let share = match state {
            State::Busy => busy,
            state if state == other => 1.0 - busy,
            _ => 0.0,
        };
        (state.name().to_owned(), share)
    });
    StageShares { name: STAGES[at].to_owned(), workers: 1 + usize::from(at == 2), shares: BTreeMap::from(shares) }
}

fn edge(at: usize) -> EdgeActivity {
    EdgeActivity {
        from: STAGES[at].to_owned(),
        to: STAGES[at + 1].to_owned(),
        items: 9 * at as u64,
        tokens: 100,
        capacity: Capacity::items(64),
        items_per_second: 12.5,
        tokens_per_second: if at == 0 { 0.0 } else { 13_086.0 },
    }
}

fn event(second: u32) -> LiveEvent {
    let numbers = |all: &[(&str, f64)]| all.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
    LiveEvent {
        flow: FlowActivity {
            seconds: f64::from(second),
            bottleneck: "bottleneck: generate (busy 97%): raise threads, workers or max_num_seqs".to_owned(),
            stages: (0..STAGES.len()).map(stage).collect(),
            edges: (0..STAGES.len() - 1).map(edge).collect(),
        },
        versions: numbers(&[("trainer", 120.0), ("generator", 119.0)]),
        step: 120,
        steps: Some(120.0),
        generated_tokens: Some(f64::from(second) * 13_000.0),
        tokens: numbers(&[("generated", 1e6), ("trained", f64::from(second) * 12_000.0), ("in_flight", 4e5), ("filtered", 1e5)]),
        prompts: numbers(&[("entered", 240.0), ("trained", 200.0), ("open", 40.0)]),
        engines: ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
            .into_iter()
            .zip(["serving", "lost"])
            .map(|(name, state)| EngineActivity {
                name: name.to_owned(),
                state: state.to_owned(),
                version: Some(119.0),
                in_flight: Some(12.0),
                tokens: None,
            })
            .collect(),
        staleness: vec![(0, 130), (1, 830)],
        paused: Some(false),
    }
}

fn view() -> RunView {
    let mut view = RunView {
        name: "mine".to_owned(),
        pipeline: "grpo".to_owned(),
        state: "running".to_owned(),
        step: 120,
        planned: Some(1000),
        seconds: 200.0,
        connection: Connection::Connected,
        ..RunView::default()
    };
    for step in 1..=120_u32 {
        let at = f64::from(step);
        let row =
            [("reward_mean", at / 200.0), ("loss", (at / 9.0).sin()), ("entropy_nats", 3.0 - at / 100.0), ("grad_norm", 0.5)];
        let row = row.into_iter().chain([("sample_staleness_max_versions", f64::from(step % 3)), ("learning_rate", 3.45e-5)]);
        view.add_metrics(step.into(), row.map(|(name, value)| (name.to_owned(), value)));
    }
    for index in 0..12_u32 {
        view.add_sample(ShownSample {
            step: 120,
            group: 900 + u64::from(index / 4),
            index: index % 4,
            part: 0,
            status: if index == 10 { "truncated" } else { "completed" }.to_owned(),
            prompt: "What is 3 + 4? Answer with a number.".to_owned(),
            response: format!("3 + 4 is the sum of three and four.\nThat makes {index}."),
            reward: Some(f64::from(index % 2)),
            advantage: Some(f64::from(index % 2) - 0.5),
            length: 17,
        });
    }
    (1..20).for_each(|second| view.set_live(event(second)));
    view
}

fn frame(view: &RunView, mut screen: Screen, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, view, &mut screen, Theme { colours: true })).unwrap();
    for cell in &terminal.backend().buffer().content {
        assert!(!cell.symbol().contains(char::is_control), "{:?}", cell.symbol());
    }
    terminal.backend().to_string()
}

#[test]
fn a_run_that_generates_nothing_shows_no_speed_of_generation() {
    let mut view = RunView::default();
    view.add_metrics(1, [("loss".to_owned(), 0.5)]);
    (1..4).for_each(|second| view.set_live(LiveEvent { generated_tokens: Some(0.0), ..event(second) }));
    let shown = frame(&view, Screen::default(), 140, 40);
    assert!(shown.contains("trained tok/s") && !shown.contains("generated tok/s"), "{shown}");
}

fn of(pane: Pane) -> Screen {
    Screen { pane, ..Screen::default() }
}

#[test]
fn the_overview_of_a_live_run() {
    insta::assert_snapshot!("overview_80x24", frame(&view(), of(Pane::Overview), 80, 24));
    insta::assert_snapshot!("overview_140x40", frame(&view(), of(Pane::Overview), 140, 40));
}

#[test]
fn the_other_panes_of_a_live_run() {
    insta::assert_snapshot!("learning_80x24", frame(&view(), of(Pane::Learning), 80, 24));
    insta::assert_snapshot!("engines_80x24", frame(&view(), of(Pane::Engines), 80, 24));
    insta::assert_snapshot!("samples_80x24", frame(&view(), of(Pane::Samples), 80, 24));
}

#[test]
fn questions_help_and_a_lost_connection() {
    let asked = Screen { asked: Some(Order::Drain), ..Screen::default() };
    assert!(frame(&view(), asked, 80, 24).contains("save and end the run? y/n"));
    insta::assert_snapshot!("help_80x24", frame(&view(), Screen { help: true, ..Screen::default() }, 80, 24));
    let lost = RunView { connection: Connection::Lost("cannot connect".to_owned()), ..view() };
    let lost = frame(&lost, Screen::default(), 80, 24);
    assert!(lost.contains("not connected") && lost.contains("cannot connect"), "{lost}");
}

#[test]
fn any_size_and_an_empty_view_are_drawn() {
    for pane in Pane::ALL {
        for (width, height) in [(1, 1), (5, 3), (20, 5), (40, 10), (80, 24), (300, 100)] {
            for view in [RunView::default(), view()] {
                frame(&view, Screen { help: true, scroll: [u16::MAX; 4], ..of(pane) }, width, height);
            }
        }
    }
}

#[test]
fn texts_of_foreign_origin_reach_no_cell_as_control_characters() {
    let hostile = "a\x1b[2J\x1b]0;title\x07\u{9b}31m\u{202e}\tb\r\nc";
    let mut view = view();
    view.add_sample(ShownSample {
        status: hostile.to_owned(),
        prompt: hostile.to_owned(),
        response: hostile.repeat(10_000),
        ..ShownSample::default()
    });
    view.add_metrics(121, [(crate::top::view::line(hostile), 1.0)]);
    view.set_facts([(hostile.to_owned(), hostile.to_owned())]);
    let mut event = event(30);
    event.flow.bottleneck = hostile.to_owned();
    event.flow.stages.iter_mut().for_each(|stage| stage.name = hostile.to_owned());
    event.flow.edges.iter_mut().for_each(|edge| (edge.from, edge.to) = (hostile.to_owned(), hostile.to_owned()));
    event.engines.iter_mut().for_each(|engine| (engine.name, engine.state) = (hostile.to_owned(), hostile.to_owned()));
    event.tokens.insert(hostile.to_owned(), f64::INFINITY);
    view.set_live(event);
    for pane in Pane::ALL {
        let text = frame(&view, of(pane), 120, 60);
        assert!(pane == Pane::Learning || text.contains("\\u{1b}[2J"), "{pane:?}: {text}");
    }
}
