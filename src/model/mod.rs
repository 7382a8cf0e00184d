//! Decoders on libtorch, of the families in [`Family`]: Hugging Face folders in and out, packed
//! forward passes for training, and incremental ones over a KV cache for generation.
//!
//! All parameters are slices of one flat tensor ([`Weights`], [`Layout`]). A [`Decoder`] is a set
//! of pure functions over them. With adapters ([`Lora`]), only these are trained. Tensors stay on
//! the thread that created them; only [`FrozenWeights`] cross threads.

mod adapter_folder;
#[cfg(all(feature = "jemalloc", target_os = "linux", target_env = "gnu"))]
mod allocator;
mod bitsandbytes;
mod block;
pub(crate) mod c_text;
mod compute;
mod config;
mod config_json;
mod cuda;
mod decoder;
mod delta;
mod dtype;
mod error;
mod experts;
mod export;
mod extend;
mod family;
mod folder;
mod folder_files;
mod four_bits;
pub(crate) mod fused;
mod gated_delta;
pub(crate) mod graph;
mod kept_states;
mod keys;
mod kv_cache;
mod layout;
mod lora;
mod low_rank;
mod matched;
mod mxfp4;
mod net_rows;
mod nf4;
mod packed;
mod pages;
mod prefix_tree;
mod quantised;
mod read_rope;
mod recompute;
mod rope;
mod route_cache;
mod routing;
mod shards;
pub(crate) mod shared_memory;
mod step;
pub(crate) mod stream;
mod threads;
mod views;
mod weights;
pub(crate) mod wide;

pub(crate) use adapter_folder::is_in_4_bits;
pub use adapter_folder::{base_of, folder_config, load_adapter, save_adapter};
pub(crate) use block::capped;
pub use compute::Compute;
pub(crate) use compute::{logits_chunk, upload};
pub use config::{Activation, ModelConfig, RopeScaling};
pub(crate) use cuda::gpu_attributes;
pub use cuda::{gpu_address, gpu_count, gpu_memory, gpu_total, libtorch_folder};
pub use decoder::{Decoder, log_probs_and_entropy};
pub(crate) use delta::{Delta, save_hf_after};
pub use dtype::Dtype;
pub use error::ModelError;
pub use experts::{ExpertLayer, Experts};
pub use export::{export_adapter, export_hf};
pub(crate) use extend::Suffix;
pub use family::Family;
pub(crate) use folder::{Held, StoredModel, WeightFile, load_weights_for, write_tensors};
pub use folder::{check_folder, load_hf, load_hf_for, load_hf_in_4_bits, load_weights, save_hf, weights_to_bytes};
pub use folder_files::holds_adapter;
pub(crate) use four_bits::Form;
pub(crate) use gated_delta::CHUNK;
pub use gated_delta::GatedDelta;
pub(crate) use kv_cache::KvCache;
pub use layout::Layout;
pub(crate) use layout::{Entry, Role, Unit, part};
pub(crate) use lora::Adapter;
pub use lora::Lora;
pub use packed::{MOST_GATHERED, PREFILL_CELLS, Packed, PackedRoutes};
pub(crate) use pages::{FEWEST_SHARED, PAGE, Pages, shared};
pub(crate) use quantised::quantised_bytes;
pub(crate) use recompute::{Kept, Parameters, Passed, Whole};
pub(crate) use routing::Watch;
pub use shards::save_hf_as;
pub(crate) use shards::{FolderShards, TensorSlice};
pub(crate) use threads::{StepThreads, release_helpers, threads_of_engine, use_threads};
pub(crate) use views::Views;
pub use weights::{FrozenWeights, Weights};
