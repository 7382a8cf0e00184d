//! What an engine saves by what it remembers and by drafts: time with, over time without, in one run.
//!
//! `cargo bench --bench reuse -- [DEVICE] [FORMAT] [HIDDEN] [LAYERS]`, as in `cuda bf16 1024 24`; `cpu f32 512 8` unless told otherwise.
//!
//! Pages: 64 answers of 8 to 512 tokens, half of them up to 64, in a cache of 8 at their longest: by 8 at a time, or by as many as have room.
//!
//! Turns: 8 chats of 6 turns, each 64 tokens said and 32 answered; also of a model with gated delta nets in three of four layers. Drafts: greedy answers of 128 tokens by random weights whose layers see four tokens, so
//! that they soon repeat themselves, of 1 to 64 samples at the same time. That is the most that drafts can save: of a model that repeats nothing there are none.

mod arguments;

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use rollflow::data::Tokenizer;
use rollflow::engine::{LocalEngine, Request, SamplingParams, TokenEngine};
use rollflow::model::{Decoder, Family, GatedDelta, Layout, ModelConfig, Weights};

use arguments::Arguments;

fn main() -> Result<()> {
    let args = Arguments::read();
    let compute = args.compute()?;
    let (hidden, layers): (usize, usize) = (args.number(2, 512)?, args.number(3, 8)?);
    let tokenizer = Arc::new(Tokenizer::characters("0123456789", 64)?);
    let model = ModelConfig { max_positions: 1024, ..ModelConfig::small(&tokenizer, hidden, layers) };
    println!("{} parameters, {hidden} wide, {layers} layers", Layout::new(&model).total());
    let engine = |weights: &Weights, model: &ModelConfig, slots| -> LocalEngine {
        let mut engine =
            LocalEngine::new(Decoder::new(model, weights.layout.clone()), tokenizer.clone(), slots, 7).computing(compute);
        engine.set_weights(1, weights);
        engine
    };
    let weights = Weights::random(&model, 5);
    println!("| slots | tokens of the cache | seconds | of those of 8 slots | waited |\n|---|---|---|---|---|");
    let mut without = 0.0;
    for slots in [8, 16, 24, 32] {
        let mut engine = engine(&weights, &model, slots).cache_tokens(Some(8 * 576));
        let began = Instant::now();
        let waited = ragged(&mut engine)?;
        let seconds = began.elapsed().as_secs_f64();
        without = if slots == 8 { seconds } else { without };
        println!("| {slots} | {} | {seconds:.2} | {:.2} | {waited} |", 8 * 576, seconds / without);
    }
    println!("\n| chats | layers | remembered | seconds | of those without |\n|---|---|---|---|---|");
    let of_nets = with_nets(&model);
    let weights_of_nets = Weights::random(&of_nets, 5);
    for (model, weights, mixers) in [(&model, &weights, "attention"), (&of_nets, &weights_of_nets, "delta nets")] {
        for remembered in [0, 8, 16] {
            let mut engine = engine(weights, model, 8).remembering(remembered);
            chats(&mut engine, 1)?;
            let began = Instant::now();
            chats(&mut engine, 2)?;
            let seconds = began.elapsed().as_secs_f64();
            without = if remembered == 0 { seconds } else { without };
            println!("| 8 of 6 turns | {mixers} | {remembered} | {seconds:.2} | {:.2} |", seconds / without);
        }
    }
    println!("\n| samples | longest draft | seconds | of those without | drafted tokens kept |\n|---|---|---|---|---|");
    let repeating = ModelConfig { windows: vec![Some(4); layers], initializer_range: 0.02, ..model };
    let weights = Weights::random(&repeating, 5);
    for samples in [1, 4, 8, 16, 32, 64] {
        for draft in [0, 1, 2, 4, 8] {
            let mut engine = engine(&weights, &repeating, samples).drafting(draft);
            answers(&mut engine, samples as u64, 8)?;
            let began = Instant::now();
            let [drafted, kept] = answers(&mut engine, samples as u64, 128)?;
            let seconds = began.elapsed().as_secs_f64();
            without = if draft == 0 { seconds } else { without };
            println!(
                "| {samples} | {draft} | {seconds:.2} | {:.2} | {:.0} % |",
                seconds / without,
                100.0 * kept / drafted.max(1.0)
            );
        }
    }
    Ok(())
}

/// The same with gated delta nets in three of four layers.
fn with_nets(model: &ModelConfig) -> ModelConfig {
    let layers = (0..model.layers()).filter(|layer| layer % 4 != 3).collect();
    let (heads, dim) = (model.heads, model.head_dim);
    let delta = GatedDelta { layers, key_heads: heads, value_heads: heads, key_dim: dim, value_dim: dim, kernel: 4 };
    ModelConfig { family: Family::Qwen35, delta: Some(delta), ..model.clone() }
}

fn tokens(seed: u64, len: u64) -> impl Iterator<Item = u32> {
    (0..len).map(move |at| (3 + (seed * 31 + at * 17 + at * at * (seed + 1)) % 60) as u32)
}

/// Answers of ragged lengths to prompts of 64 tokens. Returns how often one waited for memory.
fn ragged(engine: &mut LocalEngine) -> Result<usize> {
    for of in 0..64 {
        let len = if of % 2 == 0 { 8 + (of as usize * 29) % 57 } else { 64 + (of as usize * 37) % 449 };
        let params = SamplingParams { max_new_tokens: len, ignore_eos: true, ..SamplingParams::default() };
        engine.submit(Request::new(of, tokens(of, 64).collect::<Vec<_>>(), 1, Arc::new(params)))?;
    }
    let mut waited = 0;
    while !engine.is_idle() {
        engine.step()?;
        waited += engine.load().preempted;
    }
    Ok(waited)
}

/// All turns of the chats, each after the one before.
fn chats(engine: &mut LocalEngine, seed: u64) -> Result<()> {
    let params = Arc::new(SamplingParams { max_new_tokens: 32, ignore_eos: true, ..SamplingParams::default() });
    let mut texts: Vec<Vec<u32>> = vec![Vec::new(); 8];
    for turn in 0..6 {
        for (of, text) in (0..).zip(&mut texts) {
            text.extend(tokens(100 * seed + 10 * turn + of, 64));
            engine.submit(Request::new(of, text.clone(), 1, params.clone()))?;
        }
        engine.run()?.into_iter().for_each(|answer| texts[answer.ordinal as usize].extend(answer.tokens));
    }
    Ok(())
}

/// Answers so many prompts, and returns how many tokens were drafted and kept.
fn answers(engine: &mut LocalEngine, samples: u64, len: usize) -> Result<[f64; 2]> {
    let params =
        Arc::new(SamplingParams { temperature: 0.0, max_new_tokens: len, ignore_eos: true, ..SamplingParams::default() });
    for of in 0..samples {
        engine.submit(Request::new(of, tokens(of, 64).collect::<Vec<_>>(), 1, params.clone()))?;
    }
    let mut sums = [0.0; 2];
    while !engine.is_idle() {
        engine.step()?;
        let load = engine.load();
        sums = [sums[0] + load.drafted as f64, sums[1] + load.kept as f64];
    }
    Ok(sums)
}
