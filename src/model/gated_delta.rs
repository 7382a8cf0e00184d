//! Gated delta net (Yang et al., 2024): linear attention whose state decays and is corrected by each token,
//! as Qwen3.5 computes it. A sequence's state takes the place of keys and values.

use tch::{Kind, Tensor};

use super::fused::half;
use super::net_rows::{Continued, NetRows, Sequences};
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

    /// Several tokens of sequences: packed projections `[tokens, mixed + values + 2 · value heads]`, to outputs
    /// `[tokens, values]`. `before`: their states before, for sequences that have begun. `keep` gets the states after
    /// each sequence that continues no other.
    pub fn several(
        &self,
        of: &GatedDelta,
        projected: &Tensor,
        rows: &NetRows,
        before: Option<&DeltaState>,
        keep: impl FnOnce(&DeltaState),
    ) -> Tensor {
        let (out, after) = self.rectangle(of, projected, &rows.begun, before);
        keep(&after);
        let Some(Continued { sequences, prefixes, order }) = &rows.continued else { return out };
        let [conv, heads] = [&after.conv, &after.heads].map(|state| state.index_select(0, prefixes));
        let (further, _) = self.rectangle(of, projected, sequences, Some(&DeltaState { conv, heads }));
        Tensor::cat(&[out, further], 0).index_select(0, order)
    }

    /// The same for sequences that are computed at a time, in their order, and their states after.
    fn rectangle(
        &self,
        of: &GatedDelta,
        projected: &Tensor,
        sequences: &Sequences,
        before: Option<&DeltaState>,
    ) -> (Tensor, DeltaState) {
        let (Sequences { rectangle, lens }, seen, device) = (sequences, of.kernel as i64 - 1, projected.device());
        let (rows, columns) = (rectangle.rows, rectangle.columns);
        let [mixed, gate, beta, step] = self.parts(of, &rectangle.spread(projected).view([rows, columns, -1]));
        let mixed = mixed.transpose(1, 2);
        let inputs = match before {
            None => mixed.constant_pad_nd([seen, 0]),
            Some(before) => Tensor::cat(&[&before.conv, &mixed], 2),
        };
        let last = lens.unsqueeze(1) + Tensor::arange(seen, (Kind::Int64, device)).unsqueeze(0);
        let conv = inputs.gather(2, &last.unsqueeze(1).expand([rows, inputs.size()[1], seen], false), false);
        let convolved = self.convolved(of, &inputs);
        drop(inputs);
        // Padding neither decays a state nor adds to it.
        let at = Tensor::arange(columns, (Kind::Int64, device));
        let real = at.unsqueeze(0).less_tensor(&lens.unsqueeze(1)).to_kind(Kind::Float).unsqueeze(-1);
        let steps = self.steps(of, convolved, &beta, &step, Some(&real));
        let (out, heads) = chunked(steps, before.map(|before| &before.heads));
        (rectangle.pack(self.gated(of, out.transpose(1, 2), &gate)), DeltaState { conv, heads })
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
        let Steps { query, key, value, decay, beta } = self.steps(of, self.convolved(of, &inputs), &beta, &step, None);
        let [query, key, value] = [query, key, value].map(|part| part.squeeze_dim(2));
        let decayed = &state.heads * decay.exp().unsqueeze(-1);
        let known = key.unsqueeze(2).matmul(&decayed).squeeze_dim(2);
        let delta = (value - known) * beta;
        let heads = decayed + key.unsqueeze(3) * delta.unsqueeze(2);
        let out = query.unsqueeze(2).matmul(&heads);
        state.heads.shallow_clone().copy_(&heads);
        self.gated(of, out.transpose(1, 2), &gate)
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

    fn steps(&self, of: &GatedDelta, convolved: Tensor, beta: &Tensor, step: &Tensor, real: Option<&Tensor>) -> Steps {
        let (rows, tokens, heads) = (convolved.size()[0], convolved.size()[1], of.value_heads as i64);
        let keys = (of.key_heads * of.key_dim) as i64;
        let parts = convolved.to_kind(Kind::Float).split_with_sizes([keys, keys, of.values() as i64], -1);
        drop(convolved);
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
    fn gated(&self, of: &GatedDelta, out: Tensor, gate: &Tensor) -> Tensor {
        let (out, sizes) = (out.contiguous(), out.size());
        let normed = fused::rms_norm(&out, &self.norm.to_kind(Kind::Float), self.eps);
        drop(out);
        let gate_wide = gate.to_kind(Kind::Float).reshape(sizes.as_slice()).silu();
        (normed * gate_wide).to_kind(gate.kind()).view([-1, of.values() as i64])
    }
}

/// The recurrence over many tokens, from the states `before` or none: outputs `[sequences, value heads, tokens,
/// value dim]` and the last states. Within a chunk, the corrections of all tokens are the solution of one triangular
/// system.
fn chunked(of: Steps, before: Option<&Tensor>) -> (Tensor, Tensor) {
    let [rows, heads, tokens, key_dim] = <[i64; 4]>::try_from(of.key.size()).expect("four dimensions");
    let (value_dim, device) = (of.value.size()[3], of.key.device());
    let zeros = || Tensor::zeros([rows, heads, key_dim, value_dim], (Kind::Float, device));
    let mut state = before.map_or_else(zeros, Tensor::shallow_clone);
    // One gradient for all chunks: a slice of each would have one of full size.
    let Chunks { query, key, keys, values, attention, kept } = Chunks::new(of, CHUNK.min(tokens));
    let [query, key, keys, values, attention, kept] = [query, key, keys, values, attention, kept].map(|x| x.unbind(2));
    let mut out = Vec::new();
    for at in 0..key.len() {
        let new = &values[at] - keys[at].matmul(&state);
        out.push(query[at].matmul(&state) + attention[at].matmul(&new));
        state = state * &kept[at] + key[at].transpose(-1, -2).matmul(&new);
    }
    (Tensor::cat(&out, 2).narrow(2, 0, tokens), state)
}

/// What chunks do to a state and read of it, `[sequences, value heads, chunks, tokens, …]`.
struct Chunks {
    /// Queries, decayed since the chunk began.
    query: Tensor,
    /// Keys, decayed until the chunk ends.
    key: Tensor,
    /// The state by these keys is what the tokens correct.
    keys: Tensor,
    /// What the tokens write where the state is 0.
    values: Tensor,
    /// What each token reads of those before it, and of itself, `[…, tokens, tokens]`.
    attention: Tensor,
    /// Share of the state that is left in the end, `[…, 1, 1]`.
    kept: Tensor,
}

impl Chunks {
    fn new(of: Steps, chunk: i64) -> Self {
        let [rows, heads, tokens, key_dim] = <[i64; 4]>::try_from(of.key.size()).expect("four dimensions");
        let padding = (chunk - tokens % chunk) % chunk;
        let cut = |x: Tensor| {
            let padded = if padding == 0 { x } else { x.constant_pad_nd([0, 0, 0, padding]) };
            padded.reshape([rows, heads, -1, chunk, padded.size()[3]])
        };
        let Steps { query, key, value, decay, beta } = of;
        let [query, key, value, decay, beta] = [query, key, value, decay.unsqueeze(-1), beta.unsqueeze(-1)].map(cut);
        let decay = decay.cumsum(-2, Kind::Float);
        let since_begin = decay.exp();

        let later = Tensor::ones([chunk, chunk], (Kind::Bool, key.device())).triu(1);
        let pairs = (&decay - decay.transpose(-1, -2)).masked_fill(&later, f64::NEG_INFINITY).exp();
        let written = &key * &beta;
        let system = written.matmul(&key.transpose(-1, -2)) * &pairs;
        let attention = query.matmul(&key.transpose(-1, -2)) * pairs;
        let right = Tensor::cat(&[value * beta, written * &since_begin], -1);
        let solved = system.linalg_solve_triangular(&right, false, true, true);
        drop((system, right));
        let value_dim = solved.size()[4] - key_dim;
        let last = decay.narrow(-2, chunk - 1, 1);
        Chunks {
            query: query * since_begin,
            key: key * (&last - decay).exp(),
            keys: solved.narrow(-1, value_dim, key_dim),
            values: solved.narrow(-1, 0, value_dim),
            attention,
            kept: last.exp(),
        }
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
            let (found, found_state) = chunked(Steps { query, key, value, decay, beta }, None);
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
        let shared = weights.several(&of, &projected, &NetRows::new(&packed, Device::Cpu), None, |_| {});
        let ranges: Vec<_> = packed.ranges().collect();
        let outputs = packed.prefixes.iter().zip(&ranges).map(|(prefix, own)| {
            let rows = prefix.map_or(0..0, |prefix| ranges[prefix].clone()).chain(own.clone()).map(|row| row as i64);
            let alone = projected.index_select(0, &Tensor::from_slice(&rows.collect::<Vec<_>>()));
            let mut whole = Packed::default();
            whole.push(vec![0; alone.size()[0] as usize], None);
            let out = weights.several(&of, &alone, &NetRows::new(&whole, Device::Cpu), None, |_| {});
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
        let rows = NetRows::new(&packed, Device::Cpu);
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
