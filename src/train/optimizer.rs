//! AdamW over one flat tensor: state and clipping.
//!
//! On a CPU an update is the fused loop of [`AdamW::update`] over slices; elsewhere it is libtorch's fused
//! AdamW. Both apply the settings of each parameter group ([`ParamGroups`]). Parameters in bf16 are widened
//! and rounded stochastically in pieces.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::groups::{ParamGroups, Slice};
use super::moments::{Moment, pieces};
use super::optimizer_files::OptimizerState;
use super::{AdamW, MomentFormat, norm, rounding};
use crate::model::{Layout, fused, part};

/// Moments of all parameters, and how often they were updated.
pub(super) struct Optimizer {
    config: AdamW,
    groups: ParamGroups,
    /// Stretches of the parameters with the same settings, in order and without gaps.
    slices: Vec<Slice>,
    /// Updates made.
    pub step: u64,
    format: MomentFormat,
    /// `exp_avg`, `exp_avg_sq` and, with amsgrad, `max_exp_avg_sq`.
    moments: Vec<Moment>,
}

impl Optimizer {
    /// Zero moments. They take no memory before the first update, for backends that only score.
    pub fn new(config: AdamW, groups: ParamGroups, layout: &Layout, format: MomentFormat) -> Self {
        let slices = groups.slices(config.weight_decay, layout);
        Optimizer::of_slices(config, groups, slices, layout.total(), format)
    }

    /// Of some of a model's numbers, `len` in all.
    pub fn of_slices(config: AdamW, groups: ParamGroups, slices: Vec<Slice>, len: usize, format: MomentFormat) -> Self {
        let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"].into_iter().take(if config.amsgrad { 3 } else { 2 });
        Optimizer { config, groups, slices, step: 0, format, moments: names.map(|name| Moment::new(name, len)).collect() }
    }

    /// Replaces the settings. Moments of amsgrad can't be added.
    pub fn configure(&mut self, config: AdamW, layout: &Layout) {
        self.config = AdamW { amsgrad: self.config.amsgrad, ..config };
        self.slices = self.groups.slices(config.weight_decay, layout);
    }

    /// Updates `params`, in f32 or bf16, in place, with gradients multiplied by `scale`. On a device the gradient
    /// is consumed.
    pub fn update(&mut self, lr: f64, scale: f64, params: &mut Tensor, grad: Tensor) {
        self.step += 1;
        let apply = if params.device() == Device::Cpu { Optimizer::update_on_host } else { Optimizer::update_on_device };
        self.update_by(apply, Rates { lr, scale }, params, &grad);
    }

    /// In pieces, unless parameters and moments are in f32 next to each other.
    fn update_by(&mut self, apply: Apply, rates: Rates, params: &Tensor, grad: &Tensor) {
        let _guard = tch::no_grad_guard();
        let (device, len) = (params.device(), params.numel());
        self.moments.iter_mut().for_each(|moment| moment.settle(self.format, device));
        let is_plain = self.format == MomentFormat::F32 && params.kind() == Kind::Float;
        let whole = std::iter::once(0..len).filter(|_| is_plain);
        let in_pieces = pieces(len).filter(|_| !is_plain);
        for range in whole.chain(in_pieces) {
            let mut moments: Vec<Tensor> = self.moments.iter().map(|moment| moment.read(range.clone(), device)).collect();
            let (mut own, grad) = (part(params, range.clone()), part(grad, range.clone()));
            // Of f32 numbers this is the same tensor.
            let widened = own.to_kind(Kind::Float);
            apply(self, rates, Piece { params: widened.shallow_clone(), grad, first: range.start }, &mut moments);
            if own.kind() != Kind::Float {
                rounding::write(&mut own, &widened, self.step, &range);
            }
            drop(widened);
            self.moments.iter_mut().zip(moments).for_each(|(moment, numbers)| moment.write(range.clone(), numbers));
        }
    }

    fn update_on_host(&self, Rates { lr, scale }: Rates, mut piece: Piece, moments: &mut [Tensor]) {
        let mut moments = moments.iter_mut().map(slice_mut);
        let moments = [(); 3].map(|()| moments.next().unwrap_or_default());
        let (config, step, slices) = (self.config, self.step, &self.slices);
        let threads = (tch::get_num_threads().max(1) as usize).min(piece.grad.numel().div_ceil(LEAST));
        let columns = Columns { first: piece.first, params: slice_mut(&mut piece.params), grad: slice(&piece.grad), moments };
        side_by_side(threads, columns, &|mut rest: Columns| {
            for Slice { range, weight_decay, lr_scale } in slices {
                let ours = range.end.saturating_sub(rest.first);
                let (own, after) = rest.split_at(ours);
                rest = after;
                if !own.params.is_empty() {
                    let config = AdamW { weight_decay: *weight_decay, ..config };
                    config.update(step, lr * lr_scale, scale, own.params, own.grad, own.moments);
                }
            }
        });
    }

    /// libtorch's fused AdamW: one pass over each slice, and no temporaries.
    fn update_on_device(&self, Rates { lr, scale }: Rates, piece: Piece, moments: &mut [Tensor]) {
        let Piece { params, grad, first } = piece;
        let options = (Kind::Float, params.device());
        let step = Tensor::full([1], self.step as f64, options);
        // libtorch divides by it.
        let divisor = (scale != 1.0).then(|| Tensor::full([1], scale.recip(), options));
        let key = |slice: &Slice| [slice.weight_decay, slice.lr_scale].map(f64::to_bits);
        let within =
            |range: &Range<usize>| range.start.max(first) - first..range.end.min(first + params.numel()).max(first) - first;
        let of_piece = |slice: &Slice| Slice { range: within(&slice.range), ..*slice };
        let mut slices: Vec<Slice> = self.slices.iter().map(of_piece).filter(|slice| !slice.range.is_empty()).collect();
        slices.sort_by_key(key);
        for alike in slices.chunk_by(|a, b| key(a) == key(b)) {
            let Slice { weight_decay, lr_scale, .. } = alike[0];
            let parts = |of: &Tensor| -> Vec<Tensor> { alike.iter().map(|slice| part(of, slice.range.clone())).collect() };
            let moments: Vec<Vec<Tensor>> = moments.iter().map(parts).collect();
            let AdamW { beta1, beta2, epsilon, .. } = self.config;
            let settings = fused::AdamWSettings { lr: lr * lr_scale, beta1, beta2, weight_decay, epsilon };
            fused::adamw(&parts(&params), &parts(&grad), &moments, &step, divisor.as_ref(), settings);
        }
    }

    /// The moments.
    pub fn moments(&self) -> impl Iterator<Item = &Moment> {
        self.moments.iter()
    }

    /// Names of the moments.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.moments.iter().map(|moment| moment.name)
    }

    /// The part of a checkpoint that is not tensors.
    pub fn state(&self) -> OptimizerState {
        OptimizerState { step: self.step, groups: self.groups }
    }

    /// Continues after `step` updates of parameters on `device` with these moments.
    pub fn restore(&mut self, step: u64, moments: Vec<Tensor>, device: Device) {
        let _guard = tch::no_grad_guard();
        self.step = step;
        self.moments.iter_mut().zip(moments).for_each(|(own, moment)| own.restore(&moment, self.format, device));
    }
}

/// Rate of an update, and factor of its gradients.
#[derive(Clone, Copy)]
struct Rates {
    lr: f64,
    scale: f64,
}

/// Some of the parameters, from number `first`, and their gradients.
struct Piece {
    params: Tensor,
    grad: Tensor,
    first: usize,
}

/// Updates a piece and its moments in place.
type Apply = fn(&Optimizer, Rates, Piece, &mut [Tensor]);

/// Smallest number of elements per additional thread.
const LEAST: usize = 1 << 20;

/// A stretch of parameters with their gradients and moments.
struct Columns<'a> {
    /// Place of the first number among all parameters.
    first: usize,
    params: &'a mut [f32],
    grad: &'a [f32],
    moments: [&'a mut [f32]; 3],
}

impl<'a> Columns<'a> {
    /// The first `at` numbers, or all where there are fewer, and the rest.
    fn split_at(self, at: usize) -> (Columns<'a>, Columns<'a>) {
        let at = at.min(self.params.len());
        let (params, more_params) = self.params.split_at_mut(at);
        let (grad, more_grad) = self.grad.split_at(at);
        let [mean, square, max] = self.moments.map(|moment| moment.split_at_mut(at.min(moment.len())));
        (
            Columns { first: self.first, params, grad, moments: [mean.0, square.0, max.0] },
            Columns { first: self.first + at, params: more_params, grad: more_grad, moments: [mean.1, square.1, max.1] },
        )
    }
}

/// Updates ranges of all columns on `threads` threads. Elements are independent, so that the result
/// is the same.
fn side_by_side(threads: usize, columns: Columns, update: &(impl Fn(Columns) + Sync)) {
    if threads <= 1 {
        return update(columns);
    }
    let at = columns.params.len() / threads;
    let (own, rest) = columns.split_at(at);
    std::thread::scope(|scope| {
        scope.spawn(move || update(own));
        side_by_side(threads - 1, rest, update);
    });
}

/// Euclidean norm of a flat tensor. No long sum is in f32.
pub(super) fn grad_norm(grad: &Tensor) -> f64 {
    match grad.device() {
        Device::Cpu => norm(slice(grad)),
        _ => norm_by_tensor(grad),
    }
}

/// Numbers that are widened to f64 at a time.
const NORM_PIECE: i64 = 1 << 22;

/// Copies no more than a piece: a whole gradient in f64 would be twice its size.
fn norm_by_tensor(grad: &Tensor) -> f64 {
    let _guard = tch::no_grad_guard();
    let square = |piece: &Tensor| piece.norm_scalaropt_dtype(2.0, Kind::Double).square();
    let sums: Vec<Tensor> = grad.split(NORM_PIECE, 0).iter().map(square).collect();
    Tensor::stack(&sums, 0).sum(Kind::Double).sqrt().double_value(&[])
}

/// A CPU tensor's numbers.
fn slice(tensor: &Tensor) -> &[f32] {
    assert!(plain(tensor));
    // SAFETY: contiguous f32 in host memory, alive as long as the borrow, and not written
    // meanwhile.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast(), tensor.numel()) }
}

/// Elements of a CPU tensor, mutable without autograd's knowledge: no graph over it may exist.
fn slice_mut(tensor: &mut Tensor) -> &mut [f32] {
    assert!(plain(tensor));
    // SAFETY: as in `slice`; the borrow is exclusive on this thread, the only one with the tensor.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast(), tensor.numel()) }
}

fn plain(tensor: &Tensor) -> bool {
    tensor.kind() == Kind::Float && tensor.device() == Device::Cpu && tensor.is_contiguous() && tensor.numel() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn threads_share_an_update_that_is_the_same_to_the_bit() {
        for amsgrad in [false, true] {
            let after = |threads: usize| {
                let of = |from: f32| (0..101).map(|at| from + (at % 17) as f32 / 9.0).collect::<Vec<f32>>();
                let (mut params, grad, mut mean, mut square) = (of(-1.0), of(-0.7), of(-0.2), of(0.1));
                let mut max = if amsgrad { of(0.3) } else { Vec::new() };
                let moments = [&mut mean[..], &mut square, &mut max];
                let columns = Columns { first: 0, params: &mut params, grad: &grad, moments };
                side_by_side(threads, columns, &|Columns { params, grad, moments, .. }: Columns| {
                    AdamW { amsgrad, ..AdamW::default() }.update(3, 0.1, 0.5, params, grad, moments);
                });
                (params, mean, square, max)
            };
            assert!(after(1) == after(2) && after(1) == after(4), "amsgrad: {amsgrad}");
        }
    }

    #[test]
    fn a_norm_keeps_a_million_small_numbers_next_to_a_large_one() {
        // A single f32 sum would be 6e-4 too small.
        let grad = Tensor::ones([1 << 20], F32);
        let _filled = grad.narrow(0, 0, 1).fill_(1e4);
        let exact = (1e8 + (1 << 20) as f64 - 1.0).sqrt();
        let gap = |found: f64| (found - exact).abs() / exact;
        assert!(gap(norm_by_tensor(&grad)) < 1e-6 && gap(grad_norm(&grad)) < 1e-5);
    }

    /// Under the same gradients, steps of an eighth and less of what bf16 tells apart go as far as in f32.
    /// Rounded to the nearest, they go nowhere.
    #[test]
    fn parameters_in_bf16_go_as_far_as_in_f32_under_the_same_gradients() {
        const LEN: i64 = 1 << 14;
        let layout = {
            let mut layout = Layout::empty();
            layout.add(&["weight"], &[LEN as usize], None);
            layout
        };
        let start = Tensor::full([LEN], 1.0, F32);
        let gradient = Tensor::where_scalar(&Tensor::arange(LEN, F32).remainder(2.0).eq(0.0), 0.3, -0.3).to_kind(Kind::Float);
        // Which way each number goes.
        let along = |moved: Tensor| -(moved.to_kind(Kind::Float) * gradient.sign()).mean(Kind::Double).double_value(&[]);
        let moved = |kind: Kind, keeps: bool| {
            let groups = ParamGroups { decay: Default::default(), lr_scale: Default::default() };
            let mut optimizer = Optimizer::new(AdamW::default(), groups, &layout, MomentFormat::F32);
            let mut params = start.to_kind(kind).copy();
            for _ in 0..40 {
                let mut wide = params.to_kind(Kind::Float);
                let own = if keeps { &mut params } else { &mut wide };
                optimizer.update(1.0 / 2048.0, 1.0, own, gradient.copy());
                if !keeps {
                    params.copy_(&wide);
                }
            }
            along(params.to_kind(Kind::Float) - &start)
        };
        let (exact, found, nearest) = (moved(Kind::Float, true), moved(Kind::BFloat16, true), moved(Kind::BFloat16, false));
        assert!((found / exact - 1.0).abs() < 0.02 && nearest.abs() < 0.1 * exact, "{exact}, {found}, to the nearest {nearest}");
    }

    /// Both implementations of an update against three steps of `torch.optim.AdamW` with parameter
    /// groups (`scripts/golden_optim.py`).
    #[test]
    fn parameter_groups_are_updated_as_torch_updates_them_on_the_host_and_on_a_device() {
        let golden: serde_json::Value = serde_json::from_str(include_str!("../../tests/golden/optim/param_groups.json")).unwrap();
        let of = |key: &str| golden[key].as_f64().unwrap();
        let numbers = |list: &serde_json::Value| serde_json::from_value::<Vec<f32>>(list.clone()).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let mut layout = Layout::empty();
            for tensor in case["tensors"].as_array().unwrap() {
                let shape: Vec<usize> = serde_json::from_value(tensor["shape"].clone()).unwrap();
                layout.add(&[tensor["name"].as_str().unwrap()], &shape[..1], shape.get(1).copied());
            }
            let mut groups = serde_json::json!({"decay": case["decay"], "lr_scale": crate::train::LrScale::default()});
            for (key, factor) in case["lr_scale"].as_object().unwrap() {
                groups["lr_scale"][key] = factor.clone();
            }
            let [beta1, beta2] = [0, 1].map(|at| golden["betas"][at].as_f64().unwrap());
            let (epsilon, weight_decay, amsgrad) = (of("eps"), of("weight_decay"), case["amsgrad"] == true);
            let config = AdamW { beta1, beta2, epsilon, weight_decay, amsgrad };
            let ways: [(&str, Apply); 2] = [("host", Optimizer::update_on_host), ("device", Optimizer::update_on_device)];
            for ((way, apply), format) in ways.into_iter().flat_map(|way| MomentFormat::ALL.iter().map(move |of| (way, *of))) {
                let mut params = Tensor::from_slice(&numbers(&case["params"]));
                let groups = serde_json::from_value(groups.clone()).unwrap();
                let mut optimizer = Optimizer::new(config, groups, &layout, format);
                for (at, step) in case["steps"].as_array().unwrap().iter().enumerate() {
                    let before = params.copy();
                    optimizer.step += 1;
                    let rates = Rates { lr: of("lr"), scale: of("scale") };
                    optimizer.update_by(apply, rates, &params, &Tensor::from_slice(&numbers(&step["grad"])));
                    let expected = Tensor::from_slice(&numbers(&step["params"]));
                    let what = format!("{}, {way}, {format:?}, step {at}", case["name"]);
                    if format != MomentFormat::EightBit {
                        assert!(params.allclose(&expected, 1e-5, 1e-6, false), "{what}");
                        continue;
                    }
                    // Of moments that are rounded, updates are nearly those.
                    let length = |of: Tensor| of.norm().double_value(&[]);
                    let gap = length(&params - &expected) / length(&expected - before);
                    assert!(gap < 0.1 * (at + 1) as f64, "{what}: {gap}");
                    params.copy_(&expected);
                }
            }
        }
    }
}
