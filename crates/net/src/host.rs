//! Host names that this process's own servers accept.
//!
//! A web page can let its own name point at a loopback address (DNS rebinding) and then read
//! whatever listens there. Its requests still carry that name in `Host`, so servers answer to known
//! names only. Addresses in numbers cannot be rebound and are always answered.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::header::HOST;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;

/// Lets `routes` answer only requests for `localhost`, for addresses in numbers and for the names
/// in `allowed`. Others get 403 and the ways to reach the server; those without a host get 400.
pub fn guard(routes: Router, allowed: &[String]) -> Router {
    let allowed: Arc<[String]> = allowed.iter().map(|name| name.to_ascii_lowercase()).collect();
    routes.layer(from_fn(move |request: Request, next: Next| {
        let refused = check(request.uri(), request.headers(), &allowed);
        async move {
            match refused {
                Ok(()) => next.run(request).await,
                Err(refused) => refused.into_response(),
            }
        }
    }))
}

/// The answer to a request that names no host, or none that is allowed.
fn check(uri: &Uri, headers: &HeaderMap, allowed: &[String]) -> Result<(), (StatusCode, String)> {
    let named = headers.get_all(HOST).iter().map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
    let asked: Vec<String> = uri.authority().map(|authority| authority.as_str().to_owned()).into_iter().chain(named).collect();
    if asked.is_empty() {
        return Err((StatusCode::BAD_REQUEST, "the request has no Host header\n".to_owned()));
    }
    let Some(host) = asked.into_iter().find(|host| !is_allowed(host, allowed)) else { return Ok(()) };
    let host: String = host.chars().take(253).collect();
    Err((
        StatusCode::FORBIDDEN,
        format!(
            "the host {host:?} is not allowed here: ask for localhost or an IP address; a run allows the names in \
             net.allowed_hosts, and `rollflow serve` any name with a token\n"
        ),
    ))
}

fn is_allowed(host: &str, allowed: &[String]) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok() || allowed.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_answered_that_no_web_page_can_own() {
        let allowed = ["trainer-0.cluster.local".to_owned()];
        let own = "localhost localhost:9464 127.0.0.1:9464 [::1]:9464 10.2.3.4 Trainer-0.cluster.local:80 LOCALHOST.";
        let others = "evil.example:9464 localhost.evil.example 127.0.0.1.evil.example trainer-1.cluster.local 127.0.0.1@evil";
        for (hosts, answered) in [(own, true), (others, false)] {
            hosts.split(' ').for_each(|host| assert_eq!(is_allowed(host, &allowed), answered, "{host}"));
        }
        assert!(!is_allowed("", &allowed));
    }
}
