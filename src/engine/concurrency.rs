//! Number of samples to generate at a time, found by measurement: a state machine without clock or
//! tensors.
//!
//! More samples at a time give more tokens a second until the machine is saturated; beyond that,
//! each sample only gets slower and staler. The knee lies where the elasticity of the throughput, d
//! ln(rate) / d ln(slots), falls below [`WORTH`].
//!
//! The number starts at one and doubles while that pays off. Then two neighbouring numbers are
//! compared again and again: up by a quarter if the additional slots paid off, else down by a
//! quarter. So the number stays near the knee, follows it when it moves, and corrects a step that
//! noise caused.
//!
//! Only steps with all slots in use are measured. Cost: one division a step.

/// Least share of additional slots that must come back as additional tokens a second. A smoothly
/// saturating rate is within about this share of its limit there.
const WORTH: f64 = 0.1;

/// Steps of one measurement. Their median is the rate, so that delayed steps and prefills do not
/// count.
const STEPS: usize = 32;

/// Number of slots in use and the measurements that led to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Concurrency {
    most: usize,
    /// Lower of the two numbers that are compared.
    low: usize,
    /// Rate of the lower number while the higher one is measured.
    low_rate: Option<f64>,
    /// Rates of the current measurement, in tokens a second.
    rates: Vec<f64>,
    starting: bool,
}

impl Concurrency {
    /// Starts with one slot; the maximum is `most`, at least one.
    pub fn new(most: usize) -> Self {
        Concurrency { most: most.max(1), low: 1, low_rate: None, rates: Vec::with_capacity(STEPS), starting: true }
    }

    /// Starts one step below `most`, for an engine that was found to use all of it.
    pub fn below(most: usize) -> Self {
        let low = most.max(1) - quarter(most.max(1)).min(most.max(1) - 1);
        Concurrency { low, starting: false, ..Concurrency::new(most) }
    }

    /// Number of samples that may be in flight now.
    pub fn slots(&self) -> usize {
        if self.low_rate.is_some() { self.high() } else { self.low }
    }

    /// Records a step of `tokens` tokens for `in_use` samples in `seconds`. Returns the new number
    /// of slots.
    pub fn step(&mut self, in_use: usize, tokens: usize, seconds: f64) -> usize {
        let rate = tokens as f64 / seconds;
        if in_use == self.slots() && rate.is_finite() && rate > 0.0 {
            self.rates.push(rate);
        }
        if self.rates.len() == STEPS {
            let rate = median(&mut self.rates);
            self.rates.clear();
            match self.low_rate.take() {
                None => self.low_rate = Some(rate),
                Some(low_rate) => self.compare(low_rate, rate),
            }
        }
        self.slots()
    }

    fn compare(&mut self, low_rate: f64, high_rate: f64) {
        let elasticity = (high_rate / low_rate).ln() / (self.high() as f64 / self.low as f64).ln();
        if elasticity > WORTH {
            // A higher number must remain to compare with.
            self.low = self.high().min(self.most - quarter(self.most)).max(1);
        } else {
            self.low = if self.starting { self.low } else { self.low.saturating_sub(quarter(self.low)).max(1) };
            self.starting = false;
        }
    }

    fn high(&self) -> usize {
        let above = if self.starting { 2 * self.low } else { self.low + quarter(self.low) };
        above.min(self.most)
    }
}

/// Step width: fine enough to find a knee, coarse enough to exceed noise.
fn quarter(slots: usize) -> usize {
    (slots / 4).max(1)
}

fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Slots used in the second half of `comparisons` comparisons, on a machine with this
    /// throughput curve and noise.
    fn slots(most: usize, curve: impl Fn(f64) -> f64, noise: f64, mut seed: u64, comparisons: usize) -> Vec<usize> {
        let mut draw = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 11) as f64 / (1_u64 << 53) as f64
        };
        let mut concurrency = Concurrency::new(most);
        let mut used = Vec::new();
        for _ in 0..comparisons * 2 * STEPS {
            let slots = concurrency.slots();
            // One step in twenty is delayed.
            let held_up = if noise > 0.0 && draw() < 0.05 { 5.0 } else { 1.0 };
            let rate = curve(slots as f64) * (1.0 + noise * (2.0 * draw() - 1.0));
            concurrency.step(slots, slots, held_up * slots as f64 / rate);
            used.push(slots);
        }
        used.split_off(used.len() / 2)
    }

    fn mean(values: &[usize], of: impl Fn(f64) -> f64) -> f64 {
        values.iter().map(|&value| of(value as f64)).sum::<f64>() / values.len() as f64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// The rate rises in proportion to the slots up to a knee, and not beyond.
        #[test]
        fn it_settles_at_the_knee_and_stays_there_under_noise(knee in 1_usize..200, noise in 0.0..0.15_f64, seed: u64) {
            let rate = |slots: f64| 1000.0 * slots.min(knee as f64);
            let used = slots(256, rate, noise, seed, 100);
            prop_assert!(mean(&used, rate) > 0.85 * rate(knee as f64), "too few: {:?}", &used);
            let most_of_the_time = mean(&used, |slots| slots);
            prop_assert!(most_of_the_time < 2.0 * knee as f64 + 3.0, "{most_of_the_time} slots for a knee at {knee}");
        }

        /// The bounds hold for any measurement.
        #[test]
        fn it_never_leaves_its_bounds(most in 0_usize..40, steps in prop::collection::vec((0_usize..50, 0_usize..90, -1.0..2.0_f64), 0..3000)) {
            let mut concurrency = Concurrency::new(most);
            for (in_use, tokens, seconds) in steps {
                // Mostly full, so that the number changes.
                let in_use = if in_use % 8 == 0 { in_use } else { concurrency.slots() };
                let slots = concurrency.step(in_use, tokens, seconds);
                prop_assert!((1..=most.max(1)).contains(&slots), "{slots} of {most}");
            }
        }
    }

    #[test]
    fn where_more_is_slower_it_takes_fewer() {
        let thrashing = |slots: f64| if slots < 30.0 { slots } else { 30.0 * (30.0 / slots).sqrt() };
        let used = slots(256, thrashing, 0.1, 1, 100);
        assert!((20.0..40.0).contains(&mean(&used, |slots| slots)), "{used:?}");
    }

    #[test]
    fn from_the_bottom_and_the_top_it_finds_a_knee_and_follows_it_when_it_moves() {
        let at_once = [(256, 40.0), (256, 400.0), (1, 1.0), (3, 3.0)].map(|(most, knee)| (Concurrency::below(most), vec![knee]));
        for (mut concurrency, knees) in [(Concurrency::new(256), vec![100.0, 10.0, 60.0])].into_iter().chain(at_once) {
            for knee in knees {
                for _ in 0..60 * STEPS {
                    let slots = concurrency.slots();
                    concurrency.step(slots, slots, slots as f64 / (slots as f64).min(knee));
                }
                let (slots, best) = (concurrency.slots() as f64, knee.min(concurrency.most as f64));
                assert!((0.6 * best..=1.6 * best).contains(&slots), "{slots} slots for a knee at {knee}: {concurrency:?}");
            }
        }
    }

    #[test]
    fn steps_with_free_slots_are_not_measured() {
        let mut concurrency = Concurrency::new(64);
        for _ in 0..10 * STEPS {
            concurrency.step(0, 0, 0.1);
        }
        assert_eq!(concurrency, Concurrency::new(64));
    }
}
