//! The Tinker protocol: a trainer at a URL.
//!
//! Every operation answers with a *future*, which is asked for until it is there. Operations on a
//! model are numbered (`seq_id`): a server runs them in this order, and most servers run a number
//! once however often it arrives. Messages are JSON; newer SDKs send passes and read passes and
//! samples as protobuf, the [`proto`] dialect.
//!
//! Source: the `tinker` SDK, 0.18 (JSON) and 0.38 (protobuf).

mod connection;
mod error;
pub mod message;
pub mod proto;
mod tensor;

pub use connection::{Connection, Effect, Encoding, Patience};
pub use error::TinkerError;
