//! Evaluation on the engines that a run trains with: they serve the version that is evaluated as long as it lasts, whatever else they do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::data::Version;
use rollflow::engine::FinishReason;
use rollflow::engine::remote::{Attempt, Ending, RemoteError, async_trait};
use rollflow::prelude::*;
use rollflow::rollout::Admission;
use rollflow::rollout::EvalSpec;
use rollflow::stages::evaluate::Evaluator;
use rollflow::stages::reward::FailurePolicy;
use rollflow::stages::sync::EvaluationHold;
use tokio::sync::mpsc::Sender;

use super::synchronous::{Unsteady, is_lost, sync};
use super::*;
use crate::support::backend::Counting;

const STEPS: u64 = 7;
const EVERY: u64 = 3;
const PROMPTS: usize = 5;
const SAMPLES: u32 = 3;

/// The versions of the answers that each evaluation judged, and the steps that came through with what it found.
type Found = (Vec<Version>, BTreeMap<u64, f64>);

/// An asynchronous run that publishes every step and evaluates on its own engines, slowly.
fn train(seed: u64, folder: &std::path::Path) -> Found {
    let engines = [2 * seed, 2 * seed + 1].map(|seed| Unsteady::new(seed) as Arc<dyn InferenceEngine>);
    let handle = handle(engines);
    let admission = Admission::new(2, 4, Some(STEPS * 2)).bounded(1);
    let (publisher, published) = weights();
    let config = FleetConfig { fleet_timeout: GUARD, ..hasty() };
    let judged: Arc<Mutex<Vec<Version>>> = Arc::default();
    let noted = judged.clone();
    let spec = EvalSpec {
        prompts: (0..PROMPTS).map(|at| Prompt::from(format!("{at}+1="))).collect(),
        samples: SAMPLES,
        sampling: SamplingParams { max_new_tokens: 12, ..SamplingParams::default() },
        agent: None,
        greedy: true,
        success: 1.0,
        judge: Arc::new(move |mut group| {
            // Long enough for the trainer to publish what it may.
            std::thread::sleep(Duration::from_millis(15));
            for sample in &mut group.samples {
                noted.lock().unwrap().extend(sample.versions.per_token().flatten());
                sample.reward = Some(1.0);
            }
            Ok((group, Vec::new()))
        }),
    };
    let hold = EvaluationHold::new(|step| step.is_multiple_of(EVERY) || step == STEPS);
    let fleet = || Generator::remote(&handle, config.clone(), &tokenizer());
    let evaluator = Evaluator::remote(fleet(), spec, EVERY, &hold).last(STEPS);
    let generator = fleet().weights(published).group_size(4).max_new_tokens(12);
    let seen: Arc<Mutex<BTreeMap<u64, f64>>> = Arc::default();
    let steps = seen.clone();
    let mut flow = Flow::new("evaluating").admission(&admission);
    let prompts = flow.source("prompts", Prompts::addition(1, seed).unwrap());
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage(
        "reward",
        groups,
        Reward::each(|sample: &Sample| f64::from(sample.index))
            .failures(FailurePolicy { max_poisoned: u64::MAX, ..FailurePolicy::default() }),
    );
    let batches = flow.stage("batch", scored, Batcher::groups(2));
    let trainer = Trainer::new(Counting::default()).advantages(GroupMean::default());
    let trained = flow.stage("train", batches, trainer.sync_every(1).steps(STEPS));
    let synced = flow.stage("sync", trained, sync(&handle, publisher).hold(&hold));
    let evaluated = flow.stage("evaluate", synced, evaluator.report(0, Some(folder.to_owned())));
    flow.sink("note", evaluated, move |step: Trained<u64>| {
        steps.lock().unwrap().extend(step.evaluated.get("eval_step").map(|of| (step.step, *of)));
    });
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || drop(done.send(flow.run(Until::finished()))));
    ended.recv_timeout(GUARD).expect("the run never ended").unwrap();
    (judged.lock().unwrap().clone(), seen.lock().unwrap().clone())
}

#[test]
fn v2_servers_answer_an_evaluation_by_the_version_that_is_evaluated_and_by_no_other_while_training_goes_on() {
    let mut lost = 0;
    for seed in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        let (versions, steps) = train(seed, folder.path());
        // The first weights, steps 3 and 6, and the last.
        let mut evaluated = versions.clone();
        evaluated.dedup();
        assert_eq!(evaluated.len(), 4, "seed {seed}: versions {evaluated:?} answered four evaluations");
        assert!(evaluated.is_sorted());
        let found: Vec<[u64; 2]> = steps.iter().map(|(step, of)| [*step, *of as u64]).collect();
        assert_eq!(found, [[1, 0], [3, 3], [6, 6], [STEPS, STEPS]], "each in the row of its own step");
        let answers = std::fs::read_to_string(folder.path().join("evaluations/step_000003.jsonl")).unwrap();
        let rows: Vec<serde_json::Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(rows.len(), PROMPTS * (SAMPLES as usize + 1));
        for row in &rows {
            let number = |key: &str| row[key].as_u64().unwrap();
            let ordinal = 2 * number("question") + u64::from(row["greedy"] == true);
            let gone = is_lost(seed, ordinal, number("index") as u32);
            assert_eq!(row["reward"].is_null(), gone, "a sample that no server makes is no wrong answer: {row}");
            assert_eq!(row["error"].as_str().is_some_and(|error| error.contains("lost")), gone);
            lost += usize::from(gone);
        }
    }
    assert!(lost > 0, "the script must lose answers");
}

/// Notes the ids of requests, and answers each token by token, as if new weights came after each.
#[derive(Default)]
struct Ids(Mutex<Vec<String>>);

#[async_trait]
impl InferenceEngine for Ids {
    fn name(&self) -> String {
        "ids".into()
    }

    async fn generate(&self, attempt: &Attempt, tokens: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        self.0.lock().unwrap().push(attempt.id());
        tokens.send(vec![(3, -1.0)]).await.ok();
        Ok(Ending { finish: (attempt.rest() == 1).then_some(FinishReason::Length), ..Ending::default() })
    }
}

/// SGLang rejects an id that it has, and aborts what has the id of an answer that ended two seconds before.
#[test]
fn no_two_requests_have_one_id_whatever_they_are_for() {
    let engine = Arc::new(Ids::default());
    let handle = handle([engine.clone() as Arc<dyn InferenceEngine>]);
    let params = SamplingParams { max_new_tokens: 3, ..SamplingParams::default() };
    // Training and evaluation, of which the first submits two turns.
    for turns in [2, 1] {
        let mut fleet = fleet(&handle, hasty());
        fleet.set_weights(0, &());
        for _ in 0..turns {
            fleet.submit(request(0, 2, &params)).unwrap();
            finish(&mut fleet, |_| {}).unwrap();
        }
    }
    let ids = engine.0.lock().unwrap();
    assert_eq!((ids.len(), ids.iter().collect::<BTreeSet<_>>().len()), (18, 18), "{ids:?}");
    assert!(ids.iter().all(|id| id.len() == ids[0].len()), "SGLang aborts what begins with an id: {ids:?}");
}
