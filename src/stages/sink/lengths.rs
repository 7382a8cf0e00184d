//! Response lengths: trained responses compared with all finished ones. Pure.
//!
//! If late groups are dropped or masked, long responses are missing among the trained ones; the two
//! figures show how many.

use crate::data::{Batch, Sample};

/// Lengths in tokens, ascending.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Lengths(Vec<usize>);

impl Lengths {
    /// Sampled tokens with a weight in the loss, of every response that has some.
    pub fn trained(batch: &Batch) -> Self {
        Lengths::of(batch.samples().map(Sample::learned).filter(|length| *length > 0))
    }

    /// Sampled tokens of every response of this step, whatever its fate.
    pub fn finished(batch: &Batch) -> Self {
        Lengths::of(
            batch.samples().map(Sample::generated).chain(batch.dropped.iter().flat_map(|dropped| dropped.lengths.clone())),
        )
    }

    fn of(lengths: impl Iterator<Item = usize>) -> Self {
        let mut lengths: Vec<usize> = lengths.collect();
        lengths.sort_unstable();
        Lengths(lengths)
    }

    /// Returns mean, median and 90th percentile (nearest rank); `None` without lengths.
    pub fn summary(&self) -> Option<[f64; 3]> {
        let rank = |share: f64| self.0.get((share * self.0.len() as f64).ceil() as usize - 1).map(|length| *length as f64);
        if self.0.is_empty() { None } else { Some([self.sum() / self.0.len() as f64, rank(0.5)?, rank(0.9)?]) }
    }

    fn sum(&self) -> f64 {
        self.0.iter().sum::<usize>() as f64
    }
}

/// Sums over a run.
#[derive(Debug, Default)]
pub(super) struct LengthBias {
    trained: (f64, usize),
    finished: (f64, usize),
}

impl LengthBias {
    /// Adds a step. Returns the mean trained length divided by the mean finished length, over all
    /// steps so far.
    pub fn add(&mut self, batch: &Batch) -> Option<f64> {
        let mean = |(sum, count): &mut (f64, usize), lengths: Lengths| {
            *sum += lengths.sum();
            *count += lengths.0.len();
            *sum / *count as f64
        };
        let ratio = mean(&mut self.trained, Lengths::trained(batch)) / mean(&mut self.finished, Lengths::finished(batch));
        ratio.is_finite().then_some(ratio)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::{Dropped, Group, Prompt};

    fn sample(length: usize) -> Sample {
        let mut sample = Sample::begin(&Prompt::default(), 0, &[1]);
        (0..length).for_each(|_| sample.push(2, -0.5, 1));
        sample
    }

    #[test]
    fn nearest_ranks_are_lengths_that_occurred() {
        assert_eq!(Lengths::of(1..=10).summary(), Some([5.5, 5.0, 9.0]));
        assert_eq!(Lengths::of([7].into_iter()).summary(), Some([7.0; 3]));
        assert_eq!(Lengths::default().summary(), None);
    }

    #[test]
    fn long_answers_that_were_dropped_show_in_the_ratio() {
        let group = |samples| Group { prompt: Arc::default(), samples, ..Group::default() };
        let mut batch = Batch { groups: vec![group(vec![sample(2), sample(4)])], ..Batch::default() };
        let mut bias = LengthBias::default();
        assert_eq!(bias.add(&batch), Some(1.0));
        batch.dropped = vec![Dropped::new(&group(vec![sample(9), sample(9)]), "stale")];
        assert_eq!(Lengths::trained(&batch).summary(), Some([3.0, 2.0, 4.0]));
        assert_eq!(Lengths::finished(&batch).summary(), Some([6.0, 4.0, 9.0]));
        assert_eq!(bias.add(&batch), Some(3.0 / 5.0), "12 of 4 trained, 30 of 6 finished");
        batch.groups[0].samples[1].loss_mask[1] = 0.0;
        assert_eq!(Lengths::trained(&batch).summary(), Some([2.5, 2.0, 3.0]), "masked tokens are not learned from");
    }
}
