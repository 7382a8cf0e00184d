//! All parameters of a model in one flat tensor.

use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use tch::Tensor;

use super::layout::part;
use super::quantised::Quantised;
use super::stream::Event;
use super::{Adapter, Layout, ModelConfig};

/// Parameters and their layout. Cloning is explicit: [`Weights::share`] or [`Weights::copy`].
#[derive(Debug)]
pub struct Weights {
    /// Ranges of the tensors.
    pub layout: Arc<Layout>,
    /// 1-D, `layout.total()` long, unless [`Weights::is_quantised`]. f32, or the folder's format in
    /// [`load_hf_for`](super::load_hf_for).
    pub flat: Tensor,
    /// Adapters. If there are any, only they are trained, and `flat` is never written.
    pub adapter: Option<Adapter>,
    /// Matrices in 4 bits, which `flat` lacks.
    pub(super) quantised: Option<Arc<Quantised>>,
}

impl Weights {
    /// Weights without adapters.
    pub fn new(layout: Arc<Layout>, flat: Tensor) -> Self {
        Weights { layout, flat, adapter: None, quantised: None }
    }

    /// Random weights: normal with the configuration's deviation, norms neutral, biases zero. Each
    /// tensor has its own random stream, which depends only on `seed` and the tensor's index.
    pub fn random(config: &ModelConfig, seed: u64) -> Self {
        let layout = Layout::new(config);
        let mut flat = vec![0f32; layout.total()];
        for (stream, entry) in layout.entries().iter().enumerate() {
            let slice = &mut flat[entry.range()];
            if entry.name.ends_with("linear_attn.norm.weight") || entry.name.ends_with(".dt_bias") {
                slice.fill(1.0);
            } else if entry.name.ends_with(".A_log") {
                let mut unit = uniform(seed, b"decay", stream);
                slice.fill_with(|| (0.01 + 15.99 * unit()).ln() as f32);
            } else if entry.name.ends_with("norm.weight") {
                // The neutral factor.
                slice.fill(if config.family.definition().norms_add_one { 0.0 } else { 1.0 });
            } else if !entry.name.ends_with("bias") {
                let mut unit = uniform(seed, b"", stream);
                // Box–Muller, in f64, two numbers at a time.
                for pair in slice.chunks_mut(2) {
                    let radius = config.initializer_range * (-2.0 * unit().ln()).sqrt();
                    let angle = std::f64::consts::TAU * unit();
                    let normal = [radius * angle.cos(), radius * angle.sin()];
                    pair.iter_mut().zip(normal).for_each(|(number, normal)| *number = normal as f32);
                }
            }
        }
        Weights::new(Arc::new(layout), Tensor::from_slice(&flat))
    }

    /// Replaces the head of weights of `config` by a score head, for a critic or reward model. The
    /// head is zero, or drawn by `seed` like [`Weights::random`]. The result belongs to
    /// [`ModelConfig::scoring`].
    pub fn scoring(&self, config: &ModelConfig, seed: Option<u64>) -> Self {
        let scoring = config.scoring();
        let _guard = tch::no_grad_guard();
        let scored = match seed {
            Some(seed) => Weights::random(&scoring, seed),
            None => {
                let layout = Layout::new(&scoring);
                let flat = Tensor::zeros([layout.total() as i64], (tch::Kind::Float, self.flat.device()));
                Weights::new(Arc::new(layout), flat)
            }
        };
        // Heads come last, so that bodies have equal layouts.
        let whole = self.merged();
        let body = 0..scored.layout.score_head().map_or(0, |head| head.start);
        part(&scored.flat, body.clone()).copy_(&part(&whole.flat.detach(), body));
        scored
    }

    /// Copies these weights of `config` and adds the embedding of `head_of` as an untied head: a
    /// model of [`ModelConfig::untied`]. Adapters are merged. A head that is not tied stays.
    pub fn untied(&self, config: &ModelConfig, head_of: &Weights) -> Self {
        let _guard = tch::no_grad_guard();
        let whole = self.merged();
        if !config.shares_embedding() {
            return whole;
        }
        let layout = Layout::new(&config.untied());
        let head = part(&head_of.flat.detach(), head_of.layout.embedding()).to_device(whole.flat.device());
        // Heads come last, so that bodies have equal layouts.
        let flat = Tensor::cat(&[whole.flat.detach(), head.to_kind(whole.flat.kind())], 0);
        Weights::new(Arc::new(layout), flat)
    }

    /// Shares the numbers: a write through one is visible in the other.
    pub fn share(&self) -> Self {
        self.map(Tensor::shallow_clone, Tensor::shallow_clone)
    }

    /// Copies the trained numbers, detached. The base of adapters is shared, because it is never
    /// written.
    pub fn copy(&self) -> Self {
        let copy = |flat: &Tensor| flat.detach().copy();
        match self.adapter {
            Some(_) => self.map(Tensor::detach, copy),
            None => self.map(copy, copy),
        }
    }

    /// The tensors that hold the numbers.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.flat].into_iter().chain(self.adapter.iter().map(|adapter| &adapter.flat))
    }

    /// A copy that threads may share, for nothing can write to it.
    pub fn freeze(&self) -> FrozenWeights {
        FrozenWeights::of_own(self.copy())
    }
}

/// Read-only weights: published by the trainer, read by generators.
#[derive(Debug)]
pub struct FrozenWeights {
    weights: Weights,
    /// After they were written, for readers in other streams.
    written: Event,
}

// SAFETY: libtorch counts references atomically, and reading a tensor's storage changes nothing.
// The tensors are private. They were copied when frozen, were exclusively owned, or are the base of
// adapters, which is never written. Only `read` returns them, and its contract forbids writing.
unsafe impl Sync for FrozenWeights {}

impl FrozenWeights {
    /// Freezes exclusively owned weights without a copy.
    pub(crate) fn of_own(weights: Weights) -> Self {
        let weights = weights.map(Tensor::detach, Tensor::detach);
        let written = Event::now(weights.flat.device());
        FrozenWeights { weights, written }
    }

    /// Returns the weights for reading. They are shared: an in-place operation on them is a bug. On a GPU
    /// they are read in the stream that is current now.
    pub fn read(&self) -> Weights {
        self.written.before(self.weights.tensors());
        self.weights.share()
    }
}

/// Uniform numbers between 0 and 1 for the tensor number `stream`, from a random stream of `seed`
/// and `purpose`.
pub(super) fn uniform(seed: u64, purpose: &[u8], stream: usize) -> impl FnMut() -> f64 + use<> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..8 + purpose.len()].copy_from_slice(purpose);
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(stream as u64);
    move || ((rng.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
}
