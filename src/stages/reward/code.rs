//! A reward for code: the share of its tests that it passes, or 1 only for all of them.

use crate::settings::declare::choices;
use std::sync::Arc;

use crate::data::Sample;
use crate::sandbox::{CodeJudge, CodeTests, Sandbox, extract_code};

choices! {
    /// Reward for passing some of the tests.
    pub enum CodeScore {
        /// the share of tests that pass.
        "share" => Share,
        /// 1 if all tests pass, else 0.
        "all" => All,
    }
}

/// Rewards code by the tests in its prompt's metadata, in a sandbox. The same code is run once for the same tests.
///
/// It is a closure's worth for [`Reward::each`](super::Reward::each): `Reward::each(move |sample| code.reward(sample))`. Programs run on the
/// threads that ask, as many at a time as the sandbox lets, each with its deadline.
#[derive(Clone, Debug)]
pub struct CodeReward {
    judge: Arc<CodeJudge>,
    score: CodeScore,
    tests: String,
    template: Option<String>,
}

impl CodeReward {
    /// Runs code there; tests are `metadata["tests"]`.
    pub fn new(sandbox: Sandbox) -> Self {
        let judge = Arc::new(CodeJudge::new(sandbox));
        CodeReward { judge, score: CodeScore::default(), tests: "tests".to_owned(), template: None }
    }

    /// What passing some tests is worth.
    pub fn score(self, score: CodeScore) -> Self {
        CodeReward { score, ..self }
    }

    /// Where in the metadata the tests are.
    pub fn tests(self, key: impl Into<String>) -> Self {
        CodeReward { tests: key.into(), ..self }
    }

    /// A program around the code, which stands where it says `{code}`; `{prompt}` is the prompt's text, for prompts that code goes on from.
    pub fn template(self, template: impl Into<String>) -> Self {
        CodeReward { template: Some(template.into()), ..self }
    }

    /// What a sample's code earns. Fails where its prompt has no tests, and where the sandbox breaks.
    pub fn reward(&self, sample: &Sample) -> Result<f64, String> {
        let tests = sample.metadata.get(&self.tests);
        let tests = tests.ok_or_else(|| format!("the prompt has no tests, metadata[{:?}]", self.tests))?;
        let tests = CodeTests::from_json(tests).map_err(|error| error.to_string())?;
        let verdict = self.judge.judge(&self.program(sample), &tests).map_err(|error| error.to_string())?;
        Ok(match self.score {
            CodeScore::Share => verdict.share(),
            CodeScore::All => f64::from(u8::from(verdict.all())),
        })
    }

    fn program(&self, sample: &Sample) -> String {
        let code = extract_code(&sample.response);
        match &self.template {
            None => code.to_owned(),
            // In one pass: what is put in is not searched again.
            Some(template) => {
                let parts = template.split("{code}").map(|part| part.replace("{prompt}", &sample.prompt.render()));
                parts.collect::<Vec<_>>().join(code)
            }
        }
    }
}
