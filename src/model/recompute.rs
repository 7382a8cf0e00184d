//! Gradient checkpointing (Chen et al., 2016): the forward pass keeps only each layer's input, and
//! the backward pass computes each layer again, the last first.
//!
//! Memory: `layers · tokens · hidden` numbers and one layer's activations. Time: one more forward
//! pass. The gradient equals autograd's bit for bit: same operations, same order.

use tch::{Kind, Tensor};

use super::layout::part;
use super::views::Layer;
use super::{Decoder, Packed, Views, Weights};

/// Layer inputs that a forward pass keeps for the backward pass.
pub struct Kept {
    packed: Packed,
    rows: Tensor,
    /// Each layer's input, and the last one's output.
    streams: Vec<Tensor>,
}

impl Decoder {
    /// Computes [`Decoder::hidden_after`] without a graph, and returns the input of
    /// [`Decoder::gradient`].
    pub(crate) fn hidden_kept(&self, views: &Views, packed: Packed, rows: Tensor) -> (Tensor, Kept) {
        let _guard = tch::no_grad_guard();
        let pass = self.pass(&packed, &views.embedding);
        let mut streams = vec![self.embed(views, &packed.ids)];
        for (index, layer) in views.layers.iter().enumerate() {
            let chosen = Some(&rows).filter(|_| index + 1 == views.layers.len());
            let next = self.layer(layer, index, &pass, streams[index].shallow_clone(), chosen, &mut |_, _| {});
            streams.push(next);
        }
        let hidden = self.finish(&views.norm, &streams[views.layers.len()]);
        drop(pass);
        (hidden, Kept { packed, rows, streams })
    }

    /// Gradient by the trained parameters of `weights`, flat and in f32, from the gradients by the
    /// hidden states and by the head's weight. With adapters, a language model's head has no
    /// gradient.
    pub(crate) fn gradient(&self, weights: &Weights, kept: Kept, by_hidden: &Tensor, by_head: Option<&Tensor>) -> Tensor {
        let Kept { packed, rows, mut streams } = kept;
        let mut views = self.views(&weights.flat.detach());
        let flat = weights.trained().1.detach();
        let gradient = Tensor::empty([flat.numel() as i64], (Kind::Float, flat.device()));
        let (config, layout) = (&self.config, &self.layout);
        let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);

        let norm = leaf(&views.norm);
        let last = leaf(&streams.pop().expect("the last layer's output"));
        let finished = self.finish(&norm, &last);
        let [mut by_stream, by_norm] = pull_back(&finished, by_hidden, [&last, &norm]);
        if weights.adapter.is_none() {
            part(&gradient, layout.norm()).copy_(&by_norm);
        }

        let pass = self.pass(&packed, &views.embedding);
        let layers = views.layers.len();
        for (index, layer) in views.layers.iter_mut().enumerate().rev() {
            let range = weights.trained().0.layer(index);
            let own = leaf(&part(&flat, range.clone()));
            match &weights.adapter {
                Some(adapter) => layer.adapt(adapter.low_ranks_of_layer(config, &own)),
                None => *layer = Layer::new(config, layout, &own),
            }
            let input = leaf(&streams.pop().expect("an input a layer"));
            let chosen = Some(&rows).filter(|_| index + 1 == layers);
            let output = self.layer(layer, index, &pass, input.shallow_clone(), chosen, &mut |_, _| {});
            let [by_input, by_own] = pull_back(&output, &by_stream, [&input, &own]);
            part(&gradient, range).copy_(&by_own);
            by_stream = by_input;
        }
        if let Some(adapter) = &weights.adapter {
            adapter.set_head_gradient(&gradient, by_head);
            return gradient;
        }

        for range in std::iter::once(layout.embedding()).chain(layout.head()) {
            drop(part(&gradient, range).zero_());
        }
        self.add_embedding_and_head(&gradient, &packed.ids, &by_stream, by_head);
        gradient
    }
}

/// The gradients by `leaves` of something whose gradient by `output` is `by_output`.
fn pull_back<const N: usize>(output: &Tensor, by_output: &Tensor, leaves: [&Tensor; N]) -> [Tensor; N] {
    let along = output.reshape([-1]).dot(&by_output.reshape([-1]).to_kind(output.kind()));
    let gradients = Tensor::run_backward(&[along], &leaves, false, false);
    gradients.try_into().unwrap_or_else(|_| unreachable!("a gradient a leaf"))
}
