//! Reference policy: scores samples in parallel with generator and trainer.

mod batches;
#[cfg(feature = "torch")]
mod local;
mod model;
mod moving;
mod scored;

pub use batches::BatchReference;
#[cfg(feature = "torch")]
pub use local::LocalReference;
pub use model::{ReferenceError, ReferenceModel, UnscoredReference};
pub use moving::{Held, MovingReference, Share, ema, periodic};
pub use scored::Reference;
