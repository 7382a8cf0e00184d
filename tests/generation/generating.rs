//! A small model in an engine or in a run, and what is asked of it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::data::Version;
use rollflow::engine::{Finished, LocalEngine, Request};
use rollflow::flow::Capacity;
use rollflow::model::{Decoder, Family, GatedDelta, Layout, ModelConfig, Packed, Weights, log_probs_and_entropy};
use rollflow::observe::Metric;
use rollflow::prelude::*;
use rollflow::rollout::{Admission, Fate, Progress};
use tch::Tensor;

pub fn config(family: Family, window: Option<usize>) -> ModelConfig {
    ModelConfig {
        family,
        vocab_size: 64,
        intermediate_size: 48,
        max_positions: 128,
        windows: vec![None, window],
        qkv_bias: family == Family::Qwen2,
        initializer_range: 0.3,
        eos_token_ids: vec![1],
        pad_token_id: Some(0),
        ..ModelConfig::small(&tokenizer(), 32, 2)
    }
}

pub fn families() -> [ModelConfig; 4] {
    [config(Family::Qwen2, None), config(Family::Qwen3, None), config(Family::Mistral, Some(5)), nets()]
}

/// A model whose first layer has a state instead of keys and values.
pub fn nets() -> ModelConfig {
    let delta = GatedDelta { layers: vec![0], key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, kernel: 4 };
    // A state takes rounding along, the more so the larger weights are.
    ModelConfig { delta: Some(delta), initializer_range: 0.1, ..config(Family::Qwen35, None) }
}

pub fn decoder(config: &ModelConfig) -> Decoder {
    // Tests run side by side, and teams of threads on the same cores spin against each other.
    tch::set_num_threads(1);
    Decoder::new(config, Arc::new(Layout::new(config)))
}

pub fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::characters("0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n", 64).unwrap())
}

pub fn engine(config: &ModelConfig, slots: usize) -> LocalEngine {
    let mut engine = LocalEngine::new(decoder(config), tokenizer(), slots, 11);
    engine.set_weights(1, &Weights::random(config, 5));
    engine
}

pub fn params(max_new_tokens: usize) -> SamplingParams {
    SamplingParams { max_new_tokens, ..Default::default() }
}

/// Penalties that change most samples.
pub fn penalised(params: SamplingParams) -> SamplingParams {
    let logit_bias = [(9, 3.0), (10, -3.0)].into();
    SamplingParams { repetition_penalty: 1.3, presence_penalty: 0.4, frequency_penalty: 0.2, logit_bias, ..params }
}

/// Prompt `ordinal`, of a length and of tokens of its own.
pub fn request(ordinal: u64, samples: u32, params: &SamplingParams) -> Request {
    let len = 1 + (ordinal as usize * 3) % 7;
    let tokens: Vec<u32> = (0..len).map(|at| 4 + ((ordinal as usize * 5 + at * 11) % 50) as u32).collect();
    Request::new(ordinal, tokens, samples, Arc::new(params.clone()))
}

pub type ByKey = BTreeMap<(u64, u32), Finished>;

pub fn by_key(finished: Vec<Finished>) -> ByKey {
    let count = finished.len();
    let map: ByKey = finished.into_iter().map(|finished| ((finished.ordinal, finished.index), finished)).collect();
    assert_eq!(map.len(), count, "no sample ends twice");
    map
}

pub fn assert_same(what: &str, found: &ByKey, expected: &ByKey) {
    assert!(found.keys().eq(expected.keys()), "{what}: other samples");
    for (key, expected) in expected {
        let found = &found[key];
        assert_eq!((&found.tokens, &found.finish), (&expected.tokens, &expected.finish), "{what}: sample {key:?}");
        for (found, expected) in found.log_probs.iter().zip(&expected.log_probs) {
            assert!((found - expected).abs() < 1e-4, "{what}: sample {key:?}: log-probability {found}, expected {expected}");
        }
    }
}

/// Log-probabilities of an answer's tokens by one forward pass over all of it, at a temperature.
pub fn rescored(config: &ModelConfig, weights: &Weights, prompt: &[u32], answer: &[u32], temperature: f64) -> Vec<f32> {
    let tokens = [prompt, answer].concat();
    let decoder = decoder(config);
    let views = decoder.views(&weights.flat);
    let hidden = decoder.hidden(&views, &Packed::new([&tokens[..tokens.len() - 1]]));
    let rows = hidden.narrow(0, prompt.len() as i64 - 1, answer.len() as i64);
    let targets: Vec<i64> = answer.iter().map(|&token| i64::from(token)).collect();
    let (log_probs, _) = log_probs_and_entropy(&decoder.logits(&views, &rows), &Tensor::from_slice(&targets), temperature);
    log_probs.try_into().unwrap()
}

pub fn policy() -> Policy {
    let tokenizer = Tokenizer::characters("0123456789+=", 16).unwrap();
    Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, 3).unwrap()
}

pub const GROUP: usize = 3;

/// Prompts of a run, however often it is stopped and resumed.
const PROMPTS: u64 = 6;

pub type LocalGenerator = Generator<LocalEngine>;

/// When a run is stopped, as by a second Ctrl-C.
#[derive(Clone, Copy, Debug)]
pub enum Stopped {
    Never,
    /// Once so many tokens were sampled in all, sooner or later.
    AtTokens(u64),
    /// With its first group. Edges hold two more, so that others are in flight.
    AtFirstGroup,
}

/// Runs prompts, a generator that `change` configures, and a sink that settles what arrives.
/// Returns the groups, and the tokens that metrics counted.
pub fn generate(
    admission: &Admission,
    version: Version,
    stopped: Stopped,
    change: impl FnOnce(LocalGenerator) -> LocalGenerator,
) -> (Vec<Group>, f64) {
    let (policy, metrics) = (policy(), Metrics::new());
    let (publisher, published) = weights();
    let prompts = Prompts::addition(1, 0).unwrap().limited(PROMPTS);
    let generator = Generator::local(&policy).weights(published).group_size(GROUP).max_new_tokens(24).slots(4).seed(5);
    let groups: Arc<Mutex<Vec<Group>>> = Arc::default();
    let (arrived, settling) = (Arc::clone(&groups), admission.clone());

    let mut flow = Flow::new("generate").admission(admission).metrics(&metrics);
    let handle = flow.handle();
    flow.capacity(Capacity::items(2));
    let prompts = flow.source("prompts", prompts);
    let answered = flow.stage("generate", prompts, change(generator));
    flow.sink("settle", answered, move |group: Group| {
        settling.settle(&Batch { groups: vec![group.clone()], ..Batch::default() }).unwrap();
        arrived.lock().unwrap().push(group);
        if matches!(stopped, Stopped::AtFirstGroup) {
            handle.stop();
        }
    });
    publisher.publish(version, Arc::new(policy.weights().freeze())).unwrap();
    admission.published(version);
    let (handle, ended) = (flow.handle(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let Stopped::AtTokens(tokens) = stopped else { return };
            while !ended.load(SeqCst) && admission.totals().generated < tokens {
                std::thread::sleep(Duration::from_micros(100));
            }
            handle.stop();
        });
        flow.run(Until::finished()).unwrap();
        ended.store(true, SeqCst);
    });
    (std::mem::take(&mut *groups.lock().unwrap()), metrics.newest(Metric::GeneratedTokens, &[]).unwrap_or(0.0))
}

pub fn sampled(groups: &[Group]) -> BTreeMap<(u64, u32), &Sample> {
    groups.iter().flat_map(|group| &group.samples).map(|sample| ((sample.group_index, sample.index), sample)).collect()
}

/// The same, with all parts of rollouts.
fn parts(groups: &[Group]) -> BTreeMap<(u64, u32, u32), &Sample> {
    let samples = groups.iter().flat_map(|group| &group.samples);
    samples.map(|sample| ((sample.group_index, sample.index, sample.part), sample)).collect()
}

/// What a checkpoint keeps of a run: through text and back.
pub fn saved(admission: &Admission) -> Progress {
    serde_json::from_str(&serde_json::to_string(&admission.progress()).unwrap()).unwrap()
}

/// The next life of a run.
pub fn next(of: &Admission, admission: impl Fn() -> Admission) -> Admission {
    let admission = admission();
    admission.restore(saved(of));
    admission
}

/// Laws C1, D2, D3 and D4: a run that is stopped at these counts of tokens and resumed with `resumed`
/// gives the groups of a run with `whole` that is not stopped.
pub fn stopped_and_resumed(
    mut stops: Vec<u64>,
    whole: impl FnOnce(LocalGenerator) -> LocalGenerator,
    resumed: impl Fn(LocalGenerator) -> LocalGenerator,
) {
    // A credit more than there are prompts: the source asks for one before it sees that it has ended.
    let admission = || Admission::new(PROMPTS, PROMPTS + 1, None);
    let (whole, _) = generate(&admission(), 1, Stopped::Never, whole);

    stops.sort();
    let (mut life, mut groups, mut counted) = (admission(), Vec::new(), 0.0);
    for stop in stops.into_iter().map(Stopped::AtTokens).chain([Stopped::Never]) {
        let (arrived, tokens) = generate(&life, 1, stop, &resumed);
        groups.extend(arrived);
        counted += tokens;
        assert_eq!(life.totals().imbalance(), (0, 0), "law D4 after a stop at {stop:?}");
        assert_eq!(life.totals().generated as f64, counted, "metrics count every token once");
        life = next(&life, admission);
    }
    let totals = life.totals();
    assert_eq!((totals.open_groups, totals.open_tokens, totals.tokens.get(&Fate::Truncated)), (0, 0, None), "{totals:?}");
    let rollouts = |group: &Group| group.samples.iter().filter(|sample| sample.part == 0).count();
    assert!(groups.iter().all(|group| rollouts(group) == GROUP), "law D2: groups are whole");
    assert_eq!([groups.len(), whole.len()], [PROMPTS as usize; 2], "each comes once");
    let (found, expected) = (parts(&groups), parts(&whole));
    assert!(found.keys().eq(expected.keys()));
    for (key, expected) in expected {
        let found = found[&key];
        assert_eq!((&found.tokens, &found.versions, found.status), (&expected.tokens, &expected.versions, expected.status));
        assert_eq!(found.metadata, expected.metadata);
        let off = found.log_probs.iter().zip(&expected.log_probs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-4, "sample {key:?}: log-probabilities are off by {off}");
    }
}
