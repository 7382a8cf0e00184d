//! Whether generation really overlaps training: the wall-clock of 200 steps against the busy time of the busier of generator and trainer.

use anyhow::Result;
use rollflow::observe::chart::{Chart, Line, Series};

use crate::learner::{Learner, Row, Run};
use crate::page::{Measured, percent, spread};

const RECIPE: &str = "recipes/grpo.toml";
const BOUNDS: [u64; 5] = [0, 1, 2, 4, 8];

/// What a pipelined run may take, as a multiple of the busier stage.
const ALLOWED: f64 = 1.10;

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
            eprintln!("seed {seed}, {bound}: {:.3} × the busier", over_busier(run.last()));
            runs.push(run);
        }
    }
    Ok(page(&tried, steps))
}

/// 1 is a pipeline that never waits.
fn over_busier(row: &Row) -> f64 {
    row.seconds / row.generating.max(row.training)
}

fn page(tried: &[(u64, Vec<Run>)], steps: u64) -> Measured {
    let mut page = Measured::default();
    let rows = tried.iter().map(|(bound, runs)| {
        let each = |value: fn(&Row) -> f64| runs.iter().map(|run| value(run.last())).collect::<Vec<f64>>();
        let a_step: Vec<f64> = each(|row| row.seconds).iter().map(|seconds| 1e3 * seconds / steps as f64).collect();
        let busy =
            |part: fn(&Row) -> f64| percent(&runs.iter().map(|run| part(run.last()) / run.last().seconds).collect::<Vec<_>>());
        let (generator, trainer) = (busy(|row| row.generating), busy(|row| row.training));
        vec![bound.to_string(), spread(&a_step, 0), generator, trainer, spread(&each(over_busier), 3)]
    });
    let head = ["`max_staleness`", "ms a step", "generator busy", "trainer busy", "wall-clock / busier"];
    page.table(&format!("{steps} steps"), &head, &rows.collect::<Vec<_>>());
    let pipelined = || tried.iter().filter(|(bound, _)| *bound > 0).flat_map(|(_, runs)| runs);
    let (kept, all) = (pipelined().filter(|run| over_busier(run.last()) <= ALLOWED).count(), pipelined().count());
    page.say(&format!("At most {ALLOWED:.2} is asked for at `max_staleness` ≥ 1: {kept} of {all} runs."));
    page.draw("busy", busy_over_steps(tried));
    page
}

/// How busy the busier is, from each tenth of the first run to the next.
fn busy_over_steps(tried: &[(u64, Vec<Run>)]) -> Chart {
    let series = tried.iter().filter_map(|(bound, runs)| {
        let rows = &runs.first()?.rows;
        let marks: Vec<usize> = (0..=10).map(|tenth| tenth * (rows.len() - 1) / 10).collect();
        let points = marks.windows(2).map(|part| {
            let (from, to) = (&rows[part[0]], &rows[part[1]]);
            let busy = (to.generating - from.generating).max(to.training - from.training);
            (part[1] as f64, 100.0 * busy / (to.seconds - from.seconds))
        });
        Some(Series { name: bound.to_string(), points: points.collect(), line: Line::Medians })
    });
    let title = "Busy share of the busier stage, %, by max_staleness".into();
    Chart { title, x_label: "step".into(), from_zero: true, series: series.collect() }
}
