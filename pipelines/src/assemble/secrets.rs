//! Tokens that a recipe names and the environment holds.

use anyhow::{Context, Result};
use rollflow::net::{Endpoint, Token};
use rollflow::recipe::Net;

/// Reads the environment variable `name`, the token for `url`.
pub fn secret(name: &str, url: &str) -> Result<String> {
    let value = std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    value.with_context(|| format!("the environment has no {name}, which token_env names for {url}"))
}

/// The server at `url`, which knows its callers by the token that `token_env` names.
pub fn endpoint(url: &str, token_env: Option<&String>, net: &Net) -> Result<Endpoint> {
    Ok(Endpoint { token: token(token_env, url)?, ca_file: net.ca_file.clone(), ..Endpoint::new(url) })
}

/// The token that a variable holds; none where no variable is named.
fn token(name: Option<&String>, url: &str) -> Result<Option<Token>> {
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
