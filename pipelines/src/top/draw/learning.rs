//! The learning pane: every metric as a sparkline with its newest value and range, the main ones first.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Stylize};
use ratatui::text::{Line, Span};

use super::parts::{Theme, count, sparkline};
use crate::top::curve::Curve;
use crate::top::keys::{Pane, Screen};
use crate::top::view::RunView;

/// Metrics that come first, where a run has them.
const MAIN: [&str; 21] = [
    "reward_mean",
    "loss",
    "eval_greedy_accuracy_ratio",
    "eval_accuracy_ratio",
    "eval_loss",
    "group_pass_ratio",
    "pair_accuracy_ratio",
    "perplexity_tokens",
    "entropy_nats",
    "approx_kl_nats",
    "kl_loss_mean_nats",
    "kl_reward_mean_nats",
    "clip_ratio",
    "grad_norm",
    "length_trained_mean_tokens",
    "log_prob_gap_mean_nats",
    "importance_effective_sample_ratio",
    "token_lag_mean_versions",
    "learning_rate",
    "critic_loss",
    "reward_std",
];
/// Widest and lowest cell of a metric.
const WIDTH: u16 = 40;
const HEIGHT: u16 = 4;

/// Draws the pane.
pub fn draw(frame: &mut Frame, area: Rect, view: &RunView, screen: &mut Screen, theme: Theme) {
    let main = MAIN.iter().filter_map(|name| view.curves.get_key_value(*name));
    let others = view.curves.iter().filter(|(name, _)| !MAIN.contains(&name.as_str()));
    let curves: Vec<(&String, &Curve)> = main.chain(others).filter(|(_, curve)| curve.last.is_some()).collect();
    if curves.is_empty() {
        frame.render_widget(Line::from(" no metrics yet").style(theme.dim()), area);
        return;
    }
    let columns = usize::from((area.width / WIDTH).max(1));
    let (rows, shown) = (curves.len().div_ceil(columns), usize::from((area.height / HEIGHT).max(1)));
    // A line of the scroll is a row of metrics.
    let scroll = &mut screen.scroll[Pane::Learning as usize];
    *scroll = (*scroll).min(rows.saturating_sub(shown) as u16);
    screen.page = shown as u16;
    let height = (area.height / rows.min(shown) as u16).clamp(2, 8);
    let cells = curves.chunks(columns).skip(usize::from(*scroll)).take(shown).enumerate();
    for (at, row) in cells {
        let line = Rect { y: area.y + at as u16 * height, height, ..area }.intersection(area);
        let areas = Layout::horizontal(vec![Constraint::Fill(1); columns]).spacing(1).split(line);
        row.iter().zip(areas.iter()).for_each(|((name, curve), area)| draw_metric(frame, *area, name, curve, theme));
    }
}

fn draw_metric(frame: &mut Frame, area: Rect, name: &str, curve: &Curve, theme: Theme) {
    let (least, most) = curve.range().unwrap_or_default();
    let last = count(curve.last.unwrap_or_default());
    let range = format!("  {} … {}", count(least), count(most));
    let room = usize::from(area.width).saturating_sub(last.len() + 3);
    let mut title = Line::from(vec![Span::from(format!(" {name:.room$} ")), Span::from(last).bold()]);
    if title.width() + range.chars().count() <= area.width.into() {
        title.push_span(Span::styled(range, theme.dim()));
    }
    let gap = u16::from(area.height > 3);
    let [head, graph, _] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(gap)]).areas(area);
    frame.render_widget(title, head);
    let graph = Rect { x: graph.x + 1, width: graph.width.saturating_sub(1), ..graph };
    frame.render_widget(sparkline(curve, graph).style(theme.colour(Color::Cyan)), graph);
}
