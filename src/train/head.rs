//! Output heads at the rows of trained tokens: values, and gradients in closed form.
//!
//! A language-model head gives log-probabilities and entropies, a score head one number per row. At
//! most `chunk_rows` rows of logits exist at a time, for trained tokens only. A batch of one chunk
//! keeps its softmax for the gradient; a longer one computes it twice. Autograd never holds logits.

use tch::{Kind, Tensor};

use super::TeacherColumn;
use crate::data::TopK;
use crate::model::{capped, fused, upload, wide};

/// Values at the rows.
pub(super) struct Scored {
    /// θ of every target, or every row's score.
    pub log_probs: Vec<f64>,
    /// Entropy of every row's distribution; of a score, 0.
    pub entropies: Vec<f64>,
    /// Log-probabilities of the teacher's tokens, row by row, if it gave any.
    pub at_teacher: Option<Vec<f64>>,
    /// The whole softmax, where it fits in one chunk.
    kept: Option<Softmax>,
}

/// A chunk's softmax, as its gradient is computed from.
enum Softmax {
    /// Logits and the result of [`fused::softmax`].
    Fused { logits: Tensor, found: Tensor },
    /// Logarithms of probabilities.
    Plain(Tensor),
}

/// Derivatives of a loss by a head's values.
#[derive(Clone, Copy)]
pub(super) struct SlopesOf<'a> {
    /// By the targets' log-probabilities, or by the scores.
    pub log_probs: &'a [f64],
    /// By the entropies.
    pub entropies: Option<&'a [f64]>,
    /// By the log-probabilities of the teacher's tokens.
    pub at_teacher: Option<&'a [f64]>,
}

/// Gradients of a loss by a head's inputs.
pub(super) struct ByHead {
    /// Gradient by the rows.
    pub rows: Tensor,
    /// Gradient by the head's weight, in f32, if it is trained. With adapters, a language-model
    /// head is fixed, and its gradient would be the largest tensor.
    pub weight: Option<Tensor>,
}

/// A head over the rows `[M, hidden]` of trained tokens.
pub(super) struct OutputHead<'a> {
    /// `[vocabulary, hidden]`; `[1, hidden]` of a score head.
    pub weight: &'a Tensor,
    pub rows: &'a Tensor,
    /// `None`: a score head.
    pub words: Option<Words<'a>>,
}

/// Settings of a language-model head.
pub(super) struct Words<'a> {
    /// Target token of each row, `[M]`.
    pub targets: &'a Tensor,
    pub temperature: Temperature,
    /// Cap of the logits, before the temperature.
    pub cap: Option<f64>,
    /// A teacher's tokens at each row, `[M, k]`, whose log-probabilities are computed, too.
    pub teacher: Option<Tensor>,
    /// Most rows of logits at a time.
    pub chunk_rows: i64,
}

/// Divisor of the logits.
pub(super) enum Temperature {
    /// One value for all rows.
    Same(f64),
    /// `[M, 1]`: one value per row.
    Each(Tensor),
}

impl Temperature {
    /// Temperatures of rows.
    pub fn of(rows: &[f64], device: tch::Device) -> Self {
        match rows {
            [first, rest @ ..] if rest.iter().any(|other| other != first) => Temperature::Each(column(rows, device)),
            rows => Temperature::Same(rows.first().copied().unwrap_or(1.0)),
        }
    }

    fn divides(&self, values: Tensor, start: i64, len: i64) -> Tensor {
        match self {
            Temperature::Same(1.0) => values,
            Temperature::Same(temperature) => values / *temperature,
            Temperature::Each(rows) => values / rows.narrow(0, start, len),
        }
    }
}

impl OutputHead<'_> {
    /// Computes the values, without gradients.
    pub fn score(&self) -> Scored {
        let _guard = tch::no_grad_guard();
        let mut scored = Scored { log_probs: Vec::new(), entropies: Vec::new(), at_teacher: None, kept: None };
        let Some(words) = &self.words else {
            scored.log_probs = to_host(&wide::linear(self.rows, self.weight));
            scored.entropies = vec![0.0; scored.log_probs.len()];
            return scored;
        };
        for (start, len) in self.chunks(words) {
            let softmax = self.softmax(words, start, len);
            let found = match &softmax {
                Softmax::Fused { found, .. } => found.narrow(1, 0, 2),
                Softmax::Plain(log_softmax) => {
                    // −∞ · 0 would be NaN; a forbidden token adds nothing.
                    let entropy = log_softmax.exp() * log_softmax.clamp_min(f64::from(f32::MIN));
                    let entropy = -entropy.sum_dim_intlist([1i64].as_slice(), true, None);
                    Tensor::cat(&[log_softmax.gather(1, &words.targets.narrow(0, start, len).unsqueeze(1), false), entropy], 1)
                }
            };
            if let (Some(ids), Softmax::Plain(log_softmax)) = (&words.teacher, &softmax) {
                let chosen = to_host(&log_softmax.gather(1, &ids.narrow(0, start, len), false));
                scored.at_teacher.get_or_insert_default().extend(chosen);
            }
            // Both at a time: a GPU's host waits for each copy.
            for pair in to_host(&found).chunks(2) {
                scored.log_probs.push(pair[0]);
                scored.entropies.push(pair[1]);
            }
            scored.kept = (len == self.rows.size()[0]).then_some(softmax);
        }
        scored
    }

    /// Log-probabilities of the targets, and the likeliest tokens of each row with theirs, without
    /// gradients.
    pub fn top(&self, words: &Words, of: TopK) -> (Vec<f64>, TeacherColumn) {
        let _guard = tch::no_grad_guard();
        let below = self.weight.size()[0].min(i64::try_from(of.below).unwrap_or(i64::MAX));
        let k = of.k.min(below as usize);
        let (mut chosen, mut top) = (Vec::new(), TeacherColumn { k, ..TeacherColumn::default() });
        for (start, len) in self.chunks(words) {
            let log_softmax = self.logits(words, start, len).log_softmax(-1, Kind::Float);
            chosen.extend(to_host(&log_softmax.gather(1, &words.targets.narrow(0, start, len).unsqueeze(1), false)));
            let (log_probs, ids) = log_softmax.narrow(1, 0, below).topk(k as i64, -1, true, false);
            top.log_probs.extend(to_host(&log_probs));
            top.ids.extend(to_host(&ids).into_iter().map(|id| id as i64));
        }
        (chosen, top)
    }

    /// Gradients of the loss by the rows and by the head's weight. Sums over rows and chunks are in
    /// f32 for all operand types (law N5). Frees what `scored` keeps of the softmax.
    pub fn gradients(&self, scored: &mut Scored, slopes: SlopesOf) -> ByHead {
        let _guard = tch::no_grad_guard();
        let kept = scored.kept.take();
        let is_trained = self.weight.requires_grad();
        let Some(words) = &self.words else {
            let slopes = column(slopes.log_probs, self.rows.device()).to_kind(self.weight.kind());
            let weight = is_trained.then(|| wide::mm(&slopes.tr(), self.rows));
            return ByHead { rows: wide::matmul(&slopes, self.weight), weight };
        };
        let (mut by_weight, mut by_rows): (Option<Tensor>, _) = (None, Vec::new());
        for (start, len) in self.chunks(words) {
            let softmax = (kept.as_ref(), scored.entropies.as_slice());
            let by_logits = self.logits_gradient(words, softmax, slopes, start, len).to_kind(self.weight.kind());
            by_rows.push(wide::matmul(&by_logits, self.weight));
            if is_trained {
                let chunk = wide::mm(&by_logits.tr(), &self.rows.narrow(0, start, len));
                by_weight = Some(match by_weight {
                    None => chunk,
                    Some(mut sum) => sum.g_add_(&chunk),
                });
            }
        }
        ByHead { rows: Tensor::cat(&by_rows, 0), weight: by_weight }
    }

    /// A scalar whose gradient by the rows is this. The head's weight is left out.
    pub fn surrogate(&self, by_rows: &Tensor) -> Tensor {
        self.rows.reshape([-1]).dot(&by_rows.reshape([-1]).to_kind(self.rows.kind()))
    }

    /// ∂loss/∂logits of a chunk: `slope · (1[target] − p) − entropy_slope · p · (log p + H)`, and the
    /// first term for each of the teacher's tokens, divided by the temperature.
    /// The softmax is computed again if it was not kept.
    fn logits_gradient(
        &self,
        words: &Words,
        (kept, entropies): (Option<&Softmax>, &[f64]),
        slopes: SlopesOf,
        start: i64,
        len: i64,
    ) -> Tensor {
        let of_rows = |values: &[f64]| column(&values[start as usize..(start + len) as usize], self.rows.device());
        // A gradient by logits that were divided is a multiple of one by slopes that are.
        let column = |values: &[f64]| words.temperature.divides(of_rows(values), start, len);
        let recomputed = kept.is_none().then(|| self.softmax(words, start, len));
        let softmax = recomputed.as_ref().or(kept).expect("one of them is there");
        let entropy_slopes = slopes.entropies;
        let (slope, target) = (column(slopes.log_probs), words.targets.narrow(0, start, len));
        let gradient = match softmax {
            Softmax::Fused { logits, found } => {
                let by_entropy = entropy_slopes.map(column);
                fused::softmax_gradient(logits, &target, found, &slope, by_entropy.as_ref(), self.weight.kind())
            }
            Softmax::Plain(log_softmax) => {
                let probs = log_softmax.exp();
                let mut gradient = (&probs * -&slope).scatter_add_(1, &target.unsqueeze(1), &slope);
                if let Some(entropy_slopes) = entropy_slopes {
                    let above = log_softmax.clamp_min(f64::from(f32::MIN)) + of_rows(entropies);
                    gradient -= &probs * above * column(entropy_slopes);
                }
                if let (Some(ids), Some(slopes)) = (&words.teacher, slopes.at_teacher) {
                    let (ids, k) = (ids.narrow(0, start, len), ids.size()[1]);
                    let own = &slopes[(start * k) as usize..((start + len) * k) as usize];
                    let own = self::column(own, self.rows.device()).reshape([len, k]);
                    let own = words.temperature.divides(own, start, len);
                    gradient -= probs * own.sum_dim_intlist([1i64].as_slice(), true, None);
                    gradient = gradient.scatter_add_(1, &ids, &own);
                }
                gradient
            }
        };
        match words.cap {
            None => gradient,
            // The slope of the cap.
            Some(cap) => gradient * (1.0 - (self.undivided(words, start, len) / cap).square()),
        }
    }

    /// Logits at a temperature of 1.
    fn undivided(&self, words: &Words, start: i64, len: i64) -> Tensor {
        capped(wide::linear(&self.rows.narrow(0, start, len), self.weight), words.cap)
    }

    fn logits(&self, words: &Words, start: i64, len: i64) -> Tensor {
        words.temperature.divides(self.undivided(words, start, len), start, len)
    }

    fn softmax(&self, words: &Words, start: i64, len: i64) -> Softmax {
        let logits = self.logits(words, start, len);
        if words.teacher.is_none() && fused::takes_logits(&logits, self.weight.kind()) {
            let found = fused::softmax(&logits, &words.targets.narrow(0, start, len));
            return Softmax::Fused { logits, found };
        }
        Softmax::Plain(logits.log_softmax(-1, Kind::Float))
    }

    fn chunks(&self, words: &Words) -> impl Iterator<Item = (i64, i64)> + use<> {
        let (total, chunk) = (self.rows.size()[0], words.chunk_rows.max(1));
        (0..total).step_by(chunk as usize).map(move |start| (start, chunk.min(total - start)))
    }
}

/// Numbers as `[M, 1]`, in f32.
fn column(values: &[f64], device: tch::Device) -> Tensor {
    let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    upload(&values, device).unsqueeze(1)
}

fn to_host(values: &Tensor) -> Vec<f64> {
    let values = values.reshape([-1]).to_kind(Kind::Double).to_device(tch::Device::Cpu);
    let mut host = vec![0.0; values.numel()];
    values.copy_data(&mut host, values.numel());
    host
}

#[cfg(test)]
mod tests;
