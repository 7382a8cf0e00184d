//! A limit on slots that moves between steps changes how many samples are computed at a time, and nothing else (law N2).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::generating::policy;
use rollflow::engine::{LocalEngine, Request, TokenEngine};
use rollflow::observe::Metric;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::rollout::Admission;

/// Tokens by group and sample, with at most `limits[step % len]` slots from that step on.
fn generate(policy: &Policy, limits: &[usize]) -> BTreeMap<(u64, u32), Vec<u32>> {
    tch::set_num_threads(1);
    let mut engine = LocalEngine::new(policy.decoder(), policy.tokenizer().clone(), 8, 11);
    engine.set_weights(1, &policy.weights());
    let params = Arc::new(SamplingParams { max_new_tokens: 9, ..SamplingParams::default() });
    for ordinal in 0..5 {
        let tokens = policy.tokenizer().encode(&format!("{ordinal}+1=")).unwrap();
        engine.submit(Request::new(ordinal, tokens, 3, params.clone())).unwrap();
    }
    let mut found = BTreeMap::new();
    for limit in limits.iter().cycle() {
        let before = engine.active();
        engine.limit_slots(*limit);
        for finished in engine.step().unwrap() {
            found.insert((finished.ordinal, finished.index), finished.tokens);
        }
        assert!(engine.active() <= before.max(*limit), "{} under way, {limit} allowed", engine.active());
        if engine.is_idle() {
            break;
        }
    }
    found
}

#[test]
fn answers_do_not_depend_on_how_many_are_computed_at_a_time() {
    let policy = policy();
    let unlimited = generate(&policy, &[8]);
    assert_eq!(unlimited.len(), 15);
    for limits in [vec![1], vec![8, 1, 5, 2], vec![3, 7]] {
        assert_eq!(generate(&policy, &limits), unlimited, "{limits:?}");
    }
}

#[test]
fn a_run_with_adaptive_slots_finds_its_number_between_one_and_the_most() {
    let (policy, metrics, admission) = (policy(), Metrics::new(), Admission::max_staleness(1, 4));
    let (publisher, published) = weights();
    let config = LocalConfig { threads: Some(1), ..LocalConfig::new(Grpo::default(), Schedule::constant(1e-4)) };
    let generator = Generator::local(&policy).weights(published).group_size(4).max_new_tokens(12).adaptive_slots(16);
    let trainer = Trainer::new(policy.backend(config).unwrap()).advantages(GroupMean::default()).steps(12);
    let seen: Arc<Mutex<Vec<f64>>> = Arc::default();
    let (slots, shown) = (Arc::clone(&seen), metrics.clone());

    let mut flow = Flow::new("adaptive").admission(&admission).metrics(&metrics);
    let prompts = flow.source("prompts", Prompts::addition(1, 0).unwrap());
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(|sample: &Sample| sample.response.len() as f64));
    let batches = flow.stage("batch", scored, Batcher::groups(4));
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::to(publisher));
    let log = RunLog::new(&metrics).logger(move |_: u64, _: &StepMetrics| {
        slots.lock().unwrap().extend(shown.newest(Metric::GeneratorSlots, &[]));
    });
    flow.sink("log", synced, log);
    flow.run(Until::finished()).unwrap();
    let seen = seen.lock().unwrap();
    assert!(seen.len() == 12 && seen.iter().all(|slots| (1.0..=16.0).contains(slots)), "{seen:?}");
    assert!(seen.iter().any(|slots| *slots > 1.0), "it started with one and tried more: {seen:?}");
}
