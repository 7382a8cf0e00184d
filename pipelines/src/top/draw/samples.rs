//! The newest samples as a list, and the text of the chosen one.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Borders, Paragraph, Row, Table, TableState, Wrap};

use super::parts::{Theme, count};
use crate::top::keys::{Pane, Screen};
use crate::top::view::{RunView, ShownSample};

/// Characters of a completion that its row takes.
const CELL: usize = 400;

/// Draws the pane.
pub fn draw(frame: &mut Frame, area: Rect, view: &RunView, screen: &mut Screen, theme: Theme) {
    let place = screen.place(view);
    let Some(chosen) = view.samples.iter().rev().nth(place) else {
        let why = " no samples yet; observe.rollouts_every = 1 records those of every step";
        frame.render_widget(Line::from(why).style(theme.dim()), area);
        return;
    };
    let list = (view.samples.len() as u16 + 1).min(area.height / 2);
    let [list, text] = Layout::vertical([Constraint::Length(list), Constraint::Fill(1)]).areas(area);
    let row = |sample: &ShownSample| {
        let first = sample.response.replace('\n', "⏎").chars().take(CELL).collect::<String>();
        Row::new([
            Line::from(format!(" {}", sample.step)),
            Line::from(sample.name()),
            Line::from(reward(sample)).style(colour(sample, theme)),
            Line::from(count(sample.length as f64)).right_aligned(),
            status(sample, theme),
            Line::from(first),
        ])
    };
    let widths = [7, 9, 8, 6, 10].map(Constraint::Length).into_iter().chain([Constraint::Fill(1)]);
    let head = Row::new([" step", "sample", "reward", "tokens", "status", "completion"]).style(theme.dim());
    let table = Table::new(view.samples.iter().rev().map(row), widths)
        .header(head)
        .row_highlight_style(ratatui::style::Style::new().reversed());
    frame.render_stateful_widget(table, list, &mut TableState::new().with_selected(place));
    draw_text(frame, text, chosen, screen, theme);
}

fn draw_text(frame: &mut Frame, area: Rect, sample: &ShownSample, screen: &mut Screen, theme: Theme) {
    let mut text = Text::default();
    text.push_line(Line::from("Prompt").bold());
    text.lines.extend(sample.prompt.lines().map(|line| Line::from(line.to_owned()).style(theme.dim())));
    text.push_line(Line::from("Completion").bold());
    text.lines.extend(sample.response.lines().map(|line| Line::from(line.to_owned())));
    let advantage = sample.advantage.map_or(String::new(), |advantage| format!(" · advantage {}", count(advantage)));
    let title = format!(
        " step {} · {} · reward {}{advantage} · {} tokens · {} ",
        sample.step,
        sample.name(),
        reward(sample),
        sample.length,
        sample.status
    );
    let block = Block::new().borders(Borders::TOP).title(Span::from(title).bold());
    let inside = block.inner(area);
    // At least as many lines as the text is wrapped into.
    let width = usize::from(inside.width.max(1));
    let wrapped: usize = text.lines.iter().map(|line| 1 + 2 * line.width() / width).sum();
    let scroll = &mut screen.scroll[Pane::Samples as usize];
    *scroll = (*scroll).min(wrapped.saturating_sub(inside.height.into()) as u16);
    screen.page = inside.height;
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }).scroll((*scroll, 0)).block(block), area);
}

fn reward(sample: &ShownSample) -> String {
    sample.reward.map_or_else(|| "–".to_owned(), |reward| format!("{reward:.3}"))
}

/// Green for samples that are reinforced, red for the opposite.
fn colour(sample: &ShownSample, theme: Theme) -> ratatui::style::Style {
    match sample.advantage {
        Some(advantage) if advantage > 0.0 => theme.good(),
        Some(advantage) if advantage < 0.0 => theme.bad(),
        _ => ratatui::style::Style::new(),
    }
}

fn status(sample: &ShownSample, theme: Theme) -> Line<'static> {
    let line = Line::from(sample.status.clone());
    if sample.status == "completed" { line } else { line.style(theme.warning()) }
}
