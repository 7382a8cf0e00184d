//! Inputs and output of a loss.
//!
//! A loss receives the trained tokens of some sequences, packed end to end, and returns its value
//! with the derivative by every log-probability. It never divides by a count: `weights` are each
//! token's mask over the optimizer batch's denominator (law N1), so that values and derivatives of
//! parts add up.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::correction::CorrectionMetrics;
use super::distilled::TeacherInputs;

/// The packed trained tokens of whole sequences. Every slice has one entry per token.
#[derive(Clone, Copy, Debug, Default)]
pub struct LossInputs<'a> {
    /// θ: log-probabilities under the trained weights. For the loss of a critic or a reward model
    /// these are scores: the model's output at each trained token's row. Derivatives are by these.
    pub log_probs: &'a [f64],
    /// b: log-probabilities of the behaviour policy; `None` for data that no policy sampled.
    pub behaviour: Option<&'a [f64]>,
    /// p: log-probabilities of the proximal policy, if it is not the behaviour policy.
    pub proximal: Option<&'a [f64]>,
    /// Log-probabilities under the reference policy.
    pub reference: Option<&'a [f64]>,
    /// Importance weights, proximal over behaviour: a factor on each token's policy term, constant
    /// for the gradient. 0 drops the token.
    pub importance: Option<&'a [f64]>,
    /// False for tokens that a [`Rejection`](super::Rejection) dropped: they count neither in the
    /// ratios and means of their sequence nor in the loss. `None` keeps all.
    pub kept: Option<&'a [bool]>,
    /// `log Σ_v p_v²` of the distribution at each token, which
    /// [`Preference::weigh`](super::Preference::weigh) needs.
    pub log_sum_squares: Option<&'a [f64]>,
    /// Distributions of a teacher, and the policy's log-probabilities of the same tokens, if a teacher
    /// gave any.
    pub teacher: Option<TeacherInputs<'a>>,
    /// Entropy of the distribution at each token; NaN if the backend can't know it.
    pub entropies: &'a [f64],
    /// A: advantages.
    pub advantages: &'a [f64],
    /// Aggregation weight: mask over the global denominator.
    pub weights: &'a [f64],
    /// Range of each sequence; a sequence is never split.
    pub sequences: &'a [Range<usize>],
    /// Trained tokens in the whole optimizer batch.
    pub batch_tokens: usize,
}

impl LossInputs<'_> {
    /// Anchor of ratios: proximal log-probabilities, else behaviour, else θ (on policy, ratio 1).
    pub fn anchor(&self) -> &[f64] {
        self.proximal.or(self.behaviour).unwrap_or(self.log_probs)
    }

    /// Returns true unless a rejection dropped the token.
    pub(crate) fn keeps(&self, t: usize) -> bool {
        self.kept.is_none_or(|kept| kept[t])
    }

    /// The tokens `at` that no rejection dropped.
    pub(super) fn kept_of(&self, at: Range<usize>) -> impl Iterator<Item = usize> {
        at.filter(|t| self.keeps(*t))
    }

    /// Reference log-probabilities, or an error that says why the loss needs them.
    pub(crate) fn needed_reference(&self, loss: &str, why: &str) -> Result<&[f64], LossError> {
        self.reference.ok_or_else(|| LossError::missing(loss, "reference log-probabilities", why))
    }

    /// Returns an error for a part of the optimizer batch.
    pub(super) fn check_whole(&self, loss: &'static str) -> Result<(), LossError> {
        let (seen, of) = (self.log_probs.len(), self.batch_tokens);
        if seen < of { Err(LossError::Part { loss, seen, of }) } else { Ok(()) }
    }
}

/// A loss, its derivatives and metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossOutput {
    /// This part's share of the optimizer batch's loss.
    pub loss: f64,
    /// ∂loss/∂log_prob, one entry per token.
    pub grad: Vec<f64>,
    /// ∂loss/∂entropy, one entry per token; `None` without an entropy term.
    pub entropy_grad: Option<Vec<f64>>,
    /// ∂loss/∂log_prob of the teacher's tokens, [`TeacherInputs::k`] entries per token; `None` without
    /// such a term.
    pub teacher_grad: Option<Vec<f64>>,
    /// Counts for the report.
    pub metrics: LossMetrics,
}

/// Counts that add up over micro-batches.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossMetrics {
    /// Tokens seen.
    pub tokens: usize,
    /// Tokens clipped at the lower bound: ratio below, advantage negative, no gradient.
    pub clipped_low: usize,
    /// Tokens clipped at the upper bound: ratio above, advantage positive, no gradient.
    pub clipped_high: usize,
    /// Smallest share of tokens clipped below, over sequences with trained tokens; `None` without any.
    pub clip_low_min: Option<f64>,
    /// Largest share of tokens clipped above, over sequences with trained tokens.
    pub clip_high_max: Option<f64>,
    /// Sum over tokens of the divergence from the reference.
    pub kl_sum: f64,
    /// Sum over tokens of the divergence from a teacher's distributions, in nats; `None` without one.
    pub divergence_sum: Option<f64>,
    /// KL coefficient β; `None` without a KL penalty.
    pub kl_coef: Option<f64>,
    /// The loss without its entropy bonus.
    pub policy_loss: f64,
    /// Weighted sum of negative log-likelihoods, in nats; `None` unless the loss is supervised.
    pub nll: Option<f64>,
    /// Statistics of the off-policy correction.
    pub correction: CorrectionMetrics,
    /// Statistics of pairs; empty unless the loss compares pairs.
    pub pairs: PairMetrics,
}

/// Statistics of pairs by their scores: a reward model's, or β times the log-ratios of policy over
/// reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PairMetrics {
    /// Number of pairs.
    pub pairs: usize,
    /// Pairs whose chosen completion has the higher score.
    pub right: usize,
    /// Sum of score margins, chosen − rejected.
    pub margin_sum: f64,
    /// Sums of scores, chosen and rejected.
    pub score_sums: [f64; 2],
    /// Sums of the completions' log-probabilities, chosen and rejected; 0 for a reward model.
    pub log_prob_sums: [f64; 2],
}

impl PairMetrics {
    /// Statistics of pairs of scores, chosen and rejected.
    pub fn of(scores: impl IntoIterator<Item = (f64, f64)>) -> Self {
        scores.into_iter().fold(PairMetrics::default(), |seen, (chosen, rejected)| PairMetrics {
            pairs: seen.pairs + 1,
            right: seen.right + usize::from(chosen > rejected),
            margin_sum: seen.margin_sum + chosen - rejected,
            score_sums: [seen.score_sums[0] + chosen, seen.score_sums[1] + rejected],
            ..seen
        })
    }

    /// Adds another part's counts.
    pub fn merge(&mut self, other: &PairMetrics) {
        self.pairs += other.pairs;
        self.right += other.right;
        self.margin_sum += other.margin_sum;
        for side in 0..2 {
            self.score_sums[side] += other.score_sums[side];
            self.log_prob_sums[side] += other.log_prob_sums[side];
        }
    }

    /// Share of pairs whose chosen completion has the higher score.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.pairs.max(1) as f64
    }

    /// Mean score margin, chosen − rejected.
    pub fn margin(&self) -> f64 {
        self.margin_sum / self.pairs.max(1) as f64
    }
}

impl LossMetrics {
    /// Adds another part's counts.
    pub fn merge(&mut self, other: &LossMetrics) {
        let pick = |a: Option<f64>, b: Option<f64>, of: fn(f64, f64) -> f64| match (a, b) {
            (Some(a), Some(b)) => Some(of(a, b)),
            (a, b) => a.or(b),
        };
        self.tokens += other.tokens;
        self.clipped_low += other.clipped_low;
        self.clipped_high += other.clipped_high;
        self.clip_low_min = pick(self.clip_low_min, other.clip_low_min, f64::min);
        self.clip_high_max = pick(self.clip_high_max, other.clip_high_max, f64::max);
        self.kl_sum += other.kl_sum;
        self.divergence_sum = pick(self.divergence_sum, other.divergence_sum, |a, b| a + b);
        self.kl_coef = self.kl_coef.or(other.kl_coef);
        self.policy_loss += other.policy_loss;
        self.nll = pick(self.nll, other.nll, |a, b| a + b);
        self.correction.merge(&other.correction);
        self.pairs.merge(&other.pairs);
    }

    /// Share of tokens clipped on either side.
    pub fn clip_fraction(&self) -> f64 {
        (self.clipped_low + self.clipped_high) as f64 / self.tokens.max(1) as f64
    }

    /// Mean divergence from the reference.
    pub fn kl(&self) -> f64 {
        self.kl_sum / self.tokens.max(1) as f64
    }
}

/// A loss of the Tinker API, with the bounds of its ratios.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuiltIn {
    /// Name in the API.
    pub name: &'static str,
    /// Lower bound of the ratio to the policy that sampled.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// Error of a loss.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LossError {
    /// A part of an optimizer batch was given to a loss that needs all of it.
    #[error("{loss} compares tokens of the whole optimizer batch, and these are {seen} of {of}; give it all in one command")]
    Part {
        /// The loss.
        loss: &'static str,
        /// Tokens given.
        seen: usize,
        /// Tokens of the batch.
        of: usize,
    },
    /// Any other error, of the library's losses or of the user's own: a missing column, a setting out
    /// of range, columns that are not aligned, a panic.
    #[error("{0}")]
    Custom(String),
}

impl LossError {
    pub(super) fn settings(loss: &str, setting: &str, why: &str) -> Self {
        LossError::Custom(format!("{loss} can't use this {setting}: {why}"))
    }

    pub(super) fn missing(loss: &str, column: &str, why: &str) -> Self {
        LossError::Custom(format!("{loss} needs {column} for {why}, and the batch has none"))
    }
}

impl LossOutput {
    /// A loss without an entropy term and its derivative, one entry per token. The metrics count the
    /// tokens and hold the loss as `policy_loss`.
    pub fn new(loss: f64, grad: Vec<f64>) -> Self {
        let metrics = LossMetrics { tokens: grad.len(), policy_loss: loss, ..LossMetrics::default() };
        LossOutput { loss, grad, metrics, ..LossOutput::default() }
    }

    /// Returns an error unless there is one derivative per token, and per token of a teacher.
    pub(crate) fn aligned(self, loss: &str, expected: usize, at_teacher: usize) -> Result<Self, LossError> {
        let columns = [
            ("grad", Some(&self.grad), expected),
            ("entropy_grad", self.entropy_grad.as_ref(), expected),
            ("teacher_grad", self.teacher_grad.as_ref(), at_teacher),
        ];
        for (column, found, expected) in columns {
            if let Some(found) = found.map(Vec::len).filter(|found| *found != expected) {
                let problem = format!("the loss `{loss}` gave {found} entries in `{column}` for {expected} tokens");
                return Err(LossError::Custom(format!("{problem}; give one entry per token")));
            }
        }
        Ok(self)
    }
}

/// Computes a loss and its derivatives from log-probabilities. Pure: same inputs, same output.
///
/// Closures `Fn(&LossInputs) -> Result<LossOutput, LossError>` are losses too.
pub trait Loss: Send + Sync {
    /// Name for logs.
    fn name(&self) -> &str {
        "custom"
    }

    /// If true, it must see the whole optimizer batch (batch-wide quantiles and the like). The
    /// trainer then computes all log-probabilities first, which costs a second forward pass.
    fn whole_batch(&self) -> bool {
        false
    }

    /// If true, it is a sum over sequences, linear in their weights. A batch can then be trained in
    /// parts, whose weights are scaled at the end. False for a term with another denominator, such
    /// as a mean entropy.
    fn is_sum(&self) -> bool {
        false
    }

    /// If true, a sequence whose advantages are all 0 adds nothing to the value and to any
    /// derivative, and the trainer skips it. False with an entropy bonus, a KL penalty or a
    /// threshold over the batch.
    fn ignores_zero_advantage(&self) -> bool {
        false
    }

    /// The loss of the Tinker API with the same value and derivatives, if it has one: a server may then
    /// compute it in one pass.
    fn built_in(&self) -> Option<BuiltIn> {
        None
    }

    /// Value and derivatives of some of the optimizer batch's sequences.
    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError>;
}

impl<F> Loss for F
where
    F: Fn(&LossInputs) -> Result<LossOutput, LossError> + Send + Sync,
{
    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        self(inputs)
    }
}
