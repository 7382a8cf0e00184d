//! Probe before a run: compares the log-probabilities of generator and trainer on a few tokens, and
//! diagnoses a difference. Pure.

use std::fmt;

/// Likely cause of a difference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Evidence {
    /// All log-probabilities of the generator are larger: it samples from the tokens that top_p,
    /// top_k or min_p keep.
    Truncation,
    /// The generator's log-probabilities are about this multiple of the trainer's: the trainer's
    /// temperature over the generator's.
    Temperature(f64),
    /// Neither: other weights, another tokenizer or other tokens.
    Unknown,
}

/// A difference above the tolerance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disagreement {
    /// Tokens compared.
    pub tokens: usize,
    /// Mean |generator − trainer|, in nats.
    pub mean: f64,
    /// Largest, in nats.
    pub max: f64,
    /// Tolerance of the mean, in nats.
    pub tolerance: f64,
    /// Likely cause.
    pub evidence: Evidence,
}

/// Compares the log-probabilities of the same tokens under the same weights.
pub fn compare(generator: &[f64], trainer: &[f64], tolerance: f64) -> Result<(), Disagreement> {
    let differences: Vec<f64> = generator.iter().zip(trainer).map(|(b, theta)| b - theta).collect();
    let tokens = differences.len();
    let mean = differences.iter().map(|d| d.abs()).sum::<f64>() / tokens.max(1) as f64;
    // What is no number is above every tolerance.
    if mean <= tolerance {
        return Ok(());
    }
    let max = differences.iter().map(|d| d.abs()).fold(0.0, f64::max);
    Err(Disagreement { tokens, mean, max, tolerance, evidence: evidence(&differences, trainer, tolerance) })
}

/// Likely cause of the differences. Another temperature scales log-probabilities. Truncation adds
/// the negated logarithm of the kept probability: never below zero, and larger for unlikely tokens,
/// whose distributions are flat.
fn evidence(differences: &[f64], trainer: &[f64], tolerance: f64) -> Evidence {
    let n = trainer.len() as f64;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / n;
    let (mean_d, mean_theta) = (mean(differences), mean(trainer));
    let covariance =
        |a: &[f64], of_a: f64, b: &[f64], of_b: f64| a.iter().zip(b).map(|(a, b)| (a - of_a) * (b - of_b)).sum::<f64>();
    let shared = covariance(differences, mean_d, trainer, mean_theta);
    let (of_d, of_theta) =
        (covariance(differences, mean_d, differences, mean_d), covariance(trainer, mean_theta, trainer, mean_theta));
    let slope = shared / of_theta;
    let surer = differences.iter().all(|d| *d >= -tolerance);
    // Two points always lie on a line, and a slope of nothing is no temperature.
    let explained = n >= 4.0 && shared * shared > 0.5 * of_d * of_theta && (-1.0..-0.05).contains(&slope) | (slope > 0.05);
    if explained && !(surer && slope < 0.0) {
        Evidence::Temperature(1.0 + slope)
    } else if surer {
        Evidence::Truncation
    } else {
        Evidence::Unknown
    }
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Disagreement { tokens, mean, max, tolerance, .. } = self;
        write!(
            f,
            "generator and trainer disagree about what a log-probability is: under the same weights those of {tokens} sampled tokens differ by \
             {mean:.3} nats on average (largest {max:.3}; {tolerance} is allowed). "
        )?;
        match self.evidence {
            Evidence::Truncation => write!(
                f,
                "The generator is the surer one of every token, by a factor of up to {:.2}: it looks like top_p, top_k or min_p, which leave a \
                 part of the distribution that the trainer counts in full; switch them off",
                max.exp()
            ),
            Evidence::Temperature(ratio) => write!(
                f,
                "The generator's are about {ratio:.2} times the trainer's: it looks like another temperature; give both the same"
            ),
            Evidence::Unknown => write!(
                f,
                "It looks neither like a temperature nor like top_p, top_k or min_p: compare the weights, the tokenizer and the tokens \
                 that both read"
            ),
        }
    }
}

impl std::error::Error for Disagreement {}

#[cfg(test)]
mod tests {
    use super::*;
    /// Eight positions with other logits each, and the token sampled there.
    fn positions() -> Vec<([f64; 6], usize)> {
        (0..8)
            .map(|t| {
                let logit = |v: usize| ((t * 7 + v * 5) % 11) as f64 / 2.5 - (v as f64) / 3.0;
                (std::array::from_fn(logit), (t * 5) % 3)
            })
            .collect()
    }

    fn log_softmax_at(logits: &[f64], token: usize) -> f64 {
        logits[token] - logits.iter().map(|logit| logit.exp()).sum::<f64>().ln()
    }

    fn trainer() -> Vec<f64> {
        positions().iter().map(|(logits, token)| log_softmax_at(logits, *token)).collect()
    }

    fn at_temperature(temperature: f64) -> Vec<f64> {
        positions().iter().map(|(logits, token)| log_softmax_at(&logits.map(|logit| logit / temperature), *token)).collect()
    }

    #[test]
    fn equal_distributions_agree() {
        assert_eq!(compare(&trainer(), &trainer(), 0.02), Ok(()));
        assert_eq!(compare(&[], &[], 0.02), Ok(()));
        assert!(compare(&[f64::NAN], &[-1.0], 0.02).is_err());
    }

    #[test]
    fn another_temperature_is_recognised() {
        for (temperature, expected) in [(0.5, 2.0), (2.0, 0.5)] {
            let told = compare(&at_temperature(temperature), &trainer(), 0.02).unwrap_err();
            let Evidence::Temperature(ratio) = told.evidence else { panic!("{told}") };
            assert!((ratio / expected - 1.0).abs() < 0.4, "{told}");
        }
    }

    #[test]
    fn truncation_is_recognised() {
        let top = |(logits, token): ([f64; 6], usize)| {
            let mut sorted = logits;
            sorted.sort_by(|a, b| b.total_cmp(a));
            let floor = sorted[3].min(logits[token]);
            log_softmax_at(&logits.map(|logit| if logit < floor { f64::NEG_INFINITY } else { logit }), token)
        };
        let generator: Vec<f64> = positions().into_iter().map(top).collect();
        for tokens in [2, 8] {
            let told = compare(&generator[..tokens], &trainer()[..tokens], 0.02).unwrap_err();
            assert_eq!(told.evidence, Evidence::Truncation, "{told}");
        }
    }

    #[test]
    fn what_looks_like_neither_is_said_to() {
        let mut generator = trainer();
        generator.reverse();
        let told = compare(&generator, &trainer(), 0.02).unwrap_err();
        assert_eq!(told.evidence, Evidence::Unknown, "{told}");
        assert!(told.to_string().contains("8 sampled tokens") && told.to_string().contains("0.02 is allowed"), "{told}");
    }
}
