//! Data sets on disk, of any size: found by name, recognised, mixed and streamed.
//!
//! [`DataSpec`] names files and their records (`locate`, `hub`, `split`). [`Shape`] reads a record
//! (`shape`, `turns`, `columns`). [`DataSet`] holds the usable records by number (`part`, `scan`,
//! `spool`, `parquet`). [`Mixed`] is several data sets as one endless stream, in the order of a
//! [`Mixture`]. Ids of the hub are downloaded on first use. docs/how_to/data.md is the guide for
//! users.

mod columns;
mod dataset;
mod error;
mod hub;
mod locate;
mod mixture;
#[cfg(feature = "parquet")]
mod parquet;
mod part;
mod recorded;
mod scan;
mod sft;
mod shape;
mod skips;
mod split;
#[cfg(feature = "parquet")]
mod spool;
mod stream;
mod survey;
mod turns;

pub use crate::hub::{Cache as HubCache, Hub};
pub use columns::Columns;
pub use dataset::{DataSet, DataSpec};
pub use error::DataError;
pub(crate) use hub::dataset_commit;
pub use locate::Layout;
pub use mixture::{Draw, Mixture, Share};
pub use recorded::Recorded;
pub use sft::{
    export_conversations, load_sft_dataset, load_sft_samples, prepare_pair, prepare_sft_sample, prepare_sft_turns, too_long,
};
pub use shape::{Example, Shape};
pub use skips::Skip;
pub(crate) use skips::Skips;
pub use split::Split;
pub use stream::{Drawn, Mixed, PromptDataset};
pub use survey::{Judged, Survey, survey};
