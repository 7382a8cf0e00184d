//! REINFORCE as a loss of one's own, and the whole command with it: one function, and one registration.
//!
//!     cargo run --release --example own_loss -- run pipelines/recipes/grpo.toml --set 'train.loss={kind="custom",name="reinforce"}'
//!
//! `check`, `resume`, `replay` and `simulate` know the name too. Without arguments a few small steps are taken.

use std::process::ExitCode;

use rollflow::algo::{LossError, LossInputs, LossOutput};
use rollflow_pipelines::{Registry, command};

/// Williams (1992): −A · log π, weighed as the recipe's aggregation says. The derivative for each log-probability is −A · weight.
fn reinforce(inputs: &LossInputs) -> Result<LossOutput, LossError> {
    let grad: Vec<f64> = inputs.advantages.iter().zip(inputs.weights).map(|(advantage, weight)| -advantage * weight).collect();
    let loss = grad.iter().zip(inputs.log_probs).map(|(slope, log_prob)| slope * log_prob).sum();
    Ok(LossOutput::new(loss, grad))
}

fn main() -> ExitCode {
    let registry = Registry::default().loss("reinforce", reinforce);
    if std::env::args().len() > 1 {
        return command(registry);
    }
    // What the command would do with these arguments, in a folder that is thrown away.
    let folder = std::env::temp_dir().join(format!("own-loss-{}", std::process::id()));
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/grpo.toml");
    let sets = [
        "train.loss={kind=\"custom\",name=\"reinforce\"}",
        "train.steps=10",
        "sft.steps=10",
        "batch.groups=8",
        "train.target_reward=1.0",
        "observe.log_every=2",
    ];
    let out = folder.display().to_string();
    let args = ["own_loss", "run", recipe, "--out", &out].into_iter().chain(sets.into_iter().flat_map(|set| ["--set", set]));
    let code = rollflow_pipelines::command_with(registry, args);
    std::fs::remove_dir_all(&folder).ok();
    code
}
