//! A reward for code: the share of its tests that pass, or 1 only if all do.

use crate::data::Sample;
use crate::sandbox::{Sandbox, SandboxError, SandboxRule, extract_code};
use crate::settings::declare::{choices, section};
use crate::settings::setting::Limit;

const TEMPLATE: Limit<String> = Limit { text: "a program with `{code}` in it", holds: |text| text.contains("{code}") };

choices! {
    /// Reward for passing some of the tests.
    pub enum CodeScore {
        /// the share of tests that pass.
        "share" => Share,
        /// 1 if all tests pass, else 0.
        "all" => All,
    }
}

section! {
    /// Runs Python code against tests: the completion's last code block, or the whole completion.
    /// Tests are asserts, or pairs of input and output.
    pub struct CodeRule {
        first sandbox: SandboxRule;
        /// Reward for passing some of the tests.
        score: CodeScore = CodeScore::default();
        /// Program that is run, with the placeholders `{code}` and `{prompt}`; the latter is for
        /// code that continues its prompt.
        template: String = "{code}".to_owned(), TEMPLATE;
    }
}

/// Rewards code by the tests in its prompt's metadata, in a sandbox.
///
/// Use it as `Reward::each(move |sample| code.reward(sample))`. Programs run while the calling
/// threads wait, as many at a time as the sandbox allows. The same code and tests run once.
#[derive(Clone, Debug)]
pub struct CodeReward {
    sandbox: Sandbox,
    rule: CodeRule,
}

impl CodeReward {
    /// Sets up the sandbox and checks that it works on this machine.
    pub fn new(rule: CodeRule) -> Result<Self, SandboxError> {
        Ok(CodeReward::in_sandbox(rule.sandbox.sandbox()?, rule))
    }

    /// Runs code in `sandbox` instead of the one that `rule` describes.
    pub fn in_sandbox(sandbox: Sandbox, rule: CodeRule) -> Self {
        CodeReward { sandbox, rule }
    }

    /// Computes the reward of a sample. Fails if its prompt has no tests or the sandbox fails.
    pub fn reward(&self, sample: &Sample) -> Result<f64, String> {
        let key = &self.rule.sandbox.tests;
        let tests = sample.metadata.get(key);
        let tests = tests.ok_or_else(|| format!("the prompt has no tests, metadata[{key:?}]"))?;
        let results = self.sandbox.test(&self.program(sample), tests).map_err(|error| error.to_string())?;
        let passed = results.iter().filter(|result| result.is_ok()).count();
        Ok(match self.rule.score {
            CodeScore::Share => passed as f64 / results.len() as f64,
            CodeScore::All => f64::from(u8::from(passed == results.len())),
        })
    }

    fn program(&self, sample: &Sample) -> String {
        let code = extract_code(sample.last_turn());
        // One pass: placeholders inside the code or the prompt stay as they are.
        let parts = self.rule.template.split("{code}").map(|part| part.replace("{prompt}", &sample.prompt.render()));
        parts.collect::<Vec<_>>().join(code)
    }
}
