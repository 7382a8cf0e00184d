//! Order of records in an endless stream over several data sets: a pure function of sizes, shares
//! and a seed.
//!
//! The place of number `k` follows from `k` alone, so that a resume needs only the number. Two
//! kinds:
//!
//! - **By repeats**: an epoch holds every record of every set, as often as its set is repeated, in
//!   an order drawn over all of them by seed and epoch.
//! - **By weights**: of every 1024 numbers a set has its share, to the nearest number and at least
//!   one, spread evenly over them. Each set has its own epochs.

use crate::data::shuffle::Draws;
use crate::data::{DataError, permutation};
use crate::util::rng;

/// Numbers after which shares are exact.
const BLOCK: u64 = 1024;

/// Share of a data set in a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Share {
    /// Each record so often in every epoch.
    Repeat(u64),
    /// In proportion to the others' weights.
    Weight(f64),
}

/// A place in the stream: a record and the pass over its data that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Index of the data set.
    pub set: usize,
    /// Index of the record.
    pub record: usize,
    /// The pass, from 0: over all sets by repeats, over this one by weights.
    pub epoch: u64,
}

impl Place {
    /// Bits of the record's index: no data set has so many records.
    const RECORD_BITS: u32 = 40;

    /// One number for data set and record.
    pub fn key(self) -> u64 {
        (self.set as u64) << Self::RECORD_BITS | self.record as u64
    }

    /// The record with this key.
    pub fn of_key(key: u64, epoch: u64) -> Self {
        let (set, record) = (key >> Self::RECORD_BITS, key & ((1 << Self::RECORD_BITS) - 1));
        Place { set: set as usize, record: record as usize, epoch }
    }
}

/// Places of an endless stream. Costs an index per record for the orders drawn last.
#[derive(Clone, Debug)]
pub(crate) struct Mixture {
    sizes: Vec<usize>,
    kind: Kind,
    seed: u64,
}

#[derive(Clone, Debug)]
enum Kind {
    Repeats { repeats: Vec<u64>, len: usize, order: Order },
    Weights { quotas: Vec<u64>, orders: Vec<Order>, block: Option<(u64, Vec<(usize, u64)>)> },
}

/// Order of the records of one data set, by epoch.
#[derive(Clone, Debug)]
struct Order {
    len: usize,
    seed: u64,
    shuffled: bool,
    /// The epoch drawn last, and its order.
    newest: Option<(u64, Vec<usize>)>,
}

impl Order {
    fn new(len: usize, seed: u64, shuffled: bool) -> Self {
        Order { len, seed, shuffled, newest: None }
    }

    fn at(&mut self, epoch: u64, place: usize) -> usize {
        if epoch == 0 && !self.shuffled {
            return place;
        }
        match &self.newest {
            Some((of, order)) if *of == epoch => order[place],
            _ => {
                // The old order goes before the new one comes: they are the larger part of what a stream needs.
                self.newest = None;
                let order = permutation(self.len, self.seed, epoch);
                let record = order[place];
                self.newest = Some((epoch, order));
                record
            }
        }
    }
}

/// Orders of weighted sets, each with its own seed: sets of one size must not go in step.
fn orders(sizes: &[usize], seed: u64, shuffled: bool) -> Vec<Order> {
    sizes.iter().zip(1..).map(|(len, set)| Order::new(*len, rng::state(seed, set), shuffled)).collect()
}

impl Mixture {
    /// Makes a stream over data sets with these numbers of records. Epoch 0 of repeats, or of each
    /// set, keeps the given order unless `shuffled`.
    pub(crate) fn new(sets: &[(usize, Share)], seed: u64, shuffled: bool) -> Result<Self, DataError> {
        let refuse = |problem: &str| Err(DataError::Unusable(problem.to_owned()));
        let sizes: Vec<usize> = sets.iter().map(|(size, _)| *size).collect();
        if sizes.is_empty() || sizes.contains(&0) {
            return refuse("there is nothing to mix: every data set needs a record");
        }
        let (mut weights, mut repeats) = (Vec::new(), Vec::new());
        for (_, share) in sets {
            match share {
                Share::Weight(weight) => weights.push(*weight),
                Share::Repeat(times) => repeats.push(*times),
            }
        }
        let kind = if weights.is_empty() {
            let times =
                |(size, repeat): (&usize, &u64)| usize::try_from(*repeat).ok().and_then(|repeat| repeat.checked_mul(*size));
            let len = sizes.iter().zip(&repeats).map(times).try_fold(0_usize, |sum, len| sum.checked_add(len?));
            match len {
                Some(0) => return refuse("every data set is repeated 0 times"),
                Some(len) => Kind::Repeats { repeats, len, order: Order::new(len, seed, shuffled) },
                None => return refuse("the repeats make more records than can be counted"),
            }
        } else if !repeats.is_empty() {
            return refuse("some data sets have a weight and some have none: give all of them one, or none");
        } else if weights.iter().any(|weight| !weight.is_finite() || *weight <= 0.0) || weights.len() as u64 > BLOCK {
            return refuse("weights must be finite and above 0, of 1024 data sets at most");
        } else {
            Kind::Weights { quotas: quotas(&weights), orders: orders(&sizes, seed, shuffled), block: None }
        };
        Ok(Mixture { sizes, kind, seed })
    }

    /// The place of a number.
    pub(crate) fn draw(&mut self, number: u64) -> Place {
        let Mixture { sizes, kind, seed } = self;
        match kind {
            Kind::Repeats { repeats, len, order } => {
                let epoch = number / *len as u64;
                let mut place = order.at(epoch, (number % *len as u64) as usize);
                let mut set = 0;
                while place >= sizes[set] * repeats[set] as usize {
                    place -= sizes[set] * repeats[set] as usize;
                    set += 1;
                }
                Place { set, record: place % sizes[set], epoch }
            }
            Kind::Weights { quotas, orders, block } => {
                let at = number / BLOCK;
                if block.as_ref().is_none_or(|(drawn, _)| *drawn != at) {
                    *block = Some((at, interleaved(quotas, *seed, at)));
                }
                let (set, nth) = block.as_ref().map_or((0, 0), |(_, places)| places[(number % BLOCK) as usize]);
                let count = at * quotas[set] + nth;
                let (epoch, place) = (count / sizes[set] as u64, (count % sizes[set] as u64) as usize);
                Place { set, record: orders[set].at(epoch, place), epoch }
            }
        }
    }

    /// Returns the same stream under another seed.
    pub(crate) fn with_order(&self, seed: u64, shuffled: bool) -> Self {
        let mut mixture = Mixture { seed, ..self.clone() };
        match &mut mixture.kind {
            Kind::Repeats { order, len, .. } => *order = Order::new(*len, seed, shuffled),
            Kind::Weights { orders: old, block, .. } => (*old, *block) = (orders(&self.sizes, seed, shuffled), None),
        }
        mixture
    }

    /// Numbers in an epoch; of weights, records.
    pub(crate) fn len(&self) -> usize {
        match &self.kind {
            Kind::Repeats { len, .. } => *len,
            Kind::Weights { .. } => self.sizes.iter().sum(),
        }
    }
}

/// Share of each set in `BLOCK` numbers: at least one, largest remainders first.
fn quotas(weights: &[f64]) -> Vec<u64> {
    let sum: f64 = weights.iter().sum();
    let free = (BLOCK - weights.len() as u64) as f64;
    let exact: Vec<f64> = weights.iter().map(|weight| (weight / sum * BLOCK as f64 - 1.0).max(0.0)).collect();
    let scale = free / exact.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let exact: Vec<f64> = exact.iter().map(|share| share * scale.min(free)).collect();
    let mut quotas: Vec<u64> = exact.iter().map(|share| 1 + *share as u64).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()).then(a.cmp(&b)));
    let missing = BLOCK - quotas.iter().sum::<u64>().min(BLOCK);
    order.iter().cycle().take(missing as usize).for_each(|&set| quotas[set] += 1);
    quotas
}

/// Numbers of a block as (set, how many of that set came before in the block). Each set comes in
/// even steps, jittered within a step so that sets of equal shares do not keep one order.
fn interleaved(quotas: &[u64], seed: u64, block: u64) -> Vec<(usize, u64)> {
    const FINE: u64 = 1 << 20;
    let mut draws = Draws::new(seed ^ 0x6d69_7874_7572_6573, block);
    let mut places: Vec<(u64, usize, u64)> = Vec::with_capacity(BLOCK as usize);
    for (set, &quota) in quotas.iter().enumerate() {
        places.extend((0..quota).map(|nth| ((nth * FINE + draws.below(FINE)) / quota, set, nth)));
    }
    places.sort_unstable();
    places.into_iter().map(|(_, set, nth)| (set, nth)).collect()
}
