//! Rates of growing totals over the last seconds.

use std::collections::{BTreeMap, VecDeque};

use rollflow::observe::step_rate;

/// Seconds over which rates are taken.
const WINDOW: f64 = 5.0;

/// Rows of growing totals.
#[derive(Clone, Debug, Default)]
pub struct Totals(VecDeque<(f64, BTreeMap<String, f64>)>);

impl Totals {
    /// Adds the totals at a time, in seconds. An earlier time than the newest row's is that of a new
    /// process, whose totals begin at 0.
    pub fn push(&mut self, at: f64, totals: BTreeMap<String, f64>) {
        if self.0.back().is_some_and(|(before, _)| at <= *before) {
            self.0.clear();
        }
        self.0.push_back((at, totals));
        while self.0.get(1).is_some_and(|(next, _)| *next <= at - WINDOW) {
            self.0.pop_front();
        }
    }

    /// Growth of each total over the window; since 0 after a single row.
    pub fn growth(&self) -> impl Iterator<Item = (&str, f64)> {
        let before = if self.0.len() > 1 { self.0.front() } else { None };
        let grown = move |(name, total): (&'_ String, &f64)| {
            total - before.and_then(|(_, totals)| totals.get(name)).copied().unwrap_or(0.0)
        };
        self.0.back().into_iter().flat_map(|(_, totals)| totals).map(move |(name, total)| (name.as_str(), grown((name, total))))
    }

    /// Growth of a total per second; `None` before the second row.
    pub fn rate(&self, name: &str) -> Option<f64> {
        let ((first, old), (last, new)) = (self.0.front()?, self.0.back()?);
        let rate = (new.get(name)? - old.get(name)?) / (last - first);
        rate.is_finite().then_some(rate.max(0.0))
    }

    /// The same of rows that are steps, at the time `now`: [`step_rate`].
    pub fn step_rate(&self, name: &str, now: f64) -> Option<f64> {
        let ((first, old), (last, new)) = (self.0.front()?, self.0.back()?);
        step_rate(new.get(name)? - old.get(name)?, last - first, (self.0.len() - 1) as f64, now - last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_last_seconds_of_one_process() {
        let mut totals = Totals::default();
        let mut push = |at, total| {
            totals.push(at, BTreeMap::from([("a".to_owned(), total)]));
            (totals.growth().map(|(_, growth)| growth).sum::<f64>(), totals.rate("a"))
        };
        assert_eq!(push(1.0, 100.0), (100.0, None));
        assert_eq!(push(2.0, 110.0), (10.0, Some(10.0)));
        assert_eq!(push(6.0, 150.0), (50.0, Some(10.0)));
        assert_eq!(push(7.0, 210.0), (100.0, Some(20.0)), "the first row is out of the window");
        assert_eq!(push(1.0, 5.0), (5.0, None), "a new process");
        assert_eq!(totals.rate("b"), None);
    }
}
