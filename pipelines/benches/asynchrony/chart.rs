//! Small charts as SVG text: axes with round ticks, and for each series its raw points with a line
//! through them.
//!
//! Colours follow the viewer's light or dark theme. No script and no font is needed. A chart of a
//! thousand points has about 30 KB.

use std::fmt::Write as _;

use rollflow::observe::logs::smoothed;
use rollflow::util::untrusted::html;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
/// The largest number that is drawn either way: an axis over larger ones has no finite ticks.
const DRAWN: f64 = 1e100;
/// More points of a series than this are thinned, after they were smoothed.
const POINTS_DRAWN: usize = 1000;
/// Number of colours of series; further series repeat them.
const COLOURS: usize = 5;

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#57606a}.title{font-size:15px;font-weight:600;fill:#1f2328}\
.page{fill:#fff}.grid{stroke:#d0d7de;stroke-width:1}.axis{stroke:#8c959f;stroke-width:1}\
.raw{fill:currentColor;fill-opacity:.3}.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}\
.c0{color:#0969da}.c1{color:#bc4c00}.c2{color:#1a7f37}.c3{color:#8250df}.c4{color:#6e5e2e}\
@media (prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#f0f6fc}.page{fill:#0d1117}\
.grid{stroke:#2f353d}.axis{stroke:#656c76}\
.c0{color:#58a6ff}.c1{color:#f0883e}.c2{color:#3fb950}.c3{color:#bc8cff}.c4{color:#d5c48a}}";

/// A chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    /// Stands above the chart.
    pub title: String,
    /// Stands below the horizontal axis.
    pub x_label: String,
    /// If true, the vertical axis begins at zero, however far from it the points are.
    pub from_zero: bool,
    /// The series. Several are named in a legend.
    pub series: Vec<Series>,
}

/// Points, and how the line goes through them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// The points, by ascending x. Those with a non-finite part, or one beyond 1e100 either way, are not drawn.
    pub points: Vec<(f64, f64)>,
    /// Line through the points.
    pub line: Line,
}

/// Line through the points of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Line {
    /// A centred moving mean: for a value over time.
    #[default]
    Smoothed,
    /// From the median of the points at one x to that at the next: for measurements that were repeated.
    Medians,
}

impl Chart {
    /// The chart as an SVG document.
    pub fn to_svg(&self) -> String {
        let finite =
            |series: &Series| series.points.iter().copied().filter(|(x, y)| x.abs() <= DRAWN && y.abs() <= DRAWN).collect();
        let points: Vec<Vec<(f64, f64)>> = self.series.iter().map(finite).collect();
        let all = || points.iter().flatten();
        let zero = (self.from_zero && all().next().is_some()).then_some(0.0);
        let x_axis = Axis::over(all().map(|point| point.0));
        let y_axis = Axis::over(all().map(|point| point.1).chain(zero));
        let at_x = |x: f64| LEFT + x_axis.share(x) * (WIDTH - LEFT - RIGHT);
        let at_y = |y: f64| HEIGHT - BOTTOM - y_axis.share(y) * (HEIGHT - TOP - BOTTOM);
        let (title, x_label) = (html(&self.title), html(&self.x_label));

        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\">\n\
             <title>{title}</title>\n<style>{STYLE}</style>\n<rect class=\"page\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"6\"/>\n\
             <text class=\"title\" x=\"{LEFT}\" y=\"24\">{title}</text>\n"
        );
        // Writing to a string cannot fail.
        let mut draw = |element: std::fmt::Arguments| writeln!(svg, "{element}").ok();
        for tick in y_axis.ticks() {
            let (y, right, text_x) = (at_y(tick), WIDTH - RIGHT, LEFT - 8.0);
            draw(format_args!("<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>"));
            let label = y_axis.label(tick);
            draw(format_args!("<text x=\"{text_x}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", y + 4.0));
        }
        let floor = HEIGHT - BOTTOM;
        for tick in x_axis.ticks() {
            let (x, label) = (at_x(tick), x_axis.label(tick));
            draw(format_args!("<line class=\"axis\" x1=\"{x:.1}\" y1=\"{floor}\" x2=\"{x:.1}\" y2=\"{}\"/>", floor + 5.0));
            draw(format_args!("<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", floor + 19.0));
        }
        draw(format_args!("<line class=\"axis\" x1=\"{LEFT}\" y1=\"{floor}\" x2=\"{}\" y2=\"{floor}\"/>", WIDTH - RIGHT));
        let (middle, below) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 10.0);
        draw(format_args!("<text x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">{x_label}</text>"));
        if all().next().is_none() {
            draw(format_args!("<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">no data</text>", HEIGHT / 2.0));
        }
        for (at, (series, points)) in self.series.iter().zip(&points).enumerate() {
            draw(format_args!("<g class=\"c{}\">", at % COLOURS));
            for &(x, y) in points.iter().step_by(stride(points)) {
                draw(format_args!("<circle class=\"raw\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\"/>", at_x(x), at_y(y)));
            }
            let line = series.line.through(points);
            let line = line.iter().step_by(stride(&line)).map(|&(x, y)| format!("{:.1},{:.1}", at_x(x), at_y(y)));
            draw(format_args!("<polyline class=\"line\" points=\"{}\"/>\n</g>", line.collect::<Vec<_>>().join(" ")));
        }
        if self.series.len() > 1 {
            self.legend(&mut svg);
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Draws names and colours on the line of the horizontal axis's label, from the right edge to
    /// the left.
    fn legend(&self, svg: &mut String) {
        let mut right = WIDTH - RIGHT;
        for (at, series) in self.series.iter().enumerate().rev() {
            let (name, y) = (html(&series.name), HEIGHT - 14.0);
            let left = right - 7.0 * series.name.chars().count() as f64 - 22.0;
            let (dash, text) = (left + 16.0, left + 20.0);
            writeln!(
                svg,
                "<g class=\"c{}\"><line class=\"line\" x1=\"{left}\" y1=\"{y}\" x2=\"{dash}\" y2=\"{y}\"/></g>\
                 <text x=\"{text}\" y=\"{}\">{name}</text>",
                at % COLOURS,
                y + 4.0
            )
            .ok();
            right = left - 12.0;
        }
    }
}

/// Interval of drawn points.
fn stride(points: &[(f64, f64)]) -> usize {
    points.len().div_ceil(POINTS_DRAWN).max(1)
}

impl Line {
    fn through(self, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
        match self {
            Line::Smoothed => {
                let smooth = smoothed(&points.iter().map(|point| point.1).collect::<Vec<_>>());
                points.iter().zip(smooth).map(|(&(x, _), y)| (x, y)).collect()
            }
            Line::Medians => {
                let repeated = points.chunk_by(|a, b| a.0 == b.0);
                repeated.map(|same| (same[0].0, median(same.iter().map(|point| point.1).collect()))).collect()
            }
        }
    }
}

/// The middle of the values in their order, or the mean of the two in the middle; NaN of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let at = |at: usize| values.get(at).copied().unwrap_or(f64::NAN);
    (at(last / 2) + at(last - last / 2)) / 2.0
}

/// One axis: a range that begins and ends at a tick.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = match (low, high) {
            _ if low > high => (0.0, 1.0),
            _ if low == high => (low - low.abs().max(1.0) / 2.0, high + high.abs().max(1.0) / 2.0),
            range => range,
        };
        let step = round_step((high - low) / 5.0);
        Axis { low: (low / step).floor() * step, high: (high / step).ceil() * step, step }
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let (low, step) = (self.low, self.step);
        (0..=((self.high - self.low) / step).round() as u32).map(move |tick| low + f64::from(tick) * step)
    }

    /// Just as many decimals as tell the ticks apart.
    fn label(&self, tick: f64) -> String {
        let size = self.low.abs().max(self.high.abs());
        if size >= 1e6 || self.step < 1e-4 {
            return format!("{tick:.2e}");
        }
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        // A tick that is zero but for rounding must not read "-0".
        format!("{:.decimals$}", if tick.abs() < self.step / 2.0 { 0.0 } else { tick })
    }
}

/// The smallest of 1, 2, 5 times a power of ten that is at least `least`.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&step| step >= least * 0.999).unwrap_or(10.0 * power)
}
