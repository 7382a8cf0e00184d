//! What a judge said, by what it was asked: in memory, and in a file if there is one, a JSON object a line.
//!
//! Memory: up to 64 MiB of questions and replies. Beyond that the oldest are forgotten, and asked again if they come again.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Verdict {
    question: String,
    reply: String,
}

/// Replies that need not be asked for again.
pub(super) struct Verdicts {
    known: Mutex<(Known, Option<File>)>,
}

/// Bytes of questions and replies that are remembered.
const REMEMBERED: usize = 64 << 20;

/// Replies by question, up to a number of bytes.
#[derive(Default)]
struct Known {
    replies: HashMap<Arc<str>, String>,
    /// Oldest first.
    order: VecDeque<Arc<str>>,
    bytes: usize,
}

impl Known {
    fn insert(&mut self, question: String, reply: String, most: usize) {
        let question: Arc<str> = question.into();
        self.bytes += question.len() + reply.len();
        match self.replies.insert(question.clone(), reply) {
            Some(before) => self.bytes -= question.len() + before.len(),
            None => self.order.push_back(question),
        }
        while self.bytes > most
            && let Some(oldest) = self.order.pop_front()
        {
            let reply = self.replies.remove(&oldest).unwrap_or_default();
            self.bytes -= oldest.len() + reply.len();
        }
    }
}

impl Verdicts {
    /// Reads what `path` holds, if it is there. A last line that was cut off by a crash is asked for again.
    pub(super) fn open(path: Option<&Path>) -> Result<Self, String> {
        let Some(path) = path else { return Ok(Verdicts { known: Mutex::default() }) };
        let mut known = Known::default();
        let mut whole = 0;
        match std::fs::read_to_string(path) {
            Ok(text) => {
                for (at, line) in text.split_inclusive('\n').filter(|line| line.ends_with('\n')).enumerate() {
                    let verdict: Verdict =
                        serde_json::from_str(line).map_err(|error| format!("line {}: {error}; mend or delete it", at + 1))?;
                    known.insert(verdict.question, verdict.reply, REMEMBERED);
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
        self.known.lock().0.replies.get(question).cloned()
    }

    /// Remembers a reply; in the file it is whole or not at all after a crash.
    pub(super) fn keep(&self, question: String, reply: &str) -> std::io::Result<()> {
        let mut known = self.known.lock();
        let (replies, file) = &mut *known;
        if let Some(file) = file {
            let mut line = serde_json::to_string(&Verdict { question: question.clone(), reply: reply.to_owned() })?;
            line.push('\n');
            file.write_all(line.as_bytes())?;
        }
        replies.insert(question, reply.to_owned(), REMEMBERED);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten_where_there_are_too_many() {
        let mut known = Known::default();
        for (question, reply) in [("a", "1234"), ("b", "1234"), ("a", "12"), ("c", "1234")] {
            known.insert(question.into(), reply.into(), 10);
        }
        let mut left: Vec<_> = known.replies.iter().map(|(question, reply)| (&**question, reply.as_str())).collect();
        left.sort_unstable();
        assert_eq!((left, known.order.len(), known.bytes), (vec![("b", "1234"), ("c", "1234")], 2, 10));
    }

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
