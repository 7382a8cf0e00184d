//! TLS: which certificates are trusted, and what to say of those that are not.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CertificateError, ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};
use rustls_platform_verifier::Verifier;

use rollflow_util::causes::causes;

use super::error::Fault;

const NO_AUTHORITY: &str = "set `net.ca_file` to a PEM file with the certificate of the authority that signed it, or the \
                            environment variable SSL_CERT_FILE";

/// TLS with HTTP/2 and HTTP/1.1 for a server that the system's certificates, those of
/// `SSL_CERT_FILE` or those in `ca_file` vouch for.
///
/// # Errors
///
/// [`Fault::Certificates`] if certificates cannot be read.
pub fn config(ca_file: Option<&Path>) -> Result<ClientConfig, Fault> {
    let own = ca_file.map(read).transpose()?.unwrap_or_default();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Verifier::new_with_extra_roots(own, provider).map_err(|error| refuse(match ca_file {
        Some(file) => format!("{} (net.ca_file): {error}", file.display()),
        None => format!(
            "{error}; install the system's certificates (package ca-certificates), or set SSL_CERT_FILE or `net.ca_file` to a PEM file"
        ),
    }))?;
    let mut config = builder()?.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// TLS that trusts no one, for clients that speak plain HTTP.
pub(super) fn none() -> Result<ClientConfig, Fault> {
    Ok(builder()?.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
}

fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, Fault> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    builder.map_err(|error| refuse(error.to_string()))
}

fn refuse(why: String) -> Fault {
    Fault::Certificates(why)
}

fn read(file: &Path) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let refuse = |why: String| refuse(format!("{} (net.ca_file): {why}", file.display()));
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let found = found.map_err(|error| refuse(error.to_string()))?;
    match found.is_empty() {
        true => Err(refuse("it holds no certificate; it must hold some in PEM, `-----BEGIN CERTIFICATE-----`".to_owned())),
        false => Ok(found),
    }
}

/// The fault of a connection that TLS ended, if TLS did.
pub(super) fn fault(error: &(dyn Error + 'static), host: &str) -> Option<Fault> {
    let error = causes(error).into_iter().find_map(|cause| cause.downcast_ref::<rustls::Error>())?;
    Some(match error {
        rustls::Error::InvalidCertificate(problem) => {
            let (why, advice) = judge(problem);
            Fault::Untrusted { host: host.to_owned(), why, advice: advice.to_owned() }
        }
        rustls::Error::InvalidMessage(_) => {
            Fault::Unreachable(format!("{host} does not answer as a TLS server ({error}); without TLS, write http://"))
        }
        other => Fault::Unreachable(format!("TLS with {host} failed: {other}")),
    })
}

fn judge(problem: &CertificateError) -> (String, &'static str) {
    match problem {
        // A bad signature is that of an authority which only has the name of a trusted one.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            ("no trusted authority signed it".to_owned(), NO_AUTHORITY)
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            (format!("it is for another name ({problem})"), "use the name that the certificate has")
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            ("it has expired".to_owned(), "renew it, or check this machine's clock")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            ("it is not valid yet".to_owned(), "check this machine's clock")
        }
        other => (other.to_string(), NO_AUTHORITY),
    }
}
