//! GMPO: the geometric mean of ratios that are bounded token by token (verl's `geo_mean`).

use std::ops::Range;

use crate::algo::LossInputs;
use crate::algo::correction::{Level, mean};
use crate::algo::policy_loss::{Ratios, Sequence, Surrogate, Term, Token};
use crate::settings::declare::section;
use crate::settings::setting::NOT_NEGATIVE;

section! {
    /// Bounds log-ratios.
    pub struct GeoMean {
        /// Lower bound: log-ratios are clipped at −`epsilon`.
        #[formerly(clip_low)]
        epsilon: f64 = 0.4, NOT_NEGATIVE;
        /// Upper bound: log-ratios are clipped at `epsilon_high`.
        #[formerly(clip_high)]
        epsilon_high: f64 = 0.4, NOT_NEGATIVE;
    }
}

/// `−mean(A) exp(mean(bounded log ρ))` over a sequence. Importance weights enter by their geometric
/// mean.
impl Surrogate for GeoMean {
    fn name(&self) -> &'static str {
        "geo_mean"
    }

    fn level(&self) -> Level {
        Level::Geometric
    }

    fn needs_whole_sequences(&self) -> bool {
        true
    }

    fn sequence(&self, limits: [f64; 2], inputs: &LossInputs, at: Range<usize>) -> Sequence {
        let ratios = Ratios::bounded_each([self.epsilon, self.epsilon_high], limits, inputs, at.clone());
        let of_all = |importance: &[f64]| -> f64 {
            // verl's guard against a weight of 0.
            mean(&importance[at.clone()].iter().map(|weight| (weight + 1e-10).ln()).collect::<Vec<_>>()).exp()
        };
        let mut sequence = Sequence::new(ratios, inputs, at.clone());
        sequence.importance = vec![inputs.importance.map_or(1.0, of_all); at.len()];
        sequence.advantage = Some(mean(&inputs.advantages[at.clone()]));
        sequence
    }

    fn term(&self, token: &Token) -> Term {
        let value = -token.log_ratio.exp() * token.advantage;
        Term { value, by_log_ratio: value, ..Term::default() }
    }
}
