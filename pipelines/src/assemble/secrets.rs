//! Tokens that a recipe names and the environment holds.

use anyhow::{Context, Result};
use rollflow::net::Endpoint;
use rollflow::recipe::Net;

/// Reads the environment variable `name`, the token for `url`.
pub fn secret(name: &str, url: &str) -> Result<String> {
    let value = std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    value.with_context(|| format!("the environment has no {name}, which token_env names for {url}"))
}

/// The server at `url`, which knows its callers by the token that the variable `token_env` holds.
pub fn endpoint(url: &str, token_env: Option<&String>, net: &Net) -> Result<Endpoint> {
    let mut endpoint = Endpoint::new(url);
    endpoint.ca_file.clone_from(&net.ca_file);
    let Some(name) = token_env else { return Ok(endpoint) };
    endpoint.with_token(&secret(name, url)?).with_context(|| format!("what {name} holds can't be sent in a header"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_what_the_named_variable_holds() {
        let of = |name: Option<&str>| endpoint("http://there", name.map(str::to_owned).as_ref(), &Net::default());
        assert_ne!(of(None).unwrap(), of(Some("HOME")).unwrap());
        let missing = of(Some("ROLLFLOW_NO_SUCH_VARIABLE")).unwrap_err().to_string();
        assert!(missing.contains("ROLLFLOW_NO_SUCH_VARIABLE") && missing.contains("http://there"), "{missing}");
    }
}
