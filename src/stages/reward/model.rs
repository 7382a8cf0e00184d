//! Keys of a reward model. `Scorer` computes its scores, with libtorch.

use std::path::PathBuf;

use crate::settings::declare::section;
use crate::settings::setting::{NOT_NEGATIVE, PATH_GIVEN, SOME};

section! {
    /// A reward model scores prompt and completion, in its own tokens. How the completion ended is
    /// not part of the text.
    pub struct ModelRule {
        /// A Hugging Face folder of a sequence classifier with one label, relative to where the command runs.
        path: PathBuf = PathBuf::new(), PATH_GIVEN;
        /// Penalty on the score of a completion that did not end by itself.
        missing_end_penalty: f64 = 0.0, NOT_NEGATIVE;
        /// Threads that score.
        threads: usize = 1, SOME;
    }
}
