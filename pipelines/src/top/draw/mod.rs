//! Frames of the view: a header, the pane and the keys.

mod engines;
mod learning;
mod overview;
mod parts;
mod samples;

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Padding, Paragraph, Wrap};
use rollflow::observe::duration;

use super::keys::{Order, Pane, Screen};
use super::view::{Connection, RunView};
pub use parts::Theme;
use parts::count;

const HELP: [(&str, &str); 10] = [
    ("Tab, 1-4", "switch panes"),
    ("↑ ↓, k j", "scroll, or choose a sample"),
    ("PgUp PgDn", "scroll by a page"),
    ("Home", "back to the top, or the newest sample"),
    ("p", "pause: no step is taken meanwhile"),
    ("r", "resume"),
    ("c", "save a checkpoint"),
    ("d", "drain: finish what is in flight, save and end"),
    ("s", "stop: save and end"),
    ("q, Ctrl-C", "quit; the run continues"),
];

/// Draws the view.
pub fn draw(frame: &mut Frame, view: &RunView, screen: &mut Screen, theme: Theme) {
    let keys = u16::from(!screen.printed);
    let message = message(view, screen, theme);
    let width = usize::from(frame.area().width.saturating_sub(2).max(1));
    let bottleneck = view.bottleneck.chars().count().div_ceil(width).clamp(1, 2) as u16;
    let rows = [1 + bottleneck, 1, u16::from(message.is_some()), keys].map(Constraint::Length);
    let [header, tabs, pane, message_row, keys_row] =
        Layout::vertical([rows[0], rows[1], Constraint::Fill(1), rows[2], rows[3]]).areas(frame.area());
    draw_header(frame, header, view, theme);
    frame.render_widget(tabs_line(screen.pane, theme), tabs);
    screen.page = pane.height.saturating_sub(2);
    match screen.pane {
        Pane::Overview => overview::draw(frame, pane, view, theme),
        Pane::Learning => learning::draw(frame, pane, view, screen, theme),
        Pane::Engines => engines::draw(frame, pane, view, screen, theme),
        Pane::Samples => samples::draw(frame, pane, view, screen, theme),
    }
    if let Some(message) = message {
        frame.render_widget(message, message_row);
    }
    if !screen.printed {
        frame.render_widget(keys_line(view), keys_row);
    }
    if screen.help {
        draw_help(frame);
    }
}

fn draw_header(frame: &mut Frame, area: Rect, view: &RunView, theme: Theme) {
    let [facts, bottleneck] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
    let (word, colour) = match (&view.connection, view.paused) {
        (Connection::Files, _) => ("files", theme.dim()),
        (Connection::Connecting, _) => ("connecting", theme.dim()),
        (Connection::Lost(_), _) => ("not connected", theme.bad()),
        (Connection::Connected, Some(true)) => ("paused", theme.warning()),
        (Connection::Connected, _) => ("live", theme.good()),
    };
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(word.len() as u16 + 2)]).areas(facts);
    let mut parts = vec![view.pipeline.clone(), view.state.clone()];
    parts.push(match view.planned {
        Some(planned) => format!("step {}/{planned}", view.step),
        None => format!("step {}", view.step),
    });
    parts.push(duration(Duration::try_from_secs_f64(view.seconds).unwrap_or_default()));
    if let Some(trainer) = view.versions.get("trainer") {
        let generator = view.versions.get("generator").filter(|version| *version != trainer);
        let generator = generator.map_or(String::new(), |version| format!("→v{version}"));
        parts.push(format!("weights v{trainer}{generator}"));
    }
    parts.retain(|part| !part.is_empty());
    let line = Line::from(vec![Span::from(format!(" {}", view.name)).bold(), Span::from(format!(" · {}", parts.join(" · ")))]);
    frame.render_widget(line, left);
    frame.render_widget(Line::from(Span::styled(format!("{word} "), colour)).alignment(Alignment::Right), right);
    let block = Block::new().padding(Padding::horizontal(1));
    let text = Paragraph::new(view.bottleneck.as_str()).wrap(Wrap { trim: true }).style(theme.dim());
    frame.render_widget(text.block(block), bottleneck);
}

fn tabs_line(shown: Pane, theme: Theme) -> Line<'static> {
    let tab = |pane: Pane| {
        let text = format!(" {} {} ", pane as usize + 1, pane.title());
        if pane == shown { Span::from(text).reversed().bold() } else { Span::styled(text, theme.dim()) }
    };
    Line::from_iter([Span::from(" ")].into_iter().chain(Pane::ALL.map(tab)))
}

/// The line above the keys: a question, a result, or what is missing.
fn message(view: &RunView, screen: &Screen, theme: Theme) -> Option<Line<'static>> {
    if let Some(question) = screen.asked.and_then(Order::question) {
        return Some(Line::from(format!(" {question} y/n")).style(theme.warning()).bold());
    }
    let (text, style) = match &view.connection {
        _ if !screen.message.is_empty() => (&screen.message, theme.warning()),
        Connection::Lost(why) => (why, theme.bad()),
        _ => (&view.note, theme.dim()),
    };
    (!text.is_empty()).then(|| Line::from(format!(" {text}")).style(style))
}

fn keys_line(view: &RunView) -> Line<'static> {
    let orders: &[&str] = match (view.without_orders(), view.paused) {
        (None, Some(true)) => &["r resume", "c checkpoint", "d drain", "s stop"],
        (None, _) => &["p pause", "c checkpoint", "d drain", "s stop"],
        _ => &[],
    };
    let all = ["q quit", "? help", "Tab pane", "↑↓ scroll"].iter().chain(orders);
    Line::from_iter(all.flat_map(|key| {
        let (letter, what) = key.split_once(' ').unwrap_or((key, ""));
        [Span::from(format!(" {letter}")).bold(), Span::from(format!(" {what} "))]
    }))
}

fn draw_help(frame: &mut Frame) {
    let width = HELP.iter().map(|(_, what)| what.chars().count()).max().unwrap_or(0) as u16 + 16;
    let area = frame.area().centered(Constraint::Length(width), Constraint::Length(HELP.len() as u16 + 2));
    let line =
        |(key, what): (&str, &str)| Line::from(vec![Span::from(format!(" {key:<11}")).bold(), Span::from(what.to_owned())]);
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(Vec::from(HELP.map(line))).block(Block::bordered().title(" Keys ")), area);
}

/// The number that a table shows for one that may be missing.
fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), count)
}

#[cfg(test)]
mod tests;
