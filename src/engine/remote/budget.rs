//! Retry budget of a fleet: pure, with the clock as an argument.

use std::time::{Duration, Instant};

/// Seconds without a retry that fill the budget.
const SECONDS: f64 = 10.0;

/// Number of retries that may be made now. The budget holds one retry for each sample, enough for
/// an engine that dies with all its work. It refills slowly, so that a failing fleet is not
/// flooded.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    burst: f64,
    left: f64,
    at: Instant,
}

impl Budget {
    pub(super) fn new(now: Instant, samples: usize) -> Self {
        let burst = samples.max(8) as f64;
        Budget { burst, left: burst, at: now }
    }

    /// Adds a tenth of a retry for a success.
    pub(super) fn earn(&mut self) {
        self.left = (self.left + 0.1).min(self.burst);
    }

    /// Returns the earliest time of the next retry, and spends it.
    pub(super) fn spend(&mut self, now: Instant) -> Instant {
        let per_second = self.burst / SECONDS;
        self.left = (self.left + per_second * now.saturating_duration_since(self.at).as_secs_f64()).min(self.burst);
        self.at = self.at.max(now);
        self.left -= 1.0;
        now + Duration::from_secs_f64((-self.left / per_second).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_fleet_is_asked_ever_more_slowly_and_work_that_goes_well_pays_for_retries() {
        let now = Instant::now();
        let mut budget = Budget::new(now, 64);
        let at_once = (0..64).filter(|_| budget.spend(now) == now).count();
        assert_eq!(at_once, 64, "a burst, as when an engine dies with all its work");
        let waits: Vec<f64> = (0..10).map(|_| (budget.spend(now) - now).as_secs_f64()).collect();
        assert!(waits.windows(2).all(|two| two[1] > two[0]) && waits[9] > 1.5, "{waits:?}");
        (0..110).for_each(|_| budget.earn());
        assert_eq!(budget.spend(now), now);
        let later = now + Duration::from_secs(60);
        assert_eq!(budget.spend(later), later);
    }
}
