//! `[net]`: connections to servers, and the host names of this run's own servers.

use std::path::PathBuf;

use crate::settings::declare::section;

section! {
    /// Connections to servers, and the servers of this run.
    pub struct Net {
        /// PEM file of certificate authorities that are trusted in addition to the system's, for
        /// every `https://` address of the recipe and for downloads. The environment variable
        /// SSL_CERT_FILE replaces the system's.
        ca_file: Option<PathBuf> = None;
        /// Host names for this run's own servers (metrics, agents), in addition to `localhost` and
        /// numeric addresses. Requests with other host names are rejected, so that no web page can
        /// read them by a name of its own.
        allowed_hosts: Vec<String> = Vec::new();
    }
}
