//! A tool and several turns: a model learns the code of a safe by pressing its buttons.
//!
//! In each turn the model writes a digit, which is read as a call of the tool `press`. The environment answers what happened, the model reads that
//! and continues. Each right button earns something, and the open safe ends the rollout. Only what the model wrote is trained.
//!
//!     cargo run --release --example tools

use std::time::Instant;

use rollflow::data::ChatMessage;
use rollflow::data::DataBuffer;
use rollflow::env::{Action, EnvError, Environment, Episode, Grade, Step, ToolCall, ToolResult, ToolSpec};
use rollflow::model::ModelConfig;
use rollflow::prelude::*;
use rollflow::rollout::Agent;
use serde_json::json;

const SEED: u64 = 3;
const STEPS: u64 = 40;
const GROUPS_PER_STEP: usize = 16;
const CODE: [&str; 2] = ["4", "2"];

/// One safe for each rollout.
#[derive(Default)]
struct Safe {
    pressed: usize,
}

impl Environment for Safe {
    fn reset(&mut self, episode: &Episode, _: Instant) -> Result<Vec<ChatMessage>, EnvError> {
        self.pressed = 0;
        Ok(episode.conversation())
    }

    fn tools(&self) -> Vec<ToolSpec> {
        let arguments = json!({ "type": "object", "properties": { "digit": { "type": "string" } }, "required": ["digit"] });
        vec![ToolSpec::new("press", "Presses a button.", arguments)]
    }

    fn step(&mut self, action: &Action, _: Instant) -> Result<Step, EnvError> {
        // A turn without a call is the model's last word.
        let Some(call) = action.calls.first() else { return Ok(Step::over()) };
        if call.text("digit") != Some(CODE[self.pressed]) {
            return Ok(Step::results(vec![ToolResult::of(call, "no")]));
        }
        self.pressed += 1;
        let opened = self.pressed == CODE.len();
        let result = ToolResult::of(call, if opened { "open" } else { "click" });
        Ok(Step::results(vec![result]).reward(0.5).done(opened))
    }

    fn grade(&mut self, _: Instant) -> Result<Grade, EnvError> {
        Ok(Grade::default())
    }
}

/// How this model writes calls: a digit presses its button.
fn presses(text: &str, _: &[ToolSpec]) -> Vec<Result<ToolCall, ToolResult>> {
    let digits = text.chars().filter(char::is_ascii_digit);
    digits
        .map(|digit| Ok(ToolCall::new("press", [("digit".to_owned(), digit.to_string().into())].into_iter().collect())))
        .collect()
}

/// What the turns and the grade of a rollout come to.
fn earned(sample: &Sample) -> f64 {
    sample.metadata["environment_reward"].as_f64().unwrap_or(f64::NAN)
}

fn main() -> anyhow::Result<()> {
    let tokenizer = Tokenizer::characters("0123456789abcdefghijklmnopqrstuvwxyz: \n", 43)?;
    // A turn ends with the first digit.
    let digits = tokenizer.encode("0123456789")?;
    let sampling = SamplingParams { max_new_tokens: 8, stop_token_ids: digits, ..SamplingParams::default() };
    let policy = Policy::random(ModelConfig::small(&tokenizer, 32, 2), tokenizer, SEED)?;
    let backend = policy.backend(LocalConfig::new(Grpo::default(), Schedule::constant(3e-3)))?;
    let agent = Agent::new(Safe::default).parser(presses).limits(|limits| limits.max_turns = 4);

    let mut flow = Flow::new("tools").max_staleness(1);
    let prompts = Prompts::new(DataBuffer::new(["the safe:"], SEED)?);
    let prompts = flow.source("prompts", prompts);
    let generator = Generator::local(&policy).group_size(8).sampling(sampling).environment(agent);
    let groups = flow.stage("generate", prompts, generator);
    let scored = flow.stage("reward", groups, Reward::each(earned));
    let batches = flow.stage("batch", scored, Batcher::groups(GROUPS_PER_STEP));
    let trainer = Trainer::new(backend).advantages(GroupMean::default()).steps(STEPS);
    let trained = flow.stage("train", batches, trainer);
    let synced = flow.stage("sync", trained, WeightSync::default());
    let log = RunLog::new(&Metrics::new()).logger(log_to_console(10, |line| println!("{line}"))).each(|step: &Trained<_>| {
        if let Some(sample) = step.batch.samples().next().filter(|_| step.step.is_multiple_of(10)) {
            println!("  {:?} in {} turns", sample.response, sample.metadata["turns"]);
        }
    });
    flow.sink("log", synced, log);

    println!("\n{}", flow.run(Until::finished())?);
    Ok(())
}
