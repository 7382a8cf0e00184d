//! A run's folder: what a run writes, its record and page, and where an interrupted run continues.

pub(crate) mod files;
pub mod folder;
pub(crate) mod page;
pub(crate) mod recipe_keys;
pub(crate) mod record;
pub(crate) mod remaining;
pub mod resume;
