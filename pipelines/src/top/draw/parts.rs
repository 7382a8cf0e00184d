//! Parts that several panes draw: colours, bars, sparklines, numbers.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::Sparkline;

use crate::command::out::short;
use crate::top::curve::Curve;

/// Colours of the screen. Marks differ without colours too.
#[derive(Clone, Copy, Debug, Default)]
pub struct Theme {
    /// If false, only bold and reversed text is used.
    pub colours: bool,
}

impl Theme {
    /// A colour.
    pub fn colour(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// Text of less weight.
    pub fn dim(self) -> Style {
        if self.colours { Style::new().dim() } else { Style::new() }
    }

    pub fn good(self) -> Style {
        self.colour(Color::Green)
    }

    pub fn warning(self) -> Style {
        self.colour(Color::Yellow)
    }

    pub fn bad(self) -> Style {
        self.colour(Color::Red)
    }
}

/// Mark and colour of each state of a worker, in the order of [`State::ALL`](rollflow::flow::State::ALL).
pub const STATES: [(char, Color); 5] =
    [('█', Color::Green), ('░', Color::DarkGray), ('▓', Color::Red), ('▒', Color::Yellow), ('▚', Color::Blue)];

/// Marks and colours of parts of a whole, by place.
pub const PARTS: [(char, Color); 6] =
    [('█', Color::Green), ('▒', Color::Cyan), ('░', Color::Yellow), ('▓', Color::Red), ('▚', Color::Blue), ('▞', Color::Magenta)];

/// A bar of parts with these shares of `width` characters. Shares are at least 0; their sum is at most 1.
pub fn bar(parts: impl IntoIterator<Item = (f64, (char, Color))>, width: u16, theme: Theme) -> Line<'static> {
    let (mut sum, mut drawn) = (0.0, 0);
    let part = |(share, (mark, colour)): (f64, (char, Color))| {
        sum += if share.is_finite() { share.max(0.0) } else { 0.0 };
        let end = (sum.min(1.0) * f64::from(width)).round() as usize;
        let length = end.saturating_sub(drawn);
        drawn = drawn.max(end);
        Span::styled(String::from_iter(std::iter::repeat_n(mark, length)), theme.colour(colour))
    };
    parts.into_iter().map(part).collect()
}

/// A legend of marks.
pub fn legend<'a>(names: impl IntoIterator<Item = (String, (char, Color))>, theme: Theme) -> Line<'a> {
    let entry = |(name, (mark, colour)): (String, (char, Color))| {
        [Span::styled(format!(" {mark}"), theme.colour(colour)), Span::styled(format!(" {name} "), theme.dim())]
    };
    names.into_iter().flat_map(entry).collect()
}

/// A number of at most five characters or so.
pub fn count(value: f64) -> String {
    // No minus before a zero.
    let value = value + 0.0;
    match value.abs() {
        size if !size.is_finite() => value.to_string(),
        size if size >= 999_500_000.0 => format!("{:.1e}", value),
        size if size >= 999_500.0 => format!("{:.1}M", value / 1e6),
        size if size >= 9_999.5 => format!("{:.1}k", value / 1e3),
        size if size >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        _ => short(value),
    }
}

/// Draws a curve: name and newest value at the left, and the curve scaled to its own range.
pub fn spark(frame: &mut Frame, area: Rect, name: &str, curve: Option<&Curve>, colour: Color, theme: Theme) {
    let [label, graph] = Layout::horizontal([Constraint::Length(30), Constraint::Fill(1)]).areas(area);
    let last = curve.and_then(|curve| curve.last);
    let text = vec![Span::from(format!(" {name:<18}")), Span::from(format!("{:>9}", super::number(last))).bold()];
    frame.render_widget(Line::from(text), label);
    if let Some(curve) = curve {
        frame.render_widget(sparkline(curve, graph).style(theme.colour(colour)), graph);
    }
}

/// The sparkline of a curve, scaled to its own range; the smallest value is visible.
pub fn sparkline(curve: &Curve, area: Rect) -> Sparkline<'static> {
    // Eighths of the lines.
    let levels = f64::from(area.height) * 8.0;
    let (least, most) = curve.range().unwrap_or_default();
    let level = |value: f64| match (value / 2.0 - least / 2.0) / (most / 2.0 - least / 2.0) {
        share if share.is_finite() => (1.0 + share * (levels - 1.0)).round() as u64,
        _ => (levels / 2.0) as u64,
    };
    Sparkline::default().max(levels as u64).data(curve.columns(area.width.into()).into_iter().map(level).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_wide_as_its_shares_whatever_they_are() {
        let text = |shares: &[f64]| {
            let parts = shares.iter().zip(STATES).map(|(share, mark)| (*share, mark));
            bar(parts, 10, Theme::default()).to_string()
        };
        assert_eq!(text(&[0.5, 0.25, 0.25]), "█████░░░▓▓");
        assert_eq!(text(&[0.333, 0.333, 0.334]), "███░░░░▓▓▓");
        assert_eq!(text(&[f64::NAN, -1.0, 2.0]), "▓▓▓▓▓▓▓▓▓▓");
        assert_eq!(text(&[0.0]), "");
    }

    #[test]
    fn counts_are_short() {
        let counts = [0.0, 0.0625, -0.5, 64.0, 123.4, 13_086.4, 2_500_000.0, 4e12, 3.45e-5].map(count);
        assert_eq!(counts, ["0", "0.0625", "-0.5000", "64", "123", "13.1k", "2.5M", "4.0e12", "3.45e-5"]);
    }
}
