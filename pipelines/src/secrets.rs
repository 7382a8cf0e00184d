//! What recipes name and don't hold: tokens in the environment.

use anyhow::{Context, Result};
use rollflow::engine::remote::Token;

/// What the environment holds by this name, for whoever listens at `url`.
pub fn secret(name: &str, url: &str) -> Result<String> {
    let value = std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    value.with_context(|| format!("the environment has no {name}, which token_env names for {url}"))
}

/// The same as what is sent with every request; none where none is named.
pub fn token(name: Option<&String>, url: &str) -> Result<Option<Token>> {
    let read = |name: &String| -> Result<Token> {
        Token::new(&secret(name, url)?).with_context(|| format!("what {name} holds can't be sent in a header"))
    };
    name.map(read).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_what_the_named_variable_holds() {
        assert!(token(None, "http://there").unwrap().is_none());
        assert!(token(Some(&"HOME".to_owned()), "http://there").unwrap().is_some());
        let missing = token(Some(&"ROLLFLOW_NO_SUCH_VARIABLE".to_owned()), "http://there").unwrap_err().to_string();
        assert!(missing.contains("ROLLFLOW_NO_SUCH_VARIABLE") && missing.contains("http://there"), "{missing}");
    }
}
