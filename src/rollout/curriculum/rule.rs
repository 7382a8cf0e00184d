//! `[curriculum]`: rule by which prompts are chosen.

use crate::settings::declare::{choices, section};
use crate::settings::setting::{BELOW_ONE, FINITE, GIVEN, Limit, NOT_NEGATIVE, UP_TO_ONE};

const BAND: Limit<[f64; 2]> =
    Limit { text: "from 0 to 1, the smaller one first", holds: |[low, high]| 0.0 <= *low && low <= high && *high <= 1.0 };

section! {
    /// Choice of prompts by the pass rates of their earlier groups. The order of the
    /// stream stays. When a prompt's turn comes, it is taken with a probability that follows from its
    /// pass rate; a prompt without one is always taken.
    pub struct CurriculumRule {
        /// Smallest reward of a completion that passes.
        success: f64 = 1.0, FINITE;
        /// Band of pass rates to train on, both ends included.
        band: [f64; 2] = [0.1, 0.9], BAND;
        /// Probability of a prompt inside the band.
        prefer: Prefer = Prefer::default();
        /// Probability of a prompt below the band.
        hard: f64 = 0.2, UP_TO_ONE;
        /// Probability of a prompt above the band.
        easy: f64 = 0.5, UP_TO_ONE;
        /// Weight of a prompt's earlier pass rate when a new group is seen. 0 keeps the newest group's
        /// alone.
        decay: f64 = 0.5, BELOW_ONE;
        /// Steps after which a pass rate is forgotten, so that the prompt is taken again, even if it
        /// was retired. 0 never forgets.
        forget_after: u64 = 0;
        /// Groups in a row without a failure after which a prompt is retired. 0 retires none. A policy may
        /// forget what it is no longer asked: set `forget_after`, too.
        retire_after: u64 = 0;
        /// Share of prompts that repeat a hard one (below the band), the longest unseen first.
        replay: f64 = 0.0, BELOW_ONE;
        /// Changing shares of data sets; may be repeated.
        source: Vec<SourceShare> = Vec::new();
    }
}

choices! {
    /// Probability of a prompt whose pass rate is inside the band.
    pub enum Prefer {
        /// 1.
        "band" => Band,
        /// 4 p (1 − p) of its pass rate p: highest at one half (Foerster et al., 2025).
        "learnability" => Learnability,
    }
}

section! {
    /// Share of a data set, which changes over the steps in a straight line. Data sets that are not
    /// named keep the factor 1.
    pub struct SourceShare {
        /// Name of the data set.
        name: String = String::new(), GIVEN;
        /// Factor of its share of the stream until step `begin`, relative to the other data sets'.
        from: f64 = 1.0, NOT_NEGATIVE;
        /// Factor from step `end`.
        to: f64 = 1.0, NOT_NEGATIVE;
        /// Step at which the change begins.
        begin: u64 = 1;
        /// Step at which the change ends.
        end: u64 = 1;
    }
}

impl SourceShare {
    /// Returns the factor in a step.
    pub fn at(&self, step: u64) -> f64 {
        if step >= self.end {
            return self.to;
        }
        let passed = step.saturating_sub(self.begin) as f64 / self.end.saturating_sub(self.begin).max(1) as f64;
        self.from + passed.min(1.0) * (self.to - self.from)
    }
}
