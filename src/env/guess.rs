//! A text game without tools: a number is to be found, and every guess is told to be too low or too high.

use serde_json::{Value, json};

use super::{Action, Deadline, EnvError, Environment, Episode, Grade, Step};
use crate::data::ChatMessage;

/// The model guesses a number from 1 to `highest`, which the episode's seed decides: the last number that it says is its guess. Fewer
/// guesses earn more: 1 for the first, and a little less for every other.
#[derive(Clone, Debug)]
pub struct GuessEnvironment {
    highest: u64,
    number: u64,
    guesses: u64,
    found: bool,
}

impl GuessEnvironment {
    /// Before its reset.
    pub fn new(highest: u64) -> Self {
        GuessEnvironment { highest: highest.max(1), number: 1, guesses: 0, found: false }
    }

    /// Guesses that halving the range needs at most.
    fn par(&self) -> u64 {
        u64::from(self.highest.ilog2()) + 1
    }
}

impl Environment for GuessEnvironment {
    fn reset(&mut self, episode: &Episode, _: Deadline) -> Result<Vec<ChatMessage>, EnvError> {
        let drawn = crate::data::permutation(self.highest as usize, episode.seed, episode.prompt.ordinal);
        *self = GuessEnvironment {
            number: 1 + drawn.first().map_or(0, |first| *first as u64),
            ..GuessEnvironment::new(self.highest)
        };
        let mut conversation = episode.conversation();
        conversation.push(ChatMessage::new("user", format!("guess 1 to {}", self.highest)));
        Ok(conversation)
    }

    fn step(&mut self, action: &Action, _: Deadline) -> Result<Step, EnvError> {
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

    fn grade(&mut self, _: Deadline) -> Result<Grade, EnvError> {
        let late = self.guesses.saturating_sub(1) as f64 / (2 * self.par()) as f64;
        let reward = if self.found { (1.0 - late).max(0.1) } else { 0.0 };
        Ok(Grade { reward, ..Grade::correct(self.found) })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Halves the range; tells the guesses that it took.
    fn play(seed: u64) -> (u64, f64) {
        let later = Deadline::within(Duration::from_secs(9));
        let mut game = GuessEnvironment::new(100);
        game.reset(&Episode { seed, ..Episode::default() }, later).unwrap();
        let (mut low, mut high) = (1, 100);
        loop {
            let guess = (low + high) / 2;
            let step = game.step(&Action { text: format!("not 3 but {guess}."), ..Action::default() }, later).unwrap();
            match step.messages.first().map(|message| message.content.as_str()) {
                None => return (guess, game.grade(later).unwrap().reward),
                Some("higher") => low = guess + 1,
                Some(_) => high = guess - 1,
            }
        }
    }

    #[test]
    fn a_seed_decides_the_number_and_fewer_guesses_earn_more() {
        let games: Vec<_> = (0..20).map(play).collect();
        assert_eq!(games, (0..20).map(play).collect::<Vec<_>>());
        assert!(games.iter().any(|(number, _)| *number != games[0].0), "{games:?}");
        assert!(games.iter().all(|(_, reward)| *reward >= 0.5), "within par: {games:?}");
        let mut game = GuessEnvironment::new(100);
        let later = Deadline::within(Duration::from_secs(9));
        let said = |game: &mut GuessEnvironment, text: &str| {
            game.step(&Action { text: text.into(), ..Action::default() }, later).unwrap()
        };
        assert_eq!(said(&mut game, "none").messages[0].content, "say a number");
        assert_eq!(said(&mut game, "99999999999999999999999").messages[0].content, "lower");
        assert_eq!(game.grade(later).unwrap(), Grade::correct(false));
    }
}
