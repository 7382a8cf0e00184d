//! The closed form against autograd, in one chunk and in many.

use tch::Device;

use super::*;

/// Rows, weight and targets of a small head, as leaves of a graph.
fn leaves() -> (Tensor, Tensor, Tensor) {
    tch::manual_seed(3);
    let leaf = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    (leaf([7, 5]), leaf([11, 5]), Tensor::from_slice(&[0i64, 10, 3, 3, 7, 1, 9]))
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    a.allclose(b, 1e-4, 1e-6, false)
}

/// On a CPU a language-model head uses the fused softmax, elsewhere libtorch's. Both are compared,
/// with forbidden tokens and certain rows among the cases.
#[test]
fn the_fused_softmax_equals_libtorchs_also_where_a_token_is_forbidden_or_sure() {
    tch::manual_seed(5);
    let logits = Tensor::randn([9, 301], (Kind::Float, Device::Cpu)) * 4.0;
    let _forbidden = logits.get(2).narrow(0, 5, 100).fill_(f64::NEG_INFINITY);
    let _sure = logits.get(3).narrow(0, 7, 1).fill_(300.0);
    let targets = Tensor::from_slice(&[0i64, 300, 3, 7, 8, 150, 151, 152, 1]);
    let found = fused::softmax(&logits, &targets);
    let log_softmax = logits.log_softmax(-1, Kind::Float);
    let probs = log_softmax.exp();
    let chosen = log_softmax.gather(1, &targets.unsqueeze(1), false);
    let entropy = -(&probs * log_softmax.clamp_min(-100.0)).sum_dim_intlist([1i64].as_slice(), true, None);
    assert!(close(&found.narrow(1, 0, 1), &chosen) && close(&found.narrow(1, 1, 1), &entropy), "{found}");
    let (slopes, entropy_slopes) =
        (Tensor::randn([9, 1], (Kind::Float, Device::Cpu)), Tensor::randn([9, 1], (Kind::Float, Device::Cpu)));
    let by_chosen = Tensor::zeros_like(&probs).scatter_add(1, &targets.unsqueeze(1), &slopes) - &probs * &slopes;
    let by_entropy = &probs * (log_softmax.clamp_min(-100.0) + &entropy) * &entropy_slopes;
    let found_by = |entropy_slopes| fused::softmax_gradient(&logits, &targets, &found, &slopes, entropy_slopes, Kind::Float);
    assert!(close(&found_by(None), &by_chosen) && close(&found_by(Some(&entropy_slopes)), &(&by_chosen - by_entropy)));
    let _nan = logits.get(0).narrow(0, 9, 1).fill_(f64::NAN);
    let found = fused::softmax(&logits, &targets);
    assert!(found.get(0).isnan().all().int64_value(&[]) == 1, "law N4: a logit that is no number gives none");
}

/// Derivatives by a teacher's tokens, together with those by the targets, however the rows are chunked; and
/// its own likeliest tokens.
#[test]
fn gradients_by_a_teachers_tokens_equal_autograd() {
    let (slopes, k) = ([0.5, -0.25, 1.0, 0.0, 2.0, -1.5, 0.1], 3);
    let ids: Vec<i64> = (0..7).flat_map(|row| [row, (row + 4) % 11, 10 - row / 2]).collect();
    let at_teacher: Vec<f64> = (0..21).map(|at| f64::from(at) * 0.1 - 1.0).collect();
    for temperatures in [[1.0; 7], [1.0, 0.5, 2.0, 1.0, 0.7, 0.7, 1.3]] {
        let (rows, weight, targets) = leaves();
        let ids = Tensor::from_slice(&ids).reshape([7, k]);
        let divided = rows.linear(&weight, None::<&Tensor>) / column(&temperatures, Device::Cpu);
        let log_softmax = divided.log_softmax(-1, Kind::Float);
        let chosen = log_softmax.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
        let theirs = log_softmax.gather(1, &ids, false);
        let tensor = |values: &[f64]| Tensor::from_slice(values).to_kind(Kind::Float);
        let loss = (&chosen * tensor(&slopes)).sum(Kind::Float) + (theirs.reshape([-1]) * tensor(&at_teacher)).sum(Kind::Float);
        let expected = Tensor::run_backward(&[loss], &[&rows, &weight], false, false);
        for chunk_rows in [1, 3, 100] {
            let temperature = Temperature::of(&temperatures, Device::Cpu);
            let words = Words { targets: &targets, temperature, cap: None, teacher: Some(ids.shallow_clone()), chunk_rows };
            let head = OutputHead { weight: &weight, rows: &rows, words: Some(words) };
            let mut scored = head.score();
            assert!(close(&tensor(scored.at_teacher.as_deref().unwrap()), &theirs.reshape([-1])));
            let all = SlopesOf { log_probs: &slopes, entropies: None, at_teacher: Some(&at_teacher) };
            let found = head.gradients(&mut scored, all);
            assert!(close(&found.rows, &expected[0]) && close(&found.weight.unwrap(), &expected[1]), "chunks of {chunk_rows}");
            let (log_probs, top) = head.top(head.words.as_ref().unwrap(), TopK { k: 2, below: 11 });
            let (values, likeliest) = log_softmax.topk(2, -1, true, true);
            assert!(close(&tensor(&log_probs), &chosen) && top.k == 2);
            for row in 0..7_i64 {
                let at = row as usize * 2;
                let largest = values.double_value(&[row, 0]).max(values.double_value(&[row, 1]));
                assert!((top.log_probs[at].max(top.log_probs[at + 1]) - largest).abs() < 1e-5);
                let mut own = [top.ids[at], top.ids[at + 1]];
                let mut expected = [0, 1].map(|nth| likeliest.int64_value(&[row, nth]));
                own.sort_unstable();
                expected.sort_unstable();
                assert_eq!(own, expected);
            }
        }
    }
}

#[test]
fn scores_and_gradients_equal_autograd_however_the_rows_are_chunked() {
    let slopes = [0.5, -0.25, 1.0, 0.0, 2.0, -1.5, 0.1];
    let entropy_slopes = [0.1, 0.2, 0.0, -0.3, 0.4, 0.5, -0.6];
    let temperatures = [[1.0; 7], [0.7; 7], [1.0, 0.5, 2.0, 1.0, 0.7, 0.7, 1.3]];
    for (temperatures, cap) in temperatures.into_iter().flat_map(|of| [(of, None), (of, Some(1.5))]) {
        let (rows, weight, targets) = leaves();
        let divided = capped(rows.linear(&weight, None::<&Tensor>), cap) / column(&temperatures, Device::Cpu);
        let log_softmax = divided.log_softmax(-1, Kind::Float);
        let chosen = log_softmax.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
        let entropy = -(log_softmax.exp() * &log_softmax).sum_dim_intlist([1i64].as_slice(), false, None);
        let tensor = |values: &[f64]| Tensor::from_slice(values).to_kind(Kind::Float);
        let loss = (&chosen * tensor(&slopes)).sum(Kind::Float) + (&entropy * tensor(&entropy_slopes)).sum(Kind::Float);
        let expected = Tensor::run_backward(&[loss], &[&rows, &weight], false, false);

        for chunk_rows in [1, 2, 3, 7, 100] {
            let temperature = Temperature::of(&temperatures, Device::Cpu);
            let words = Words { targets: &targets, temperature, cap, teacher: None, chunk_rows };
            let head = OutputHead { weight: &weight, rows: &rows, words: Some(words) };
            let mut scored = head.score();
            assert!(close(&tensor(&scored.log_probs), &chosen) && close(&tensor(&scored.entropies), &entropy));
            let closed =
                head.gradients(&mut scored, SlopesOf { log_probs: &slopes, entropies: Some(&entropy_slopes), at_teacher: None });
            let surrogate = head.surrogate(&closed.rows);
            let found = Tensor::run_backward(&[surrogate], &[&rows], false, false);
            assert!(found[0] == closed.rows, "a surrogate has the gradient it is given");
            let by_weight = closed.weight.expect("it is trained");
            assert!(close(&found[0], &expected[0]) && close(&by_weight, &expected[1]), "chunks of {chunk_rows}");
        }
    }
}
