//! Failures of operations on a server of the Tinker API.

use rollflow_net::RemoteError;

/// An operation that failed. The server's name is in every message.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TinkerError {
    /// The server could not be asked, or its answer makes no sense.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The server took the operation and failed at it.
    #[error("{server} failed at {operation}: {message}")]
    Failed {
        /// Name of the server.
        server: String,
        /// The operation.
        operation: String,
        /// The server's own words.
        message: String,
    },
    /// The connection broke while an operation that changes the model was sent.
    #[error(
        "{server}: it is unknown whether {operation} was done, because the connection broke ({why}) and this server does not \
         recognise a repeated request; resume the run, which goes on from the last checkpoint"
    )]
    Unknown {
        /// Name of the server.
        server: String,
        /// The operation.
        operation: String,
        /// What happened to the connection.
        why: String,
    },
    /// The server no longer knows the operation.
    #[error(
        "{server} no longer knows of {operation}: it was restarted; resume the run, which continues from the last checkpoint"
    )]
    Forgotten {
        /// Name of the server.
        server: String,
        /// The operation.
        operation: String,
    },
    /// The server did not finish in time.
    #[error(
        "{server} did not finish {operation} within {seconds:.0} s (trainer.timeout); look into its log, or raise the timeout"
    )]
    Late {
        /// Name of the server.
        server: String,
        /// The operation.
        operation: String,
        /// The time limit.
        seconds: f64,
    },
    /// A file that is downloaded cannot be written.
    #[error("writing weights of {server}: {why}")]
    File {
        /// Name of the server.
        server: String,
        /// The machine's own message.
        why: String,
    },
    /// The server cannot do something that the run needs.
    #[error("{server} {lacks}")]
    Lacks {
        /// Name of the server.
        server: String,
        /// What is missing, and what to do.
        lacks: String,
    },
}
