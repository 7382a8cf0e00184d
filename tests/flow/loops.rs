//! Loops run on any backend: here one of twenty lines that trains nothing and writes down what it
//! was asked. And what a loop says.

use std::path::Path;
use std::sync::{Arc, Mutex};

use rollflow::algo::Schedule;
use rollflow::data::Sample;
use rollflow::observe::Console;
use rollflow::train::{
    BackendState, CheckpointMetadata, ForwardBackward, OptimStep, SaveCheckpoint, SavedCheckpoint, SftConfig, Snapshot,
    TrainBatch, TrainError, TrainFuture, TrainingBackend, run_sft_training,
};

#[derive(Default)]
struct Mock(Mutex<Vec<String>>);

impl Mock {
    fn note<T: Clone + Send + 'static>(&self, what: String, answer: T) -> TrainFuture<T> {
        self.0.lock().unwrap().push(what);
        TrainFuture::ready(Ok(answer))
    }
}

impl TrainingBackend for Mock {
    type Weights = ();
    fn forward_backward(&self, batch: Arc<TrainBatch>) -> TrainFuture<ForwardBackward> {
        let first: Vec<i64> = batch.sequences.iter().map(|sequence| sequence.inputs[0]).collect();
        self.note(format!("learn {first:?}"), ForwardBackward { loss: 1.5, ..Default::default() })
    }
    fn score(&self, batch: Arc<TrainBatch>) -> TrainFuture<Vec<Vec<f64>>> {
        self.note("score".into(), vec![Vec::new(); batch.sequences.len()])
    }
    fn update(&self, _: f64, _: Option<Schedule>) -> TrainFuture<OptimStep> {
        self.note("step".into(), OptimStep { lr: 0.1, ..Default::default() })
    }
    fn snapshot(&self) -> TrainFuture<Snapshot<()>> {
        self.note("snapshot".into(), Snapshot { version: 1, step: 0, weights: Arc::new(()) })
    }
    fn current(&self) -> TrainFuture<rollflow::train::Snapshot<Self::Weights>> {
        self.snapshot()
    }
    fn load_weights(&self, _: Arc<()>) -> TrainFuture<()> {
        self.note("load weights".into(), ())
    }
    fn save_checkpoint(&self, request: SaveCheckpoint) -> SavedCheckpoint {
        let written = self.note(format!("save {} {:?}", request.step, request.metrics), request.run_folder);
        SavedCheckpoint { copied: TrainFuture::ready(Ok(())), written }
    }
    fn load_checkpoint(&self, _: &Path) -> TrainFuture<CheckpointMetadata> {
        TrainFuture::ready(Err(TrainError::Ended))
    }
    fn state(&self) -> BackendState {
        BackendState::default()
    }
}

fn run(samples: usize, num_steps: u64, batch_size: usize) -> Result<Vec<String>, String> {
    let backend = Mock::default();
    let samples: Vec<Sample> = (0..samples as u32).map(|n| Sample::supervised(&[n], &[n + 1])).collect();
    let config = SftConfig { num_steps, batch_size, checkpoint_every: 2, ..Default::default() };
    let steps = run_sft_training(&backend, &samples, &config, |_, _| {}).map_err(|error| error.to_string())?;
    assert_eq!(steps.len() as u64, num_steps);
    Ok(backend.0.into_inner().unwrap())
}

/// Batches follow each other cyclically and are always full, also of fewer samples than one takes.
#[test]
fn every_step_learns_then_updates_and_saves_when_due_and_at_the_end() {
    let saved = |step| format!("save {step} {{\"loss\": 1.5, \"lr\": 0.1}}");
    let (odd, even) = ("learn [0, 1, 0, 1, 0]", "learn [1, 0, 1, 0, 1]");
    let expected = [odd, "step", even, "step", &saved(2), odd, "step", &saved(3)];
    assert_eq!(run(2, 3, 5).unwrap(), expected);
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_runs() {
    assert_eq!(run(0, 3, 5).unwrap_err(), "samples must be non-empty");
    assert_eq!(run(2, 0, 5).unwrap_err(), "num_steps must be > 0");
    assert_eq!(run(2, 3, 0).unwrap_err(), "batch_size must be > 0");
}

const CHILD: &str = "ROLLFLOW_LOOPS_CHILD";

/// Not a test of its own: the program whose console the test below reads.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    Console::default().install().unwrap();
    let samples = [Sample::supervised(&[1], &[2])];
    let (num_steps, batch_size, log_every, checkpoint_every) = (5, 2, 2, 4);
    let config = SftConfig { num_steps, batch_size, log_every, checkpoint_every, run_folder: "runs/mine".into() };
    println!();
    run_sft_training(&Mock::default(), &samples, &config, |_, _| {}).unwrap();
    println!("end");
}

/// R124.
#[test]
fn the_supervised_loop_says_how_it_begins_goes_and_ends() {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", "loops::child", "--nocapture"]).env(CHILD, "").output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    let said: Vec<&str> =
        out.lines().skip_while(|line| !line.starts_with("Starting")).take_while(|line| *line != "end").collect();
    let expected = [
        "Starting SFT training…",
        "  Samples: 1",
        "  Steps: 5",
        "  Batch size: 2",
        "Step 1: loss=1.5 grad_norm=0 lr=0.1",
        "Step 2: loss=1.5 grad_norm=0 lr=0.1",
        "Step 4: loss=1.5 grad_norm=0 lr=0.1",
        "Saved checkpoint to runs/mine",
        "Saved checkpoint to runs/mine",
        "Training complete!",
    ];
    assert_eq!(said, expected, "{out}");
}
