//! The demonstration environments of `examples/environments`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rollflow::data::Prompt;
use rollflow::env::{Action, Environment, Episode, Grade, Step, ToolCall, ToolFormat, extract_tool_calls};
use serde_json::json;

use crate::environments::{CalculatorEnvironment, Corpus, GuessEnvironment, SearchEnvironment, calculate};

fn said(environment: &mut CalculatorEnvironment, text: &str) -> Step {
    let calls = extract_tool_calls(text, &ToolFormat::Xml, &environment.tools());
    let action = Action { text: text.to_owned(), calls: calls.into_iter().flatten().collect(), ..Action::default() };
    environment.step(&action, Instant::now() + Duration::from_secs(9)).unwrap()
}

#[test]
fn a_task_is_calculated_completed_and_graded() {
    let later = Instant::now() + Duration::from_secs(9);
    let mut prompt = Prompt::from("7/2=");
    prompt.metadata.insert("answer".into(), "3.50".into());
    let mut environment = CalculatorEnvironment::default();
    let episode = Episode { prompt, ..Episode::default() };
    assert_eq!(environment.reset(&episode, later).unwrap()[0].content, "7/2=");
    let step = said(&mut environment, "<calculator>7/0</calculator><calculator>7/2</calculator>");
    let results: Vec<_> = step.results.iter().map(|result| (result.content.as_str(), result.success)).collect();
    assert_eq!((results, step.done), (vec![("error: division by zero", false), ("3.5", true)], false));
    assert_eq!(environment.grade(later).unwrap().correct, Some(false), "nothing was answered");
    let step = said(&mut environment, "<complete_task>3.5</complete_task><calculator>1</calculator>");
    assert!(step.done && step.results.len() == 1);
    assert_eq!(environment.grade(later).unwrap(), Grade::correct(true));
    environment.reset(&episode, later).unwrap();
    assert_eq!(environment.observe(), json!({ "calculated": 0, "answer": null }), "a reset leaves nothing behind");
}

#[test]
fn an_expression_has_a_value_of_at_most_six_digits_after_the_point() {
    assert_eq!(calculate("2*(3 + 4)/-7").as_deref(), Ok("-2"));
    assert_eq!(calculate("1/3").as_deref(), Ok("0.333333"));
    assert_eq!(calculate("1/(2-2)").unwrap_err(), "division by zero");
}

#[test]
fn what_is_wrong_with_an_expression_is_said() {
    for (expression, problem) in
        [("", "missing"), ("1+", "missing"), ("(1", "bracket"), ("1)", "')'"), ("a", "'a'"), ("1e9", "'e'")]
    {
        assert!(calculate(expression).unwrap_err().contains(problem), "{expression}");
    }
    assert!(calculate(&"(".repeat(10_000)).is_err() && calculate(&"9".repeat(400)).is_err());
}

proptest! {
    #[test]
    fn no_expression_makes_it_panic(expression in "[0-9+*/(). -]{0,40}") {
        drop(calculate(&expression));
    }
}

/// Plays by bisection; returns the number and the reward.
fn play(seed: u64) -> (u64, f64) {
    let later = Instant::now() + Duration::from_secs(9);
    let mut game = GuessEnvironment::new(100);
    game.reset(&Episode { seed, ..Episode::default() }, later).unwrap();
    let (mut low, mut high) = (1, 100);
    loop {
        let guess = (low + high) / 2;
        let step = game.step(&Action { text: format!("not 3 but {guess}."), ..Action::default() }, later).unwrap();
        match step.messages.first().map(|message| message.content.as_str()) {
            None => return (guess, game.grade(later).unwrap().reward),
            Some("higher") => low = guess + 1,
            Some(_) => high = guess - 1,
        }
    }
}

#[test]
fn a_seed_decides_the_number_and_fewer_guesses_earn_more() {
    let games: Vec<_> = (0..20).map(play).collect();
    assert_eq!(games, (0..20).map(play).collect::<Vec<_>>());
    assert!(games.iter().any(|(number, _)| *number != games[0].0), "{games:?}");
    assert!(games.iter().all(|(_, reward)| *reward >= 0.5), "within par: {games:?}");
    let mut game = GuessEnvironment::new(100);
    let later = Instant::now() + Duration::from_secs(9);
    let said =
        |game: &mut GuessEnvironment, text: &str| game.step(&Action { text: text.into(), ..Action::default() }, later).unwrap();
    assert_eq!(said(&mut game, "none").messages[0].content, "say a number");
    assert_eq!(said(&mut game, "99999999999999999999999").messages[0].content, "lower");
    assert_eq!(game.grade(later).unwrap(), Grade::correct(false));
}

#[test]
fn rare_words_decide_and_short_texts_come_before_long_ones() {
    let corpus =
        Corpus::new(["the cat sat", "the dog sat on the mat", "the cat and the dog and the long, long walk home", "fish"]);
    assert_eq!(corpus.search("cat", 2), ["the cat sat", "the cat and the dog and the long, long walk home"]);
    assert_eq!(corpus.search("THE mat?", 1), ["the dog sat on the mat"]);
    assert!(corpus.search("bird", 3).is_empty() && Corpus::new([""; 0]).search("x", 1).is_empty());
}

#[test]
fn an_answer_is_graded_however_it_is_written() {
    let later = Instant::now() + Duration::from_secs(9);
    let corpus = Arc::new(Corpus::new(["The Aare flows through Bern.", "The Limmat flows through Zurich."]));
    let mut prompt = Prompt::from("Which river flows through Bern?");
    prompt.metadata.insert("answer".into(), "the Aare".into());
    let mut search = SearchEnvironment::new(corpus, 1);
    search.reset(&Episode { prompt, ..Episode::default() }, later).unwrap();
    let call = |name: &str, key: &str, value: &str| Action {
        calls: vec![ToolCall::new(name, [(key.to_owned(), value.into())].into_iter().collect())],
        ..Action::default()
    };
    let found = search.step(&call("search", "query", "river Bern"), later).unwrap();
    assert_eq!((found.results[0].content.as_str(), found.done), ("1. The Aare flows through Bern.", false));
    assert_eq!(search.grade(later).unwrap(), Grade::correct(false));
    assert!(search.step(&call("complete_task", "answer", " aare. "), later).unwrap().done);
    assert_eq!(search.grade(later).unwrap(), Grade::correct(true));
}
