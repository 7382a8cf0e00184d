//! Trends of a series of numbers, one a step.

/// Fewest steps that show a trend: each fifth has two.
pub const STEPS: usize = 10;

/// Means of the fifths of a series, and how sure they are.
#[derive(Clone, Debug, PartialEq)]
pub struct Trend {
    /// Means of the five fifths.
    pub fifths: [f64; 5],
    /// Standard error of the difference of the last and first mean, as if steps were independent.
    pub error: f64,
}

impl Trend {
    /// Trend of `values`; `None` below [`STEPS`] values.
    pub fn of(values: &[f64]) -> Option<Self> {
        let count = values.len();
        if count < STEPS {
            return None;
        }
        let fifth = |at: usize| &values[at * count / 5..(at + 1) * count / 5];
        let squared_error = |values: &[f64]| {
            let (of, count) = (mean(values), values.len() as f64);
            values.iter().map(|value| (value - of).powi(2)).sum::<f64>() / (count - 1.0).max(1.0) / count
        };
        let fifths = [0, 1, 2, 3, 4].map(|at| mean(fifth(at)));
        Some(Trend { fifths, error: (squared_error(fifth(0)) + squared_error(fifth(4))).sqrt() })
    }

    /// Mean of the first fifth.
    pub fn first(&self) -> f64 {
        self.fifths[0]
    }

    /// Mean of the last fifth.
    pub fn last(&self) -> f64 {
        self.fifths[4]
    }

    /// Last mean less the first.
    pub fn change(&self) -> f64 {
        self.last() - self.first()
    }

    /// Returns true if the change is more than two standard errors, which chance exceeds in one of
    /// twenty cases.
    pub fn is_sure(&self) -> bool {
        self.change().abs() > 2.0 * self.error
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Median of the values, `None` for none.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trend_is_sure_beyond_the_noise_only() {
        let noise = |at: usize| if at.is_multiple_of(2) { 0.1 } else { -0.1 };
        let flat = Trend::of(&(0..50).map(noise).collect::<Vec<_>>()).unwrap();
        assert!(!flat.is_sure() && flat.change().abs() < 1e-9, "{flat:?}");
        let rising = Trend::of(&(0..50).map(|at| noise(at) + at as f64 * 0.01).collect::<Vec<_>>()).unwrap();
        assert!(rising.is_sure() && (rising.change() - 0.4).abs() < 1e-9, "{rising:?}");
        assert_eq!(Trend::of(&[1.0; STEPS - 1]), None);
        assert_eq!(Trend::of(&[1.0; STEPS]).unwrap(), Trend { fifths: [1.0; 5], error: 0.0 });
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(Vec::new()), None);
    }
}
