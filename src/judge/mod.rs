//! Rewards that another process computes: reward services and judge models.
//!
//! A [`Service`] asks over HTTP for the rewards of a group. It speaks the protocol of
//! `docs/reference/protocols.md`, or asks a language model to grade each completion ([`JudgeConfig`]).

mod cache;
mod error;
mod language_model;
mod protocol;
mod service;

pub use error::ServiceError;
pub use language_model::JudgeConfig;
pub use service::{Answers, HttpRule, Service};
