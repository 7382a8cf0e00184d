//! Ministral: Mistral with full attention in some layers.

use super::{Definition, mistral, windows};
use crate::model::ModelConfig;

pub(super) const DEFINITION: Definition = Definition {
    model_type: "ministral",
    class: "Ministral",
    read: |keys, config| {
        let window = windows::sliding_window(keys, mistral::WINDOW)?;
        let windows = windows::by_layer(keys, config.layers(), window, |_| true)?;
        Ok(ModelConfig { windows, qkv_bias: false, output_bias: false, mlp_bias: false, ..config })
    },
    write: windows::write_by_layer,
    ..mistral::DEFINITION
};
