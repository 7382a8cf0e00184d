//! What a rank holds of a trainer's state, which `[ranks]` divides.

use crate::ranks::{Place, Shard};
use crate::recipe::plan::Plan;

/// Number of ranks, if this process has one: launchers tell those that they start.
pub(super) fn here() -> Option<usize> {
    Place::of_environment().ok().flatten().map(|place| place.size)
}

/// Division of a trainer's state among ranks.
#[derive(Clone, Copy)]
pub(super) struct Division {
    shard: Shard,
    /// Number of ranks, if it is known.
    ranks: Option<u64>,
    /// Ranks that share a copy of the state.
    parts: u64,
}

impl Division {
    /// Among `ranks`. Where their number is not known, nothing is smaller yet.
    pub fn of(plan: &Plan, ranks: Option<usize>) -> Self {
        let parts = ranks.map_or(1, |size| plan.ranks.mesh(size).map_or(size, |[_, parts]| parts));
        // A run of one process ignores the section.
        let shard = if ranks == Some(1) { Shard::Nothing } else { plan.ranks.shard };
        Division { shard, ranks: ranks.map(|ranks| ranks as u64), parts: parts as u64 }
    }

    /// What is divided.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns true if ranks divide the parameters, too.
    pub fn of_parameters(&self) -> bool {
        self.shard == Shard::Parameters
    }

    /// Ranks that share a step's micro-batches.
    pub fn ranks(&self) -> u64 {
        self.ranks.unwrap_or(1).max(1)
    }

    /// Of `numbers` of moments, or of the gradient's sum, those that a rank holds.
    pub fn of_moments(&self, numbers: u64) -> u64 {
        if self.shard == Shard::Nothing { numbers } else { numbers.div_ceil(self.parts.max(1)) }
    }

    /// Of `numbers` of parameters, those that a rank holds.
    pub fn held(&self, numbers: u64) -> u64 {
        if self.of_parameters() { self.of_moments(numbers) } else { numbers }
    }

    /// Returns true if ranks divide the state, and their number is not known.
    pub fn is_open(&self) -> bool {
        self.shard != Shard::Nothing && self.ranks.is_none()
    }

    /// The derivation `why` of a size, of which a rank holds a part if `divided`.
    pub fn explained(&self, why: String, divided: bool) -> String {
        match divided && self.shard != Shard::Nothing {
            true if self.is_open() => format!("{why}; ranks divide them"),
            true if self.parts > 1 => format!("{why}, one of {} parts", self.parts),
            _ => why,
        }
    }
}
