//! Address of a server, its token, and trusted certificates.

use std::net::IpAddr;
use std::path::PathBuf;

use reqwest::Url;
use reqwest::header::HeaderValue;

/// The address of a server and how it is reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// `http://host:port/path` or `https://host/path`.
    pub url: String,
    /// Value of the header `Authorization` that every request carries; never shown
    /// ([`Endpoint::with_token`]).
    pub token: Option<HeaderValue>,
    /// A PEM file of certificate authorities that are trusted in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// Most idle connections that are kept open for later requests. Default: 64.
    pub idle_connections: usize,
    /// Longest page that is read, in bytes. Default: 64 MiB.
    pub longest_page: usize,
}

impl Endpoint {
    /// An endpoint without a token, trusted by the system's certificates.
    pub fn new(url: impl Into<String>) -> Self {
        Endpoint { url: url.into(), token: None, ca_file: None, idle_connections: 64, longest_page: 64 << 20 }
    }

    /// Sends `token` as `Authorization: Bearer …`. Returns `None` if a header cannot hold it.
    pub fn with_token(mut self, token: &str) -> Option<Self> {
        let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
        value.set_sensitive(true);
        self.token = Some(value);
        Some(self)
    }
}

impl<T: Into<String>> From<T> for Endpoint {
    fn from(url: T) -> Self {
        Endpoint::new(url)
    }
}

/// Validates a server's address: `http` or `https`, a host, and neither name nor password.
///
/// # Errors
///
/// The reason, which does not repeat a password.
pub fn check_url(url: &str) -> Result<(), String> {
    parse(url).map(drop)
}

pub(super) fn parse(url: &str) -> Result<Url, String> {
    let parsed = Url::parse(url.trim_end_matches('/')).map_err(|error| match url.contains("://") {
        true => error.to_string(),
        false => "it does not begin with http:// or https://".to_owned(),
    })?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err("it does not begin with http:// or https://".to_owned());
    }
    if parsed.host_str().is_none_or(str::is_empty) {
        return Err("it names no host".to_owned());
    }
    // Recipes, logs and reports show addresses.
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err(
            "it holds a name or a password; put a token into an environment variable and name that as token_env".to_owned()
        );
    }
    Ok(parsed)
}

/// Returns true if the host is this machine's loopback, which no proxy can reach for us.
pub(super) fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    address.map_or(host == "localhost" || host.ends_with(".localhost"), |address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_http_or_https_with_a_host_and_no_password() {
        for (url, why) in [
            ("http://127.0.0.1:9000/score", ""),
            ("https://judge", ""),
            ("http://[::1]:80/a?b=c", ""),
            ("https://api.example.com/v1/", ""),
            ("judge:9000/score", "does not begin with http://"),
            ("/score", "does not begin with http://"),
            ("ftp://judge", "does not begin with http://"),
            ("", "does not begin with http://"),
            ("http://", "host"),
            ("http://me:hunter2@judge", "a name or a password"),
        ] {
            let error = check_url(url).err().unwrap_or_default();
            assert!(error.is_empty() == why.is_empty() && error.contains(why) && !error.contains("hunter2"), "{url}: {error}");
        }
    }

    #[test]
    fn a_token_is_never_shown() {
        let endpoint = Endpoint::new("https://judge").with_token("hunter2").unwrap();
        assert!(endpoint.token.is_some() && !format!("{endpoint:?}").contains("hunter2"), "{endpoint:?}");
        assert_eq!(Endpoint::new("https://judge").with_token("two\nlines"), None);
    }

    #[test]
    fn only_loopback_addresses_bypass_the_proxy() {
        let loopback = |url: &str| is_loopback(&parse(url).unwrap());
        assert!(["http://127.0.0.1:1", "http://localhost", "https://[::1]:2", "http://a.localhost"].into_iter().all(loopback));
        assert!(!["http://10.0.0.1", "https://localhost.example.com", "http://host"].into_iter().any(loopback));
    }
}
