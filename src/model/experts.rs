//! Mixture of experts: a router sends each token to a few of many feed-forward layers (Shazeer et al.,
//! 2017), as Qwen3-MoE, OLMoE, Qwen3.5-MoE and gpt-oss compute it.

use tch::{Kind, Tensor};

use super::fused::{self, gpu, half};
use super::low_rank::{ExpertRank, LowRank};
use super::routing::Recorded;
use super::wide;

/// Feed-forward layers of a sparse layer, and how tokens reach them.
#[derive(Clone, Debug, PartialEq)]
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
    /// Width of a further feed-forward layer that computes every token, by a gate of its output, if there is one.
    pub shared: Option<usize>,
    /// What an expert computes.
    pub layer: ExpertLayer,
}

impl Experts {
    /// Width of what computes a token.
    pub fn active_width(&self) -> usize {
        self.per_token * self.width + self.shared.unwrap_or(0)
    }
}

/// What an expert computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertLayer {
    /// `down(silu(gate) · up)` without biases.
    SwiGlu,
    /// gpt-oss's: `down((up + 1) · gate · sigmoid(alpha · gate))`, with biases, the router's included. Gate is
    /// bounded from above, up on both sides; they take turns in a folder, whose matrices are multiplied from
    /// the right.
    Bounded {
        /// Steepness of the sigmoid.
        alpha: f64,
        /// Bound.
        limit: f64,
    },
}

impl ExpertLayer {
    /// The activation of `[N, 2 · width]`, `[N, width]`.
    fn activated(self, gate_up: &Tensor) -> Tensor {
        match self {
            ExpertLayer::SwiGlu => fused::swiglu(gate_up),
            ExpertLayer::Bounded { alpha, limit } => {
                let pairs = gate_up.view([gate_up.size()[0], gate_up.size()[1] / 2, 2]);
                let gate = pairs.select(2, 0).clamp_max(limit);
                let up = pairs.select(2, 1).clamp(-limit, limit);
                (up + 1.0) * (&gate * (&gate * alpha).sigmoid())
            }
        }
    }
}

/// How the tokens of a layer were routed.
pub(super) struct Routed<'a> {
    /// Gives the probabilities of experts, `[tokens, experts]`.
    pub probs: &'a dyn Fn() -> Tensor,
    /// The experts that the router chooses, the likeliest first, `[tokens, per_token]`.
    pub own: &'a Tensor,
    /// Those that compute the tokens.
    pub chosen: &'a Tensor,
    /// Those that computed them before, if that is known.
    pub recorded: Option<&'a Tensor>,
}

/// Which rows are computed, ordered by expert.
struct Sorted {
    /// Token and expert of each row, `[rows]`.
    sources: Tensor,
    experts: Tensor,
    /// The rows of each token, `[tokens, per_token]`.
    places: Tensor,
    /// Where each expert's rows end, `[experts]` in i32.
    ends: Tensor,
}

impl Sorted {
    fn new(chosen: &Tensor, of: &Experts) -> Self {
        if let Some([sources, experts, places, ends]) = gpu::sort_by_expert(chosen, of.count) {
            return Sorted { sources, experts, places, ends };
        }
        let (experts, order) = chosen.reshape([-1]).sort_stable(true, 0, false);
        let upto = |end: i64| Tensor::arange(end, (Kind::Int64, chosen.device()));
        Sorted {
            sources: order.floor_divide_scalar(of.per_token as i64),
            places: order.scatter(0, &order, &upto(order.size()[0])).view(chosen.size().as_slice()),
            ends: upto(of.count as i64).searchsorted(&experts, true, true, "right", None::<&Tensor>),
            experts,
        }
    }
}

/// Weights of a sparse layer.
pub(super) struct Sparse {
    /// `[experts, hidden]`.
    pub router: Tensor,
    /// `[experts, 2 · width, hidden]`: gate and up of each.
    pub gate_up: Tensor,
    /// `[experts, hidden, width]`.
    pub down: Tensor,
    /// Biases of the three, `[experts, …]`, if there are any.
    pub biases: Option<[Tensor; 3]>,
    /// Adapters of gate and up, and of down.
    pub low_ranks: Option<[ExpertRank; 2]>,
    /// Adapters of the router.
    pub router_rank: Option<LowRank>,
}

impl Sparse {
    /// The units of `Layout::new`.
    pub fn take(of: &Experts, hidden: usize, next: &mut impl FnMut() -> Tensor) -> Self {
        let [count, width, hidden] = [of.count, of.width, hidden].map(|size| size as i64);
        let router = next();
        if of.layer == ExpertLayer::SwiGlu {
            let (gate_up, down) = (next().view([count, 2 * width, hidden]), next().view([count, hidden, width]));
            return Sparse { router, gate_up, down, biases: None, low_ranks: None, router_rank: None };
        }
        // Matrices that are multiplied from the right, as views.
        let of_router = next();
        let mut one = |input, output| {
            let (weight, bias) = (next().view([count, input, output]).transpose(1, 2), next());
            (weight, bias.to_kind(half::activations(bias.kind(), bias.device())))
        };
        let ((gate_up, of_gate_up), (down, of_down)) = (one(hidden, 2 * width), one(width, hidden));
        Sparse { router, gate_up, down, biases: Some([of_router, of_gate_up, of_down]), low_ranks: None, router_rank: None }
    }

    /// Computes tokens `[N, hidden]`, each by its experts. Tokens of an expert are one product. Routing is in
    /// f32 (law N5), and so are the sums over experts, whose order does not depend on other tokens.
    /// `recorded`: experts that computed the tokens before. Where they are followed, weights are the router's
    /// probabilities of them (Ma et al., 2025). `shared`: rows `[N, hidden]` that are added, by the sigmoids of
    /// `[N, 1]`.
    ///
    /// Cost: the products of `per_token` experts a token; but for [`Sparse::is_grouped`], one read of the counts
    /// by the host.
    pub fn forward(
        &self,
        x: &Tensor,
        of: &Experts,
        shared: Option<[&Tensor; 2]>,
        recorded: Option<&Recorded>,
        routed: impl FnOnce(&Routed),
    ) -> Tensor {
        let (weights, chosen) = self.route(x, of, recorded, routed);
        let sorted = Sorted::new(&chosen, of);
        let sent = gpu::send(x, &sorted.sources, &sorted.places).unwrap_or_else(|| wide::gathered(x, &sorted.sources));
        let (computed, biases) = match self.is_grouped() {
            true => self.by_group(&sent, &sorted, of.layer),
            false => (self.one_by_one(&sent, &sorted.ends, of.layer), None),
        };
        let more = gpu::Added { biases: biases.map(|biases| [biases, &chosen]), shared };
        gpu::sum_of_rows(&computed, &sorted.places, &weights, more).unwrap_or_else(|| {
            let computed = biases.map_or_else(|| computed.shallow_clone(), |of| &computed + of.index_select(0, &sorted.experts));
            let sum = gpu::combine(&computed, &sorted.places, &weights).unwrap_or_else(|| {
                let returned = computed.index_select(0, &sorted.places.view([-1])).view([-1, of.per_token as i64, x.size()[1]]);
                (returned * weights.unsqueeze(-1)).sum_dim_intlist([1i64].as_slice(), false, Kind::Float).to_kind(x.kind())
            });
            match shared {
                Some([rows, gates]) => sum + rows * gates.sigmoid(),
                None => sum,
            }
        })
    }

    /// Weights and numbers of each token's experts, `[tokens, per_token]`.
    fn route(&self, x: &Tensor, of: &Experts, recorded: Option<&Recorded>, routed: impl FnOnce(&Routed)) -> (Tensor, Tensor) {
        let bias = self.biases.as_ref().map(|[of_router, ..]| of_router);
        // Widened, and not by `wide`, whose products have no gradient in 16 bits.
        let wide = |x: &Tensor| x.to_kind(Kind::Float);
        let logits =
            gpu::router(x, &self.router, bias).unwrap_or_else(|| wide(x).linear(&wide(&self.router), bias.map(wide).as_ref()));
        let logits = match &self.router_rank {
            None => logits,
            Some(of) => of.widened().add(logits, &wide(x)),
        };
        if recorded.is_none()
            && let Some([weights, chosen]) = gpu::likeliest(&logits, of.per_token, of.normalized)
        {
            let probs = || logits.softmax(-1, Kind::Float);
            routed(&Routed { probs: &probs, own: &chosen, chosen: &chosen, recorded: None });
            return (weights, chosen);
        }
        let probs = logits.softmax(-1, Kind::Float);
        let (mut weights, own) = probs.topk(of.per_token as i64, -1, true, true);
        let mut chosen = own.shallow_clone();
        if let Some(recorded) = recorded.filter(|recorded| recorded.follow) {
            chosen = recorded.experts.where_self(&recorded.experts.ge(0), &own);
            weights = probs.gather(-1, &chosen, false);
        }
        let recorded = recorded.map(|recorded| &recorded.experts);
        routed(&Routed { probs: &|| probs.shallow_clone(), own: &own, chosen: &chosen, recorded });
        match of.normalized {
            true => (&weights / weights.sum_dim_intlist([-1i64].as_slice(), true, None), chosen),
            false => (weights, chosen),
        }
    }

    /// Returns true if the products of all experts are one, which does not depend on the host.
    pub fn is_grouped(&self) -> bool {
        let ranks = self.low_ranks.iter().flatten().flat_map(|of| [&of.down, &of.up]);
        [&self.gate_up, &self.down].into_iter().chain(ranks).all(gpu::multiplies_groups)
    }

    /// Rows ordered by expert, and biases that are still to be added to them.
    fn by_group(&self, sent: &Tensor, sorted: &Sorted, layer: ExpertLayer) -> (Tensor, Option<&Tensor>) {
        let product = |x: &Tensor, weight: &Tensor, at: usize| {
            let plain = gpu::multiply_groups(x, weight, &sorted.ends);
            match &self.low_ranks {
                None => plain,
                Some(of) => {
                    let inner = gpu::multiply_groups(x, &of[at].down, &sorted.ends);
                    plain + gpu::multiply_groups(&inner, &of[at].up, &sorted.ends)
                }
            }
        };
        let (gate_up, [of_gate_up, of_down]) =
            (product(sent, &self.gate_up, 0), [1, 2].map(|at: usize| self.biases.as_ref().map(|biases| &biases[at])));
        let fused = match (layer, of_gate_up) {
            (ExpertLayer::Bounded { alpha, limit }, Some(of)) => gpu::bounded_gate(&gate_up, [of, &sorted.experts], alpha, limit),
            _ => None,
        };
        let inner = fused.unwrap_or_else(|| match of_gate_up {
            Some(of) => layer.activated(&(&gate_up + of.index_select(0, &sorted.experts))),
            None => layer.activated(&gate_up),
        });
        // They are freed before the second product.
        drop(gate_up);
        (product(&inner, &self.down, 1), of_down)
    }

    /// [`Sparse::by_group`], a product an expert.
    fn one_by_one(&self, sent: &Tensor, ends: &Tensor, layer: ExpertLayer) -> Tensor {
        let ends: Vec<i64> = Vec::try_from(ends.to_kind(Kind::Int64)).expect("ends are one row of integers");
        let tokens: Vec<i64> = ends.iter().scan(0, |begin, end| Some(end - std::mem::replace(begin, *end))).collect();
        let sent = sent.split_with_sizes(&tokens, 0);
        // One gradient for all experts' matrices: a slice of each would have one of full size.
        let matrices = [&self.gate_up, &self.down].map(|of| of.unbind(0));
        let biases = self.biases.as_ref().map(|[_, gate_up, down]| [gate_up, down].map(|of| of.unbind(0)));
        let low_ranks = self.low_ranks.as_ref().map(|of| of.each_ref().map(|of| [of.down.unbind(0), of.up.unbind(0)]));
        let product = |x: &Tensor, of: usize, expert: usize| {
            let plain = half::linear(x, &matrices[of][expert], biases.as_ref().map(|biases| &biases[of][expert]));
            match &low_ranks {
                None => plain,
                Some(ranks) => {
                    let [down, up] = &ranks[of];
                    LowRank { down: down[expert].shallow_clone(), up: up[expert].shallow_clone() }.add(plain, x)
                }
            }
        };
        let computed = |at: usize| product(&layer.activated(&product(&sent[at], 0, at)), 1, at);
        let computed: Vec<Tensor> = (0..tokens.len()).filter(|at| tokens[*at] > 0).map(computed).collect();
        Tensor::cat(&computed, 0)
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Each token by itself, in f64, by the recorded experts where these are followed.
    fn written_out(x: &Tensor, sparse: &Sparse, of: &Experts, recorded: Option<&Recorded>) -> Tensor {
        let rows: Vec<Tensor> = (0..x.size()[0])
            .map(|row| {
                let x = x.get(row);
                let probs = sparse.router.matmul(&x).softmax(-1, Kind::Double);
                let chosen = probs.topk(of.per_token as i64, -1, true, true).1;
                let followed = recorded.filter(|recorded| recorded.follow).map(|recorded| recorded.experts.get(row));
                let experts: Vec<i64> = (0..of.per_token as i64)
                    .map(|at| match followed.as_ref().map_or(-1, |followed| followed.int64_value(&[at])) {
                        -1 => chosen.int64_value(&[at]),
                        expert => expert,
                    })
                    .collect();
                let chosen = Tensor::from_slice(&experts);
                let weights = probs.index_select(0, &chosen);
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

    /// Any experts, of which every third token's are not known.
    fn recorded(tokens: i64, of: &Experts) -> Tensor {
        let row = |row: i64| match row % 3 {
            2 => Tensor::full([of.per_token as i64], -1, (Kind::Int64, Device::Cpu)),
            _ => Tensor::randperm(of.count as i64, (Kind::Int64, Device::Cpu)).narrow(0, 0, of.per_token as i64),
        };
        Tensor::stack(&(0..tokens).map(row).collect::<Vec<_>>(), 0)
    }

    #[test]
    fn a_mixture_equals_its_experts_token_by_token_also_where_experts_have_no_tokens() {
        tch::manual_seed(11);
        for follow in [None, Some(false), Some(true)] {
            compare(follow);
        }
    }

    /// `follow`: whether recorded experts are followed, where there are any.
    fn compare(follow: Option<bool>) {
        for (count, per_token, tokens, normalized) in [(4, 2, 9, true), (8, 3, 2, false), (3, 3, 5, true), (6, 1, 1, false)] {
            let of = Experts {
                count,
                per_token,
                width: 5,
                normalized,
                dense_layers: Vec::new(),
                shared: None,
                layer: ExpertLayer::SwiGlu,
            };
            let leaf = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true);
            let [experts, width] = [count as i64, 5];
            let leaves = [leaf(&[tokens, 7]), leaf(&[experts, 7]), leaf(&[experts, 2 * width, 7]), leaf(&[experts, 7, width])];
            let sparse = |leaves: &[Tensor], kind: Kind| {
                let [router, gate_up, down] = [1, 2, 3].map(|at: usize| leaves[at].to_kind(kind));
                Sparse { router, gate_up, down, biases: None, low_ranks: None, router_rank: None }
            };
            let recorded = follow.map(|follow| Recorded { experts: recorded(tokens, &of), follow });
            let (found, recorded) = (sparse(&leaves, Kind::Float), recorded.as_ref());
            let found = found.forward(&leaves[0].to_kind(Kind::Float), &of, None, recorded, |_| {}).to_kind(Kind::Double);
            let expected = written_out(&leaves[0], &sparse(&leaves, Kind::Double), &of, recorded);
            let along = expected.randn_like();
            let gradients = |y: &Tensor| Tensor::run_backward(&[(y * &along).sum(Kind::Double)], &leaves, true, false);
            let pairs = gradients(&found)
                .into_iter()
                .zip(gradients(&expected))
                .chain([(found.shallow_clone(), expected.shallow_clone())]);
            for (found, expected) in pairs {
                let gap = (found - expected).abs().max().double_value(&[]);
                assert!(gap < 1e-4, "{count} experts, {per_token} a token, followed: {follow:?}: {gap}");
            }
        }
    }
}
