//! A text game without tools: find a number from answers that say "higher" or "lower".

use std::time::Instant;

use rollflow::data::{ChatMessage, permutation};
use rollflow::env::{Action, EnvError, Environment, Episode, Grade, Step};
use serde_json::{Value, json};

/// The model guesses a number from 1 to `highest`, which the episode's seed draws.
///
/// The last number in a turn is the guess. The reward is 1 for a correct first guess and falls
/// with every further one.
#[derive(Clone, Debug)]
pub struct GuessEnvironment {
    highest: u64,
    number: u64,
    guesses: u64,
    found: bool,
}

impl GuessEnvironment {
    /// Creates the game for numbers from 1 to `highest`.
    pub fn new(highest: u64) -> Self {
        GuessEnvironment { highest: highest.max(1), number: 1, guesses: 0, found: false }
    }

    /// Most guesses that bisection needs.
    fn bisection_guesses(&self) -> u64 {
        u64::from(self.highest.ilog2()) + 1
    }
}

impl Environment for GuessEnvironment {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        let drawn = permutation(self.highest as usize, episode.seed, episode.prompt.ordinal);
        *self = GuessEnvironment {
            number: 1 + drawn.first().map_or(0, |first| *first as u64),
            ..GuessEnvironment::new(self.highest)
        };
        let mut conversation = episode.conversation();
        conversation.push(ChatMessage::new("user", format!("guess 1 to {}", self.highest)));
        Ok(conversation)
    }

    fn step(&mut self, action: &Action, _: Instant) -> Result<Step, EnvError> {
        let said = action.text.split(|c: char| !c.is_ascii_digit()).rfind(|piece| !piece.is_empty());
        self.guesses += 1;
        Ok(match said.map(str::parse::<u64>) {
            None => Step::says("say a number"),
            Some(Ok(guess)) if guess == self.number => {
                self.found = true;
                Step::over()
            }
            Some(Ok(guess)) if guess < self.number => Step::says("higher"),
            Some(_) => Step::says("lower"),
        })
    }

    fn observe(&self) -> Value {
        json!({ "guesses": self.guesses, "found": self.found })
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        let penalty = self.guesses.saturating_sub(1) as f64 / (2 * self.bisection_guesses()) as f64;
        let reward = if self.found { (1.0 - penalty).max(0.1) } else { 0.0 };
        Ok(Grade { reward, ..Grade::correct(self.found) })
    }
}
