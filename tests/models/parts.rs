//! A batch that is learned from in parts, as it is gathered, is the same step as the whole (law N1): loss, norms, what was measured, and weights.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use rollflow::algo::{Advantage, LossError, LossInputs, LossOutput, PolicyLoss, Scale};
use rollflow::flow::from_iter;
use rollflow::model::FrozenWeights;
use rollflow::prelude::*;
use rollflow::train::AdamW;

const STEPS: usize = 3;

/// `STEPS` batches of groups of two, whose parts are cut by `cuts`.
fn batches(shapes: &[(usize, usize)], seed: u64, cuts: &[usize]) -> Vec<Batch> {
    let groups = |step: usize| {
        let samples = crate::tiny::rollouts(shapes, seed + step as u64);
        let group = |pair: &[Sample]| {
            let samples = pair.iter().enumerate().map(|(at, sample)| Sample { reward: Some(at as f64 - 0.3), ..sample.clone() });
            let prompt = Prompt { ordinal: pair[0].group_index, ..Prompt::default() };
            Group { samples: samples.collect(), prompt: Arc::new(prompt), ..Group::default() }
        };
        samples.chunks(2).map(group).collect::<Vec<_>>()
    };
    let mut sent = Vec::new();
    for step in 0..STEPS {
        // Youngest first: parts are in no order.
        let mut groups: Vec<Group> = groups(step).into_iter().rev().collect();
        for cut in cuts {
            let part: Vec<Group> = groups.drain(..(*cut).min(groups.len().saturating_sub(1))).collect();
            if !part.is_empty() {
                sent.push(Batch { groups: part, more: true, ..Batch::default() });
            }
        }
        sent.push(Batch { groups, ..Batch::default() });
    }
    sent
}

/// A loss that says when it was asked.
struct Asked<L>(L, Sender<()>);

impl<L: Loss> Loss for Asked<L> {
    fn whole_batch(&self) -> bool {
        self.0.whole_batch()
    }
    fn is_sum(&self) -> bool {
        self.0.is_sum()
    }
    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        self.1.send(()).ok();
        self.0.evaluate(inputs)
    }
}

/// Hands the next part over when the one before is being learned from, if parts are.
struct Hand {
    asked: Option<Receiver<()>>,
}

impl Stage for Hand {
    type In = Batch;
    type Out = Batch;

    fn run(&mut self, io: &mut Io<Batch, Batch>) -> Result<(), StageError> {
        while let Some(part) = io.recv()? {
            io.send(part)?;
            if let Some(asked) = &self.asked {
                asked.recv_timeout(Duration::from_secs(60))?;
            }
        }
        Ok(())
    }

    fn spec(&self) -> StageSpec {
        StageSpec::default()
    }
}

type Step = Trained<FrozenWeights>;

/// What a trainer makes of them, part by part or as they come.
fn train(
    sent: Vec<Batch>,
    by_part: bool,
    loss: impl Loss + 'static,
    configure: impl Fn(Trainer<LocalBackend>) -> Trainer<LocalBackend>,
) -> Vec<Step> {
    let (says, asked) = channel();
    // An epsilon above the rounding of a gradient, which a step would be made of otherwise where there is none.
    let adamw = AdamW { epsilon: 1e-3, ..AdamW::default() };
    let config = LocalConfig { threads: Some(1), adamw, ..LocalConfig::new(Asked(loss, says), Schedule::constant(0.01)) };
    let backend = LocalBackend::new(config, crate::tiny::model(), crate::tiny::weights(5)).unwrap();
    let trained = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&trained);
    let mut flow = Flow::new("parts");
    let batches = flow.source("batches", from_iter(sent));
    let handed = flow.stage("hand", batches, Hand { asked: by_part.then_some(asked) });
    let steps = flow.stage("train", handed, configure(Trainer::new(backend)));
    flow.sink("seen", steps, move |step: Step| seen.lock().unwrap().push(step));
    flow.run(Until::finished()).unwrap();
    std::mem::take(&mut *trained.lock().unwrap()).split_off(1)
}

fn assert_same(parts: &[Step], whole: &[Step]) {
    assert_eq!((parts.len(), whole.len()), (STEPS, STEPS));
    let near =
        |a: f64, b: f64, what: &str| assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{what}: {a} in parts, {b} as a whole");
    for (parts, whole) in parts.iter().zip(whole) {
        let ids = |step: &Step| step.batch.groups.iter().map(Group::id).collect::<Vec<_>>();
        assert_eq!(ids(parts), ids(whole), "law D6");
        let advantages = |step: &Step| step.batch.samples().map(|sample| sample.advantage.unwrap()).collect::<Vec<_>>();
        assert_eq!(advantages(parts), advantages(whole));
        let (seen, other) = (&parts.forward, &whole.forward);
        assert_eq!((seen.tokens, seen.input_tokens, seen.saved_tokens), (other.tokens, other.input_tokens, other.saved_tokens));
        near(seen.loss, other.loss, "loss");
        near(seen.metrics.policy_loss, other.metrics.policy_loss, "policy loss");
        near(seen.entropy, other.entropy, "entropy");
        near(seen.gap.mean(), other.gap.mean(), "gap");
        near(parts.optim.grad_norm, whole.optim.grad_norm, "the update's norm");
        near(parts.optim.grad_norm_clipped, whole.optim.grad_norm_clipped, "the clipped norm");
        let flat = |step: &Step| Vec::<f32>::try_from(&step.publish.as_ref().unwrap().weights.read().flat).unwrap();
        for (a, b) in flat(parts).iter().zip(flat(whole)) {
            near(f64::from(*a), f64::from(b), "a weight");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn n1_a_step_in_parts_is_the_step(
        shapes in prop::collection::vec((1_usize..5, 1_usize..6), 4..10), seed in any::<u32>(), cuts in prop::collection::vec(1_usize..4, 1..4),
    ) {
        let shapes = &shapes[..shapes.len() / 2 * 2];
        for aggregation in [Aggregation::TokenMean, Aggregation::SeqMeanTokenMean, Aggregation::DrGrpo { max_len: 6 }] {
            let steps = |cuts: &[usize]| {
                train(batches(shapes, seed.into(), cuts), true, Grpo::default(), |trainer| {
                    trainer.aggregation(aggregation).advantages(GroupMean::default())
                })
            };
            let (parts, whole) = (steps(&cuts), steps(&[]));
            assert_same(&parts, &whole);
            prop_assert!(parts.iter().zip(&whole).all(|(parts, whole)| parts.forward.micro_batches > whole.forward.micro_batches));
        }
    }
}

/// What looks at the whole batch gets it whole, whatever the parts it came in.
#[test]
fn what_needs_the_whole_batch_waits_for_it() {
    let shapes = [(2, 3), (3, 1), (1, 4), (2, 2), (3, 5), (1, 1)];
    let by_batch = GroupMean { std: Scale::Batch, ..GroupMean::default() };
    let bonus = PolicyLoss { entropy_coef: 0.1, ..PolicyLoss::default() };
    let of = |cuts: &[usize], loss: PolicyLoss, advantage: Advantage, aggregation, updates| {
        train(batches(&shapes, 3, cuts), false, loss, |trainer| {
            trainer.advantages(advantage.clone()).aggregation(aggregation).configure(|config| config.ppo_epochs = updates)
        })
    };
    let (mean, by_group) = (Aggregation::TokenMean, Advantage::default);
    for (loss, advantage, aggregation, updates) in [
        (bonus, by_group(), mean, 1),
        (PolicyLoss { top_entropy: 0.5, ..PolicyLoss::default() }, by_group(), mean, 1),
        (PolicyLoss::default(), Advantage::GroupMean(by_batch), mean, 1),
        (PolicyLoss::default(), by_group(), Aggregation::TokenSum, 1),
        (PolicyLoss::default(), by_group(), mean, 2),
    ] {
        let parts = of(&[1, 1], loss.clone(), advantage.clone(), aggregation, updates);
        let whole = of(&[], loss, advantage, aggregation, updates);
        assert_same(&parts, &whole);
        assert!(parts.iter().zip(&whole).all(|(parts, whole)| parts.forward.micro_batches == whole.forward.micro_batches));
    }
    // A closure may look at anything.
    assert!(!Loss::is_sum(&|inputs: &LossInputs| Grpo::default().evaluate(inputs)));
}

/// A part that teaches nothing takes no pass, and is no error unless it is all there is.
#[test]
fn a_part_without_a_trained_token_counts_and_takes_no_pass() {
    let shapes = [(2, 3), (3, 1), (1, 4), (2, 2)];
    let masked = |cuts: &[usize]| {
        let mut sent = batches(&shapes, 3, cuts);
        for sample in
            sent.iter_mut().flat_map(|part| &mut part.groups).filter(|group| group.id() == 1).flat_map(|group| &mut group.samples)
        {
            sample.loss_mask.fill(0.0);
        }
        train(sent, false, Grpo::default(), |trainer| {
            trainer.aggregation(Aggregation::SeqMeanTokenMean).advantages(GroupMean::default())
        })
    };
    assert_same(&masked(&[1]), &masked(&[]));
}
