//! The bearer token of a server, and the layer that requires it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::ServeError;
use super::reply::Refusal;
use crate::util::reading;

/// Longest token file, in bytes.
const LONGEST: u64 = 4096;

/// Secret that clients send as `Authorization: Bearer …`. Only its hash is kept, and it is never shown.
#[derive(Clone)]
pub struct BearerToken(Arc<[u8]>);

impl BearerToken {
    /// The first line of a file, without blanks around it.
    pub fn from_file(path: &Path) -> Result<Self, ServeError> {
        let from = path.display().to_string();
        let bytes = reading::read(path, LONGEST);
        let bytes =
            bytes.map_err(|error| ServeError::Token { from: from.clone(), problem: format!("can't be read: {error}") })?;
        BearerToken::new(String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default(), from)
    }

    /// The value of an environment variable.
    pub fn from_env(name: &str) -> Result<Self, ServeError> {
        let from = format!("the environment variable {name}");
        match std::env::var(name) {
            Ok(value) => BearerToken::new(&value, from),
            Err(_) => Err(ServeError::Token { from, problem: "is not set".to_owned() }),
        }
    }

    fn new(token: &str, from: String) -> Result<Self, ServeError> {
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let problem = "must be one word of printable ASCII characters".to_owned();
            return Err(ServeError::Token { from, problem });
        }
        Ok(BearerToken(hash(token)))
    }

    /// Returns true if the headers hold this token. The time depends on neither token.
    fn is_in(&self, headers: &HeaderMap) -> bool {
        // As the Tinker SDK sends it.
        if let Some(key) = headers.get("x-api-key").and_then(|key| key.to_str().ok()) {
            return hash(key.trim()).ct_eq(&self.0).into();
        }
        let value = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let given = value.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        hash(given.map_or("", |(_, token)| token.trim())).ct_eq(&self.0).into()
    }
}

impl fmt::Debug for BearerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BearerToken(…)")
    }
}

fn hash(token: &str) -> Arc<[u8]> {
    Sha256::digest(token.as_bytes()).to_vec().into()
}

/// Lets `routes` answer only requests with the token, except `GET /health`. Others get 401.
pub fn authenticated(routes: Router, token: BearerToken) -> Router {
    routes.layer(from_fn(move |request: Request, next: Next| {
        let allowed = request.uri().path() == "/health" || token.is_in(request.headers());
        async move {
            match allowed {
                true => next.run(request).await,
                false => Refusal::new(401, "the token is missing or wrong; send it as `Authorization: Bearer …`").into_response(),
            }
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_is_accepted_and_it_is_never_shown() {
        let token = BearerToken::new(" one-secret\n", "a test".to_owned()).unwrap();
        let is_in = |value: &str| token.is_in(&HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())]));
        assert!(is_in("Bearer one-secret") && is_in("bearer  one-secret"));
        for wrong in ["Bearer one-secre", "Bearer one-secret2", "Bearer ", "Bearer", "one-secret", "Basic one-secret"] {
            assert!(!is_in(wrong), "{wrong}");
        }
        assert!(!token.is_in(&HeaderMap::new()) && !format!("{token:?}").contains("secret"));
        for unusable in ["", " \n", "two words", "é"] {
            assert!(BearerToken::new(unusable, "a test".to_owned()).is_err(), "{unusable:?}");
        }
    }
}
