//! Loss of a reward model: the better of two completions should have the higher score.

use super::preference::{log_sigmoid, sigmoid};
use super::{Loss, LossError, LossInputs, LossOutput, PairMetrics};

/// A loss of pairs of scores, with its derivatives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PairwiseReward {
    /// Mean over pairs.
    pub loss: f64,
    /// ∂loss/∂score of the chosen completions.
    pub chosen: Vec<f64>,
    /// ∂loss/∂score of the rejected completions.
    pub rejected: Vec<f64>,
}

/// `−log σ(chosen − rejected − margin) + center · (chosen + rejected)²` (Bradley and Terry). The
/// second term keeps scores around 0 (TRL's `RewardTrainer`, `center_rewards_coefficient`).
///
/// Scores and `margins` have one entry per pair. `batch_pairs` is the number of pairs in the whole
/// optimizer batch (law N1).
pub fn pairwise_reward(
    chosen: &[f64],
    rejected: &[f64],
    margins: Option<&[f64]>,
    center: f64,
    batch_pairs: usize,
) -> PairwiseReward {
    let share = 1.0 / batch_pairs.max(1) as f64;
    let mut output = PairwiseReward::default();
    for (at, (won, lost)) in chosen.iter().zip(rejected).enumerate() {
        let ahead = won - lost - margins.map_or(0.0, |margins| margins[at]);
        let sum = won + lost;
        output.loss += share * (-log_sigmoid(ahead) + center * sum * sum);
        let (apart, together) = (share * sigmoid(-ahead), share * 2.0 * center * sum);
        output.chosen.push(together - apart);
        output.rejected.push(together + apart);
    }
    output
}

/// [`pairwise_reward`] over a batch. Sequences 2i and 2i + 1 are the chosen and the rejected
/// completion of a pair; each has one trained row, whose score is the completion's. The chosen
/// one's advantage, if it has any, is the pair's margin.
///
/// A micro-batch may split a pair, so the whole batch is scored first, unless it is one
/// micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BradleyTerry {
    /// Coefficient of the term that keeps scores around 0.
    pub center: f64,
}

impl Loss for BradleyTerry {
    fn name(&self) -> &str {
        "bradley_terry"
    }

    fn whole_batch(&self) -> bool {
        true
    }

    fn evaluate(&self, inputs: &LossInputs) -> Result<LossOutput, LossError> {
        inputs.check_whole("bradley_terry")?;
        let scores = inputs.log_probs;
        let whole = |pair: &[std::ops::Range<usize>]| pair.len() == 2 && pair.iter().all(|answer| answer.len() == 1);
        if let Some(at) = inputs.sequences.chunks(2).position(|pair| !whole(pair)) {
            let problem =
                format!("bradley_terry: sequences {} and {} are no pair of answers with one score each", 2 * at, 2 * at + 1);
            return Err(LossError::Custom(problem));
        }
        let column = |of: usize| scores.iter().skip(of).step_by(2).copied().collect::<Vec<f64>>();
        let (chosen, rejected) = (column(0), column(1));
        let margin = |pair: usize| inputs.advantages.get(2 * pair).copied().filter(|margin| !margin.is_nan());
        let margins: Vec<f64> = (0..chosen.len()).map(|pair| margin(pair).unwrap_or(0.0)).collect();
        let judged = pairwise_reward(&chosen, &rejected, Some(&margins), self.center, inputs.batch_tokens / 2);
        let grad = judged.chosen.iter().zip(&judged.rejected).flat_map(|(won, lost)| [*won, *lost]).collect();
        let mut output = LossOutput::new(judged.loss, grad);
        output.metrics.pairs = PairMetrics::of(chosen.into_iter().zip(rejected));
        Ok(output)
    }
}
