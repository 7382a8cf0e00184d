//! What a recipe must not hold: passwords, tokens and keys. It is written into its run's folder and stands on the run's page, so whatever is in it
//! is told to all who see those.

use regex::{Captures, Regex};

use super::document::{Node, Value};
use super::error::RecipeError;
use super::section::join;

/// What gives a secret away, and what it is. The group is the secret itself.
const SIGNS: [(&str, &str); 4] = [
    (r"[A-Za-z][A-Za-z0-9+.-]*://([^/\s?#]*)@", "an address with a name or a password in it"),
    (
        r"(?i)://[^\s?]*\?\S*?\b(?:[a-z_-]*(?:token|secret|password|api[_-]?key)|key|auth|sig|signature)=([^&\s#]+)",
        "an address with a secret in it",
    ),
    (
        r#"(?:^|[\s"'\[,=])(?:[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|_KEY|CREDENTIALS)=|--(?:api-key|hf-token|auth-token|access-token|token|password|secret)(?:=|["',\s]+))([^\s"'\],-][^\s"'\],]*)"#,
        "a secret, by its name",
    ),
    (
        r"\b(sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{20,}|AKIA[0-9A-Z]{16}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})",
        "what looks like a key",
    ),
];

const HELP: &str = "a recipe is written down with its run, for everybody to read. Put this into an environment variable: programs that a run starts \
                    find it there, and `token_env` names it where there is such a key";

fn signs() -> impl Iterator<Item = (Regex, &'static str)> {
    SIGNS.iter().filter_map(|(sign, what)| Some((Regex::new(sign).ok()?, *what)))
}

/// `text` with … in the place of every secret, for messages.
pub fn masked(text: &str) -> String {
    signs().fold(text.to_owned(), |text, (sign, _)| {
        let hide = |found: &Captures| {
            let secret = found.get(1).map_or("", |secret| secret.as_str());
            if secret.is_empty() { found[0].to_owned() } else { found[0].replacen(secret, "…", 1) }
        };
        sign.replace_all(&text, hide).into_owned()
    })
}

/// An error for every text of a recipe that seems to hold a secret, without that in it.
pub(crate) fn errors(root: &Node) -> Vec<RecipeError> {
    let mut errors = Vec::new();
    look(root, "", &signs().collect::<Vec<_>>(), &mut errors);
    errors
}

fn look(node: &Node, path: &str, signs: &[(Regex, &str)], errors: &mut Vec<RecipeError>) {
    let found = |text: &str| signs.iter().find(|(sign, _)| sign.is_match(text)).map(|(_, what)| *what);
    let mut refuse = |node: &Node, key: &str, what: &str| {
        let message = format!("`{key}` holds {what}");
        errors.push(RecipeError { place: node.place.clone(), key: key.to_owned(), message, help: HELP.to_owned() });
    };
    match &node.value {
        Value::Text(text) => found(text).into_iter().for_each(|what| refuse(node, path, what)),
        Value::Table(keys) => keys.iter().for_each(|(key, entry)| look(&entry.node, &join(path, key), signs, errors)),
        Value::List(items) => {
            // A flag, and its value as the next word.
            for (at, pair) in items.windows(2).enumerate() {
                if let [Value::Text(flag), Value::Text(value)] = [&pair[0].value, &pair[1].value]
                    && flag.starts_with("--")
                    && found(flag).is_none()
                    && found(value).is_none()
                    && let Some(what) = found(&format!("{flag} {value}"))
                {
                    refuse(&pair[0], &format!("{path}[{at}]"), what);
                }
            }
            for (at, item) in items.iter().enumerate() {
                look(item, &format!("{path}[{at}]"), signs, errors);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::document;

    const KEY: &str = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH";

    #[test]
    fn signs_are_regular_expressions_with_a_group() {
        assert!(signs().count() == SIGNS.len() && signs().all(|(sign, _)| sign.captures_len() == 2));
    }

    #[test]
    fn secrets_are_found_wherever_they_stand_and_shown_nowhere() {
        let text = format!(
            "[engine]\nurls = ['http://127.0.0.1:1', 'http://me:hunter2@host:80']\nenv = ['OMP_NUM_THREADS=2', 'HF_TOKEN=hunter2']\n\
             flags = ['--dtype', 'float32', '--api-key', 'hunter2']\n[reward]\nurl = 'http://host/score?a=1&api_key=hunter2'\n\
             [environment]\ncommand = ['agent', '--token=hunter2', '{KEY}']"
        );
        let root = document::parse("r.toml", &text, &[]).expect("it is TOML");
        let errors = errors(&root);
        let mut found: Vec<&str> = errors.iter().map(|error| error.key.as_str()).collect();
        found.sort_unstable();
        let expected = [
            "engine.env[1]",
            "engine.flags[2]",
            "engine.urls[1]",
            "environment.command[1]",
            "environment.command[2]",
            "reward.url",
        ];
        assert_eq!(found, expected);
        assert!(errors.iter().all(|error| !error.to_string().contains("hunter2") && !error.to_string().contains(KEY)));
        let masked = masked(&text);
        assert!(!masked.contains("hunter2") && !masked.contains(KEY), "{masked}");
        assert!(
            masked.contains("OMP_NUM_THREADS=2") && masked.contains("http://…@host:80") && masked.contains("a=1"),
            "{masked}"
        );
    }

    #[test]
    fn what_recipes_hold_is_no_secret() {
        let harmless = [
            "http://127.0.0.1:8000/v1/chat/completions",
            "http://host/score?shard=3&tokens=5",
            "Qwen/Qwen2.5-0.5B-Instruct@main",
            "TOKENIZERS_PARALLELISM=false",
            "train.loss={ kind = 'dapo' }",
            "--max-num-batched-tokens 8192",
            "REWARD_TOKEN",
            "models/hf_converted_and_merged_and_cast_to_bf16",
            "Score ([0-9]+): sk-learn's own",
        ];
        for text in harmless {
            assert_eq!(masked(text), text);
            assert!(signs().all(|(sign, _)| !sign.is_match(text)), "{text}");
        }
    }
}
