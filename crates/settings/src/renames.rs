//! Old names of keys. They are replaced in a document before anything reads it, with a warning for each.

use std::collections::BTreeMap;

use super::document::{Node, Table, Value};
use super::error::{Problem, RecipeError};
use super::section::{Section, join};

/// New names of keys by their old paths, in which `[]` is any place of a list.
#[derive(Default)]
pub struct Renames(BTreeMap<String, &'static str>);

impl Renames {
    /// Collects the old names in a section at the top of a document.
    pub fn of<S: Section>() -> Self {
        let mut renames = Renames::default();
        S::keys().renames("", &mut renames);
        renames
    }

    /// Adds the old name of a key of the section at `path`.
    pub fn add(&mut self, path: &str, old: &str, new: &'static str) {
        self.0.insert(join(path, old), new);
    }

    /// Returns `path` with current names, such as `train.ppo_epochs`.
    pub fn path(&self, path: &str) -> String {
        let (mut pattern, mut current) = (String::new(), String::new());
        for part in path.split('.') {
            let (name, index) = part.split_at(part.find('[').unwrap_or(part.len()));
            let old = join(&pattern, name);
            let name = self.0.get(&old).copied().unwrap_or(name);
            pattern = join(&pattern, name) + if index.is_empty() { "" } else { "[]" };
            current = join(&current, name) + index;
        }
        current
    }

    /// Gives every key below `node`, which is at `path`, its current name. Both names of one key are an error.
    pub fn apply(&self, path: &str, node: &mut Node, errors: &mut Vec<RecipeError>) {
        match &mut node.value {
            Value::List(items) => items.iter_mut().for_each(|item| self.apply(&format!("{path}[]"), item, errors)),
            Value::Table(table) => self.apply_to_table(path, table, errors),
            _ => {}
        }
    }

    /// Gives every key of a table at `path` its current name, and every key below.
    pub fn apply_to_table(&self, path: &str, table: &mut Table, errors: &mut Vec<RecipeError>) {
        let old: Vec<String> = table.keys().filter(|key| self.0.contains_key(&join(path, key))).cloned().collect();
        for old in old {
            let from = join(path, &old);
            let (Some(new), Some(entry)) = (self.0.get(&from), table.remove(&old)) else { continue };
            let to = join(path, new);
            if table.contains_key(*new) {
                let message = format!("`{from}` is the old name of `{to}`, which is given too");
                errors.push(Problem::of(from, message, format!("remove `{old}`")).at(entry.key_place));
                continue;
            }
            warn(&entry.key_place.to_string(), &from, &to);
            table.insert((*new).to_owned(), entry);
        }
        for (key, entry) in table {
            self.apply(&join(path, key), &mut entry.node, errors);
        }
    }
}

/// Warns that the old name of a key was used at `place`.
pub fn warn(place: &str, old: &str, new: &str) {
    tracing::warn!("{place}: `{old}` is now `{new}`; the old name is accepted for one release");
}
