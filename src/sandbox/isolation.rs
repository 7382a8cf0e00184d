//! Isolation that a sandbox has on this machine.

use std::fmt;

use super::Walls;

/// Layers around a program, as reported by the run that checked them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Isolation {
    /// Kind of isolation.
    pub walls: Walls,
    /// Active layers, innermost last.
    pub layers: Vec<String>,
    /// Stronger kinds that are not available, with the reason.
    pub missing: Vec<String>,
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.walls, self.layers.join("; "))?;
        if self.missing.is_empty() { Ok(()) } else { write!(f, "; not had: {}", self.missing.join("; ")) }
    }
}
