//! Stages of your own: one that computes and keeps state, on a thread, and one that waits, on tokio.
//!
//! A stage owns its loop: receive, work, send, until there is nothing more to receive. Waiting is the engine's business, which is why
//! drain, stop and the accounting of time work without a line of code here.
//!
//!     cargo run --example custom_stage

use std::collections::HashSet;
use std::time::Duration;

use rollflow::flow::from_iter;
use rollflow::flow::{AsyncIo, AsyncStage};
use rollflow::prelude::*;

/// Lets every question pass once.
#[derive(Default)]
struct Deduplicate {
    seen: HashSet<String>,
    repeated: usize,
}

impl Stage for Deduplicate {
    type In = String;
    type Out = String;

    fn run(&mut self, io: &mut Io<String, String>) -> Result<(), StageError> {
        while let Some(question) = io.recv()? {
            if self.seen.insert(question.clone()) {
                io.send(question)?;
            } else {
                self.repeated += 1;
            }
        }
        println!("{} questions, {} repeated", self.seen.len(), self.repeated);
        Ok(())
    }
}

/// Asks a slow service. It waits rather than computes, so eight of them share the runtime's threads.
struct Ask {
    latency: Duration,
}

impl AsyncStage for Ask {
    type In = String;
    type Out = (String, usize);

    async fn run(&mut self, io: &mut AsyncIo<String, (String, usize)>) -> Result<(), StageError> {
        while let Some(question) = io.recv().await? {
            tokio::time::sleep(self.latency).await;
            let answer = question.len();
            io.send((question, answer)).await?;
        }
        Ok(())
    }

    /// Answers come in the order of the questions, whichever is ready first.
    fn spec(&self) -> StageSpec {
        StageSpec::default().workers(8).ordered().knob("workers")
    }

    fn replica(&self) -> Option<Self> {
        Some(Ask { latency: self.latency })
    }
}

fn main() -> anyhow::Result<()> {
    let questions = (0..200).map(|n| format!("How long is question {}?", n % 50));

    let mut flow = Flow::new("questions");
    let asked = flow.source("questions", from_iter(questions));
    let unique = flow.stage("deduplicate", asked, Deduplicate::default());
    let answered = flow.stage("ask", unique, Ask { latency: Duration::from_millis(20) });
    flow.sink("print", answered, |(question, answer): (String, usize)| println!("{question} {answer}"));

    println!("\n{}", flow.run(Until::finished())?);
    Ok(())
}
