//! What the partial cache is worth, and what new weights cost the generator alone under each policy.
//!
//! Answers have the lengths that make rollouts hard: most are short, a few are very long (log-normal, cut at 512 tokens). Weights arrive
//! every 96 tokens. With the partial cache, answers that are stopped continue from their tokens; without, they start again, and those longer than
//! the time between two versions never end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use rollflow::data::Tokenizer;
use rollflow::engine::sampling::uniform;
use rollflow::engine::{LocalEngine, OnNewWeights, Request, SamplingParams, TokenEngine};
use rollflow::model::{Decoder, ModelConfig, Weights};

use crate::learner::Learner;
use crate::page::{Measured, spread};

const SLOTS: usize = 32;
const LONGEST: usize = 512;
const STEPS_PER_VERSION: usize = 96;

/// The part of the page.
pub fn measure(learner: &Learner) -> Result<Measured> {
    tch::set_num_threads(1);
    let tokenizer = Arc::new(Tokenizer::characters("0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n", 64)?);
    let model = ModelConfig::small(&tokenizer, 128, 4);
    let bench = Bench { model, tokenizer, versions: if learner.quick { 2 } else { 12 } };
    let mut page = Measured::default();
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for &seed in learner.seeds() {
        with.push(bench.trained_per_second(true, seed)?);
        without.push(bench.trained_per_second(false, seed)?);
        eprintln!(
            "seed {seed}: {:.0} tokens/s with the partial cache, {:.0} without",
            with[with.len() - 1],
            without[without.len() - 1]
        );
    }
    let gain: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with / without).collect();
    let row = vec!["long-tailed".to_owned(), spread(&with, 0), spread(&without, 0), spread(&gain, 2)];
    let head = ["answers", "with, tokens/s", "without, tokens/s", "gain"];
    page.table("Tokens that end up in whole answers, with and without the partial cache", &head, &[row]);
    let policies = [OnNewWeights::Swap, OnNewWeights::Recompute, OnNewWeights::Finish, OnNewWeights::Abort];
    let mut rows = Vec::new();
    for policy in policies {
        let Cost { pause, next, usual } = bench.cost(policy)?;
        let name = format!("`{}`", format!("{policy:?}").to_lowercase());
        rows.push([vec![name], [pause, next, usual].map(|time| format!("{:.2}", 1e3 * time.as_secs_f64())).into()].concat());
    }
    let head = ["`on_new_weights`", "pause, ms", "next token, ms", "any other token, ms"];
    page.table("What new weights cost the generator, medians", &head, &rows);
    Ok(page)
}

struct Bench {
    model: ModelConfig,
    tokenizer: Arc<Tokenizer>,
    versions: u64,
}

struct Cost {
    /// Setting the weights.
    pause: Duration,
    /// The step after it.
    next: Duration,
    /// Any other step.
    usual: Duration,
}

impl Bench {
    fn weights(&self) -> [Weights; 2] {
        [1, 2].map(|seed| Weights::random(&self.model, seed))
    }

    fn engine(&self, policy: OnNewWeights, weights: &Weights) -> LocalEngine {
        let decoder = Decoder::new(&self.model, weights.layout.clone());
        let mut engine = LocalEngine::new(decoder, self.tokenizer.clone(), SLOTS, 0).on_new_weights(policy);
        engine.set_weights(1, weights);
        engine
    }

    /// A prompt for every slot that is free.
    fn fill(&self, engine: &mut LocalEngine, next: &mut u64, length: impl Fn(u64) -> usize) -> Result<()> {
        while engine.free_slots() > 0 {
            let params = SamplingParams { ignore_eos: true, max_new_tokens: length(*next), ..SamplingParams::default() };
            engine.submit(Request::new(*next, [5, 6, 7, 8], 1, Arc::new(params)))?;
            *next += 1;
        }
        Ok(())
    }

    /// Tokens a second that end up in whole answers, weights arriving all the while.
    fn trained_per_second(&self, cached: bool, seed: u64) -> Result<f64> {
        let weights = self.weights();
        let mut engine = self.engine(OnNewWeights::Abort, &weights[0]);
        let (mut next, mut trained) = (0, 0);
        let started = Instant::now();
        for version in 2..2 + self.versions {
            for _ in 0..STEPS_PER_VERSION {
                self.fill(&mut engine, &mut next, |ordinal| heavy_tailed(seed, ordinal))?;
                trained += engine.step()?.iter().map(|finished| finished.tokens.len()).sum::<usize>();
            }
            if !cached {
                engine.restart_expired(&|_, _| true);
            }
            engine.set_weights(version, &weights[version as usize % 2]);
        }
        Ok(trained as f64 / started.elapsed().as_secs_f64())
    }

    /// Weights arrive every 8 tokens while 32 samples of up to 128 tokens are under way.
    fn cost(&self, policy: OnNewWeights) -> Result<Cost> {
        let weights = self.weights();
        let mut engine = self.engine(policy, &weights[0]);
        let (mut ordinal, mut pauses, mut nexts, mut usuals) = (0, Vec::new(), Vec::new(), Vec::new());
        let length = |ordinal: u64| 64 + (ordinal * 37 % 64) as usize;
        for version in 2..42 {
            pauses.push(time(|| engine.set_weights(version, &weights[version as usize % 2])).0);
            for at in 0..8 {
                self.fill(&mut engine, &mut ordinal, length)?;
                let (took, stepped) = time(|| engine.step());
                stepped?;
                if at == 0 { nexts.push(took) } else { usuals.push(took) }
            }
        }
        Ok(Cost { pause: median(pauses), next: median(nexts), usual: median(usuals) })
    }
}

/// A log-normal length, by its quantile: a median of 48 tokens, and a tenth of the answers above 172.
fn heavy_tailed(seed: u64, ordinal: u64) -> usize {
    let [a, b] = [0, 1].map(|at| uniform(seed, ordinal, 0, at).max(1e-12));
    let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    ((48.0 * normal.exp()) as usize).clamp(1, LONGEST)
}

fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let started = Instant::now();
    let made = work();
    (started.elapsed(), made)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
