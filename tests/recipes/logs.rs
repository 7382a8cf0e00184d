//! What a run leaves on disk can be read back, by readers that share no code with the writers.
//!
//! D1 and D3 reach the file: tokens, log-probabilities and versions of a sample come back exactly as they were.

use std::sync::{Arc, Mutex};

use crate::support::tfevents::read_events;
use proptest::prelude::*;
use rollflow::data::{ChatMessage, PromptText, Sample, SampledToken, Spans, Status};
use rollflow::observe::logs::{
    DeadLetter, JsonLines, JsonlLogger, JudgedAnswer, MetricStats, MetricsLogger, Rollout, StepMetrics, TensorBoardLogger,
    dead_letters, metrics_rows, read_lines,
};
use rollflow::observe::{ObserveError, StageShares};
use rollflow::stages::train::Resumed;
use rollflow::train::checkpoint::{self, CheckpointMetadata};

fn row(pairs: &[(&str, f64)]) -> StepMetrics {
    pairs.iter().map(|&(key, value)| (key.to_owned(), value)).collect()
}

#[test]
fn tensorboard_files_hold_the_version_and_every_scalar() {
    let folder = tempfile::tempdir().unwrap();
    let mut logger = TensorBoardLogger::new(folder.path()).unwrap();
    logger.log(0, &row(&[("loss", 2.5), ("reward_mean", -0.125)])).unwrap();
    logger.log(300, &row(&[("loss", f64::NAN)])).unwrap();
    logger.log(u64::from(u32::MAX) + 1, &row(&[])).unwrap();
    logger.finish().unwrap();

    assert!(logger.path().file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
    let events = read_events(&std::fs::read(logger.path()).unwrap()).unwrap();
    assert_eq!(events.iter().map(|event| event.step).collect::<Vec<_>>(), [0, 0, 300, 4_294_967_296]);
    assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
    assert_eq!(events[1].scalars, [("loss".to_owned(), 2.5), ("reward_mean".to_owned(), -0.125)]);
    assert!(events[2].scalars[0].1.is_nan());
    assert!(events.iter().all(|event| event.wall_time > 1.6e9), "wall times are seconds since 1970");
}

#[test]
fn a_tensorboard_reader_notices_a_flipped_bit() {
    let folder = tempfile::tempdir().unwrap();
    let mut logger = TensorBoardLogger::new(folder.path()).unwrap();
    logger.log(1, &row(&[("loss", 2.5)])).unwrap();
    let bytes = std::fs::read(logger.path()).unwrap();
    for at in [0, 9, 14, bytes.len() - 1] {
        let mut flipped = bytes.clone();
        flipped[at] ^= 4;
        assert!(read_events(&flipped).is_err(), "byte {at}");
    }
}

#[test]
fn metrics_jsonl_is_valid_json_on_every_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut logger = JsonlLogger::new(folder.path()).unwrap();
    for step in 0..5 {
        logger.log(step, &row(&[("loss", 1.0 / step as f64), ("a \"quoted\"\nkey", 0.1), ("step", 99.0)])).unwrap();
    }
    logger.finish().unwrap();
    let text = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!((&rows[0]["loss"], &rows[2]["loss"], &rows[3]["a \"quoted\"\nkey"]), (&"inf".into(), &0.5.into(), &0.1.into()));
}

/// Fails always.
struct Broken;

impl MetricsLogger for Broken {
    fn log(&mut self, _: u64, _: &StepMetrics) -> Result<(), ObserveError> {
        Err(ObserveError::Io { path: "broken".into(), source: std::io::Error::other("no") })
    }
}

#[test]
fn every_logger_gets_every_row_also_when_another_fails() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let closure = |seen: &Arc<Mutex<Vec<u64>>>| {
        let seen = Arc::clone(seen);
        move |step: u64, _: &StepMetrics| seen.lock().unwrap().push(step)
    };
    let mut all = Vec::<Box<dyn MetricsLogger>>::from([
        Box::new(closure(&seen)) as _,
        Box::new(Broken) as _,
        Box::new(closure(&seen)) as _,
    ]);
    let error = all.log(7, &StepMetrics::new()).unwrap_err();
    assert!(error.to_string().starts_with("broken: no"), "{error}");
    assert_eq!(*seen.lock().unwrap(), [7, 7]);
    all.finish().unwrap();
}

fn reward() -> impl Strategy<Value = f64> {
    prop_oneof![-1e3..1e3_f64, prop::sample::select(vec![0.0, 1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY])]
}

fn sample() -> impl Strategy<Value = Sample> {
    let status = prop::sample::select(vec![Status::Pending, Status::Completed, Status::Truncated, Status::Aborted]);
    let tokens = prop::collection::vec((any::<u32>(), any::<f32>(), prop::option::of(0_u64..4)), 0..20);
    (any::<u64>(), any::<u32>(), status, any::<String>(), prop::option::of(reward()), tokens, any::<bool>()).prop_map(
        |(group_index, index, status, text, reward, tokens, chat)| {
            let mut versions = Spans::default();
            tokens.iter().for_each(|&(_, _, version)| versions.extend(version, 1));
            let turn = ChatMessage::new("user", text.clone());
            Sample {
                group_index,
                index,
                status,
                prompt: if chat { PromptText::Chat(vec![turn]) } else { text.as_str().into() },
                response: text.chars().rev().collect(),
                tokens: tokens.iter().map(|token| token.0).collect(),
                log_probs: tokens.iter().map(|token| token.1).collect(),
                versions,
                reward,
                advantage: reward.map(|reward| -reward),
                metadata: [("answer".to_owned(), text.into())].into_iter().collect(),
                ..Sample::default()
            }
        },
    )
}

/// NaN differs from itself; for a file it is the same value. The JSON reader may miss a double by its last bit; an f32, never.
fn same(one: &Rollout, other: &Rollout) -> bool {
    let number = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan();
    let close = |a: f64, b: f64| number(a, b) || (a - b).abs() <= f64::EPSILON * a.abs();
    let optional = |a: Option<f64>, b: Option<f64>| a.is_some() == b.is_some() && close(a.unwrap_or(0.0), b.unwrap_or(0.0));
    let list = |rollout: &Rollout| rollout.log_probs.clone().unwrap_or_default();
    let plain = |rollout: &Rollout| Rollout { reward: None, advantage: None, log_probs: None, ..rollout.clone() };
    plain(one) == plain(other)
        && optional(one.reward, other.reward)
        && optional(one.advantage, other.advantage)
        && one.log_probs.is_some() == other.log_probs.is_some()
        && list(one).len() == list(other).len()
        && list(one).iter().zip(list(other)).all(|(&a, b)| number(a.into(), b.into()))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn rollouts_come_back_as_they_were(samples in prop::collection::vec(sample(), 0..6), with_log_probs: bool) {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = JsonLines::append(folder.path().join("rollouts.jsonl")).unwrap();
        for (step, sample) in (0..).zip(&samples) {
            writer.write(&Rollout::new(step, sample, with_log_probs)).unwrap();
        }
        writer.sync().unwrap();
        let read: Vec<Rollout> = read_lines::<Rollout>(writer.path()).unwrap().collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(read.len(), samples.len());
        for (step, (sample, read)) in (0..).zip(samples.iter().zip(&read)) {
            let written = Rollout::new(step, sample, with_log_probs);
            prop_assert!(same(&written, read), "{:?} became {:?}", written, read);
        }
    }
}

#[test]
fn a_line_that_is_no_rollout_is_named_with_file_and_number() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rollouts.jsonl");
    std::fs::write(&path, "{\"step\":1}\n\n{\"reward\":\"much\"}\n").unwrap();
    let read: Vec<Result<Rollout, ObserveError>> = read_lines::<Rollout>(&path).unwrap().collect();
    assert_eq!((read.len(), read[0].as_ref().unwrap().step), (2, 1));
    let error = read[1].as_ref().unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}, line 3: \"much\" is no number", path.display())), "{error}");
}

/// Any 64-bit float, the extremes often.
fn any_number() -> impl Strategy<Value = f64> {
    let extremes = vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN, 1e300, -0.0, 5e-324, f64::EPSILON];
    prop_oneof![prop::num::f64::ANY, prop::sample::select(extremes)]
}

/// Equal as text, so that NaN equals NaN.
fn equal<T: std::fmt::Debug>(one: &T, other: &T) -> Result<(), TestCaseError> {
    prop_assert_eq!(format!("{one:?}"), format!("{other:?}"));
    Ok(())
}

proptest! {
    /// Law N4: a file that we wrote is a file that we can read, whatever the numbers in it.
    #[test]
    fn every_json_file_reads_back_any_number(numbers in prop::collection::vec(any_number(), 8), token in prop::num::f32::ANY) {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, c, d, e, f, g, h] = numbers[..] else { unreachable!() };

        let row = row(&[("loss", a), ("reward_mean", b), ("eval_accuracy", c)]);
        let mut logger = JsonlLogger::new(folder.path()).unwrap();
        logger.log(7, &row).unwrap();
        equal(&metrics_rows(logger.path()).unwrap().next().unwrap().unwrap(), &(7, row))?;

        let sample = Sample {
            tokens: vec![1, 2],
            loss_mask: vec![0.0, 1.0],
            log_probs: vec![0.0, token],
            ref_log_probs: vec![token, 0.0],
            versions: Spans::given(2),
            reward: Some(a),
            advantage: Some(b),
            reward_parts: [("form".to_owned(), c)].into(),
            ..Sample::default()
        };
        let mut rollouts = JsonLines::append(folder.path().join("rollouts.jsonl")).unwrap();
        rollouts.write(&Rollout::new(7, &sample, true)).unwrap();
        let read = read_lines::<Rollout>(rollouts.path()).unwrap().next().unwrap().unwrap();
        equal(&read, &Rollout::new(7, &sample, true))?;

        let letter =
            DeadLetter { time: d, stage: "reward".into(), failures: vec![], prompt: Default::default(), samples: vec![sample] };
        let mut letters = dead_letters(folder.path());
        letters.write(&letter).unwrap();
        equal(&read_lines::<DeadLetter>(letters.path()).unwrap().next().unwrap().unwrap(), &letter)?;

        let answer = JudgedAnswer { reward: Some(e), ..JudgedAnswer::default() };
        let mut answers = JsonLines::create(folder.path().join("answers.jsonl")).unwrap();
        answers.write(&answer).unwrap();
        equal(&read_lines::<JudgedAnswer>(answers.path()).unwrap().next().unwrap().unwrap(), &answer)?;

        let metadata = CheckpointMetadata { metrics: [("loss".to_owned(), f)].into(), ..CheckpointMetadata::default() };
        let fill = |_: &std::path::Path| Ok(());
        let written = checkpoint::write(&folder.path().join("checkpoints"), 3, metadata.clone(), fill).unwrap();
        equal(&checkpoint::read_metadata(&written).unwrap().metrics, &metadata.metrics)?;

        let mut progress = Resumed { recent: [g, h].into(), kl_coef: Some(a), ..Resumed::default() };
        let prompt = rollflow::data::Prompt { ordinal: 9, ..Default::default() };
        progress.progress.ledger.enter(&prompt, 1);
        let status = Status::Pending;
        progress.progress.ledger.sampled(SampledToken { ordinal: 9, index: 0, token: 4, log_prob: token, version: 1, status });
        std::fs::write(folder.path().join("progress.json"), serde_json::to_vec(&progress).unwrap()).unwrap();
        equal(&Resumed::read(folder.path()).unwrap(), &progress)?;

        let stats = MetricStats { count: 1, first: a, last: b, last_tenth: c, mean: d, std: e, min: f, max: g, best_low: h, best_high: a };
        let shares = StageShares { name: "train".into(), workers: 1, shares: [("busy".to_owned(), b)].into() };
        let text = serde_json::to_string(&(&stats, &shares)).unwrap();
        let read: (MetricStats, StageShares) = serde_json::from_str(&text).unwrap();
        equal(&read, &(stats, shares))?;
    }
}
