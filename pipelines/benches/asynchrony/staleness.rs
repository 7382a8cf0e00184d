//! How long the arithmetic recipe takes to a sampled reward, by the bound on staleness, with and without correction: the runs.
//!
//! All runs of a seed begin with the same warmed-up weights. Nothing differs between runs but the bound, the correction and, for the one
//! that shows what a synchronous run can do with the whole machine, the threads.

use anyhow::Result;

use crate::learner::{Learner, Run};
use crate::page::Measured;

mod tables;

const RECIPE: &str = "recipes/grpo.toml";

/// What differs between runs.
#[derive(Clone, Copy, PartialEq)]
pub struct Arm {
    /// `flow.max_staleness`.
    pub bound: u64,
    /// Whether tokens are weighed by `truncated_is`.
    pub corrected: bool,
    /// Of generator and trainer each.
    pub threads: usize,
}

/// An arm and its run for every seed.
pub struct Tried {
    pub arm: Arm,
    pub runs: Vec<Run>,
}

impl Arm {
    fn plain(bound: u64) -> Self {
        Arm { bound, corrected: false, threads: 1 }
    }

    fn sets(self, quick: bool, seed: u64) -> Vec<String> {
        let Arm { bound, corrected, threads } = self;
        let mut sets = vec![
            format!("seed={seed}"),
            format!("flow.max_staleness={bound}"),
            format!("generate.threads={threads}"),
            format!("train.threads={threads}"),
            format!("train.target_reward={}", target(quick)),
        ];
        if corrected {
            sets.push("train.correction={ kind = \"truncated_is\", level = \"token\" }".to_owned());
        }
        if quick {
            sets.push("train.steps=60".to_owned());
        }
        sets
    }
}

impl Tried {
    /// Whether every run got there.
    pub fn all_arrived(&self, target: f64) -> bool {
        self.runs.iter().all(|run| run.reward() >= target)
    }
}

/// The sampled reward, mean over 20 steps, that ends a run.
fn target(quick: bool) -> f64 {
    if quick { 0.2 } else { 0.8 }
}

/// The bounds of the page.
fn bounds(quick: bool) -> &'static [u64] {
    if quick { &[0, 1, 8] } else { &[0, 1, 2, 4, 8] }
}

/// The part of the page.
pub fn measure(learner: &Learner) -> Result<Measured> {
    let both =
        bounds(learner.quick).iter().flat_map(|&bound| [false, true].map(|corrected| Arm { corrected, ..Arm::plain(bound) }));
    let arms = both.chain([Arm { threads: 2, ..Arm::plain(0) }]);
    let mut tried: Vec<Tried> = arms.map(|arm| Tried { arm, runs: Vec::new() }).collect();
    for &seed in learner.seeds() {
        let policy = learner.policy(&learner.plan(RECIPE, &[format!("seed={seed}")])?)?;
        // Seed by seed, so that a machine that slows down slows all arms alike.
        for Tried { arm, runs } in &mut tried {
            let run = learner.run(&learner.plan(RECIPE, &arm.sets(learner.quick, seed))?, &policy)?;
            let (seconds, steps, reward) = (run.last().seconds, run.rows.len(), run.reward());
            eprintln!("seed {seed}, {}: {seconds:.1} s, {steps} steps, reward {reward:.3}", tables::name(*arm));
            runs.push(run);
        }
    }
    Ok(tables::page(&tried, target(learner.quick)))
}
