//! What a loss reads and what it gives back.
//!
//! A loss sees the trained tokens of some sequences, packed end to end, and returns its value with the derivative for every
//! log-probability. It never divides by a count: `weights` already hold each token's mask over the optimizer batch's denominator
//! (law N1), so that values and derivatives of parts add up to those of the whole.

use std::ops::Range;

use super::CorrectionMetrics;

/// The packed trained tokens of whole sequences. Every slice has one entry per token.
#[derive(Clone, Copy, Debug)]
pub struct LossInputs<'a> {
    /// θ: log-probabilities under the weights being trained. A critic's or a reward model's loss finds scores here: the number that the
    /// model gives at each trained token's row, which reads what is before the token; its derivatives are by these.
    pub log_probs: &'a [f64],
    /// b: log-probabilities of the policy that sampled the tokens; `None` for data that no policy sampled.
    pub behaviour: Option<&'a [f64]>,
    /// p: log-probabilities of the policy that the trust region is centred at, where it is not the one that sampled.
    pub proximal: Option<&'a [f64]>,
    /// Log-probabilities under the reference policy.
    pub reference: Option<&'a [f64]>,
    /// Correction for what lies between the proximal policy and the one that sampled: a factor on each token's policy term, constant for
    /// the gradient; 0 takes the token out of it.
    pub importance: Option<&'a [f64]>,
    /// Entropy of the distribution at each token.
    pub entropies: &'a [f64],
    /// A: how much better than expected.
    pub advantages: &'a [f64],
    /// Aggregation weight: mask over the global denominator.
    pub weights: &'a [f64],
    /// Where each sequence lies; a sequence is never split.
    pub sequences: &'a [Range<usize>],
    /// Trained tokens in the whole optimizer batch.
    pub batch_tokens: usize,
}

impl LossInputs<'_> {
    /// What ratios are taken against: proximal where it is given, else behaviour, else θ itself (on policy, ratio 1).
    pub fn anchor(&self) -> &[f64] {
        self.proximal.or(self.behaviour).unwrap_or(self.log_probs)
    }
}

/// A loss, its derivatives, and what was seen on the way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossOutput {
    /// This part's share of the optimizer batch's loss.
    pub loss: f64,
    /// ∂loss/∂log_prob, one entry per token.
    pub grad: Vec<f64>,
    /// ∂loss/∂entropy, one entry per token; `None` where the loss doesn't look at entropies.
    pub entropy_grad: Option<Vec<f64>>,
    /// Counts for the report.
    pub metrics: LossMetrics,
}

/// Counts that add up over micro-batches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossMetrics {
    /// Tokens seen.
    pub tokens: usize,
    /// Tokens whose ratio fell below the trust region with a negative advantage: no gradient.
    pub clipped_low: usize,
    /// Tokens whose ratio rose above the trust region with a positive advantage: no gradient.
    pub clipped_high: usize,
    /// The smallest share of tokens clipped below, over sequences; `None` before any sequence.
    pub clip_low_min: Option<f64>,
    /// The largest share of tokens clipped above, over sequences.
    pub clip_high_max: Option<f64>,
    /// Sum over tokens of the divergence from the reference.
    pub kl_sum: f64,
    /// Weight of that divergence; `None` where the loss has no such term.
    pub kl_coef: Option<f64>,
    /// The loss without its entropy bonus.
    pub policy_loss: f64,
    /// Weighted sum of negative log-likelihoods, in nats, of a loss that imitates; `None` of any other.
    pub nll: Option<f64>,
    /// What was done about tokens of another policy; empty where nothing is.
    pub correction: CorrectionMetrics,
    /// How pairs of answers were told apart; empty where the loss compares none.
    pub pairs: PairMetrics,
}

/// Pairs of a chosen and a rejected answer, by their scores: a reward model's, or β times their log-ratios of policy over reference.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairMetrics {
    /// How many.
    pub pairs: usize,
    /// Those whose chosen answer has the higher score.
    pub right: usize,
    /// Sum of the chosen answer's score less the rejected one's.
    pub margin_sum: f64,
}

impl PairMetrics {
    /// Of scores of chosen and rejected answers.
    pub fn of(scores: impl IntoIterator<Item = (f64, f64)>) -> Self {
        scores.into_iter().fold(PairMetrics::default(), |seen, (chosen, rejected)| PairMetrics {
            pairs: seen.pairs + 1,
            right: seen.right + usize::from(chosen > rejected),
            margin_sum: seen.margin_sum + chosen - rejected,
        })
    }

    /// Adds another part's counts.
    pub fn merge(&mut self, other: &PairMetrics) {
        self.pairs += other.pairs;
        self.right += other.right;
        self.margin_sum += other.margin_sum;
    }

    /// Share of pairs whose chosen answer has the higher score.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.pairs.max(1) as f64
    }

    /// Mean of the chosen answer's score less the rejected one's.
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
        self.kl_coef = self.kl_coef.or(other.kl_coef);
        self.policy_loss += other.policy_loss;
        self.nll = pick(self.nll, other.nll, |a, b| a + b);
        self.correction.merge(&other.correction);
        self.pairs.merge(&other.pairs);
    }

    /// Share of tokens clipped on either side.
    pub fn clip_fraction(&self) -> f64 {
        self.per_token((self.clipped_low + self.clipped_high) as f64)
    }

    /// Mean divergence from the reference.
    pub fn kl(&self) -> f64 {
        self.per_token(self.kl_sum)
    }

    fn per_token(&self, sum: f64) -> f64 {
        sum / self.tokens.max(1) as f64
    }
}

/// Inputs a loss can't work with.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LossError {
    /// A column that this configuration needs is absent.
    #[error("{loss} needs {column} for {why}, and the batch has none")]
    Missing {
        /// The loss.
        loss: &'static str,
        /// The column.
        column: &'static str,
        /// The setting that asks for it.
        why: &'static str,
    },
    /// Settings that are out of range or don't go together.
    #[error("{loss} can't use this {setting}: {why}")]
    Settings {
        /// The loss.
        loss: &'static str,
        /// The setting to change.
        setting: String,
        /// The reason.
        why: String,
    },
    /// A part of an optimizer batch, for a loss that must see it whole.
    #[error("{loss} compares tokens of the whole optimizer batch, and these are {seen} of {of}; give it all in one command")]
    Part {
        /// The loss.
        loss: &'static str,
        /// Tokens given.
        seen: usize,
        /// Tokens of the batch.
        of: usize,
    },
    /// A loss that gave derivatives for other tokens than it was shown.
    #[error("the loss `{loss}` gave {found} entries in `{column}` for {expected} tokens; give one entry per token")]
    Length {
        /// The loss.
        loss: String,
        /// `grad` or `entropy_grad`.
        column: &'static str,
        /// Tokens that it was shown.
        expected: usize,
        /// Entries that it gave.
        found: usize,
    },
    /// A loss that panicked.
    #[error("the loss `{loss}` panicked: {message}")]
    Panicked {
        /// The loss.
        loss: String,
        /// Its message.
        message: String,
    },
    /// A loss of the user's own found its inputs unusable.
    #[error("{0}")]
    Custom(String),
}

impl LossOutput {
    /// The same output of `loss`, or an error where it does not have one derivative per token.
    pub(crate) fn aligned(self, loss: &str, expected: usize) -> Result<Self, LossError> {
        let columns = [("grad", Some(self.grad.len())), ("entropy_grad", self.entropy_grad.as_ref().map(Vec::len))];
        match columns.into_iter().find_map(|(column, found)| Some((column, found.filter(|found| *found != expected)?))) {
            Some((column, found)) => Err(LossError::Length { loss: loss.to_owned(), column, expected, found }),
            None => Ok(self),
        }
    }
}

/// Turns log-probabilities into a loss and its derivatives. Pure: same inputs, same output.
///
/// Closures `Fn(&LossInputs) -> Result<LossOutput, LossError>` are losses too.
pub trait Loss: Send + Sync {
    /// Name for logs.
    fn name(&self) -> &str {
        "custom"
    }

    /// Whether it must see the whole optimizer batch at once (batch-wide quantiles and the like). The trainer then computes all
    /// log-probabilities first, at the price of a second forward pass.
    fn whole_batch(&self) -> bool {
        false
    }

    /// Whether all of it is a sum over sequences of what their weights are multiplied by, and nothing else of the batch is looked at. A batch may
    /// then be given in parts as it is gathered, whose weights are scaled when all are known. False where there is a term with another
    /// denominator, such as a mean entropy.
    fn is_sum(&self) -> bool {
        false
    }

    /// Whether a sequence whose advantages are all zero adds nothing, neither to the value nor to any derivative, its own or another's. The trainer
    /// then leaves it out of its passes. False where anything else pulls at such tokens: an entropy bonus, a divergence from a reference, a
    /// threshold over the batch.
    fn ignores_zero_advantage(&self) -> bool {
        false
    }

    /// Value and derivatives for some of the optimizer batch's sequences.
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
