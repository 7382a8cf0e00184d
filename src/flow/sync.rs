//! What workers share state through, named in one place.
//!
//! The files that use these names are compiled a second time in `tests/model_check`, over names that mean the same but let a model
//! checker switch threads before every operation. So it checks this very code, and nothing in it knows.

/// A place between two operations where a model checker may switch threads. Nothing happens here.
pub(super) fn point() {}

pub(super) use ::flume;
pub(super) use std::sync::atomic;
pub(super) use std::thread;
pub(super) use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};
