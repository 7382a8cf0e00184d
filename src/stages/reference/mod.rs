//! The policy that the trained one is held to, beside the trainer.

#[cfg(feature = "torch")]
mod local;
mod model;
mod moving;
mod scored;

#[cfg(feature = "torch")]
pub use local::LocalReference;
pub use model::{ReferenceError, ReferenceModel, UnscoredReference};
pub use moving::{Held, MovingReference, Share, ema, periodic};
pub use scored::Reference;
