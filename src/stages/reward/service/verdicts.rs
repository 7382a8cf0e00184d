//! What a judge said, by what it was asked: in memory, and in a file if there is one, a JSON object a line.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Verdict {
    question: String,
    reply: String,
}

/// Replies that need not be asked for again.
pub(super) struct Verdicts {
    known: Mutex<(HashMap<String, String>, Option<File>)>,
}

impl Verdicts {
    /// Reads what `path` holds, if it is there. A last line that was cut off by a crash is asked for again.
    pub(super) fn open(path: Option<&Path>) -> Result<Self, String> {
        let Some(path) = path else { return Ok(Verdicts { known: Mutex::default() }) };
        let mut known = HashMap::new();
        let mut whole = 0;
        match std::fs::read_to_string(path) {
            Ok(text) => {
                for (at, line) in text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate() {
                    let verdict: Verdict =
                        serde_json::from_str(line).map_err(|error| format!("line {}: {error}; mend or delete it", at + 1))?;
                    known.insert(verdict.question, verdict.reply);
                    whole += line.len();
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.to_string()),
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|error| error.to_string())?;
        file.set_len(whole as u64).map_err(|error| error.to_string())?;
        Ok(Verdicts { known: Mutex::new((known, Some(file))) })
    }

    pub(super) fn find(&self, question: &str) -> Option<String> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).0.get(question).cloned()
    }

    /// Remembers a reply; in the file it is whole or not at all after a crash.
    pub(super) fn keep(&self, question: String, reply: &str) -> std::io::Result<()> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (replies, file) = &mut *known;
        if let Some(file) = file {
            let mut line = serde_json::to_string(&Verdict { question: question.clone(), reply: reply.to_owned() })?;
            line.push('\n');
            file.write_all(line.as_bytes())?;
        }
        replies.insert(question, reply.to_owned());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_remembered_over_runs_and_a_torn_line_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("verdicts.jsonl");
        let verdicts = Verdicts::open(Some(&path)).unwrap();
        assert_eq!(verdicts.find("a"), None);
        verdicts.keep("a".into(), "Score: 1\n").unwrap();
        verdicts.keep("b".into(), "Score: 2").unwrap();
        drop(verdicts);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 3]).unwrap();
        let verdicts = Verdicts::open(Some(&path)).unwrap();
        assert_eq!((verdicts.find("a"), verdicts.find("b")), (Some("Score: 1\n".into()), None));
        verdicts.keep("b".into(), "Score: 3").unwrap();
        assert_eq!(Verdicts::open(Some(&path)).unwrap().find("b"), Some("Score: 3".into()));
        std::fs::write(&path, "{}\n").unwrap();
        assert!(Verdicts::open(Some(&path)).err().unwrap().starts_with("line 1: "));
    }
}
