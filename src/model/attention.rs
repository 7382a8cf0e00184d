//! Attention over whole sequences, and the masks of layers that see a window only.

use tch::{Device, Kind, Tensor};

/// Attention masks, one per distinct window of a model's layers; `None` if causality is enough.
pub(super) struct MaskByWindow(Vec<(Option<usize>, Option<Tensor>)>);

impl MaskByWindow {
    pub fn new(windows: &[Option<usize>], make: impl Fn(Option<usize>) -> Option<Tensor>) -> Self {
        let mut distinct = windows.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        MaskByWindow(distinct.into_iter().map(|window| (window, make(window))).collect())
    }

    pub fn get(&self, window: Option<usize>) -> Option<&Tensor> {
        self.0.iter().find(|(known, _)| *known == window).and_then(|(_, mask)| mask.as_ref())
    }
}

/// Mask of a layer with this window over sequences of `len` tokens; `None` if causality is enough.
pub(super) fn window_mask(len: i64, window: Option<usize>, device: Device) -> Option<Tensor> {
    let window = window.map(|window| window as i64).filter(|&window| window < len)?;
    Some(Tensor::ones([len, len], (Kind::Bool, device)).tril(0).triu(1 - window))
}

/// Causal attention within each row of a rectangle. `q` is `[rows, columns, heads, dim]`; `k` and
/// `v` have the key heads instead. Returns `[rows · columns, heads · dim]`. Products are multiplied
/// by `scale`.
pub(super) fn causal(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>, scale: f64) -> Tensor {
    let [q, k, v] = [q, k, v].map(|x| x.transpose(1, 2));
    let grouped = q.size()[1] != k.size()[1];
    let out = Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, mask.is_none(), Some(scale), grouped);
    let (rows, columns) = (out.size()[0], out.size()[2]);
    out.transpose(1, 2).reshape([rows * columns, -1])
}
