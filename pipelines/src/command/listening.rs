//! Arguments of commands that serve: where to listen, and the token that clients send.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use rollflow::net::Endpoint;
use rollflow::serve::BearerToken;

use super::refused;

/// The token of a server.
#[derive(Args)]
pub struct TokenArgs {
    /// File whose first line is a token that clients must send as a bearer token.
    #[arg(long, value_name = "FILE", conflicts_with = "token_env")]
    token_file: Option<PathBuf>,
    /// Environment variable that holds the token.
    #[arg(long, value_name = "NAME")]
    token_env: Option<String>,
}

impl TokenArgs {
    /// The token, if one is given.
    pub fn token(&self) -> Result<Option<BearerToken>> {
        let token = match (&self.token_file, &self.token_env) {
            (Some(file), _) => Some(BearerToken::from_file(file)),
            (None, Some(name)) => Some(BearerToken::from_env(name)),
            (None, None) => None,
        };
        token.transpose().map_err(|error| refused(error.to_string()))
    }

    /// The server at `url`, which gets the token with every request.
    pub fn endpoint(&self, url: &str) -> Result<Endpoint> {
        let endpoint = Endpoint::new(url);
        let Some(token) = self.text()? else { return Ok(endpoint) };
        endpoint.with_token(&token).ok_or_else(|| refused("the token cannot be sent in a header"))
    }

    /// The token itself, for other servers.
    pub fn text(&self) -> Result<Option<String>> {
        // It checks the token; a server keeps only its hash.
        self.token()?;
        let text = match (&self.token_file, &self.token_env) {
            (Some(file), _) => std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?,
            (None, Some(name)) => std::env::var(name).unwrap_or_default(),
            (None, None) => return Ok(None),
        };
        Ok(Some(text.lines().next().unwrap_or_default().trim().to_owned()))
    }
}

/// The address that `option` names.
pub fn address(option: &str, named: &str) -> Result<SocketAddr> {
    let wrong = |why: String| refused(format!("{option} {named:?}: {why}; write HOST:PORT, as in 127.0.0.1:30000"));
    let mut all = named.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    all.next().ok_or_else(|| wrong("it has no address".to_owned()))
}
