//! A question, a calculator, and a way to say the answer.

use serde_json::{Value, json};

use super::{Action, Deadline, EnvError, Environment, Episode, Grade, Step, ToolCall, ToolResult, ToolSpec};
use crate::data::ChatMessage;

/// Deepest nesting of brackets and signs that is followed.
const DEPTH: usize = 64;

/// The model may call `calculator` with an expression as often as it likes, and says its answer with `complete_task`, which ends the episode.
/// It is right if the answer is the prompt's ground truth, as a number or else as text.
#[derive(Clone, Debug, Default)]
pub struct CalculatorEnvironment {
    truth: Option<String>,
    answer: Option<String>,
    calculated: u64,
}

impl CalculatorEnvironment {
    /// Before its reset.
    pub fn new() -> Self {
        CalculatorEnvironment::default()
    }

    fn call(&mut self, call: &ToolCall) -> ToolResult {
        match call.name.as_str() {
            "calculator" => {
                self.calculated += 1;
                match calculate(call.text("expression").unwrap_or_default()) {
                    Ok(value) => ToolResult::of(call, value),
                    Err(why) => ToolResult::failed(call, why),
                }
            }
            _ => {
                self.answer = Some(call.text("answer").unwrap_or_default().trim().to_owned());
                ToolResult::of(call, "done")
            }
        }
    }
}

impl Environment for CalculatorEnvironment {
    fn reset(&mut self, episode: &Episode, _: Deadline) -> Result<Vec<ChatMessage>, EnvError> {
        let truth = episode.prompt.answer().map(str::to_owned);
        *self = CalculatorEnvironment { truth, ..CalculatorEnvironment::default() };
        Ok(episode.conversation())
    }

    fn tools(&self) -> Vec<ToolSpec> {
        let only = |name: &str, of: &str| json!({ "type": "object", "properties": { name: { "type": "string", "description": of } }, "required": [name] });
        vec![
            ToolSpec::new("calculator", "Works an expression out.", only("expression", "Numbers, + - * / and brackets.")),
            ToolSpec::new("complete_task", "Ends the task with its answer.", only("answer", "The answer.")),
        ]
    }

    /// Calls after the answer are not run.
    fn step(&mut self, action: &Action, _: Deadline) -> Result<Step, EnvError> {
        let mut results = Vec::new();
        for call in &action.calls {
            results.push(self.call(call));
            if self.answer.is_some() {
                return Ok(Step::results(results).done(true));
            }
        }
        Ok(Step::results(results))
    }

    fn observe(&self) -> Value {
        json!({ "calculated": self.calculated, "answer": self.answer })
    }

    fn grade(&mut self, _: Deadline) -> Result<Grade, EnvError> {
        let number = |text: &String| text.parse::<f64>().ok();
        let correct = match (&self.answer, &self.truth) {
            (_, None) => return Err(EnvError::new("the prompt has no ground truth, metadata[\"answer\"], to grade by")),
            (None, _) => false,
            (Some(answer), Some(truth)) => match (number(answer), number(truth)) {
                (Some(answer), Some(truth)) => (answer - truth).abs() <= 1e-9 * truth.abs().max(1.0),
                _ => answer == truth,
            },
        };
        Ok(Grade::correct(correct))
    }
}

/// The value of an expression of numbers, `+ - * /` and brackets, or what is wrong with it.
///
/// ```
/// use rollflow::env::calculate;
///
/// assert_eq!(calculate("2*(3 + 4)/-7").as_deref(), Ok("-2"));
/// assert_eq!(calculate("1/3").as_deref(), Ok("0.333333"));
/// assert_eq!(calculate("1/(2-2)").unwrap_err(), "division by zero");
/// ```
pub fn calculate(expression: &str) -> Result<String, String> {
    let symbols: Vec<char> = expression.chars().filter(|c| !c.is_whitespace()).collect();
    let mut reader = Reader { symbols: &symbols, at: 0 };
    let value = reader.sum(DEPTH)?;
    if let Some(rest) = reader.next() {
        return Err(format!("{rest:?} was not expected there"));
    }
    if !value.is_finite() || value.abs() >= 1e15 {
        return Err("the value is too large".to_owned());
    }
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    Ok(if text == "-0" { "0" } else { text }.to_owned())
}

struct Reader<'a> {
    symbols: &'a [char],
    at: usize,
}

impl Reader<'_> {
    fn next(&self) -> Option<char> {
        self.symbols.get(self.at).copied()
    }

    fn take(&mut self, wanted: &[char]) -> Option<char> {
        let found = self.next().filter(|symbol| wanted.contains(symbol))?;
        self.at += 1;
        Some(found)
    }

    fn sum(&mut self, depth: usize) -> Result<f64, String> {
        let mut value = self.product(depth)?;
        while let Some(sign) = self.take(&['+', '-']) {
            let next = self.product(depth)?;
            value += if sign == '+' { next } else { -next };
        }
        Ok(value)
    }

    fn product(&mut self, depth: usize) -> Result<f64, String> {
        let mut value = self.factor(depth)?;
        while let Some(sign) = self.take(&['*', '/']) {
            let next = self.factor(depth)?;
            if sign == '/' && next == 0.0 {
                return Err("division by zero".to_owned());
            }
            value = if sign == '*' { value * next } else { value / next };
        }
        Ok(value)
    }

    fn factor(&mut self, depth: usize) -> Result<f64, String> {
        let Some(depth) = depth.checked_sub(1) else { return Err("it is nested too deeply".to_owned()) };
        if self.take(&['-']).is_some() {
            return Ok(-self.factor(depth)?);
        }
        if self.take(&['(']).is_some() {
            let value = self.sum(depth)?;
            return self.take(&[')']).map(|_| value).ok_or_else(|| "a bracket is not closed".to_owned());
        }
        let from = self.at;
        while self.next().is_some_and(|symbol| symbol.is_ascii_digit() || symbol == '.') {
            self.at += 1;
        }
        let number: String = self.symbols[from..self.at].iter().collect();
        match (number.parse(), self.next()) {
            (Ok(value), _) => Ok(value),
            (Err(_), None) => Err("a number is missing at the end".to_owned()),
            (Err(_), Some(symbol)) => Err(format!("a number was expected before {symbol:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::data::Prompt;
    use crate::env::{ToolFormat, extract_tool_calls};

    fn said(environment: &mut CalculatorEnvironment, text: &str) -> Step {
        let calls = extract_tool_calls(text, &ToolFormat::Xml, &environment.tools());
        let action = Action { text: text.to_owned(), calls: calls.into_iter().flatten().collect(), ..Action::default() };
        environment.step(&action, Deadline::within(Duration::from_secs(9))).unwrap()
    }

    #[test]
    fn a_task_is_calculated_completed_and_graded() {
        let later = Deadline::within(Duration::from_secs(9));
        let mut prompt = Prompt::from("7/2=");
        prompt.metadata.insert("answer".into(), "3.50".into());
        let mut environment = CalculatorEnvironment::new();
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
}
