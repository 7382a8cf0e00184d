//! The overview: time of stages by state, fill of edges, and the curves that matter most.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Row, Table};
use rollflow::flow::State;
use rollflow::observe::{EdgeActivity, StageShares};

use super::parts::{STATES, Theme, bar, count, legend, spark};
use crate::top::view::RunView;

/// Widths of the columns, except for the bar's.
const NAME: u16 = 14;
const BUSY: u16 = 5;
const EDGE: u16 = 37;
/// Width of an edge's fill.
const FILL: u16 = 6;
/// Share of an edge above which it is marked as full.
const FULL: f64 = 0.9;

/// Draws the pane.
pub fn draw(frame: &mut Frame, area: Rect, view: &RunView, theme: Theme) {
    let rows = rows(view);
    let curves = curves(view);
    let table = rows.len() as u16 + 1;
    let [table, states, _, rest] = Layout::vertical([
        Constraint::Length(table.min(area.height.saturating_sub(2 + curves.len() as u16))),
        Constraint::Length(1),
        Constraint::Length(u16::from(area.height > table + 2 + curves.len() as u16)),
        Constraint::Fill(1),
    ])
    .areas(area);
    draw_stages(frame, table, view, rows, theme);
    let names = State::ALL.map(|state| state.name().to_owned()).into_iter().zip(STATES);
    if !view.stages.is_empty() {
        frame.render_widget(legend(names, theme), states);
    }
    let height = (rest.height / curves.len() as u16).clamp(1, 4);
    for (at, (name, curve, colour)) in curves.into_iter().enumerate() {
        let area = Rect { y: rest.y + at as u16 * height, height, ..rest }.intersection(rest);
        spark(frame, area, name, curve, colour, theme);
    }
}

type Curves<'a> = Vec<(&'static str, Option<&'a crate::top::curve::Curve>, Color)>;

fn curves(view: &RunView) -> Curves<'_> {
    let metric = |key: &str| view.curves.get(key);
    let mut curves = vec![
        ("reward", metric("reward_mean"), Color::Green),
        ("loss", metric("loss"), Color::Magenta),
        ("generated tok/s", Some(&view.rates[0]), Color::Cyan),
        ("trained tok/s", Some(&view.rates[1]), Color::Blue),
        ("staleness, largest", metric("sample_staleness_max_versions"), Color::Yellow),
    ];
    // A pipeline without rewards has no staleness either, and may generate nothing.
    if metric("loss").is_some() && metric("reward_mean").is_none() {
        let counts = |curve: &crate::top::curve::Curve| curve.range().is_some_and(|(_, most)| most > 0.0);
        curves.retain(|(name, curve, _)| *name == "loss" || curve.is_some_and(counts));
    }
    curves
}

/// A stage and an edge that leaves it, where there is one: a row of the table.
fn rows(view: &RunView) -> Vec<(Option<&StageShares>, Option<&EdgeActivity>)> {
    let mut rows = Vec::new();
    for stage in &view.stages {
        let mut edges = view.edges.iter().filter(|edge| edge.from == stage.name);
        rows.push((Some(stage), edges.next()));
        rows.extend(edges.map(|edge| (None, Some(edge))));
    }
    rows
}

fn draw_stages(
    frame: &mut Frame,
    area: Rect,
    view: &RunView,
    rows: Vec<(Option<&StageShares>, Option<&EdgeActivity>)>,
    theme: Theme,
) {
    let edge_width = if view.edges.is_empty() { 0 } else { EDGE };
    let bar_width = area.width.saturating_sub(NAME + BUSY + edge_width + 3);
    let row = |(stage, edge): (Option<&StageShares>, Option<&EdgeActivity>)| {
        let share = |stage: &StageShares, state: State| stage.shares.get(state.name()).copied().unwrap_or(0.0);
        let name = stage.map_or(String::new(), |stage| match stage.workers {
            0 | 1 => format!(" {}", stage.name),
            workers => format!(" {} ×{workers}", stage.name),
        });
        let parts = stage.into_iter().flat_map(|stage| State::ALL.map(|state| share(stage, state))).zip(STATES);
        let busy = stage.map_or(String::new(), |stage| format!("{:>4.0}%", 100.0 * share(stage, State::Busy)));
        let edge = edge.map_or_else(Line::default, |edge| edge_line(edge, theme));
        Row::new([Line::from(name), bar(parts, bar_width, theme), Line::from(busy), edge])
    };
    let header = Row::new([" stage", "time by state", " busy", if edge_width > 0 { "edge" } else { "" }]).style(theme.dim());
    let widths = [NAME, bar_width, BUSY, edge_width].map(Constraint::Length);
    frame.render_widget(Table::new(rows.into_iter().map(row), widths).header(header).column_spacing(1), area);
    if view.stages.is_empty() {
        let area = Rect { y: area.y + area.height.min(1), height: 1, ..area }.intersection(frame.area());
        frame.render_widget(Line::from(" no times of stages yet").style(theme.dim()), area);
    }
}

/// Consumer, fill and throughput of an edge.
fn edge_line(edge: &EdgeActivity, theme: Theme) -> Line<'static> {
    let share = |part: u64, whole: usize| part as f64 / whole.max(1) as f64;
    let full = share(edge.items, edge.capacity.items).max(share(edge.tokens, edge.capacity.tokens));
    let colour = if full > FULL { Color::Red } else { Color::Cyan };
    let mut line = bar([(full, ('█', colour)), (1.0 - full.min(1.0), ('░', Color::DarkGray))], FILL, theme);
    let rate = match edge.tokens_per_second > 0.0 {
        true => format!("{} tok/s", count(edge.tokens_per_second.round())),
        false if edge.items_per_second < 100.0 => format!("{:.1}/s", edge.items_per_second),
        false => format!("{}/s", count(edge.items_per_second)),
    };
    line.spans.insert(0, Span::from(format!("→{:<9.9} ", edge.to)));
    line.push_span(Span::from(format!(" {:>3}/{:<3}", edge.items, edge.capacity.items)).bold());
    line.push_span(Span::styled(format!(" {rate:>11}"), theme.dim()));
    line
}
