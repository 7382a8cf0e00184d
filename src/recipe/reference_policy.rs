//! `[reference]`: the reference policy; `[teacher]`: the policy that another one is distilled from.

use std::path::PathBuf;

use crate::net::RetryPauses;
use crate::settings::declare::{section, tagged};
use crate::settings::setting::{BELOW_ONE, GIVEN, POSITIVE, SOME, SOME_STEPS};
use crate::stages::train::Distill;

section! {
    /// Reference policy of `train.kl_loss`, `train.kl_reward` or a loss of pairs. Its stage scores
    /// the groups that the filter keeps, in parallel with generator and trainer.
    pub struct Reference {
        first policy: ReferencePolicy;
        /// Threads of its stage.
        threads: usize = 1, SOME;
    }
}

section! {
    /// On-policy distillation: a teacher scores the policy's own rollouts, in parallel with generator and
    /// trainer. With `top_k = 0` a token's advantage is the teacher's log-probability minus the policy's own
    /// when it sampled the token, so that the policy minimises the reverse KL divergence.
    pub struct Teacher {
        first policy: ReferencePolicy;
        /// Template of the teacher's own prompt, if it is not the policy's: `{prompt}` is the policy's, and
        /// other names in braces are fields of the prompt's record, such as `{answer}`. Of a
        /// conversation it replaces the user's last turn. A teacher that is shown the answer teaches
        /// the policy without it (self-distillation). Recorded `prompt_tokens` must be those of the
        /// run's chat template.
        hint: Option<String> = None;
        /// Threads of its stage.
        threads: usize = 1, SOME;
        last distill: Distill;
    }
}

tagged! {
    /// Source of the weights.
    pub enum ReferencePolicy {
        /// the policy at the run's start, after the warm-up, or a folder's.
        "frozen" => Frozen {
            /// A Hugging Face folder of a model with the same vocabulary. Left out: the policy at
            /// the start of reinforcement.
            path: Option<PathBuf> = None;
        },
        /// a server's model, with the policy's tokens; `generate.temperature` must be 1.
        "server" => Server(ServedPolicy),
        /// a model of a server of the Tinker API; `generate.temperature` must be 1.
        "tinker" => Tinker(TinkerPolicy),
        /// several policies, each for the groups of some data sets.
        "by_source" => BySource {
            /// One of them; may be repeated.
            part: Vec<SourcePolicy> = Vec::new();
        },
        /// a moving average of the published weights.
        "ema" => Ema {
            /// Share of the old average that is kept at every published version. If versions are
            /// missed, the newest counts for all of them.
            decay: f64 = 0.99, BELOW_ONE;
        },
        /// a copy of the published weights, renewed from time to time.
        "periodic" => Periodic {
            /// Published versions between copies.
            every: u64 = 10, SOME_STEPS;
        },
    }
}

section! {
    /// Policy for the groups of some data sets.
    pub struct SourcePolicy {
        first policy: FixedPolicy;
        /// Names of the data sets. Empty: all that no other part names.
        sources: Vec<String> = Vec::new();
    }
}

tagged! {
    /// Source of weights that do not change.
    pub enum FixedPolicy {
        /// the policy at the run's start, after the warm-up, or a folder's.
        "frozen" => Frozen {
            /// A Hugging Face folder of a model with the same vocabulary. Left out: the policy at
            /// the start of reinforcement.
            path: Option<PathBuf> = None;
        },
        /// a server's model, with the policy's tokens; `generate.temperature` must be 1.
        "server" => Server(ServedPolicy),
        /// a model of a server of the Tinker API; `generate.temperature` must be 1.
        "tinker" => Tinker(TinkerPolicy),
    }
}

section! {
    /// A server that returns log-probabilities of given tokens: `rollflow serve`, SGLang or vLLM.
    pub struct ServedPolicy {
        /// Address, with its kind unless it is `rollflow serve`, as in `vllm+http://host:8000`.
        url: String = String::new(), GIVEN;
        /// Model name in requests. Left out: the first that the server lists.
        model: Option<String> = None;
        /// Environment variable with a token, sent as `Authorization: Bearer …`. The token itself
        /// is never written.
        token_env: Option<String> = None;
        /// Timeout of a completion's log-probabilities, retries included, in seconds. Beyond it, the
        /// run ends.
        timeout: f64 = 300.0, POSITIVE;
        /// Completions that are asked for at the same time.
        concurrency: usize = 16, SOME;
        /// Most retries of a failed request, within `timeout`.
        retries: u32 = 8;
        last retry: RetryPauses;
    }
}

section! {
    /// A model of a server of the Tinker API that scores given tokens.
    pub struct TinkerPolicy {
        /// Address of the server, such as `http://host:8000`.
        url: String = String::new(), GIVEN;
        /// Environment variable with the server's API key. The key itself is never written.
        key_env: Option<String> = None;
        /// The server's name of a base model, or a path of sampling weights, `tinker://…`. Left out: the
        /// first base model that it lists.
        model: Option<String> = None;
        /// Timeout of a completion's log-probabilities, retries included, in seconds. Beyond it, the
        /// run ends.
        timeout: f64 = 300.0, POSITIVE;
        /// Completions that are asked for at the same time.
        concurrency: usize = 16, SOME;
    }
}

impl FixedPolicy {
    /// The same as the only policy of its section.
    pub fn alone(&self) -> ReferencePolicy {
        match self.clone() {
            FixedPolicy::Frozen { path } => ReferencePolicy::Frozen { path },
            FixedPolicy::Server(of) => ReferencePolicy::Server(of),
            FixedPolicy::Tinker(of) => ReferencePolicy::Tinker(of),
        }
    }
}

impl ReferencePolicy {
    /// The policies that score, each with its key. `section` is its own section.
    pub fn parts(&self, section: &str) -> Vec<(String, ReferencePolicy)> {
        match self {
            ReferencePolicy::BySource { part } => {
                let keyed = |(at, of): (usize, &SourcePolicy)| (format!("{section}.part[{at}]"), of.policy.alone());
                part.iter().enumerate().map(keyed).collect()
            }
            alone => vec![(section.to_owned(), alone.clone())],
        }
    }

    /// Returns true if it follows the published weights.
    pub fn follows(&self) -> bool {
        matches!(self, ReferencePolicy::Ema { .. } | ReferencePolicy::Periodic { .. })
    }
}
