//! AdamW over one flat tensor: state, clipping, and its file.
//!
//! On a CPU an update is the fused loop of [`AdamW::update`] over slices; elsewhere it is
//! libtorch's fused AdamW. Both apply the settings of each parameter group ([`ParamGroups`]).

use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;

use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::groups::{ParamGroups, Slice};
use super::{AdamW, TrainError, norm};
use crate::model::{Dtype, Entry, Layout, ModelError, TensorSlice, fused, part};

/// The optimizer's file in a checkpoint.
const FILE: &str = "optimizer.safetensors";

/// The f32 parameters, if the model's file has them rounded.
const MASTERS: &str = "master";

/// Key of [`Saved`] in the file's header. Several keys would be written in random order.
const STATE: &str = "optimizer";

/// The part of the optimizer that is not tensors.
#[derive(Serialize, Deserialize)]
struct Saved {
    step: u64,
    groups: ParamGroups,
}

/// Moments of all parameters, and how often they were updated.
pub(super) struct Optimizer {
    config: AdamW,
    groups: ParamGroups,
    /// Stretches of the parameters with the same settings, in order and without gaps.
    slices: Vec<Slice>,
    /// Updates made.
    pub step: u64,
    /// `exp_avg`, `exp_avg_sq` and, with amsgrad, `max_exp_avg_sq`; names as in PyTorch.
    moments: Vec<(&'static str, Tensor)>,
}

impl Optimizer {
    /// Zero moments. They take no memory before the first update, for backends that only score.
    pub fn new(config: AdamW, groups: ParamGroups, layout: &Layout, device: Device) -> Self {
        let slices = groups.slices(config.weight_decay, layout);
        Optimizer::of_slices(config, groups, slices, layout.total(), device)
    }

    /// Of some of a model's numbers, `len` in all.
    pub fn of_slices(config: AdamW, groups: ParamGroups, slices: Vec<Slice>, len: usize, device: Device) -> Self {
        let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
        let zeros = |name| (name, Tensor::zeros([1], (Kind::Float, device)).expand([len as i64], false));
        let moments = names.into_iter().take(if config.amsgrad { 3 } else { 2 }).map(zeros).collect();
        Optimizer { config, groups, slices, step: 0, moments }
    }

    /// Updates `params` in place, with gradients multiplied by `scale`. On a device the gradient is
    /// consumed.
    pub fn update(&mut self, lr: f64, scale: f64, params: &mut Tensor, grad: Tensor) {
        self.step += 1;
        self.settle();
        if params.device() == Device::Cpu {
            self.update_on_host(lr, scale, params, &grad);
        } else {
            self.update_on_device(lr, scale, params, &grad);
        }
    }

    /// Allocates the moments.
    fn settle(&mut self) {
        self.moments.iter_mut().for_each(|(_, moment)| *moment = moment.contiguous());
    }

    fn update_on_host(&mut self, lr: f64, scale: f64, params: &mut Tensor, grad: &Tensor) {
        let mut moments = self.moments.iter_mut().map(|(_, moment)| slice_mut(moment));
        let moments = [(); 3].map(|()| moments.next().unwrap_or_default());
        let (config, step, slices) = (self.config, self.step, &self.slices);
        let threads = (tch::get_num_threads().max(1) as usize).min(grad.numel().div_ceil(LEAST));
        let columns = Columns { first: 0, params: slice_mut(params), grad: slice(grad), moments };
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
    fn update_on_device(&mut self, lr: f64, scale: f64, params: &mut Tensor, grad: &Tensor) {
        let _guard = tch::no_grad_guard();
        let options = (Kind::Float, params.device());
        let step = Tensor::full([1], self.step as f64, options);
        // libtorch divides by it.
        let divisor = (scale != 1.0).then(|| Tensor::full([1], scale.recip(), options));
        let key = |slice: &&Slice| [slice.weight_decay, slice.lr_scale].map(f64::to_bits);
        let mut slices: Vec<&Slice> = self.slices.iter().collect();
        slices.sort_by_key(key);
        for alike in slices.chunk_by(|a, b| key(a) == key(b)) {
            let Slice { weight_decay, lr_scale, .. } = *alike[0];
            let parts = |of: &Tensor| -> Vec<Tensor> { alike.iter().map(|slice| part(of, slice.range.clone())).collect() };
            let moments: Vec<Vec<Tensor>> = self.moments.iter().map(|(_, moment)| parts(moment)).collect();
            let AdamW { beta1, beta2, epsilon, .. } = self.config;
            let settings = fused::AdamWSettings { lr: lr * lr_scale, beta1, beta2, weight_decay, epsilon };
            fused::adamw(&parts(params), &parts(grad), &moments, &step, divisor.as_ref(), settings);
        }
    }

    /// The moments.
    pub fn moments(&self) -> impl Iterator<Item = &Tensor> {
        self.moments.iter().map(|(_, moment)| moment)
    }

    /// Continues after `step` updates with these moments.
    pub fn restore(&mut self, step: u64, moments: Vec<Tensor>) {
        self.step = step;
        self.moments.iter_mut().zip(moments).for_each(|((_, own), moment)| *own = moment);
    }

    /// Writes the moments of all parameters and the number of updates, and `masters`, the
    /// parameters, if they are saved rounded elsewhere.
    pub fn save(&self, folder: &Path, moments: &[Tensor], masters: Option<&Tensor>) -> Result<(), TrainError> {
        let path = folder.join(FILE);
        let state = serde_json::to_string(&Saved { step: self.step, groups: self.groups });
        let state = state.map_err(|error| TrainError::malformed(&path, error))?;
        let metadata = HashMap::from([(STATE.to_owned(), state)]);
        let moments = self.moments.iter().zip(moments).map(|((name, _), moment)| (*name, moment));
        let all = moments.chain(masters.map(|masters| (MASTERS, masters)));
        let entry = |name: &str, tensor: &Tensor| Entry { name: name.to_owned(), shape: vec![tensor.numel()], offset: 0 };
        let tensors: Vec<(Entry, &Tensor)> = all.map(|(name, tensor)| (entry(name, tensor), tensor)).collect();
        let slices = tensors.iter().map(|(entry, tensor)| (&entry.name, TensorSlice::new(entry, tensor, Dtype::F32)));
        let written = safetensors::serialize_to_file(slices, Some(metadata), &path);
        written.map_err(ModelError::safetensors(&path)).map_err(TrainError::of_model(&path))
    }

    /// Reads a file of [`Optimizer::save`] about `len` parameters.
    pub fn read(&self, folder: &Path, len: usize) -> Result<Loaded, TrainError> {
        let path = folder.join(FILE);
        let bytes = std::fs::read(&path).map_err(TrainError::io(&path))?;
        let malformed = |reason: &dyn Display| TrainError::malformed(&path, reason);
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| malformed(&error))?;
        let state = header.metadata().as_ref().and_then(|metadata| metadata.get(STATE));
        let state = state.ok_or_else(|| malformed(&format!("its header has no `{STATE}`")))?;
        let Saved { step, groups } = serde_json::from_str(state).map_err(|error| malformed(&format!("`{STATE}`: {error}")))?;
        // Other groups would continue another optimizer.
        if groups != self.groups {
            let [theirs, ours] = [groups, self.groups].map(|of| serde_json::to_string(&of).unwrap_or_default());
            return Err(malformed(&format!(
                "it was trained with the parameter groups {theirs}, and these are {ours}; give `decay` and `lr_scale` their \
                 former values"
            )));
        }
        let file = SafeTensors::deserialize(&bytes).map_err(|error| malformed(&error))?;
        let read = |name: &str| {
            let view = file.tensor(name).map_err(|error| malformed(&error))?;
            if view.dtype() != safetensors::Dtype::F32 || view.shape() != [len] {
                return Err(malformed(&format!("{name} is {:?} {:?}; expected F32 [{len}]", view.dtype(), view.shape())));
            }
            Ok(Tensor::from_data_size(view.data(), &[len as i64], Kind::Float).to_device(self.moments[0].1.device()))
        };
        let moments = self.moments.iter().map(|(name, _)| read(name)).collect::<Result<Vec<_>, TrainError>>()?;
        let masters = file.names().contains(&MASTERS).then(|| read(MASTERS)).transpose()?;
        Ok(Loaded { step, moments, masters })
    }
}

/// Content of an optimizer's file.
pub(super) struct Loaded {
    /// Updates made.
    pub step: u64,
    /// The moments of all parameters.
    pub moments: Vec<Tensor>,
    /// The f32 parameters, if the model's file has them rounded.
    pub masters: Option<Tensor>,
}

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
    fn moments_that_were_never_updated_are_saved_and_loaded_as_zeros() {
        let folder = tempfile::tempdir().unwrap();
        let (mut ones, mut again) = (Tensor::ones([10], F32), Tensor::ones([10], F32));
        let grad = ones.copy();
        let mut layout = Layout::empty();
        layout.add(&["weight"], &[10], Some(1));
        let [mut saved, mut loaded] =
            [(); 2].map(|()| Optimizer::new(AdamW::default(), ParamGroups::default(), &layout, Device::Cpu));
        let moments: Vec<Tensor> = saved.moments().map(Tensor::shallow_clone).collect();
        saved.save(folder.path(), &moments, None).unwrap();
        let Loaded { step, moments, masters } = loaded.read(folder.path(), 10).unwrap();
        assert!(masters.is_none());
        loaded.restore(step, moments);
        saved.update(0.1, 1.0, &mut ones, grad.copy());
        loaded.update(0.1, 1.0, &mut again, grad);
        assert!(ones == again && ones.double_value(&[0]) < 1.0 && saved.moments[0].1 == loaded.moments[0].1);
    }

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
            type Update = fn(&mut Optimizer, f64, f64, &mut Tensor, &Tensor);
            let ways: [(&str, Update); 2] = [("host", Optimizer::update_on_host), ("device", Optimizer::update_on_device)];
            for (way, update) in ways {
                let mut params = Tensor::from_slice(&numbers(&case["params"]));
                let groups = serde_json::from_value(groups.clone()).unwrap();
                let mut optimizer = Optimizer::new(config, groups, &layout, Device::Cpu);
                optimizer.settle();
                for (at, step) in case["steps"].as_array().unwrap().iter().enumerate() {
                    optimizer.step += 1;
                    update(&mut optimizer, of("lr"), of("scale"), &mut params, &Tensor::from_slice(&numbers(&step["grad"])));
                    let expected = Tensor::from_slice(&numbers(&step["params"]));
                    assert!(params.allclose(&expected, 1e-5, 1e-6, false), "{}, {way}, step {at}", case["name"]);
                }
            }
        }
    }
}
