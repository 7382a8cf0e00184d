//! Decoders on libtorch, of the families in [`Family`]: Hugging Face folders in and out, packed
//! forward passes for training, and incremental ones over a KV cache for generation.
//!
//! All parameters are slices of one flat tensor ([`Weights`], [`Layout`]). A [`Decoder`] is a set
//! of pure functions over them. With [`Adapter`]s, only the adapters are trained. Tensors stay on
//! the thread that created them; only [`FrozenWeights`] cross threads.

mod adapter_folder;
mod attention;
mod compute;
mod config;
mod cuda;
mod decoder;
mod delta;
mod dtype;
mod error;
mod family;
mod folder;
pub(crate) mod fused;
mod keys;
mod kv_cache;
mod layout;
mod log_probs;
mod lora;
mod memory;
mod packed;
mod read_config;
mod read_rope;
mod recompute;
mod rope;
mod shards;
mod small;
mod tensor_types;
mod untied;
mod views;
mod weights;
pub(crate) mod wide;
mod write_config;

pub use adapter_folder::{base_of, folder_config, load_adapter, save_adapter};
pub use compute::Compute;
pub use config::{Factors, Head, ModelConfig, RopeScaling};
pub use cuda::{GpuMemory, gpu_memory};
pub use decoder::Decoder;
pub(crate) use delta::{Delta, save_hf_after};
pub use dtype::Dtype;
pub use error::ModelError;
pub use family::Family;
pub use folder::{check_folder, load_hf, load_hf_for, load_like, load_weights, save_hf, weights_to_bytes};
pub use kv_cache::KvCache;
pub(crate) use layout::Role;
pub use layout::{Entry, Layout};
pub use log_probs::log_probs_and_entropy;
pub use lora::{Adapter, Lora};
pub use memory::keep_freed_memory;
pub use packed::{PREFILL_CELLS, Packed};
pub use recompute::Kept;
pub use shards::{Format, save_hf_as};
pub use views::Views;
pub use weights::{FrozenWeights, Weights};
