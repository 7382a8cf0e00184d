//! Whether generation really overlaps training: the wall-clock of 200 steps against the busy time of the busier of generator and trainer.

use anyhow::Result;

use crate::chart::{Chart, Line, Series};
use crate::learner::{Learner, Row, Run};
use crate::page::{Measured, percent, spread};

const RECIPE: &str = "recipes/grpo.toml";
const BOUNDS: [u64; 5] = [0, 1, 2, 4, 8];

/// What a pipelined run may take, as a multiple of the busier stage.
const ALLOWED: f64 = 1.10;

const TENTHS: usize = 10;

/// The part of the page.
pub fn measure(learner: &Learner) -> Result<Measured> {
    let steps = if learner.quick { 40 } else { 200 };
    let mut tried: Vec<(u64, Vec<Run>)> = BOUNDS.map(|bound| (bound, Vec::new())).into();
    for &seed in learner.seeds() {
        let policy = learner.policy(&learner.plan(RECIPE, &[format!("seed={seed}")])?)?;
        for (bound, runs) in &mut tried {
            // No run gets there: all take the same steps.
            let never = "train.target_reward=2.0".to_owned();
            let sets = [format!("seed={seed}"), format!("flow.max_staleness={bound}"), format!("train.steps={steps}"), never];
            let run = learner.run(&learner.plan(RECIPE, &sets)?, &policy)?;
            eprintln!("seed {seed}, {bound}: {:.3} × the busier", over_busier(&run, 1));
            runs.push(run);
        }
    }
    Ok(page(&tried, steps))
}

/// 1 is a pipeline that never waits. In parts, each is held against the stage that is the busier during it.
fn over_busier(run: &Run, parts: usize) -> f64 {
    let busier: f64 = cut(run, parts).map(|part| part.generating.max(part.training)).sum();
    run.last().seconds / busier
}

/// The run in so many parts of as many steps, of which the first begins with the run.
fn cut(run: &Run, parts: usize) -> impl Iterator<Item = Part> {
    let ends = (1..=parts).map(move |part| part * run.rows.len() / parts);
    let mut from = [0.0; 3];
    ends.map(move |step| {
        let Row { seconds, generating, training, .. } = run.rows[step - 1];
        let [s, g, t] = std::mem::replace(&mut from, [seconds, generating, training]);
        Part { step, seconds: seconds - s, generating: generating - g, training: training - t }
    })
}

struct Part {
    /// Its last.
    step: usize,
    seconds: f64,
    generating: f64,
    training: f64,
}

fn page(tried: &[(u64, Vec<Run>)], steps: u64) -> Measured {
    let mut page = Measured::default();
    let rows = tried.iter().map(|(bound, runs)| {
        let each = |value: &dyn Fn(&Run) -> f64| runs.iter().map(value).collect::<Vec<f64>>();
        vec![
            bound.to_string(),
            spread(&each(&|run| 1e3 * run.last().seconds / run.rows.len() as f64), 0),
            percent(&each(&|run| run.last().generating / run.last().seconds)),
            percent(&each(&|run| run.last().training / run.last().seconds)),
            spread(&each(&|run| over_busier(run, 1)), 3),
            spread(&each(&|run| over_busier(run, run.rows.len())), 3),
        ]
    });
    let head = ["`max_staleness`", "ms a step", "generator busy", "trainer busy", "wall-clock / busier", "step by step"];
    page.table(&format!("{steps} steps"), &head, &rows.collect::<Vec<_>>());
    page.say(&format!("A pipeline with slack should stay within {ALLOWED:.2}:"));
    page.say(&tried.iter().filter(|(bound, _)| *bound > 0).map(kept).collect::<Vec<_>>().join("\n"));
    page.draw("busy", busy_over_steps(tried));
    page
}

fn kept((bound, runs): &(u64, Vec<Run>)) -> String {
    let keep = |parts: fn(&Run) -> usize| match runs.iter().filter(|run| over_busier(run, parts(run)) <= ALLOWED).count() {
        all if all == runs.len() => "all runs keep it".to_owned(),
        some => format!("**{some} of {} runs keep it**", runs.len()),
    };
    format!("- {bound}: as a whole {}; step by step {}.", keep(|_| 1), keep(|run| run.rows.len()))
}

/// How busy the busier is in each tenth of the first run.
fn busy_over_steps(tried: &[(u64, Vec<Run>)]) -> Chart {
    let series = tried.iter().filter_map(|(bound, runs)| {
        let share = |part: Part| (part.step as f64, 100.0 * part.generating.max(part.training) / part.seconds);
        let points = cut(runs.first()?, TENTHS).map(share).collect();
        Some(Series { name: bound.to_string(), points, line: Line::Medians })
    });
    let title = "Busy share of the busier stage, %, by max_staleness (seed 0)".into();
    Chart { title, x_label: "step".into(), from_zero: true, series: series.collect() }
}
