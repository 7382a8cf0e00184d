//! The groups of a trainer's ranks, as a mesh of two numbers.
//!
//! Ranks `0..S` hold one copy of the divided state, ranks `S..2S` the next, and so on: rank
//! `r * S + s` holds part `s` of copy `r`. Hybrid sharding (HSDP) of torch's FSDP2 numbers ranks the
//! same way, so that the ranks of a copy can be those of one host.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Group, RankError, Ranks};

/// The groups that a rank of a trainer belongs to. Their calls come from one thread.
#[derive(Clone)]
pub struct Mesh {
    /// All ranks.
    pub all: Arc<Mutex<Group>>,
    /// The ranks that divide one copy of the state among them. [`Mesh::all`] if there is one copy.
    pub parts: Arc<Mutex<Group>>,
    /// The ranks that hold the same part, one of each copy. `None` if there is one copy.
    pub copies: Option<Arc<Mutex<Group>>>,
}

impl Ranks {
    /// Number of copies of the divided state, and of the ranks that share one, of `size` ranks.
    ///
    /// # Errors
    /// `size` is no multiple of `replicas`.
    pub fn mesh(&self, size: usize) -> Result<[usize; 2], RankError> {
        let copies = self.replicas.max(1);
        match size % copies {
            0 => Ok([copies, size / copies]),
            _ => Err(RankError::Mesh { size, copies }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_ranks_that_copies_cannot_share_is_refused_with_both_numbers() {
        let of = |replicas| Ranks { replicas, ..Ranks::default() };
        assert_eq!((of(1).mesh(3), of(2).mesh(6), of(3).mesh(3)), (Ok([1, 3]), Ok([2, 3]), Ok([3, 1])));
        let text = of(2).mesh(5).unwrap_err().to_string();
        assert!(text.contains("ranks.replicas is 2") && text.contains("5 ranks"), "{text}");
    }
}
