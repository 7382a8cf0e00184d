//! Mixture of experts: a router sends each token to a few of many feed-forward layers (Shazeer et al.,
//! 2017), as Qwen3-MoE and OLMoE compute it.

use tch::{Kind, Tensor};

use super::fused;

/// Feed-forward layers of a sparse layer, and how tokens reach them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Number of feed-forward layers.
    pub count: usize,
    /// How many of them compute a token.
    pub per_token: usize,
    /// Width of each.
    pub width: usize,
    /// If true, the weights of a token's experts sum to 1; else they are probabilities among all.
    pub normalized: bool,
    /// Layers with one plain feed-forward layer instead.
    pub dense_layers: Vec<usize>,
}

/// Weights of a sparse layer.
pub(super) struct Sparse {
    /// `[experts, hidden]`.
    pub router: Tensor,
    /// `[experts, 2 · width, hidden]`: gate and up of each.
    pub gate_up: Tensor,
    /// `[experts, hidden, width]`.
    pub down: Tensor,
}

impl Sparse {
    /// The units of `Layout::new`.
    pub fn take(of: &Experts, hidden: usize, next: &mut impl FnMut() -> Tensor) -> Self {
        let [count, width, hidden] = [of.count, of.width, hidden].map(|size| size as i64);
        Sparse { router: next(), gate_up: next().view([count, 2 * width, hidden]), down: next().view([count, hidden, width]) }
    }

    /// Computes tokens `[N, hidden]`, each by its experts. Tokens of an expert are one product. Routing is in
    /// f32 (law N5), and so are the sums over experts, whose order does not depend on other tokens.
    /// `routed` gets the experts' probabilities `[N, experts]` and those chosen, `[N, per_token]`.
    ///
    /// Cost: the products of `per_token` experts a token, and one read of the counts by the host.
    pub fn forward(&self, x: &Tensor, of: &Experts, routed: impl FnOnce(&Tensor, &Tensor)) -> Tensor {
        let (count, per_token) = (of.count as i64, of.per_token as i64);
        // Widened, and not by `wide`, whose products have no gradient in 16 bits.
        let logits = x.to_kind(Kind::Float).linear(&self.router.to_kind(Kind::Float), None::<&Tensor>);
        let probs = logits.softmax(-1, Kind::Float);
        let (weights, chosen) = probs.topk(per_token, -1, true, true);
        routed(&probs, &chosen);
        let weights = if of.normalized { &weights / weights.sum_dim_intlist([-1i64].as_slice(), true, None) } else { weights };
        // Places of tokens, ordered by expert.
        let chosen = chosen.reshape([-1]);
        let order = chosen.argsort_stable(true, 0, false);
        let tokens: Vec<i64> = Vec::try_from(chosen.bincount(None::<&Tensor>, count)).expect("counts are one row of integers");
        let sent = x.index_select(0, &order.floor_divide_scalar(per_token)).split_with_sizes(&tokens, 0);
        // One gradient for all experts' matrices: a slice of each would have one of full size.
        let (gate_up, down) = (self.gate_up.unbind(0), self.down.unbind(0));
        let computed = |at: usize| {
            let inner = fused::swiglu(&sent[at].linear(&gate_up[at], None::<&Tensor>));
            inner.linear(&down[at], None::<&Tensor>)
        };
        let computed: Vec<Tensor> = (0..of.count).filter(|at| tokens[*at] > 0).map(computed).collect();
        let returned = Tensor::cat(&computed, 0).index_select(0, &order.argsort(0, false));
        let returned = returned.view([-1, per_token, x.size()[1]]) * weights.unsqueeze(-1);
        returned.sum_dim_intlist([1i64].as_slice(), false, Kind::Float).to_kind(x.kind())
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Each token by itself, in f64.
    fn written_out(x: &Tensor, sparse: &Sparse, of: &Experts) -> Tensor {
        let rows: Vec<Tensor> = (0..x.size()[0])
            .map(|row| {
                let x = x.get(row);
                let probs = sparse.router.matmul(&x).softmax(-1, Kind::Double);
                let (weights, chosen) = probs.topk(of.per_token as i64, -1, true, true);
                let weights = if of.normalized { &weights / weights.sum(Kind::Double) } else { weights };
                let part = |at: i64| {
                    let expert = chosen.int64_value(&[at]);
                    let halves = sparse.gate_up.get(expert).matmul(&x).chunk(2, 0);
                    sparse.down.get(expert).matmul(&(halves[0].silu() * &halves[1])) * weights.get(at)
                };
                (0..of.per_token as i64).map(part).reduce(|sum, part| sum + part).unwrap()
            })
            .collect();
        Tensor::stack(&rows, 0)
    }

    #[test]
    fn a_mixture_equals_its_experts_token_by_token_also_where_experts_have_no_tokens() {
        tch::manual_seed(11);
        for (count, per_token, tokens, normalized) in [(4, 2, 9, true), (8, 3, 2, false), (3, 3, 5, true), (6, 1, 1, false)] {
            let of = Experts { count, per_token, width: 5, normalized, dense_layers: Vec::new() };
            let leaf = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true);
            let [experts, width] = [count as i64, 5];
            let leaves = [leaf(&[tokens, 7]), leaf(&[experts, 7]), leaf(&[experts, 2 * width, 7]), leaf(&[experts, 7, width])];
            let sparse = |leaves: &[Tensor], kind: Kind| {
                let [router, gate_up, down] = [1, 2, 3].map(|at: usize| leaves[at].to_kind(kind));
                Sparse { router, gate_up, down }
            };
            let found =
                sparse(&leaves, Kind::Float).forward(&leaves[0].to_kind(Kind::Float), &of, |_, _| {}).to_kind(Kind::Double);
            let expected = written_out(&leaves[0], &sparse(&leaves, Kind::Double), &of);
            let along = expected.randn_like();
            let gradients = |y: &Tensor| Tensor::run_backward(&[(y * &along).sum(Kind::Double)], &leaves, true, false);
            let pairs = gradients(&found)
                .into_iter()
                .zip(gradients(&expected))
                .chain([(found.shallow_clone(), expected.shallow_clone())]);
            for (found, expected) in pairs {
                let gap = (found - expected).abs().max().double_value(&[]);
                assert!(gap < 1e-4, "{count} experts, {per_token} a token: {gap}");
            }
        }
    }
}
