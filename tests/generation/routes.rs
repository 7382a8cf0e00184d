//! The experts that computed a sample's tokens come with it, whatever computed them, and a trainer under the same weights chooses the
//! same ones.
//!
//! Laws: C1 (an answer that had ended keeps its experts), V5 (they are those of the keys and values that the sample ended with).

use std::sync::Arc;

use crate::generating::*;
use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::{Answer, Routes, Sample, Status};
use rollflow::engine::remote::{Attempt, Ending, Fleet, FleetConfig, FleetHandle, InferenceEngine, RemoteError, async_trait};
use rollflow::engine::{FinishReason, Finished, LocalEngine, OnNewWeights, Request, SamplingParams, TokenEngine};
use rollflow::model::{ExpertLayer, Experts, Family, ModelConfig, Weights};
use rollflow::train::{LocalBackend, LocalConfig, RouterMismatch, RouterReplay, TrainingBackend, collate};
use tokio::sync::mpsc::Sender;

/// Three layers, of which the second has no experts.
fn mixture() -> ModelConfig {
    let experts = Experts {
        count: 8,
        per_token: 2,
        width: 16,
        normalized: true,
        dense_layers: vec![1],
        shared: None,
        layer: ExpertLayer::SwiGlu,
    };
    ModelConfig { experts: Some(experts), windows: vec![None; 3], ..config(Family::Qwen3Moe, None) }
}

fn recording(slots: usize) -> LocalEngine {
    let engine = LocalEngine::new(decoder(&mixture()), tokenizer(), slots, 11).recording_routes(true);
    with_weights(engine, 5)
}

fn with_weights(mut engine: LocalEngine, seed: u64) -> LocalEngine {
    engine.set_weights(seed, &Weights::random(&mixture(), seed));
    engine
}

/// How a trainer with these weights routes completions, next to how they were routed.
fn compared(weights: u64, requests: &[Request], finished: &[Finished]) -> RouterMismatch {
    let sample = |(group, of): (u64, &Finished)| {
        let prompt = &requests.iter().find(|request| request.ordinal == of.ordinal).unwrap().tokens;
        let routes = of.routes.as_ref().unwrap();
        assert_eq!(routes.experts.len(), (prompt.len() + of.tokens.len() - 1) * 2 * 2, "two sparse layers of two experts");
        // Each with a prompt of its own.
        Sample { group_index: group, routes: of.routes.clone(), ..Sample::supervised(prompt, &of.tokens) }
    };
    let batch = collate(&(0..).zip(finished).map(sample).collect::<Vec<_>>(), Aggregation::TokenMean).unwrap();
    // The last layer computes what predicts an answer's tokens, the other sparse one all.
    let tokens: usize = batch.sequences.iter().map(|sequence| sequence.inputs.len() + sequence.rows.len()).sum();
    let trainer = LocalConfig { router_replay: RouterReplay::Measure, ..LocalConfig::new(CrossEntropy, Schedule::constant(0.0)) };
    let trainer = LocalBackend::new(trainer, mixture(), Weights::random(&mixture(), weights)).unwrap();
    let router_mismatch = trainer.forward_backward(Arc::new(batch)).wait().unwrap().router_mismatch;
    assert_eq!(router_mismatch.all, (tokens * 2) as u64);
    router_mismatch
}

fn run(mut engine: LocalEngine, requests: &[Request]) -> Vec<Finished> {
    requests.iter().for_each(|request| engine.submit(request.clone()).unwrap());
    engine.run().unwrap()
}

/// Prompts that end in two ways, in more groups than there are slots.
fn requests() -> Vec<Request> {
    (0..6).map(|ordinal| request(ordinal, 1 + ordinal as u32 % 3, &params(14))).collect()
}

#[test]
fn a_trainer_of_the_same_weights_chooses_the_experts_of_the_generator() {
    let (requests, plain) = (requests(), run(recording(3), &requests()));
    assert_eq!(compared(5, &requests, &plain).other, 0);
    assert!(compared(6, &requests, &plain).share().unwrap() > 0.2, "other weights choose others");
    let without = LocalEngine::new(decoder(&mixture()), tokenizer(), 3, 11);
    let without = by_key(run(with_weights(without, 5), &requests));
    assert_same("without experts", &by_key(plain), &without);
    assert!(without.values().all(|finished| finished.routes.is_none()));
    let dense = LocalEngine::new(decoder(&families()[1]), tokenizer(), 3, 11).recording_routes(true);
    let mut dense = dense.remembering(2);
    dense.set_weights(1, &Weights::random(&families()[1], 1));
    assert!(run(dense, &requests).iter().all(|finished| finished.routes.is_none()), "there are none");
}

#[test]
fn experts_of_steps_that_threads_divide_are_those_of_each_token() {
    // 24 samples at a time: three parts of eight.
    let requests: Vec<Request> = (0..6).map(|ordinal| request(ordinal, 4, &params(14))).collect();
    let divided = || run(recording(24).threads(3), &requests);
    let divided = std::thread::scope(|scope| scope.spawn(divided).join().unwrap());
    assert_eq!(compared(5, &requests, &divided).other, 0);
    assert_same("by three threads", &by_key(divided), &by_key(run(recording(24), &requests)));
}

/// What is remembered or drafted takes other passes: the rest of a prompt, several tokens of a sample.
#[test]
fn experts_of_remembered_and_of_drafted_tokens_are_those_of_plain_ones() {
    let mut engine = recording(4).remembering(6).drafting(3);
    let repeating: Vec<u32> = (0..24).map(|at| 4 + at % 3).collect();
    let (mut reused, mut drafted) = (0, 0);
    for turn in 0..3u64 {
        let prompt: Vec<u32> = repeating.iter().copied().chain((0..turn as u32 * 5).map(|at| 20 + at)).collect();
        let asked = [Request::new(turn, prompt, 4, Arc::new(params(20)))];
        engine.submit(asked[0].clone()).unwrap();
        let mut finished = Vec::new();
        while !engine.is_idle() {
            finished.extend(engine.step().unwrap());
            (reused, drafted) = (reused + engine.load().reused, drafted + engine.load().drafted);
        }
        assert_eq!(compared(5, &asked, &finished).other, 0, "turn {turn}");
    }
    assert!(reused > 30 && drafted > 10, "{reused} tokens reused, {drafted} drafted");
}

/// Law V5: where keys are computed again, so are the experts; where they are not, they stay.
#[test]
fn v5_experts_of_a_sample_are_those_of_its_keys_under_each_policy() {
    for (policy, other_of_new) in
        [(OnNewWeights::Recompute, false), (OnNewWeights::Abort, false), (OnNewWeights::Finish, true), (OnNewWeights::Swap, true)]
    {
        let asked = [request(3, 4, &params(16))];
        let mut engine = recording(4).on_new_weights(policy);
        engine.submit(asked[0].clone()).unwrap();
        let mut finished = Vec::new();
        for step in 0.. {
            if step == 4 {
                assert!(finished.is_empty(), "all samples see new weights");
                engine = with_weights(engine, 6);
            }
            finished.extend(engine.step().unwrap());
            if engine.is_idle() {
                break;
            }
        }
        let [old, new] = [5, 6].map(|weights| compared(weights, &asked, &finished).other);
        assert_eq!(new > 0, other_of_new, "{policy:?}: {new} of the new weights");
        assert_eq!(old == 0, policy == OnNewWeights::Finish, "{policy:?}: {old} of the old weights");
    }
}

/// Law C1: through a checkpoint's text, an answer that has ended comes back with its experts, and one that has not gets all of them.
#[test]
fn c1_answers_come_back_with_their_experts() {
    let asked = request(2, 2, &params(12));
    let whole = by_key(run(recording(2), std::slice::from_ref(&asked)));
    let answers = whole.values().map(|of| {
        let mut answer = Answer::new(of.index);
        // The first has ended, of the second there are two tokens.
        let kept = if of.index == 0 { of.tokens.len() } else { 2 };
        (0..kept).for_each(|at| answer.push(of.tokens[at], of.log_probs[at], 5));
        if of.index == 0 {
            (answer.status, answer.routes) = (of.status(), of.routes.clone());
        }
        assert!(of.tokens.len() > 2 && answer.has_ended() == (of.index == 0) && of.status() != Status::Aborted);
        serde_json::from_str(&serde_json::to_string(&answer).unwrap()).unwrap()
    });
    let resumed = by_key(run(recording(2), &[Request { answers: answers.collect(), ..asked }]));
    assert_same("resumed", &resumed, &whole);
    for (key, of) in &whole {
        assert_eq!(resumed[key].routes, of.routes, "sample {key:?}");
    }
}

/// Answers in two tokens, `a` and `b`, with the experts of all.
struct Server;

#[async_trait]
impl InferenceEngine for Server {
    fn name(&self) -> String {
        "server".into()
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        let answer = tokenizer().encode("ab").unwrap();
        tokens.send(answer.iter().map(|token| (*token, -1.0)).collect()).await.ok();
        let experts = vec![0; attempt.tokens.len() + answer.len() - 1];
        let routes = Some(Routes { layers: 1, per_token: 1, experts });
        Ok(Ending { finish: Some(FinishReason::Stop), routes, ..Ending::default() })
    }
}

/// A server finds stop strings in a turn by itself, and reports its experts after the last token.
#[test]
fn a_turn_of_a_server_that_a_stop_string_ends_has_its_experts_whatever_turns_were_before() {
    let mut fleet = Fleet::new(&FleetHandle::new(vec![Arc::new(Server)]), FleetConfig::default(), &tokenizer(), 4, 0);
    fleet.set_weights(0, &());
    let params = Arc::new(SamplingParams { stop: vec!["b".into()], ..params(8) });
    let mut answer = Answer::new(0);
    for turn in 1..=3 {
        fleet.submit(Request { answers: vec![answer.clone()], ..Request::new(0, vec![3, 4], 1, params.clone()) }).unwrap();
        let mut finished = Vec::new();
        while finished.is_empty() {
            finished = fleet.step().unwrap();
        }
        let of = finished.remove(0);
        let routes = of.routes.as_ref().unwrap_or_else(|| panic!("turn {turn} has no experts"));
        assert_eq!(routes.experts.len(), 2 + of.tokens.len() - 1);
        for at in answer.tokens.len()..of.tokens.len() {
            answer.push(of.tokens[at], of.log_probs[at], 0);
        }
        answer.give(&[5]);
    }
}
