//! A trainer's state divided among ranks: ZeRO (Rajbhandari et al., 2020), with the units of FSDP.
//!
//! Each rank holds one part of each unit of the trained numbers (embedding, layers, head): of the
//! moments and gradient sums, or of the parameters too. There may be several copies of the whole
//! (HSDP, [`Mesh`]).
//!
//! Cost of a step if `n` ranks share a copy, in numbers that a rank sends for each trained number: if
//! every rank keeps the parameters, `(n - 1) / n` for the gradient and `(n - 1) / n` for the update.
//! If not, `2 (n - 1) / n` for each micro-batch, forward and backward, and `(n - 1) / n` for its
//! gradient. With `c` copies, `2 (c - 1) / c / n` in addition for the gradient of a step.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use super::groups::Slice;
use crate::model::{Adapter, Layout, Parameters, Unit, part};
use crate::ranks::{CollectiveError, Mesh, Partition, Pending};

/// Division of a trainer's numbers among ranks.
#[derive(Clone)]
pub(super) struct Shards {
    mesh: Mesh,
    partition: Partition,
    /// Number of this rank's part.
    rank: usize,
}

/// Numbers of a piece where a buffer has no units, about.
const PIECE: usize = 1 << 22;

impl Shards {
    /// Divides `len` numbers among the ranks of a copy, in pieces.
    pub fn of_pieces(mesh: &Mesh, len: usize) -> Self {
        // No piece but the last is padded.
        let each = PIECE.next_multiple_of(mesh.parts.lock().size());
        Shards::new(mesh, (1..=len.div_ceil(each)).map(|piece| (piece * each).min(len)))
    }

    /// Divides the numbers of `layout` among the ranks of a copy, unit by unit.
    pub fn of_units(mesh: &Mesh, layout: &Layout) -> Self {
        Shards::new(mesh, layout.unit_list().map(|unit| layout.unit(unit).end))
    }

    fn new(mesh: &Mesh, ends: impl IntoIterator<Item = usize>) -> Self {
        let [rank, size] = mesh.parts.lock().place();
        Shards { mesh: mesh.clone(), partition: Partition::new(ends, size), rank }
    }

    /// This rank's part of numbers that all ranks have.
    pub fn own(&self, whole: &Tensor) -> Tensor {
        self.partition.own(self.rank, whole)
    }

    /// This rank's part of rank 0's numbers, which only rank 0 has, in f32. Sent unit by unit, from
    /// `device` to `device`.
    pub fn sent_by_first(&self, whole: Option<&Tensor>, device: Device) -> Result<Tensor, CollectiveError> {
        let own = Tensor::zeros([self.partition.own_len() as i64], (Kind::Float, device));
        for unit in 0..self.partition.units() {
            let range = self.partition.unit(unit);
            let mut numbers = match whole {
                Some(whole) => part(whole, range).to_device(device).to_kind(Kind::Float).contiguous(),
                None => Tensor::empty([range.len() as i64], (Kind::Float, device)),
            };
            self.mesh.all.lock().broadcast(&mut numbers)?;
            self.partition.fill(self.rank, unit, &numbers, &own);
        }
        Ok(own)
    }

    /// Length of a rank's part.
    pub fn own_len(&self) -> usize {
        self.partition.own_len()
    }

    /// Places in the whole of this rank's numbers.
    pub fn held(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        self.partition.held(self.rank).into_iter()
    }

    /// Gathers the numbers of which this rank has `own` into `whole`, on each rank that gives room.
    pub fn gather(&self, own: &Tensor, whole: Option<&Tensor>) -> Result<(), CollectiveError> {
        let Some(whole) = whole else { return self.each_unit(own, |_, _| {}) };
        let gather = |unit| self.partition.gather_into(&mut self.mesh.parts.lock(), own, unit, whole);
        (0..self.partition.units()).try_for_each(gather)
    }

    /// Gathers the numbers of which this rank has `own`, and passes them to `take` unit by unit, with
    /// their places in the whole.
    pub fn each_unit(&self, own: &Tensor, mut take: impl FnMut(Range<usize>, &Tensor)) -> Result<(), CollectiveError> {
        for unit in 0..self.partition.units() {
            let pending = self.partition.gather(&mut self.mesh.parts.lock(), own, unit)?;
            take(self.partition.unit(unit), &self.partition.gathered(pending, unit)?);
        }
        Ok(())
    }

    /// This rank's part of the sum of `gradient` over the ranks that share its copy.
    pub fn sum(&self, gradient: &Tensor) -> Result<Tensor, CollectiveError> {
        let own = Tensor::zeros([self.partition.own_len() as i64], (Kind::Float, gradient.device()));
        for unit in 0..self.partition.units() {
            let of_unit = part(gradient, self.partition.unit(unit));
            self.partition.add_sum(&mut self.mesh.parts.lock(), &own, unit, &of_unit)?;
        }
        Ok(own)
    }

    /// Number of ranks that share a copy.
    pub fn parts(&self) -> usize {
        self.mesh.parts.lock().size()
    }

    /// Adds up the gradients of all copies of this rank's part, in place.
    pub fn sum_of_copies(&self, own: &mut Tensor) -> Result<(), CollectiveError> {
        self.mesh.copies.as_ref().map_or(Ok(()), |copies| copies.lock().all_reduce(own))
    }

    /// Stretches of this rank's part, of those of the whole.
    pub fn slices(&self, whole: &[Slice]) -> Vec<Slice> {
        let cut = self.held().flat_map(|(range, at)| {
            let within = whole.iter().filter(move |slice| slice.range.start < range.end && range.start < slice.range.end);
            within.map(move |slice| {
                let (start, end) = (range.start.max(slice.range.start), range.end.min(slice.range.end));
                Slice { range: at + start - range.start..at + end - range.start, ..slice.clone() }
            })
        });
        cut.collect()
    }
}

/// Parameters of which every rank holds a part, gathered unit by unit for each pass.
pub(super) struct Gathered {
    shards: Shards,
    layout: Arc<Layout>,
    state: Mutex<GatheredState>,
}

struct GatheredState {
    /// This rank's part in the format of computation.
    computed: Tensor,
    /// This rank's part of the gradient's sum.
    sums: Option<Tensor>,
    /// Divisor of the gradients that come.
    scale: f64,
    /// The unit that is gathered ahead.
    ahead: Option<(usize, Pending)>,
}

impl Gathered {
    /// Parameters of `layout`, of which this rank holds `computed`.
    pub fn new(shards: Shards, layout: Arc<Layout>, computed: Tensor) -> Self {
        Gathered { shards, layout, state: Mutex::new(GatheredState { computed, sums: None, scale: 1.0, ahead: None }) }
    }

    /// This rank's part in the format of computation.
    pub fn computed(&self) -> Tensor {
        self.state.lock().computed.shallow_clone()
    }

    /// Replaces this rank's part by these numbers, rounded.
    pub fn round(&self, masters: &Tensor) {
        let _guard = tch::no_grad_guard();
        self.state.lock().computed.copy_(masters);
    }

    /// Divides the gradients of the next pass by its loss scale.
    pub fn unscale_by(&self, scale: f64) {
        self.state.lock().scale = scale;
    }

    /// This rank's part of the gradient's sum since the last call, over the ranks that share its copy;
    /// `None` if there was no pass.
    pub fn take_sums(&self) -> Option<Tensor> {
        self.state.lock().sums.take()
    }

    fn index(&self, unit: Unit) -> usize {
        let start = self.layout.unit(unit).start;
        (0..self.shards.partition.units()).find(|at| self.shards.partition.unit(*at).start == start).unwrap_or(0)
    }

    fn begin(&self, computed: &Tensor, unit: usize) -> Result<(usize, Pending), CollectiveError> {
        Ok((unit, self.shards.partition.gather(&mut self.shards.mesh.parts.lock(), computed, unit)?))
    }
}

impl Parameters for Gathered {
    type Error = CollectiveError;

    fn numbers(&self, unit: Unit, next: Option<Unit>) -> Result<Tensor, CollectiveError> {
        let (unit, mut state) = (self.index(unit), self.state.lock());
        let (_, pending) = match state.ahead.take().filter(|(of, _)| *of == unit) {
            Some(ahead) => ahead,
            None => self.begin(&state.computed, unit)?,
        };
        if let Some(next) = next {
            state.ahead = Some(self.begin(&state.computed, self.index(next))?);
        }
        self.shards.partition.gathered(pending, unit)
    }

    fn adapter(&self) -> Option<(&Adapter, &Tensor)> {
        None
    }

    fn room(&self, unit: Unit) -> Tensor {
        Tensor::empty([self.layout.unit(unit).len() as i64], (Kind::Float, self.state.lock().computed.device()))
    }

    fn take(&self, unit: Unit, gradient: Tensor) -> Result<(), CollectiveError> {
        let (unit, mut state) = (self.index(unit), self.state.lock());
        let sums = match state.sums.take() {
            Some(sums) => sums,
            None => state.computed.zeros_like().to_kind(Kind::Float),
        };
        let gradient = if state.scale == 1.0 { gradient } else { gradient / state.scale };
        let added = self.shards.partition.add_sum(&mut self.shards.mesh.parts.lock(), &sums, unit, &gradient);
        state.sums = Some(sums);
        added
    }
}
