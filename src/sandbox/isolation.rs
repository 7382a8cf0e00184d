//! What a sandbox is made of on this machine.

use std::fmt;

use super::Walls;

/// The layers around a program, as they were set up and reported by the run that tried them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Isolation {
    /// Which walls.
    pub walls: Walls,
    /// Every layer that stands, innermost last.
    pub layers: Vec<String>,
    /// Stronger walls that could not be had, and why.
    pub missing: Vec<String>,
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.walls, self.layers.join("; "))?;
        if self.missing.is_empty() { Ok(()) } else { write!(f, "; not had: {}", self.missing.join("; ")) }
    }
}
