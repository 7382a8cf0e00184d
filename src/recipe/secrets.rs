//! Secrets in a recipe are rejected, because a recipe is written to its run folder and shown on the
//! run's page.

use crate::settings::document::{Node, Value};
use crate::settings::error::{Problem, RecipeError};
use crate::settings::section::join;
use crate::util::secrets::{find, is_secret_name};

const HELP: &str = "a recipe is written down with its run, for everybody to read. Put this into an environment variable: programs that a run starts \
                    find it there, and `token_env` names it where there is such a key";

/// An error for every text of a recipe that seems to hold a secret, without that in it.
pub(crate) fn errors(root: &Node) -> Vec<RecipeError> {
    let mut errors = Vec::new();
    look(root, "", &mut errors);
    errors
}

fn look(node: &Node, path: &str, errors: &mut Vec<RecipeError>) {
    let found = |text: &str| find(text).first().map(|(_, what)| *what);
    let refuse =
        |node: &Node, key: &str, what: &str| Problem::of(key, format!("`{key}` holds {what}"), HELP).at(node.place.clone());
    match &node.value {
        Value::Text(text) => errors.extend(found(text).map(|what| refuse(node, path, what))),
        Value::Table(keys) => {
            for (key, entry) in keys {
                let path = join(path, key);
                match &entry.node.value {
                    Value::Text(text) if is_secret_name(key) && !text.is_empty() => {
                        errors.push(refuse(&entry.node, &path, "a secret, by its name"));
                    }
                    _ => look(&entry.node, &path, errors),
                }
            }
        }
        Value::List(items) => {
            // A flag, and its value as the next word.
            for (at, pair) in items.windows(2).enumerate() {
                if let [Value::Text(flag), Value::Text(value)] = [&pair[0].value, &pair[1].value]
                    && flag.starts_with("--")
                    && found(flag).is_none()
                    && found(value).is_none()
                    && let Some(what) = found(&format!("{flag} {value}"))
                {
                    errors.push(refuse(&pair[0], &format!("{path}[{at}]"), what));
                }
            }
            for (at, item) in items.iter().enumerate() {
                look(item, &format!("{path}[{at}]"), errors);
            }
        }
        _ => {}
    }
}
