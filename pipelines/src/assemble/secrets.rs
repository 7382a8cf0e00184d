//! Tokens that a recipe names and the environment holds.

use anyhow::{Context, Result};
use rollflow::net::Endpoint;
use rollflow::recipe::Net;

/// The server at `url`, which knows its callers by the token that the variable `token_env` holds.
///
/// # Errors
/// If the environment lacks the variable, or no header can hold what it contains.
pub fn endpoint(url: &str, token_env: Option<&String>, net: &Net) -> Result<Endpoint> {
    let mut endpoint = Endpoint::new(url);
    endpoint.ca_file.clone_from(&net.ca_file);
    let Some(name) = token_env else { return Ok(endpoint) };
    let value = std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    let value = value.with_context(|| format!("the environment has no {name}, which token_env names for {url}"))?;
    endpoint.with_token(&value).with_context(|| format!("what {name} holds can't be sent in a header"))
}
