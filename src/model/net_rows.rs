//! Packed sequences as layers with a state compute them: in rectangles, a prefix before those that continue it.

use std::ops::Range;

use tch::{Device, Tensor};

use super::packed::Rectangle;
use super::{Packed, upload};

/// Rows of a pass for its gated delta nets.
pub(super) struct NetRows {
    /// Sequences without a prefix.
    pub begun: Sequences,
    /// Those with one.
    pub continued: Option<Continued>,
}

/// Sequences that are computed at a time.
pub(super) struct Sequences {
    pub rectangle: Rectangle,
    /// Tokens of each.
    pub lens: Tensor,
}

pub(super) struct Continued {
    pub sequences: Sequences,
    /// For each of them, which of the sequences before it continues.
    pub prefixes: Tensor,
    /// Where each packed row is among those of the sequences without a prefix and these, one after the other.
    pub order: Tensor,
}

impl NetRows {
    pub fn new(packed: &Packed, device: Device) -> Self {
        let ranges: Vec<_> = packed.ranges().collect();
        let (begun, continued): (Vec<usize>, Vec<usize>) =
            (0..ranges.len()).partition(|sequence| packed.prefixes[*sequence].is_none());
        let numbers = |of: &mut dyn Iterator<Item = usize>| upload(&of.map(|of| of as i64).collect::<Vec<_>>(), device);
        let chosen = |of: &[usize]| {
            let own: Vec<_> = of.iter().map(|sequence| ranges[*sequence].clone()).collect();
            Sequences { rectangle: Rectangle::of(&own, packed.len(), device), lens: numbers(&mut own.iter().map(Range::len)) }
        };
        let further = (!continued.is_empty()).then(|| {
            let mut place = vec![0; ranges.len()];
            begun.iter().enumerate().for_each(|(at, sequence)| place[*sequence] = at);
            let prefixes = continued.iter().filter_map(|sequence| packed.prefixes[*sequence]).map(|prefix| place[prefix]);
            let mut order = vec![0; packed.len()];
            let rows = begun.iter().chain(&continued).flat_map(|sequence| ranges[*sequence].clone());
            rows.enumerate().for_each(|(at, row)| order[row] = at);
            Continued {
                sequences: chosen(&continued),
                prefixes: numbers(&mut prefixes.into_iter()),
                order: numbers(&mut order.into_iter()),
            }
        });
        NetRows { begun: chosen(&begun), continued: further }
    }
}
