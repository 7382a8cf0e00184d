//! Draws one token a row from a step's logits.
//!
//! Rows are drawn on the host, except from a large vocabulary: there plain sampling (temperature
//! only, or greedy) and, on a GPU, all other sampling are tensor operations. The choice depends on
//! the row alone, never on its batch (law N2, to the bit on CPUs only).

use tch::{Kind, Tensor};

use crate::engine::SamplingParams;
use crate::engine::sampling::choose;
use crate::model::{fused, upload};

/// Vocabulary above which copying and scanning a row on the host costs more than a few tensor
/// operations.
const LARGE_VOCABULARY: i64 = 8192;

/// Draws row `i` of `logits` `[rows, vocabulary]` with parameters and uniform number `i`. Returns
/// `None` for a row that is not finite, else the token and its log-probability.
pub fn draw(logits: &Tensor, rows: &[(&SamplingParams, f64)]) -> Vec<Option<(u32, f32)>> {
    let logits = &logits.to_kind(Kind::Float);
    let large = logits.size()[1] > LARGE_VOCABULARY;
    // Copying a vocabulary from a GPU is slower than sorting it there; on a CPU it is faster.
    let on_gpu = logits.device() != tch::Device::Cpu;
    let by_tensor = |(params, _): &(&SamplingParams, f64)| large && (on_gpu || params.keeps_all());
    let (tensor, host): (Vec<usize>, Vec<usize>) = (0..rows.len()).partition(|&row| by_tensor(&rows[row]));
    if tensor.is_empty() {
        return draw_on_host(logits, rows);
    }
    if host.is_empty() {
        return draw_by_tensor(logits, rows);
    }
    let mut choices = vec![None; rows.len()];
    type Draw = fn(&Tensor, &[(&SamplingParams, f64)]) -> Vec<Option<(u32, f32)>>;
    for (part, draw) in [(tensor, draw_by_tensor as Draw), (host, draw_on_host)].into_iter().filter(|(part, _)| !part.is_empty())
    {
        let index: Vec<i64> = part.iter().map(|&row| row as i64).collect();
        let of_part: Vec<_> = part.iter().map(|&row| rows[row]).collect();
        let drawn = draw(&logits.index_select(0, &upload(&index, logits.device())), &of_part);
        part.into_iter().zip(drawn).for_each(|(row, choice)| choices[row] = choice);
    }
    choices
}

fn draw_on_host(logits: &Tensor, rows: &[(&SamplingParams, f64)]) -> Vec<Option<(u32, f32)>> {
    let vocabulary = logits.size()[1] as usize;
    let mut scores = vec![0f32; rows.len() * vocabulary];
    let count = scores.len();
    logits.to_device(tch::Device::Cpu).copy_data(&mut scores, count);
    scores.chunks_mut(vocabulary).zip(rows).map(|(scores, (params, uniform))| choose(scores, params, *uniform)).collect()
}

/// A choice of each row from tokens and log-probabilities, `[rows, 2]` in f64.
fn choices(drawn: &Tensor) -> Vec<Option<(u32, f32)>> {
    let mut numbers = vec![0f64; drawn.numel()];
    let count = numbers.len();
    drawn.to_device(tch::Device::Cpu).contiguous().copy_data(&mut numbers, count);
    let choice = |row: &[f64]| row[1].is_finite().then_some((row[0] as u32, row[1] as f32));
    numbers.chunks(2).map(choice).collect()
}

/// Temperature alone, or the likeliest token, by our kernel.
fn draw_by_kernel(logits: &Tensor, rows: &[(&SamplingParams, f64)]) -> Option<Vec<Option<(u32, f32)>>> {
    if !rows.iter().all(|(params, _)| params.greedy() || params.keeps_all()) {
        return None;
    }
    let setting = |(params, uniform): &(&SamplingParams, f64)| match params.greedy() {
        true => [0.0, 0.0],
        false => [1.0 / f64::from(params.temperature), *uniform],
    };
    let settings: Vec<f64> = rows.iter().flat_map(setting).collect();
    fused::gpu::draw(logits, &upload(&settings, logits.device()).view([-1, 2])).map(|drawn| choices(&drawn))
}

fn draw_by_tensor(logits: &Tensor, rows: &[(&SamplingParams, f64)]) -> Vec<Option<(u32, f32)>> {
    if let Some(choices) = draw_by_kernel(logits, rows) {
        return choices;
    }
    let any_greedy = rows.iter().any(|(params, _)| params.greedy());
    let column = |value: &dyn Fn(&SamplingParams, f64) -> f64| {
        let values: Vec<f64> = rows.iter().map(|(params, uniform)| value(params, *uniform)).collect();
        upload(&values, logits.device()).unsqueeze(1).to_kind(Kind::Float)
    };
    let temperature = |params: &SamplingParams| if params.greedy() { 1.0 } else { f64::from(params.temperature) };
    let divided = rows.iter().any(|(params, _)| temperature(params) != 1.0);
    let scores = if divided { logits / column(&|params, _| temperature(params)) } else { logits.shallow_clone() };
    let cuts = rows.iter().any(|(params, _)| !params.greedy() && !params.keeps_all());
    let scores = if cuts { warp_by_tensor(&scores, rows) } else { scores };
    let log_probs = scores.log_softmax(-1, Kind::Float);
    let cumulative = log_probs.exp().cumsum(-1, Kind::Float);
    let total = cumulative.narrow(1, -1, 1);
    // Below the total also after rounding, so that the token found has a positive share.
    let sought = (&total * column(&|_, uniform| uniform)).minimum(&(&total * (1.0 - f64::from(f32::EPSILON))));
    // The first token whose cumulative share exceeds the uniform number.
    let drawn = sought.searchsorted(&cumulative, false, true, "right", None::<&Tensor>).clamp_max(logits.size()[1] - 1);
    let drawn = match any_greedy {
        true => log_probs.argmax(-1, true).where_self(&column(&|params, _| f64::from(u8::from(params.greedy()))).gt(0.5), &drawn),
        false => drawn,
    };
    let chosen = log_probs.gather(1, &drawn, false);
    choices(&Tensor::cat(&[drawn.to_kind(Kind::Double), chosen.to_kind(Kind::Double)], 1))
}

/// Applies top-k, top-p and min-p as [`warp`](crate::engine::sampling::warp) does after the
/// temperature. Greedy rows are unchanged.
fn warp_by_tensor(scores: &Tensor, rows: &[(&SamplingParams, f64)]) -> Tensor {
    let device = scores.device();
    let vocabulary = scores.size()[1];
    let column = |value: &dyn Fn(&SamplingParams) -> f64, off: f64| {
        let values: Vec<f64> = rows.iter().map(|(params, _)| if params.greedy() { off } else { value(params) }).collect();
        Tensor::from_slice(&values).unsqueeze(1).to_device(device)
    };
    // Of equal scores the later token ranks first, as on the host.
    let (sorted, order) = scores.flip([1]).sort_stable(true, -1, true);
    let order = -order + (vocabulary - 1);
    let kth = column(
        &|params| if params.top_k == 0 { vocabulary as f64 } else { (params.top_k as f64).min(vocabulary as f64) },
        vocabulary as f64,
    );
    let least = sorted.gather(1, &(kth - 1.0).to_kind(Kind::Int64), false);
    let none = f64::NEG_INFINITY;
    // Ties with the k-th stay.
    let sorted = sorted.masked_fill(&sorted.less_tensor(&least), none);
    let shares = sorted.softmax(-1, Kind::Double);
    let before = shares.cumsum(-1, Kind::Double) - &shares;
    let top_p = column(&|params| f64::from(params.top_p), 1.0);
    let outside = before.greater_equal_tensor(&top_p).logical_and(&top_p.less(1.0));
    let first = Tensor::arange(vocabulary, (Kind::Int64, device)).eq(0).unsqueeze(0);
    let sorted = sorted.masked_fill(&outside.logical_and(&first.logical_not()), none);
    let min_p = column(&|params| f64::from(params.min_p.ln()), none).to_kind(Kind::Float);
    let least = sorted.narrow(1, 0, 1) + min_p;
    let sorted = sorted.masked_fill(&sorted.less_tensor(&least), none);
    scores.zeros_like().scatter_(1, &order, &sorted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_vocabulary_is_drawn_as_a_small_one_would_be() {
        let columns = LARGE_VOCABULARY as usize + 100;
        let scores: Vec<f32> = (0..3 * columns).map(|at| ((at * 7919 % 1009) as f32 / 100.0) - 5.0).collect();
        let logits = Tensor::from_slice(&scores).view([3, -1]);
        let warm = SamplingParams { temperature: 0.8, ..Default::default() };
        let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
        let cut = SamplingParams { top_k: 5, ..Default::default() };
        let rows = [(&warm, 0.3), (&cut, 0.6), (&greedy, 0.5)];
        let choices = draw(&logits, &rows);
        for (row, (params, uniform)) in rows.into_iter().enumerate() {
            let expected = choose(&mut scores[row * columns..(row + 1) * columns].to_vec(), params, uniform).unwrap();
            let choice = choices[row].unwrap();
            assert!(choice.0.abs_diff(expected.0) <= 1, "{choice:?} {expected:?}");
            assert!((choice.1 - expected.1).abs() < 2e-2 || choice.0 != expected.0);
        }
        assert_eq!(draw(&(logits * f64::NAN), &rows), vec![None; 3]);
    }

    #[test]
    fn a_device_keeps_the_tokens_that_the_host_keeps() {
        let columns = 500;
        // Many scores are equal.
        let numbers: Vec<f32> = (0..6 * columns).map(|at| ((at * 7919 % 101) as f32 / 10.0) - 5.0).collect();
        let of = |top_k, top_p, min_p| SamplingParams { top_k, top_p, min_p, ..Default::default() };
        let all = [of(5, 1.0, 0.0), of(0, 0.9, 0.0), of(0, 1.0, 0.05), of(40, 0.5, 0.1), of(0, 1.0, 0.0), of(1000, 0.01, 0.0)];
        let rows: Vec<(&SamplingParams, f64)> = all.iter().map(|params| (params, 0.3)).collect();
        let warped = warp_by_tensor(&Tensor::from_slice(&numbers).view([6, -1]), &rows);
        for (row, params) in all.iter().enumerate() {
            let mut expected = numbers[row * columns..(row + 1) * columns].to_vec();
            crate::engine::sampling::warp(&mut expected, params);
            let found = Vec::<f32>::try_from(warped.get(row as i64)).unwrap();
            assert_eq!(found, expected, "{params:?}");
        }
        let choices = draw_by_tensor(&Tensor::from_slice(&numbers).view([6, -1]), &rows);
        for (row, (params, uniform)) in rows.into_iter().enumerate() {
            let expected = choose(&mut numbers[row * columns..(row + 1) * columns].to_vec(), params, uniform).unwrap();
            let found = choices[row].unwrap();
            assert!(found.0 == expected.0 && (found.1 - expected.1).abs() < 1e-4, "{params:?}");
        }
    }
}
