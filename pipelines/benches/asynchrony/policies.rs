//! What each treatment of answers under way costs a whole run when new weights arrive at every step: `generate.on_new_weights`.

use anyhow::Result;
use rollflow::observe::Metric;

use crate::learner::{Learner, Row, Run};
use crate::page::{Measured, spread};

const RECIPE: &str = "benches/asynchrony/long_answers.toml";
const POLICIES: [&str; 4] = ["swap", "recompute", "finish", "abort"];

/// Steps until all stages have work, and steps at the end for which nothing is generated any more: the batches of the recipe's window. They
/// are not counted.
const EDGE: usize = 5;

/// The part of the page.
pub fn measure(learner: &Learner) -> Result<Measured> {
    let steps = if learner.quick { 14 } else { 50 };
    let mut tried: Vec<(&str, Vec<Run>)> = POLICIES.map(|policy| (policy, Vec::new())).into();
    for &seed in learner.seeds() {
        for (policy, runs) in &mut tried {
            let sets = [format!("seed={seed}"), format!("train.steps={steps}"), format!("generate.on_new_weights={policy:?}")];
            let plan = learner.plan(RECIPE, &sets)?;
            let run = learner.run(&plan, &learner.policy(&plan)?)?;
            eprintln!("seed {seed}, {policy}: {:.1} s", run.last().seconds);
            runs.push(run);
        }
    }
    let rows = tried.iter().map(|(policy, runs)| {
        let parts: Vec<Row> = runs.iter().map(|run| run.between(EDGE, run.rows.len() - EDGE)).collect();
        let a_second = |fate: &str| spread(&parts.iter().map(|part| part.tokens[fate] / part.seconds).collect::<Vec<_>>(), 0);
        let steps: Vec<f64> = parts.iter().map(|part| (steps - 2 * EDGE) as f64 / part.seconds).collect();
        let mean = |metric| runs.iter().map(|run| run.mean(metric)).collect::<Vec<_>>();
        vec![
            format!("`{policy}`"),
            a_second("generated"),
            a_second("trained"),
            spread(&steps, 2),
            spread(&mean(Metric::LengthTrainedMean), 0),
            spread(&mean(Metric::TokenLag), 2),
        ]
    });
    let mut page = Measured::default();
    let head = ["`on_new_weights`", "generated tokens/s", "trained tokens/s", "steps/s", "mean length", "token lag, versions"];
    page.table(&format!("{steps} steps of long answers"), &head, &rows.collect::<Vec<_>>());
    Ok(page)
}
