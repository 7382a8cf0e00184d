//! Errors of a ledger that does not balance (law D4), with the numbers.

use super::Totals;

/// Groups whose samples hold other tokens than were sampled for them. Found before the batch is
/// trained, so that nothing has changed yet.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "group {group}: {sampled} tokens were sampled for it, and {found} came to the trainer; a stage between them removed or changed \
     samples. Remove samples with `drop_samples` of `Group` or `Scored`, which counts their tokens by its reason"
)]
pub struct TokensMissing {
    /// The group's id.
    pub group: u64,
    /// Tokens that were sampled for it.
    pub sampled: u64,
    /// Tokens in its samples, those of dropped samples included.
    pub found: u64,
}

/// A ledger that accounts for more or fewer tokens or prompts than there were. The run ends, and
/// the step is not saved.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "the ledger does not balance: {tokens} of {} sampled tokens and {prompts} of {} prompts are accounted for by nothing (a negative number: \
     twice); the step is not saved. Resume from the newest checkpoint; if it happens again, report it with these sums: {totals:?}",
    totals.generated, totals.entered
)]
pub struct LedgerImbalance {
    /// Sampled tokens without a fate; negative if some have two.
    pub tokens: i64,
    /// Prompts without a fate; negative if some have two.
    pub prompts: i64,
    /// The sums that do not agree.
    pub totals: Box<Totals>,
}

impl Totals {
    /// Returns the sums, or an error if they do not agree.
    pub(super) fn balanced(self) -> Result<Totals, LedgerImbalance> {
        match self.imbalance() {
            (0, 0) => Ok(self),
            (tokens, prompts) => Err(LedgerImbalance { tokens, prompts, totals: Box::new(self) }),
        }
    }
}
