//! Data sets on disk, of any size: found by name, recognised, mixed and streamed.
//!
//! [`DataSpec`] names files and their records (`locate`, `hub`, `split`). [`Shape`] reads a record
//! (`shape`, `turns`). [`DataSet`] holds the usable records by number (`part`, `scan`, `parquet`).
//! [`Mixed`] is several data sets as one endless stream (`mixture`). Ids of the hub are downloaded on
//! first use. docs/how_to/data.md is the guide for users.

mod dataset;
mod hub;
mod locate;
mod mixture;
#[cfg_attr(not(feature = "parquet"), path = "no_parquet.rs")]
mod parquet;
mod part;
mod recorded;
mod scan;
mod sft;
mod shape;
mod split;
mod stream;
mod survey;
mod turns;

pub use crate::hub::{Cache as HubCache, Hub};
pub(crate) use dataset::Skips;
pub use dataset::{DataSet, DataSpec};
pub(crate) use hub::dataset_commit;
pub(crate) use mixture::{Mixture, Place, Share};
pub use recorded::Recorded;
pub use sft::{
    export_conversations, load_sft_dataset, load_sft_samples, prepare_pair, prepare_sft_sample, prepare_sft_turns, refused,
    rendered_bytes, too_long,
};
pub use shape::{Columns, Example, Shape};
pub(crate) use split::Split;
pub(crate) use stream::Drawn;
pub use stream::Mixed;
pub use survey::{Survey, survey};
