//! Gated delta net (Yang et al., 2024): linear attention whose state decays and is corrected by each token,
//! as Qwen3.5 computes it. A sequence's state takes the place of keys and values.

use tch::{Kind, Tensor};

use super::fused::half;
use super::packed::Rectangle;
use super::{ModelConfig, fused, upload};

/// Tokens that are computed by products of matrices; between chunks the state is handed on.
const CHUNK: i64 = 64;

/// Sizes of the layers that are gated delta nets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatedDelta {
    /// Layers.
    pub layers: Vec<usize>,
    /// Query and key heads; divides `value_heads`.
    pub key_heads: usize,
    /// Value heads, each with a state.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Tokens that the convolution sees, a token's own included.
    pub kernel: usize,
}

impl GatedDelta {
    /// Columns of queries, keys and values together, which the convolution mixes over time.
    pub(super) fn mixed(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.values()
    }

    /// Columns of values.
    pub(super) fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Numbers of a sequence's state: those of the convolution, and those of the heads.
    pub fn state_sizes(&self) -> [usize; 2] {
        [self.mixed() * (self.kernel - 1), self.value_heads * self.key_dim * self.value_dim]
    }
}

/// Weights of a layer between its two projections.
pub(super) struct DeltaWeights {
    /// `[mixed, kernel]`.
    pub conv: Tensor,
    /// Added to the step of each value head.
    pub step_bias: Tensor,
    /// Logarithm of each value head's decay.
    pub decay: Tensor,
    /// Factors of the output's norm, the same for all heads.
    pub norm: Tensor,
    /// Added to the mean square in the norm.
    pub eps: f64,
}

/// State of sequences: the convolution's last inputs `[sequences, mixed, kernel − 1]`, and
/// `[sequences, value heads, key dim, value dim]` in f32.
pub(super) struct DeltaState {
    pub conv: Tensor,
    pub heads: Tensor,
}

/// Inputs of the recurrence, in f32: `[sequences, value heads, tokens, …]`.
struct Steps {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    /// Logarithm of each token's decay, at most 0.
    decay: Tensor,
    /// Share of the correction that is written.
    beta: Tensor,
}

impl DeltaWeights {
    /// The units of `Layout::new`.
    pub fn take(config: &ModelConfig, next: &mut impl FnMut() -> Tensor) -> Self {
        let conv = next();
        let conv = conv.to_kind(half::activations(conv.kind(), conv.device()));
        DeltaWeights { conv, step_bias: next(), decay: next(), norm: next(), eps: config.rms_norm_eps }
    }

    /// Whole sequences: projections `[tokens, mixed + values + 2 · value heads]` of a rectangle's packed rows,
    /// to outputs `[tokens, values]`. `keep` gets the state after each sequence.
    pub fn whole(
        &self,
        of: &GatedDelta,
        projected: &Tensor,
        rectangle: &Rectangle,
        lens: &[usize],
        keep: impl FnOnce(&DeltaState),
    ) -> Tensor {
        let (rows, columns, before) = (rectangle.rows, rectangle.columns, of.kernel as i64 - 1);
        let [mixed, gate, beta, step] = self.parts(of, &rectangle.spread(projected).view([rows, columns, -1]));
        let inputs = mixed.transpose(1, 2).constant_pad_nd([before, 0]);
        let convolved = self.convolved(of, &inputs);
        // Padding neither decays a state nor adds to it.
        let lens = upload(&lens.iter().map(|len| *len as i64).collect::<Vec<_>>(), projected.device());
        let at = Tensor::arange(columns, (Kind::Int64, projected.device()));
        let real = at.unsqueeze(0).less_tensor(&lens.unsqueeze(1)).to_kind(Kind::Float).unsqueeze(-1);
        let steps = self.steps(of, &convolved, &beta, &step, Some(&real));
        let (out, heads) = chunked(&steps);
        let last = lens.unsqueeze(1) + Tensor::arange(before, (Kind::Int64, projected.device())).unsqueeze(0);
        let conv = inputs.gather(2, &last.unsqueeze(1).expand([rows, inputs.size()[1], before], false), false);
        keep(&DeltaState { conv, heads });
        rectangle.pack(self.gated(of, &out.transpose(1, 2), &gate))
    }

    /// One token of each sequence: projections `[sequences, …]`, with the states before, which become those
    /// after it.
    pub fn step(&self, of: &GatedDelta, projected: &Tensor, state: &DeltaState) -> Tensor {
        let by_head = [&self.step_bias, &self.decay, &self.norm];
        if let Some(out) = fused::gpu::delta_step(projected, &self.conv, (&state.conv, &state.heads), by_head, self.eps) {
            return out;
        }
        let rows = projected.size()[0];
        let [mixed, gate, beta, step] = self.parts(of, &projected.view([rows, 1, -1]));
        let inputs = Tensor::cat(&[state.conv.shallow_clone(), mixed.transpose(1, 2)], 2);
        state.conv.shallow_clone().copy_(&inputs.narrow(2, 1, of.kernel as i64 - 1));
        let Steps { query, key, value, decay, beta } = self.steps(of, &self.convolved(of, &inputs), &beta, &step, None);
        let [query, key, value] = [query, key, value].map(|part| part.squeeze_dim(2));
        let decayed = &state.heads * decay.exp().unsqueeze(-1);
        let known = key.unsqueeze(2).matmul(&decayed).squeeze_dim(2);
        let delta = (value - known) * beta;
        let heads = decayed + key.unsqueeze(3) * delta.unsqueeze(2);
        let out = query.unsqueeze(2).matmul(&heads);
        state.heads.shallow_clone().copy_(&heads);
        self.gated(of, &out.transpose(1, 2), &gate)
    }

    /// Inputs of the convolution, gates, and the logits of beta and of the step.
    fn parts(&self, of: &GatedDelta, projected: &Tensor) -> [Tensor; 4] {
        let sizes = [of.mixed(), of.values(), of.value_heads, of.value_heads].map(|size| size as i64);
        let mut parts = projected.split_with_sizes(sizes, -1).into_iter();
        [(); 4].map(|()| parts.next().expect("as many parts as sizes"))
    }

    /// `[rows, mixed, tokens + kernel − 1]` → `[rows, tokens, mixed]`.
    fn convolved(&self, of: &GatedDelta, inputs: &Tensor) -> Tensor {
        let channels = of.mixed() as i64;
        inputs.conv1d(&self.conv.unsqueeze(1), None::<&Tensor>, 1, 0, 1, channels).silu().transpose(1, 2)
    }

    fn steps(&self, of: &GatedDelta, convolved: &Tensor, beta: &Tensor, step: &Tensor, real: Option<&Tensor>) -> Steps {
        let (rows, tokens, heads) = (convolved.size()[0], convolved.size()[1], of.value_heads as i64);
        let keys = (of.key_heads * of.key_dim) as i64;
        let parts = convolved.to_kind(Kind::Float).split_with_sizes([keys, keys, of.values() as i64], -1);
        let by_head = |part: &Tensor, dim: usize| part.reshape([rows, tokens, -1, dim as i64]).transpose(1, 2);
        // Queries and keys have a length of 1, and serve several value heads each.
        let unit = |part: &Tensor| {
            let part = by_head(part, of.key_dim);
            let length = (part.square().sum_dim_intlist([-1i64].as_slice(), true, None) + 1e-6).rsqrt();
            (part * length).repeat_interleave_self_int(heads / of.key_heads as i64, 1, None)
        };
        let masked = |x: Tensor| real.map_or_else(|| x.shallow_clone(), |real| &x * real).transpose(1, 2);
        let wide = |x: &Tensor| x.to_kind(Kind::Float);
        let decay = -wide(&self.decay).exp() * (wide(step) + wide(&self.step_bias)).softplus();
        Steps {
            query: unit(&parts[0]) * (of.key_dim as f64).sqrt().recip(),
            key: unit(&parts[1]),
            value: by_head(&parts[2], of.value_dim),
            decay: masked(decay),
            beta: masked(wide(beta).sigmoid()),
        }
    }

    /// Normed outputs `[rows, tokens, value heads, value dim]` by their gates, as `[rows · tokens, values]`.
    fn gated(&self, of: &GatedDelta, out: &Tensor, gate: &Tensor) -> Tensor {
        let normed = fused::rms_norm(&out.contiguous(), &self.norm.to_kind(Kind::Float), self.eps);
        let gate_wide = gate.to_kind(Kind::Float).reshape(out.size().as_slice()).silu();
        (normed * gate_wide).to_kind(gate.kind()).view([-1, of.values() as i64])
    }
}

/// The recurrence over whole sequences: outputs `[sequences, value heads, tokens, value dim]` and the last
/// state. Within a chunk, the corrections of all tokens are the solution of one triangular system.
fn chunked(of: &Steps) -> (Tensor, Tensor) {
    let [rows, heads, tokens, _] = <[i64; 4]>::try_from(of.key.size()).expect("four dimensions");
    let chunk = CHUNK.min(tokens);
    let padding = (chunk - tokens % chunk) % chunk;
    let wide = |x: &Tensor| x.constant_pad_nd([0, 0, 0, padding]).view([rows, heads, -1, chunk, x.size()[3]]);
    let narrow = |x: &Tensor| x.constant_pad_nd([0, padding]).view([rows, heads, -1, chunk]);
    let [query, key, value] = [&of.query, &of.key, &of.value].map(wide);
    let (decay, beta) = (narrow(&of.decay).cumsum(-1, Kind::Float), narrow(&of.beta).unsqueeze(-1));

    let later = Tensor::ones([chunk, chunk], (Kind::Bool, key.device())).triu(1);
    let pairs = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(&later, f64::NEG_INFINITY).exp();
    let since_begin = decay.exp().unsqueeze(-1);
    let written = &key * &beta;
    let system = written.matmul(&key.transpose(-1, -2)) * &pairs;
    let attention = query.matmul(&key.transpose(-1, -2)) * pairs;
    let right = Tensor::cat(&[value * beta, written * &since_begin], -1);
    let solved = system.linalg_solve_triangular(&right, false, true, true);
    let mut solved = solved.split_with_sizes([of.value.size()[3], of.key.size()[3]], -1).into_iter();
    let [values, keys] = [(); 2].map(|()| solved.next().expect("two parts"));

    let query = query * since_begin;
    let last = decay.narrow(-1, chunk - 1, 1);
    let key = key * (&last - decay).exp().unsqueeze(-1);
    let kept = last.exp().unsqueeze(-1);
    let mut state = Tensor::zeros([rows, heads, of.key.size()[3], of.value.size()[3]], (Kind::Float, key.device()));
    // One gradient for all chunks: a slice of each would have one of full size.
    let [query, key, keys, values, attention, kept] = [query, key, keys, values, attention, kept].map(|x| x.unbind(2));
    let mut out = Vec::new();
    for at in 0..key.len() {
        let new = &values[at] - keys[at].matmul(&state);
        out.push(query[at].matmul(&state) + attention[at].matmul(&new));
        state = state * &kept[at] + key[at].transpose(-1, -2).matmul(&new);
    }
    (Tensor::cat(&out, 2).narrow(2, 0, tokens), state)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::model::Packed;

    const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

    /// The recurrence by its definition, token by token and in f64, over `[tokens, value heads, …]`.
    fn token_by_token(steps: [&Tensor; 5]) -> (Tensor, Tensor) {
        let [query, key, value, decay, beta] = steps;
        let (tokens, heads, key_dim) = key.size3().unwrap();
        let mut state = Tensor::zeros([heads, key_dim, value.size()[2]], F64);
        let mut out = Vec::new();
        for at in 0..tokens {
            let of = |x: &Tensor| x.get(at);
            state = of(decay).exp().view([heads, 1, 1]) * state;
            let known = (&state * of(key).unsqueeze(-1)).sum_dim_intlist([1i64].as_slice(), false, None);
            let delta = (of(value) - known) * of(beta).unsqueeze(-1);
            state = of(key).unsqueeze(-1) * delta.unsqueeze(1) + state;
            out.push((&state * of(query).unsqueeze(-1)).sum_dim_intlist([1i64].as_slice(), false, None));
        }
        (Tensor::stack(&out, 0), state)
    }

    #[test]
    fn chunks_equal_the_recurrence_token_by_token_with_gradients() {
        tch::manual_seed(2);
        for tokens in [1, 2, 63, 64, 65, 150] {
            let (heads, key_dim, value_dim) = (2, 4, 3);
            let unit = |x: Tensor| &x / x.square().sum_dim_intlist([-1i64].as_slice(), true, None).sqrt();
            let leaf = |x: Tensor| x.set_requires_grad(true);
            let leaves = [
                leaf(unit(Tensor::randn([tokens, heads, key_dim], F64)) * 0.5),
                leaf(unit(Tensor::randn([tokens, heads, key_dim], F64))),
                leaf(Tensor::randn([tokens, heads, value_dim], F64)),
                leaf(-Tensor::rand([tokens, heads], F64)),
                leaf(Tensor::rand([tokens, heads], F64)),
            ];
            let (expected, state) = token_by_token(leaves.each_ref());
            let [query, key, value, decay, beta] =
                leaves.each_ref().map(|leaf| leaf.to_kind(Kind::Float).transpose(0, 1).unsqueeze(0));
            let (found, found_state) = chunked(&Steps { query, key, value, decay, beta });
            let found = found.squeeze_dim(0).transpose(0, 1).to_kind(Kind::Double);
            let along = expected.randn_like();
            let gradients = |y: &Tensor| Tensor::run_backward(&[(y * &along).sum(Kind::Double)], &leaves, true, false);
            let pairs = gradients(&found).into_iter().zip(gradients(&expected));
            let own =
                [(found.shallow_clone(), expected.shallow_clone()), (found_state.squeeze_dim(0).to_kind(Kind::Double), state)];
            for (at, (found, expected)) in pairs.chain(own).enumerate() {
                let gap = (found - expected).abs().max().double_value(&[]);
                assert!(gap < 5e-5, "{tokens} tokens, result {at}: {gap}");
            }
        }
    }

    /// Sequences of a pack know nothing of each other, and a state continues where its sequence ended.
    #[test]
    fn packed_sequences_equal_steps_of_one_token_and_leave_their_states() {
        tch::manual_seed(3);
        let of = GatedDelta { layers: vec![0], key_heads: 2, value_heads: 4, key_dim: 4, value_dim: 3, kernel: 4 };
        let mixed = of.mixed() as i64;
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let weights = DeltaWeights {
            conv: random(&[mixed, 4]),
            step_bias: random(&[4]),
            decay: random(&[4]) * 0.5,
            norm: random(&[3]),
            eps: 1e-6,
        };
        let lens = [70_usize, 1, 2, 9];
        let mut packed = Packed::default();
        for len in lens {
            packed.push(vec![0; len], None);
        }
        let projected = random(&[packed.len() as i64, mixed + of.values() as i64 + 8]);
        let rectangle = Rectangle::new(&packed, Device::Cpu);
        let mut left = None;
        let keep = |state: &DeltaState| left = Some([state.conv.copy(), state.heads.copy()]);
        let whole = weights.whole(&of, &projected, &rectangle, &packed.lens, keep);
        let [conv, heads] = left.unwrap();
        for (at, start) in packed.starts().enumerate() {
            let state = DeltaState { conv: conv.get(0).unsqueeze(0).zeros_like(), heads: heads.get(0).unsqueeze(0).zeros_like() };
            for row in start..start + lens[at] {
                let found = weights.step(&of, &projected.narrow(0, row as i64, 1), &state);
                let gap = (found - whole.narrow(0, row as i64, 1)).abs().max().double_value(&[]);
                assert!(gap < 1e-4, "row {row} of sequence {at}: {gap}");
            }
            for (found, expected) in [(state.conv, conv.get(at as i64)), (state.heads, heads.get(at as i64))] {
                assert!((found.squeeze_dim(0) - expected).abs().max().double_value(&[]) < 1e-4, "state of sequence {at}");
            }
        }
    }
}
