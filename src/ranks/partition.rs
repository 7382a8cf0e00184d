//! A flat buffer of parameters, divided among ranks.
//!
//! The buffer consists of units (the embedding, each layer, the rest), and every rank holds one
//! part of each unit, so that a unit can be gathered when it is used and freed after. Parts of a
//! unit have the same length on all ranks; the last may be padded with zeros.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{CollectiveError, Group, Pending};

/// Division of a flat buffer among ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Ranges of the units in the whole buffer, in order and without gaps.
    units: Vec<Range<usize>>,
    ranks: usize,
}

impl Partition {
    /// Divides a buffer whose units end at `ends`, in ascending order, among `ranks` ranks.
    pub fn new(ends: impl IntoIterator<Item = usize>, ranks: usize) -> Self {
        let mut start = 0;
        let unit = |end| std::mem::replace(&mut start, end)..end;
        let units = ends.into_iter().map(unit).filter(|unit| !unit.is_empty()).collect();
        Partition { units, ranks }
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// A unit's range in the whole buffer.
    pub fn unit(&self, unit: usize) -> Range<usize> {
        self.units[unit].clone()
    }

    /// Length of a rank's part of a unit, padding included.
    fn part_len(&self, unit: usize) -> usize {
        self.units[unit].len().div_ceil(self.ranks)
    }

    /// Where a rank's part of a unit begins in the rank's own buffer.
    fn part_start(&self, unit: usize) -> usize {
        (0..unit).map(|unit| self.part_len(unit)).sum()
    }

    /// Length of a rank's own buffer, the same on every rank.
    pub fn own_len(&self) -> usize {
        self.part_start(self.units.len())
    }

    /// Which numbers of the whole buffer a rank holds: a range of the whole buffer and the place of
    /// its first number in the rank's own buffer, unit by unit. Padding is left out.
    pub fn held(&self, rank: usize) -> Vec<(Range<usize>, usize)> {
        let of_unit = |unit: usize| {
            let (whole, part) = (self.unit(unit), self.part_len(unit));
            let start = (whole.start + rank * part).min(whole.end);
            (start..(start + part).min(whole.end), self.part_start(unit))
        };
        (0..self.units.len()).map(of_unit).filter(|(range, _)| !range.is_empty()).collect()
    }

    /// A rank's own buffer of a whole one.
    pub fn own(&self, rank: usize, whole: &Tensor) -> Tensor {
        let own = Tensor::zeros([self.own_len() as i64], (whole.kind(), whole.device()));
        for unit in 0..self.units() {
            let range = self.unit(unit);
            self.fill(rank, unit, &whole.narrow(0, range.start as i64, range.len() as i64), &own);
        }
        own
    }

    /// Copies a rank's part of a whole unit to its own buffer.
    pub fn fill(&self, rank: usize, unit: usize, whole: &Tensor, own: &Tensor) {
        let (len, part) = (self.units[unit].len(), self.part_len(unit));
        let start = (rank * part).min(len);
        let held = ((start + part).min(len) - start) as i64;
        self.part(own, unit).narrow(0, 0, held).copy_(&whole.narrow(0, start as i64, held));
    }

    /// This rank's part of a unit, in its own buffer.
    fn part(&self, own: &Tensor, unit: usize) -> Tensor {
        own.narrow(0, self.part_start(unit) as i64, self.part_len(unit) as i64)
    }

    /// Begins to gather a unit from all ranks; [`Partition::gathered`] ends it.
    pub fn gather(&self, group: &mut Group, own: &Tensor, unit: usize) -> Result<Pending, CollectiveError> {
        group.gather(&self.part(own, unit))
    }

    /// Gathers a unit from all ranks to its place in a whole buffer.
    pub fn gather_into(&self, group: &mut Group, own: &Tensor, unit: usize, whole: &Tensor) -> Result<(), CollectiveError> {
        let range = self.unit(unit);
        let mut place = whole.narrow(0, range.start as i64, range.len() as i64);
        let alike = (own.kind(), own.device()) == (whole.kind(), whole.device());
        match self.padding(unit) {
            0 if alike => group.gather_into(&self.part(own, unit), place)?.wait().map(drop),
            _ => {
                place.copy_(&self.gathered(self.gather(group, own, unit)?, unit)?);
                Ok(())
            }
        }
    }

    /// Numbers by which the ranks' parts of a unit are longer than it.
    fn padding(&self, unit: usize) -> usize {
        self.part_len(unit) * self.ranks - self.units[unit].len()
    }

    /// The unit that was gathered, without padding.
    pub fn gathered(&self, pending: Pending, unit: usize) -> Result<Tensor, CollectiveError> {
        Ok(pending.wait()?.narrow(0, 0, self.units[unit].len() as i64))
    }

    /// Adds this rank's part of the sum over all ranks of a unit's gradient to its own buffer.
    pub fn add_sum(&self, group: &mut Group, own: &Tensor, unit: usize, gradient: &Tensor) -> Result<(), CollectiveError> {
        let gradient = gradient.to_kind(Kind::Float);
        let gradient = match self.padding(unit) {
            0 => gradient,
            padding => gradient.constant_pad_nd([0, padding as i64]),
        };
        let _sum = self.part(own, unit).g_add_(&group.reduce_scatter(&gradient)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_number_is_held_once_and_own_buffers_are_as_long_on_every_rank(
            lengths in prop::collection::vec(0usize..9, 1..6),
            ranks in 1usize..6,
        ) {
            let mut end = 0;
            let ends = lengths.iter().map(|length| { end += length; end }).collect::<Vec<_>>();
            let partition = Partition::new(ends, ranks);
            let mut held = (0..ranks).flat_map(|rank| partition.held(rank)).flat_map(|(range, _)| range).collect::<Vec<_>>();
            held.sort_unstable();
            prop_assert_eq!(held, (0..end).collect::<Vec<_>>());
            for rank in 0..ranks {
                for (range, at) in partition.held(rank) {
                    prop_assert!(at + range.len() <= partition.own_len());
                }
            }
            prop_assert!(partition.own_len() * ranks < end + ranks * lengths.len() + 1);
        }
    }
}
