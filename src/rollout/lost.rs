//! Samples that an engine or an environment lost.

use crate::data::{Sample, Status};

/// Metadata key of the reason why an engine refused a sample.
pub const REFUSED: &str = "refused";

/// Metadata key of the reason why a rollout's environment failed.
pub const ENVIRONMENT_FAILURE: &str = "environment_failure";

/// Returns the reason why an engine or an environment lost a sample. A lost sample is incomplete
/// and earns no reward.
pub fn why_lost(sample: &Sample) -> Option<&str> {
    let reason = |key| sample.metadata.get(key).and_then(|reason| reason.as_str());
    let refused = reason(REFUSED).filter(|_| sample.status == Status::Aborted);
    refused.or_else(|| reason(ENVIRONMENT_FAILURE))
}
