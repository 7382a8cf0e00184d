//! `[eval]`: what weights are asked beside the training, and by `rollflow eval`.

use super::task::Task;
use crate::settings::declare::section;
use crate::settings::setting::{FINITE, POSITIVE, SHARE, SOME, SOME_IF_GIVEN};

section! {
    /// Evaluation beside the training, pinned to published weights, and what `rollflow eval` asks. Answers are judged by `[reward]`; with
    /// `[environment]` an answer is a rollout of several turns there. The pipelines `dpo` and `reward_model` judge held-out pairs instead, and
    /// sample nothing: of these keys they take `every`, `task`, `limit` and `threads`. Training does not wait
    /// for it, except that a synchronous run (`flow.max_staleness = 0`), one of `sft` or of `grpo_offline` writes a step down when its evaluation
    /// is done. With `[engine]` the run's servers answer, and are given no newer weights meanwhile.
    pub struct Eval {
        /// Optimizer steps from one evaluation to the next, whole publishes (`sync.every`); the weights before the first step are evaluated, too,
        /// and those after `train.steps` if they are published. 0 leaves evaluation to `rollflow eval`.
        every: u64 = 50;
        /// What is asked, as in `[task]`; left out, the run's own task, or the pairs that `reward_model.held_out` holds out.
        task: Option<Task> = None;
        /// Prompts that are asked, the first ones; left out, all.
        limit: Option<usize> = None, SOME_IF_GIVEN;
        /// Answers sampled to each prompt, for pass@1 up to pass@`samples`; 0 samples none.
        samples: u32 = 4;
        /// Whether each prompt is answered greedily, too.
        greedy: bool = true;
        /// Divides the logits of sampled answers.
        temperature: f64 = 1.0, POSITIVE;
        /// Keeps the likeliest tokens up to this total probability; 1 keeps all.
        top_p: f64 = 1.0, SHARE;
        /// Longest answer, or turn of one, in tokens; left out, `generate.max_new_tokens`.
        max_new_tokens: Option<usize> = None, SOME_IF_GIVEN;
        /// An answer is right that earns at least this.
        success: f64 = 1.0, FINITE;
        /// Answers that are generated at the same time.
        slots: usize = 64, SOME;
        /// Threads that generate them, now and then: no core of the machine is set aside for them.
        threads: usize = 1, SOME;
    }
}
