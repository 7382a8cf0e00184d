//! The loss that spreads tokens over experts (Shazeer et al., 2017; Fedus et al., 2021), as transformers'
//! `load_balancing_loss_func` computes it over the layers of a pass.

use tch::{Kind, Tensor};

use super::block::Left;

/// What the routers of a pass did.
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
    /// Takes what a layer leaves, if it is sparse.
    pub(super) fn take(&mut self, left: &Left) {
        let Left::Routes(probs, chosen) = left else { return };
        let (tokens, experts) = (probs.size()[0], probs.size()[1]);
        self.tokens += tokens;
        self.shares.push(probs.sum_dim_intlist([0i64].as_slice(), false, Kind::Float));
        self.sent.push(chosen.reshape([-1]).bincount(None::<&Tensor>, experts).to_kind(Kind::Float));
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
    pub(crate) fn loss(&self) -> Option<Tensor> {
        self.along(&self.slopes()?)
    }
}
