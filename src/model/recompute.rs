//! Gradient checkpointing (Chen et al., 2016): the forward pass keeps only each layer's input, and
//! the backward pass computes each layer again, the last first.
//!
//! Memory: `layers · tokens · hidden` numbers and one layer's activations. Time: one more forward
//! pass. The gradient equals autograd's bit for bit: same operations, same order.
//!
//! Both passes take the parameters unit by unit ([`Parameters`]), so that a rank that holds a slice
//! of each can gather them one at a time.

use std::convert::Infallible;

use tch::{Device, Kind, Tensor};

use super::block::{Left, Stream};
use super::layout::{Unit, part};
use super::routing::{Balance, Watch};
use super::views::Layer;
use super::{Adapter, Decoder, Packed, Weights, wide};

/// A model's parameters and their gradient, unit by unit.
pub(crate) trait Parameters {
    /// Failure to get a unit.
    type Error;

    /// A unit's numbers, flat and detached. `next`: the unit that will be asked for next.
    fn numbers(&self, unit: Unit, next: Option<Unit>) -> Result<Tensor, Self::Error>;

    /// Adapters and the flat gradient of their numbers, if only they are trained.
    fn adapter(&self) -> Option<(&Adapter, &Tensor)>;

    /// Room for a unit's gradient in f32, of any content.
    fn room(&self, unit: Unit) -> Tensor;

    /// Takes a unit's gradient, in the room that it was given.
    fn take(&self, unit: Unit, gradient: Tensor) -> Result<(), Self::Error>;
}

/// Parameters that this process holds, and room for their gradient.
pub(crate) struct Whole<'a> {
    weights: &'a Weights,
    /// Gradient of the trained numbers, flat and in f32.
    gradient: Tensor,
    /// If true, `gradient` is a sum that this pass's is added to.
    adds: bool,
    /// Divisor of the gradient that comes.
    scale: f64,
}

impl<'a> Whole<'a> {
    /// For a forward pass.
    pub fn reading(weights: &'a Weights) -> Self {
        Whole { weights, gradient: Tensor::empty([0], (Kind::Float, weights.flat.device())), adds: false, scale: 1.0 }
    }

    /// For a backward pass of a loss that was multiplied by `scale`. If there is a `sum`, the gradient is added
    /// to it, unit by unit; adapters have none.
    pub fn new(weights: &'a Weights, sum: Option<Tensor>, scale: f64) -> Self {
        let (trained, adds) = (weights.trained().1, sum.is_some());
        let new = || Tensor::empty([trained.numel() as i64], (Kind::Float, trained.device()));
        Whole { weights, gradient: sum.unwrap_or_else(new), adds, scale }
    }

    /// The flat gradient, or the sum with it.
    pub fn into_gradient(self) -> Tensor {
        // That of adapters does not come unit by unit.
        let scaled = self.weights.adapter.is_some() && self.scale != 1.0;
        if scaled { self.gradient / self.scale } else { self.gradient }
    }
}

impl Parameters for Whole<'_> {
    type Error = Infallible;

    fn numbers(&self, unit: Unit, _next: Option<Unit>) -> Result<Tensor, Infallible> {
        Ok(self.weights.numbers(self.weights.layout.unit(unit)))
    }

    fn adapter(&self) -> Option<(&Adapter, &Tensor)> {
        self.weights.adapter.as_ref().map(|adapter| (adapter, &self.gradient))
    }

    fn room(&self, unit: Unit) -> Tensor {
        let range = self.weights.layout.unit(unit);
        match self.adds {
            true => Tensor::empty([range.len() as i64], (Kind::Float, self.gradient.device())),
            false => part(&self.gradient, range),
        }
    }

    fn take(&self, unit: Unit, mut gradient: Tensor) -> Result<(), Infallible> {
        let _guard = tch::no_grad_guard();
        if self.scale != 1.0 {
            let _scaled = gradient.g_div_scalar_(self.scale);
        }
        if self.adds {
            let _sum = part(&self.gradient, self.weights.layout.unit(unit)).g_add_(&gradient);
        }
        Ok(())
    }
}

/// Layer inputs that a forward pass keeps for the backward pass.
pub struct Kept {
    packed: Packed,
    rows: Tensor,
    /// Each layer's input, and the last one's output.
    streams: Vec<Tensor>,
    /// Derivatives of the experts' loss by what each gets, if it is wanted and there are experts.
    slopes: Option<Tensor>,
}

impl Kept {
    /// Rows that the last layer computes after attention, of these: all, if the experts' load of each counts.
    fn chosen(&self, is_last: bool) -> Option<&Tensor> {
        Some(&self.rows).filter(|_| is_last && self.slopes.is_none())
    }
}

/// Results of a forward pass.
pub(crate) struct Passed {
    /// Hidden states of the rows, normed.
    pub hidden: Tensor,
    /// Weight of the head; a leaf if it is trained.
    pub head: Tensor,
    pub kept: Kept,
    /// What the routers did.
    pub watch: Watch,
}

impl Decoder {
    /// Computes [`Decoder::hidden_after`] without a graph, and returns the input of
    /// [`Decoder::gradient`]. `watch`: what is wanted of the routers. `kept_on`: device where the inputs of
    /// layers wait for the backward pass.
    pub(crate) fn hidden_kept<P: Parameters>(
        &self,
        of: &P,
        packed: Packed,
        rows: Tensor,
        mut watch: Watch,
        kept_on: Device,
    ) -> Result<Passed, P::Error> {
        let _guard = tch::no_grad_guard();
        let (config, layers) = (&self.config, self.config.layers());
        let after = |index: usize| Some(if index < layers { Unit::Layer(index) } else { Unit::End });
        let matrix = |flat: Tensor| flat.view([-1, config.hidden_size as i64]);
        let embedding = matrix(of.numbers(Unit::Embedding, after(0))?);
        let pass = self.pass(&packed, &embedding);
        let mut stream = self.embed_by(&embedding, &packed.ids);
        let mut streams = vec![moved(&stream, kept_on)];
        drop(embedding);
        for index in 0..layers {
            let base = of.numbers(Unit::Layer(index), after(index + 1))?;
            let mut layer = Layer::new(config, &self.layout, index, &base);
            if let Some((adapter, _)) = of.adapter() {
                layer.adapt(adapter.low_ranks_of_layer(
                    config,
                    index,
                    &part(&adapter.flat.detach(), adapter.layout.layer(index)),
                ));
            }
            let chosen = Some(&rows).filter(|_| index + 1 == layers && !watch.is_of_all());
            let input = Stream::new(stream);
            let keep = &mut |_, left: Left| watch.take(&left);
            stream = self.layer(&layer, index, &pass, input, chosen, keep).whole();
            streams.push(moved(&stream, kept_on));
        }
        let tied = config.shares_embedding();
        let end = of.numbers(Unit::End, tied.then_some(Unit::Embedding))?;
        let hidden = self.finish(&end.narrow(0, 0, config.hidden_size as i64), Stream::new(stream));
        let hidden = if watch.is_of_all() { hidden.index_select(0, &rows) } else { hidden };
        let slopes = watch.balance.as_ref().and_then(Balance::slopes);
        let own_head = of.adapter().map(|(adapter, _)| adapter.score_head());
        let is_trained = !matches!(own_head, Some(None));
        let head = match own_head.flatten() {
            Some(head) => head,
            None if tied => of.numbers(Unit::Embedding, None)?,
            None => part(&end, config.hidden_size..end.numel()),
        };
        drop(pass);
        let head = matrix(head).detach().set_requires_grad(is_trained);
        Ok(Passed { hidden, head, kept: Kept { packed, rows, streams, slopes }, watch })
    }

    /// Gives `of` the gradient of its trained numbers, from the gradients by the hidden states and
    /// by the head's weight, and from the experts' loss with `weight`. With adapters, a language model's
    /// head has no gradient.
    pub(crate) fn gradient<P: Parameters>(
        &self,
        of: &P,
        mut kept: Kept,
        by_hidden: &Tensor,
        by_head: Option<&Tensor>,
        weight: f64,
    ) -> Result<(), P::Error> {
        let mut streams = std::mem::take(&mut kept.streams);
        let mut next_stream = || moved(&streams.pop().expect("an input a layer, and the last one's output"), by_hidden.device());
        let (packed, slopes) = (&kept.packed, kept.slopes.as_ref().map(|slopes| slopes * weight));
        let (config, layout, layers) = (&self.config, &self.layout, self.config.layers());
        let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(true);
        let add_head = |to: &Tensor| {
            let _guard = tch::no_grad_guard();
            by_head.map(|by_head| to.shallow_clone().g_add_(&by_head.reshape([-1])));
        };

        let end = of.numbers(Unit::End, layers.checked_sub(1).map(Unit::Layer))?;
        let norm = leaf(&end.narrow(0, 0, config.hidden_size as i64));
        let last = leaf(&next_stream());
        let finished = self.finish(&norm, Stream::new(last.shallow_clone()));
        let finished = if slopes.is_some() { wide::gathered(&finished, &kept.rows) } else { finished };
        let [mut by_stream, by_norm] = pull_back(&finished, by_hidden, None, [&last, &norm]);
        drop(end);
        if of.adapter().is_none() {
            let room = of.room(Unit::End);
            room.narrow(0, 0, config.hidden_size as i64).copy_(&by_norm);
            let head = part(&room, config.hidden_size..room.numel());
            drop(head.shallow_clone().zero_());
            if !config.shares_embedding() {
                add_head(&head);
            }
            of.take(Unit::End, room)?;
        }

        let pass = self.pass(packed, &by_stream);
        for index in (0..layers).rev() {
            let base = of.numbers(Unit::Layer(index), index.checked_sub(1).map(Unit::Layer))?;
            let (own, layer) = match of.adapter() {
                Some((adapter, _)) => {
                    let own = leaf(&part(&adapter.flat.detach(), adapter.layout.layer(index)));
                    let mut layer = Layer::new(config, layout, index, &base);
                    layer.adapt(adapter.low_ranks_of_layer(config, index, &own));
                    (own, layer)
                }
                None => {
                    let own = leaf(&base);
                    let layer = Layer::new(config, layout, index, &own);
                    (own, layer)
                }
            };
            let input = leaf(&next_stream());
            let stream = Stream::new(input.shallow_clone());
            let mut balance = Balance::default();
            let keep = &mut |_, left: Left| {
                if let (Left::Routed(routed), true) = (left, slopes.is_some()) {
                    balance.take(routed)
                }
            };
            let output = self.layer(&layer, index, &pass, stream, kept.chosen(index + 1 == layers), keep).whole();
            let of_experts = slopes.as_ref().and_then(|slopes| balance.along(slopes));
            let [by_input, by_own] = pull_back(&output, &by_stream, of_experts, [&input, &own]);
            by_stream = by_input;
            match of.adapter() {
                Some((adapter, gradient)) => part(gradient, adapter.layout.layer(index)).copy_(&by_own),
                None => {
                    let mut room = of.room(Unit::Layer(index));
                    room.copy_(&by_own);
                    of.take(Unit::Layer(index), room)?;
                }
            }
        }
        if let Some((adapter, gradient)) = of.adapter() {
            adapter.set_head_gradient(gradient, by_head);
            return Ok(());
        }

        let room = of.room(Unit::Embedding);
        drop(room.shallow_clone().zero_());
        self.add_embedding(&room, &packed.ids, &by_stream);
        if config.shares_embedding() {
            add_head(&room);
        }
        of.take(Unit::Embedding, room)
    }
}

/// The same numbers on a device. Between a GPU and pinned memory of the host, in order with other work.
fn moved(stream: &Tensor, to: Device) -> Tensor {
    if stream.device() == to { stream.shallow_clone() } else { stream.to_device_(to, stream.kind(), true, false) }
}

/// The gradients by `leaves` of something whose gradient by `output` is `by_output`, and of `more`. Zero by a
/// leaf that neither uses, such as the adapters of a layer that has none.
fn pull_back<const N: usize>(output: &Tensor, by_output: &Tensor, more: Option<Tensor>, leaves: [&Tensor; N]) -> [Tensor; N] {
    let along = output.reshape([-1]).dot(&by_output.reshape([-1]).to_kind(output.kind()));
    let of: Vec<Tensor> = [along].into_iter().chain(more).collect();
    let gradients = Tensor::run_backward(&of, &leaves, false, false);
    let or_zero = |(gradient, leaf): (Tensor, &Tensor)| if gradient.defined() { gradient } else { leaf.zeros_like() };
    let gradients: Vec<Tensor> = gradients.into_iter().zip(leaves).map(or_zero).collect();
    gradients.try_into().unwrap_or_else(|_| unreachable!("a gradient a leaf"))
}
