//! `[ranks]`: settings of a run of several processes.

use crate::settings::declare::section;
use crate::settings::setting::POSITIVE;

section! {
    /// Several processes, called ranks, that train one model: `rollflow launch`, `torchrun`, `srun`
    /// or `mpirun` starts them. A run of one process ignores this section.
    pub struct Ranks {
        /// Seconds that the ranks wait at the start until all of them are there.
        start_timeout: f64 = 300.0, POSITIVE;
        /// Seconds that a rank waits in an exchange for the others, which may compute. Then the run
        /// ends.
        exchange_timeout: f64 = 1800.0, POSITIVE;
        /// Seconds without a sign of life of a rank before the run ends.
        lost_timeout: f64 = 15.0, POSITIVE;
    }
}
