//! What a sample is made of doesn't depend on what is generated beside it.
//!
//! Laws: N2 (keyed randomness), D3 (each token has its log-probability and version), V4, V5.

use std::sync::Arc;

use proptest::prelude::*;

use crate::generating::*;
use rollflow::data::{Group, Prompt, Status};
use rollflow::engine::penalties::{adjust, adjusted};
use rollflow::engine::sampling::{choose, uniform, warp};
use rollflow::engine::{
    EngineError, FinishReason, Finished, LocalEngine, OnNewWeights, Request, SamplingParams, TokenEngine, batch_generate,
    generate,
};
use rollflow::model::{Family, Weights};
use rollflow::rollout::complete;

#[test]
fn n2_a_sample_is_the_same_alone_and_in_any_batch_slot_and_order() {
    for config in families() {
        let params = params(20);
        let mut alone = ByKey::new();
        for ordinal in 0..6 {
            let mut engine = engine(&config, 1);
            engine.submit(request(ordinal, 3, &params)).unwrap();
            alone.extend(by_key(engine.run().unwrap()));
        }
        assert!(alone.values().any(|finished| finished.finish == Ok(FinishReason::Stop)), "some samples end early");
        for (slots, order) in [(18, [0, 1, 2, 3, 4, 5]), (5, [5, 3, 1, 0, 2, 4]), (2, [4, 5, 0, 1, 3, 2])] {
            let mut engine = engine(&config, slots);
            for ordinal in order {
                engine.submit(request(ordinal, 3, &params)).unwrap();
            }
            assert_same(&format!("{:?}, {slots} slots", config.family), &by_key(engine.run().unwrap()), &alone);
        }
    }
}

#[test]
fn n2_a_sample_is_the_same_however_many_threads_divide_the_steps() {
    for config in families() {
        let by = |threads: usize| {
            // An engine sets its thread's number.
            let run = || {
                let mut engine = LocalEngine::new(decoder(&config), tokenizer(), 40, 11).threads(threads);
                engine.set_weights(1, &Weights::random(&config, 5));
                // 40 samples in flight, then fewer than make a part.
                (0..8).for_each(|ordinal| engine.submit(request(ordinal, 6, &params(20))).unwrap());
                by_key(engine.run().unwrap())
            };
            std::thread::scope(|scope| scope.spawn(run).join().unwrap())
        };
        let alone = by(1);
        for threads in [2, 3] {
            assert_same(&format!("{:?}, {threads} threads", config.family), &by(threads), &alone);
        }
    }
}

#[test]
fn d3_log_probs_equal_a_teacher_forced_rescore() {
    for config in families() {
        let weights = Weights::random(&config, 5);
        for (temperature, top_k) in [(1.0, 0), (0.7, 0), (1.0, 64), (0.0, 0)] {
            let params = SamplingParams { temperature, top_k, ..params(12) };
            let mut engine = engine(&config, 4);
            for ordinal in 0..5 {
                engine.submit(request(ordinal, 2, &params)).unwrap();
            }
            for finished in engine.run().unwrap() {
                let prompt = request(finished.ordinal, 1, &params).tokens;
                let scored_at = if temperature == 0.0 { 1.0 } else { f64::from(temperature) };
                let expected = rescored(&config, &weights, &prompt, &finished.tokens, scored_at);
                for (found, expected) in finished.log_probs.iter().zip(&expected) {
                    assert!(
                        (found - expected).abs() < 1e-4,
                        "{:?} at {temperature}: {found}, rescored {expected}",
                        config.family
                    );
                }
                assert_eq!(finished.versions.len(), finished.tokens.len());
            }
        }
    }
}

#[test]
fn a_finished_samples_slot_takes_the_next_one_at_once() {
    let config = config(Family::Qwen2, None);
    let mut engine = engine(&config, 2);
    let long = SamplingParams { ignore_eos: true, ..params(6) };
    let short = SamplingParams { ignore_eos: true, ..params(2) };
    engine.submit(request(0, 1, &long)).unwrap();
    for ordinal in 1..4 {
        engine.submit(request(ordinal, 1, &short)).unwrap();
    }
    // A step gives a sample that enters two tokens: one from its prompt, one by decoding.
    let ends: Vec<Vec<u64>> = (0..5).map(|_| engine.step().unwrap().iter().map(|finished| finished.ordinal).collect()).collect();
    assert_eq!(ends, [vec![1], vec![2], vec![3], vec![], vec![0]], "two slots never wait for each other");
    assert!(engine.is_idle() && engine.free_slots() == 2);
}

#[test]
fn a_prompt_computed_once_for_its_group_gives_what_separate_prompts_give() {
    for config in families() {
        let params = params(10);
        // In 3 slots a group of 8 enters in parts, between others.
        let [shared, parted] = [32, 3].map(|slots| {
            let mut engine = engine(&config, slots);
            (0..4).for_each(|ordinal| engine.submit(request(ordinal, 8, &params)).unwrap());
            by_key(engine.run().unwrap())
        });
        assert_same("parted group", &parted, &shared);
        let mut single = engine(&config, 1);
        single.submit(request(2, 8, &params)).unwrap();
        let single = by_key(single.run().unwrap());
        let of_group = shared.into_iter().filter(|((ordinal, _), _)| *ordinal == 2).collect();
        assert_same("one slot", &single, &of_group);
    }
}

#[test]
fn weights_swapped_between_two_tokens_show_in_the_spans() {
    let config = config(Family::Qwen3, None);
    let [old, new] = [5, 6].map(|seed| Weights::random(&config, seed));
    let params = SamplingParams { temperature: 0.0, ignore_eos: true, ..params(9) };
    let answers = [OnNewWeights::Swap, OnNewWeights::Recompute].map(|policy| {
        let mut engine = LocalEngine::new(decoder(&config), tokenizer(), 2, 11).on_new_weights(policy);
        engine.set_weights(3, &old);
        engine.submit(request(4, 1, &params)).unwrap();
        let _none_ended = [engine.step().unwrap(), engine.step().unwrap()];
        engine.set_weights(8, &new);
        engine.run().unwrap().remove(0)
    });
    for answer in &answers {
        assert_eq!(serde_json::to_string(&answer.versions).unwrap(), "[[3,3],[8,6]]");
        assert_eq!(answer.tokens[..3], answers[0].tokens[..3]);
    }
    // Recomputed, the rest is what the new weights say after those tokens, as if they had been the prompt.
    let mut engine = LocalEngine::new(decoder(&config), tokenizer(), 1, 11);
    engine.set_weights(8, &new);
    let Request { tokens, .. } = request(4, 1, &params);
    let tokens = [&tokens, &answers[1].tokens[..3]].concat();
    let rest = SamplingParams { max_new_tokens: 6, ..params };
    engine.submit(Request::new(4, tokens, 1, Arc::new(rest))).unwrap();
    assert_eq!(engine.run().unwrap()[0].tokens, answers[1].tokens[3..]);
}

#[test]
fn a_group_that_entered_in_part_starts_from_the_weights_of_its_samples() {
    let config = config(Family::Qwen2, None);
    let params = SamplingParams { ignore_eos: true, ..params(4) };
    let mut engine = engine(&config, 1);
    engine.submit(request(3, 2, &params)).unwrap();
    let mut ended = engine.step().unwrap();
    engine.set_weights(2, &Weights::random(&config, 6));
    ended.extend(engine.run().unwrap());
    let mut fresh = LocalEngine::new(decoder(&config), tokenizer(), 2, 11);
    fresh.set_weights(2, &Weights::random(&config, 6));
    fresh.submit(request(3, 2, &params)).unwrap();
    assert_eq!(by_key(ended)[&(3, 1)].tokens, by_key(fresh.run().unwrap())[&(3, 1)].tokens);
}

#[test]
fn stop_strings_and_stop_tokens_end_an_answer_and_stay_in_its_tokens() {
    let config = config(Family::Qwen2, None);
    let free = SamplingParams { ignore_eos: true, ..params(40) };
    let mut all = engine(&config, 1);
    let (_, whole) = generate(&mut all, "1+2=", &free, 0).unwrap();
    assert_eq!((whole.tokens.len(), whole.finish), (40, Ok(FinishReason::Length)));
    let characters: Vec<char> = tokenizer().decode_all(&whole.tokens).unwrap().chars().collect();
    let plain = |window: &[char]| window.iter().all(|character| character.is_ascii_alphanumeric());
    let texts: Vec<String> = characters.windows(2).filter(|pair| plain(pair)).map(|pair| pair.iter().collect()).collect();
    let stop = texts.first().expect("two letters in a row").clone();

    let (text, stopped) =
        generate(&mut all, "1+2=", &SamplingParams { stop: vec!["none".into(), stop.clone()], ..free.clone() }, 0).unwrap();
    assert_eq!(stopped.finish, Ok(FinishReason::Stop));
    assert_eq!(stopped.tokens, whole.tokens[..stopped.tokens.len()]);
    assert!(tokenizer().decode(&stopped.tokens).unwrap().ends_with(&stop) && !text.contains(&stop));

    let token = whole.tokens[4];
    let (_, by_token) = generate(&mut all, "1+2=", &SamplingParams { stop_token_ids: vec![token], ..free }, 0).unwrap();
    let first = whole.tokens.iter().position(|&other| other == token).unwrap();
    assert_eq!((by_token.tokens.as_slice(), by_token.finish), (&whole.tokens[..=first], Ok(FinishReason::Stop)));
}

#[test]
fn a_stop_string_may_be_a_special_token_and_what_comes_before_it() {
    let config = config(Family::Qwen2, None);
    let bos = tokenizer().encode("<bos>").unwrap();
    assert!(bos.len() == 1 && tokenizer().is_special(bos[0]));
    let free = SamplingParams { ignore_eos: true, logit_bias: [(bos[0], 4.0)].into(), ..params(60) };
    let mut engine = engine(&config, 1);
    let (_, whole) = generate(&mut engine, "1+2=", &free, 0).unwrap();
    let said = |token: u32| tokenizer().decode_all(&[token]).unwrap();
    let shown = |tokens: &[u32]| tokenizer().decode(tokens).unwrap();
    let is_plain = |token: u32| said(token).chars().all(char::is_alphanumeric);
    let is_pair = |pair: &[u32]| pair[1] == bos[0] && is_plain(pair[0]);
    let first = whole.tokens.iter().position(|token| *token == bos[0]).expect("a special token");
    let pair = whole.tokens.windows(2).position(is_pair).expect("a character before a special token");
    for (stop, end, kept) in [("<bos>".to_owned(), first, first), (said(whole.tokens[pair]) + "<bos>", pair + 1, pair)] {
        let (text, stopped) = generate(&mut engine, "1+2=", &SamplingParams { stop: vec![stop], ..free.clone() }, 0).unwrap();
        assert_eq!((&*stopped.tokens, stopped.finish), (&whole.tokens[..=end], Ok(FinishReason::Stop)));
        assert_eq!(text, shown(&whole.tokens[..kept]));
    }
}

#[test]
fn prompts_of_a_call_that_failed_are_not_left_in_the_engine() {
    let config = config(Family::Qwen2, None);
    let (params, mut engine) = (params(16), engine(&config, 2));
    let (long, tokenizer) = ("1".repeat(120), engine.tokenizer().clone());
    let expected = generate(&mut engine, "c", &params, 0).unwrap();
    for _ in 0..2 {
        let failed = batch_generate(&mut engine, &["a", "b", &long], &params, 0);
        assert!(matches!(failed, Err(EngineError::TooLong { ordinal: 2, .. })));
        assert!(engine.is_idle());
        let prompt = |(ordinal, text): (u64, &str)| Prompt { ordinal, text: text.into(), ..Prompt::default() };
        let prompts = (0..).zip(["a", "b", &*long]).map(prompt).collect();
        assert!(complete(&mut engine, &tokenizer, prompts, 3, &params).is_err());
        assert!(engine.is_idle());
        assert_eq!(generate(&mut engine, "c", &params, 0).unwrap(), expected);
    }
}

#[test]
fn a_batch_of_prompts_gives_what_each_gives_alone_in_the_order_asked() {
    let config = config(Family::Qwen2, None);
    let prompts = ["1+2=", "a", "12*(3-4)=", "hello", "7+7="];
    for temperature in [0.0, 1.0] {
        let params = SamplingParams { temperature, ..params(16) };
        let together = batch_generate(&mut engine(&config, 3), &prompts, &params, 0).unwrap();
        assert_eq!(together.len(), prompts.len());
        for (ordinal, (prompt, together)) in prompts.into_iter().zip(&together).enumerate() {
            let alone = generate(&mut engine(&config, 1), prompt, &params, ordinal as u64).unwrap();
            let parts = |(text, finished): &(String, Finished)| (text.clone(), finished.tokens.clone(), finished.finish.clone());
            assert_eq!(parts(&alone), parts(together));
            assert_eq!(alone.1.tokens.len(), alone.1.log_probs.len());
        }
    }
}

#[test]
fn d2_answers_by_hand_are_whole_groups_in_the_order_of_their_prompts() {
    let config = config(Family::Qwen2, None);
    // So few slots that groups end in another order.
    let mut engine = engine(&config, 4);
    let prompt = |(ordinal, text): (u64, &str)| Prompt { ordinal, text: text.into(), ..Prompt::default() };
    let prompts: Vec<Prompt> = (7..).zip(["1+1=", "2", "3+(4)="]).map(prompt).collect();
    let tokenizer = engine.tokenizer().clone();
    let groups = complete(&mut engine, &tokenizer, prompts.clone(), 3, &params(12)).unwrap();
    assert_eq!(groups.iter().map(Group::id).collect::<Vec<_>>(), [7, 8, 9]);
    for (group, prompt) in groups.iter().zip(&prompts) {
        assert_eq!((&*group.prompt, group.samples.len()), (prompt, 3));
        for sample in &group.samples {
            assert_eq!(
                engine.tokenizer().decode(&sample.tokens[sample.tokens.len() - sample.generated()..]).unwrap(),
                sample.response
            );
            assert!(sample.status == Status::Completed || sample.generated() == 12, "{sample:?}");
        }
    }
}

#[test]
fn requests_without_meaning_are_refused_by_name() {
    let config = config(Family::Qwen2, None);
    let mut engine = engine(&config, 1);
    let refused = |engine: &mut LocalEngine, request| engine.submit(request).unwrap_err().to_string();
    let bad = SamplingParams { top_p: 0.0, ..Default::default() };
    assert!(refused(&mut engine, request(0, 1, &bad)).contains("`top_p` is 0"));
    let long = params(1000);
    assert!(refused(&mut engine, request(7, 1, &long)).contains("prompt 7: 1 tokens and max_new_tokens 1000 exceed"));
    let empty = Request { tokens: [].into(), ..request(2, 1, &params(4)) };
    assert!(refused(&mut engine, empty).contains("prompt 2: it has no token"));
    let strange = Request { tokens: [64].into(), ..request(2, 1, &params(4)) };
    assert!(refused(&mut engine, strange).contains("token 64 is beyond"));
    assert!(engine.is_idle(), "nothing was taken in");
}

#[test]
fn v4_no_step_without_weights_and_n4_logits_that_are_not_finite_name_the_sample() {
    let config = config(Family::Qwen2, None);
    let mut engine = LocalEngine::new(decoder(&config), tokenizer(), 1, 11);
    engine.submit(request(9, 1, &params(4))).unwrap();
    assert!(matches!(engine.step(), Err(EngineError::NoWeights)));
    let broken = Weights::random(&config, 5);
    let _filled = broken.flat.shallow_clone().fill_(f64::NAN);
    engine.set_weights(4, &broken);
    let error = engine.step().unwrap_err();
    assert!(matches!(error, EngineError::NonFinite { ordinal: 9, index: 0, position: 0, version: 4 }), "{error}");
}

#[test]
fn the_random_number_depends_on_its_key_alone_and_on_all_of_it() {
    let number = uniform(1, 2, 3, 4);
    assert_eq!(number, uniform(1, 2, 3, 4));
    for other in [uniform(2, 2, 3, 4), uniform(1, 3, 3, 4), uniform(1, 2, 4, 4), uniform(1, 2, 3, 5)] {
        assert_ne!(number, other);
    }
    let mean = (0..2000).map(|position| uniform(0, 0, 0, position)).sum::<f64>() / 2000.0;
    assert!((mean - 0.5).abs() < 0.03, "{mean}");
}

#[test]
fn draws_follow_the_distribution_they_report() {
    let logits = [0.0f32, 1.0, -2.0, 3.0, 0.5];
    let params = SamplingParams { temperature: 1.5, top_k: 4, ..Default::default() };
    let mut counts = [0usize; 5];
    let mut reported = [f64::NEG_INFINITY; 5];
    for position in 0..20_000 {
        let (token, log_prob) = choose(&mut logits.clone(), &params, uniform(7, 0, 0, position)).unwrap();
        counts[token as usize] += 1;
        reported[token as usize] = f64::from(log_prob);
    }
    assert_eq!(counts[2], 0, "dropped by top-k");
    assert!((reported.iter().map(|log| log.exp()).sum::<f64>() - 1.0).abs() < 1e-6);
    for (count, log) in counts.iter().zip(reported) {
        assert!((*count as f64 / 20_000.0 - log.exp()).abs() < 0.015, "{counts:?} {reported:?}");
    }
}

#[test]
fn a_greedy_choice_carries_the_models_own_log_probability() {
    let choice = choose(&mut [0.0, 2.0, 2.0], &SamplingParams { temperature: 0.0, ..Default::default() }, 0.9);
    let expected = -(1.0f64 + 1.0 + (-2.0f64).exp()).ln();
    assert_eq!(choice, Some((1, expected as f32)));
}

#[test]
fn biased_and_penalised_tokens_are_said_more_or_less() {
    let config = config(Family::Qwen3, None);
    let said = |params: SamplingParams| {
        let params = SamplingParams { ignore_eos: true, ..params };
        let mut engine = engine(&config, 8);
        (0..8).for_each(|ordinal| engine.submit(request(ordinal, 1, &params)).unwrap());
        engine.run().unwrap().into_iter().map(|finished| finished.tokens).collect::<Vec<_>>()
    };
    let only = said(SamplingParams { logit_bias: [(17, 100.0)].into(), ..params(9) });
    assert!(only.iter().flatten().all(|token| *token == 17), "{only:?}");
    let different = said(SamplingParams { presence_penalty: 100.0, ..params(30) });
    for tokens in different {
        let kinds: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert_eq!(kinds.len(), tokens.len(), "no token twice: {tokens:?}");
    }
    let mut engine = engine(&config, 1);
    let beyond = SamplingParams { logit_bias: [(100_000, 1.0)].into(), ..params(9) };
    let refused = engine.submit(request(0, 1, &beyond)).unwrap_err().to_string();
    assert!(refused.contains("`logit_bias` names token 100000"), "{refused}");
}

#[test]
fn logits_that_are_not_finite_give_no_token() {
    for greedy in [0.0, 1.0] {
        let params = SamplingParams { temperature: greedy, ..Default::default() };
        for logits in [[0.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
            assert_eq!(choose(&mut logits.clone(), &params, 0.5), None, "{logits:?} at {greedy}");
        }
    }
}

proptest! {
    /// Against the sums of their definition, in f64.
    #[test]
    fn penalties_count_every_token_of_the_completion_and_see_those_of_the_prompt(
        scores in prop::collection::vec(-8f32..8.0, 12), prompt in prop::collection::vec(0u32..12, 0..9), said in prop::collection::vec(0u32..12, 0..9),
        repetition_penalty in 0.5f32..2.0, presence_penalty in -1f32..1.0, frequency_penalty in -1f32..1.0, bias in -5f32..5.0, biased in 0u32..12,
    ) {
        let logit_bias = [(biased, bias)].into();
        let params = SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, logit_bias, ..Default::default() };
        let mut found = scores.clone();
        adjust(&mut found, &adjusted(&params, &prompt, said.iter()));
        for (token, (score, found)) in (0u32..).zip(scores.iter().zip(found)) {
            let mut score = f64::from(*score) + if token == biased { f64::from(bias) } else { 0.0 };
            if prompt.contains(&token) || said.contains(&token) {
                let penalty = f64::from(repetition_penalty);
                score = if score > 0.0 { score / penalty } else { score * penalty };
            }
            let count = said.iter().filter(|other| **other == token).count();
            score -= f64::from(frequency_penalty) * count as f64;
            score -= if count > 0 { f64::from(presence_penalty) } else { 0.0 };
            prop_assert!((score - f64::from(found)).abs() < 1e-4, "{token}: {found}, {score}");
        }
    }

    #[test]
    fn a_token_that_was_dropped_is_never_drawn(
        logits in prop::collection::vec(-8f32..8.0, 1..40), u in 0.0f64..1.0, top_k in 0usize..8, top_p in 0.05f32..1.0, min_p in 0f32..0.9,
    ) {
        let params = SamplingParams { top_k, top_p, min_p, ..Default::default() };
        let mut warped = logits.clone();
        warp(&mut warped, &params);
        let (token, log_prob) = choose(&mut logits.clone(), &params, u).expect("finite logits");
        prop_assert!(warped[token as usize] > f32::NEG_INFINITY);
        prop_assert!(log_prob <= 0.0 && log_prob.is_finite());
    }
}
