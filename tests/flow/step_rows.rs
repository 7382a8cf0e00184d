//! Row of numbers of a step.

use std::collections::BTreeMap;
use std::sync::Arc;

use rollflow::algo::{ComparedToken, Importance, Level, LogProbGap, LossMetrics, OffPolicy};
use rollflow::data::{Batch, Group, Prompt, Sample, Scored};
use rollflow::observe::Metric;
use rollflow::stages::sink::step_row;
use rollflow::stages::train::{CriticStep, Trained};
use rollflow::train::{ForwardBackward, OptimStep};

/// Two samples under versions 3 and 4, trained under 5, a group that a filter dropped and one
/// whose reward failed.
fn trained() -> Trained<()> {
    let prompt = Prompt::default();
    let sample = |index, version, reward| {
        let mut sample = Sample::begin(&prompt, index, &[1]);
        sample.push(2, -0.5, version);
        Sample { reward: Some(reward), reward_parts: [("form".to_owned(), reward - 0.5)].into(), ..sample }
    };
    let group =
        Group { samples: vec![sample(0, 3, 1.0), sample(1, 4, 0.0)], prompt: Arc::new(prompt.clone()), ..Group::default() };
    let mut gap = LogProbGap::default();
    let token = |lag, trainer| ComparedToken { lag, trainer, behaviour: -0.5, ..ComparedToken::default() };
    gap.add_sequence(&[token(2, -0.25)]);
    gap.add_sequence(&[token(1, -1.5)]);
    let correction = OffPolicy { weigh: Some(Importance::masked(Level::Token, 0.5, 2.0)), ..OffPolicy::default() };
    let (_, correction) = correction.factors(&[-0.25, -1.5], &[-0.25, -1.5], &[-0.5, -0.5], &[0..1, 1..2]);
    let metrics = LossMetrics { correction, ..LossMetrics::default() };
    let part = |value| BTreeMap::from([("form".to_owned(), value)]);
    let scored = |ordinal, reward: Option<f64>| {
        let part = reward.map_or_else(Default::default, |_| part(1.0));
        let sample = |index| Sample { reward, reward_parts: part.clone(), ..sample(index, 3, 0.0) };
        let prompt = Arc::new(Prompt { ordinal, ..Prompt::default() });
        Group { samples: vec![sample(0), sample(1)], prompt, ..Group::default() }
    };
    let dropped = *Scored::new(scored(9, Some(0.0))).unwrap().drop_for("zero_std".into()).settle().unwrap_err();
    let poisoned = *Scored::poisoned(scored(10, None)).settle().unwrap_err();
    Trained {
        step: 1,
        version: 5,
        batch: Batch { groups: vec![group], dropped: vec![dropped, poisoned], ..Batch::default() },
        forward: ForwardBackward { loss: 0.25, gap, metrics, ..ForwardBackward::default() },
        optim: OptimStep { step: 1, lr: 1e-3, grad_norm: 2.0, grad_norm_clipped: 1.0, skipped: None },
        settings: [("setting_train_lr".to_owned(), 0.5)].into(),
        critic: Some(CriticStep { explained: Some(0.5), loss: 0.125, ..CriticStep::default() }),
        evaluated: [("eval_step".to_owned(), 1.0)].into(),
        seconds: 0.1,
        update_seconds: 0.05,
        ..Trained::default()
    }
}

#[test]
fn rewards_are_those_of_all_that_was_scored_and_lags_those_of_what_was_trained() {
    let row = step_row(&trained());
    let of = |metric: Metric| row[metric.key()];
    assert_eq!((of(Metric::RewardMean), of(Metric::RewardMax), of(Metric::PassRate)), (0.25, 1.0, 0.5));
    assert_eq!(of(Metric::EvalStep), 1.0);
    assert_eq!(row["reward_part_form"], 0.5, "over kept and dropped samples alike");
    assert_eq!(of(Metric::PoisonedGroups), 1.0, "seen, and not taken for a group without success");
    assert_eq!((of(Metric::LengthTrainedUpperDecile), of(Metric::LengthFinishedMean)), (1.0, 1.0));
    assert_eq!((of(Metric::StalenessMax), of(Metric::TokenLag)), (2.0, 1.5));
    assert_eq!((of(Metric::LogProbGapMean), of(Metric::LogProbGapMax)), (0.625, 1.0));
    assert_eq!((row["importance_ratio_lag_1"], row["importance_ratio_lag_2"]), ((-1.0f64).exp(), 0.25f64.exp()));
    assert_eq!((of(Metric::CorrectionDropped), of(Metric::CorrectionSequences)), (0.5, 0.5));
    assert!((of(Metric::CorrectionSamples) - 0.5).abs() < 1e-6 && of(Metric::CorrectionWeightMax) == 0.25f64.exp());
    assert_eq!((of(Metric::Loss), of(Metric::GradNorm), of(Metric::LearningRate)), (0.25, 2.0, 1e-3));
    assert_eq!((of(Metric::CriticLoss), of(Metric::CriticExplained)), (0.125, 0.5));
    let critic = Some(CriticStep::default());
    let equal = step_row(&Trained { critic, ..trained() });
    assert!(!equal.contains_key(Metric::CriticExplained.key()), "equal returns have nothing to foresee");
}

#[test]
fn d2_a_rollout_in_parts_counts_once_in_rewards_and_their_parts() {
    let (whole, mut in_parts) = (trained(), trained());
    let group = &mut in_parts.batch.groups[0];
    let second = Sample { part: 1, ..group.samples[0].clone() };
    group.samples.insert(1, second);
    let dropped = Scored::new(group.clone()).unwrap().drop_for("length".into()).settle().unwrap_err();
    assert_eq!((&dropped.rewards[..], dropped.parts.len(), dropped.lengths.len()), (&[1.0, 0.0][..], 2, 3));
    let (expected, found) = (step_row(&whole), step_row(&in_parts));
    for key in [Metric::RewardMean.key(), Metric::RewardStd.key(), "reward_part_form"] {
        assert_eq!(found[key], expected[key], "{key}");
    }
}
