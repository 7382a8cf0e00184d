//! Low-rank products of a layer, as they are computed.

use tch::{Kind, Tensor};

use super::fused::half;
use super::layout::GROUPS;

/// Low-rank additions of a layer.
#[derive(Debug)]
pub(super) struct LayerRanks {
    /// One for each group of projections that has adapters.
    pub groups: [Option<LowRank>; GROUPS],
    pub router: Option<LowRank>,
    /// Adapters of experts: of gate and up, and of down.
    pub experts: Option<[ExpertRank; 2]>,
}

impl LayerRanks {
    pub fn share(&self) -> Self {
        let rank = |of: &LowRank| LowRank { down: of.down.shallow_clone(), up: of.up.shallow_clone() };
        let (groups, router) = (self.groups.each_ref().map(|of| of.as_ref().map(rank)), self.router.as_ref().map(rank));
        let expert = |of: &ExpertRank| ExpertRank { down: of.down.shallow_clone(), up: of.up.shallow_clone() };
        LayerRanks { groups, router, experts: self.experts.as_ref().map(|of| of.each_ref().map(expert)) }
    }
}

/// Low-rank addition of a matrix of each expert.
#[derive(Debug)]
pub(super) struct ExpertRank {
    /// `[experts, rank, input]`.
    pub down: Tensor,
    /// `[experts, rows, rank]`, scaled.
    pub up: Tensor,
}

/// Low-rank addition of a group of projections: `x·downᵀ·upᵀ`.
#[derive(Debug)]
pub(super) struct LowRank {
    /// `[projections · rank, input]`.
    pub down: Tensor,
    /// `[rows of the group, projections · rank]`, scaled.
    pub up: Tensor,
}

impl LowRank {
    /// The same in f32.
    pub fn widened(&self) -> Self {
        LowRank { down: self.down.to_kind(Kind::Float), up: self.up.to_kind(Kind::Float) }
    }

    /// `[tokens, rows]` and this group's share.
    pub fn add(&self, projected: Tensor, x: &Tensor) -> Tensor {
        let low = half::linear(x, &self.down, None);
        match projected.kind() == self.up.kind() {
            true => projected.addmm(&low, &self.up.tr()),
            false => projected + half::linear(&low, &self.up, None),
        }
    }
}
