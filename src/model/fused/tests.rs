//! Fused operations against libtorch's and written-out ones.

use super::*;
use crate::model::Packed;

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, F32).set_requires_grad(true)
}

fn close(what: &str, found: &Tensor, exact: &Tensor, bound: f64) {
    let gap = f64::try_from((found - exact).abs().max()).unwrap() / f64::try_from(exact.abs().max()).unwrap().max(1.0);
    assert!(gap < bound, "{what}: relative gap {gap:e}");
}

/// Value and gradients of `fused` equal those of `plain` in f64 under a random cotangent. Tests next to
/// this one draw from the same generator, so that the numbers vary.
fn same(what: &str, leaves: &[Tensor], fused: impl Fn(&[Tensor]) -> Tensor, plain: impl Fn(&[Tensor]) -> Tensor) {
    let exact: Vec<Tensor> = leaves.iter().map(|leaf| leaf.detach().to_kind(Kind::Double).set_requires_grad(true)).collect();
    let (y, z) = (fused(leaves), plain(&exact));
    close(what, &y, &z, 2e-6);
    let cotangent = Tensor::randn_like(&y);
    let of = |y: &Tensor, leaves: &[Tensor]| Tensor::run_backward(&[(y * &cotangent).sum(y.kind())], leaves, false, false);
    for (i, (a, b)) in of(&y, leaves).iter().zip(&of(&z, &exact)).enumerate() {
        // A weight's or a sink's is a sum over all rows, whose terms cancel.
        let bound = if a.dim() == 1 { 1e-5 } else { 2e-6 };
        close(&format!("{what}, gradient {i}"), a, b, bound);
    }
}

#[test]
fn a_gpu_neither_plans_attention_nor_rounds_sums_nor_takes_memory_in_fixed_pieces() {
    let set = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].iter().any(|name| std::env::var_os(name).is_some());
    let [cudnn_attention, rounded_sums, fixed_pieces] = gpu_defaults();
    assert!(!cudnn_attention && !rounded_sums && (set || !fixed_pieces));
}

#[test]
fn norm_and_gate_equal_libtorch_also_where_the_gate_saturates() {
    tch::manual_seed(1);
    let plain = |x: &[Tensor]| x[0].rms_norm([48], Some(&x[1]), 1e-6);
    same("rms_norm", &[leaf(&[1111, 48]), leaf(&[48])], |x| rms_norm(&x[0], &x[1], 1e-6), plain);
    let plain = |x: &[Tensor]| {
        let halves = x[0].chunk(2, -1);
        halves[0].silu() * &halves[1]
    };
    let wide = (Tensor::randn([333, 70], F32) * 30.0).set_requires_grad(true);
    same("swiglu", &[wide], |x| swiglu(&x[0]), plain);
}

/// Causal softmax attention with rotation, written out sequence by sequence and head by head.
fn written_out(
    qkv: &Tensor,
    (cos, sin): (&Tensor, &Tensor),
    lens: &[i64],
    [heads, kv]: [i64; 2],
    window: Option<usize>,
    cap: Option<f64>,
    sinks: Option<&Tensor>,
) -> Tensor {
    let d = qkv.size()[1] / (heads + 2 * kv);
    let rotate = |x: Tensor, len: i64| {
        let (c, s, x) = (cos.narrow(0, 0, len), sin.narrow(0, 0, len), x.chunk(2, 1));
        Tensor::cat(&[&x[0] * &c - &x[1] * &s, &x[1] * &c + &x[0] * &s], 1)
    };
    let mut first = 0;
    let mut rows = Vec::new();
    for &len in lens {
        let part = qkv.narrow(0, first, len);
        let head = |i: i64| part.narrow(1, i * d, d);
        let ones = Tensor::ones([len, len], F32);
        let mut seen = ones.tril(0);
        if let Some(window) = window {
            seen *= ones.triu(1 - window as i64);
        }
        let of = |h: i64| {
            let g = h / (heads / kv);
            let scores = rotate(head(h), len).matmul(&rotate(head(heads + g), len).tr()) / (d as f64).sqrt();
            let scores = cap.map_or_else(|| scores.shallow_clone(), |cap| (&scores / cap).tanh() * cap);
            let scores = scores.masked_fill(&seen.eq(0.0), f64::NEG_INFINITY);
            let all =
                sinks.map_or_else(|| scores.shallow_clone(), |of| Tensor::cat(&[&scores, &of.get(h).expand([len, 1], false)], 1));
            all.softmax(-1, Kind::Double).narrow(1, 0, len).matmul(&head(heads + kv + g))
        };
        rows.push(Tensor::cat(&(0..heads).map(of).collect::<Vec<_>>(), 1));
        first += len;
    }
    Tensor::cat(&rows, 0)
}

/// Sequences are written out with their prefixes; their own are the last rows of each.
#[test]
fn attention_equals_the_written_out_form_for_ragged_sequences_windows_and_shared_prefixes() {
    tch::manual_seed(3);
    let apart = [7, 1, 33, 12, 2].map(|len| (len, None));
    // Two prefixes with continuations (9 rows, then 3 and 20; 4 rows, then 1), and a separate
    // sequence. Windows end within a block of keys, at its end and after it.
    let long = [(70, None), (37, None), (50, Some(1)), (2, Some(1)), (17, Some(1))];
    let shared = [(9, None), (3, Some(0)), (20, Some(0)), (4, None), (1, Some(3)), (5, None)];
    for (at, (sequences, heads, kv, d, window)) in [
        (&apart[..], 4, 2, 8, None),
        (&apart, 3, 3, 6, Some(4)),
        (&apart, 4, 1, 32, Some(1)),
        (&apart, 2, 2, 64, None),
        (&apart, 8, 2, 128, None),
        (&shared, 4, 2, 8, None),
        (&shared, 4, 1, 32, Some(6)),
        (&shared, 2, 2, 64, None),
        (&long, 4, 2, 32, Some(19)),
        (&long, 2, 1, 40, Some(16)),
        (&long, 2, 2, 64, Some(3)),
    ]
    .into_iter()
    .enumerate()
    {
        // Every other case has capped scores, and every third none with sinks.
        let (cap, has_sinks) = ((at % 2 == 1).then_some(0.7), at % 3 != 0);
        let mut packed = Packed::default();
        for (len, prefix) in sequences {
            packed.push(vec![0; *len], *prefix);
        }
        let starts = packed.starts().collect::<Vec<_>>();
        let rows = |at: usize| starts[at] as i64..(starts[at] + packed.lens[at]) as i64;
        let whole = |at: usize| packed.prefixes[at].into_iter().flat_map(rows).chain(rows(at)).collect::<Vec<i64>>();
        let written: Vec<Vec<i64>> = (0..starts.len()).map(whole).collect();
        let lens: Vec<i64> = written.iter().map(|rows| rows.len() as i64).collect();
        let ends = lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let own: Vec<i64> = ends.zip(&packed.lens).flat_map(|(end, len)| end - *len as i64..end).collect();
        let angles = Tensor::rand([90, d / 2], F32) * 6.0;
        let (cos, sin) = (angles.cos(), angles.sin());
        let tables = [&cos, &sin].map(|half| Tensor::cat(&[half, half], 1));
        let shape = Heads { queries: heads, keys: kv, scale: 1.0 / (d as f64).sqrt(), cap };
        let fused = |x: &[Tensor]| attention(&x[0], (&tables[0], &tables[1]), &packed, shape, window, x.get(1));
        let plain = |x: &[Tensor]| {
            let copies = x[0].index_select(0, &Tensor::from_slice(&written.concat()));
            written_out(&copies, (&cos, &sin), &lens, [heads, kv], window, cap, x.get(1))
                .index_select(0, &Tensor::from_slice(&own))
        };
        let leaves = [leaf(&[packed.len() as i64, (heads + 2 * kv) * d]), leaf(&[heads])];
        same("attention", &leaves[..1 + usize::from(has_sinks)], fused, plain);
    }
}
