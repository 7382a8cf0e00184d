//! Draws one token a row from a step's logits.
//!
//! Rows are drawn on the host, except from a large vocabulary, where plain sampling (temperature only, or
//! greedy) is tensor operations, and on a GPU, where our kernel draws them all. The choice depends on the
//! row's logits alone, never on its batch (law N2, to the bit on CPUs only). The logits themselves may
//! differ by rounding among batches of other sizes.

use tch::{Kind, Tensor};

use crate::engine::SamplingParams;
use crate::engine::penalties::{Adjusted, adjust};
use crate::engine::sampling::choose;
use crate::model::{fused, upload};

/// A row's token and log-probability; `None` for a row that is not finite.
pub(super) type Choices = Vec<Option<(u32, f32)>>;

/// Parameters of a row's draw, apart from its logits.
#[derive(Clone)]
pub struct Row<'a> {
    pub params: &'a SamplingParams,
    pub uniform: f64,
    /// Changes of scores, if the parameters have any.
    pub adjusted: Vec<Adjusted>,
}

/// Vocabulary above which copying and scanning a row on the host costs more than a few tensor
/// operations.
const LARGE_VOCABULARY: i64 = 8192;

/// Draws row `i` of `logits` `[rows, vocabulary]` with `rows[i]`. Returns `None` for a row that is not
/// finite, else the token and its log-probability.
pub fn draw(logits: &Tensor, rows: &[Row]) -> Choices {
    let logits = &logits.to_kind(Kind::Float);
    if fused::gpu::takes_logits(logits) {
        let logits = &adjust_on_device(logits, rows);
        return choices(&fused::gpu::draw(logits, &upload_settings(&settings(rows), logits.device())));
    }
    let large = logits.size()[1] > LARGE_VOCABULARY;
    let by_tensor = |row: &Row| large && row.params.keeps_all() && row.adjusted.is_empty();
    let (tensor, host): (Vec<usize>, Vec<usize>) = (0..rows.len()).partition(|&row| by_tensor(&rows[row]));
    let mut drawn = vec![None; rows.len()];
    type Draw = fn(&Tensor, &[Row]) -> Choices;
    for (part, draw) in [(tensor, draw_by_tensor as Draw), (host, draw_on_host)].into_iter().filter(|(part, _)| !part.is_empty())
    {
        let index: Vec<i64> = part.iter().map(|&row| row as i64).collect();
        let of_part: Vec<_> = part.iter().map(|&row| rows[row].clone()).collect();
        let all = part.len() == rows.len();
        let logits = if all { logits.shallow_clone() } else { logits.index_select(0, &upload(&index, logits.device())) };
        part.into_iter().zip(draw(&logits, &of_part)).for_each(|(row, choice)| drawn[row] = choice);
    }
    drawn
}

fn draw_on_host(logits: &Tensor, rows: &[Row]) -> Choices {
    let vocabulary = logits.size()[1] as usize;
    let mut scores = vec![0f32; rows.len() * vocabulary];
    let count = scores.len();
    logits.to_device(tch::Device::Cpu).copy_data(&mut scores, count);
    let choice = |(scores, row): (&mut [f32], &Row)| {
        adjust(scores, &row.adjusted);
        choose(scores, row.params, row.uniform)
    };
    scores.chunks_mut(vocabulary).zip(rows).map(choice).collect()
}

/// Logits with changed scores; only these are sent to the device.
fn adjust_on_device(logits: &Tensor, rows: &[Row]) -> Tensor {
    let all = || rows.iter().zip(0i64..).flat_map(|(row, at)| row.adjusted.iter().map(move |of| (at, of)));
    if all().next().is_none() {
        return logits.shallow_clone();
    }
    let places: Vec<i64> = all().map(|(row, of)| row * logits.size()[1] + i64::from(of.token)).collect();
    let changes: Vec<f32> = all().flat_map(|(_, of)| [of.bias, of.divisor, of.less]).collect();
    let (places, changes) = (upload(&places, logits.device()), upload(&changes, logits.device()).view([-1, 3]));
    let [bias, divisor, less] = [0, 1, 2].map(|column| changes.select(1, column));
    let flat = logits.view([-1]);
    let biased = flat.index_select(0, &places) + bias;
    let penalised = (&biased / &divisor).where_self(&biased.gt(0.0), &(&biased * &divisor)) - less;
    flat.index_copy(0, &places, &penalised).view_as(logits)
}

/// A choice of each row from tokens and log-probabilities, `[rows, 2]` in f64.
pub(super) fn choices(drawn: &Tensor) -> Choices {
    let mut numbers = vec![0f64; drawn.numel()];
    let count = numbers.len();
    drawn.to_device(tch::Device::Cpu).contiguous().copy_data(&mut numbers, count);
    let choice = |row: &[f64]| row[1].is_finite().then_some((row[0] as u32, row[1] as f32));
    numbers.chunks(2).map(choice).collect()
}

/// Settings of the kernel `draw` for each row.
pub(super) fn settings(rows: &[Row]) -> Vec<f64> {
    let setting = |Row { params, uniform, .. }: &Row| {
        let temperature = if params.greedy() { 0.0 } else { f64::from(params.temperature) };
        [temperature, *uniform, params.top_k as f64, f64::from(params.top_p), f64::from(params.min_p)]
    };
    rows.iter().flat_map(setting).collect()
}

/// Settings on the device, `[rows, 5]`.
pub(super) fn upload_settings(settings: &[f64], device: tch::Device) -> Tensor {
    upload(settings, device).view([-1, 5])
}

fn draw_by_tensor(logits: &Tensor, rows: &[Row]) -> Choices {
    let any_greedy = rows.iter().any(|row| row.params.greedy());
    let column = |value: &dyn Fn(&SamplingParams, f64) -> f64| {
        let values: Vec<f64> = rows.iter().map(|row| value(row.params, row.uniform)).collect();
        upload(&values, logits.device()).unsqueeze(1).to_kind(Kind::Float)
    };
    let temperature = |params: &SamplingParams| if params.greedy() { 1.0 } else { f64::from(params.temperature) };
    let divided = rows.iter().any(|row| temperature(row.params) != 1.0);
    let scores = if divided { logits / column(&|params, _| temperature(params)) } else { logits.shallow_clone() };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::penalties::adjusted;
    use crate::model::{Compute, Dtype};

    /// A row after a prompt and a completion of a few tokens.
    fn row(params: &SamplingParams, uniform: f64) -> Row<'_> {
        Row { params, uniform, adjusted: adjusted(params, &[1, 2, 3, 600], [5, 7, 5, 2, 690, 5].iter()) }
    }

    /// By pure functions.
    fn chosen(scores: &[f32], row: &Row) -> (u32, f32) {
        let mut scores = scores.to_vec();
        adjust(&mut scores, &row.adjusted);
        choose(&mut scores, row.params, row.uniform).unwrap()
    }

    #[test]
    fn a_large_vocabulary_is_drawn_as_a_small_one_would_be() {
        let columns = LARGE_VOCABULARY as usize + 100;
        let scores: Vec<f32> = (0..4 * columns).map(|at| ((at * 7919 % 1009) as f32 / 100.0) - 5.0).collect();
        let logits = Tensor::from_slice(&scores).view([4, -1]);
        let warm = SamplingParams { temperature: 0.8, ..Default::default() };
        let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
        let cut = SamplingParams { top_k: 5, ..Default::default() };
        let biased = SamplingParams { logit_bias: [(50, 4.0)].into(), repetition_penalty: 1.3, ..Default::default() };
        let rows = [row(&warm, 0.3), row(&cut, 0.6), row(&greedy, 0.5), row(&biased, 0.4)];
        let choices = draw(&logits, &rows);
        for (row, of) in rows.iter().enumerate() {
            let expected = chosen(&scores[row * columns..(row + 1) * columns], of);
            let choice = choices[row].unwrap();
            assert!(choice.0.abs_diff(expected.0) <= 1, "{choice:?} {expected:?}");
            assert!((choice.1 - expected.1).abs() < 2e-2 || choice.0 != expected.0);
        }
        assert_eq!(draw(&(logits * f64::NAN), &rows), vec![None; 4]);
    }

    /// By the kernel, where there is a GPU or its stand-in; rows that are equal to the last bit stay in the
    /// order of the host.
    #[test]
    fn a_gpu_draws_the_tokens_that_the_host_draws_also_from_cut_distributions_with_ties() {
        let Ok(()) = Compute::cuda(0, Dtype::F32).check() else { return eprintln!("skipped: no GPU") };
        let columns = 700;
        // Many scores are equal.
        let numbers: Vec<f32> = (0..10 * columns).map(|at| ((at * 7919 % 101) as f32 / 10.0) - 5.0).collect();
        let of = |temperature, top_k, top_p, min_p| SamplingParams { temperature, top_k, top_p, min_p, ..Default::default() };
        let all = [
            of(1.0, 5, 1.0, 0.0),
            of(1.0, 0, 0.9, 0.0),
            of(0.7, 0, 1.0, 0.05),
            of(1.3, 40, 0.5, 0.1),
            of(1.0, 0, 1.0, 0.0),
            of(1.0, 1000, 0.01, 0.0),
            of(0.0, 3, 0.2, 0.0),
            of(2.0, 0, 0.97, 0.001),
            SamplingParams { repetition_penalty: 1.7, presence_penalty: 0.5, frequency_penalty: 0.3, ..of(0.9, 9, 1.0, 0.0) },
            SamplingParams { logit_bias: [(3, 9.0), (4, 9.0), (699, -90.0)].into(), ..of(1.0, 0, 0.99, 0.0) },
        ];
        for uniform in [0.0, 0.11, 0.3, 0.5, 0.77, 0.999] {
            let rows: Vec<Row> = all.iter().map(|params| row(params, uniform)).collect();
            let choices = draw(&Tensor::from_slice(&numbers).view([10, -1]).to_device(tch::Device::Cuda(0)), &rows);
            for (row, of) in rows.iter().enumerate() {
                let (params, expected) = (of.params, chosen(&numbers[row * columns..(row + 1) * columns], of));
                let found = choices[row].unwrap();
                assert!((found.1 - expected.1).abs() < 1e-4, "{params:?}: {found:?} {expected:?}");
                assert_eq!(found.0, expected.0, "{params:?}, {uniform}");
            }
        }
        // Nearly 1, which is 1 in f32: the others' share is lost in a sum in f32.
        let peak: Vec<f32> = (0..columns).map(|at| if at == 0 { 0.0 } else { -40.0 }).collect();
        let rows = [&all[0], &all[4]].map(|params| row(params, 1.0 - 2f64.powi(-26)));
        let logits = Tensor::from_slice(&[&peak[..], &peak].concat()).view([2, -1]).to_device(tch::Device::Cuda(0));
        for (found, row) in draw(&logits, &rows).into_iter().zip(&rows) {
            assert_eq!((chosen(&peak, row).0, found.unwrap().0), (0, 0), "{:?}", row.params);
        }
    }
}
