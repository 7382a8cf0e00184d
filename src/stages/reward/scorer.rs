//! A reward model on a thread of its own.
//!
//! What is asked for is computed there in passes of a bounded number of tokens, and whoever asks need not wait: a group's answers are
//! announced first, in one batch, and fetched one by one as the reward of each is put together.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::algo::{Aggregation, BradleyTerry, Schedule};
use crate::data::{Group, PromptText, Sample};
use crate::train::{CollateError, LocalBackend, LocalConfig, TrainError, TrainFuture, TrainingBackend, collate};
use crate::train::{ScoreModel, TextError, TextReader};

/// A text that could not be scored.
#[derive(Debug, thiserror::Error)]
pub enum ScoringError {
    /// The text.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Its tokens.
    #[error(transparent)]
    Collate(#[from] CollateError),
    /// The model.
    #[error("scoring: {0}")]
    Model(#[from] TrainError),
}

/// A text, and the batch that its score comes with.
type Announced = HashMap<(PromptText, String), (usize, TrainFuture<Vec<Vec<f64>>>)>;

/// Scores texts by a [`ScoreModel`]. Shared by reference or `Arc`; dropping it finishes what was asked and joins its thread.
pub struct Scorer {
    reader: TextReader,
    backend: LocalBackend,
    announced: Mutex<Announced>,
}

impl Scorer {
    /// Starts the thread, which computes with so many, on a copy of the weights. Fails when the system has none to give.
    pub fn new(model: &ScoreModel, threads: usize) -> std::io::Result<Self> {
        let (threads, compute) = (Some(threads), model.compute());
        let config = LocalConfig { threads, compute, ..LocalConfig::new(BradleyTerry::default(), Schedule::constant(0.0)) };
        Ok(Scorer { backend: model.backend(config)?, reader: model.reader(), announced: Mutex::default() })
    }
}

impl Scorer {
    /// The score of one text: a function of its prompt and answer alone. Announced with others it is computed beside them, which changes no
    /// more of it than float rounding.
    pub fn score(&self, prompt: &PromptText, answer: &str) -> Result<f64, ScoringError> {
        let announced = self.announced.lock().get(&(prompt.clone(), answer.to_owned())).cloned();
        let (at, scores) = match announced {
            Some(announced) => announced,
            None => (0, self.submit(&[self.reader.asking(prompt, answer)?])?),
        };
        Ok(scores.wait()?[at][0])
    }

    /// A score of one's own making: `by` gets the model's scores after each token of prompt and answer, the last of which is
    /// [`Scorer::score`]. A model of single steps is asked this way.
    pub fn score_by(&self, prompt: &PromptText, answer: &str, by: impl Fn(&[f64]) -> f64) -> Result<f64, ScoringError> {
        let mut asking = self.reader.asking(prompt, answer)?;
        asking.loss_mask.fill(1.0);
        Ok(by(&self.submit(&[asking])?.wait()?[0]))
    }

    /// The score of a sample's answer: a reward for [`Reward::each`](super::Reward::each).
    pub fn reward(&self, sample: &Sample) -> Result<f64, String> {
        self.score(&sample.prompt, &sample.response).map_err(|error| error.to_string())
    }

    /// Begins with the scores of a group's answers, all at once, and does not wait for them: for [`Reward::ahead`](super::Reward::ahead).
    /// It is forgotten with the next group. An answer that has no score says so when it is asked for.
    pub fn announce(&self, group: &Group) {
        let mut asked: HashMap<(PromptText, String), usize> = HashMap::new();
        let mut samples = Vec::new();
        for sample in &group.samples {
            let text = (sample.prompt.clone(), sample.response.clone());
            if !asked.contains_key(&text)
                && let Ok(asking) = self.reader.asking(&text.0, &text.1)
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

    fn submit(&self, samples: &[Sample]) -> Result<TrainFuture<Vec<Vec<f64>>>, CollateError> {
        Ok(self.backend.score(Arc::new(collate(samples, Aggregation::TokenMean)?)))
    }
}
