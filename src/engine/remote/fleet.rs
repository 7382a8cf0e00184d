//! Many engines as one.

use crate::data::Version;

/// What engines elsewhere read weights from: nothing. It says which version they were brought to, and is published once that was verified (law V4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synced {
    /// The version.
    pub version: Version,
}
