//! What a run leaves on disk can be read back, by readers that share no code with the writers.
//!
//! D1 and D3 reach the file: tokens, log-probabilities and versions of a sample come back exactly as they were.

use std::sync::{Arc, Mutex};

use crate::support::tfevents::read_events;
use proptest::prelude::*;
use rollflow::data::{ChatMessage, PromptText, Sample, SampledToken, Spans, Status};
use rollflow::observe::logs::{
    DeadLetter, JsonLines, JsonlLogger, JudgedAnswer, MetricStats, MetricsLogger, Rollout, StepMetrics, TensorBoardLogger,
    compute_stats_from_jsonl, console_line, count_lines, dead_letters, last_step, log_to_console, metrics_rows, read_lines,
    rewind, rewind_events, rewind_to_lines, smoothed, smoothed_at,
};
use rollflow::observe::{Curves, HtmlReport, ObserveError, StageShares};
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
fn tensorboard_is_asked_to_drop_the_steps_that_a_resumed_run_makes_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut logger = TensorBoardLogger::after(folder.path(), 300).unwrap();
    let path = logger.path().to_owned();
    let begun = std::fs::metadata(&path).unwrap().len();
    logger.log(301, &row(&[("loss", 2.5)])).unwrap();
    let events = read_events(&std::fs::read(&path).unwrap()).unwrap();
    let found: Vec<_> = events.iter().map(|event| (event.step, event.session)).collect();
    assert_eq!(found, [(0, None), (301, Some(1)), (301, None)], "1 is START");
    rewind_events(folder.path(), Some(301)).unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() > begun);
    rewind_events(folder.path(), Some(300)).unwrap();
    assert!(!path.exists(), "without a step, also of its beginning, there is nothing to keep");
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
    let mut logger = JsonlLogger::new(folder.path().join("deep/run")).unwrap();
    logger.log(0, &row(&[("loss", f64::NAN), ("b", f64::INFINITY), ("a", f64::NEG_INFINITY), ("step", 99.0)])).unwrap();
    let written = std::fs::read_to_string(logger.path()).unwrap();
    assert_eq!(written, "{\"step\":0,\"a\":\"-inf\",\"b\":\"inf\",\"loss\":\"NaN\"}\n", "when `log` returns");
    for step in 1..5 {
        logger.log(step, &row(&[("loss", 1.0 / step as f64), ("a \"quoted\"\nkey", 0.1)])).unwrap();
    }
    logger.finish().unwrap();
    let text = std::fs::read_to_string(logger.path()).unwrap();
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.iter().map(|row| row["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!((&rows[2]["loss"], &rows[3]["a \"quoted\"\nkey"]), (&0.5.into(), &0.1.into()));
}

#[test]
fn a_torn_last_line_is_removed_before_the_next_one_and_an_unwritable_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    // Longer than a block of the backward search.
    std::fs::write(&path, format!("{{\"step\":0,\"loss\":1.0}}\n{{\"step\":1,\"lo{}", "s".repeat(10_000))).unwrap();
    let mut logger = JsonlLogger::new(folder.path()).unwrap();
    logger.log(1, &row(&[("loss", 0.5)])).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"step\":0,\"loss\":1.0}\n{\"step\":1,\"loss\":0.5}\n");
    let error = JsonlLogger::new(&path).unwrap_err().to_string();
    assert!(error.contains(&path.join("metrics.jsonl").display().to_string()), "{error}");
}

#[test]
fn a_console_line_names_step_reward_loss_norm_and_rate_at_the_first_and_every_nth_step() {
    let line = |step: u64, pairs: &[(&str, f64)]| console_line(step, &row(pairs));
    let pairs = [("loss", 0.02139), ("reward_mean", 0.43), ("learning_rate", 2e-5), ("grad_norm", 12.345), ("entropy_nats", 1.0)];
    assert_eq!(line(12, &pairs), "Step 12: reward=0.43 loss=0.0214 grad_norm=12.35 lr=2e-5");
    assert_eq!(line(0, &[("loss", f64::NAN), ("grad_norm", 123_456.0)]), "Step 0: loss=NaN grad_norm=1.23e5");
    assert_eq!(line(0, &[("loss", -1200.0), ("learning_rate", -0.0)]), "Step 0: loss=-1200 lr=0");
    let mut printed = Vec::new();
    let mut logger = log_to_console(3, |line| printed.push(line.to_owned()));
    (1..8).for_each(|step| logger.log(step, &StepMetrics::new()).unwrap());
    drop(logger);
    assert_eq!(printed, ["Step 1:", "Step 3:", "Step 6:"]);
}

#[test]
fn a_metrics_numbers_are_those_of_the_steps_that_have_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut logger = JsonlLogger::new(folder.path()).unwrap();
    for step in 1..=20 {
        let never = (step % 10 == 0).then_some(("eval", f64::NAN));
        logger.log(step, &row(&[Some(("loss", step as f64)), never].into_iter().flatten().collect::<Vec<_>>())).unwrap();
    }
    let stats = compute_stats_from_jsonl(logger.path()).unwrap();
    assert_eq!(stats.keys().collect::<Vec<_>>(), ["loss"], "nothing is known of a metric that is never finite");
    let loss = stats["loss"];
    assert_eq!((loss.count, loss.first, loss.last, loss.min, loss.max, loss.mean), (20, 1.0, 20.0, 1.0, 20.0, 10.5));
    assert_eq!(loss.last_tenth, 19.5);
    assert!(loss.best_high <= 20.0 && loss.best_low >= 1.0 && loss.best_low < loss.best_high);
    // A killed process leaves half a row.
    let torn = std::fs::read_to_string(logger.path()).unwrap() + "{\"step\":21,\"lo";
    std::fs::write(logger.path(), torn).unwrap();
    assert_eq!(compute_stats_from_jsonl(logger.path()).unwrap(), stats);
}

#[test]
fn smoothing_follows_the_trend_and_no_single_value() {
    let straight: Vec<f64> = (0..100).map(f64::from).collect();
    assert_eq!(smoothed(&straight)[5..95], straight[5..95]);
    let mut spikes = vec![0.0; 100];
    (spikes[0], spikes[50], spikes[99]) = (1.0, 1.0, 1.0);
    assert!(smoothed(&spikes).into_iter().all(|value| value < 0.2));
    assert_eq!((smoothed(&[3.0]), smoothed(&[])), (vec![3.0], vec![]));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Also next to values that are too large for others to show in their sum.
    #[test]
    fn a_smoothed_value_is_the_mean_of_those_around_it(
        values in prop::collection::vec(prop_oneof![9 => -1e3..1e3, 1 => Just(1e100), 1 => Just(f64::MAX)], 0..300)
    ) {
        let reach = values.len() / 20;
        for (at, smooth) in smoothed(&values).into_iter().enumerate() {
            let near = &values[at.saturating_sub(reach)..(at + reach + 1).min(values.len())];
            let mean = near.iter().map(|value| value / near.len() as f64).sum::<f64>().clamp(f64::MIN, f64::MAX);
            let largest = near.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
            for one in [smooth, smoothed_at(&values, at)] {
                prop_assert!((one - mean).abs() <= 1e-13 * largest, "at {at}: {one}, not {mean}");
            }
        }
    }
}

#[test]
fn statistics_of_the_largest_numbers_are_finite() {
    let stats = MetricStats::of([f64::MAX, f64::MIN, f64::MAX, f64::MAX]).unwrap();
    assert_eq!((stats.mean, stats.max, stats.last_tenth), (f64::MAX / 2.0, f64::MAX, f64::MAX));
    assert!((stats.std / f64::MAX - 0.75_f64.sqrt()).abs() < 1e-9, "{stats:?}");
    let same = MetricStats::of([f64::MAX; 3]).unwrap();
    assert!(same.std <= f64::MAX * 1e-9 && same.best_high.is_finite(), "{same:?}");
}

#[test]
fn a_rewind_removes_what_came_after_the_step_and_the_torn_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let whole = "{\"step\":1,\"loss\":0.5}\n{\"step\":2}\n{\"step\":2}\n";
    std::fs::write(&path, format!("{whole}{{\"step\":3}}\n{{\"ste")).unwrap();
    assert_eq!(last_step(&path).unwrap(), 3);
    for (step, left) in [(2, whole), (0, "")] {
        rewind(&path, Some(step)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), left);
    }
    rewind(&path, None).unwrap();
    assert!(!path.exists(), "nothing comes before the first row");
    rewind(&path, Some(3)).unwrap();
    std::fs::write(&path, "{\"step\":1}\nnonsense\n").unwrap();
    assert!(last_step(&path).unwrap_err().to_string().contains("metrics.jsonl, line 2"), "a damaged line is named");
}

#[test]
fn a_rewind_of_lines_without_a_step_counts_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dead_letters.jsonl");
    assert_eq!(count_lines(&path).unwrap(), 0);
    rewind_to_lines(&path, 3).unwrap();
    std::fs::write(&path, "{}\n{}\n{}\n{tor").unwrap();
    assert_eq!(count_lines(&path).unwrap(), 3);
    rewind_to_lines(&path, 2).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "{}\n{}\n");
    rewind_to_lines(&path, 0).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_rewind_of_events_removes_the_torn_end_and_files_that_hold_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let mut logger = TensorBoardLogger::new(folder.path()).unwrap();
    let path = logger.path().to_owned();
    let length = || std::fs::metadata(&path).unwrap().len();
    logger.log(1, &row(&[("loss", 0.5)])).unwrap();
    let whole = length();
    logger.log(2, &row(&[("loss", 0.5)])).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(length() - 3).unwrap();
    for step in [2, 1] {
        rewind_events(folder.path(), Some(step)).unwrap();
        assert_eq!(length(), whole, "the event of step 2 was torn");
    }
    rewind_events(folder.path(), Some(0)).unwrap();
    assert!(!path.exists());
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

#[test]
fn what_a_model_wrote_is_data_and_never_markup() {
    let rollout = Rollout { response: "</script><img src=x onerror=alert(1)><!--".into(), ..Rollout::default() };
    let page = HtmlReport::default().samples([rollout].into_iter()).to_html();
    assert!(!page.contains("<img src=x"), "a text ended its element");
    assert!(page.contains("\\u003c/script>\\u003cimg src=x"));
    assert_eq!(page.matches("</script>").count(), 2, "those of the data and of the program");
}

#[test]
fn the_page_asks_nobody_for_anything() {
    let page = HtmlReport::default().to_html();
    for outside in ["http://", "https://", "//cdn", "@import", "url(http", "src=", "fetch("] {
        let known = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!known.contains(outside), "{outside}");
    }
    assert!(!page.contains("{{"), "every part is in its place");
}

#[test]
fn samples_are_thinned_evenly_and_curves_keep_their_ends() {
    let rollouts = (0..5000).map(|step| Rollout { step, ..Rollout::default() });
    let report = HtmlReport::default().samples(rollouts);
    assert!((600..=1200).contains(&report.samples.len()));
    assert_eq!(report.samples.len() + report.samples_left_out, 5000);
    let steps: Vec<u64> = report.samples.iter().map(|sample| sample["step"].as_u64().unwrap()).collect();
    assert!(steps.windows(2).all(|pair| pair[1] - pair[0] == steps[1] - steps[0]), "{steps:?}");
    let mut curves = Curves::default();
    (1..=1000).for_each(|step| curves.add(step, StepMetrics::from([("loss".to_owned(), step as f64)])));
    let curve = &curves.drawn()["loss"];
    let points: Vec<[f64; 5]> = serde_json::from_value(curve["points"].clone()).unwrap();
    assert!(points.len() <= 321 && curve["help"] != "");
    assert_eq!((points[0][0], points[points.len() - 1][0]), (1.0, 1000.0));
    assert!(points.iter().all(|[step, line, low, high, own]| low <= line && line <= high && own == step));
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
        progress.progress.ledger.sampled(SampledToken { ordinal: 9, index: 0, token: 4, log_prob: token, version: 1, status, routes: None });
        std::fs::write(folder.path().join("progress.json"), serde_json::to_vec(&progress).unwrap()).unwrap();
        equal(&Resumed::read(folder.path()).unwrap(), &progress)?;

        let stats = MetricStats { count: 1, first: a, last: b, last_tenth: c, mean: d, std: e, min: f, max: g, best_low: h, best_high: a };
        let shares = StageShares { name: "train".into(), workers: 1, shares: [("busy".to_owned(), b)].into() };
        let text = serde_json::to_string(&(&stats, &shares)).unwrap();
        let read: (MetricStats, StageShares) = serde_json::from_str(&text).unwrap();
        equal(&read, &(stats, shares))?;
    }
}
