//! Law V3: `max_staleness = 0` is the synchronous algorithm, bit for bit: weights, numbers and rollouts of the pipeline equal those of a plain
//! loop that is written out here, whatever the edges' capacities and the generator's slots.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rollflow::algo::filters::Verdict;
use rollflow::data::DataBuffer;
use rollflow::data::Spans;
use rollflow::data::arithmetic;
use rollflow::engine::{Finished, LocalEngine, Request, TokenEngine};
use rollflow::flow::Capacity;
use rollflow::model::ModelConfig;
use rollflow::observe::Metric;
use rollflow::observe::StepMetrics;
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::SURPLUS;
use rollflow::stages::batch::over_sampled;
use rollflow::stages::sink::step_row;
use rollflow::train::{assign_advantages, collate};

const SEED: u64 = 5;
const GROUPS: usize = 6;
const SAMPLES: u32 = 4;
const STEPS: u64 = 5;
const NEW_TOKENS: usize = 4;

/// Tokens, log-probabilities, versions and reward of a trained sample.
type Rollout = (Vec<u32>, Vec<f32>, Spans, Option<f64>);

/// All that a run leaves: each step's numbers, each trained sample's tokens, log-probabilities and versions, and the final weights.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    rows: Vec<StepMetrics>,
    rollouts: Vec<Rollout>,
    weights: Vec<u32>,
    surplus: usize,
}

impl Outcome {
    fn note(&mut self, trained: &Trained<rollflow::model::FrozenWeights>) {
        self.rows.push(step_row(trained));
        let seen = trained.batch.samples();
        self.surplus += trained.batch.dropped.iter().filter(|dropped| dropped.reason == SURPLUS).count();
        self.rollouts.extend(seen.map(|s| (s.tokens.clone(), s.log_probs.clone(), s.versions.clone(), s.reward)));
        let flat = trained.publish.as_ref().unwrap().weights.read().flat;
        self.weights = Vec::<f32>::try_from(flat).unwrap().into_iter().map(f32::to_bits).collect();
    }
}

fn policy() -> Policy {
    let tokenizer = Tokenizer::characters("0123456789+=", 16).unwrap();
    Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, SEED).unwrap()
}

fn backend(policy: &Policy) -> LocalBackend {
    let config = LocalConfig { threads: Some(1), ..LocalConfig::new(Grpo::default(), Schedule::constant(3e-3)) };
    policy.backend(config).unwrap()
}

/// Something an untrained model earns now and then, so that some groups are dropped.
fn reward(sample: &Sample) -> f64 {
    f64::from(sample.response.starts_with(|c: char| c.is_ascii_digit() && c < '4'))
}

fn params() -> SamplingParams {
    SamplingParams { max_new_tokens: NEW_TOKENS, ..SamplingParams::default() }
}

fn pipeline(capacity: usize, slots: usize, workers: usize, over_sample: f64) -> Outcome {
    let policy = policy();
    let (publisher, published) = weights();
    let admission = Admission::new(GROUPS as u64, over_sampled(GROUPS, over_sample) as u64, None).bounded(0);
    let generator =
        Generator::local(&policy).weights(published).group_size(SAMPLES as usize).sampling(params()).slots(slots).seed(SEED);
    let generator = generator.workers(workers);
    let trainer = Trainer::new(backend(&policy)).advantages(GroupMean::default()).steps(STEPS);
    let outcome: Arc<Mutex<Outcome>> = Arc::default();
    let seen = outcome.clone();

    let mut flow = Flow::new("synchronous").admission(&admission);
    flow.capacity(Capacity::items(capacity));
    let prompts = flow.source("prompts", Prompts::addition(1, SEED).unwrap());
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(reward));
    let kept = flow.stage("filter", scored, Filter::by(filters::nonzero_std));
    let batches = flow.stage("batch", kept, Batcher::groups(GROUPS).over_sample(over_sample));
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::to(publisher));
    flow.sink("note", synced, move |step: Trained<_>| {
        if step.step > 0 {
            seen.lock().unwrap().note(&step);
        }
    });
    flow.run(Until::finished()).unwrap();
    std::mem::take(&mut *outcome.lock().unwrap())
}

/// Generate, score, drop what teaches nothing and ask for as many again, train on the oldest, take the new weights; nothing happens at the
/// same time.
fn plain_loop(slots: usize, over_sample: f64) -> Outcome {
    let round = over_sampled(GROUPS, over_sample);
    tch::set_num_threads(1);
    let policy = policy();
    let backend = backend(&policy);
    let mut engine = LocalEngine::new(policy.decoder(), policy.tokenizer().clone(), slots, SEED);
    let mut prompts = DataBuffer::new(arithmetic::addition(1).iter().map(Prompt::from), SEED).unwrap().shuffled();
    let mut outcome = Outcome::default();
    let mut snapshot = backend.snapshot().wait().unwrap();
    for step in 1..=STEPS {
        engine.set_weights(snapshot.version, &snapshot.weights.read());
        let mut batch = Batch::default();
        while batch.groups.len() < GROUPS {
            for group in generate(&mut engine, prompts.get_prompts(round - batch.groups.len()), policy.tokenizer()) {
                match filters::nonzero_std(&group) {
                    Verdict::Keep => batch.groups.push(group),
                    Verdict::Drop(reason) => {
                        let scored = Scored::new(group).unwrap();
                        batch.dropped.push(*scored.drop_for(reason).settle().unwrap_err());
                    }
                }
            }
        }
        let surplus = batch.groups.split_off(GROUPS);
        let drop = |group| *Scored::new(group).unwrap().drop_for(SURPLUS.into()).settle().unwrap_err();
        batch.dropped.extend(surplus.into_iter().map(drop));
        batch.dropped.sort_by_key(|dropped| dropped.id);
        assign_advantages(&mut batch, &GroupMean::default()).unwrap();
        let samples: Vec<&Sample> = batch.samples().collect();
        let forward = backend.forward_backward(Arc::new(collate(&samples, Aggregation::default()).unwrap())).wait().unwrap();
        let optim = backend.optim_step().wait().unwrap();
        let version = snapshot.version;
        snapshot = backend.snapshot().wait().unwrap();
        let publish = Some(snapshot.clone());
        outcome.note(&Trained { step, version, batch, forward, optim, publish, ..Trained::default() });
    }
    outcome
}

/// One round: every prompt answered, every answer scored, groups by id.
fn generate(engine: &mut LocalEngine, prompts: Vec<Prompt>, tokenizer: &Tokenizer) -> Vec<Group> {
    for prompt in &prompts {
        let tokens = tokenizer.encode(&prompt.text.render()).unwrap();
        engine.submit(Request::new(prompt.ordinal, tokens, SAMPLES, Arc::new(params()))).unwrap();
    }
    let mut answers: BTreeMap<(u64, u32), Finished> =
        engine.run().unwrap().into_iter().map(|answer| ((answer.ordinal, answer.index), answer)).collect();
    let mut answer = |prompt: &Prompt, index: u32| {
        let answer = answers.remove(&(prompt.ordinal, index)).unwrap();
        let mut sample = Sample::begin(prompt, index, &tokenizer.encode(&prompt.text.render()).unwrap());
        sample.response = tokenizer.decode(&answer.tokens).unwrap();
        sample.status = answer.status();
        for ((token, log_prob), version) in answer.tokens.iter().zip(&answer.log_probs).zip(answer.versions.per_token()) {
            sample.push(*token, *log_prob, version.unwrap());
        }
        Sample { reward: Some(reward(&sample)), ..sample }
    };
    let group = |prompt: &Prompt| Group {
        samples: (0..SAMPLES).map(|index| answer(prompt, index)).collect(),
        prompt: Arc::new(prompt.clone()),
        ..Group::default()
    };
    prompts.iter().map(group).collect()
}

#[test]
fn the_pipeline_is_the_plain_loop_bit_for_bit() {
    let expected = plain_loop(64, 1.0);
    let dropped = |outcome: &Outcome| outcome.rows.iter().map(|row| row[Metric::PassRate.key()]).sum::<f64>();
    assert!(dropped(&expected) < STEPS as f64, "some groups must be dropped for rounds to be uneven");
    for (capacity, workers) in [(1, 1), (3, 2), (64, 3)] {
        let found = pipeline(capacity, 64, workers, 1.0);
        assert_eq!(found.rollouts, expected.rollouts, "edges of {capacity}, {workers} generators");
        assert_eq!(found.rows, expected.rows, "edges of {capacity}, {workers} generators");
        assert!(found.weights == expected.weights, "edges of {capacity}, {workers} generators");
    }
}

#[test]
fn fewer_slots_than_samples_change_nothing_of_that() {
    assert!(pipeline(2, 7, 1, 1.0) == plain_loop(7, 1.0));
}

#[test]
fn over_sampled_rounds_train_their_oldest_kept_groups_bit_for_bit() {
    let expected = plain_loop(64, 1.5);
    assert!(expected.surplus > 0, "some groups must be left over");
    for (capacity, slots) in [(1, 64), (64, 64)] {
        let found = pipeline(capacity, slots, 1, 1.5);
        assert_eq!(found.rows, expected.rows, "edges of {capacity}");
        assert!(found == expected, "edges of {capacity}");
    }
    assert!(pipeline(2, 7, 1, 1.5) == plain_loop(7, 1.5));
}
