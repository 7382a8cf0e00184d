//! What a recipe says of its model, without its weights.

use std::path::Path;

use crate::model::{Lora, ModelConfig, ModelError, folder_config, is_in_4_bits};
use crate::recipe::checks::validated;
use crate::recipe::model::ModelSource;
use crate::recipe::model_folder::{NoModel, model_folder};
use crate::recipe::plan::Plan;

/// Reads the configuration of a model by its name in a recipe. Invalid names are reported by the
/// recipe's own checks.
pub(super) fn config_of(name: &Path) -> Result<ModelConfig, ModelError> {
    let io = |error: NoModel| ModelError::Io(name.into(), std::io::Error::other(error.to_string()));
    folder_config(&model_folder(name).map_err(io)?)
}

/// Number of parameters of the adapters of `[lora]`. Rejects targets that the model lacks.
pub(super) fn adapters(plan: &Plan, model: &ModelConfig) -> Result<Option<u64>, ModelError> {
    let Some(of) = &plan.lora else { return Ok(None) };
    Ok(Some(Lora::new(of.rank, of.alpha, &of.target_words())?.on_model(model)?.layout(model).total() as u64))
}

/// The shape of the recipe's model.
pub(super) fn shape(plan: &Plan) -> Result<ModelConfig, ModelError> {
    in_its_own_context(plan)?.within(plan.model.context)
}

fn in_its_own_context(plan: &Plan) -> Result<ModelConfig, ModelError> {
    let tiny = match &plan.model.source {
        ModelSource::Folder(folder) => return config_of(&folder.name()),
        ModelSource::Tiny(tiny) => tiny,
    };
    // Sizes out of their ranges must not be computed with.
    validated(tiny.clone()).map_err(|errors| ModelError::malformed("[model]".as_ref(), errors))?;
    Ok(ModelConfig {
        intermediate_size: tiny.intermediate,
        heads: tiny.heads,
        kv_heads: tiny.kv_heads,
        head_dim: tiny.hidden / tiny.heads.max(1),
        ..ModelConfig::small_of(tiny.vocab, tiny.hidden, tiny.layers)
    })
}

/// Returns true if the recipe's model is a folder in 4 bits.
pub(super) fn in_4_bits(plan: &Plan) -> bool {
    let ModelSource::Folder(folder) = &plan.model.source else { return false };
    model_folder(&folder.name()).is_ok_and(|folder| is_in_4_bits(&folder))
}
