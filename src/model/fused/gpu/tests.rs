//! The kernels against libtorch's operations in f64, where there is a GPU or its stand-in.

use super::*;
use crate::model::gated_delta::{DeltaState, DeltaWeights};
use crate::model::net_rows::NetRows;
use crate::model::{Compute, GatedDelta, Packed};

/// The first GPU, if there is one.
pub(super) fn device() -> Option<Device> {
    let found = Compute::cuda(0, crate::model::Dtype::Bf16).check().is_ok();
    let required = std::env::var_os("ROLLFLOW_REQUIRE_GPU").is_some();
    assert!(found || !required, "ROLLFLOW_REQUIRE_GPU is set, and libtorch finds no CUDA device");
    if found {
        assert!(runs_kernels(Device::Cuda(0)), "NVRTC compiles them");
    }
    found.then_some(Device::Cuda(0))
}

pub(super) fn host(x: &Tensor) -> Tensor {
    x.to_device(Device::Cpu).to_kind(Kind::Double)
}

/// Relative to the largest number: a unit in the last place of the format is 2⁻⁸ or 2⁻¹¹ of it.
pub(super) fn close(what: &str, found: &Tensor, exact: &Tensor, bound: f64) {
    let (found, exact) = (host(found), host(exact));
    assert_eq!(found.size(), exact.size(), "{what}");
    let gap = (&found - &exact).abs().max().double_value(&[]) / exact.abs().max().double_value(&[]).max(1e-9);
    assert!(gap < bound, "{what}: {gap:e}");
}

pub(super) fn bound(kind: Kind) -> f64 {
    if kind == Kind::Half { 1e-3 } else { 8e-3 }
}

pub(super) fn normal(shape: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_kind(kind).to_device(device)
}

/// Results and gradients by `leaves` under a fixed cotangent are those of `exact` on the host in f64.
pub(super) fn same(
    what: &str,
    leaves: &[Tensor],
    ours: impl Fn(&[Tensor]) -> Vec<Tensor>,
    exact: impl Fn(&[Tensor]) -> Vec<Tensor>,
) {
    same_within(1.0, what, leaves, ours, exact);
}

/// The same within so many times the bound, where several are rounded one after the other.
fn same_within(
    times: f64,
    what: &str,
    leaves: &[Tensor],
    ours: impl Fn(&[Tensor]) -> Vec<Tensor>,
    exact: impl Fn(&[Tensor]) -> Vec<Tensor>,
) {
    let kind = leaves[0].kind();
    let leaf = |x: &Tensor| x.detach().copy().set_requires_grad(true);
    let (own, hosts) = (leaves.iter().map(leaf).collect::<Vec<_>>(), leaves.iter().map(|x| leaf(&host(x))).collect::<Vec<_>>());
    let (found, expected) = (ours(&own), exact(&hosts));
    let mut sums = [Tensor::zeros([], (Kind::Double, Device::Cpu)), Tensor::zeros([], (Kind::Double, Device::Cpu))];
    for (at, (a, b)) in found.iter().zip(&expected).enumerate() {
        close(&format!("{what}, result {at}"), a, b, times * bound(kind));
        let cotangent = Tensor::randn(b.size(), (Kind::Double, Device::Cpu)).to_kind(kind);
        sums[0] = &sums[0] + (a.to_device(Device::Cpu).to_kind(Kind::Double) * cotangent.to_kind(Kind::Double)).sum(Kind::Double);
        sums[1] = &sums[1] + (b * cotangent.to_kind(Kind::Double)).sum(Kind::Double);
    }
    let by = |sum: &Tensor, leaves: &[Tensor]| Tensor::run_backward(&[sum], leaves, false, false);
    for (at, (a, b)) in by(&sums[0], &own).iter().zip(by(&sums[1], &hosts)).enumerate() {
        close(&format!("{what}, gradient {at}"), a, &b, 2.0 * times * bound(kind));
    }
}

/// Kernels are loaded into a context: each device has one, and a new thread none.
#[test]
fn kernels_run_on_each_device_and_in_each_new_thread() {
    let Some(_) = device() else { return };
    for index in [0, 1, 0].into_iter().filter(|index| Compute::cuda(*index, crate::model::Dtype::Bf16).check().is_ok()) {
        let work = move || {
            let gate_up = normal(&[3, 32], Kind::BFloat16, Device::Cuda(index));
            let halves = host(&gate_up).chunk(2, -1);
            close("swiglu", &swiglu(&gate_up).unwrap(), &(halves[0].silu() * &halves[1]), bound(Kind::BFloat16));
        };
        std::thread::spawn(work).join().unwrap();
    }
}

/// Two tokens one after the other, also where heads of values share keys; the host computes in f32,
/// unrounded.
#[test]
fn a_token_of_a_delta_net_equals_the_hosts_and_leaves_its_states() {
    let Some(device) = device() else { return };
    tch::manual_seed(6);
    for (kind, rows, [key_heads, value_heads], [key_dim, value_dim], kernel) in [
        (Kind::BFloat16, 3, [2, 2], [16, 16], 4),
        (Kind::Half, 2, [1, 3], [32, 24], 2),
        (Kind::BFloat16, 1, [2, 4], [128, 128], 4),
        // So many threads that registers are short.
        (Kind::Half, 1, [1, 1], [128, 256], 4),
    ] {
        let of = GatedDelta { layers: vec![0], key_heads, value_heads, key_dim, value_dim, kernel };
        let [mixed, values, heads] = [of.mixed(), of.values(), value_heads].map(|size| size as i64);
        let shapes = [vec![mixed, kernel as i64], vec![heads], vec![heads], vec![value_dim as i64]];
        let numbers = shapes.map(|shape| normal(&shape, kind, Device::Cpu));
        let on = |to: &dyn Fn(&Tensor) -> Tensor| {
            let [conv, step_bias, decay, norm] = numbers.each_ref().map(to);
            DeltaWeights { conv, step_bias, decay, norm, eps: 1e-6 }
        };
        let (ours, exact) = (on(&|x| x.to_device(device)), on(&|x| x.to_kind(Kind::Float)));
        let conv = normal(&[rows, mixed, kernel as i64 - 1], kind, Device::Cpu);
        let states = normal(&[rows, heads, key_dim as i64, value_dim as i64], Kind::Float, Device::Cpu);
        let state = DeltaState { conv: conv.to_device(device), heads: states.to_device(device) };
        let expected = DeltaState { conv: conv.to_kind(Kind::Float), heads: states.copy() };
        for token in 0..2 {
            let projected = normal(&[rows, mixed + values + 2 * heads], kind, Device::Cpu);
            let by_head = [&ours.step_bias, &ours.decay, &ours.norm];
            let found = delta_step(&projected.to_device(device), &ours.conv, (&state.conv, &state.heads), by_head, 1e-6).unwrap();
            let out = exact.step(&of, &projected.to_kind(Kind::Float), &expected);
            close(&format!("output {token}"), &found, &out, 3.0 * bound(kind));
            close("inputs of the convolution", &state.conv, &expected.conv, 1e-6);
            close("states", &state.heads, &expected.heads, bound(kind));
        }
    }
}

/// Chunks with padding, and sequences that continue others; the host computes in f32, unrounded.
#[test]
fn sequences_of_a_delta_net_equal_the_hosts_with_gradients() {
    let Some(device) = device() else { return };
    tch::manual_seed(8);
    for (kind, [key_heads, value_heads], [key_dim, value_dim], kernel) in
        [(Kind::BFloat16, [2, 4], [16, 24], 4), (Kind::Half, [1, 3], [128, 66], 3)]
    {
        let of = GatedDelta { layers: vec![0], key_heads, value_heads, key_dim, value_dim, kernel };
        let [mixed, values, heads] = [of.mixed(), of.values(), value_heads].map(|size| size as i64);
        let mut packed = Packed::default();
        for (len, prefix) in [(66, None), (3, Some(0)), (2, None), (70, Some(2)), (1, Some(0))] {
            packed.push(vec![0; len], prefix);
        }
        let shapes = [
            vec![packed.len() as i64, mixed + values + 2 * heads],
            vec![mixed, kernel as i64],
            vec![heads],
            vec![heads],
            vec![value_dim as i64],
        ];
        let leaves = shapes.map(|shape| normal(&shape, kind, device));
        let run = |x: &[Tensor], device| {
            let [conv, step_bias, decay, norm] = [1, 2, 3, 4].map(|at| x[at].shallow_clone());
            // A sequence's first value is nearly zero where its query and key are at right angles: with a smaller `eps`,
            // its norm would show the rounding of 16 bits alone.
            let weights = DeltaWeights { conv, step_bias, decay, norm, eps: 1e-2 };
            vec![weights.several(&of, &x[0], &NetRows::new(&packed, &of, false, device), None, |_| {})]
        };
        let wide = |x: &[Tensor]| x.iter().map(|x| x.to_kind(Kind::Float)).collect::<Vec<_>>();
        same_within(3.0, "sequences", &leaves, |x| run(x, device), |x| run(&wide(x), Device::Cpu));
    }
}

#[test]
fn sums_gates_and_rotations_equal_f64_with_their_gradients() {
    let Some(device) = device() else { return };
    tch::manual_seed(1);
    for kind in [Kind::BFloat16, Kind::Half] {
        for (rows, width) in [(3, 64), (5, 1032), (1, 2304)] {
            let of = |rows| normal(&[rows, width], kind, device);
            let weight = normal(&[width], kind, device);
            for more in [0.0, 1.0] {
                let ours = |x: &[Tensor]| {
                    let (sum, normed) = add_rms_norm(&x[0], &x[1], NormBy { weight: &x[2], more, eps: 1e-5 }).unwrap();
                    vec![sum, normed]
                };
                let normed = |x: &Tensor, weight: &Tensor| x.rms_norm([width], Some(&(weight + more)), 1e-5);
                let exact = |x: &[Tensor]| {
                    let sum = &x[0] + &x[1];
                    vec![sum.shallow_clone(), normed(&sum, &x[2])]
                };
                same("add_rms_norm", &[of(rows), of(rows), weight.shallow_clone()], ours, exact);
                let ours = |x: &[Tensor]| vec![rms_norm(&x[0], NormBy { weight: &x[1], more, eps: 1e-5 }).unwrap()];
                // Of heads, too.
                for x in [of(rows), normal(&[rows, 3, width], kind, device)] {
                    same("rms_norm", &[x, weight.shallow_clone()], ours, |x| vec![normed(&x[0], &x[1])]);
                }
            }
            let exact = |x: &[Tensor]| {
                let halves = x[0].chunk(2, -1);
                vec![halves[0].silu() * &halves[1]]
            };
            same("swiglu", &[normal(&[rows, 2 * width], kind, device)], |x| vec![swiglu(&x[0]).unwrap()], exact);
        }
        // Heads of rows that hold more than what is rotated.
        let (rows, heads, dim) = (7, 3, 32);
        let angles = Tensor::rand([rows, 1, dim / 2], (Kind::Float, Device::Cpu)) * 6.0;
        let (cos, sin) = (Tensor::cat(&[angles.cos(), angles.cos()], 2), Tensor::cat(&[-angles.sin(), angles.sin()], 2));
        let on = |x: &Tensor| x.to_device(device);
        let part = |x: &Tensor| x.narrow(1, 0, heads);
        let exact = |x: &[Tensor]| {
            let x = part(&x[0]);
            vec![&x * cos.to_kind(Kind::Double) + x.roll([dim / 2], [-1]) * sin.to_kind(Kind::Double)]
        };
        let ours = |x: &[Tensor]| vec![rotate(&part(&x[0]), &on(&cos), &on(&sin)).unwrap()];
        same("rotate", &[normal(&[rows, heads + 2, dim], kind, device)], ours, exact);
    }
}

#[test]
fn a_softmax_and_its_gradient_equal_f64_also_with_impossible_tokens() {
    let Some(device) = device() else { return };
    tch::manual_seed(2);
    let (rows, width) = (3, 2500);
    let logits = Tensor::randn([rows, width], (Kind::Float, Device::Cpu)) * 8.0;
    let _impossible = logits.narrow(1, 0, 5).fill_(f64::NEG_INFINITY);
    let targets = Tensor::from_slice(&[7i64, 2499, 1000]);
    let found = softmax(&logits.to_device(device), &targets.to_device(device));
    let exact = logits.to_kind(Kind::Double).log_softmax(-1, Kind::Double);
    let chosen = exact.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
    let entropy = -(exact.exp() * exact.clamp_min(-1e30)).sum_dim_intlist([1i64].as_slice(), false, None);
    close("log-probabilities", &found.select(1, 0), &chosen, 1e-5);
    close("entropies", &found.select(1, 1), &entropy, 1e-4);
    close("logarithms of sums", &found.select(1, 2), &logits.to_kind(Kind::Double).logsumexp([1i64].as_slice(), false), 1e-5);
    let slopes = [Tensor::from_slice(&[0.3f32, -1.0, 2.0]), Tensor::from_slice(&[0.1f32, 0.0, -0.5])];
    let [slope, by_entropy] = [0, 1].map(|at| slopes[at].to_device(device));
    let gradient = softmax_gradient(
        [&logits.to_device(device), &targets.to_device(device), &found, &slope],
        Some(&by_entropy),
        Kind::BFloat16,
    );
    let [slope, by_entropy] = [0, 1].map(|at| slopes[at].to_kind(Kind::Double).unsqueeze(1));
    let one = exact.zeros_like().scatter_value(1, &targets.unsqueeze(1), 1.0);
    let expected = &slope * (one - exact.exp()) - &by_entropy * exact.exp() * (exact.clamp_min(-1e30) + entropy.unsqueeze(1));
    close("gradient", &gradient, &expected, 8e-3);
}

/// Law N2: the token is the one in whose share of the distribution the uniform number lies.
#[test]
fn a_token_is_drawn_by_its_share_and_a_row_that_is_not_finite_is_told() {
    let Some(device) = device() else { return };
    tch::manual_seed(3);
    for width in [70, 5000, 40_000] {
        let logits = Tensor::randn([8, width], (Kind::Float, Device::Cpu)) * 3.0;
        let _impossible = logits.narrow(1, 3, 4).fill_(f64::NEG_INFINITY);
        let _tail = logits.narrow(1, width - 2, 2).fill_(f64::NEG_INFINITY);
        let uniforms = [0.0, 0.2, 0.5, 0.73, 0.999_999, 1.0 - 1e-16, 0.4, 0.4];
        let temperatures = [1.0, 1.0, 0.8, 2.0, 1.0, 1.0, 0.0, 1.0];
        let _nan = logits.get(7).narrow(0, 11, 1).fill_(f64::NAN);
        let setting = |(temperature, uniform): (&f64, f64)| [*temperature, uniform, 0.0, 1.0, 0.0];
        let settings: Vec<f64> = temperatures.iter().zip(uniforms).flat_map(setting).collect();
        let drawn = draw(&logits.to_device(device), &Tensor::from_slice(&settings).view([-1, 5]).to_device(device));
        let drawn = drawn.to_device(Device::Cpu);
        for row in 0..7 {
            let divisor: f64 = if temperatures[row] == 0.0 { 1.0 } else { temperatures[row] };
            let log_probs = (logits.get(row as i64).to_kind(Kind::Double) / divisor).log_softmax(-1, Kind::Double);
            let [token, log_prob] = [0, 1].map(|at| drawn.double_value(&[row as i64, at]));
            let token = token as i64;
            assert!((log_prob - log_probs.double_value(&[token])).abs() < 1e-4, "{width}, {row}: {log_prob}");
            if temperatures[row] == 0.0 {
                assert_eq!(token, log_probs.argmax(0, false).int64_value(&[]));
                continue;
            }
            let until = log_probs.exp().cumsum(0, Kind::Double).double_value(&[token]);
            let own = log_probs.double_value(&[token]).exp();
            assert!(own > 0.0 && uniforms[row] < until + 1e-5 && uniforms[row] > until - own - 1e-5, "{width}, {row}: {token}");
        }
        assert!(drawn.double_value(&[7, 1]).is_nan());
    }
}

/// Sequences whose queries are their last tokens, as those of prompts that groups share.
#[test]
fn flash_attention_with_sinks_equals_f64_with_its_gradients() {
    let Some(device) = device() else { return };
    tch::manual_seed(4);
    for (heads, keys, dim, window, kind) in [(4, 2, 16, None, Kind::BFloat16), (6, 6, 64, Some(3), Kind::Half)] {
        let lens: [(i64, i64); 3] = [(5, 9), (7, 7), (1, 4)];
        let ends = |each: &dyn Fn(&(i64, i64)) -> i64| {
            let ends = lens.iter().scan(0, |end, of| {
                *end += each(of);
                Some(*end as i32)
            });
            Tensor::from_slice(&std::iter::once(0).chain(ends).collect::<Vec<i32>>()).to_device(device)
        };
        let queries = super::super::Runs { ends: ends(&|of| of.0), longest: 7 };
        let all = super::super::Runs { ends: ends(&|of| of.1), longest: 9 };
        let scale = 1.0 / (dim as f64).sqrt();
        let leaves =
            [(13, heads), (20, keys), (20, keys)].map(|(rows, heads): (i64, i64)| normal(&[rows, heads, dim], kind, device));
        let leaves: Vec<Tensor> = leaves.into_iter().chain([normal(&[heads], kind, device) * 2.0]).collect();
        let exact = |leaves: &[Tensor]| {
            let (mut first, mut key) = (0, 0);
            let each = lens.iter().map(|&(len, total)| {
                let of = |x: &Tensor, at: i64, len: i64| x.narrow(0, at, len).transpose(0, 1);
                let shared = |x: &Tensor| x.repeat_interleave_self_int(heads / keys, 0, None);
                let (q, k) = (of(&leaves[0], first, len), shared(&of(&leaves[1], key, total)));
                let v = shared(&of(&leaves[2], key, total));
                (first, key) = (first + len, key + total);
                let seen = Tensor::ones([len, total], (Kind::Bool, Device::Cpu)).tril(total - len);
                let seen = window.map_or_else(|| seen.shallow_clone(), |window: i64| seen.triu(total - len + 1 - window));
                let scores = (q.matmul(&k.transpose(1, 2)) * scale).masked_fill(&seen.logical_not(), f64::NEG_INFINITY);
                let sinks = leaves[3].view([heads, 1, 1]).expand([heads, len, 1], false);
                let shares = Tensor::cat(&[scores, sinks], -1).softmax(-1, Kind::Double).narrow(-1, 0, total);
                shares.matmul(&v).transpose(0, 1)
            });
            vec![Tensor::cat(&each.collect::<Vec<_>>(), 0)]
        };
        let ours = |leaves: &[Tensor]| {
            let of = [&leaves[0], &leaves[1], &leaves[2]];
            vec![super::super::flash(of, (&queries, &all), scale, window.map(|window| window as usize), Some(&leaves[3]))]
        };
        // A sink's gradient is a sum over rounded results.
        same_within(2.0, &format!("{heads} heads over {keys}"), &leaves, ours, exact);
    }
}

#[test]
fn attention_of_one_token_writes_its_keys_and_equals_f64_for_all_shapes() {
    let Some(device) = device() else { return };
    tch::manual_seed(4);
    for (at_shape, (dim, heads, keys, window, longest, (rotated, gated, more))) in [
        (16, 4, 2, None, 60, (16, false, 0.0)),
        (32, 6, 1, None, 700, (16, true, 0.0)),
        (64, 14, 2, None, 300, (64, false, 1.0)),
        (64, 4, 4, Some(33), 200, (64, false, 0.0)),
        (96, 4, 4, None, 40, (72, false, 0.0)),
        (128, 28, 4, None, 90, (128, false, 0.0)),
        (128, 32, 2, Some(17), 150, (128, true, 0.0)),
        (80, 9, 3, None, 50, (80, false, 0.0)),
        (256, 8, 4, None, 70, (64, true, 1.0)),
    ]
    .into_iter()
    .enumerate()
    {
        let kind = if at_shape % 2 == 0 { Kind::BFloat16 } else { Kind::Half };
        let cap = (at_shape % 3 == 1).then_some(5.0);
        let (slots, page, width) = (4, 32, longest / 32 + 2);
        let of = Heads { queries: heads, keys, scale: 1.3 / (dim as f64).sqrt(), cap };
        assert!(attends_slots(of, dim as usize, kind, device));
        let positions = Tensor::from_slice(&[longest - 1, 0, longest / 2, -1]);
        let query = if gated { 2 * dim } else { dim };
        let qkv = normal(&[slots, heads * query + 2 * keys * dim], kind, device);
        // Pages of three slots in turn, from the last on; the fourth has none.
        let cache = normal(&[(3 * width + 1) * page, 2, keys, dim], kind, device);
        let before = cache.copy();
        let page_of = |slot: i64, at: i64| if slot < 3 { 3 * (width - at) - slot } else { 0 };
        let table: Vec<i64> = (0..slots).flat_map(|slot| (0..width).map(move |at| page_of(slot, at))).collect();
        let table = Tensor::from_slice(&table).view([slots, width]);
        let rows = |slot: i64| {
            let rows: Vec<i64> = (0..width).flat_map(|at| (0..page).map(move |row| page_of(slot, at) * page + row)).collect();
            Tensor::from_slice(&rows).to_device(device)
        };
        let angles = Tensor::rand([longest, 1, dim / 2], (Kind::Float, Device::Cpu)) * 6.0;
        let (cos, sin) = (Tensor::cat(&[angles.cos(), angles.cos()], 2), Tensor::cat(&[-angles.sin(), angles.sin()], 2));
        let norms = (at_shape % 2 == 0).then(|| [(); 2].map(|()| normal(&[dim], kind, device)));
        let given = norms.as_ref().map(|of| of.each_ref().map(|weight| NormBy { weight, more, eps: 1e-6 }));
        let on = |x: &Tensor| x.to_device(device);
        let at = Slots { positions: on(&positions), table: on(&table), page, longest };
        // Of some size, so that they count.
        let sinks = (at_shape % 2 == 1).then(|| normal(&[heads], kind, device) * 2.0);
        let projected = Projected { qkv: &qkv, gated, rotated: rotated as usize, norms: given };
        let out = attend(&projected, (&on(&cos), &on(&sin)), &cache, &at, of, (window, sinks.as_ref()));

        let split = host(&qkv).split_with_sizes([heads * query, 2 * keys * dim], 1);
        let queries = split[0].view([slots, heads, query]);
        let heads_of = Tensor::cat(&[&queries.narrow(2, 0, dim), &split[1].view([slots, 2 * keys, dim])], 1);
        // Those that are rotated, half a head apart.
        let (turning, rest) = (rotated / 2, (dim - rotated) / 2);
        let runs = [0..turning, rotated..rotated + rest, turning..rotated, rotated + rest..dim];
        let order: Vec<i64> = runs.into_iter().flatten().collect();
        let order = Tensor::from_slice(&order);
        for slot in 0..3 {
            let own = cache.index_select(0, &rows(slot));
            let position = positions.int64_value(&[slot]);
            let row = |table: &Tensor| table.get(position).to_kind(Kind::Double);
            let turned = |x: &Tensor, norm: Option<&Tensor>| {
                let x = norm.map_or_else(|| x.shallow_clone(), |norm| x.rms_norm([dim], Some(&(host(norm) + more)), 1e-6));
                let x = x.index_select(1, &order);
                &x * row(&cos) + x.roll([dim / 2], [-1]) * row(&sin)
            };
            let (q_norm, k_norm) = (norms.as_ref().map(|of| &of[0]), norms.as_ref().map(|of| &of[1]));
            let part = |first, len| heads_of.get(slot).narrow(0, first, len);
            let (q, k, v) = (turned(&part(0, heads), q_norm), turned(&part(heads, keys), k_norm), part(heads + keys, keys));
            close("the key written", &own.get(position).get(0), &k, bound(kind));
            close("the value written", &own.get(position).get(1), &v, 1e-9);
            let first = window.map_or(0, |window: usize| (position + 1 - window as i64).max(0));
            // Keys as they are stored, rounded.
            let seen = host(&own).narrow(0, first, position + 1 - first);
            let each = |half| seen.select(1, half).repeat_interleave_self_int(heads / keys, 1, None).transpose(0, 1);
            let scores = q.unsqueeze(1).matmul(&each(0).transpose(1, 2)) * of.scale;
            let scores = cap.map_or_else(|| scores.shallow_clone(), |cap| (&scores / cap).tanh() * cap);
            let scores = match &sinks {
                Some(sinks) => Tensor::cat(&[&scores, &host(sinks).view([heads, 1, 1])], -1),
                None => scores,
            };
            let shares = scores.softmax(-1, Kind::Double).narrow(-1, 0, position + 1 - first);
            let expected = shares.matmul(&each(1)).squeeze_dim(1);
            let expected = if gated { expected * queries.get(slot).narrow(1, dim, dim).sigmoid() } else { expected }.view([-1]);
            close(&format!("{dim}, {heads} over {keys}, slot {slot}"), &out.get(slot), &expected, 2.0 * bound(kind));
            let written = rows(slot).narrow(0, position, 1);
            let _written = before.shallow_clone().index_copy_(0, &written, &own.narrow(0, position, 1));
        }
        assert!(host(&out.get(3)).equal(&Tensor::zeros_like(&host(&out.get(3)))), "a slot that is not in use has no result");
        assert!(before.equal(&cache), "only each token's own place is written");
    }
}
