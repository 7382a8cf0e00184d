//! Counts of dropped records, by reason.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// Why a record is left out: a few words, the same for all records of its kind.
pub type Skip = Cow<'static, str>;

/// Records left out, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skips(BTreeMap<Skip, u64>);

impl Skips {
    /// One more.
    pub fn count(&mut self, reason: Skip) {
        *self.0.entry(reason).or_default() += 1;
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Each reason with its count.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(reason, count)| (reason.as_ref(), *count))
    }

    pub(super) fn why_nothing(&self, fields: &[String]) -> String {
        match self.total() {
            0 => "it is empty (or the slice is)".to_owned(),
            _ => format!(
                "all records were skipped: {self}. Fields of the first: {}. If others are meant, name them in `columns`, as in \
                 columns = {{ prompt = \"query\", completion = \"reply\" }}",
                fields.join(", ")
            ),
        }
    }
}

impl fmt::Display for Skips {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let counts: Vec<String> = self.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        f.write_str(&counts.join(", "))
    }
}
