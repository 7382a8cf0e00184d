//! Supervised fine-tuning as a plain loop over a backend, without a graph. Progress is reported as
//! `tracing` events.

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;

use super::{SaveCheckpoint, SavedCheckpoint, TrainError, TrainingBackend, collate};
use crate::algo::{Aggregation, perplexity};
use crate::data::Sample;
use crate::observe::logs::{announce_training, console_line};
use crate::observe::{Metric, StepMetrics};

/// Settings of the loop.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SftConfig {
    /// Optimizer steps.
    pub num_steps: u64,
    /// Samples per step, cyclically.
    pub batch_size: usize,
    /// Steps between log lines, starting at the first step; 0: none.
    pub log_every: u64,
    /// Steps between checkpoints; the last step is saved, too. 0: no checkpoints.
    pub checkpoint_every: u64,
    /// The run's folder.
    pub run_folder: PathBuf,
}

/// Trains `num_steps` steps on cyclic batches and returns each step's numbers by the catalogue's
/// names. `observe` is called after each step, with its number from 1.
///
/// The next batch is collated while the current one trains. A checkpoint is written while the next
/// steps train; its error ends the loop at the next checkpoint or at the end.
pub fn run_sft_training<B: TrainingBackend + ?Sized>(
    backend: &B,
    samples: &[Sample],
    config: &SftConfig,
    mut observe: impl FnMut(u64, &StepMetrics),
) -> Result<Vec<StepMetrics>, TrainError> {
    let preconditions = [
        (samples.is_empty(), "samples must be non-empty"),
        (config.num_steps == 0, "num_steps must be > 0"),
        (config.batch_size == 0, "batch_size must be > 0"),
    ];
    if let Some((_, broken)) = preconditions.into_iter().find(|(broken, _)| *broken) {
        return Err(TrainError::Setting(broken));
    }
    let mut rest = samples.iter().cycle();
    let mut draw = || {
        let batch: Vec<&Sample> = rest.by_ref().take(config.batch_size).collect();
        collate(&batch, Aggregation::TokenMean).map(Arc::new)
    };
    let facts: [(&str, &dyn Display); 3] =
        [("Samples", &samples.len()), ("Steps", &config.num_steps), ("Batch size", &config.batch_size)];
    announce_training("SFT", &facts);
    let (mut steps, mut saved) = (Vec::new(), None);
    let mut next = draw()?;
    for step in 1..=config.num_steps {
        let (forward, optim) = (backend.forward_backward(next.clone()), backend.optim_step());
        if step < config.num_steps {
            next = draw()?;
        }
        let (forward, optim) = (forward.wait()?, optim.wait()?);
        let numbers = [(Metric::Loss, forward.loss), (Metric::Entropy, forward.entropy), (Metric::LearningRate, optim.lr)];
        let norms = [(Metric::GradNorm, optim.grad_norm), (Metric::GradNormClipped, optim.grad_norm_clipped)];
        let numbers = numbers
            .into_iter()
            .chain(norms.into_iter().filter(|(_, norm)| !norm.is_nan()))
            .chain(forward.metrics.nll.map(|nll| (Metric::Perplexity, perplexity(nll))))
            .chain(forward.router_loss.map(|loss| (Metric::RouterLoss, loss)));
        let done: StepMetrics = numbers.map(|(metric, value)| (metric.key().to_owned(), value)).collect();
        observe(step, &done);
        if config.log_every > 0 && (step == 1 || step % config.log_every == 0) {
            tracing::info!("{}", console_line(step, &done));
        }
        if config.checkpoint_every > 0 && (step % config.checkpoint_every == 0 || step == config.num_steps) {
            let metrics = [("loss".to_owned(), forward.loss), ("lr".to_owned(), optim.lr)].into();
            let request = SaveCheckpoint { run_folder: config.run_folder.clone(), step, metrics, ..Default::default() };
            written(saved.take())?;
            let next = backend.save_checkpoint(request);
            next.copied.wait()?;
            saved = Some(next);
        }
        steps.push(done);
    }
    written(saved)?;
    tracing::info!("Training complete!");
    Ok(steps)
}

/// Waits for a checkpoint that is being written.
fn written(saved: Option<SavedCheckpoint>) -> Result<(), TrainError> {
    if let Some(saved) = saved {
        tracing::info!("Saved checkpoint to {}", saved.wait()?.display());
    }
    Ok(())
}
