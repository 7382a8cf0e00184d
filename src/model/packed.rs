//! Sequences end to end, without a padding token among them.

use std::ops::Range;

use tch::{Device, Tensor};

use super::fused::Runs;
use super::upload;

/// Sequences laid end to end. A token attends only to its own sequence and to its prefix. Positions
/// count from 0, or from the end of the prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Token ids of all sequences.
    pub ids: Vec<i64>,
    /// Length of each sequence, at least 1; they sum to `ids.len()`.
    pub lens: Vec<usize>,
    /// Earlier sequence that each one continues. A prefix has no prefix itself. A prompt that many
    /// completions share is computed once.
    pub prefixes: Vec<Option<usize>>,
    /// Experts that computed the tokens before, if that is known.
    pub recorded: Option<PackedRoutes>,
}

/// Experts that computed packed tokens in another pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedRoutes {
    /// `[tokens, sparse layers, experts per token]`, with [`ANY_EXPERT`](crate::data::ANY_EXPERT) where one is
    /// not known.
    pub experts: Vec<u16>,
    /// If true, they compute the tokens again; otherwise the router's choice is only compared.
    pub follow: bool,
}

impl Packed {
    /// Packs sequences in the order given, leaving out empty ones.
    pub fn new<'a>(sequences: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let mut packed = Packed::default();
        for sequence in sequences.into_iter().filter(|sequence| !sequence.is_empty()) {
            packed.push(sequence.iter().map(|&id| i64::from(id)), None);
        }
        packed
    }

    /// Appends a sequence and returns its first row. Sequences with a prefix follow it directly, or
    /// after others of the same prefix.
    pub fn push(&mut self, ids: impl IntoIterator<Item = i64>, prefix: Option<usize>) -> usize {
        let first = self.ids.len();
        self.ids.extend(ids);
        self.lens.push(self.ids.len() - first);
        self.prefixes.push(prefix);
        first
    }

    /// Returns true if a sequence has a prefix.
    pub fn shares(&self) -> bool {
        self.prefixes.iter().any(Option::is_some)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Row of each sequence's first token.
    pub fn starts(&self) -> impl Iterator<Item = usize> + '_ {
        self.lens.iter().scan(0, |next, &len| {
            let start = *next;
            *next += len;
            Some(start)
        })
    }

    /// Rows of each sequence.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.starts().zip(&self.lens).map(|(start, len)| start..start + len)
    }

    /// Length of the longest sequence, its prefix included.
    pub fn longest(&self) -> usize {
        let prefix = |prefix: &Option<usize>| prefix.map_or(0, |at| self.lens[at]);
        self.lens.iter().zip(&self.prefixes).map(|(len, before)| len + prefix(before)).max().unwrap_or(0)
    }
}

/// Largest number of prompt tokens, padding included, in one prefill pass. Memory grows with them.
pub const PREFILL_CELLS: usize = 1 << 14;

/// Most tokens of whole sequences whose keys and values are gathered on a GPU at a time, to read their ends.
pub const MOST_GATHERED: usize = 4 * PREFILL_CELLS;

/// The sequences as flash attention takes them.
pub(super) struct FlashRuns {
    /// Position of each row in its sequence.
    pub positions: Tensor,
    pub queries: Runs,
    pub keys: Runs,
    /// Rows of each sequence's keys, its prefix's first; all rows in order if there are no prefixes.
    pub key_rows: Option<Tensor>,
}

impl FlashRuns {
    pub fn new(packed: &Packed, device: Device) -> Self {
        let starts: Vec<usize> = packed.starts().collect();
        let before = |at: usize| packed.prefixes[at].map_or(0..0, |prefix| starts[prefix]..starts[prefix] + packed.lens[prefix]);
        let sequences = 0..packed.lens.len();
        let positions = sequences.clone().flat_map(|at| (before(at).len()..).take(packed.lens[at])).map(|at| at as i64);
        let key_rows = packed.shares().then(|| {
            let rows = sequences.clone().flat_map(|at| before(at).chain(starts[at]..starts[at] + packed.lens[at]));
            upload(&rows.map(|row| row as i64).collect::<Vec<_>>(), device)
        });
        FlashRuns {
            positions: upload(&positions.collect::<Vec<_>>(), device),
            queries: Runs::of(packed.lens.iter().copied(), device),
            keys: Runs::of(sequences.map(|at| before(at).len() + packed.lens[at]), device),
            key_rows,
        }
    }
}

/// Mapping between packed rows and a rectangle `[sequences, longest]` for attention. Trivial for
/// sequences of equal length. Padding is on the right, beyond the reach of causal attention, so
/// that no mask is needed.
pub(super) struct Rectangle {
    /// Sequences.
    pub rows: i64,
    /// Length of the longest.
    pub columns: i64,
    /// Packed row of every cell, and cell of every packed row. Padding repeats the sequence's first
    /// row.
    indices: Option<(Tensor, Tensor)>,
}

impl Rectangle {
    pub fn new(packed: &Packed, device: Device) -> Self {
        assert!(!packed.shares(), "libtorch's attention knows no shared prefixes");
        let sequences: Vec<Range<usize>> = packed.ranges().collect();
        Rectangle::of(&sequences, packed.len(), device)
    }

    /// Of sequences, each of which has these of `all` packed rows. Only their rows are packed again, in this
    /// order.
    pub fn of(sequences: &[Range<usize>], all: usize, device: Device) -> Self {
        let (rows, columns) = (sequences.len(), sequences.iter().map(Range::len).max().unwrap_or(0));
        let own: usize = sequences.iter().map(Range::len).sum();
        let indices = ((rows * columns, own) != (all, all)).then(|| {
            let (mut row_of_cell, mut cell_of_row) = (Vec::with_capacity(rows * columns), Vec::with_capacity(own));
            for (sequence, Range { start, end }) in sequences.iter().enumerate() {
                let len = end - start;
                row_of_cell.extend((0..columns).map(|column| if column < len { start + column } else { *start } as i64));
                cell_of_row.extend((0..len).map(|column| (sequence * columns + column) as i64));
            }
            (upload(&row_of_cell, device), upload(&cell_of_row, device))
        });
        Rectangle { rows: rows as i64, columns: columns as i64, indices }
    }

    /// Cell of a token of a sequence.
    pub fn cell(&self, sequence: usize, column: usize) -> i64 {
        sequence as i64 * self.columns + column as i64
    }

    /// `[tokens, width]` → `[rows · columns, width]`.
    pub fn spread(&self, packed: &Tensor) -> Tensor {
        self.indices.as_ref().map_or_else(|| packed.shallow_clone(), |(row_of_cell, _)| packed.index_select(0, row_of_cell))
    }

    /// `[rows · columns, width]` → `[tokens, width]`.
    pub fn pack(&self, cells: Tensor) -> Tensor {
        match &self.indices {
            None => cells,
            Some((_, cell_of_row)) => cells.index_select(0, cell_of_row),
        }
    }
}
