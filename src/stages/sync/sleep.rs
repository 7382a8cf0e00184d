//! Servers that sleep while the trainer takes a step, on the same GPU.

use super::EvaluationHold;
use crate::data::Batch;
use crate::engine::remote::sync::WeightSyncManager;
use crate::flow::{AsyncIo, AsyncStage, StageError};

/// Stage before the trainer of a synchronous run that publishes after every step: puts the servers to sleep
/// once a step's batch is complete, and passes it on. The sync of the next version wakes them
/// ([`RemoteSync`](super::RemoteSync)).
///
/// Parts of a batch wait for the last one, because servers work on the others until then, and a batch for an
/// evaluation on the same servers.
pub struct SleepServers {
    manager: WeightSyncManager,
    hold: Option<EvaluationHold>,
}

impl SleepServers {
    /// Puts the engines of `manager` to sleep.
    pub fn new(manager: WeightSyncManager) -> Self {
        SleepServers { manager, hold: None }
    }

    /// Waits for the evaluations of each version.
    pub fn hold(self, hold: &EvaluationHold) -> Self {
        SleepServers { hold: Some(hold.clone()), ..self }
    }
}

impl AsyncStage for SleepServers {
    type In = Batch;
    type Out = Batch;

    async fn run(&mut self, io: &mut AsyncIo<Batch, Batch>) -> Result<(), StageError> {
        let (mut batch, mut batches) = (Batch::default(), 0);
        while let Some(part) = io.recv().await? {
            batch.append(part);
            if batch.more {
                continue;
            }
            batches += 1;
            if let Some(hold) = &self.hold {
                tokio::select! {
                    () = io.stopped() => return Ok(()),
                    // The first weights are evaluated before the first batch, and each step before the next.
                    () = hold.passed(batches) => {}
                }
            }
            self.manager.sleep().await;
            io.send(std::mem::take(&mut batch)).await?;
        }
        Ok(())
    }
}
