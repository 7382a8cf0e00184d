//! Cache of a judge's replies by request: in memory, and in a JSONL file if one is configured.
//!
//! Memory holds up to 64 MiB of requests and replies; beyond that the oldest are evicted.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct CachedReply {
    question: String,
    reply: String,
}

/// Replies of a judge by request.
pub(super) struct ReplyCache(Mutex<(Known, Option<File>)>);

/// Most bytes of requests and replies in memory.
const CAPACITY: usize = 64 << 20;

/// Replies by request, up to a number of bytes.
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

impl ReplyCache {
    /// Opens the cache and reads `path` if it exists. A last line that a crash cut off is dropped.
    pub(super) fn open(path: Option<&Path>) -> Result<Self, String> {
        let Some(path) = path else { return Ok(ReplyCache(Mutex::default())) };
        let mut known = Known::default();
        let mut whole = 0;
        match std::fs::read(path) {
            Ok(bytes) => {
                whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
                for (at, line) in bytes[..whole].split_inclusive(|byte| *byte == b'\n').enumerate() {
                    let cached: CachedReply = serde_json::from_slice(line)
                        .map_err(|error| format!("line {}: {error}; correct or delete it", at + 1))?;
                    known.insert(cached.question, cached.reply, CAPACITY);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.to_string()),
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(|error| error.to_string())?;
        file.set_len(whole as u64).map_err(|error| error.to_string())?;
        Ok(ReplyCache(Mutex::new((known, Some(file)))))
    }

    pub(super) fn find(&self, question: &str) -> Option<String> {
        self.0.lock().0.replies.get(question).cloned()
    }

    /// Stores a reply; after a crash or an error the file holds all of it or none.
    pub(super) fn insert(&self, question: String, reply: &str) -> std::io::Result<()> {
        let mut known = self.0.lock();
        let (replies, file) = &mut *known;
        if let Some(file) = file {
            let mut line = serde_json::to_string(&CachedReply { question: question.clone(), reply: reply.to_owned() })?;
            line.push('\n');
            let whole = file.metadata()?.len();
            if let Err(error) = file.write_all(line.as_bytes()) {
                // The next line must not continue a part of this one.
                file.set_len(whole)?;
                return Err(error);
            }
        }
        replies.insert(question, reply.to_owned(), CAPACITY);
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
        let path = folder.path().join("replies.jsonl");
        let cache = ReplyCache::open(Some(&path)).unwrap();
        assert_eq!(cache.find("a"), None);
        cache.insert("a".into(), "Score: 1\n").unwrap();
        cache.insert("b".into(), "Score: 2, é").unwrap();
        drop(cache);
        let bytes = std::fs::read(&path).unwrap();
        let (cut, cut_off) = bytes.split_at(bytes.len() - 4);
        assert_eq!(cut_off, b"\xa9\"}\n", "in the middle of a character");
        std::fs::write(&path, cut).unwrap();
        let cache = ReplyCache::open(Some(&path)).unwrap();
        assert_eq!((cache.find("a"), cache.find("b")), (Some("Score: 1\n".into()), None));
        cache.insert("b".into(), "Score: 3").unwrap();
        assert_eq!(ReplyCache::open(Some(&path)).unwrap().find("b"), Some("Score: 3".into()));
        std::fs::write(&path, "{}\n").unwrap();
        assert!(ReplyCache::open(Some(&path)).err().unwrap().starts_with("line 1: "));
    }
}
