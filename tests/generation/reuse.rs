//! What an engine remembers of ended sequences, and what it drafts of a sample from its own text: both save work and change no sample.
//!
//! Laws: N2 (samples are a function of weights, prompt, parameters and seed, however they are computed), V5 (keys and values of older
//! weights serve no new request).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::generating::*;
use proptest::prelude::*;
use rollflow::engine::{Finished, LocalEngine, OnNewWeights, Request, SamplingParams, TokenEngine};
use rollflow::model::{Family, ModelConfig, Weights};

/// An engine that remembers and drafts.
fn saving(config: &ModelConfig, slots: usize, remembered: usize, draft: usize) -> LocalEngine {
    let engine = LocalEngine::new(decoder(config), tokenizer(), slots, 11).remembering(remembered).drafting(draft);
    with_weights(engine, config, 5)
}

fn with_weights(mut engine: LocalEngine, config: &ModelConfig, seed: u64) -> LocalEngine {
    engine.set_weights(seed, &Weights::random(config, seed));
    engine
}

/// All answers, and tokens that were prefilled, reused, drafted and kept.
fn run(engine: &mut LocalEngine) -> (Vec<Finished>, [usize; 4]) {
    let (mut answers, mut sums) = (Vec::new(), [0; 4]);
    while !engine.is_idle() {
        answers.extend(engine.step().unwrap());
        let load = engine.load();
        sums.iter_mut().zip([load.prefill, load.reused, load.drafted, load.kept]).for_each(|(sum, new)| *sum += new);
    }
    (answers, sums)
}

/// A few tokens of a user's turn.
fn said(turn: u64) -> impl Iterator<Item = u32> {
    (0..3 + turn % 3).map(move |at| 4 + ((turn * 13 + at * 7) % 40) as u32)
}

/// Answers of so many conversations of so many turns, whose `n`-th turn has ordinal `100 · n + conversation`.
fn talk(engine: &mut LocalEngine, conversations: u64, turns: u64, params: &SamplingParams) -> (ByKey, [usize; 4]) {
    let mut texts: BTreeMap<u64, Vec<u32>> = (0..conversations).map(|of| (of, (0..9).chain(said(of)).collect())).collect();
    let (mut all, mut sums) = (Vec::new(), [0; 4]);
    for turn in 0..turns {
        for (of, text) in &texts {
            engine.submit(Request::new(100 * turn + of, text.clone(), 1, Arc::new(params.clone()))).unwrap();
        }
        let (answers, work) = run(engine);
        for answer in &answers {
            let text = texts.get_mut(&(answer.ordinal % 100)).unwrap();
            text.extend(answer.tokens.iter().copied().chain(said(turn + answer.ordinal)));
        }
        all.extend(answers);
        sums.iter_mut().zip(work).for_each(|(sum, new)| *sum += new);
    }
    (by_key(all), sums)
}

#[test]
fn a_second_turn_computes_its_own_tokens_only() {
    for config in families() {
        let params = SamplingParams { ignore_eos: true, ..params(10) };
        let (expected, [whole, reused, ..]) = talk(&mut saving(&config, 2, 0, 0), 2, 3, &params);
        assert_eq!(reused, 0);
        let (found, [prefilled, reused, ..]) = talk(&mut saving(&config, 2, 8, 0), 2, 3, &params);
        assert_same("turns", &found, &expected);
        assert_eq!(prefilled + reused, whole, "every token of a prompt is computed or reused");
        // Of a turn before, all but its newest token is known.
        assert!(prefilled < whole / 2, "{prefilled} of {whole}");
    }
}

#[test]
fn what_prompts_of_one_batch_begin_with_is_computed_once() {
    for config in families() {
        // Two system prompts, the second of which begins with four tokens of the first.
        let systems: [Vec<u32>; 2] = [(4..34).collect(), (4..8).chain(40..60).collect()];
        let prompts: Vec<Vec<u32>> =
            (0..7).map(|at| systems[at as usize % 2].iter().copied().chain(said(at)).collect()).collect();
        let asked = |remembered| {
            let mut engine = saving(&config, 7, remembered, 0);
            for (ordinal, prompt) in (0..).zip(&prompts) {
                engine.submit(Request::new(ordinal, prompt.clone(), 1, Arc::new(params(9)))).unwrap();
            }
            run(&mut engine)
        };
        let (expected, [whole, none, ..]) = asked(0);
        let (found, [prefilled, reused, ..]) = asked(3);
        assert_same("prompts", &by_key(found), &by_key(expected));
        assert_eq!((none, prefilled + reused), (0, whole));
        // Three more prompts begin as the first does, and two as the second. States are after whole pages.
        assert!(
            config.delta.is_some() && reused == 0 || (3 * 30 + 2 * 24..3 * 34 + 2 * 28).contains(&reused),
            "{reused} of {whole} tokens"
        );
    }
}

#[test]
fn states_after_whole_pages_that_prompts_begin_with_are_computed_once() {
    let config = nets();
    // Two pages of 32 tokens are the same, and more.
    let system: Vec<u32> = (0..70).map(|at| 4 + at % 50).collect();
    let prompts: Vec<Vec<u32>> =
        (0..5).map(|at| system.iter().copied().chain([50 + at as u32]).chain(said(at)).collect()).collect();
    let ask = |engine: &mut LocalEngine, at: usize| {
        engine.submit(Request::new(at as u64, prompts[at].clone(), 2, Arc::new(params(9)))).unwrap();
    };
    let together = |remembered| {
        let mut engine = saving(&config, 10, remembered, 0);
        (0..5).for_each(|at| ask(&mut engine, at));
        run(&mut engine)
    };
    let (expected, [whole, ..]) = together(0);
    let (found, [prefilled, reused, ..]) = together(8);
    assert_same("together", &by_key(found), &by_key(expected.clone()));
    assert_eq!((reused, prefilled + reused), (4 * 64, whole));
    // One after the other: the second shows where they part, and the third begins there.
    let (mut engine, mut found) = (saving(&config, 10, 8, 0), Vec::new());
    for at in 0..5 {
        ask(&mut engine, at);
        let (answers, [_, reused, ..]) = run(&mut engine);
        assert_eq!(reused, if at < 2 { 0 } else { 64 }, "prompt {at}");
        found.extend(answers);
    }
    assert_same("one by one", &by_key(found), &by_key(expected));
    // A further turn continues all of the one before, but for its newest token.
    let params = SamplingParams { ignore_eos: true, ..params(24) };
    engine.submit(Request::new(7, prompts[4].clone(), 1, Arc::new(params.clone()))).unwrap();
    let (answers, _) = run(&mut engine);
    let turn = [&prompts[4][..], &answers[0].tokens, &[7, 8, 9]].concat();
    let (known, whole) = (prompts[4].len() + answers[0].tokens.len() - 1, turn.len());
    engine.submit(Request::new(8, turn, 1, Arc::new(params))).unwrap();
    let (_, [prefilled, reused, ..]) = run(&mut engine);
    assert_eq!((prefilled, reused), (whole - known, known));
}

#[test]
fn a_prompt_that_others_begin_with_leaves_its_last_token_to_be_computed() {
    let config = nets();
    // Two whole pages, and what begins with both.
    let whole: Vec<u32> = (0..64).map(|at| 4 + at % 50).collect();
    let asked = |remembered| {
        let mut engine = saving(&config, 2, remembered, 0);
        for (ordinal, prompt) in [(0, whole.clone()), (1, [&whole[..], &[7, 8, 9]].concat())] {
            engine.submit(Request::new(ordinal, prompt, 1, Arc::new(params(9)))).unwrap();
        }
        run(&mut engine)
    };
    let (expected, [tokens, ..]) = asked(0);
    let (found, [prefilled, reused, ..]) = asked(3);
    assert_same("prompts", &by_key(found), &by_key(expected));
    assert_eq!((reused, prefilled + reused), (32, tokens), "the page before the last token's");
}

#[test]
fn v5_keys_of_older_weights_serve_no_new_request() {
    let config = config(Family::Qwen3, None);
    let prompt: Vec<u32> = (4..30).collect();
    for policy in [OnNewWeights::Swap, OnNewWeights::Recompute, OnNewWeights::Finish] {
        let mut engine = saving(&config, 2, 4, 0).on_new_weights(policy);
        let ask = |ordinal| Request::new(ordinal, prompt.clone(), 1, Arc::new(SamplingParams { ignore_eos: true, ..params(6) }));
        engine.submit(ask(0)).unwrap();
        engine.step().unwrap();
        engine.set_weights(6, &Weights::random(&config, 6));
        run(&mut engine);
        engine.submit(ask(1)).unwrap();
        let (answers, [_, reused, ..]) = run(&mut engine);
        // Only where all of its keys were computed under the new weights.
        assert_eq!(reused > 0, policy == OnNewWeights::Recompute, "{policy:?}");
        let mut fresh = with_weights(LocalEngine::new(decoder(&config), tokenizer(), 2, 11), &config, 6);
        fresh.submit(ask(1)).unwrap();
        assert_same("a new request", &by_key(answers), &by_key(fresh.run().unwrap()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Law N2: however few sequences are remembered, however long drafts are and however samples share slots.
    #[test]
    fn n2_conversations_are_those_of_an_engine_that_remembers_and_drafts_nothing(
        family in 0usize..4, slots in 1usize..5, remembered in 0usize..7, draft in 0usize..6, conversations in 1u64..5,
        temperature in prop::sample::select(vec![0.0f32, 0.4, 1.0]), top_k in prop::sample::select(vec![0usize, 3]),
        penalties in any::<bool>(),
    ) {
        let config = &families()[family];
        let params = SamplingParams { temperature, top_k, stop: vec!["zz".into()], ..params(12) };
        let params = if penalties { penalised(params) } else { params };
        let (expected, _) = talk(&mut saving(config, slots, 0, 0), conversations, 3, &params);
        let (found, [.., drafted, kept]) = talk(&mut saving(config, slots, remembered, draft), conversations, 3, &params);
        assert_same("conversations", &found, &expected);
        prop_assert!(kept <= drafted && (draft > 0 || drafted == 0));
    }
}

/// Answers of groups of samples that begin alike, and how often one waited because the cache was full.
fn groups(engine: &mut LocalEngine, groups: u64, samples: u32, params: &SamplingParams) -> (ByKey, usize) {
    for ordinal in 0..groups {
        let prompt: Vec<u32> = (4..40).chain(said(ordinal)).collect();
        engine.submit(Request::new(ordinal, prompt, samples, Arc::new(params.clone()))).unwrap();
    }
    let (mut answers, mut waited) = (Vec::new(), 0);
    while !engine.is_idle() {
        answers.extend(engine.step().unwrap());
        waited += engine.load().preempted;
    }
    (by_key(answers), waited)
}

#[test]
fn n2_samples_that_wait_for_memory_are_those_of_a_large_cache() {
    // Each takes up to 4 pages of 32 tokens, of which a group shares one.
    let params = SamplingParams { ignore_eos: true, ..params(86) };
    for config in families() {
        let (expected, none) = groups(&mut saving(&config, 6, 0, 0), 3, 4, &params);
        assert_eq!(none, 0, "by itself a cache has room for all slots");
        for (tokens, remembered) in [(128, 0), (10 * 32, 0), (10 * 32, 4), (24 * 32, 4)] {
            let mut engine = saving(&config, 6, remembered, 3).cache_tokens(Some(tokens));
            engine.set_weights(5, &Weights::random(&config, 5));
            let (found, waited) = groups(&mut engine, 3, 4, &params);
            assert_same(&format!("a cache of {tokens} tokens"), &found, &expected);
            assert_eq!(waited > 0, tokens == 10 * 32, "{waited} waited with {tokens} tokens");
        }
    }
}

/// The first group waits for a slot in part, so that the shelf has its prompt, and ends within the step.
#[test]
fn n2_a_group_that_ends_within_a_step_leaves_all_of_its_pages_to_the_prompt_after_it() {
    let config = ModelConfig { max_positions: 256, ..config(Family::Qwen3, None) };
    let answers = |tokens: Option<usize>| {
        let engine = LocalEngine::new(decoder(&config), tokenizer(), 2, 11).cache_tokens(tokens);
        let mut engine = with_weights(engine, &config, 5);
        for (ordinal, len, samples) in [(0u64, 90u32, 3u32), (1, 150, 1)] {
            let prompt: Vec<u32> = (0..len).map(|at| 4 + (at * 7 + len) % 50).collect();
            engine.submit(Request::new(ordinal, prompt, samples, Arc::new(params(1)))).unwrap();
        }
        by_key(engine.run().unwrap())
    };
    // The second prompt takes all five pages.
    assert_same("five pages", &answers(Some(5 * 32)), &answers(None));
}

/// Samples of two versions, of which the older one drafts: all answers, and whether its first draft to reach a
/// third page came in the step in which the other needs its own.
fn versions(config: &ModelConfig, [old, new]: [usize; 2], tokens: Option<usize>) -> (ByKey, bool) {
    let prompt = |len: usize| -> Vec<u32> { (0..len as u32).map(|at| 4 + (at * at + 3 * at) % 50).collect() };
    let engine = LocalEngine::new(decoder(config), tokenizer(), 2, 11).on_new_weights(OnNewWeights::Finish);
    let mut engine = with_weights(engine.drafting(4).cache_tokens(tokens), config, 5);
    let greedy = SamplingParams { temperature: 0.0, ignore_eos: true, ..params(60) };
    engine.submit(Request::new(0, prompt(old), 1, Arc::new(greedy))).unwrap();
    let mut answers = engine.step().unwrap();
    let mut said = [engine.sampled().len(), 0];
    engine.set_weights(6, &Weights::random(config, 6));
    engine.submit(Request::new(1, prompt(new), 1, Arc::new(SamplingParams { ignore_eos: true, ..params(40) }))).unwrap();
    let mut meets = None;
    while !engine.is_idle() {
        // Tokens of each in the cache when the step decodes.
        let computed = [old + said[0] - 1, new + said[1].max(1) - 1];
        answers.extend(engine.step().unwrap());
        engine.sampled().iter().for_each(|token| said[token.ordinal as usize] += 1);
        if computed[0] + 1 + engine.load().drafted > 64 {
            meets.get_or_insert(computed[0] < 64 && computed[1] == 64);
        }
    }
    (by_key(answers), meets == Some(true))
}

#[test]
fn n2_drafts_take_no_page_that_the_next_token_of_another_version_needs() {
    // Of few tokens at a time, which it repeats.
    let config = ModelConfig { windows: vec![Some(2); 2], initializer_range: 0.1, ..config(Family::Mistral, None) };
    let lengths = (14..22).flat_map(|old| (34..64).rev().map(move |new| [old, new]));
    let of_large = lengths.map(|lengths| (lengths, versions(&config, lengths, None)));
    let mut meeting =
        of_large.filter(|(_, (_, meets))| *meets).map(|(lengths, (answers, _))| (lengths, answers)).take(3).peekable();
    assert!(meeting.peek().is_some(), "no draft and next token meet");
    for (lengths, expected) in meeting {
        // Both have two pages of five.
        let (found, _) = versions(&config, lengths, Some(5 * 32));
        assert_same(&format!("prompts of {lengths:?} tokens"), &found, &expected);
    }
}

#[test]
fn a_request_beyond_the_whole_cache_is_refused_with_the_setting_to_raise() {
    let config = config(Family::Qwen3, None);
    let mut engine = saving(&config, 2, 0, 0).cache_tokens(Some(64));
    let ask = |tokens| Request::new(0, (4..14).collect::<Vec<u32>>(), 1, Arc::new(params(tokens)));
    let error = engine.submit(ask(60)).unwrap_err().to_string();
    assert!(error.contains("70 tokens do not fit a cache of 64; raise generate.cache_tokens"), "{error}");
    engine.submit(ask(50)).unwrap();
    assert_eq!(engine.run().unwrap().len(), 1);
}

#[test]
fn drafts_are_kept_where_a_model_repeats_itself_and_save_steps() {
    // Of few tokens at a time, which it repeats.
    let config = ModelConfig { windows: vec![Some(2); 2], initializer_range: 0.1, ..config(Family::Mistral, None) };
    let params = SamplingParams { temperature: 0.0, ignore_eos: true, ..params(60) };
    let steps = |draft| {
        let mut engine = saving(&config, 4, 0, draft);
        (0..3).for_each(|ordinal| engine.submit(request(ordinal, 1, &params)).unwrap());
        let (mut steps, mut kept) = (0, 0);
        while !engine.is_idle() {
            engine.step().unwrap();
            (steps, kept) = (steps + 1, kept + engine.load().kept);
        }
        (steps, kept)
    };
    let ((plain, none), (drafted, kept)) = (steps(0), steps(4));
    assert_eq!((plain, none), (59, 0));
    assert!(drafted < 30 && kept > 90, "{drafted} steps, {kept} tokens kept");
}

/// Counts of what was said first, of so many samples of one prompt that repeats itself.
fn firsts(config: &ModelConfig, seed: u64, draft: usize, temperature: f32) -> (BTreeMap<Vec<u32>, f64>, usize) {
    let engine = LocalEngine::new(decoder(config), tokenizer(), 8, seed).drafting(draft);
    let mut engine = with_weights(engine, config, 5);
    let params = Arc::new(SamplingParams { temperature, ignore_eos: true, ..params(4) });
    // What the model says itself, so that it says some of it again.
    let mut speaker = with_weights(LocalEngine::new(decoder(config), tokenizer(), 1, 9), config, 5);
    let talkative = SamplingParams { temperature: 0.4, ignore_eos: true, ..crate::generating::params(110) };
    speaker.submit(request(1, 1, &talkative)).unwrap();
    let prompt = speaker.run().unwrap().remove(0).tokens;
    engine.submit(Request::new(0, prompt, 3000, params)).unwrap();
    let (answers, [.., kept]) = run(&mut engine);
    let mut counts = BTreeMap::new();
    answers.into_iter().for_each(|answer| *counts.entry(answer.tokens[..3].to_vec()).or_insert(0.0) += 1.0);
    (counts, kept)
}

/// The χ² of two samples of equal size, less its mean, in its standard deviations. Rare outcomes are one.
fn distance(a: &BTreeMap<Vec<u32>, f64>, b: &BTreeMap<Vec<u32>, f64>) -> f64 {
    let of = |counts: &BTreeMap<Vec<u32>, f64>, outcome: &Vec<u32>| counts.get(outcome).copied().unwrap_or(0.0);
    let (mut pairs, mut rare) = (Vec::new(), (0.0, 0.0));
    for outcome in a.keys().chain(b.keys().filter(|outcome| !a.contains_key(*outcome))) {
        let (a, b) = (of(a, outcome), of(b, outcome));
        if a + b >= 20.0 { pairs.push((a, b)) } else { rare = (rare.0 + a, rare.1 + b) }
    }
    pairs.push(rare);
    let chi: f64 = pairs.iter().filter(|(a, b)| a + b > 0.0).map(|(a, b)| (a - b).powi(2) / (a + b)).sum();
    let freedom = pairs.len() as f64 - 1.0;
    assert!(freedom > 5.0, "too few outcomes to compare");
    (chi - freedom) / (2.0 * freedom).sqrt()
}

/// Law N2, where the random numbers differ: the distribution is that of plain sampling, and that of another temperature is not.
#[test]
fn n2_samples_with_drafts_have_the_distribution_of_plain_ones() {
    let config = ModelConfig { initializer_range: 0.2, ..config(Family::Qwen3, None) };
    let (plain, _) = firsts(&config, 1, 0, 0.4);
    let (drafted, kept) = firsts(&config, 2, 3, 0.4);
    let (warmer, _) = firsts(&config, 3, 3, 0.46);
    let (same, other) = (distance(&plain, &drafted), distance(&plain, &warmer));
    println!("{kept} drafted tokens kept; distance {same:.1}, and {other:.1} of another temperature");
    assert!(kept > 100 && same < 3.5 && other > 5.0, "{kept} kept, {same}, {other}");
}
