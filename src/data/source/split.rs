//! `train`, `train[:10%]`, `test[100:200]`, `train[-50:]`: a split's name, and which of its records.

use std::ops::Range;

use crate::data::DataError;

/// The split that is meant where none is named.
pub(super) const TRAIN: &str = "train";

/// A split and the part of it that is used.
pub(crate) struct Split {
    pub(super) name: String,
    from: Option<Bound>,
    to: Option<Bound>,
}

#[derive(Clone, Copy)]
enum Bound {
    /// From the end where negative.
    Row(i64),
    Percent(f64),
}

impl Split {
    /// Returns the selected range of `len` records. Percentages are rounded to the nearest record;
    /// the range is clipped to the end.
    pub(super) fn rows(&self, len: usize) -> Range<usize> {
        let at = |bound: Bound| match bound {
            Bound::Row(row) if row < 0 => len.saturating_sub(usize::try_from(row.unsigned_abs()).unwrap_or(usize::MAX)),
            Bound::Row(row) => usize::try_from(row).unwrap_or(usize::MAX).min(len),
            // A float to an integer saturates, so that no percentage goes beyond the ends.
            Bound::Percent(percent) if percent < 0.0 => len.saturating_sub((-percent / 100.0 * len as f64).round() as usize),
            Bound::Percent(percent) => ((percent / 100.0 * len as f64).round() as usize).min(len),
        };
        let (from, to) = (self.from.map_or(0, at), self.to.map_or(len, at));
        from..to.max(from)
    }
}

impl std::str::FromStr for Split {
    type Err = DataError;

    fn from_str(text: &str) -> Result<Self, DataError> {
        let refuse = |problem: &str| {
            DataError::NotFound(format!(
                "`{text}` is no split: {problem}; write a name, as in \"train\", or a slice of one: \"train[:10%]\", \"train[100:200]\""
            ))
        };
        let (name, slice) = match text.trim().split_once('[') {
            None => (text.trim(), None),
            Some((name, rest)) => (name.trim(), Some(rest.strip_suffix(']').ok_or_else(|| refuse("there is no closing `]`"))?)),
        };
        if name.is_empty() {
            return Err(refuse("it has no name"));
        }
        let bound = |text: &str| match text.trim() {
            "" => Ok(None),
            text => match text.strip_suffix('%') {
                Some(percent) => percent.trim().parse().ok().filter(|p: &f64| p.is_finite()).map(Bound::Percent),
                None => text.parse().ok().map(Bound::Row),
            }
            .map(Some)
            .ok_or_else(|| refuse(&format!("`{text}` is neither a number of records nor a percentage"))),
        };
        let (from, to) =
            slice.map_or(Ok(("", "")), |slice| slice.split_once(':').ok_or_else(|| refuse("a slice needs a `:`")))?;
        let (from, to) = (bound(from)?, bound(to)?);
        Ok(Split { name: name.to_owned(), from, to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str, len: usize) -> Range<usize> {
        text.parse::<Split>().map_or(0..usize::MAX, |split| split.rows(len))
    }

    #[test]
    fn slices_never_leave_the_split_and_neighbours_share_no_record() {
        for (text, len, expected) in [
            ("train", 1000, 0..1000),
            ("train[:10%]", 1000, 0..100),
            ("test[100:200]", 150, 100..150),
            ("train[-50:]", 1000, 950..1000),
            ("a[5:2]", 10, 5..5),
            ("a[:999%]", 10, 0..10),
            ("a[-99:]", 10, 0..10),
            ("a[-20%:]", 10, 8..10),
        ] {
            assert_eq!(rows(text, len), expected, "{text}");
        }
        for len in 0..40 {
            let cuts = ["a[:33%]", "a[33%:66%]", "a[66%:]"].map(|text| rows(text, len));
            assert_eq!(cuts.into_iter().flatten().collect::<Vec<_>>(), (0..len).collect::<Vec<_>>(), "{len}");
        }
    }

    #[test]
    fn what_is_no_split_is_refused_with_how_to_write_one() {
        for (text, problem) in [("", "no name"), ("a[1", "closing"), ("a[5]", "needs a `:`"), ("a[x:]", "`x` is neither")] {
            let error = text.parse::<Split>().err().unwrap().to_string();
            assert!(error.contains(problem) && error.contains("train[:10%]"), "{error}");
        }
    }
}
