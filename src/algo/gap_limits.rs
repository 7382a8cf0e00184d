//! Limits of the gap between trainer and generator (law N3), and the diagnosis of a larger one.

use std::fmt;

use super::LogProbGap;

/// Limits of the mean |trainer − generator| over a step's sampled tokens, in nats.
///
/// Two implementations of one model differ by 1e-6 in single precision and by hundredths in half. A
/// policy that moved on adds its own change: `pipelines/recipes/grpo.toml`, at a high rate and one
/// version of staleness, peaks at 0.43 (`log_prob_gap_mean_nats`), and at 0.70 with
/// `flow.max_staleness=4` and `train.ppo_epochs=2`. The defaults, 1 and 3, are above: at a mean gap
/// of 3 nats a typical importance ratio is 20 or 1/20. The start-up probe finds smaller mismatches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GapLimits {
    /// Mean gap above which a step warns, in nats. Default 1.
    pub warn: f64,
    /// Mean gap above which the run ends before the update, in nats. Default 3.
    pub halt: f64,
}

impl Default for GapLimits {
    fn default() -> Self {
        GapLimits { warn: 1.0, halt: 3.0 }
    }
}

/// Diagnosis of a gap that is too large: numbers, worst token, likely cause and remedy.
#[derive(Clone, Debug, PartialEq)]
pub struct GapDiagnosis {
    /// The step.
    pub step: u64,
    /// Limit that was exceeded, in nats.
    pub limit: f64,
    /// Measured gap.
    pub gap: LogProbGap,
    /// If true, the policy was updated since its version was published, as with `sync.every` above 1.
    pub updated: bool,
}

impl GapLimits {
    /// Compares a step's gap with the limits: a warning, or an error that ends the run. A mean that is
    /// no number is above every limit.
    pub fn check(&self, step: u64, gap: &LogProbGap) -> Result<Option<GapDiagnosis>, GapDiagnosis> {
        let above = |limit: f64| {
            let within = gap.mean() <= limit;
            (!within).then(|| GapDiagnosis { step, limit, gap: gap.clone(), updated: false })
        };
        above(self.halt).map_or_else(|| Ok(above(self.warn)), Err)
    }
}

const MISMATCH: &str = "tokens that the trained weights themselves sampled disagree as much, so generator and trainer compute different \
                        distributions: compare temperature, top_p, top_k and min_p, the tokenizer, and that a sync really changed the \
                        generator's weights";
const STALE: &str = "tokens of the trained version agree and older ones do not, so the policy moves faster than its samples arrive: lower \
                     flow.max_staleness or train.lr, or correct for it with [train.correction]";
const UNKNOWN: &str = "none of them was sampled by the trained weights themselves, to tell staleness from a mismatch: run a few steps with \
                       flow.max_staleness = 0 and sync.every = 1; if the gap stays, compare temperature, top_p, top_k and min_p and the \
                       tokenizer of generator and trainer; if it goes, lower train.lr or set [train.correction]";

impl GapDiagnosis {
    /// Likely cause and remedy.
    pub fn cause(&self) -> &'static str {
        match self.gap.by_lag.get(&0) {
            Some(fresh) if fresh.gap() <= self.gap.mean() / 2.0 => STALE,
            Some(_) if !self.updated => MISMATCH,
            _ => UNKNOWN,
        }
    }
}

impl fmt::Display for GapDiagnosis {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let gap = &self.gap;
        write!(
            f,
            "step {}: generator and trainer disagree about log-probabilities by {:.3} nats on average, above the limit of {} ({} tokens; \
             largest {:.3}, k3 KL {:.3}, effective sample share {:.3})",
            self.step,
            gap.mean(),
            self.limit,
            gap.tokens,
            gap.max(),
            gap.approx_kl(),
            gap.effective_sample_share(),
        )?;
        for (lag, of) in &gap.by_lag {
            write!(f, "; lag {lag}: {:.3} nats, mean ratio {:.3} ({} tokens)", of.gap(), of.ratio(), of.tokens)?;
        }
        if let Some(worst) = &gap.worst {
            write!(
                f,
                "; worst is token {} at position {} of sample {} of group {}: {:.3} to the trainer, {:.3} to the generator",
                worst.token, worst.position, worst.sample, worst.group, worst.trainer, worst.behaviour
            )?;
        }
        write!(f, ". {}", self.cause())
    }
}

impl std::error::Error for GapDiagnosis {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::ComparedToken;

    fn gap(tokens: &[(u64, f64)]) -> LogProbGap {
        let at = ComparedToken { group: 41, sample: 3, position: 23, token: 17, trainer: -1.0, ..ComparedToken::default() };
        let token = |&(lag, behaviour): &(u64, f64)| ComparedToken { lag, behaviour, ..at };
        let mut gap = LogProbGap::default();
        gap.add_sequence(&tokens.iter().map(token).collect::<Vec<_>>());
        gap
    }

    #[test]
    fn only_a_gap_above_a_limit_is_worth_a_word() {
        let limits = GapLimits::default();
        let verdict = |behaviour| limits.check(7, &gap(&[(0, behaviour)])).map(|warning| warning.map(|of| of.limit));
        assert_eq!((verdict(-1.9), verdict(-2.1)), (Ok(None), Ok(Some(1.0))));
        assert_eq!(verdict(-4.1).unwrap_err().limit, 3.0);
        assert!(verdict(f64::NAN).is_err());
        assert_eq!(limits.check(7, &LogProbGap::default()), Ok(None));
    }

    #[test]
    fn a_diagnosis_names_step_numbers_worst_token_and_cause() {
        let told = |tokens| GapDiagnosis { step: 7, limit: 0.5, gap: gap(tokens), updated: false };
        let text = told(&[(0, -1.0), (2, -4.0)]).to_string();
        for part in ["step 7", "1.500 nats", "limit of 0.5", "lag 2: 3.000", "token 17 at position 23 of sample 3 of group 41"] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
        assert_eq!(told(&[(0, -1.0), (2, -4.0)]).cause(), STALE);
        assert_eq!(told(&[(0, -4.0), (2, -4.0)]).cause(), MISMATCH);
        assert_eq!(told(&[(1, -4.0)]).cause(), UNKNOWN);
        let updated = |tokens| GapDiagnosis { updated: true, ..told(tokens) }.cause();
        assert_eq!((updated(&[(0, -4.0), (2, -4.0)]), updated(&[(0, -1.0), (2, -4.0)])), (UNKNOWN, STALE));
    }
}
