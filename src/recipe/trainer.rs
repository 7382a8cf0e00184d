//! `[trainer]`: where the policy is trained.

use crate::settings::declare::{choices, section};
use crate::settings::setting::POSITIVE;

section! {
    /// Where the policy is trained: in this process, or on a server of the Tinker API, which also
    /// samples.
    pub struct TrainerPlace {
        /// Backend.
        backend: TrainerBackend = TrainerBackend::default();
        /// Address of the server, such as `http://host:8000`.
        url: Option<String> = None;
        /// Environment variable with the server's API key. The key itself is never written.
        key_env: Option<String> = None;
        /// The server's name of the model. Left out: the first that it lists.
        base_model: Option<String> = None;
        /// Seconds that one operation may take, such as a pass that a server compiles first.
        timeout: f64 = 1800.0, POSITIVE;
        /// Seconds for which the server may be unreachable before the run ends.
        lost_timeout: f64 = 120.0, POSITIVE;
    }
}

choices! {
    /// Where the policy is trained.
    pub enum TrainerBackend {
        /// this process, and the other ranks of the run.
        "local" => Local,
        /// a server of the Tinker API: `rollflow serve --tinker`, SkyRL, verl, or a hosted one.
        "tinker" => Tinker,
    }
}
