//! AdamW over one flat tensor: state, clipping, and its file.
//!
//! On a CPU an update is the fused loop of [`AdamW::update`] over raw slices; elsewhere it is a handful of tensor operations.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, View};
use safetensors::{SafeTensorError, SafeTensors};
use tch::{Device, Kind, Tensor};

use super::{AdamW, CheckpointError, Moments, norm};

/// The optimizer's file in a checkpoint.
pub(super) const FILE: &str = "optimizer.safetensors";

/// The f32 parameters in it, where the model's own file has them rounded.
const MASTERS: &str = "master";

/// Moments of all parameters, and how often they were updated.
pub(super) struct Optimizer {
    config: AdamW,
    /// Updates made.
    pub step: u64,
    /// `exp_avg`, `exp_avg_sq` and, with amsgrad, `max_exp_avg_sq`; names as in PyTorch.
    moments: Vec<(&'static str, Tensor)>,
}

impl Optimizer {
    /// Fresh moments for parameters like `params`. They take no memory before the first update, for backends that only score.
    pub fn new(config: AdamW, params: &Tensor) -> Self {
        let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
        let zeros = |name| (name, Tensor::zeros([1], (Kind::Float, params.device())).expand(params.size(), false));
        Optimizer { config, step: 0, moments: names.into_iter().take(if config.amsgrad { 3 } else { 2 }).map(zeros).collect() }
    }

    /// One update of `params` in place, every gradient multiplied by `scale` first.
    pub fn update(&mut self, lr: f64, scale: f64, params: &mut Tensor, grad: &Tensor) {
        self.step += 1;
        self.settle();
        if params.device() == Device::Cpu {
            self.update_on_host(lr, scale, params, grad);
        } else {
            self.update_on_device(lr, scale, params, grad);
        }
    }

    /// Gives every number of the moments a place of its own.
    fn settle(&mut self) {
        self.moments.iter_mut().for_each(|(_, moment)| *moment = moment.contiguous());
    }

    fn update_on_host(&mut self, lr: f64, scale: f64, params: &mut Tensor, grad: &Tensor) {
        let [(_, mean), (_, square), rest @ ..] = &mut self.moments[..] else { unreachable!("AdamW has two moments") };
        let max = match rest.first_mut() {
            Some((_, max)) => slice_mut(max),
            None => &mut [],
        };
        let moments = Moments { mean: slice_mut(mean), square: slice_mut(square), max };
        let (config, step) = (self.config, self.step);
        let threads = (tch::get_num_threads().max(1) as usize).min(grad.numel().div_ceil(LEAST));
        side_by_side(
            threads,
            slice_mut(params),
            slice(grad),
            moments,
            &|params: &mut [f32], grad: &[f32], moments: Moments<f32>| {
                config.update(step, lr, scale, params, grad, moments);
            },
        );
    }

    fn update_on_device(&mut self, lr: f64, scale: f64, params: &mut Tensor, grad: &Tensor) {
        let _guard = tch::no_grad_guard();
        let AdamW { beta1, beta2, epsilon, weight_decay, amsgrad } = self.config;
        let correction = |beta: f64| 1.0 - beta.powf(self.step as f64);
        let grad = grad * scale;
        let blend = |moment: &mut Tensor, beta: f64, value: Tensor| {
            *moment *= beta;
            *moment += value * (1.0 - beta);
        };
        blend(&mut self.moments[0].1, beta1, grad.shallow_clone());
        blend(&mut self.moments[1].1, beta2, &grad * &grad);
        if amsgrad {
            self.moments[2].1 = self.moments[2].1.maximum(&self.moments[1].1);
        }
        let (_, square) = self.moments.last().expect("AdamW has moments");
        let denominator = square.sqrt() / correction(beta2).sqrt() + epsilon;
        *params *= 1.0 - lr * weight_decay;
        *params -= &self.moments[0].1 * (lr / correction(beta1)) / denominator;
    }

    /// Writes the moments and the count of updates, and the parameters themselves where they are saved rounded elsewhere.
    pub fn save(&self, folder: &Path, masters: Option<&Tensor>) -> Result<(), CheckpointError> {
        let path = folder.join(FILE);
        let metadata = HashMap::from([("step".to_owned(), self.step.to_string())]);
        let all = self.moments.iter().map(|(name, moment)| (*name, moment)).chain(masters.map(|masters| (MASTERS, masters)));
        let tensors = all.map(|(name, tensor)| (name, Flat { tensor, shape: [tensor.numel()] }));
        safetensors::serialize_to_file(tensors, Some(metadata), &path).map_err(|error| match error {
            SafeTensorError::IoError(source) => CheckpointError::io(&path)(source),
            other => CheckpointError::malformed(&path, other),
        })
    }

    /// Reads what [`Optimizer::save`] wrote, for parameters like ours, and gives those that it wrote. Nothing changes when it fails.
    pub fn load(&mut self, folder: &Path) -> Result<Option<Tensor>, CheckpointError> {
        let path = folder.join(FILE);
        let bytes = std::fs::read(&path).map_err(CheckpointError::io(&path))?;
        let malformed = |reason: &dyn std::fmt::Display| CheckpointError::malformed(&path, reason);
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| malformed(&error))?;
        let step = header.metadata().as_ref().and_then(|metadata| metadata.get("step")).and_then(|step| step.parse().ok());
        let file = SafeTensors::deserialize(&bytes).map_err(|error| malformed(&error))?;
        let len = self.moments[0].1.numel();
        let read = |name: &str| {
            let view = file.tensor(name).map_err(|error| malformed(&error))?;
            if view.dtype() != Dtype::F32 || view.shape() != [len] {
                return Err(malformed(&format!("{name} is {:?} {:?}; expected F32 [{len}]", view.dtype(), view.shape())));
            }
            Ok(Tensor::from_data_size(view.data(), &[len as i64], Kind::Float).to_device(self.moments[0].1.device()))
        };
        let moments = self.moments.iter().map(|(name, _)| Ok((*name, read(name)?)));
        let loaded = moments.collect::<Result<Vec<_>, CheckpointError>>()?;
        let masters = file.names().contains(&MASTERS).then(|| read(MASTERS)).transpose()?;
        self.step = step.ok_or_else(|| malformed(&"its header has no number `step`"))?;
        self.moments = loaded;
        Ok(masters)
    }
}

/// Numbers for which a further thread is worth its start.
const LEAST: usize = 1 << 20;

/// An update of stretches of all columns on so many threads. Each number is updated by itself, so that the result is the same.
fn side_by_side(
    threads: usize,
    params: &mut [f32],
    grad: &[f32],
    moments: Moments<f32>,
    update: &(impl Fn(&mut [f32], &[f32], Moments<f32>) + Sync),
) {
    if threads <= 1 {
        return update(params, grad, moments);
    }
    let at = params.len() / threads;
    let Moments { mean, square, max } = moments;
    let ((params, more_params), (grad, more_grad)) = (params.split_at_mut(at), grad.split_at(at));
    let ((mean, more_mean), (square, more_square)) = (mean.split_at_mut(at), square.split_at_mut(at));
    let (max, more_max) = max.split_at_mut(at.min(max.len()));
    std::thread::scope(|scope| {
        scope.spawn(move || update(params, grad, Moments { mean, square, max }));
        let moments = Moments { mean: more_mean, square: more_square, max: more_max };
        side_by_side(threads - 1, more_params, more_grad, moments, update);
    });
}

/// Euclidean norm of a flat tensor. No long sum is in f32.
pub(super) fn grad_norm(grad: &Tensor) -> f64 {
    match grad.device() {
        Device::Cpu => norm(slice(grad)),
        _ => norm_by_tensor(grad),
    }
}

fn norm_by_tensor(grad: &Tensor) -> f64 {
    grad.norm_scalaropt_dtype(2.0, Kind::Double).double_value(&[])
}

/// A CPU tensor's numbers.
fn slice(tensor: &Tensor) -> &[f32] {
    assert!(plain(tensor));
    // SAFETY: contiguous f32 in host memory, alive as long as the borrow; nobody writes while it lasts.
    unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast(), tensor.numel()) }
}

/// A CPU tensor's numbers, for writing behind autograd's back: no graph over it may be alive.
fn slice_mut(tensor: &mut Tensor) -> &mut [f32] {
    assert!(plain(tensor));
    // SAFETY: as in `slice`, and the borrow is exclusive on this thread, the only one that holds the tensor.
    unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast(), tensor.numel()) }
}

fn plain(tensor: &Tensor) -> bool {
    tensor.kind() == Kind::Float && tensor.device() == Device::Cpu && tensor.is_contiguous() && tensor.numel() > 0
}

/// A flat tensor as the writer wants it.
struct Flat<'a> {
    tensor: &'a Tensor,
    shape: [usize; 1],
}

impl View for Flat<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let host = self.tensor.to_device(Device::Cpu).contiguous();
        slice(&host).iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    fn data_len(&self) -> usize {
        self.shape[0] * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_that_were_never_updated_are_saved_and_loaded_as_zeros() {
        let folder = tempfile::tempdir().unwrap();
        let (mut ones, mut again) =
            (Tensor::ones([10], (Kind::Float, Device::Cpu)), Tensor::ones([10], (Kind::Float, Device::Cpu)));
        let grad = ones.copy();
        let (mut saved, mut loaded) = (Optimizer::new(AdamW::default(), &ones), Optimizer::new(AdamW::default(), &ones));
        saved.save(folder.path(), None).unwrap();
        assert!(loaded.load(folder.path()).unwrap().is_none());
        saved.update(0.1, 1.0, &mut ones, &grad);
        loaded.update(0.1, 1.0, &mut again, &grad);
        assert!(ones == again && ones.double_value(&[0]) < 1.0 && saved.moments[0].1 == loaded.moments[0].1);
    }

    #[test]
    fn threads_share_an_update_that_is_the_same_to_the_bit() {
        for amsgrad in [false, true] {
            let after = |threads: usize| {
                let of = |from: f32| (0..101).map(|at| from + (at % 17) as f32 / 9.0).collect::<Vec<f32>>();
                let (mut params, grad, mut mean, mut square) = (of(-1.0), of(-0.7), of(-0.2), of(0.1));
                let mut max = if amsgrad { of(0.3) } else { Vec::new() };
                let moments = Moments { mean: &mut mean, square: &mut square, max: &mut max };
                side_by_side(threads, &mut params, &grad, moments, &|params: &mut [f32], grad: &[f32], moments: Moments<f32>| {
                    AdamW { amsgrad, ..AdamW::default() }.update(3, 0.1, 0.5, params, grad, moments);
                });
                (params, mean, square, max)
            };
            assert!(after(1) == after(2) && after(1) == after(4), "amsgrad: {amsgrad}");
        }
    }

    #[test]
    fn a_norm_keeps_a_million_small_numbers_beside_a_large_one() {
        // In one sum of f32 most would vanish: it is 6e-4 too small.
        let grad = Tensor::ones([1 << 20], (Kind::Float, Device::Cpu));
        let _filled = grad.narrow(0, 0, 1).fill_(1e4);
        let exact = (1e8 + (1 << 20) as f64 - 1.0).sqrt();
        let gap = |found: f64| (found - exact).abs() / exact;
        assert!(gap(norm_by_tensor(&grad)) < 1e-9 && gap(grad_norm(&grad)) < 1e-5);
    }

    #[test]
    fn the_tensor_path_equals_the_fused_loop() {
        tch::manual_seed(1);
        for amsgrad in [false, true] {
            let config = AdamW { weight_decay: 0.1, amsgrad, ..AdamW::default() };
            let mut on_host = Tensor::randn([1000], (Kind::Float, Device::Cpu));
            let mut on_device = on_host.copy();
            let mut optimizers = [Optimizer::new(config, &on_host), Optimizer::new(config, &on_host)];
            optimizers.iter_mut().for_each(Optimizer::settle);
            for _ in 0..5 {
                let grad = Tensor::randn([1000], (Kind::Float, Device::Cpu));
                optimizers[0].step += 1;
                optimizers[0].update_on_host(0.01, 0.5, &mut on_host, &grad);
                optimizers[1].step += 1;
                optimizers[1].update_on_device(0.01, 0.5, &mut on_device, &grad);
            }
            assert!(on_device.allclose(&on_host, 1e-5, 1e-6, false));
        }
    }
}
