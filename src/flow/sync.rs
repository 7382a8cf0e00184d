//! Primitives through which workers share state, named in one place.
//!
//! `tests/model_check` compiles the files that use these names a second time. Its own primitives
//! let a model checker switch threads before every operation, so the checker runs the production
//! code unchanged.

/// Place between two operations where a model checker may switch threads. Does nothing here.
pub(super) fn point() {}

pub(super) use ::flume;
pub(super) use std::sync::atomic;
pub(super) use std::thread;
pub(super) use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, TryAcquireError, watch};
