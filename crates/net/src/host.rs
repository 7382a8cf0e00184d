//! Hosts and web pages that this process's own servers accept.
//!
//! A web page can let its own name point at a loopback address (DNS rebinding) and then read
//! whatever listens there. Its requests still carry that name in `Host`, so servers answer to known
//! names only. Addresses in numbers cannot be rebound and are always answered.
//!
//! A web page can also send requests to a server whose answers it cannot read. Browsers name the page
//! in `Origin`, and servers without a token refuse pages of other sites.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::header::{HOST, HeaderName, ORIGIN};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse;

/// Lets `routes`, which need no token, answer only requests for `localhost`, for addresses in numbers
/// and for the names in `allowed`. Requests of web pages are answered if the page comes from the same
/// server, from this machine or from a name in `allowed`. Others get 403 and the ways to reach the
/// server; those without a host get 400.
pub fn guard(routes: Router, allowed: &[String]) -> Router {
    guarded(routes, allowed, true)
}

/// [`guard`] for routes that need a token, which other web pages cannot send: `Origin` is not checked.
pub fn guard_hosts(routes: Router, allowed: &[String]) -> Router {
    guarded(routes, allowed, false)
}

fn guarded(routes: Router, allowed: &[String], checks_origin: bool) -> Router {
    let allowed: Arc<[String]> = allowed.iter().map(|name| name.to_ascii_lowercase()).collect();
    routes.layer(from_fn(move |request: Request, next: Next| {
        let refused = check(request.uri(), request.headers(), &allowed, checks_origin);
        async move {
            match refused {
                Ok(()) => next.run(request).await,
                Err(refused) => refused.into_response(),
            }
        }
    }))
}

/// The answer to a request that names no host, or a host or a web page that is not allowed.
fn check(uri: &Uri, headers: &HeaderMap, allowed: &[String], checks_origin: bool) -> Result<(), (StatusCode, String)> {
    let all = |name: HeaderName| headers.get_all(name).iter().map(|text| String::from_utf8_lossy(text.as_bytes()).into_owned());
    let asked = uri.authority().map(|authority| authority.as_str().to_owned());
    let asked: Vec<String> = asked.into_iter().chain(all(HOST)).collect();
    if asked.is_empty() {
        return Err((StatusCode::BAD_REQUEST, "the request has no Host header\n".to_owned()));
    }
    if let Some(host) = asked.iter().find(|host| !is_allowed(host, allowed)) {
        return Err(refusal("host", host, "ask for localhost or an IP address"));
    }
    match all(ORIGIN).find(|origin| checks_origin && !is_own(origin, &asked, allowed)) {
        Some(origin) => Err(refusal("web page", &origin, "without a token, this server answers pages of this machine alone")),
        None => Ok(()),
    }
}

fn refusal(kind: &str, name: &str, instead: &str) -> (StatusCode, String) {
    let name: String = name.chars().take(253).collect();
    let why = format!(
        "the {kind} {name:?} is not allowed here: {instead}; a run allows the names in net.allowed_hosts, and \
         `rollflow serve` any name with a token\n"
    );
    (StatusCode::FORBIDDEN, why)
}

/// A host's name in lower case, without its port.
fn name_of(host: &str) -> String {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    name.trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase()
}

fn is_known(name: &str, allowed: &[String]) -> bool {
    name == "localhost" || name.ends_with(".localhost") || allowed.iter().any(|other| other == name)
}

fn is_allowed(host: &str, allowed: &[String]) -> bool {
    let name = name_of(host);
    is_known(&name, allowed) || name.parse::<IpAddr>().is_ok()
}

/// Returns true if the web page of this origin comes from the server itself, which the request calls
/// `asked`, from this machine or from an allowed name. Any site can have an address in numbers.
fn is_own(origin: &str, asked: &[String], allowed: &[String]) -> bool {
    // Pages without a site have the origin "null".
    let Some((_, host)) = origin.split_once("://") else { return false };
    let name = name_of(host);
    let is_here = name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    is_here || is_known(&name, allowed) || asked.iter().any(|asked| asked == host)
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

    #[test]
    fn web_pages_of_other_sites_are_refused_where_there_is_no_token() {
        let allowed = ["trainer-0.cluster.local".to_owned()];
        let asks = |host: &str, origin: &str, checks_origin: bool| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, host.parse().unwrap());
            headers.insert(ORIGIN, origin.parse().unwrap());
            check(&Uri::from_static("/pause_generation"), &headers, &allowed, checks_origin)
        };
        let here = ["http://127.0.0.1:30000", "http://localhost:8888", "http://[::1]:80"];
        for origin in here.into_iter().chain(["https://Trainer-0.cluster.local", "http://10.2.3.4:30000"]) {
            assert_eq!(asks("10.2.3.4:30000", origin, true), Ok(()), "{origin}");
        }
        for origin in ["null", "https://evil.example", "http://203.0.113.7", "http://localhost.evil.example", "localhost"] {
            let (status, why) = asks("127.0.0.1:30000", origin, true).unwrap_err();
            assert!(status == StatusCode::FORBIDDEN && why.contains(&format!("the web page {origin:?}")), "{origin}: {why}");
            assert_eq!(asks("127.0.0.1:30000", origin, false), Ok(()), "{origin}");
        }
    }
}
