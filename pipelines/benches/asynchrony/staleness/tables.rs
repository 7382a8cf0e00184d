//! How long the arithmetic recipe takes to a sampled reward: what is shown of the runs, and whether asynchrony paid.

use rollflow::observe::Metric;

use super::{Arm, Tried};
use crate::chart::{Chart, Line, Series, median};
use crate::learner::Run;
use crate::page::{Measured, percent, spread};

/// What becomes of tokens that are never trained.
const WASTED: [&str; 5] = ["filtered", "stale", "truncated", "masked", "poisoned"];

/// Medians closer than that are called the same.
const NOISE: f64 = 0.05;

/// How an arm is called in a row.
pub fn name(arm: Arm) -> String {
    let corrected = if arm.corrected { ", corrected" } else { "" };
    let threads = if arm.threads > 1 { format!(", {} threads each", arm.threads) } else { String::new() };
    format!("{}{corrected}{threads}", arm.bound)
}

/// All of it.
pub fn page(tried: &[Tried], target: f64) -> Measured {
    let mut page = Measured::default();
    page.say(&verdicts(tried, target).join("\n"));
    let mut table = |title: &str, head: &[&str], row: &dyn Fn(&Tried) -> Vec<String>| {
        let rows: Vec<Vec<String>> = tried.iter().map(|of| [vec![name(of.arm)], row(of)].concat()).collect();
        page.table(title, &[&["`max_staleness`"], head].concat(), &rows);
    };
    table(&format!("To a sampled reward of {target}"), &["seconds", "steps", "ms a step", "arrived"], &|of| {
        let arrived = of.runs.iter().filter(|run| run.reward() >= target).count();
        vec![
            each(of, |run| run.last().seconds, 1),
            each(of, |run| run.rows.len() as f64, 0),
            each(of, |run| 1e3 * run.last().seconds / run.rows.len() as f64, 0),
            format!("{arrived} of {}", of.runs.len()),
        ]
    });
    table(
        "Tokens until then, in thousands",
        &["generated", "trained", "filtered", "stale or truncated", "masked or poisoned", "under way at the end", "wasted"],
        &|of| {
            let fates: [&[&str]; 6] =
                [&["generated"], &["trained"], &["filtered"], &["stale", "truncated"], &["masked", "poisoned"], &["in_flight"]];
            let wasted = |run: &Run| thousands(run, &WASTED) / thousands(run, &["generated"]);
            let counts = fates.iter().map(|fates| each(of, |run| thousands(run, fates), 0));
            counts.chain([percent(&of.runs.iter().map(wasted).collect::<Vec<_>>())]).collect()
        },
    );
    table("Busy, of the wall-clock", &["generator", "trainer", "both together"], &|of| {
        let share =
            |part: fn(&Run) -> f64| percent(&of.runs.iter().map(|run| part(run) / run.last().seconds).collect::<Vec<_>>());
        vec![
            share(|run| run.last().generating),
            share(|run| run.last().training),
            share(|run| run.last().generating + run.last().training),
        ]
    });
    let lags = lags(tried);
    let heads: Vec<String> =
        lags.iter().map(|(low, high)| if low == high { format!("{low}") } else { format!("{low}–{high}") }).collect();
    let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    table("Trained samples by staleness, in versions (median over the seeds)", &heads, &|of| {
        let share = |high: u64| {
            let all = |run: &Run| run.staleness.iter().map(|(_, count)| count).sum::<f64>();
            let own = |run: &Run| run.staleness.iter().filter(|(bound, _)| *bound == high).map(|(_, count)| count).sum::<f64>();
            100.0 * median(of.runs.iter().map(|run| own(run) / all(run)).collect())
        };
        lags.iter().map(|(_, high)| if *high > of.arm.bound { String::new() } else { format!("{:.0}%", share(*high)) }).collect()
    });
    table(
        "Generator against trainer, mean over the steps",
        &["gap, nats", "k3, nats", "effective sample size", "clipped"],
        &|of| {
            vec![
                each(of, |run| run.mean(Metric::LogProbGapMean), 3),
                each(of, |run| run.mean(Metric::ApproxKl), 4),
                percent(&of.runs.iter().map(|run| run.mean(Metric::ImportanceSamples)).collect::<Vec<_>>()),
                percent(&of.runs.iter().map(|run| run.mean(Metric::ClipFraction)).collect::<Vec<_>>()),
            ]
        },
    );
    page.draw("time", by_bound(tried, &format!("Seconds to a sampled reward of {target}"), |run| run.last().seconds));
    page.draw("gap", by_bound(tried, "Gap of log-probabilities, nats", |run| run.mean(Metric::LogProbGapMean)));
    page.draw("learning", learning(tried));
    page
}

fn each(of: &Tried, value: impl Fn(&Run) -> f64, decimals: usize) -> String {
    spread(&of.runs.iter().map(value).collect::<Vec<_>>(), decimals)
}

fn thousands(run: &Run, fates: &[&str]) -> f64 {
    fates.iter().map(|fate| run.last().tokens[fate]).sum::<f64>() / 1e3
}

/// The buckets that any run may fill, by the smallest and the largest staleness in them.
fn lags(tried: &[Tried]) -> Vec<(u64, u64)> {
    let most = tried.iter().map(|of| of.arm.bound).max().unwrap_or(0);
    let highs =
        tried.iter().flat_map(|of| &of.runs).map(|run| &run.staleness).next().into_iter().flatten().map(|(high, _)| *high);
    let mut low = 0;
    highs.map(|high| (std::mem::replace(&mut low, high + 1), high)).filter(|(low, _)| *low <= most).collect()
}

/// Whether each looser bound, each correction and the second thread paid, seed against seed.
fn verdicts(tried: &[Tried], target: f64) -> Vec<String> {
    let find = |arm: Arm| tried.iter().find(|of| of.arm == arm);
    let plain: Vec<&Tried> = tried.iter().filter(|of| !of.arm.corrected && of.arm.threads == 1).collect();
    let bounds = plain.windows(2).map(|pair| (Some(pair[1]), Some(pair[0])));
    // Where nothing is stale there is nothing to correct.
    let corrections = plain.iter().filter(|of| of.arm.bound > 0).map(|of| (find(Arm { corrected: true, ..of.arm }), Some(*of)));
    let whole_machine = (find(Arm::plain(1)), find(Arm { threads: 2, ..Arm::plain(0) }));
    let pairs = bounds.chain([whole_machine]).chain(corrections);
    pairs.filter_map(|(a, b)| Some(verdict(a?, b?, target))).collect()
}

fn verdict(of: &Tried, against: &Tried, target: f64) -> String {
    let both = || of.runs.iter().zip(&against.runs);
    let ratio = median(both().map(|(a, b)| a.last().seconds / b.last().seconds).collect());
    let steps = median(both().map(|(a, b)| a.rows.len() as f64 / b.rows.len() as f64).collect());
    let (sooner, seeds) = (both().filter(|(a, b)| a.last().seconds < b.last().seconds).count(), of.runs.len());
    let judged = match sooner {
        _ if !of.all_arrived(target) => "**does not arrive with every seed**",
        _ if sooner == seeds && ratio <= 1.0 - NOISE => "pays",
        0 if ratio >= 1.0 + NOISE => "**does not pay: it costs**",
        _ => "**does not pay: no clear difference**",
    };
    let (of, against) = (name(of.arm), name(against.arm));
    format!(
        "- {of} against {against}: {ratio:.2} × the seconds, {steps:.2} × the steps, sooner with {sooner} of {seeds} seeds: {judged}."
    )
}

fn by_bound(tried: &[Tried], title: &str, value: impl Fn(&Run) -> f64) -> Chart {
    let series = [("as it is", false), ("corrected", true)].map(|(name, corrected)| {
        let arms = tried.iter().filter(|of| of.arm.corrected == corrected && of.arm.threads == 1);
        let points = arms.flat_map(|of| of.runs.iter().map(|run| (of.arm.bound as f64, value(run)))).collect();
        Series { name: name.into(), points, line: Line::Medians }
    });
    Chart { title: title.into(), x_label: "max_staleness".into(), from_zero: true, series: series.into() }
}

/// Of each bound the run in the middle.
fn learning(tried: &[Tried]) -> Chart {
    let plain = tried.iter().filter(|of| !of.arm.corrected && of.arm.threads == 1);
    let series = plain.filter_map(|of| {
        let mut runs: Vec<&Run> = of.runs.iter().collect();
        runs.sort_by(|a, b| a.last().seconds.total_cmp(&b.last().seconds));
        let points = runs.get(runs.len() / 2)?.rows.iter().map(|row| (row.seconds, row.reward())).collect();
        Some(Series { name: of.arm.bound.to_string(), points, line: Line::Smoothed })
    });
    let title = "Sampled reward, by max_staleness (the seed in the middle)".into();
    Chart { title, x_label: "seconds".into(), from_zero: true, series: series.collect() }
}
