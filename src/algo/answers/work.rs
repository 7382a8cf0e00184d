//! A budget of steps, so that no answer costs more than a bound that is known before it is read.

/// Steps that one judgement may take at most, but for one more that finds the budget spent. A step is about a character that is read,
/// a part of an expression that is visited, or a product of two machine words.
pub const MOST_WORK: u64 = 1 << 18;

/// An answer that is not understood, or whose meaning would cost more than the budget. Such answers are compared as text alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unreadable;

/// What was spent so far.
#[derive(Debug, Default)]
pub(super) struct Work {
    spent: u64,
}

impl Work {
    /// Takes so many steps from the budget, before they are done.
    pub(super) fn spend(&mut self, steps: u64) -> Result<(), Unreadable> {
        self.spent = self.spent.saturating_add(steps);
        if self.spent > MOST_WORK { Err(Unreadable) } else { Ok(()) }
    }

    /// All steps that were asked for.
    pub(super) fn spent(&self) -> u64 {
        self.spent
    }
}
