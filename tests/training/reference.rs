//! The reference policy as a stage: what it scores with, and that it is the trainer's own arithmetic.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rollflow::data::{TopK, Version};
use rollflow::flow::from_iter;
use rollflow::model::{FrozenWeights, ModelConfig, Weights, load_weights};
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::stages::reference::{ema, periodic};
use rollflow::train::{Scorer, collate};

const GROUPS: usize = 3;
const TEMPERATURE: f64 = 0.7;

fn policy() -> Policy {
    let tokenizer = Tokenizer::characters("0123456789+=", 16).unwrap();
    Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, 5).unwrap()
}

fn config() -> LocalConfig {
    let loss = LocalConfig::new(Grpo::default(), Schedule::constant(1e-2));
    LocalConfig { threads: Some(1), temperature: TEMPERATURE, ..loss }
}

/// What a run saw: the groups of each step with the version that was trained, every version that was published, and the
/// reference's files for a checkpoint after the run.
#[derive(Default)]
struct Seen {
    steps: Vec<(u64, Vec<Group>)>,
    published: BTreeMap<u64, Arc<FrozenWeights>>,
    files: Option<BTreeMap<String, Vec<u8>>>,
}

impl Seen {
    /// The moving average under each version, from the one before.
    fn averages(&self, decay: f64) -> BTreeMap<u64, Arc<FrozenWeights>> {
        let mut average = self.published[&1].clone();
        let mut of = |(version, weights): (&u64, &Arc<FrozenWeights>)| {
            if *version > 1 {
                let (old, new) = (average.read(), weights.read());
                let flat = old.flat.lerp(&new.flat, 1.0 - decay);
                average = Arc::new(Weights::new(old.layout, flat).freeze());
            }
            (*version, average.clone())
        };
        self.published.iter().map(&mut of).collect()
    }
}

/// A synchronous run of `steps` steps with a reference that `make` makes of the policy and the weights edge.
fn run(steps: u64, make: impl FnOnce(&Policy, rollflow::flow::WeightsRx<FrozenWeights>) -> Reference<FrozenWeights>) -> Seen {
    let policy = policy();
    let (publisher, published) = weights();
    let admission = Admission::max_staleness(0, GROUPS);
    let reference = make(&policy, published.clone());
    let files = reference.checkpoint_files();
    let generator = Generator::local(&policy)
        .weights(published)
        .group_size(4)
        .max_new_tokens(4)
        .sampling(SamplingParams { temperature: TEMPERATURE as f32, max_new_tokens: 4, ..SamplingParams::default() })
        .slots(64)
        .seed(1);
    let trainer = Trainer::new(policy.backend(config()).unwrap()).advantages(GroupMean::default());
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let look = seen.clone();
    let mut flow = Flow::new("reference").admission(&admission);
    let prompts = flow.source("prompts", Prompts::addition(1, 1).unwrap());
    let groups = flow.stage("generate", prompts, generator);
    // Something to learn from in every group.
    let reward = |sample: &Sample| f64::from(sample.index);
    let scored = flow.stage("reward", groups, Reward::each(reward));
    let scored = flow.stage("reference", scored, reference);
    let batches = flow.stage("batch", scored, Batcher::groups(GROUPS));
    let trained = flow.stage("train", batches, trainer.steps(steps));
    let synced = flow.stage("sync", trained, WeightSync::to(publisher));
    flow.sink("look", synced, move |step: Trained<FrozenWeights>| {
        let mut seen = look.lock().unwrap();
        if step.step > 0 {
            seen.steps.push((step.version, step.batch.groups));
        }
        seen.published.extend(step.publish.map(|publish| (publish.version, publish.weights)));
    });
    flow.run(Until::finished()).unwrap();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    Seen { files: files.map(|files| files().unwrap()), ..seen }
}

/// The samples as these weights score them.
fn scored_by(weights: &Arc<FrozenWeights>, group: &Group) -> Vec<Vec<f32>> {
    let mut samples = group.samples.clone();
    Scorer::new(config(), policy().config().clone()).annotate(weights, &mut samples, Default::default()).unwrap();
    samples.into_iter().map(|sample| sample.ref_log_probs).collect()
}

fn recorded(group: &Group) -> Vec<Vec<f32>> {
    group.samples.iter().map(|sample| sample.ref_log_probs.clone()).collect()
}

#[test]
fn r206_right_after_creation_it_finds_every_token_as_likely_as_the_trainer_does() {
    let seen = run(1, |policy, _| Reference::local(policy, config()));
    let groups = &seen.steps[0].1;
    let backend = policy().backend(config()).unwrap();
    let score = |samples: &[Sample]| {
        let batch = Arc::new(collate(samples, Aggregation::TokenMean).unwrap());
        (backend.score(batch.clone()).wait().unwrap(), batch)
    };
    for group in groups {
        let (scores, batch) = score(&group.samples);
        for (sequence, scores) in batch.sequences.iter().zip(scores) {
            assert!(sequence.reference.iter().flatten().zip(scores).all(|(own, trainer)| *own as f32 == trainer as f32));
        }
        for sample in &group.samples {
            sample.validate().unwrap();
            let gap = |at: usize| (sample.ref_log_probs[at] - sample.log_probs[at]).abs();
            assert!((0..sample.tokens.len()).all(|at| gap(at) < 1e-4), "the generator's too, and 0 for the prompt");
        }
    }
    // Cut otherwise, sums round otherwise.
    let all: Vec<Sample> = groups.iter().flat_map(|group| group.samples.clone()).collect();
    let (scores, batch) = score(&all);
    for (sequence, scores) in batch.sequences.iter().zip(scores) {
        assert!(sequence.reference.iter().flatten().zip(scores).all(|(own, trainer)| (own - trainer).abs() < 1e-4));
    }
}

#[test]
fn r204_training_leaves_a_frozen_reference_as_it_was_to_the_bit() {
    let seen = run(4, |policy, _| Reference::local(policy, config()));
    let first = &seen.published[&1];
    assert!(seen.published[&4].read().flat != first.read().flat);
    assert!(seen.files.is_none(), "a checkpoint needs none of it");
    for (_, groups) in &seen.steps {
        groups.iter().for_each(|group| assert_eq!(recorded(group), scored_by(first, group)));
    }
}

/// Law V3: what a group is scored with is a function of its version.
#[test]
fn v3_a_moving_average_has_seen_all_versions_up_to_the_one_that_sampled() {
    const DECAY: f64 = 0.6;
    let seen = run(4, |policy, published| Reference::local_following(policy, config(), published, ema(DECAY)));
    let averages = seen.averages(DECAY);
    for (version, groups) in &seen.steps {
        groups.iter().for_each(|group| assert_eq!(recorded(group), scored_by(&averages[version], group), "version {version}"));
    }
}

#[test]
fn r209_a_periodic_reference_is_the_version_that_was_copied_last() {
    let seen = run(5, |policy, published| Reference::local_following(policy, config(), published, periodic(2)));
    for (version, groups) in &seen.steps {
        let copied = &seen.published[&(version - (version - 1) % 2)];
        groups.iter().for_each(|group| assert_eq!(recorded(group), scored_by(copied, group), "version {version}"));
    }
}

/// Laws C1, C2: what a checkpoint holds is what the run goes on with.
#[test]
fn c1_a_moving_reference_goes_on_from_its_checkpoint_to_the_bit() {
    const DECAY: f64 = 0.5;
    let folder = tempfile::tempdir().unwrap();
    let seen = run(3, |policy, published| Reference::local_following(policy, config(), published, ema(DECAY)));
    let files = seen.files.as_ref().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let version: u64 = std::str::from_utf8(&files["reference.version"]).unwrap().parse().unwrap();
    assert!(version >= 3, "the third step trains what version 3 sampled: {version}");
    let kept = load_weights(policy().config(), &folder.path().join("reference.safetensors")).unwrap();
    assert!(kept.flat == seen.averages(DECAY)[&version].read().flat);
    let (_, published) = weights::<FrozenWeights>();
    let resumed = |from: &std::path::Path| {
        let reference: Reference<FrozenWeights> = Reference::local_following(&policy(), config(), published.clone(), ema(DECAY));
        reference.resume(&policy(), from).unwrap();
        reference.checkpoint_files().unwrap()().unwrap()
    };
    assert!(resumed(folder.path()) == *files);
    // A checkpoint of a run without one is where it begins.
    assert!(resumed(tempfile::tempdir().unwrap().path()).is_empty());
}

#[test]
fn r209_versions_that_were_skipped_weigh_as_if_they_had_been_seen() {
    let one_by_one = (1..4).fold(1.0, |kept, seen| kept * (1.0 - ema(0.9)(seen, seen + 1)));
    assert!((one_by_one - (1.0 - ema(0.9)(1, 4))).abs() < 1e-12);
    assert_eq!(ema(0.0)(3, 4), 1.0);
    let copied: Vec<Version> = (2..12).filter(|version| periodic(4)(version - 1, *version) == 1.0).collect();
    assert_eq!(copied, [5, 9]);
    let seen = [periodic(4)(4, 7), periodic(4)(5, 8)];
    assert_eq!(seen, [1.0, 0.0], "the first seen after a multiple, and then none until the next");
}

/// A teacher's columns are neither read nor written by the reference.
#[test]
fn a_reference_and_a_teacher_score_the_same_in_either_order() {
    let policy = policy();
    let run = |teacher_first: bool| {
        let make = |teaches: bool| {
            let reference: Reference<FrozenWeights, Batch> = Reference::local(&policy, config());
            if teaches { reference.teaching().top_tokens(TopK { k: 3, below: 16 }) } else { reference }
        };
        let sample = Sample::supervised(&[3, 4], &[5, 6]);
        let batch = Batch { groups: vec![Group { samples: vec![sample], ..Group::default() }], ..Batch::default() };
        let seen: Arc<Mutex<Vec<Batch>>> = Arc::default();
        let look = seen.clone();
        let mut flow = Flow::new("both");
        let batches = flow.source("batches", from_iter([batch]));
        let batches = flow.stage("first", batches, make(teacher_first));
        let batches = flow.stage("second", batches, make(!teacher_first));
        flow.sink("look", batches, move |batch: Batch| look.lock().unwrap().push(batch));
        flow.run(Until::finished()).unwrap();
        std::mem::take(&mut *seen.lock().unwrap())
    };
    let scored = run(true);
    let sample = &scored[0].groups[0].samples[0];
    assert!(sample.teacher.is_some() && sample.ref_log_probs == sample.teacher_log_probs);
    assert_eq!(scored, run(false));
}
