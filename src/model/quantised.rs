//! Base weights in 4 bits under adapters (QLoRA: Dettmers et al., 2023): the matrices of the layers are
//! stored as [`FourBits`], and a layer's numbers are computed when it is.

use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::four_bits::{Form, FourBits};
use super::layout::{Entry, Role, part};
use super::nf4::BLOCK;
use super::{Layout, Weights, nf4};

/// Where the tensors of a layout are: in 4 bits, or among the numbers that are kept.
#[derive(Debug)]
pub(crate) struct Quantised {
    places: Vec<Place>,
}

#[derive(Debug)]
pub(super) enum Place {
    /// In 4 bits.
    Packed(FourBits),
    /// From here on in the flat tensor of what is kept.
    Kept(usize),
}

/// Returns true if this tensor is quantised: a matrix of a layer, or those of all its experts in one, in
/// whole blocks. The matrix that chooses experts is not, as in bitsandbytes.
pub(crate) fn is_packed(entry: &Entry) -> bool {
    let is_other =
        [".mlp.gate.weight", ".mlp.router.weight", ".conv1d.weight", "bias"].iter().any(|end| entry.name.ends_with(end));
    let is_matrix = entry.shape.len() >= 2 && entry.role() == Role::Body && !is_other;
    is_matrix && entry.len().is_multiple_of(BLOCK as usize)
}

/// Bytes of a model whose layers are in 4 bits, and whose other numbers take `kept` bytes each.
pub(crate) fn quantised_bytes(layout: &Layout, kept: u64) -> u64 {
    let bytes = |entry: &Entry| if is_packed(entry) { nf4::bytes(entry.len() as u64) } else { kept * entry.len() as u64 };
    layout.entries().iter().map(bytes).sum()
}

// SAFETY: libtorch counts references atomically, and reading a tensor's storage changes nothing. Nothing writes to these
// tensors after they are made, or, on a rank other than 0, were received, which is before a trainer shares them.
unsafe impl Sync for Quantised {}
// SAFETY: as above; tensors may be moved between threads.
unsafe impl Send for Quantised {}

impl Quantised {
    /// From the places of a layout's tensors, in its order.
    pub(super) fn new(places: Vec<Place>) -> Self {
        Quantised { places }
    }

    /// Room for tensors of a layout of which these are in 4 bits, and how many numbers the others have.
    fn room(layout: &Layout, forms: &[Option<Form>], device: Device) -> (Self, usize) {
        let mut len = 0;
        let place = |(entry, form): (&Entry, &Option<Form>)| match form {
            Some(form) => Place::Packed(FourBits::room(*form, device)),
            None => {
                len += entry.len();
                Place::Kept(len - entry.len())
            }
        };
        let places = layout.entries().iter().zip(forms).map(place).collect();
        (Quantised { places }, len)
    }

    fn packed(&self) -> impl Iterator<Item = Option<&FourBits>> {
        self.places.iter().map(|place| match place {
            Place::Packed(stored) => Some(stored),
            Place::Kept(_) => None,
        })
    }

    fn on(self: &Arc<Self>, device: Device) -> Arc<Self> {
        if self.packed().flatten().all(|stored| stored.codes.device() == device) {
            return self.clone();
        }
        let moved = |place: &Place| match place {
            Place::Packed(stored) => Place::Packed(stored.on(device)),
            Place::Kept(at) => Place::Kept(*at),
        };
        Arc::new(Quantised { places: self.places.iter().map(moved).collect() })
    }
}

impl Weights {
    /// Stores the matrices of the layers in 4 bits, and leaves the rest, adapters included. What is in 4 bits
    /// stays. Each tensor is converted alone, on the host.
    pub fn quantised(&self) -> Self {
        let whole = self.share();
        if whole.is_quantised() {
            return whole;
        }
        let _guard = tch::no_grad_guard();
        let (mut places, mut kept, mut len) = (Vec::new(), Vec::new(), 0);
        for entry in whole.layout.entries() {
            let numbers = part(&whole.flat.detach(), entry.range());
            if is_packed(entry) {
                places.push(Place::Packed(nf4::quantise(&numbers.to_device(Device::Cpu)).on(numbers.device())));
            } else {
                places.push(Place::Kept(len));
                len += entry.len();
                kept.push(numbers);
            }
        }
        Weights { quantised: Some(Arc::new(Quantised::new(places))), flat: Tensor::cat(&kept, 0), ..whole }
    }

    /// Returns true if the layers' matrices are in 4 bits. Then `flat` has only the other numbers.
    pub fn is_quantised(&self) -> bool {
        self.quantised.is_some()
    }

    /// The form of each tensor of the layout that is in 4 bits, if any is.
    pub(crate) fn forms(&self) -> Option<Vec<Option<Form>>> {
        let form = |stored: Option<&FourBits>| stored.map(|stored| stored.form);
        self.quantised.as_ref().map(|quantised| quantised.packed().map(form).collect())
    }

    /// Room for weights of these forms, not filled. `others`: kind of the other numbers, and device of all.
    pub(crate) fn room(layout: Arc<Layout>, forms: &[Option<Form>], others: (Kind, Device)) -> Self {
        let (quantised, len) = Quantised::room(&layout, forms, others.1);
        let flat = Tensor::empty([len as i64], others);
        Weights { quantised: Some(Arc::new(quantised)), ..Weights::new(layout, flat) }
    }

    /// The tensors that hold what is in 4 bits. Only a rank that receives them writes to them.
    pub(crate) fn packed_tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.quantised.iter().flat_map(|quantised| quantised.packed().flatten().flat_map(FourBits::tensors))
    }

    /// The base's numbers at a range of the layout, which begins and ends with tensors: a view, or computed.
    pub(crate) fn numbers(&self, range: Range<usize>) -> Tensor {
        let flat = self.flat.detach();
        let Some(Quantised { places }) = self.quantised.as_deref() else { return part(&flat, range) };
        let entries = self.layout.entries();
        let first = entries.partition_point(|entry| entry.offset < range.start);
        let within = || entries.iter().zip(places).skip(first).take_while(|(entry, _)| entry.offset < range.end);
        let kept = |(_, place): (&Entry, &Place)| match place {
            Place::Kept(at) => Some(*at),
            Place::Packed(_) => None,
        };
        // What is kept is in the layout's order.
        if let Some(at) = within().map(kept).collect::<Option<Vec<usize>>>() {
            return at.first().map_or_else(|| part(&flat, 0..0), |at| part(&flat, *at..at + range.len()));
        }
        let numbers = Tensor::empty([range.len() as i64], (flat.kind(), flat.device()));
        for (entry, place) in within() {
            let mut to = part(&numbers, entry.offset - range.start..entry.range().end - range.start);
            match place {
                Place::Packed(stored) => stored.write_to(&to),
                Place::Kept(at) => to.copy_(&part(&flat, *at..at + entry.len())),
            }
        }
        numbers
    }

    /// All numbers of the base: `flat`, or computed.
    pub(crate) fn whole(&self) -> Tensor {
        self.numbers(0..self.layout.total())
    }

    /// What is in 4 bits, on the device of `flat`.
    pub(super) fn quantised_by(&self, flat: &Tensor) -> Option<Arc<Quantised>> {
        self.quantised.as_ref().map(|quantised| quantised.on(flat.device()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::model::{Compute, Decoder, Dtype, Lora, ModelConfig, Packed};

    #[test]
    fn a_model_in_4_bits_computes_as_one_that_was_rounded_to_them() {
        let config = ModelConfig { qkv_bias: true, ..ModelConfig::small_of(64, 64, 2) };
        let weights = Weights::random(&config, 5);
        let stored = weights.quantised();
        assert!(stored.is_quantised() && stored.flat.numel() < weights.flat.numel() / 3);
        // Merged: whole again.
        let rounded = stored.merged();
        assert!(!rounded.is_quantised() && rounded.flat.numel() == weights.flat.numel());
        let decoder = Decoder::new(&config, weights.layout.clone());
        let packed = Packed::new([&[5u32, 8, 33, 1][..], &[7, 7]]);
        let logits =
            |weights: &Weights| decoder.logits(&decoder.views_of(weights), &decoder.hidden(&decoder.views_of(weights), &packed));
        assert!(logits(&stored).equal(&logits(&rounded)));
        assert!(!logits(&stored).equal(&logits(&weights)));
        // Under adapters, shared and in another format.
        let adapted = stored.adapted(&config, Lora::new(4, 8.0, &[Lora::ALL]).unwrap(), 3);
        let half = adapted.share().on(Compute::cpu(Dtype::Bf16));
        assert!(adapted.is_quantised() && half.is_quantised() && half.flat.kind() == Kind::BFloat16);
        assert!(logits(&adapted).equal(&logits(&rounded)));
        assert!((logits(&half) - logits(&rounded)).abs().max().double_value(&[]) < 0.05);
    }
}
