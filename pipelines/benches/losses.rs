//! What an algorithm costs: the time of everything that is neither the transformer's forward nor its backward pass (advantages, collating, the loss
//! with its derivatives, corrections), against a whole training step on the same batch. One thread, the model of the recipes.
//!
//! `cargo bench --package rollflow-pipelines --bench losses -- [short|long]`. Short is the recipes' batch, 32 groups of 8 answers of a few tokens;
//! long is 64 answers of 512. The step is that of `grpo`: what a loss needs besides (a second forward pass) would make its share smaller.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use rollflow::algo::{Advantage, Divergence, Importance, Level, OffPolicy, Over, Proximal, Rejection};
use rollflow::data::Tokenizer;
use rollflow::model::ModelConfig;
use rollflow::prelude::*;
use rollflow::recipe::parse;
use rollflow::train::{TrainBatch, assign_advantages, collate};
use rollflow_pipelines::Registry;

/// Every `train.loss.kind`.
const LOSSES: [&str; 12] =
    ["grpo", "dapo", "gspo", "cispo", "sapo", "gpg", "dro", "dppo", "vespo", "geo_mean", "clip_cov", "kl_cov"];

/// Steps that are timed.
const STEPS: usize = 12;

/// The most that it may be of a step.
const SHARE: f64 = 0.05;

fn main() -> Result<()> {
    tch::set_num_threads(1);
    let size = std::env::args().skip(1).find(|arg| !arg.starts_with("--"));
    let mut worst = 0.0_f64;
    for (name, (groups, size_of_group, tokens)) in [("short", (32, 8, 1..4)), ("long", (8, 8, 512..513))] {
        if size.as_deref().is_none_or(|size| size == name) {
            worst = worst.max(measure(name, batch(groups, size_of_group, tokens))?);
        }
    }
    println!("the largest share is {:.2}% of a step; at most {:.0}% is meant to be", 100.0 * worst, 100.0 * SHARE);
    Ok(())
}

/// Sampled by the version before, with rewards of 0 and 1.
fn batch(groups: u64, size: u32, tokens: std::ops::Range<u64>) -> Batch {
    let answer = |prompt: &Prompt, index: u32| {
        let n = prompt.ordinal * u64::from(size) + u64::from(index);
        let mut sample = Sample::begin(prompt, index, &[5, (n % 10) as u32 + 2, 9, 11]);
        let length = tokens.start + n % (tokens.end - tokens.start);
        (0..length).for_each(|t| sample.push(((n * 7 + t * 3) % 60) as u32 + 2, log_prob(n, t) as f32, 1));
        sample.reward = Some(f64::from(n.is_multiple_of(3)));
        sample
    };
    let group = |ordinal| {
        let prompt = Prompt { ordinal, ..Prompt::default() };
        Group { samples: (0..size).map(|index| answer(&prompt, index)).collect(), prompt: Arc::new(prompt), ..Group::default() }
    };
    Batch { groups: (0..groups).map(group).collect(), ..Batch::default() }
}

/// Some number between −4 and 0.
fn log_prob(n: u64, t: u64) -> f64 {
    ((n * 131 + t * 31) % 97) as f64 / -25.0
}

/// Prints a table for one batch; gives the largest share.
fn measure(name: &str, mut batch: Batch) -> Result<f64> {
    let advantage = Advantage::default();
    assign_advantages(&mut batch, &advantage)?;
    let samples: Vec<&Sample> = batch.samples().collect();
    let collated = TrainBatch { version: 2, ..collate(&samples, Aggregation::TokenMean)? };
    let (all, tokens) = (collated.all(), collated.batch_tokens);
    let step = step(&collated)?;
    println!("{name}: {} answers, {tokens} trained tokens; a step takes {:.2} ms", samples.len(), 1e3 * step);

    // As trained: a little off what was sampled.
    let behaviour = collated.sequences.iter().filter_map(|sequence| sequence.behaviour.as_ref()).flatten();
    let log_probs: Vec<f64> = behaviour.enumerate().map(|(at, b)| b - 0.1 + (at % 21) as f64 / 100.0).collect();
    let entropies: Vec<f64> = (0..tokens).map(|at| 1.0 + (at % 13) as f64 / 10.0).collect();
    let collating = median(|| collate(black_box(&samples), Aggregation::TokenMean).map(|batch| batch.batch_tokens))?;
    let mut scratch = batch.clone();
    let estimating = median(|| assign_advantages(black_box(&mut scratch), &advantage))?;
    let evaluated = |loss: &dyn Loss, off_policy: &OffPolicy| {
        median(|| collated.evaluate(&all, loss, off_policy, black_box(&log_probs), &entropies, None).map(|output| output.loss))
    };

    let mut worst = 0.0_f64;
    let mut row = |what: &str, own: f64, all: f64| {
        let share = all / (step + estimating + collating);
        worst = worst.max(share);
        let over = if share > SHARE { "  over" } else { "" };
        println!("  {what:<38} {:>9.1} µs, with all else {:>9.1} µs: {:>6.3}%{over}", 1e6 * own, 1e6 * all, 100.0 * share);
    };
    for kind in LOSSES {
        let recipe = format!("pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\ntrain.loss.kind = '{kind}'");
        let loss = Registry::default().loss_of(&parse("bench.toml", &recipe, &[])?.train, None)?;
        let own = evaluated(loss.as_ref(), &OffPolicy::default())?;
        row(&format!("loss {kind}"), own, own + estimating + collating);
    }
    let loss = Grpo::default();
    let rejection = Rejection { divergence: Divergence::K3, over: Over::Mean, min: None, max: 1.0 };
    for (what, weigh, reject) in [
        ("truncated, by token", Some(Importance::truncated(Level::Token, 2.0)), vec![]),
        ("truncated, by sequence", Some(Importance::truncated(Level::Sequence, 2.0)), vec![]),
        ("icepop", Some(Importance::icepop(0.5, 5.0)), vec![]),
        ("rejection", None, vec![rejection]),
    ] {
        let off_policy = OffPolicy { proximal: Proximal::Recompute, weigh, reject };
        let own = evaluated(&loss, &off_policy)?;
        row(&format!("correction {what}"), own, own + estimating + collating);
    }
    let evaluating = evaluated(&loss, &OffPolicy::default())?;
    for estimator in [
        Advantage::default(),
        Advantage::LeaveOneOut { normalize: true, epsilon: 1e-4 },
        Advantage::ReinforcePlusPlus,
        Advantage::ReinforcePlusPlusBaseline,
        Advantage::OptimalBaseline,
        Advantage::Gpg,
        Advantage::BestOfGroup { scale: true, epsilon: 1e-6 },
        Advantage::Rank,
        Advantage::Normalized { epsilon: 1e-4 },
        Advantage::Constant { baseline: 0.5 },
    ] {
        let own = median(|| assign_advantages(black_box(&mut scratch), &estimator))?;
        let kind = format!("{estimator:?}");
        row(&format!("advantage {}", kind.split(['(', ' ']).next().unwrap_or_default()), own, own + evaluating + collating);
    }
    Ok(worst)
}

/// Seconds of the fastest step: forward, backward and update. A busy machine interrupts a step and not what takes microseconds, so that a
/// median would flatter the shares.
fn step(batch: &TrainBatch) -> Result<f64> {
    let tokenizer = Tokenizer::characters("0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n", 64)?;
    let policy = Policy::random(ModelConfig::small(&tokenizer, 128, 4), tokenizer, 0)?;
    let config = LocalConfig { threads: Some(1), ..LocalConfig::new(Grpo::default(), Schedule::constant(1e-6)) };
    let backend = policy.backend(config)?;
    let batch = Arc::new(batch.clone());
    let seconds = timed(STEPS, || {
        let forward = backend.forward_backward(batch.clone());
        backend.optim_step().wait()?;
        let trained = forward.wait()?.tokens;
        // A token without an advantage would be left out, and the step be cheaper than it should.
        ensure!(trained == batch.batch_tokens, "{trained} of {} tokens were trained", batch.batch_tokens);
        Ok(())
    })?;
    Ok(seconds[0])
}

/// The median of fifty runs.
fn median<T, E>(mut run: impl FnMut() -> Result<T, E>) -> Result<f64>
where
    anyhow::Error: From<E>,
{
    let seconds = timed(50, || {
        black_box(run()?);
        Ok(())
    })?;
    Ok(seconds[seconds.len() / 2])
}

/// The seconds of each run after a first one, ascending.
fn timed(times: usize, mut run: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    run()?;
    let mut seconds = Vec::with_capacity(times);
    for _ in 0..times {
        let started = Instant::now();
        run()?;
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}
