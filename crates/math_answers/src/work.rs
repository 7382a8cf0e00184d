//! Budget of steps, which bounds the cost of any answer.

/// Most steps of one comparison, apart from the step that exceeds the budget. A step is about one
/// character, one node of an expression, or one product of machine words.
pub const MOST_WORK: u64 = 1 << 18;

/// An answer without a known meaning, or beyond the budget. It is compared as text only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable;

/// Steps taken so far.
#[derive(Debug, Default)]
pub(crate) struct Work {
    spent: u64,
}

impl Work {
    /// Takes steps from the budget, before they are done.
    pub(crate) fn spend(&mut self, steps: u64) -> Result<(), Unreadable> {
        self.spent = self.spent.saturating_add(steps);
        if self.spent > MOST_WORK { Err(Unreadable) } else { Ok(()) }
    }

    /// Returns the number of steps taken.
    pub(crate) fn spent(&self) -> u64 {
        self.spent
    }
}
