//! The progress line as a pure function: numbers in, text out.

use std::time::Duration;

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const CURVE_CELLS: usize = 16;
const BAR_CELLS: usize = 12;

/// Values of the line; `None` is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub step: u64,
    pub total: Option<u64>,
    pub reward: Option<f64>,
    /// The last steps' mean rewards, oldest first.
    pub reward_curve: Vec<f64>,
    pub loss: Option<f64>,
    pub generated_per_second: Option<f64>,
    pub trained_per_second: Option<f64>,
    /// The newest step's largest sample staleness.
    pub staleness: Option<f64>,
    /// Stage that limits the run, in a few words.
    pub bottleneck: Option<String>,
    pub eta: Option<Duration>,
}

/// Renders the line in at most `width` characters. If it is too long, whole parts are dropped, the
/// least important first; the step stays.
pub fn render(snapshot: &Snapshot, width: usize) -> String {
    // In reading order, each with how much it is missed.
    let parts = [
        (8, snapshot.total.map(|total| bar(snapshot.step, total))),
        (9, Some(steps(snapshot.step, snapshot.total))),
        (5, snapshot.eta.map(|eta| format!("eta {}", duration(eta)))),
        (7, snapshot.reward.map(|reward| format!("reward {reward:.3}"))),
        (3, (snapshot.reward_curve.len() > 1).then(|| sparkline(&snapshot.reward_curve, CURVE_CELLS))),
        (6, snapshot.loss.map(|loss| format!("loss {loss:.4}"))),
        (4, snapshot.generated_per_second.map(|rate| format!("sampled {} tok/s", short(rate)))),
        (2, snapshot.trained_per_second.map(|rate| format!("trained {} tok/s", short(rate)))),
        (1, snapshot.staleness.map(|lag| format!("stale {lag}"))),
        (0, snapshot.bottleneck.clone()),
    ];
    (0..=9).map(|least| join(&parts, least)).find(|line| line.chars().count() <= width).unwrap_or_else(|| join(&parts, 9))
}

/// Joins the parts of at least this importance. A bar and a curve follow their numbers.
fn join(parts: &[(i32, Option<String>)], least: i32) -> String {
    let mut line = String::new();
    for (weight, part) in parts {
        if let Some(part) = part
            && *weight >= least
        {
            if !line.is_empty() {
                line.push_str(if matches!(*weight, 9 | 3) { " " } else { " · " });
            }
            line.push_str(part);
        }
    }
    line
}

fn bar(step: u64, total: u64) -> String {
    let share = if total == 0 { 1.0 } else { (step as f64 / total as f64).min(1.0) };
    let full = (share * BAR_CELLS as f64) as usize;
    "━".repeat(full) + &"┄".repeat(BAR_CELLS - full)
}

fn steps(step: u64, total: Option<u64>) -> String {
    match total {
        Some(total) => format!("step {step}/{total}"),
        None => format!("step {step}"),
    }
}

/// Renders the values as a row of at most `cells` small bars between the smallest and the largest,
/// each the mean of its share of values. Values that are not numbers do not count; a flat row is at
/// the lowest level.
pub fn sparkline(values: &[f64], cells: usize) -> String {
    let values: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    let cells = cells.min(values.len());
    let means: Vec<f64> = (0..cells)
        .map(|cell| &values[cell * values.len() / cells..(cell + 1) * values.len() / cells])
        .map(|share| share.iter().sum::<f64>() / share.len() as f64)
        .collect();
    let (low, high) = means.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &mean| (low.min(mean), high.max(mean)));
    let height = |mean: f64| if high > low { ((mean - low) / (high - low) * 7.0).round() as usize } else { 0 };
    means.into_iter().map(|mean| BARS[height(mean).min(7)]).collect()
}

/// Three digits and a magnitude: `842`, `5.12k`, `1.3M`.
fn short(value: f64) -> String {
    match value {
        _ if value >= 999_500.0 => format!("{:.2}M", value / 1e6),
        _ if value >= 99_950.0 => format!("{:.0}k", value / 1e3),
        _ if value >= 9_995.0 => format!("{:.1}k", value / 1e3),
        _ if value >= 999.5 => format!("{:.2}k", value / 1e3),
        _ => format!("{value:.0}"),
    }
}

/// The two largest units: `42s`, `1m32s`, `2h05m`, `3d04h`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Snapshot {
        Snapshot {
            step: 120,
            total: Some(400),
            reward: Some(0.4312),
            reward_curve: (0..120).map(|step| 0.1 + 0.003 * step as f64 + if step % 2 == 0 { 0.01 } else { -0.01 }).collect(),
            loss: Some(-0.01234),
            generated_per_second: Some(5123.4),
            trained_per_second: Some(842.0),
            staleness: Some(1.0),
            bottleneck: Some("generate busy 93%".into()),
            eta: Some(Duration::from_secs(92)),
        }
    }

    #[test]
    fn a_wide_line_says_everything() {
        insta::assert_snapshot!(render(&full(), 200), @"━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.431 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ · loss -0.0123 · sampled 5.12k tok/s · trained 842 tok/s · stale 1 · generate busy 93%");
    }

    #[test]
    fn a_narrow_line_keeps_what_is_missed_most() {
        let lines: Vec<String> = [150, 120, 100, 80, 60, 40, 20, 1].into_iter().map(|width| render(&full(), width)).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.431 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ · loss -0.0123 · sampled 5.12k tok/s · trained 842 tok/s · stale 1
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.431 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ · loss -0.0123 · sampled 5.12k tok/s
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.431 · loss -0.0123 · sampled 5.12k tok/s
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.431 · loss -0.0123
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · reward 0.431 · loss -0.0123
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · reward 0.431
        step 120/400
        step 120/400
        ");
    }

    #[test]
    fn a_line_fits_whenever_the_step_alone_does() {
        for width in "step 120/400".len()..220 {
            let line = render(&full(), width);
            assert!(line.chars().count() <= width && line.contains("step 120/400"), "{width}: {line}");
        }
    }

    #[test]
    fn an_unknown_length_and_no_numbers_yet_leave_the_step() {
        assert_eq!(render(&Snapshot::default(), 80), "step 0");
        assert_eq!(render(&Snapshot { total: Some(0), ..Snapshot::default() }, 80), "━━━━━━━━━━━━ step 0/0");
    }

    #[test]
    fn sparklines_survive_flat_short_and_broken_values() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[2.0; 5], 3), "▁▁▁");
        assert_eq!(sparkline(&[f64::NAN, 1.0, f64::INFINITY, 2.0], 4), "▁█");
        assert_eq!(sparkline(&[], 4), "");
    }

    #[test]
    fn durations_and_rates_keep_two_units_and_three_digits() {
        let shown = [0, 59, 60, 3599, 3600, 90_000].map(|seconds| duration(Duration::from_secs(seconds)));
        assert_eq!(shown, ["0s", "59s", "1m00s", "59m59s", "1h00m", "1d01h"]);
        let shown = [0.0, 999.4, 999.6, 9_994.0, 9_996.0, 99_960.0, 999_600.0].map(short);
        assert_eq!(shown, ["0", "999", "1.00k", "9.99k", "10.0k", "100k", "1.00M"]);
    }
}
