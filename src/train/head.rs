//! Output heads at the rows of trained tokens: values, and gradients in closed form.
//!
//! A language-model head gives log-probabilities and entropies, a score head one number per row. At
//! most `chunk_rows` rows of logits exist at a time, for trained tokens only. A batch of one chunk
//! keeps its softmax for the gradient; a longer one computes it twice. Autograd never holds logits.

use tch::{Kind, Tensor};

use crate::model::{fused, wide};

/// Values at the rows, before the loss.
pub(super) struct Scored {
    /// θ of every target, or every row's score.
    pub log_probs: Vec<f64>,
    /// Entropy of every row's distribution; of a score, 0.
    pub entropies: Vec<f64>,
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

/// Gradients of a loss by a head's inputs.
pub(super) struct ByHead {
    /// Gradient by the rows.
    pub rows: Tensor,
    /// Gradient by the head's weight, in f32, if it is trained. With adapters, a language-model
    /// head is fixed, and its gradient would be the largest tensor.
    pub weight: Option<Tensor>,
}

/// A head over the rows of trained tokens.
pub(super) enum OutputHead<'a> {
    Language(LanguageHead<'a>),
    Score(ScoreHead<'a>),
}

impl OutputHead<'_> {
    /// Computes the values, without gradients.
    pub fn score(&self) -> Scored {
        match self {
            OutputHead::Language(words) => words.score(),
            OutputHead::Score(score) => score.score(),
        }
    }

    /// Gradients of the loss by the rows and by the head's weight. `slopes` are ∂loss/∂log_prob, or
    /// by the scores; `entropy_slopes` are ∂loss/∂entropy.
    pub fn gradients(&self, scored: &Scored, slopes: &[f64], entropy_slopes: Option<&[f64]>) -> ByHead {
        let _guard = tch::no_grad_guard();
        match self {
            OutputHead::Language(words) => words.gradients(scored, slopes, entropy_slopes),
            OutputHead::Score(score) => score.gradients(slopes),
        }
    }

    /// A scalar whose gradient by the rows is this. The head's weight is left out.
    pub fn surrogate(&self, by_rows: &Tensor) -> Tensor {
        let (OutputHead::Language(LanguageHead { rows, .. }) | OutputHead::Score(ScoreHead { rows, .. })) = self;
        rows.reshape([-1]).dot(&by_rows.reshape([-1]).to_kind(rows.kind()))
    }
}

/// A head `[1, hidden]` over rows `[M, hidden]`.
pub(super) struct ScoreHead<'a> {
    pub weight: &'a Tensor,
    pub rows: &'a Tensor,
}

impl ScoreHead<'_> {
    fn score(&self) -> Scored {
        let _guard = tch::no_grad_guard();
        let scores = to_host(&wide::linear(self.rows, self.weight));
        Scored { entropies: vec![0.0; scores.len()], log_probs: scores, kept: None }
    }

    fn gradients(&self, slopes: &[f64]) -> ByHead {
        let slopes = column(slopes, self.rows.device()).to_kind(self.rows.kind());
        let weight = self.weight.requires_grad().then(|| wide::mm(&slopes.tr(), self.rows));
        ByHead { rows: slopes.matmul(self.weight), weight }
    }
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

/// A head `[vocabulary, hidden]` over rows `[M, hidden]` and their targets `[M]`.
pub(super) struct LanguageHead<'a> {
    pub weight: &'a Tensor,
    pub rows: &'a Tensor,
    pub targets: &'a Tensor,
    pub temperature: Temperature,
    pub chunk_rows: i64,
}

impl LanguageHead<'_> {
    fn score(&self) -> Scored {
        let _guard = tch::no_grad_guard();
        let mut scored = Scored { log_probs: Vec::new(), entropies: Vec::new(), kept: None };
        for (start, len) in self.chunks() {
            let softmax = self.softmax(start, len);
            let (chosen, entropy) = match &softmax {
                Softmax::Fused { found, .. } => (found.narrow(1, 0, 1), found.narrow(1, 1, 1)),
                Softmax::Plain(log_softmax) => {
                    // −∞ · 0 would be NaN; a forbidden token adds nothing.
                    let entropy = log_softmax.exp() * log_softmax.clamp_min(f64::from(f32::MIN));
                    let entropy = -entropy.sum_dim_intlist([1i64].as_slice(), false, None);
                    (log_softmax.gather(1, &self.target(start, len).unsqueeze(1), false), entropy)
                }
            };
            scored.log_probs.extend(to_host(&chosen));
            scored.entropies.extend(to_host(&entropy));
            scored.kept = (len == self.rows.size()[0]).then_some(softmax);
        }
        scored
    }

    /// Sums over rows and chunks are in f32 for all operand types (law N5).
    fn gradients(&self, scored: &Scored, slopes: &[f64], entropy_slopes: Option<&[f64]>) -> ByHead {
        let mut by_weight: Option<Tensor> = None;
        let mut by_rows = Vec::new();
        for (start, len) in self.chunks() {
            let by_logits = self.logits_gradient(scored, slopes, entropy_slopes, start, len).to_kind(self.weight.kind());
            by_rows.push(by_logits.matmul(self.weight));
            if self.weight.requires_grad() {
                let chunk = wide::mm(&by_logits.tr(), &self.rows.narrow(0, start, len));
                by_weight = Some(match by_weight {
                    None => chunk,
                    Some(mut sum) => sum.g_add_(&chunk),
                });
            }
        }
        ByHead { rows: Tensor::cat(&by_rows, 0), weight: by_weight }
    }

    /// ∂loss/∂logits of a chunk: `slope · (1[target] − p) − entropy_slope · p · (log p + H)`,
    /// divided by the temperature.
    fn logits_gradient(&self, scored: &Scored, slopes: &[f64], entropy_slopes: Option<&[f64]>, start: i64, len: i64) -> Tensor {
        let column = |values: &[f64]| column(&values[start as usize..(start + len) as usize], self.rows.device());
        let recomputed = scored.kept.is_none().then(|| self.softmax(start, len));
        let softmax = recomputed.as_ref().or(scored.kept.as_ref()).expect("one of them is there");
        let (slope, target) = (column(slopes), self.target(start, len));
        let gradient = match softmax {
            Softmax::Fused { logits, found } => {
                fused::softmax_gradient(logits, &target, found, &slope, entropy_slopes.map(column).as_ref())
            }
            Softmax::Plain(log_softmax) => {
                let probs = log_softmax.exp();
                let mut gradient = (&probs * -&slope).scatter_add_(1, &target.unsqueeze(1), &slope);
                if let Some(entropy_slopes) = entropy_slopes {
                    let above = log_softmax.clamp_min(f64::from(f32::MIN)) + column(&scored.entropies);
                    gradient -= probs * above * column(entropy_slopes);
                }
                gradient
            }
        };
        self.temperature.divides(gradient, start, len)
    }

    fn softmax(&self, start: i64, len: i64) -> Softmax {
        let logits = wide::linear(&self.rows.narrow(0, start, len), self.weight);
        let logits = self.temperature.divides(logits, start, len);
        if fused::applies(&logits) {
            let found = fused::softmax(&logits, &self.target(start, len));
            return Softmax::Fused { logits, found };
        }
        Softmax::Plain(logits.log_softmax(-1, Kind::Float))
    }

    fn target(&self, start: i64, len: i64) -> Tensor {
        self.targets.narrow(0, start, len)
    }

    fn chunks(&self) -> impl Iterator<Item = (i64, i64)> {
        let (total, chunk) = (self.rows.size()[0], self.chunk_rows.max(1));
        (0..total).step_by(chunk as usize).map(move |start| (start, chunk.min(total - start)))
    }
}

/// Numbers as `[M, 1]`, in f32.
fn column(values: &[f64], device: tch::Device) -> Tensor {
    let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    Tensor::from_slice(&values).to_device(device).unsqueeze(1)
}

fn to_host(values: &Tensor) -> Vec<f64> {
    let values = values.reshape([-1]).to_kind(Kind::Double).to_device(tch::Device::Cpu);
    let mut host = vec![0.0; values.numel()];
    values.copy_data(&mut host, values.numel());
    host
}

#[cfg(test)]
mod tests;
