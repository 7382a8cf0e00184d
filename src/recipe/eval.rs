//! `[eval]`: evaluation during training, and by `rollflow eval`.

use super::task::Task;
use crate::settings::declare::section;
use crate::settings::setting::{FINITE, POSITIVE, SHARE, SOME, SOME_IF_GIVEN};

section! {
    /// Evaluation during the training, pinned to published weights, and the questions of `rollflow
    /// eval`. `[reward]` judges completions; with `[environment]` each is a multi-turn rollout. The
    /// pipelines `dpo` and `reward_model` judge held-out pairs instead and sample nothing: they
    /// take `every`, `task`, `limit` and `threads` alone. Training does not wait for an evaluation,
    /// except in a synchronous run (`flow.max_staleness = 0`), in `sft` and in `grpo_offline`,
    /// which log a step after its evaluation. With `[engine]` the servers of the run answer, and
    /// get no newer weights during an evaluation.
    pub struct Eval {
        /// Optimizer steps between evaluations, a multiple of `sync.every`. The weights before the
        /// first step are evaluated too, and those after the last if they are published. 0 leaves
        /// evaluation to `rollflow eval`.
        every: u64 = 50;
        /// Prompts, as in `[task]`. Left out: the run's own task, or the pairs that
        /// `reward_model.held_out` holds out.
        task: Option<Task> = None;
        /// Number of prompts, from the start. Left out: all.
        limit: Option<usize> = None, SOME_IF_GIVEN;
        /// Completions sampled per prompt, for pass@1 up to pass@`samples`; 0 samples none.
        samples: u32 = 4;
        /// If true, each prompt also gets one greedy completion.
        greedy: bool = true;
        /// Divisor of the logits of sampled completions.
        temperature: f64 = 1.0, POSITIVE;
        /// Total probability of the likeliest tokens that are kept; 1 keeps all.
        top_p: f64 = 1.0, SHARE;
        /// Longest completion, or turn of a rollout, in tokens. Left out:
        /// `generate.max_new_tokens`.
        max_new_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// Smallest reward of a right completion.
        success: f64 = 1.0, FINITE;
        /// Completions generated at the same time. Left out with servers: `flow.window` ×
        /// `generate.group_size`.
        #[formerly(slots)]
        max_num_seqs: usize = 64, SOME;
        /// Threads that generate them. No core is reserved for them.
        threads: usize = 1, SOME;
    }
}
