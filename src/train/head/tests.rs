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

#[test]
fn scores_and_gradients_equal_autograd_however_the_rows_are_chunked() {
    let slopes = [0.5, -0.25, 1.0, 0.0, 2.0, -1.5, 0.1];
    let entropy_slopes = [0.1, 0.2, 0.0, -0.3, 0.4, 0.5, -0.6];
    for temperatures in [[1.0; 7], [0.7; 7], [1.0, 0.5, 2.0, 1.0, 0.7, 0.7, 1.3]] {
        let (rows, weight, targets) = leaves();
        let divided = rows.linear(&weight, None::<&Tensor>) / column(&temperatures, Device::Cpu);
        let log_softmax = divided.log_softmax(-1, Kind::Float);
        let chosen = log_softmax.gather(1, &targets.unsqueeze(1), false).squeeze_dim(1);
        let entropy = -(log_softmax.exp() * &log_softmax).sum_dim_intlist([1i64].as_slice(), false, None);
        let tensor = |values: &[f64]| Tensor::from_slice(values).to_kind(Kind::Float);
        let loss = (&chosen * tensor(&slopes)).sum(Kind::Float) + (&entropy * tensor(&entropy_slopes)).sum(Kind::Float);
        let expected = Tensor::run_backward(&[loss], &[&rows, &weight], false, false);

        for chunk_rows in [1, 2, 3, 7, 100] {
            let temperature = Temperature::of(&temperatures, Device::Cpu);
            let head = Words { weight: &weight, rows: &rows, targets: &targets, temperature, chunk_rows };
            let scored = head.score();
            assert!(close(&tensor(&scored.log_probs), &chosen) && close(&tensor(&scored.entropies), &entropy));
            let closed = head.gradients(&scored, &slopes, Some(&entropy_slopes));
            let surrogate = Head::Words(head).surrogate(&closed);
            let found = Tensor::run_backward(&[surrogate], &[&rows, &weight], false, false);
            assert!(
                found[0] == closed.rows && Some(&found[1]) == closed.weight.as_ref(),
                "a surrogate has the gradients it is given"
            );
            assert!(close(&found[0], &expected[0]) && close(&found[1], &expected[1]), "chunks of {chunk_rows}");
        }
    }
}
