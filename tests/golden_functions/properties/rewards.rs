//! Reward functions: form, length, repetition, answers; combinations of several.

use proptest::prelude::*;
use rollflow::algo::rewards::{
    Aggregator, Combine, Parts, exact_match, exact_reward, format_reward, keywords_reward, length_reward, math_reward,
    numeric_reward, overlong_reward, regex_reward, repetition_reward,
};
use rollflow::data::{Prompt, Sample};
use serde_json::json;

#[test]
fn each_way_is_its_formula() {
    let values = [0.5, -2.0, 4.0];
    let of = |combine| Aggregator::new(combine).aggregate(&values).unwrap();
    assert_eq!((of(Combine::Sum), of(Combine::Min), of(Combine::Product)), (2.5, -2.0, -4.0));
    assert_eq!(Aggregator::weighted([2.0, 1.0, 0.25]).aggregate(&values), Ok(0.0));
    assert_eq!(Aggregator::custom(|values| values[2]).aggregate(&values), Ok(4.0));
}

#[test]
fn a_gate_includes_its_threshold_and_shuts_off_everything() {
    let gated = |least| Aggregator::new(Combine::Min).at_least([None, Some(least)]).aggregate(&[3.0, 0.5]);
    assert_eq!((gated(0.5), gated(0.51)), (Ok(0.5), Ok(0.0)));
}

proptest! {
    #[test]
    fn a_lexicographic_order_is_that_of_the_levels(a in prop::collection::vec(0_u32..5, 4), b in prop::collection::vec(0_u32..5, 4)) {
        let value = |levels: &[u32]| {
            let values: Vec<f64> = levels.iter().map(|level| f64::from(*level) / 4.0).collect();
            Aggregator::new(Combine::Lexicographic).levels(5).aggregate(&values).unwrap()
        };
        prop_assert_eq!(value(&a).total_cmp(&value(&b)), a.cmp(&b));
        prop_assert!((0.0..=1.0).contains(&value(&a)));
    }
}

#[test]
fn what_makes_no_number_is_refused() {
    let sum = Aggregator::default;
    let refused = |values: &[f64], aggregator: Aggregator| aggregator.aggregate(values).unwrap_err();
    assert!(refused(&[], sum()).contains("at least one reward"));
    assert!(refused(&[1.0], Aggregator::weighted([])).starts_with("there are 0 weights or thresholds for 1 values"));
    assert!(refused(&[1.0, 2.0], Aggregator::weighted([1.0])).starts_with("there are 1 weights or thresholds for 2 values"));
    assert!(refused(&[1.0], sum().at_least([None, None])).starts_with("there are 2 weights or thresholds for 1 values"));
    assert!(refused(&[1.0, f64::NAN], Aggregator::new(Combine::Min)).starts_with("value 1 is NaN"));
    assert!(refused(&[f64::MAX; 2], sum()).starts_with("value 2 is inf"));
    assert!(refused(&[1.0], Aggregator::new(Combine::Custom)).contains("needs its function"));
    for (levels, values) in [(1, 2), (0, 2), (10, 16), (u32::MAX, 2)] {
        let refused = refused(&vec![0.0; values], Aggregator::new(Combine::Lexicographic).levels(levels));
        assert!(refused.starts_with(&format!("{levels} levels of {values} values")), "{refused}");
    }
}

#[test]
fn a_value_from_elsewhere_is_a_part_like_any_other() {
    let parts = Parts::default().part("here", |_: &Sample| 1.0).remote("there");
    let output = parts.reward_with(&Sample::default(), &[("there", Some(0.5))].into()).unwrap();
    assert_eq!((output.reward, output.parts["there"]), (1.5, 0.5));
    assert_eq!(parts.reward(&Sample::default()).unwrap_err(), "its part \"there\": no service gave its value");
}

#[test]
fn a_part_that_fails_is_named() {
    let parts = Parts::default().part("good", |_: &Sample| 1.0).part("bad", |_: &Sample| Err::<f64, _>("no key"));
    assert_eq!(parts.reward(&Sample::default()).unwrap_err(), "its part \"bad\": no key");
    let parts = Parts::default().part("wild", |_: &Sample| f64::NAN);
    assert_eq!(
        parts.reward(&Sample::default()).unwrap_err(),
        "its part \"wild\" is NaN, not a finite number of at most 1e100 either way"
    );
}

/// A sample of a prompt whose reference answer is this.
fn answered(answer: &str, response: &str) -> Sample {
    let mut prompt = Prompt::from("3+2=");
    prompt.metadata.insert("answer".into(), answer.into());
    Sample { response: response.to_owned(), ..Sample::begin(&prompt, 0, &[1]) }
}

#[test]
fn text_and_numbers_match() {
    assert_eq!((exact_match(" 12\n", "12"), exact_match("12.0", "12")), (1.0, 0.0));
    for (text, tolerance, earned) in [("so 12.04", 0.05, 1.0), ("so 12.06", 0.05, 0.0), ("?", 1.0, 0.0)] {
        assert_eq!(numeric_reward(tolerance)(&answered("12", text)), Ok(earned), "{text}");
    }
}

#[test]
fn a_prompt_without_a_ground_truth_cannot_be_judged() {
    let sample = Sample { response: "5".to_owned(), ..Sample::default() };
    for reward in [math_reward(), exact_reward(), numeric_reward(0.0)] {
        assert!(reward(&sample).is_err());
    }
}

/// A sample whose policy called a tool, got `result` and ended with `last`.
fn with_a_tool(answer: &str, result: &str, last: &str) -> Sample {
    let mut sample = answered(answer, &format!("<call>6*2</call>{result}{last}"));
    sample.push(2, -0.5, 1);
    sample.give(&[3]);
    sample.push(4, -0.5, 1);
    let turns = json!([
        {"role": "user", "content": "3+2="},
        {"role": "assistant", "content": "<call>6*2</call>"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": last},
    ]);
    sample.metadata.insert("conversation".into(), turns);
    sample
}

#[test]
fn rewards_of_a_text_judge_the_last_turn_of_the_policy_and_no_text_of_a_tool() {
    let rewards = [
        math_reward(),
        exact_reward(),
        numeric_reward(0.0),
        regex_reward("(12)").unwrap(),
        keywords_reward(&["12"]).unwrap(),
        format_reward(&["answer"]).unwrap(),
    ];
    for reward in &rewards {
        assert_eq!(reward(&with_a_tool("12", "<answer>12</answer>", "I do not know.")), Ok(0.0));
    }
    for reward in &rewards[..5] {
        assert_eq!(reward(&with_a_tool("12", "error: 7", "12")), Ok(1.0));
    }
    assert_eq!(rewards[5](&with_a_tool("12", "12", "<answer>12</answer>")), Ok(1.0));
    let mut single = answered("12", "12");
    single.push(2, -0.5, 1);
    single.metadata.insert("conversation".into(), json!([{"role": "assistant", "content": "of the data"}]));
    assert_eq!(exact_reward()(&single), Ok(1.0), "a column of the data is no conversation of the rollout");
}

#[test]
fn a_form_is_kept_to_the_letter() {
    let reward = format_reward(&["think", "answer"]).unwrap();
    let earned = |response: &str| reward(&Sample { response: response.to_owned(), ..Sample::default() });
    for kept in ["<think>a</think><answer>b</answer>", "\n<think>a <b> c</think>\n\n<answer></answer> "] {
        assert_eq!(earned(kept), Ok(1.0), "{kept}");
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
        assert_eq!(earned(broken), Ok(0.0), "{broken}");
    }
    assert!(format_reward(&[""; 0]).is_err() && format_reward(&["a b"]).is_err());
}

#[test]
fn the_share_of_words_counts_in_any_case() {
    let sample = Sample { response: "Therefore it is so.".into(), ..Sample::default() };
    assert_eq!(keywords_reward(&["therefore", "Because"]).unwrap()(&sample), Ok(0.5));
    assert!(keywords_reward(&[""; 0]).is_err() && keywords_reward(&["a", ""]).is_err());
}

#[test]
fn a_group_is_compared_with_the_answer_and_a_pattern_without_one_only_matches() {
    let sample = |response: &str| answered("5", response);
    let boxed = regex_reward(r"\\boxed\{(.+)\}").unwrap();
    let earned = [r"so \boxed{5}", r"so \boxed{6}", "5"].map(|response| boxed(&sample(response)));
    assert_eq!(earned, [Ok(1.0), Ok(0.0), Ok(0.0)]);
    let plain = regex_reward(r"^<think>.*</think>").unwrap();
    assert_eq!((plain(&sample("<think>a</think>b")), plain(&sample("a"))), (Ok(1.0), Ok(0.0)));
    assert!(boxed(&Sample { response: r"\boxed{5}".to_owned(), ..Sample::default() }).is_err(), "no answer to compare");
    assert!(regex_reward("(").is_err());
}

/// A prompt of four equal tokens, and these.
fn sampled(tokens: &[u32]) -> Sample {
    let mut sample = Sample::begin(&Prompt::default(), 0, &[7, 7, 7, 7]);
    tokens.iter().for_each(|token| sample.push(*token, -0.5, 1));
    sample
}

#[test]
fn lengths_are_those_of_sampled_tokens_alone() {
    let fits = length_reward(1, 2).unwrap();
    assert_eq!([0, 1, 2, 3].map(|count| fits(&sampled(&vec![1; count]))), [Ok(0.0), Ok(1.0), Ok(1.0), Ok(0.0)]);
}

#[test]
fn the_overlong_penalty_grows_over_the_buffer_and_stays_at_the_end() {
    let penalty = overlong_reward(20, 100).unwrap();
    let penalties = [0, 80, 81, 90, 100, 101, 500].map(|count| penalty(&sampled(&vec![1; count])).unwrap());
    assert_eq!(penalties, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]);
}

#[test]
fn repetition_is_the_share_of_sampled_runs_that_were_there_before() {
    let penalty = |tokens: &[u32], n| repetition_reward(n).unwrap()(&sampled(tokens)).unwrap();
    assert_eq!((penalty(&[1, 2, 3], 2), penalty(&[1, 2, 1, 2, 1], 2), penalty(&[1; 100], 1)), (0.0, -0.5, -0.99));
    assert_eq!((penalty(&[1, 1], 3), penalty(&[], 1), penalty(&[1, 2, 1, 2], 1)), (0.0, 0.0, -0.5));
}

#[test]
fn bounds_that_make_no_sense_are_refused() {
    assert!(length_reward(3, 2).is_err() && length_reward(0, 0).is_err());
    assert!(overlong_reward(5, 4).is_err() && overlong_reward(0, 4).is_err() && repetition_reward(0).is_err());
}
