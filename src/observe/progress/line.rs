//! The progress line as a pure function: numbers in, text out.

use std::time::Duration;

use crate::flow::count;

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const CURVE_CELLS: usize = 16;
const BAR_CELLS: usize = 12;

/// Values of the line; `None` is left out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub step: u64,
    pub total: u64,
    /// The last steps' mean rewards, oldest first.
    pub rewards: Vec<f64>,
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
    let Snapshot { step, total, rewards, .. } = snapshot;
    let speed = |rate: f64| format!("{} tok/s", count(rate.round() as u64));
    // In reading order, each with how much it is missed.
    let parts = [
        (8, Some(bar(*step, *total))),
        (9, Some(format!("step {step}/{total}"))),
        (5, snapshot.eta.map(|eta| format!("eta {}", duration(eta)))),
        (7, rewards.last().map(|reward| format!("reward {reward:.3}"))),
        (3, (rewards.len() > 1).then(|| sparkline(rewards, CURVE_CELLS))),
        (6, snapshot.loss.map(|loss| format!("loss {loss:.4}"))),
        (4, snapshot.generated_per_second.map(|rate| format!("sampled {}", speed(rate)))),
        (2, snapshot.trained_per_second.map(|rate| format!("trained {}", speed(rate)))),
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
            total: 400,
            rewards: (0..120).map(|step| 0.1 + 0.003 * step as f64 + if step % 2 == 0 { 0.01 } else { -0.01 }).collect(),
            loss: Some(-0.01234),
            generated_per_second: Some(5123.4),
            trained_per_second: Some(842.0),
            staleness: Some(1.0),
            bottleneck: Some("generate busy 93%".into()),
            eta: Some(Duration::from_secs(92)),
        }
    }

    #[test]
    fn a_line_keeps_what_is_missed_most_and_fits_whenever_the_step_alone_does() {
        let lines: Vec<String> =
            [200, 150, 120, 100, 80, 60, 40, 20, 1].into_iter().map(|width| render(&full(), width)).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.447 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ · loss -0.0123 · sampled 5123 tok/s · trained 842 tok/s · stale 1 · generate busy 93%
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.447 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ · loss -0.0123 · sampled 5123 tok/s · trained 842 tok/s · stale 1
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.447 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ · loss -0.0123 · sampled 5123 tok/s
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.447 · loss -0.0123 · sampled 5123 tok/s
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · eta 1m32s · reward 0.447 · loss -0.0123
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · reward 0.447 · loss -0.0123
        ━━━┄┄┄┄┄┄┄┄┄ step 120/400 · reward 0.447
        step 120/400
        step 120/400
        ");
        for width in "step 120/400".len()..220 {
            let line = render(&full(), width);
            assert!(line.chars().count() <= width && line.contains("step 120/400"), "{width}: {line}");
        }
        assert_eq!(render(&Snapshot::default(), 80), "━━━━━━━━━━━━ step 0/0");
    }

    #[test]
    fn sparklines_survive_flat_short_and_broken_values() {
        assert_eq!(sparkline(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[2.0; 5], 3), "▁▁▁");
        assert_eq!(sparkline(&[f64::NAN, 1.0, f64::INFINITY, 2.0], 4), "▁█");
        assert_eq!(sparkline(&[], 4), "");
    }

    #[test]
    fn durations_keep_two_units() {
        let shown = [0, 59, 60, 3599, 3600, 90_000].map(|seconds| duration(Duration::from_secs(seconds)));
        assert_eq!(shown, ["0s", "59s", "1m00s", "59m59s", "1h00m", "1d01h"]);
    }
}
