//! A metric over steps, in bounded memory.

/// Points that a curve keeps.
const POINTS: usize = 4096;

/// Finite values of a metric. A long curve keeps every second, fourth, … value.
#[derive(Clone, Debug)]
pub struct Curve {
    points: Vec<(f64, f64)>,
    /// One value of so many is kept.
    every: usize,
    /// Values since the last one that was kept.
    skipped: usize,
    /// Newest value.
    pub last: Option<f64>,
}

impl Default for Curve {
    fn default() -> Self {
        Curve { points: Vec::new(), every: 1, skipped: 0, last: None }
    }
}

impl FromIterator<(f64, f64)> for Curve {
    fn from_iter<I: IntoIterator<Item = (f64, f64)>>(points: I) -> Self {
        let mut curve = Curve::default();
        points.into_iter().for_each(|(at, value)| curve.push(at, value));
        curve
    }
}

impl Curve {
    /// Adds a value. Earlier ones at the same or a later place are dropped, because a resume has
    /// repeated their steps.
    pub fn push(&mut self, at: f64, value: f64) {
        if !value.is_finite() || !at.is_finite() {
            return;
        }
        while self.points.last().is_some_and(|(before, _)| *before >= at) {
            self.points.pop();
        }
        self.last = Some(value);
        self.skipped += 1;
        if self.skipped >= self.every || self.points.is_empty() {
            self.points.push((at, value));
            self.skipped = 0;
        }
        if self.points.len() > POINTS {
            let mut keep = [true, false].into_iter().cycle();
            self.points.retain(|_| keep.next() == Some(true));
            self.every *= 2;
        }
    }

    /// Smallest and largest value; `None` for an empty curve.
    pub fn range(&self) -> Option<(f64, f64)> {
        let values = || self.points.iter().map(|(_, value)| *value);
        values().reduce(f64::min).zip(values().reduce(f64::max))
    }

    /// At most `columns` means of values that follow each other, the oldest first.
    pub fn columns(&self, columns: usize) -> Vec<f64> {
        let (points, columns) = (self.points.len(), columns.min(self.points.len()));
        let part = |at: usize| &self.points[at * points / columns..(at + 1) * points / columns];
        let mean = |part: &[(f64, f64)]| part.iter().map(|(_, value)| value / part.len() as f64).sum();
        (0..columns).map(|at| mean(part(at))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_shape_in_bounded_memory() {
        let curve: Curve = (0..100_000).map(|step| (f64::from(step), f64::from(step))).collect();
        assert!(curve.points.len() <= POINTS && curve.last == Some(99_999.0));
        let columns = curve.columns(10);
        let gaps: Vec<f64> = columns.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().all(|gap| (gap - 10_000.0).abs() < 200.0), "{columns:?}");
    }

    #[test]
    fn repeated_steps_replace_the_old_ones_and_numbers_without_a_place_are_left_out() {
        let steps = [1.0, 2.0, 3.0, 2.0, f64::NAN].map(|step| (step, step * 10.0));
        let curve: Curve = steps.into_iter().collect();
        assert_eq!((curve.columns(9), curve.last, curve.range()), (vec![10.0, 20.0], Some(20.0), Some((10.0, 20.0))));
        assert_eq!((Curve::default().columns(5), Curve::default().range()), (vec![], None));
        let large: Curve = [(0.0, f64::MAX), (1.0, f64::MAX)].into_iter().collect();
        assert!(large.columns(1)[0].is_finite());
    }
}
