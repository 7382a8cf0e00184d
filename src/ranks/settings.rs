//! `[ranks]`: settings of a run of several processes.

use crate::settings::declare::{choices, section};
use crate::settings::setting::{POSITIVE, SOME};

section! {
    /// Several processes, called ranks, that train one model: `rollflow launch`, `torchrun`, `srun`
    /// or `mpirun` starts them. A run of one process ignores this section.
    pub struct Ranks {
        /// What of a trainer's state is divided among the ranks instead of held by each.
        shard: Shard = Shard::default();
        /// Copies of the divided state (HSDP): each is divided among as many ranks, whose number
        /// times this is that of all. Parameters are gathered within a copy, and gradients are
        /// summed over all.
        replicas: usize = 1, SOME;
        /// Seconds that the ranks wait at the start until all of them are there.
        start_timeout: f64 = 300.0, POSITIVE;
        /// Seconds that a rank waits in an exchange for the others, which may compute. Then the run
        /// ends.
        exchange_timeout: f64 = 1800.0, POSITIVE;
        /// Seconds without a sign of life of a rank before the run ends.
        lost_timeout: f64 = 15.0, POSITIVE;
    }
}

choices! {
    /// What of a trainer's state is divided among ranks (ZeRO).
    pub enum Shard {
        /// nothing: every rank holds parameters, gradient and moments. Sends least per step on many
        /// micro-batches.
        "nothing" => Nothing,
        /// moments (ZeRO-1): every rank holds parameters and gradient, which is summed once per update.
        "optimizer" => Optimizer,
        /// moments and the gradient's sum (ZeRO-2), to which each micro-batch is added over all ranks.
        "gradients" => Gradients,
        /// parameters, too (ZeRO-3): they are gathered layer by layer for each micro-batch, and
        /// layers are computed again in the backward pass. Needs all weights to be trained, not
        /// adapters.
        "parameters" => Parameters,
    }
}
