//! Curves of a run as text: how it learned, how it explores, and how fast it was.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::symbols::Marker;
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Widget};
use rollflow::observe::logs::{short, smoothed};

use super::{Evidence, SPEED};

/// Columns and lines of a plot.
const SIZE: (u16, u16) = (76, 9);

/// Curves of each plot: the first that the run has is drawn.
const CURVES: [&[&str]; 3] = [&["reward_mean", "pair_accuracy_ratio", "loss"], &["entropy_nats", "grad_norm"], &[SPEED]];

/// The plots, one below the other. Too short curves are left out.
pub fn of(run: &Evidence) -> String {
    let drawn = |names: &[&str]| names.iter().find_map(|name| plot(name, &smoothed(&run.series(name))));
    CURVES.iter().filter_map(|names| drawn(names)).collect()
}

/// A curve over its steps, with its range; `None` for fewer than three points.
fn plot(name: &str, values: &[f64]) -> Option<String> {
    if values.len() < 3 {
        return None;
    }
    let points: Vec<(f64, f64)> = values.iter().enumerate().map(|(at, value)| (at as f64, *value)).collect();
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    // A constant is a line in the middle.
    let room = if high > low { 0.0 } else { low.abs().max(1.0) };
    let curve = Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line).data(&points);
    let last = points.len() as f64 - 1.0;
    let steps = Axis::default().bounds([0.0, last]).labels(["1".to_owned(), values.len().to_string()]);
    let values = Axis::default().bounds([low - room, high + room]).labels([short(low - room), short(high + room)]);
    let area = Rect::new(0, 0, SIZE.0, SIZE.1);
    let mut buffer = Buffer::empty(area);
    Chart::new(vec![curve]).x_axis(steps).y_axis(values).legend_position(None).render(area, &mut buffer);
    let line = |y: u16| -> String {
        let cells = (0..area.width).map(|x| buffer[(x, y)].symbol());
        format!("  {}", cells.collect::<String>())
    };
    let lines: Vec<String> = (0..area.height).map(|y| line(y).trim_end().to_owned()).collect();
    Some(format!("\n  {name}, over the steps\n{}\n", lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_drawn_within_its_size_with_its_range() {
        let rising: Vec<f64> = (0..200).map(|at| f64::from(at) / 200.0).collect();
        let drawn = plot("reward_mean", &rising).unwrap();
        assert!(drawn.contains("reward_mean") && drawn.contains("0.995") && drawn.contains("200"), "{drawn}");
        assert!(drawn.lines().count() <= 11 && drawn.lines().all(|line| line.chars().count() <= 78), "{drawn}");
        let filled = |line: &str| line.chars().filter(|c| ('\u{2801}'..='\u{28ff}').contains(c)).count();
        assert!(drawn.lines().map(filled).sum::<usize>() > 40, "{drawn}");
        assert!(plot("loss", &[1.0; 50]).unwrap().contains("loss"));
        assert_eq!(plot("loss", &[1.0, 2.0]), None);
    }
}
