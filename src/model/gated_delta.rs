//! Gated delta net (Yang et al., 2024): linear attention whose state decays and is corrected by each token,
//! as Qwen3.5 computes it. A sequence's state takes the place of keys and values.

use tch::{Kind, Tensor};

use super::fused::half;
use super::net_rows::NetRows;
use super::{ModelConfig, fused};

/// Tokens that are computed by products of matrices; between chunks the state is handed on.
pub(crate) const CHUNK: i64 = 64;

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
    pub(crate) fn mixed(&self) -> usize {
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

impl DeltaWeights {
    /// The units of `Layout::new`.
    pub fn take(config: &ModelConfig, next: &mut impl FnMut() -> Tensor) -> Self {
        let conv = next();
        let conv = conv.to_kind(half::activations(conv.kind(), conv.device()));
        DeltaWeights { conv, step_bias: next(), decay: next(), norm: next(), eps: config.rms_norm_eps }
    }

    /// Several tokens of sequences: packed projections `[tokens, mixed + values + 2 · value heads]`, to outputs
    /// `[tokens, values]`. `before`: their states before, for sequences that have begun. `keep` gets the states
    /// after each sequence that continues no other.
    pub fn several(
        &self,
        of: &GatedDelta,
        projected: &Tensor,
        rows: &NetRows,
        before: Option<&DeltaState>,
        keep: impl FnOnce(&DeltaState),
    ) -> Tensor {
        let (heads, seen, mixed) = (of.value_heads as i64, of.kernel as i64 - 1, of.mixed() as i64);
        let [inputs, gate, beta, step] = self.parts(of, projected);
        let zeros = |like: &Tensor| like.new_zeros([1, like.size()[1]], (like.kind(), like.device()));
        let others = match before {
            None => zeros(&inputs),
            Some(before) => Tensor::cat(&[zeros(&inputs), before.conv.transpose(1, 2).reshape([-1, mixed])], 0),
        };
        let fused = fused::delta_inputs(of, &inputs, &others, &self.conv, &rows.sources, rows.chunk);
        let [query, key, value] = fused.unwrap_or_else(|| {
            let inputs = Tensor::cat(&[&inputs, &others], 0).index_select(0, &rows.sources);
            let inputs = inputs.view([-1, seen + rows.chunk, mixed]).transpose(1, 2);
            self.heads(of, self.convolved(of, &inputs))
        });
        // Padding neither decays a state nor adds to it.
        let by_chunk = |x: Tensor| {
            Tensor::cat(&[&x, &zeros(&x)], 0)
                .index_select(0, &rows.tokens)
                .view([-1, rows.chunk, heads])
                .transpose(1, 2)
                .contiguous()
        };
        let [decay, beta] = self.rates(&beta, &step).map(by_chunk);
        let [sorted, order] = &rows.begun;
        let states = before.map(|before| before.heads.index_select(0, sorted));
        let [out, after] = fused::delta_chunks([&query, &key, &value, &decay, &beta], states.as_ref(), &rows.steps);
        let conv = rows.left_of(&inputs, &others).view([rows.steps.begun, seen, mixed]).transpose(1, 2);
        keep(&DeltaState { conv, heads: after.index_select(0, order) });
        let out = out.transpose(1, 2).reshape([-1, heads, of.value_dim as i64]).index_select(0, &rows.cells);
        self.gated(of, out, &gate)
    }

    /// One token of each sequence: projections `[sequences, …]`, with the states before, which become those
    /// after it.
    pub fn step(&self, of: &GatedDelta, projected: &Tensor, state: &DeltaState) -> Tensor {
        let by_head = [&self.step_bias, &self.decay, &self.norm];
        if let Some(out) = fused::gpu::delta_step(projected, &self.conv, (&state.conv, &state.heads), by_head, self.eps) {
            return out;
        }
        let [mixed, gate, beta, step] = self.parts(of, projected);
        let inputs = Tensor::cat(&[state.conv.shallow_clone(), mixed.unsqueeze(2)], 2);
        state.conv.shallow_clone().copy_(&inputs.narrow(2, 1, of.kernel as i64 - 1));
        let [query, key, value] = self.heads(of, self.convolved(of, &inputs)).map(|part| part.squeeze_dim(2));
        let [decay, beta] = self.rates(&beta, &step).map(|part| part.unsqueeze(-1));
        let decayed = &state.heads * decay.exp().unsqueeze(-1);
        let known = key.unsqueeze(2).matmul(&decayed).squeeze_dim(2);
        let delta = (value - known) * beta;
        let heads = decayed + key.unsqueeze(3) * delta.unsqueeze(2);
        let out = query.unsqueeze(2).matmul(&heads);
        state.heads.shallow_clone().copy_(&heads);
        self.gated(of, out.squeeze_dim(2), &gate)
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

    /// Queries, keys and values of each value head in f32, `[rows, tokens, mixed]` → `[rows, value heads,
    /// tokens, …]`.
    fn heads(&self, of: &GatedDelta, convolved: Tensor) -> [Tensor; 3] {
        let (rows, tokens, shared) = (convolved.size()[0], convolved.size()[1], (of.value_heads / of.key_heads) as i64);
        let keys = (of.key_heads * of.key_dim) as i64;
        let parts = convolved.to_kind(Kind::Float).split_with_sizes([keys, keys, of.values() as i64], -1);
        drop(convolved);
        let by_head = |part: &Tensor, dim: usize| part.reshape([rows, tokens, -1, dim as i64]).transpose(1, 2);
        // Queries and keys have a length of 1, and serve several value heads each.
        let unit = |part: &Tensor| {
            let part = by_head(part, of.key_dim);
            let length = (part.square().sum_dim_intlist([-1i64].as_slice(), true, None) + 1e-6).rsqrt();
            let part = part * length;
            if shared == 1 { part } else { part.repeat_interleave_self_int(shared, 1, None) }
        };
        [unit(&parts[0]) * (of.key_dim as f64).sqrt().recip(), unit(&parts[1]), by_head(&parts[2], of.value_dim)]
    }

    /// Logarithms of decays, at most 0, and shares of corrections that are written, in f32 `[tokens, value
    /// heads]`.
    fn rates(&self, beta: &Tensor, step: &Tensor) -> [Tensor; 2] {
        let wide = |x: &Tensor| x.to_kind(Kind::Float);
        [-wide(&self.decay).exp() * (wide(step) + wide(&self.step_bias)).softplus(), wide(beta).sigmoid()]
    }

    /// Normed outputs `[tokens, value heads, value dim]` by their gates, as `[tokens, values]`.
    fn gated(&self, of: &GatedDelta, out: Tensor, gate: &Tensor) -> Tensor {
        let (out, sizes) = (out.contiguous(), out.size());
        let normed = fused::rms_norm(&out, &self.norm.to_kind(Kind::Float), self.eps);
        drop(out);
        let gate_wide = gate.to_kind(Kind::Float).reshape(sizes.as_slice()).silu();
        (normed * gate_wide).to_kind(gate.kind()).view([-1, of.values() as i64])
    }
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

    /// One sequence `[1, heads, tokens, …]` in chunks.
    fn chunked(of: [Tensor; 5]) -> (Tensor, Tensor) {
        let tokens = of[1].size()[2];
        let chunk = CHUNK.min(tokens);
        let padded = |x: &Tensor| {
            let x = if x.dim() == 3 { x.unsqueeze(3) } else { x.shallow_clone() };
            x.constant_pad_nd([0, 0, 0, (chunk - tokens % chunk) % chunk])
        };
        let cut = |x: Tensor| {
            let cut = padded(&x).squeeze_dim(0).unflatten(1, [-1, chunk]).transpose(0, 1);
            if x.dim() == 3 { cut.squeeze_dim(3) } else { cut }
        };
        let [query, key, value, decay, beta] = of.map(cut);
        let steps = (0..key.size()[0]).map(|at| [at, 1, 0]).collect();
        let steps = fused::Steps { steps, second: -1, begun: 1, sequences: 1, prefixes: None };
        let [out, after] = fused::delta_chunks([&query, &key, &value, &decay, &beta], None, &steps);
        (out.transpose(0, 1).flatten(1, 2).narrow(1, 0, tokens).unsqueeze(0), after)
    }

    #[test]
    fn chunks_equal_the_recurrence_token_by_token_with_gradients() {
        for tokens in [1, 2, 63, 64, 65, 150] {
            let (heads, key_dim, value_dim) = (2, 4, 3);
            let unit = |x: Tensor| &x / x.square().sum_dim_intlist([-1i64].as_slice(), true, None).sqrt();
            let leaf = |x: Tensor| x.set_requires_grad(true);
            let random = |shape: [i64; 3], seed| random(&shape, seed).to_kind(Kind::Double);
            let leaves = [
                leaf(unit(random([tokens, heads, key_dim], 1)) * 0.5),
                leaf(unit(random([tokens, heads, key_dim], 2))),
                leaf(random([tokens, heads, value_dim], 3)),
                leaf(-random([tokens, heads, 1], 4).squeeze_dim(2).abs() / 2.0),
                leaf(random([tokens, heads, 1], 5).squeeze_dim(2).abs() / 2.0),
            ];
            let (expected, state) = token_by_token(leaves.each_ref());
            let [query, key, value, decay, beta] =
                leaves.each_ref().map(|leaf| leaf.to_kind(Kind::Float).transpose(0, 1).unsqueeze(0));
            let (found, found_state) = chunked([query, key, value, decay, beta]);
            let found = found.squeeze_dim(0).transpose(0, 1).to_kind(Kind::Double);
            let along = random([tokens, heads, value_dim], 6);
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

    /// Numbers of variance 1, which differ by `seed`: libtorch's generator is of all tests of a program.
    fn random(shape: &[i64], seed: u64) -> Tensor {
        let at = Tensor::arange(shape.iter().product::<i64>(), F64) * 12.9898 + (seed as f64 + 1.0) * 78.233;
        ((at.sin() * 43758.5453).frac() * 3f64.sqrt()).to_kind(Kind::Float).view(shape)
    }

    fn sizes() -> (GatedDelta, DeltaWeights) {
        let of = GatedDelta { layers: vec![0], key_heads: 2, value_heads: 4, key_dim: 4, value_dim: 3, kernel: 4 };
        let conv = random(&[of.mixed() as i64, 4], 1);
        let (step_bias, decay, norm) = (random(&[4], 2), random(&[4], 3) * 0.5, random(&[3], 4));
        (of, DeltaWeights { conv, step_bias, decay, norm, eps: 1e-6 })
    }

    /// A pack of so many tokens each, some of which continue others, and projections of its rows.
    fn pack(of: &GatedDelta, lens: &[(usize, Option<usize>)]) -> (Packed, Tensor) {
        let mut packed = Packed::default();
        for (len, prefix) in lens {
            packed.push(vec![0; *len], *prefix);
        }
        let projected = random(&[packed.len() as i64, (of.mixed() + of.values() + 8) as i64], 5);
        (packed, projected)
    }

    /// Where value heads share keys, and where chunks have padding and see those before them.
    #[test]
    fn inputs_in_one_pass_equal_libtorchs_with_gradients() {
        for (key_heads, value_heads, key_dim, value_dim, kernel) in [(2, 4, 4, 3, 4), (1, 3, 40, 17, 2), (2, 2, 64, 64, 1)] {
            let of = GatedDelta { layers: vec![0], key_heads, value_heads, key_dim, value_dim, kernel };
            let (mixed, seen) = (of.mixed() as i64, kernel as i64 - 1);
            let mut packed = Packed::default();
            for (len, prefix) in [(70, None), (3, Some(0)), (2, None), (65, Some(2))] {
                packed.push(vec![0; len], prefix);
            }
            let rows = NetRows::new(&packed, &of, false, Device::Cpu);
            let leaves = [&[packed.len() as i64, mixed + 2], &[mixed, kernel as i64]].map(|shape| random(shape, kernel as u64));
            let leaves = leaves.map(|x| x.set_requires_grad(true));
            let others = Tensor::zeros([1, mixed], (Kind::Float, Device::Cpu));
            let inputs = leaves[0].narrow(1, 0, mixed);
            let found = fused::delta_inputs(&of, &inputs, &others, &leaves[1], &rows.sources, rows.chunk).unwrap();
            let weights = DeltaWeights { conv: leaves[1].shallow_clone(), ..sizes().1 };
            let spread = Tensor::cat(&[&inputs, &others], 0).index_select(0, &rows.sources);
            let spread = spread.view([-1, seen + rows.chunk, mixed]).transpose(1, 2);
            let expected = weights.heads(&of, weights.convolved(&of, &spread));
            let gradients = |of: &[Tensor; 3]| {
                let sums: Vec<_> = of.iter().zip(7..).map(|(x, seed)| (x * random(&x.size(), seed)).sum(Kind::Float)).collect();
                Tensor::run_backward(&[Tensor::stack(&sums, 0).sum(Kind::Float)], &leaves, true, false)
            };
            let pairs = gradients(&found).into_iter().zip(gradients(&expected));
            for (at, (found, expected)) in pairs.chain(found.into_iter().zip(expected)).enumerate() {
                let [gap, most] = [&found - &expected, expected].map(|x| x.abs().max().double_value(&[]));
                assert!(gap < 1e-5 * most, "result {at}: {gap} of {most}");
            }
        }
    }

    #[test]
    fn a_prefix_is_computed_once_for_all_that_continue_it_with_gradients() {
        let (of, weights) = sizes();
        // The second continues the first, which is shorter than what the convolution sees; and two continue the fourth.
        let (packed, projected) =
            pack(&of, &[(2, None), (3, Some(0)), (5, None), (66, None), (1, Some(3)), (70, Some(3)), (1, None)]);
        let projected = projected.set_requires_grad(true);
        let along = random(&[packed.len() as i64, of.values() as i64], 6);
        let gradient =
            |out: &Tensor| Tensor::run_backward(&[(out * &along).sum(Kind::Float)], &[&projected], true, false).remove(0);
        let shared = weights.several(&of, &projected, &NetRows::new(&packed, &of, false, Device::Cpu), None, |_| {});
        let ranges: Vec<_> = packed.ranges().collect();
        let outputs = packed.prefixes.iter().zip(&ranges).map(|(prefix, own)| {
            let rows = prefix.map_or(0..0, |prefix| ranges[prefix].clone()).chain(own.clone()).map(|row| row as i64);
            let alone = projected.index_select(0, &Tensor::from_slice(&rows.collect::<Vec<_>>()));
            let mut whole = Packed::default();
            whole.push(vec![0; alone.size()[0] as usize], None);
            let out = weights.several(&of, &alone, &NetRows::new(&whole, &of, false, Device::Cpu), None, |_| {});
            out.narrow(0, out.size()[0] - own.len() as i64, own.len() as i64)
        });
        let apart = Tensor::cat(&outputs.collect::<Vec<_>>(), 0);
        for (what, found, expected) in [("outputs", &shared, &apart), ("gradients", &gradient(&shared), &gradient(&apart))] {
            let [gap, most] = [found - expected, expected.shallow_clone()].map(|x| x.abs().max().double_value(&[]));
            assert!(gap < 1e-4 * most, "{what}: {gap} of {most}");
        }
    }

    /// Sequences of a pack know nothing of each other, and a state continues where its sequence ended.
    #[test]
    fn packed_sequences_equal_steps_of_one_token_and_leave_their_states() {
        let (of, weights) = sizes();
        let lens = [70_usize, 1, 2, 9];
        let (packed, projected) = pack(&of, &lens.map(|len| (len, None)));
        let rows = NetRows::new(&packed, &of, false, Device::Cpu);
        let mut left = None;
        let keep = |state: &DeltaState| left = Some([state.conv.copy(), state.heads.copy()]);
        let whole = weights.several(&of, &projected, &rows, None, keep);
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
