//! `[net]`: how a run reaches servers, and who reaches its own.

use std::path::PathBuf;

use super::declare::section;

section! {
    /// Connections to servers, and to the servers of this run.
    pub struct Net {
        /// A PEM file of certificate authorities that are trusted in addition to the system's, by every `https://` address of the recipe and by
        /// downloads. The environment variable SSL_CERT_FILE replaces the system's.
        ca_file: Option<PathBuf> = None;
        /// Host names under which this run's own servers (metrics, agents) may be asked, besides `localhost` and addresses in numbers. Other names
        /// are refused, so that no web page can read them by a name of its own.
        allowed_hosts: Vec<String> = Vec::new();
    }
}
