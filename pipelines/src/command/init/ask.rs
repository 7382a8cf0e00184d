//! Questions, and where their answers come from.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::command::Refused;

/// Source of answers: a terminal, lines from a pipe, or none.
pub(super) struct Asker {
    asks: bool,
    terminal: bool,
}

impl Asker {
    pub(super) fn new(asks: bool) -> Self {
        Asker { asks, terminal: std::io::stdin().is_terminal() }
    }

    /// Returns the given value, else the answer, else the proposal.
    pub(super) fn ask(&self, question: &str, given: Option<String>, proposed: &str) -> Result<String> {
        if let Some(given) = given {
            return Ok(given);
        }
        Ok(self.hear(question, proposed)?.unwrap_or_else(|| proposed.to_owned()))
    }

    /// Asks for one of `choices` without a default: with `--yes`, or if no line comes, it must be
    /// given by `flag`. An empty line takes the first.
    pub(super) fn pick(&self, question: &str, flag: &str, choices: &[String]) -> Result<String> {
        let listed = choices.join(", ");
        let proposed = choices.first().map_or("", String::as_str);
        loop {
            match self.hear(&format!("{question} ({listed})?"), proposed)? {
                Some(said) if choices.contains(&said) => return Ok(said),
                Some(_) if self.terminal => eprintln!("one of {listed}, please"),
                Some(said) => return Err(Refused::because(format!("{said:?} is none of {listed}"))),
                None => return Err(Refused::because(format!("{question}? Name one with {flag}: {listed}"))),
            }
        }
    }

    /// The line that answers a question, or the proposal for an empty one; `None` if no line comes.
    fn hear(&self, question: &str, proposed: &str) -> Result<Option<String>> {
        if !self.asks {
            return Ok(None);
        }
        eprint!("{question} [{proposed}] ");
        std::io::stderr().flush().ok();
        let mut said = String::new();
        let read = std::io::stdin().lock().read_line(&mut said).context("reading an answer")?;
        let said = if said.trim().is_empty() { proposed } else { said.trim() };
        if !self.terminal {
            // Echo the answer, as a terminal would.
            eprintln!("{said}");
        }
        Ok((read > 0).then(|| said.to_owned()))
    }

    /// One of a few words. At a terminal it is asked again until it is.
    pub(super) fn choose<T: ValueEnum + Clone>(&self, question: &str, given: Option<T>, proposed: T) -> Result<T> {
        if let Some(given) = given {
            return Ok(given);
        }
        let words: Vec<String> = T::value_variants().iter().map(|choice| self.word(choice.clone())).collect();
        loop {
            let said = self.ask(&format!("{question} ({})", words.join(", ")), None, &self.word(proposed.clone()))?;
            match T::from_str(&said, true) {
                Ok(choice) => return Ok(choice),
                Err(_) if self.terminal => eprintln!("one of {}, please", words.join(", ")),
                Err(_) => return Err(Refused::because(format!("{said:?} is none of {}", words.join(", ")))),
            }
        }
    }

    /// The word of a choice.
    pub(super) fn word<T: ValueEnum>(&self, choice: T) -> String {
        choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Tells something that questions follow from.
    pub(super) fn say(&self, line: &str) {
        if self.asks {
            eprintln!("{line}");
        }
    }
}
