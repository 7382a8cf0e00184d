//! `[model]` and `[lora]`: device and dtype, tokenizer, policy and score model.

use std::sync::Arc;

use anyhow::{Context, Result};
use rollflow::model::{Compute, Dtype, Lora, ModelConfig, base_of};
use rollflow::prelude::*;
use rollflow::recipe::{BaseFormat, Chat, DeviceName, Lora as Adapters, Model, ModelSource, Plan, TrainerBackend};
use rollflow::train::{LoadedModel, ScoreModel, tokenizer_folder};
use serde_json::Value;

use crate::assemble::{conversations, models};

/// Characters of a tiny model's vocabulary.
const CHARACTERS: &str = "0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n_";

/// Device and number format of all models of the run.
pub fn compute(model: &Model) -> Result<Compute> {
    compute_on(model.device, model.precision()).with_context(|| format!("model.device = {:?}", model.device.word()))
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
pub fn computes(model: &Model, key: &str, names: &[DeviceName]) -> Result<Vec<Compute>> {
    let compute =
        |name: &DeviceName| compute_on(*name, model.precision()).with_context(|| format!("{key} names {:?}", name.word()));
    names.iter().map(compute).collect()
}

/// The model and its tokenizer, in 4 bits if adapters `lora` over it want that. The seed draws a random
/// model.
pub fn base(model: &Model, chat: &Chat, lora: Option<&Adapters>, seed: u64) -> Result<Policy> {
    let (compute, Reader { tokenizer, config }) = (compute(model)?, Reader::of(model, chat)?);
    let tokenizer = Arc::unwrap_or_clone(tokenizer);
    let folder = match &model.source {
        ModelSource::Tiny(_) => return Ok(Policy::random(config, tokenizer, seed)?.computing(compute)),
        ModelSource::Folder(folder) => models::model_folder(&folder.name())?,
    };
    let policy = match lora {
        Some(Adapters { base: BaseFormat::Nf4, .. }) => Policy::load_in_4_bits(folder, tokenizer, compute)?,
        _ => Policy::load_with(folder, tokenizer, compute)?,
    };
    policy.within(model.context).context("model.context")
}

/// The model that a reward model starts from: the recipe's, with a head drawn by the seed unless it has one.
pub fn score_base(model: &Model, chat: &Chat, seed: u64) -> Result<ScoreModel> {
    match &model.source {
        ModelSource::Folder(folder) => {
            let folder = models::model_folder(&folder.name())?;
            let scorer = ScoreModel::begin(folder, tokenizer(model, chat)?, seed)?.computing(compute(model)?);
            scorer.within(model.context).context("model.context")
        }
        ModelSource::Tiny(_) => Ok(ScoreModel::from_policy(&base(model, chat, None, seed)?, Some(seed))),
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
    pub fn of(model: &Model, chat: &Chat) -> Result<Self> {
        let tokenizer = tokenizer(model, chat)?;
        let config = match &model.source {
            ModelSource::Tiny(tiny) => ModelConfig {
                intermediate_size: tiny.intermediate,
                heads: tiny.heads,
                kv_heads: tiny.kv_heads,
                head_dim: tiny.hidden / tiny.heads,
                ..ModelConfig::small(&tokenizer, tiny.hidden, tiny.layers)
            },
            ModelSource::Folder(folder) => rollflow::model::folder_config(&models::model_folder(&folder.name())?)?,
        };
        let tokenizer = Arc::new(tokenizer).of_model(config.vocab_size)?;
        Ok(Reader { tokenizer, config: config.within(model.context).context("model.context")? })
    }

    /// The reader of a plan's model, of which this process or the server of `[trainer]` has the weights.
    pub fn of_plan(plan: &Plan) -> Result<Self> {
        match plan.trainer.backend {
            TrainerBackend::Local => Reader::of(&plan.model, &plan.chat),
            TrainerBackend::Tinker => Reader::served(&plan.model, &plan.chat),
        }
    }

    /// The reader of a model that a server trains and samples. The folder may lack weights, and the
    /// family may be one that this library does not have: only the sizes of `config.json` that limit
    /// tokens and prompts are read. The other sizes are small ones.
    pub fn served(model: &Model, chat: &Chat) -> Result<Self> {
        let ModelSource::Folder(folder) = &model.source else { return Reader::of(model, chat) };
        let tokenizer = tokenizer(model, chat)?;
        let folder = models::model_folder(&folder.name())?;
        let path = base_of(&folder)?.unwrap_or(folder).join("config.json");
        let text = std::fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let json: Value = serde_json::from_slice(&text).with_context(|| format!("reading {}", path.display()))?;
        let size = |key: &str| json[key].as_u64().or_else(|| json["text_config"][key].as_u64()).map(|size| size as usize);
        let config = ModelConfig {
            vocab_size: size("vocab_size").unwrap_or(0).max(tokenizer.vocab_size()),
            max_positions: size("max_position_embeddings").unwrap_or(usize::MAX),
            ..ModelConfig::small(&tokenizer, 8, 1)
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
pub fn tokenizer(model: &Model, chat: &Chat) -> Result<Tokenizer> {
    let tokenizer = match &model.source {
        ModelSource::Tiny(tiny) => Tokenizer::characters(CHARACTERS, tiny.vocab)?,
        ModelSource::Folder(folder) => Tokenizer::from_dir(&tokenizer_folder(models::model_folder(&folder.name())?)?)?,
    };
    conversations::tokenizer(chat, tokenizer)
}

/// Builds the policy that a run would train, without a run folder: for forecasts.
pub fn policy(plan: &Plan) -> Result<Policy> {
    let lora = plan.lora.as_ref();
    adapted(base(&plan.model, &plan.chat, lora, plan.seed)?, lora, plan.seed)
}

/// A small policy with the tokenizer of the recipe's model, for graphs.
pub fn outline(plan: &Plan) -> Result<Policy> {
    let Reader { tokenizer, config } = Reader::served(&plan.model, &plan.chat)?;
    let config = ModelConfig { max_positions: config.max_positions.min(1 << 20), ..config };
    adapted(Policy::random(config, Arc::unwrap_or_clone(tokenizer), plan.seed)?, plan.lora.as_ref(), plan.seed)
}

/// `base` under the adapters of `[lora]`, which the seed draws.
pub fn adapted<const SCORES: bool>(base: LoadedModel<SCORES>, lora: Option<&Adapters>, seed: u64) -> Result<LoadedModel<SCORES>> {
    Ok(match lora {
        Some(lora) => {
            let base = if lora.base == BaseFormat::Nf4 { base.quantised() } else { base };
            base.adapted(adapters(lora)?, seed)?
        }
        None => base.merged(),
    })
}

fn adapters(of: &Adapters) -> Result<Lora> {
    Ok(Lora::new(of.rank, of.alpha, &of.target_words())?)
}
