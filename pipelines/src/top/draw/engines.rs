//! Engines, the ledger of tokens and prompts, staleness, and facts about the run.

use std::collections::BTreeMap;

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Paragraph, Wrap};

use super::number;
use super::parts::{PARTS, Theme, bar, count, legend};
use crate::top::keys::{Pane, Screen};
use crate::top::view::{Connection, RunView};

/// Widest bar.
const BAR: u16 = 60;

/// Draws the pane.
pub fn draw(frame: &mut Frame, area: Rect, view: &RunView, screen: &mut Screen, theme: Theme) {
    let mut lines = engines(view, theme);
    let width = area.width.saturating_sub(20).min(BAR);
    lines.extend(ledger("Tokens", "generated", &view.tokens, width, theme));
    lines.extend(ledger("Prompts", "entered", &view.prompts, width, theme));
    lines.extend(staleness(view, width, theme));
    if !view.facts.is_empty() {
        lines.extend([Line::default(), Line::from(" Run").bold()]);
        lines.extend(view.facts.iter().map(|(name, value)| Line::from(format!(" {name:<18} {value}"))));
    }
    let scroll = &mut screen.scroll[Pane::Engines as usize];
    *scroll = (*scroll).min((lines.len() as u16).saturating_sub(1));
    frame.render_widget(Paragraph::new(Text::from(lines)).wrap(Wrap { trim: false }).scroll((*scroll, 0)), area);
}

fn engines(view: &RunView, theme: Theme) -> Vec<Line<'static>> {
    if view.engines.is_empty() {
        let why = match view.connection {
            Connection::Connected if view.edges.is_empty() => " the page of the run's process shows engines",
            Connection::Connected => " no servers: the run generates in its process, or not at all",
            _ => " engines are shown while the run's page is connected",
        };
        return vec![Line::from(why).style(theme.dim())];
    }
    let mut lines = vec![
        Line::from(format!(" {} engines", view.engines.len())).bold(),
        Line::from(format!(" {:<36} {:<9} {:>8} {:>9} {:>9}", "address", "state", "version", "in flight", "tokens"))
            .style(theme.dim()),
    ];
    lines.extend(view.engines.iter().map(|engine| {
        let version = engine.version.map_or_else(|| "–".to_owned(), |version| format!("v{version}"));
        let style = match engine.state.as_str() {
            "serving" => theme.good(),
            "lost" => theme.bad(),
            _ => theme.warning(),
        };
        let (in_flight, tokens) = (number(engine.in_flight), number(engine.tokens));
        Line::from(format!(" {:<36.36} {:<9.9} {version:>8} {in_flight:>9} {tokens:>9}", engine.name, engine.state)).style(style)
    }));
    lines
}

/// A ledger as a bar of its parts. The part `sum` is their sum.
fn ledger(title: &str, sum: &str, ledger: &BTreeMap<String, f64>, width: u16, theme: Theme) -> Vec<Line<'static>> {
    let mut parts: Vec<(&String, f64)> =
        ledger.iter().filter(|(part, count)| *part != sum && **count > 0.0).map(|(part, count)| (part, *count)).collect();
    parts.sort_by_key(|(part, _)| *part != "trained");
    let whole: f64 = parts.iter().map(|(_, count)| count).sum();
    if whole <= 0.0 {
        return Vec::new();
    }
    let marks = || PARTS.into_iter().cycle();
    let mut bar = bar(parts.iter().map(|(_, count)| count / whole).zip(marks()), width, theme);
    bar.spans.insert(0, " ".into());
    let names = parts.iter().map(|(part, number)| format!("{} {}", part.replace('_', " "), count(*number)));
    let head = format!(" {title}: {} {sum}", count(ledger.get(sum).copied().unwrap_or(whole)));
    vec![Line::default(), Line::from(head).bold(), bar, legend(names.zip(marks()), theme)]
}

fn staleness(view: &RunView, width: u16, theme: Theme) -> Vec<Line<'static>> {
    let most = view.staleness.iter().map(|(_, samples)| *samples).max().unwrap_or(0);
    if most == 0 {
        return Vec::new();
    }
    let row = |(lag, samples): &(u64, u64)| {
        let mut line = bar([(*samples as f64 / most as f64, ('█', Color::Yellow))], width, theme);
        line.spans.insert(0, format!(" {lag:>4} {:>9} ", count(*samples as f64)).into());
        line
    };
    let head = [Line::default(), Line::from(" Trained samples by versions of lag").bold()];
    head.into_iter().chain(view.staleness.iter().map(row)).collect()
}
