//! GRPO by hand: generate, score, compare, learn, in straight code without a graph. The same types and functions as in a pipeline, one step
//! at a time, to look at whatever lies between.
//!
//!     cargo run --release --example by_hand

use std::sync::Arc;

use rollflow::algo::rewards::exact_match;
use rollflow::data::DataBuffer;
use rollflow::data::arithmetic;
use rollflow::model::ModelConfig;
use rollflow::prelude::*;
use rollflow::train::{assign_advantages, collate};

const SEED: u64 = 0;
const STEPS: u64 = 20;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let tokenizer = Tokenizer::characters("0123456789+=", 16)?;
    let policy = Policy::random(ModelConfig::small(&tokenizer, 64, 2), tokenizer, SEED)?;
    let backend = policy.backend(LocalConfig::new(Grpo::default(), Schedule::constant(2e-3)))?;
    let (publisher, published) = weights();
    let generator = Generator::local(&policy).weights(published).group_size(8).max_new_tokens(3).seed(SEED).start()?;
    let mut prompts = DataBuffer::new(arithmetic::addition(1).iter().map(Prompt::from), SEED)?.shuffled();

    for step in 1..=STEPS {
        // Generate eight completions for each of sixteen prompts, with the weights of the last step. Another call may overlap what follows.
        let snapshot = backend.snapshot().await?;
        publisher.publish(snapshot.version, snapshot.weights)?;
        let mut groups = generator.generate_batch(&prompts.get_prompts(16)).await?;

        // Score: half for a number, all for the right one.
        for sample in groups.iter_mut().flat_map(|group| &mut group.samples) {
            sample.reward = Some(reward(sample));
        }

        // Compare the answers to the same prompt.
        let mut batch = Batch { groups, ..Batch::default() };
        assign_advantages(&mut batch, &GroupMean::default())?;

        // Learn: loss and gradient over all tokens, then one update.
        let samples: Vec<&Sample> = batch.samples().collect();
        let forward = backend.forward_backward(Arc::new(collate(&samples, Aggregation::TokenMean)?)).await?;
        let update = backend.optim_step().await?;

        let mean = batch.rewards().sum::<f64>() / samples.len() as f64;
        if step % 2 == 0 {
            println!("step {step}: reward {mean:.3}, loss {:.4}, gradient {:.3}", forward.loss, update.grad_norm);
        }
    }
    Ok(())
}

/// An untrained model is never right by chance in three tokens; that it answers with a number at all is what it can find first.
fn reward(sample: &Sample) -> f64 {
    let number = !sample.response.is_empty() && sample.response.chars().all(|c| c.is_ascii_digit());
    let right = exact_match(&sample.response, sample.metadata["answer"].as_str().unwrap_or_default());
    f64::from(number) * (0.5 + 0.5 * right)
}
