//! A reward model on its own thread.
//!
//! It computes scores in passes of a bounded number of tokens. A group's completions are announced
//! first, as one batch; the scores are then fetched one by one.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::algo::{Aggregation, BradleyTerry, Schedule};
use crate::data::{Group, PromptText, Sample, Tokenizer};
use crate::model::{ModelConfig, ModelError};
use crate::train::{LocalBackend, LocalConfig, ScoreModel, TrainError, TrainFuture, TrainingBackend, collate, score_sample};

/// Error in scoring a text.
#[derive(Debug, thiserror::Error)]
pub enum ScoringError {
    /// The text is not readable.
    #[error(transparent)]
    Text(#[from] ModelError),
    /// The model failed.
    #[error("scoring: {0}")]
    Model(#[from] TrainError),
}

/// Announced texts, each with its place in a batch and the batch.
type Announced = HashMap<(PromptText, String), (usize, TrainFuture<Vec<Vec<f64>>>)>;

/// Scores texts by a [`ScoreModel`]. Dropping it finishes what was requested and joins its thread.
pub struct Scorer {
    tokenizer: Arc<Tokenizer>,
    config: ModelConfig,
    backend: LocalBackend,
    announced: Mutex<Announced>,
}

impl Scorer {
    /// Starts the thread, on a copy of the weights; it computes with `threads` threads.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn new(model: &ScoreModel, threads: usize) -> std::io::Result<Self> {
        let (threads, compute) = (Some(threads), model.compute());
        let config = LocalConfig { threads, compute, ..LocalConfig::new(BradleyTerry::default(), Schedule::constant(0.0)) };
        let (tokenizer, backend) = (model.tokenizer().clone(), model.backend(config)?);
        Ok(Scorer { tokenizer, config: model.config().clone(), backend, announced: Mutex::default() })
    }

    /// Computes the score of a completion, which depends on its prompt and text alone. In a batch
    /// it differs by float rounding at most.
    pub fn score(&self, prompt: &PromptText, answer: &str) -> Result<f64, ScoringError> {
        let announced = self.announced.lock().get(&(prompt.clone(), answer.to_owned())).cloned();
        let (at, scores) = match announced {
            Some(announced) => announced,
            None => (0, self.submit(&[self.asking(prompt, answer)?])?),
        };
        Ok(scores.wait()?[at][0])
    }

    /// Computes a score by `by` from the model's scores after each token of prompt and completion;
    /// the last of them is [`Scorer::score`]. Use it with process reward models.
    pub fn score_by(&self, prompt: &PromptText, answer: &str, by: impl Fn(&[f64]) -> f64) -> Result<f64, ScoringError> {
        let mut asking = self.asking(prompt, answer)?;
        asking.loss_mask.fill(1.0);
        Ok(by(&self.submit(&[asking])?.wait()?[0]))
    }

    /// Computes the reward of a sample, for [`Reward::each`](super::Reward::each).
    pub fn reward(&self, sample: &Sample) -> Result<f64, String> {
        self.score(&sample.prompt, &sample.response).map_err(|error| error.to_string())
    }

    /// Starts to score a group's completions in one batch, for
    /// [`Reward::ahead`](super::Reward::ahead). The next group replaces it. A completion that cannot
    /// be scored fails when its score is fetched.
    pub fn announce(&self, group: &Group) {
        let mut asked: HashMap<(PromptText, String), usize> = HashMap::new();
        let mut samples = Vec::new();
        for sample in &group.samples {
            let text = (sample.prompt.clone(), sample.response.clone());
            if !asked.contains_key(&text)
                && let Ok(asking) = self.asking(&text.0, &text.1)
            {
                asked.insert(text, samples.len());
                samples.push(asking);
            }
        }
        let announced = match self.submit(&samples) {
            Ok(scores) => asked.into_iter().map(|(text, at)| (text, (at, scores.clone()))).collect(),
            Err(_) => Announced::new(),
        };
        *self.announced.lock() = announced;
    }

    fn asking(&self, prompt: &PromptText, answer: &str) -> Result<Sample, ModelError> {
        score_sample(&self.tokenizer, &self.config, prompt, answer)
    }

    fn submit(&self, samples: &[Sample]) -> Result<TrainFuture<Vec<Vec<f64>>>, TrainError> {
        Ok(self.backend.score(Arc::new(collate(samples, Aggregation::TokenMean)?)))
    }
}
