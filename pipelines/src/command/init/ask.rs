//! Questions, and where their answers come from.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Context, Result};

use crate::command::refused;

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
    pub(super) fn ask(&self, question: &str, given: Option<&str>, proposed: &str) -> Result<String> {
        let said = if given.is_some() { None } else { self.hear(question, proposed)? };
        Ok(said.unwrap_or_else(|| given.unwrap_or(proposed).to_owned()))
    }

    /// One of `words`: the given one, else the answer, else the proposal.
    pub(super) fn choose(&self, question: &str, given: Option<&str>, words: &[&str], proposed: &str) -> Result<String> {
        match given {
            Some(given) => Ok(given.to_owned()),
            None => {
                Ok(self.one_of(&format!("{question} ({})", words.join(", ")), words, proposed)?.unwrap_or(proposed.to_owned()))
            }
        }
    }

    /// Asks for one of `choices` without a default: with `--yes`, or if no line comes, it must be
    /// given by `flag`. An empty line takes the first.
    pub(super) fn pick(&self, question: &str, flag: &str, choices: &[String]) -> Result<String> {
        let (words, listed): (Vec<&str>, _) = (choices.iter().map(String::as_str).collect(), choices.join(", "));
        let said = self.one_of(&format!("{question} ({listed})?"), &words, words.first().unwrap_or(&""))?;
        said.ok_or_else(|| refused(format!("{question}? Name one with {flag}: {listed}")))
    }

    /// The answer, if a line comes, whatever its case. At a terminal the question is repeated until the
    /// answer is one of `words`.
    fn one_of(&self, question: &str, words: &[&str], proposed: &str) -> Result<Option<String>> {
        loop {
            let Some(said) = self.hear(question, proposed)? else { return Ok(None) };
            let same = words.iter().find(|word| **word == said);
            if let Some(word) = same.or_else(|| words.iter().find(|word| word.eq_ignore_ascii_case(&said))) {
                return Ok(Some((*word).to_owned()));
            }
            match self.terminal {
                true => eprintln!("one of {}, please", words.join(", ")),
                false => return Err(refused(format!("{said:?} is none of {}", words.join(", ")))),
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

    /// Shows something that questions follow from.
    pub(super) fn say(&self, line: &str) {
        if self.asks {
            eprintln!("{line}");
        }
    }
}
