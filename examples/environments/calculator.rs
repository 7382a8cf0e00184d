//! A question with two tools: a calculator, and one that submits the answer.

use std::time::Instant;

use rollflow::data::ChatMessage;
use rollflow::env::{Action, EnvError, Environment, Episode, Grade, Step, ToolCall, ToolResult, ToolSpec};
use serde_json::{Value, json};

/// Deepest nesting of brackets and signs that is evaluated.
const DEPTH: usize = 64;

/// A task with the tools `calculator` and `complete_task`.
///
/// The model may call `calculator` any number of times. `complete_task` submits the answer and ends
/// the episode. The answer is compared with the prompt's reference answer as a number, or else as
/// text.
#[derive(Clone, Debug, Default)]
pub struct CalculatorEnvironment {
    truth: Option<String>,
    answer: Option<String>,
    calculated: u64,
}

impl CalculatorEnvironment {
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
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
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

    /// Runs the calls up to the answer; later ones are ignored.
    fn step(&mut self, action: &Action, _: Instant) -> Result<Step, EnvError> {
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

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
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

/// Evaluates an expression of numbers, `+ - * /` and brackets, or returns the error.
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
