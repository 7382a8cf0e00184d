//! Budget of steps, which bounds the cost of any answer.

/// Most steps of one comparison, apart from the step that exceeds the budget. A step is about one
/// character, one node of an expression, or one product of machine words.
pub const MOST_WORK: u64 = 1 << 18;

/// Steps taken so far. Once the budget is spent, no text has a meaning, and nothing is equal.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) spent: u64,
}

impl Work {
    /// Takes steps from the budget, before they are done; none if it is spent.
    pub(crate) fn spend(&mut self, steps: u64) -> Option<()> {
        self.spent = self.spent.saturating_add(steps);
        (!self.is_spent()).then_some(())
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.spent > MOST_WORK
    }
}
