//! Decoders of the Llama, Qwen2, Qwen3 and Mistral families on libtorch: Hugging Face folders in and out, packed forward passes for
//! training, and incremental ones over a KV cache for generation.
//!
//! All parameters are slices of one flat tensor ([`Weights`], [`Layout`]); a [`Decoder`] holds none and is a set of pure functions
//! over them. [`Adapter`]s lie beside such a tensor and are then what is trained. Tensors stay on the thread that made them; [`FrozenWeights`] is the one thing that crosses.

mod adapter_folder;
mod attention;
mod config;
mod decoder;
mod error;
mod folder;
pub mod fused;
mod keys;
mod kv_cache;
mod layout;
mod log_probs;
mod lora;
mod memory;
mod packed;
mod read_config;
mod rope;
mod shards;
mod small;
mod views;
mod weights;

pub use adapter_folder::{load_adapter, save_adapter};
pub use config::{Family, Head, ModelConfig, RopeScaling};
pub use decoder::Decoder;
pub use error::{ModelError, TensorProblems};
pub use folder::{load_hf, load_like, load_weights, save_hf, weights_to_bytes};
pub use kv_cache::KvCache;
pub use layout::{Entry, Layout};
pub use log_probs::log_probs_and_entropy;
pub use lora::{Adapter, Lora};
pub use memory::keep_freed_memory;
pub use packed::Packed;
pub use shards::{Format, Precision, save_hf_as};
pub use views::Views;
pub use weights::{FrozenWeights, Weights};
