//! Rewards by what they look at. Each builder gives a closure for `Reward::each`, [`Parts::part`](super::Parts::part) and
//! [`Compose`](super::Compose).

use regex::Regex;

use super::matching::regex_match;
use super::shaping::{overlong_penalty, repetition_penalty};
use crate::algo::answers::is_correct;
use crate::data::Sample;

/// Bounds or patterns that no response could meet, or all would.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum BuildError {
    /// A length window.
    #[error("length bounds {min}..={max} are empty; give min ≤ max and max ≥ 1")]
    Length {
        /// The shortest.
        min: usize,
        /// The longest.
        max: usize,
    },
    /// No keyword, or an empty one.
    #[error("keywords must be given, and none may be empty")]
    Keywords,
    /// No tag, or one that is no name.
    #[error("format tags must be given, and be names of letters, digits, `-` and `_`; {0:?} is none")]
    Tag(String),
    /// A regular expression.
    #[error("{0}")]
    Pattern(#[from] regex::Error),
    /// A soft limit above the hard one, or none.
    #[error("an overlong buffer of {buffer} tokens does not fit before the limit of {max}; give 1 ≤ buffer ≤ max")]
    Overlong {
        /// The limit.
        max: usize,
        /// Tokens before it over which the penalty grows.
        buffer: usize,
    },
    /// Repetition of nothing.
    #[error("runs of 0 tokens do not repeat; give n of 1 or more")]
    Repetition,
}

/// 1 if between `min` and `max` tokens were sampled, both included, else 0.
pub fn length(min: usize, max: usize) -> Result<impl Fn(&Sample) -> f64 + Clone + Send + Sync + 'static, BuildError> {
    if max == 0 || min > max {
        return Err(BuildError::Length { min, max });
    }
    Ok(move |sample: &Sample| f64::from((min..=max).contains(&sample.generated())))
}

/// The share of `words` that the response contains, whatever their case.
///
/// ```
/// use rollflow::algo::rewards::{BuildError, Compose, keywords};
/// use rollflow::data::Sample;
///
/// let sample = Sample { response: "Therefore it is so.".into(), ..Sample::default() };
/// assert_eq!(keywords(["therefore", "because"])?(&sample), 0.5);
/// let all = keywords(["therefore", "because"])?.at_least(1.0);
/// assert_eq!(all(&sample), Ok(0.0));
/// # Ok::<(), BuildError>(())
/// ```
pub fn keywords<S: Into<String>>(
    words: impl IntoIterator<Item = S>,
) -> Result<impl Fn(&Sample) -> f64 + Clone + Send + Sync + 'static, BuildError> {
    let words: Vec<String> = words.into_iter().map(|word| word.into().to_lowercase()).collect();
    if words.is_empty() || words.iter().any(String::is_empty) {
        return Err(BuildError::Keywords);
    }
    Ok(move |sample: &Sample| {
        let response = sample.response.to_lowercase();
        words.iter().filter(|word| response.contains(word.as_str())).count() as f64 / words.len() as f64
    })
}

/// 1 if the pattern matches anywhere in the response, else 0. Takes time linear in the response, whatever the pattern.
///
/// ```
/// use rollflow::algo::rewards::{BuildError, regex};
/// use rollflow::data::Sample;
///
/// let boxed = regex(r"\\boxed\{.+\}")?;
/// assert_eq!(boxed(&Sample { response: r"so \boxed{5}".into(), ..Sample::default() }), 1.0);
/// # Ok::<(), BuildError>(())
/// ```
pub fn regex(pattern: &str) -> Result<impl Fn(&Sample) -> f64 + Clone + Send + Sync + 'static, BuildError> {
    let pattern = Regex::new(pattern)?;
    Ok(move |sample: &Sample| regex_match(&sample.response, &pattern))
}

/// Sections that a response must consist of.
#[derive(Clone, Debug, PartialEq)]
pub struct FormatTags(Vec<(String, String)>);

impl FormatTags {
    /// Their names, in order.
    pub fn new<S: Into<String>>(tags: impl IntoIterator<Item = S>) -> Result<Self, BuildError> {
        let name = |tag: &String| !tag.is_empty() && tag.chars().all(|c| c.is_alphanumeric() || matches!(c, '-' | '_'));
        let tags: Vec<String> = tags.into_iter().map(Into::into).collect();
        if let Some(tag) = tags.iter().find(|tag| !name(tag)) {
            return Err(BuildError::Tag(tag.clone()));
        }
        if tags.is_empty() {
            return Err(BuildError::Tag(String::new()));
        }
        Ok(FormatTags(tags.iter().map(|tag| (format!("<{tag}>"), format!("</{tag}>"))).collect()))
    }

    /// Whether `response` is one section after the other, each once, with nothing but blanks around and between them.
    pub fn kept_by(&self, response: &str) -> bool {
        let mut rest = response.trim();
        for (open, close) in &self.0 {
            let Some((inside, behind)) = rest.strip_prefix(open.as_str()).and_then(|rest| rest.split_once(close.as_str())) else {
                return false;
            };
            if self.0.iter().any(|(open, close)| inside.contains(open.as_str()) || inside.contains(close.as_str())) {
                return false;
            }
            rest = behind.trim_start();
        }
        rest.is_empty()
    }
}

/// 1 if the response is `<tag>…</tag>` for each of the tags, in order, each once, else 0: the format reward of DeepSeek-R1 with
/// `["think", "answer"]`.
pub fn format<S: Into<String>>(
    tags: impl IntoIterator<Item = S>,
) -> Result<impl Fn(&Sample) -> f64 + Clone + Send + Sync + 'static, BuildError> {
    let tags = FormatTags::new(tags)?;
    Ok(move |sample: &Sample| f64::from(tags.kept_by(&sample.response)))
}

/// 1 if the response's final answer is the ground truth `metadata["answer"]` by [`is_correct`], else 0. A prompt without one cannot be
/// judged.
pub fn math() -> impl Fn(&Sample) -> Result<f64, &'static str> + Clone + Send + Sync + 'static {
    |sample: &Sample| {
        let answer = sample.answer().ok_or("the prompt has no ground truth, metadata[\"answer\"]")?;
        Ok(f64::from(is_correct(&sample.response, answer)))
    }
}

/// [`overlong_penalty`] of the sampled tokens: 0 down to −1.
pub fn overlong(max: usize, buffer: usize) -> Result<impl Fn(&Sample) -> f64 + Clone + Send + Sync + 'static, BuildError> {
    if buffer == 0 || buffer > max {
        return Err(BuildError::Overlong { max, buffer });
    }
    Ok(move |sample: &Sample| overlong_penalty(sample.generated(), max, buffer))
}

/// [`repetition_penalty`] of runs of `n` sampled tokens: 0 down to −1.
pub fn repetition(n: usize) -> Result<impl Fn(&Sample) -> f64 + Clone + Send + Sync + 'static, BuildError> {
    if n == 0 {
        return Err(BuildError::Repetition);
    }
    Ok(move |sample: &Sample| {
        let versions = sample.versions.per_token();
        let sampled: Vec<u32> =
            sample.tokens.iter().zip(versions).filter(|(_, version)| version.is_some()).map(|(token, _)| *token).collect();
        repetition_penalty(&sampled, n)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(response: &str) -> Sample {
        Sample { response: response.to_owned(), ..Sample::default() }
    }

    fn sampled(tokens: &[u32]) -> Sample {
        let mut sample = Sample::begin(&crate::data::Prompt::default(), 0, &[7, 7, 7, 7]);
        tokens.iter().for_each(|token| sample.push(*token, -0.5, 1));
        sample
    }

    #[test]
    fn a_form_is_kept_to_the_letter() {
        let format = format(["think", "answer"]).unwrap();
        for kept in ["<think>a</think><answer>b</answer>", "\n<think>a <b> c</think>\n\n<answer></answer> "] {
            assert_eq!(format(&said(kept)), 1.0, "{kept}");
        }
        for broken in [
            "",
            "<think>a</think>",
            "<answer>b</answer><think>a</think>",
            "x<think>a</think><answer>b</answer>",
            "<think>a</think> so <answer>b</answer>",
            "<think>a</think><answer>b</answer>.",
            "<think>a<think>b</think><answer>c</answer>",
            "<think>a</think><answer>b</answer><answer>c</answer>",
            "<think>a<answer>b</think><answer>c</answer>",
            "<think>a</think><answer>b",
        ] {
            assert_eq!(format(&said(broken)), 0.0, "{broken}");
        }
    }

    #[test]
    fn lengths_and_repetitions_are_those_of_sampled_tokens_alone() {
        let fits = length(1, 2).unwrap();
        assert_eq!([&[][..], &[1], &[1, 2], &[1, 2, 3]].map(|tokens| fits(&sampled(tokens))), [0.0, 1.0, 1.0, 0.0]);
        assert_eq!(overlong(4, 2).unwrap()(&sampled(&[1, 2, 3])), -0.5);
        assert_eq!(repetition(1).unwrap()(&sampled(&[1, 2, 1, 2])), -0.5, "and not of the prompt's");
    }

    #[test]
    fn a_prompt_without_a_ground_truth_cannot_be_judged() {
        assert!(math()(&said("5")).is_err());
    }

    #[test]
    fn bounds_that_make_no_sense_are_refused() {
        assert!(length(3, 2).is_err() && length(0, 0).is_err());
        assert!(keywords(Vec::<String>::new()).is_err() && keywords(["a", ""]).is_err());
        assert!(regex("(").is_err() && repetition(0).is_err());
        assert!(format(Vec::<String>::new()).is_err() && format(["a b"]).is_err());
        assert!(overlong(4, 5).is_err() && overlong(4, 0).is_err());
    }
}
