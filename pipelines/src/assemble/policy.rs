//! `[model]` and `[lora]`: device and dtype, tokenizer, policy and score model.

use std::sync::Arc;

use anyhow::{Context, Result};
use rollflow::model::{Compute, Dtype, Lora, ModelConfig};
use rollflow::prelude::*;
use rollflow::recipe::model::{DeviceName, ModelSource, TinyModel};
use rollflow::recipe::{self, Plan};
use rollflow::train::{ScoreModel, tokenizer_folder};

use crate::assemble::{conversations, models};

/// Characters of a tiny model's vocabulary.
const CHARACTERS: &str = "0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n_";

/// Device and number format of all models of the run.
pub fn compute(plan: &Plan) -> Result<Compute> {
    compute_on(plan.model.device, plan.model.precision())
        .with_context(|| format!("model.device = {:?}", plan.model.device.word()))
}

/// On this device, which must be there, in this format.
pub fn compute_on(device: DeviceName, dtype: Dtype) -> Result<Compute> {
    let compute = match device {
        DeviceName::Cpu => Compute::cpu(dtype),
        DeviceName::Cuda(index) => Compute::cuda(index, dtype),
    };
    compute.check()?;
    Ok(compute)
}

/// On each of the devices that `key` names, which must be there.
pub fn computes(plan: &Plan, key: &str, names: &[DeviceName]) -> Result<Vec<Compute>> {
    let compute =
        |name: &DeviceName| compute_on(*name, plan.model.precision()).with_context(|| format!("{key} names {:?}", name.word()));
    names.iter().map(compute).collect()
}

/// The model and its tokenizer.
pub fn base(plan: &Plan) -> Result<Policy> {
    let compute = compute(plan)?;
    Ok(match &plan.model.source {
        ModelSource::Tiny(tiny) => {
            let tokenizer = tokenizer(plan)?;
            Policy::random(tiny_config(tiny, &tokenizer), tokenizer, plan.seed)?.computing(compute)
        }
        ModelSource::Folder(folder) => Policy::load_with(models::model_folder(&folder.name())?, tokenizer(plan)?, compute)?,
    })
}

fn tiny_config(tiny: &TinyModel, tokenizer: &Tokenizer) -> ModelConfig {
    ModelConfig {
        intermediate_size: tiny.intermediate,
        heads: tiny.heads,
        kv_heads: tiny.kv_heads,
        head_dim: tiny.hidden / tiny.heads,
        ..ModelConfig::small(tokenizer, tiny.hidden, tiny.layers)
    }
}

/// Tokenizer and shape of a model: a policy without its weights.
#[derive(Clone)]
pub struct Reader {
    /// Text to tokens and back, with the recipe's chat template.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's shape.
    pub config: ModelConfig,
}

impl Reader {
    /// The reader of the recipe's model. Loads no weights.
    pub fn of(plan: &Plan) -> Result<Self> {
        let tokenizer = tokenizer(plan)?;
        let config = match &plan.model.source {
            ModelSource::Tiny(tiny) => tiny_config(tiny, &tokenizer),
            ModelSource::Folder(folder) => rollflow::model::folder_config(&models::model_folder(&folder.name())?)?,
        };
        Ok(Reader { tokenizer: Arc::new(tokenizer), config })
    }
}

impl From<&Policy> for Reader {
    fn from(policy: &Policy) -> Self {
        Reader { tokenizer: policy.tokenizer().clone(), config: policy.config().clone() }
    }
}

/// The model's tokenizer, without the model.
pub fn tokenizer(plan: &Plan) -> Result<Tokenizer> {
    let tokenizer = match &plan.model.source {
        ModelSource::Tiny(tiny) => Tokenizer::characters(CHARACTERS, tiny.vocab)?,
        ModelSource::Folder(folder) => Tokenizer::from_dir(&tokenizer_folder(models::model_folder(&folder.name())?))?,
    };
    conversations::tokenizer(plan, tokenizer)
}

/// Builds the policy that a run would train, without a run folder: for graphs and forecasts.
pub fn policy(plan: &Plan) -> Result<Policy> {
    let base = base(plan)?;
    Ok(match &plan.lora {
        Some(lora) => base.adapted(adapters(lora)?, plan.seed)?,
        None => base.merged(),
    })
}

/// The reward model that a run trains, away from any run: for graphs.
pub fn score_model(plan: &Plan) -> Result<ScoreModel> {
    let base = score_base(plan)?;
    Ok(match &plan.lora {
        Some(lora) => base.adapted(adapters(lora)?, plan.seed)?,
        None => base.merged(),
    })
}

/// The model that a reward model starts from: the recipe's, with a head drawn by the seed unless it has one.
pub fn score_base(plan: &Plan) -> Result<ScoreModel> {
    Ok(match &plan.model.source {
        ModelSource::Folder(folder) => {
            let folder = models::model_folder(&folder.name())?;
            ScoreModel::begin_with(folder, tokenizer(plan)?, plan.seed)?.computing(compute(plan)?)
        }
        ModelSource::Tiny(_) => ScoreModel::from_policy(&base(plan)?, Some(plan.seed)),
    })
}

/// `[lora]` as the library's.
pub fn adapters(of: &recipe::lora::Lora) -> Result<Lora> {
    let targets: Vec<&str> = of.targets.iter().map(|target| target.word()).collect();
    Ok(Lora::new(of.rank, of.alpha, &targets)?)
}
