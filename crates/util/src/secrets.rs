//! Text that gives a secret away: the one list of signs, and the one function that hides what they
//! find.
//!
//! Recipes that hold a secret are rejected, and messages, logs and names of servers show `…`
//! instead.

use std::ops::Range;

use regex::Regex;

/// Signs of a secret: texts of which one must be there, the expression whose group is the secret,
/// and a description. Most texts hold none of the first, and an expression takes a millisecond to
/// compile.
const SIGNS: [(&[&str], &str, &str); 5] = [
    (&["://"], r"[A-Za-z][A-Za-z0-9+.-]*://([^/\s?#]*)@", "an address with a name or a password in it"),
    (
        &["://"],
        r"(?i)://[^\s?]*\?\S*?\b(?:[a-z_-]*(?:token|secret|password|api[_-]?key)|key|auth|sig|signature)=([^&\s#]+)",
        "an address with a secret in it",
    ),
    (
        &["://"],
        r#"(?i)://[^\s?#"']*?/(?:[a-z_-]*token|secret|password|api[_-]?key|key)s?/([^\s/?#"']+)"#,
        "an address with a secret in it",
    ),
    (
        &["=", "--"],
        r#"(?:^|[\s"'\[,=])(?:[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|_KEY|CREDENTIALS)=|--(?:api-key|hf-token|auth-token|access-token|token|password|secret)(?:=|["',\s]+))([^\s"'\],-][^\s"'\],]*)"#,
        "a secret, by its name",
    ),
    (
        &["sk-", "hf_", "gh", "glpat-", "xox", "AKIA", "eyJ"],
        r"\b(sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{20,}|AKIA[0-9A-Z]{16}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})",
        "what looks like a key",
    ),
];

/// Addresses, whose path is the group.
const ADDRESS: &str = r#"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#"']+(/[^\s?#"'<>]*)"#;

/// Settings of TOML whose name says that they are secret, with their value: in messages only, since
/// names of settings are judged by [`is_secret_name`] where the settings themselves are at hand.
const ASSIGNED: &str = r#"(?i)(?:^|[\s{,."'])(?:(?:[a-z0-9_-]*[_-])?(?:api[_-]?key|apikey|(?:access|private|secret)[_-]?key|secret|password|passwd|credentials?|(?:api|auth|access|bearer|session|hf|hub|secret)[_-]?token)|token)["']?\s*=\s*(?:"([^"]+)"|'([^']+)'|([^\s"',}\]]+))"#;

/// Names of settings whose value is a secret.
const NAMES: &str = r"(?i)^(?:[a-z0-9_-]*[_-])?(?:api[_-]?key|apikey|(?:access|private|secret)[_-]?key|secret|password|passwd|credentials?|(?:api|auth|access|bearer|session|hf|hub|secret)[_-]?token)$|^token$";

/// Shortest run of letters and digits in a path that is taken for a secret if it is mixed.
const RANDOM: usize = 20;

/// The places of secrets in `text`, in their order, each with a description.
pub fn find(text: &str) -> Vec<(Range<usize>, &'static str)> {
    let mut found: Vec<(Range<usize>, &'static str)> = Vec::new();
    for (needed, sign, what) in SIGNS {
        if !needed.iter().any(|part| text.contains(part)) {
            continue;
        }
        let Ok(sign) = Regex::new(sign) else { continue };
        found.extend(sign.captures_iter(text).filter_map(|sign| Some((sign.get(1)?.range(), what))));
    }
    if text.contains("://")
        && let Ok(address) = Regex::new(ADDRESS)
    {
        let paths = address.captures_iter(text).filter_map(|address| address.get(1));
        let segments = paths.flat_map(|path| {
            path.as_str().split('/').map(move |segment| {
                let start = path.start() + (segment.as_ptr() as usize - path.as_str().as_ptr() as usize);
                (start..start + segment.len(), segment)
            })
        });
        let random = segments.filter(|(_, segment)| is_random(segment));
        found.extend(random.map(|(range, _)| (range, "an address with what looks like a key in its path")));
    }
    found.sort_by_key(|(range, _)| (range.start, std::cmp::Reverse(range.end)));
    found
}

/// Returns true if a run of letters and digits is too long and too mixed for a word or a version.
fn is_random(segment: &str) -> bool {
    segment.split(|c: char| !c.is_ascii_alphanumeric()).any(|run| {
        let digits = run.bytes().filter(u8::is_ascii_digit).count();
        run.len() >= RANDOM && digits >= 3 && run.len() - digits >= 3
    })
}

/// `text` with … instead of every secret, for messages, logs and names.
pub fn masked(text: &str) -> String {
    let mut hidden: Vec<Range<usize>> = find(text).into_iter().map(|(range, _)| range).collect();
    if text.contains('=')
        && let Ok(assigned) = Regex::new(ASSIGNED)
    {
        hidden.extend(assigned.captures_iter(text).filter_map(|found| Some(found.iter().skip(1).flatten().next()?.range())));
    }
    hidden.retain(|range| !range.is_empty());
    hidden.sort_by_key(|range| (range.start, std::cmp::Reverse(range.end)));
    let (mut shown, mut from) = (String::with_capacity(text.len()), 0);
    for range in hidden {
        // Two signs may find the same text.
        if range.start >= from {
            shown.push_str(&text[from..range.start]);
            shown.push('…');
        }
        from = from.max(range.end);
    }
    shown.push_str(&text[from..]);
    shown
}

/// Returns true if a setting of this name holds a secret: `api_key`, `token`, `password` and the
/// like.
///
/// Tokens of a vocabulary, such as `bos_token`, are none.
pub fn is_secret_name(name: &str) -> bool {
    const NEEDED: [&str; 5] = ["key", "secret", "passw", "credential", "token"];
    let lower = name.to_ascii_lowercase();
    NEEDED.iter().any(|part| lower.contains(part)) && Regex::new(NAMES).is_ok_and(|names| names.is_match(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH";

    #[test]
    fn signs_are_regular_expressions_with_a_group() {
        let all = SIGNS.iter().map(|(_, sign, _)| *sign).chain([ADDRESS]);
        assert!(all.into_iter().all(|sign| Regex::new(sign).unwrap().captures_len() == 2));
        assert!([NAMES, ASSIGNED].into_iter().all(|sign| Regex::new(sign).is_ok()));
    }

    #[test]
    fn secrets_are_hidden_wherever_they_are() {
        for text in [
            "http://me:hunter2@host:80/x".to_owned(),
            "http://host/score?a=1&api_key=hunter2".to_owned(),
            "https://host/token/hunter2/score and more".to_owned(),
            "http://host/services/T0a1b2c3/hunter2aB3dE5fG7hI9jK1lM/score".to_owned(),
            "['http://host/4f9d2c81hunter2b7e6a5039d']".to_owned(),
            "HF_TOKEN=hunter2".to_owned(),
            "--api-key hunter2".to_owned(),
            "engine.token=hunter2".to_owned(),
            "chat.variables = { name = 'x', api_key = \"very hunter2\" }".to_owned(),
            "password='hunter2'".to_owned(),
            format!("the key {KEY}"),
        ] {
            let shown = masked(&text);
            assert!(!shown.contains("hunter2") && !shown.contains(KEY) && shown.contains('…'), "{shown}");
        }
        let text = "a http://host/0123456789abcdefghijklmno/score?key=hunter2&b=1 c";
        assert_eq!(masked(text), "a http://host/…/score?key=…&b=1 c");
    }

    #[test]
    fn what_recipes_hold_is_no_secret() {
        for text in [
            "http://127.0.0.1:8000/v1/chat/completions",
            "http://host/score?shard=3&tokens=5",
            "https://host/models/Llama-3-8B-Instruct-Gradient-1048k/v1",
            "https://host/v1/internationalisation/score",
            "Qwen/Qwen2.5-0.5B-Instruct@main",
            "openai/gsm8k@0123456789abcdef0123456789abcdef01234567",
            "TOKENIZERS_PARALLELISM=false",
            "train.loss={ kind = 'dapo' }",
            "--max-num-batched-tokens 8192",
            "REWARD_TOKEN",
            "token_env = 'REWARD_TOKEN'",
            "variables = { bos_token = '<s>', max_tokens = 5 }",
            "models/hf_converted_and_merged_and_cast_to_bf16",
            "Score ([0-9]+): sk-learn's own",
        ] {
            assert_eq!((masked(text).as_str(), find(text)), (text, Vec::new()));
        }
    }

    #[test]
    fn settings_are_secret_by_their_names_and_tokens_of_a_vocabulary_are_not() {
        let secret =
            ["api_key", "API-KEY", "token", "openai_api_key", "password", "db_password", "auth_token", "secret", "hf_token"];
        assert!(secret.into_iter().all(is_secret_name));
        let plain =
            ["bos_token", "eos_token", "max_tokens", "token_env", "keyword", "stop_token_ids", "image_token", "key", "secretary"];
        assert!(!plain.into_iter().any(is_secret_name));
    }
}
