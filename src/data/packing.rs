//! Supervised samples in rows of a bounded length, and steps of a bounded number of tokens.
//!
//! In a row of best fit each sample stays a separate sequence: loss and gradient are those of the
//! samples one by one. A wrapped row is one sequence, cut from all samples written end to end, so
//! that its tokens attend to everything before them, as in pretraining on raw text.

use crate::settings::declare::choices;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::Sample;

choices! {
    /// Policy for samples longer than `max_length`.
    pub enum OverlongPolicy {
        /// samples keep their beginning.
        "truncate" => Truncate,
        /// samples are dropped.
        "drop" => Drop,
        /// samples are cut into pieces, each a sample.
        "split" => Split,
    }
}

choices! {
    /// Sequence packing: how samples share rows.
    pub enum Packing {
        /// each sample has its own row.
        "none" => Apart,
        /// the longest samples first, each into the row where it leaves least room; no sample attends to another.
        "best_fit" => BestFit,
        /// all samples end to end, cut into full rows regardless of where samples end, for raw text.
        "wrapped" => Wrapped,
    }
}

/// Rows, and what it took to make them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PackedRows {
    /// The samples of each row.
    pub rows: Vec<Vec<Sample>>,
    /// Samples longer than a row, whatever became of them.
    pub too_long: usize,
    /// Samples or pieces that were dropped because none of their tokens is trained, or because they
    /// were too long.
    pub left_out: usize,
    /// Tokens that were cut off or left out with them.
    pub lost_tokens: usize,
}

/// Groups lengths into rows of `room` tokens by best fit decreasing: equal to TRL's strategy `bfd`,
/// in the order of rows and within each. No length exceeds `room`; empty ones are dropped.
///
/// ```
/// use rollflow::data::packing::best_fit_decreasing;
///
/// assert_eq!(best_fit_decreasing(&[3, 5, 2, 4], 8), [vec![1, 0], vec![3, 2]]);
/// ```
pub fn best_fit_decreasing(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).filter(|&at| lengths[at] > 0).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(lengths[at]));
    let (mut rows, mut with_room): (Vec<Vec<usize>>, BTreeMap<usize, VecDeque<usize>>) = Default::default();
    for at in order {
        let length = lengths[at];
        let best =
            with_room.range_mut(length..).next().and_then(|(&left, rows)| Some((rows.pop_front()?, left, rows.is_empty())));
        let (row, left) = match best {
            Some((row, left, last)) => {
                if last {
                    with_room.remove(&left);
                }
                (row, left)
            }
            None => {
                rows.push(Vec::new());
                (rows.len() - 1, room)
            }
        };
        rows[row].push(at);
        let left = left.saturating_sub(length);
        if left > 0 {
            with_room.entry(left).or_default().push_back(row);
        }
    }
    rows
}

/// Packs supervised samples into rows of at most `room` tokens. `too_long` has no effect on wrapped
/// rows, which are cut anywhere.
pub fn pack(samples: Vec<Sample>, room: usize, packing: Packing, too_long: OverlongPolicy) -> PackedRows {
    let room = room.max(1);
    let count = samples.iter().filter(|sample| sample.tokens.len() > room).count();
    let mut packed = PackedRows { too_long: count, ..PackedRows::default() };
    if packing == Packing::Wrapped {
        packed.rows = wrapped(&samples, room);
        return packed;
    }
    let fitting: Vec<Sample> = samples.into_iter().flat_map(|sample| fit(sample, room, too_long, &mut packed)).collect();
    let rows = match packing {
        Packing::BestFit => {
            let lengths: Vec<usize> = fitting.iter().map(|sample| sample.tokens.len()).collect();
            best_fit_decreasing(&lengths, room)
        }
        _ => (0..fitting.len()).map(|at| vec![at]).collect(),
    };
    let mut fitting: Vec<Option<Sample>> = fitting.into_iter().map(Some).collect();
    packed.rows = rows.into_iter().map(|row| row.into_iter().filter_map(|at| fitting[at].take()).collect()).collect();
    packed
}

impl PackedRows {
    /// Drops samples without a trained token. The first token of a sequence is never trained, and a
    /// prompt that was cut off from its completion has none.
    pub fn teaching(mut self) -> Self {
        let teaches = |sample: &Sample| sample.loss_mask.iter().skip(1).any(|weight| *weight > 0.0);
        for row in &mut self.rows {
            let (before, tokens) = (row.len(), tokens_of(row));
            row.retain(teaches);
            self.left_out += before - row.len();
            self.lost_tokens += tokens - tokens_of(row);
        }
        self.rows.retain(|row| !row.is_empty());
        self
    }
}

fn tokens_of(row: &[Sample]) -> usize {
    row.iter().map(|sample| sample.tokens.len()).sum()
}

/// The sample as it fits into a row.
fn fit(sample: Sample, room: usize, too_long: OverlongPolicy, packed: &mut PackedRows) -> Vec<Sample> {
    let length = sample.tokens.len();
    match too_long {
        _ if length <= room => vec![sample],
        OverlongPolicy::Drop => {
            packed.left_out += 1;
            packed.lost_tokens += length;
            Vec::new()
        }
        OverlongPolicy::Truncate => {
            packed.lost_tokens += length - room;
            vec![piece(&sample, 0..room)]
        }
        OverlongPolicy::Split => (0..length).step_by(room).map(|at| piece(&sample, at..length.min(at + room))).collect(),
    }
}

/// A stretch of a supervised sample.
fn piece(sample: &Sample, range: Range<usize>) -> Sample {
    Sample {
        prompt: sample.prompt.clone(),
        response: sample.response.clone(),
        tokens: sample.tokens[range.clone()].to_vec(),
        loss_mask: sample.loss_mask[range].to_vec(),
        status: sample.status,
        metadata: sample.metadata.clone(),
        ..Sample::default()
    }
}

fn wrapped(samples: &[Sample], room: usize) -> Vec<Vec<Sample>> {
    let tokens: Vec<u32> = samples.iter().flat_map(|sample| sample.tokens.iter().copied()).collect();
    let mask: Vec<f32> = samples.iter().flat_map(|sample| sample.loss_mask.iter().copied()).collect();
    let row = |(tokens, mask): (&[u32], &[f32])| {
        vec![Sample { tokens: tokens.to_vec(), loss_mask: mask.to_vec(), ..Sample::default() }]
    };
    tokens.chunks(room).zip(mask.chunks(room)).map(row).collect()
}

/// Cuts a list into consecutive runs of at most `most` tokens each (a longer item is a run by
/// itself), and into at least `least` runs if there are as many items. The number of runs is the
/// smallest possible, and the largest cost of a run is minimal.
pub fn cut_evenly(tokens: &[usize], costs: &[f64], most: usize, least: usize) -> Vec<Range<usize>> {
    let runs = |limit: f64| {
        let (mut runs, mut held, mut cost): (Vec<Range<usize>>, usize, f64) = (Vec::new(), 0, 0.0);
        for at in 0..tokens.len() {
            match runs.last_mut() {
                Some(run) if held + tokens[at] <= most && cost + costs[at] <= limit => {
                    run.end = at + 1;
                    (held, cost) = (held + tokens[at], cost + costs[at]);
                }
                _ => {
                    runs.push(at..at + 1);
                    (held, cost) = (tokens[at], costs[at]);
                }
            }
        }
        runs
    };
    let count = runs(f64::INFINITY).len().max(least.min(tokens.len()));
    let (mut low, mut high) = (costs.iter().copied().fold(0.0, f64::max), costs.iter().sum::<f64>());
    if runs(low).len() <= count {
        high = low;
    }
    // The bound's last digits move no cut that a later look would not move back.
    while high - low > 1e-6 * high {
        let middle = low + (high - low) / 2.0;
        if runs(middle).len() <= count { high = middle } else { low = middle }
    }
    runs(high)
}

/// Cuts a list of sequences into runs whose padded rectangles (as many rows as sequences, as wide
/// as the longest) hold at most `cells` tokens; a longer sequence is a run by itself. Sequences
/// stay in the order of `lengths`: sorted ones need the least padding.
pub fn cut_rectangles(lengths: &[usize], cells: usize) -> Vec<Range<usize>> {
    let (mut runs, mut widest): (Vec<Range<usize>>, usize) = (Vec::new(), 0);
    for (at, &length) in lengths.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if (run.len() + 1).saturating_mul(widest.max(length)) <= cells => {
                run.end = at + 1;
                widest = widest.max(length);
            }
            _ => {
                runs.push(at..at + 1);
                widest = length;
            }
        }
    }
    runs
}

/// Cost of a forward and backward pass over a sequence, relative to one token without attention: `n
/// + n² / width`. Attention reads `n / 2` earlier tokens at each token, and the matrices of a layer
/// are about `12 · hidden²`, so `width` is about `12 · hidden`.
pub fn cost_of(length: usize, width: f64) -> f64 {
    let length = length as f64;
    length + length * length / width
}
