//! Weights change while tokens are being made, runs end while samples are under way, and no token is lost or sampled twice.
//! One file, for all cases compare with the same engine that was not interrupted.
//!
//! Laws: N2 and C1 (what was interrupted goes on as if it had not been), D2, D3, D4 (the ledger balances), D7 (a prompt that re-enters
//! carries its partial completions), V2 (samples that would be too old start again), V5 (the policy for samples in flight is explicit).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use crate::generating::*;
use proptest::prelude::*;
use rollflow::data::{Answer, Version};
use rollflow::engine::{FinishReason, Finished, LocalEngine, OnNewWeights, Request, SamplingParams, TokenEngine};
use rollflow::flow::RunContext;
use rollflow::flow::from_iter;
use rollflow::model::ModelConfig;
use rollflow::model::{Family, Packed, Weights};
use rollflow::observe::Metric;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::{Fate, OpenGroup, Progress, Totals};

/// The first so many prompts as they leave their source: new ones, or those that re-enter.
fn entering(admission: &Admission, count: u64) -> Vec<Prompt> {
    let mut source = Prompts::addition(1, 0).unwrap();
    let mut context = RunContext::default();
    context.insert(admission.clone());
    source.attach(&mut context);
    (0..count).map(|_| source.next().unwrap().unwrap()).collect()
}

/// One step, written down as the generator does.
fn step(engine: &mut LocalEngine, admission: &Admission) -> Vec<Finished> {
    let finished = engine.step().unwrap();
    admission.sampled(engine.sampled().iter().cloned());
    finished
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Laws N2, C1 and D3: an engine that is thrown away after any number of steps, any number of times, with its ledger kept.
    #[test]
    fn samples_interrupted_at_random_steps_are_those_that_never_were(
        family in 0usize..4, slots in 1usize..7, prompts in 1u64..5, samples in 1u32..4,
        interruptions in prop::collection::vec(0usize..9, 0..6), stop in any::<bool>(), temperature in prop::sample::select(vec![0.0f32, 0.7, 1.0]),
        penalties in any::<bool>(),
    ) {
        let config = &families()[family];
        let stop = if stop { vec!["a".into(), "7".into(), "zz".into()] } else { vec![] };
        let params = SamplingParams { temperature, stop, ..params(20) };
        let params = if penalties { penalised(params) } else { params };
        let mut whole = engine(config, slots);
        (0..prompts).for_each(|ordinal| whole.submit(request(ordinal, samples, &params)).unwrap());
        let whole = by_key(whole.run().unwrap());

        let mut admission = Admission::new(prompts, prompts, None);
        let mut resumed = None;
        for steps in interruptions.into_iter().map(Some).chain([None]) {
            let mut engine = engine(config, slots);
            for mut prompt in entering(&admission, prompts) {
                let partial = admission.resume(&mut prompt, 1, |_| true);
                let request = request(prompt.ordinal, samples, &params);
                engine.submit(Request { answers: partial.completions, ..request }).unwrap();
            }
            match steps {
                Some(steps) => {
                    for _ in 0..steps {
                        step(&mut engine, &admission);
                    }
                    let progress = saved(&admission);
                    admission = Admission::new(prompts, prompts, None);
                    admission.restore(progress);
                }
                None => {
                    let mut all = Vec::new();
                    while !engine.is_idle() {
                        all.extend(step(&mut engine, &admission));
                    }
                    resumed = Some(by_key(all));
                }
            }
        }
        let resumed = resumed.unwrap();
        assert_same("interrupted", &resumed, &whole);
        for (key, whole) in &whole {
            prop_assert_eq!(&resumed[key].versions, &whole.versions);
        }
        let tokens: usize = whole.values().map(|whole| whole.tokens.len()).sum();
        let totals = admission.totals();
        prop_assert_eq!((totals.generated, totals.open_tokens), (tokens as u64, tokens as u64), "law D4: every token once");
    }
}

#[test]
fn answers_that_have_ended_come_back_at_once_and_those_without_room_end_for_their_length() {
    let config = config(Family::Qwen2, None);
    let answer = |index, tokens: &[u32], status| {
        let mut answer = Answer { status, ..Answer::new(index) };
        tokens.iter().for_each(|token| answer.push(*token, -0.5, 3));
        answer
    };
    let ended = [answer(2, &[9, 1], Status::Completed), answer(0, &[9, 9], Status::Pending), answer(1, &[5], Status::Truncated)];
    let mut engine = engine(&config, 4);
    engine.submit(Request { answers: ended.to_vec(), ..request(0, 3, &params(2)) }).unwrap();
    assert_eq!(engine.free_slots(), 4, "they take no slot");
    let finished = engine.step().unwrap();
    assert!(engine.is_idle() && engine.sampled().is_empty(), "nothing is sampled again");
    let found: Vec<_> =
        finished.iter().map(|finished| (finished.index, finished.tokens.len(), finished.finish.as_ref().unwrap())).collect();
    assert_eq!(found, [(0, 2, &FinishReason::Length), (1, 1, &FinishReason::Length), (2, 2, &FinishReason::Stop)]);
    assert!(finished.iter().all(|finished| finished.versions.newest() == Some(3)), "law D3: their versions are kept");
}

#[test]
fn answers_that_do_not_fit_their_request_are_refused_by_name() {
    let config = config(Family::Qwen2, None);
    let mut engine = engine(&config, 1);
    let mut refused = |answers| engine.submit(Request { answers, ..request(6, 2, &params(4)) }).unwrap_err().to_string();
    assert!(refused(vec![Answer::new(2)]).contains("prompt 6: answer 2 is there already, or is none of those from 0 to 2"));
    assert!(refused(vec![Answer::new(1), Answer::new(1)]).contains("answer 1 is there already"));
    let short = Answer { tokens: vec![5], ..Answer::new(0) };
    assert!(refused(vec![short]).contains("answer 0 has 1 tokens, 0 log-probabilities and 0 versions"));
    let mut strange = Answer::new(0);
    strange.push(64, -0.1, 1);
    assert!(refused(vec![strange]).contains("answer 0 has token 64, beyond"));
}

/// When versions 3 and 8 arrive after 1, in steps.
const CHANGES: [(usize, Version); 2] = [(3, 3), (7, 8)];

fn version_of(config: &ModelConfig, version: Version) -> Weights {
    Weights::random(config, 4 + version)
}

/// Three prompts answered while weights change twice, and which version was the newest when each token was sampled.
fn changing(config: &ModelConfig, policy: OnNewWeights) -> (ByKey, BTreeMap<(u64, u32), Vec<Version>>) {
    let mut engine = LocalEngine::new(decoder(config), tokenizer(), 4, 11).on_new_weights(policy);
    engine.set_weights(1, &version_of(config, 1));
    for (ordinal, tokens) in [(0, 14), (1, 5), (2, 25)] {
        let params = SamplingParams { ignore_eos: true, ..params(tokens) };
        engine.submit(request(ordinal, 3, &params)).unwrap();
    }
    let (mut finished, mut newest) = (Vec::new(), BTreeMap::<_, Vec<Version>>::new());
    for at in 0.. {
        if let Some((_, version)) = CHANGES.iter().find(|(step, _)| *step == at) {
            engine.set_weights(*version, &version_of(config, *version));
        }
        finished.extend(engine.step().unwrap());
        for token in engine.sampled() {
            newest.entry((token.ordinal, token.index)).or_default().push(engine.version().unwrap());
        }
        if engine.is_idle() {
            break;
        }
    }
    (by_key(finished), newest)
}

fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < 1e-4, "{what}: token {at} has {found}, expected {expected}");
    }
}

/// Log-probabilities of the tokens of version `version` in an answer, by a forward pass of that version over all of it.
fn assert_rescored(config: &ModelConfig, policy: OnNewWeights, finished: &Finished) {
    let prompt = request(finished.ordinal, 1, &params(1)).tokens;
    let mut at = 0;
    for (version, len) in finished.versions.iter() {
        let weights = version_of(config, version.unwrap());
        let expected = rescored(config, &weights, &prompt, &finished.tokens, 1.0);
        let what = format!("{policy:?}, sample {}.{}, from token {at}", finished.ordinal, finished.index);
        assert_close(&what, &finished.log_probs[at..at + len], &expected[at..at + len]);
        at += len;
    }
}

#[test]
fn v5_swapped_recomputed_and_aborted_samples_take_the_newest_weights_at_their_next_token() {
    for config in families() {
        for policy in [OnNewWeights::Swap, OnNewWeights::Recompute, OnNewWeights::Abort] {
            let (finished, newest) = changing(&config, policy);
            for (key, finished) in &finished {
                let versions: Vec<_> = finished.versions.per_token().flatten().collect();
                assert_eq!(versions, newest[key], "law D3: {policy:?}");
            }
            assert!(finished.values().any(|finished| finished.versions.iter().count() == 3), "some live through both changes");
        }
    }
}

#[test]
fn v5_recomputed_and_aborted_samples_go_on_as_a_fresh_prefill_of_their_tokens_would() {
    for config in families() {
        for policy in [OnNewWeights::Recompute, OnNewWeights::Abort] {
            let (finished, _) = changing(&config, policy);
            finished.values().for_each(|finished| assert_rescored(&config, policy, finished));
        }
    }
}

#[test]
fn v5_finishing_samples_never_mix_versions_and_are_those_of_their_version_alone() {
    for config in families() {
        let (finished, newest) = changing(&config, OnNewWeights::Finish);
        for (key, finished) in &finished {
            let versions: Vec<_> = finished.versions.iter().flat_map(|(version, _)| version).collect();
            assert_eq!(versions, [newest[key][0]], "the newest when it began");
            assert_rescored(&config, OnNewWeights::Finish, finished);
            let mut alone = LocalEngine::new(decoder(&config), tokenizer(), 3, 11);
            alone.set_weights(versions[0], &version_of(&config, versions[0]));
            let params = SamplingParams { ignore_eos: true, ..params(finished.tokens.len()) };
            alone.submit(request(key.0, 3, &params)).unwrap();
            assert_eq!(by_key(alone.run().unwrap())[key].tokens, finished.tokens, "sample {key:?}");
        }
        let begun: BTreeSet<_> = finished.values().flat_map(|finished| finished.versions.newest()).collect();
        assert_eq!(begun.into_iter().collect::<Vec<_>>(), [1, 3, 8], "some begin under each version");
        let outlived = newest.values().filter(|newest| newest.last() == Some(&8) && newest[0] == 1).count();
        assert!(outlived > 0, "and three versions were in use at the same time");
    }
}

#[test]
fn v5_swapped_samples_keep_the_keys_and_values_of_the_weights_that_computed_them() {
    for config in families() {
        let (finished, _) = changing(&config, OnNewWeights::Swap);
        let answer = finished.values().find(|finished| finished.versions.iter().count() == 3).unwrap();
        let prompt = request(answer.ordinal, 1, &params(1)).tokens;
        let decoder = decoder(&config);
        let mut cache = decoder.cache(1, 64, rollflow::model::Compute::default());
        let views = |version| decoder.views(&version_of(&config, version).flat);
        let versions: Vec<_> = answer.versions.per_token().flatten().collect();
        let mut logits = decoder.prefill(&views(versions[0]), &Packed::new([&*prompt]), &mut cache, &[0]);
        let mut expected = Vec::new();
        for (at, (&token, &version)) in answer.tokens.iter().zip(&versions).enumerate() {
            if at > 0 {
                let read = i64::from(answer.tokens[at - 1]);
                logits = decoder.decode(&views(version), 0, &[read], &[prompt.len() + at - 1], &mut cache);
            }
            expected.push(logits.log_softmax(-1, tch::Kind::Float).double_value(&[0, i64::from(token)]) as f32);
        }
        assert_close("swap", &answer.log_probs, &expected);
        let newest = rescored(&config, &version_of(&config, 8), &prompt, &answer.tokens, 1.0);
        let off = answer
            .log_probs
            .iter()
            .zip(&newest)
            .zip(&versions)
            .filter(|((a, b), version)| **version == 8 && (*a - *b).abs() > 1e-3);
        assert!(off.count() > 0, "what the new weights alone would say differs, so the cache is really the old one");
    }
}

#[test]
fn aborted_samples_enter_before_all_that_wait_oldest_first() {
    let config = config(Family::Qwen2, None);
    let mut engine = LocalEngine::new(decoder(&config), tokenizer(), 2, 11).on_new_weights(OnNewWeights::Abort);
    engine.set_weights(1, &version_of(&config, 1));
    let params = SamplingParams { ignore_eos: true, ..params(9) };
    (0..4).for_each(|ordinal| engine.submit(request(ordinal, 1, &params)).unwrap());
    let _none_ended = engine.step().unwrap();
    engine.set_weights(3, &version_of(&config, 3));
    let _none_ended = engine.step().unwrap();
    let sampled: Vec<_> = engine.sampled().iter().map(|token| (token.ordinal, token.version)).collect();
    assert_eq!(sampled, [(0, 3), (1, 3), (0, 3), (1, 3)], "a token from the prefill, and one by decoding");
}

#[test]
fn v2_what_has_expired_is_begun_anew_under_the_new_weights() {
    let config = config(Family::Qwen2, None);
    let params = SamplingParams { ignore_eos: true, ..params(8) };
    for policy in [OnNewWeights::Swap, OnNewWeights::Recompute, OnNewWeights::Finish, OnNewWeights::Abort] {
        let mut engine = LocalEngine::new(decoder(&config), tokenizer(), 3, 11).on_new_weights(policy);
        engine.set_weights(1, &version_of(&config, 1));
        (0..2).for_each(|ordinal| engine.submit(request(ordinal, 2, &params)).unwrap());
        // Waits for a slot, with tokens.
        let mut begun = Answer::new(0);
        begun.push(7, -0.5, 1);
        engine.submit(Request { answers: vec![begun], ..request(2, 1, &params) }).unwrap();
        let _none_ended = engine.step().unwrap();
        let mut anew = engine.restart_expired(&|ordinal, answer| ordinal != 1 && answer.versions.oldest() == Some(1));
        anew.sort();
        assert_eq!(anew, [(0, 0), (0, 1), (2, 0)]);
        engine.set_weights(3, &version_of(&config, 3));
        let finished = by_key(engine.run().unwrap());
        let mut fresh = LocalEngine::new(decoder(&config), tokenizer(), 5, 11);
        fresh.set_weights(3, &version_of(&config, 3));
        (0..3).for_each(|ordinal| fresh.submit(request(ordinal, 2, &params)).unwrap());
        let fresh = by_key(fresh.run().unwrap());
        for key in anew {
            assert_eq!(
                (&finished[&key].tokens, &finished[&key].versions),
                (&fresh[&key].tokens, &fresh[&key].versions),
                "{policy:?}"
            );
        }
        assert_eq!(finished[&(1, 0)].versions.oldest(), Some(1), "what has not expired goes on");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Laws C1, D2, D3 and D4 through the real stages: stops at random moments, as by a second Ctrl-C.
    #[test]
    fn a_run_stopped_and_resumed_gives_the_groups_of_one_that_was_not(stops in prop::collection::vec(1u64..400, 1..4)) {
        stopped_and_resumed(stops, |generator| generator, |generator| generator);
    }
}

/// A run under version 1 that was stopped in the middle of a sample. When a stop comes between samples, another run is tried.
fn interrupted(admission: fn() -> Admission, generator: fn(LocalGenerator) -> LocalGenerator) -> Admission {
    let unfinished = |group: &OpenGroup| group.answers.values().any(|answer| !answer.tokens.is_empty() && !answer.has_ended());
    let attempt = |_| {
        let first = admission();
        let _settled = generate(&first, 1, Stopped::AtFirstGroup, generator);
        saved(&first).ledger.open().any(unfinished).then_some(first)
    };
    (0..100).find_map(attempt).expect("one of 100 runs stops in the middle of a sample")
}

/// A run stopped under version 1 and resumed under version 4.
fn resumed_under_newer_weights(
    admission: fn() -> Admission,
    generator: fn(LocalGenerator) -> LocalGenerator,
) -> (Vec<Group>, Totals) {
    let first = interrupted(admission, generator);
    let second = next(&first, admission);
    let (groups, _) = generate(&second, 4, Stopped::Never, generator);
    let totals = second.totals();
    assert_eq!((totals.imbalance(), totals.open_groups), ((0, 0), 0));
    (groups, totals)
}

fn mixed(groups: &[Group]) -> Vec<&Sample> {
    groups.iter().flat_map(|group| &group.samples).filter(|sample| sample.versions.oldest() != sample.versions.newest()).collect()
}

#[test]
fn samples_resumed_under_newer_weights_say_so_and_their_older_tokens_can_be_masked() {
    let unbounded = || Admission::new(6, 6, None);
    let (groups, totals) = resumed_under_newer_weights(unbounded, |generator| generator);
    assert!(!mixed(&groups).is_empty() && !totals.tokens.contains_key(&Fate::Masked));
    assert!(mixed(&groups).iter().all(|sample| sample.response_length() == sample.generated()), "every token weighs");

    let (groups, totals) = resumed_under_newer_weights(unbounded, |generator| generator.mask_older(true));
    let mut masked = 0;
    for sample in mixed(&groups) {
        for (version, weight) in sample.versions.per_token().zip(&sample.loss_mask) {
            assert_eq!(*weight, if version == Some(4) { 1.0 } else { 0.0 });
            masked += u64::from(version == Some(1));
        }
    }
    assert!(masked > 0);
    assert_eq!(totals.tokens[&Fate::Masked], masked, "law D4: they are counted");
}

#[test]
fn what_an_interrupted_run_left_is_begun_anew_where_no_sample_may_mix_versions() {
    let unbounded = || Admission::new(6, 6, None);
    let (groups, totals) = resumed_under_newer_weights(unbounded, |generator| generator.on_new_weights(OnNewWeights::Finish));
    assert!(mixed(&groups).is_empty());
    assert!(totals.tokens[&Fate::Truncated] > 0);
}

#[test]
fn v2_what_would_be_too_old_is_begun_anew_and_v3_rounds_begin_anew_always() {
    for admission in [|| Admission::new(6, 6, None).bounded(2), || Admission::new(6, 6, None).bounded(0)] {
        let (groups, totals) = resumed_under_newer_weights(admission, |generator| generator);
        assert!(groups.iter().flat_map(|group| &group.samples).all(|sample| sample.versions.oldest() == Some(4)));
        assert!(totals.tokens[&Fate::Truncated] > 0, "and what was there is accounted for");
    }
    let (groups, _) = resumed_under_newer_weights(|| Admission::new(6, 6, None).bounded(3), |generator| generator);
    assert!(!mixed(&groups).is_empty(), "what is within the bound goes on");
}

/// A run that was stopped in the middle of its groups, and the prompts that re-enter.
fn stopped_and_reentering() -> (Progress, Vec<Prompt>) {
    let admission = || Admission::new(6, 7, None);
    let first = interrupted(admission, |generator| generator);
    let progress = saved(&first);
    let reentering = entering(&next(&first, admission), progress.ledger.open().count() as u64);
    (progress, reentering)
}

#[test]
fn d7_a_prompt_that_reenters_carries_its_partial_completions_and_weighs_their_tokens() {
    let (progress, reentering) = stopped_and_reentering();
    let open: Vec<_> = progress.ledger.open().collect();
    assert!(open.iter().any(|group| !group.answers.is_empty()), "something was under way");
    assert!(reentering.iter().map(|prompt| prompt.ordinal).eq(open.iter().map(|group| group.prompt.ordinal)));
    for (prompt, open) in reentering.iter().zip(open) {
        assert!(prompt.partial.completions.iter().eq(open.answers.values()), "tokens, log-probabilities and version spans");
        let tokens: usize = open.answers.values().map(|answer| answer.tokens.len()).sum();
        assert_eq!(prompt.tokens(), tokens);
    }
    let fresh = entering(&Admission::new(6, 7, None), 6);
    assert!(fresh.iter().all(|prompt| prompt.partial.is_empty() && prompt.tokens() == 0));
}

#[test]
fn d7_a_generator_without_the_ledger_continues_what_a_prompt_carries() {
    let (whole, _) = generate(&Admission::new(6, 7, None), 1, Stopped::Never, |generator| generator);
    let whole = sampled(&whole);
    let (_, reentering) = stopped_and_reentering();
    let begun: usize = reentering.iter().map(Message::tokens).sum();
    let (policy, metrics) = (policy(), Metrics::new());
    let (publisher, published) = weights();
    let generator = Generator::local(&policy).weights(published).group_size(GROUP).max_new_tokens(24).slots(4).seed(5);
    let groups: Arc<Mutex<Vec<Group>>> = Arc::default();
    let arrived = Arc::clone(&groups);
    let mut flow = Flow::new("continue").metrics(&metrics);
    let prompts = flow.source("prompts", from_iter(reentering.clone()));
    let answered = flow.stage("generate", prompts, generator);
    flow.sink("groups", answered, move |group: Group| arrived.lock().unwrap().push(group));
    let drawing = flow.graph().to_mermaid();
    assert!(drawing.contains("partial completions"), "a drawing says so: {drawing}");
    publisher.publish(1, Arc::new(policy.weights().freeze())).unwrap();
    flow.run(Until::finished()).unwrap();
    let groups = std::mem::take(&mut *groups.lock().unwrap());
    assert_eq!(groups.len(), reentering.len());
    assert!(groups.iter().all(|group| group.prompt.partial.is_empty()), "what was taken up does not travel twice");
    let found = sampled(&groups);
    for (key, found) in &found {
        assert_eq!((&found.tokens, &found.versions), (&whole[key].tokens, &whole[key].versions), "sample {key:?}");
    }
    let all: usize = found.values().map(|sample| sample.generated()).sum();
    let sampled = metrics.newest(Metric::GeneratedTokens, &[]).unwrap_or(0.0);
    assert_eq!(sampled, (all - begun) as f64, "no token is sampled twice");
}
