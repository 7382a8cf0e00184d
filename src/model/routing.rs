//! What the routers of a pass did: the loss that spreads tokens over experts, and how the choice of another
//! pass over the same tokens differs.

use tch::{Device, Kind, Tensor};

use super::block::Left;
use super::experts::Routed;
use super::{ModelConfig, Packed, upload};
use crate::data::{ANY_EXPERT, RouteShape};

/// Experts that computed tokens before: of a layer `[tokens, per_token]`, of all sparse layers
/// `[tokens, layers, per_token]`. Less than 0 where one is not known.
pub(super) struct Recorded {
    pub experts: Tensor,
    /// Whether they compute the tokens again.
    pub follow: bool,
}

impl Recorded {
    /// Those of all sparse layers, which come with packed tokens.
    pub fn new(config: &ModelConfig, packed: &Packed, device: Device) -> Option<Self> {
        let (recorded, RouteShape { layers, per_token }) = (packed.recorded.as_ref()?, config.route_shape()?);
        let experts: Vec<i16> =
            recorded.experts.iter().map(|&expert| if expert == ANY_EXPERT { -1 } else { expert as i16 }).collect();
        let shape = [packed.len(), layers, per_token].map(|size| size as i64);
        Some(Recorded { experts: upload(&experts, device).view(shape), follow: recorded.follow })
    }

    /// Those of a layer, for `rows` only where given.
    pub fn of_layer(&self, config: &ModelConfig, layer: usize, rows: Option<&Tensor>) -> Option<Recorded> {
        config.experts_of(layer)?;
        let all = self.experts.select(1, config.sparse_before(layer) as i64);
        let experts = rows.map_or_else(|| all.shallow_clone(), |rows| all.index_select(0, rows));
        Some(Recorded { experts: experts.to_kind(Kind::Int64), follow: self.follow })
    }
}

/// What is wanted of the routers of a pass, and what they did.
#[derive(Default)]
pub(crate) struct Watch {
    /// Load of the experts.
    pub balance: Option<Balance>,
    /// Recorded experts that the routers do not choose, and all recorded ones, if there are any.
    router_mismatch: Option<[Tensor; 2]>,
}

impl Watch {
    /// `balanced`: whether the load is wanted.
    pub fn new(balanced: bool) -> Self {
        Watch { balance: balanced.then(Balance::default), router_mismatch: None }
    }

    /// Returns true if the load of all tokens counts, also where nothing depends on the last layer's.
    pub fn is_of_all(&self) -> bool {
        self.balance.is_some()
    }

    /// Takes what a layer leaves, if it is sparse.
    pub(super) fn take(&mut self, left: &Left) {
        let Left::Routed(routed) = left else { return };
        if let Some(balance) = &mut self.balance {
            balance.take(routed);
        }
        if let Some(recorded) = routed.recorded {
            let _guard = tch::no_grad_guard();
            let known = recorded.ge(0);
            let is_own = recorded.unsqueeze(2).eq_tensor(&routed.own.unsqueeze(1)).any_dim(2, false);
            let counts = [known.logical_and(&is_own.logical_not()), known].map(|of| of.sum(Kind::Int64));
            self.router_mismatch = Some(match self.router_mismatch.take() {
                None => counts,
                Some([router_mismatch, all]) => [router_mismatch + &counts[0], all + &counts[1]],
            });
        }
    }

    /// The experts' loss, if it is wanted.
    pub fn loss(&self) -> Option<Tensor> {
        self.balance.as_ref().and_then(Balance::loss)
    }

    /// Largest derivative of the experts' loss by an expert's share of a layer; 0 without that loss. One
    /// download.
    pub fn steepest(&self) -> f64 {
        self.balance.as_ref().and_then(Balance::slopes).map_or(0.0, |slopes| slopes.max().double_value(&[]))
    }

    /// Recorded experts that the routers do not choose, and all recorded ones. One download.
    pub fn router_mismatch(&self) -> Option<[u64; 2]> {
        let counts: Vec<i64> = Vec::try_from(Tensor::stack(self.router_mismatch.as_ref()?, 0)).ok()?;
        counts.try_into().ok().map(|counts: [i64; 2]| counts.map(|count| count as u64))
    }
}

/// The load of the experts, whose loss spreads tokens over them (Shazeer et al., 2017; Fedus et al., 2021),
/// as transformers' `load_balancing_loss_func` computes it over the layers of a pass.
#[derive(Default)]
pub(crate) struct Balance {
    /// Of each sparse layer, the sum over tokens of each expert's probability, `[experts]`.
    shares: Vec<Tensor>,
    /// Of each, how many tokens each expert got, `[experts]`.
    sent: Vec<Tensor>,
    /// Tokens of all layers.
    tokens: i64,
}

impl Balance {
    pub(super) fn take(&mut self, Routed { probs, chosen, .. }: &Routed) {
        let probs = probs();
        let (tokens, experts) = (probs.size()[0], probs.size()[1]);
        self.tokens += tokens;
        self.shares.push(probs.sum_dim_intlist([0i64].as_slice(), false, Kind::Float));
        // Not by `bincount`, for which a GPU asks the host.
        let (chosen, none) = (chosen.reshape([-1]), Tensor::zeros([experts], (Kind::Float, chosen.device())));
        self.sent.push(none.index_add(0, &chosen, &chosen.ones_like().to_kind(Kind::Float)));
    }

    /// Derivative of the loss by each expert's share of a layer, `[experts]`; `None` without sparse layers.
    pub(super) fn slopes(&self) -> Option<Tensor> {
        let experts = self.sent.first()?.size()[0] as f64;
        let sent = Tensor::stack(&self.sent, 0).sum_dim_intlist([0i64].as_slice(), false, Kind::Float);
        Some(sent * (experts / (self.tokens as f64).powi(2)))
    }

    /// Product of the layers' shares and `slopes`: the loss, if these are [`Balance::slopes`].
    pub(super) fn along(&self, slopes: &Tensor) -> Option<Tensor> {
        self.shares.iter().map(|shares| shares.dot(slopes)).reduce(|sum, of| sum + of)
    }

    /// The loss; `None` without sparse layers.
    fn loss(&self) -> Option<Tensor> {
        self.along(&self.slopes()?)
    }
}
