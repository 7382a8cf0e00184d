//! Model families, one file each: configuration keys, layer, and tensor names in a folder.
//!
//! A family's file holds one [`Definition`], which starts from Llama's and replaces what differs. The
//! computation is shared: [`Decoder`](super::Decoder) reads [`ModelConfig`] and [`Definition`].
//! A new family is a new file here, its `mod` line and its line in `families!`.

mod gemma;
mod gemma2;
mod gemma3;
mod gpt_oss;
mod granite;
mod internlm3;
mod llama;
mod ministral;
mod mistral;
mod olmo2;
mod olmo3;
mod olmoe;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod smollm3;
mod windows;

use serde_json::{Map, Value};

use super::keys::Keys;
use super::{Activation, ModelConfig, ModelError};

macro_rules! families {
    ($($(#[$doc:meta])* $name:ident => $module:ident),+ $(,)?) => {
        /// Families of decoders.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Family {
            $($(#[$doc])* $name),+
        }

        impl Family {
            /// All families.
            pub const ALL: [Family; [$(Family::$name),+].len()] = [$(Family::$name),+];

            pub(super) fn definition(self) -> &'static Definition {
                match self {
                    $(Family::$name => &$module::DEFINITION),+
                }
            }
        }
    };
}

families! {
    /// Llama 1 to 3, and models of that architecture: Yi, SmolLM 1 and 2, DeepSeek's distilled ones.
    Llama => llama,
    /// Qwen2 and Qwen2.5.
    Qwen2 => qwen2,
    /// Qwen3, dense.
    Qwen3 => qwen3,
    /// Mistral.
    Mistral => mistral,
    /// Ministral: Mistral with full attention in some layers.
    Ministral => ministral,
    /// Phi-3: Llama with joint projections.
    Phi3 => phi3,
    /// Granite 3 and later, dense: Llama with four constant factors.
    Granite => granite,
    /// SmolLM3: Llama without rotary embeddings in every fourth layer.
    SmolLm3 => smollm3,
    /// InternLM3: Llama with other keys for biases.
    InternLm3 => internlm3,
    /// OLMo 2: norms after each branch, and over all heads of queries and keys.
    Olmo2 => olmo2,
    /// OLMo 3: OLMo 2 with sliding windows.
    Olmo3 => olmo3,
    /// Gemma: scaled embeddings, norm weights around 0, and GELU.
    Gemma => gemma,
    /// Gemma 2: Gemma with norms before and after each branch, capped scores and logits, and windows.
    Gemma2 => gemma2,
    /// Gemma 3, text only: Gemma 2 with norms of queries and keys, and two rotations.
    Gemma3 => gemma3,
    /// Qwen3-MoE: Qwen3 with a mixture of experts.
    Qwen3Moe => qwen3_moe,
    /// Qwen3.5, dense, text only: gated delta nets, and gated attention in every fourth layer.
    Qwen35 => qwen3_5,
    /// Qwen3.5 with a mixture of experts, and one expert of every token, text only.
    Qwen35Moe => qwen3_5_moe,
    /// OLMoE: a mixture of experts in every layer.
    Olmoe => olmoe,
    /// gpt-oss: a mixture of experts with biases, sinks of attention, and windows in every other layer.
    GptOss => gpt_oss,
}

/// Suffix of a classifier's class in transformers.
pub(super) const CLASSIFIER: &str = "ForSequenceClassification";

/// Properties of one family.
pub(super) struct Definition {
    /// `model_type` of its configurations.
    pub model_type: &'static str,
    /// Prefix of its classes in transformers: `Qwen2` of `Qwen2ForCausalLM`.
    pub class: &'static str,
    /// If true, `num_key_value_heads` may be absent; it is `num_attention_heads` then.
    pub kv_heads_optional: bool,
    /// Sizes that published configurations leave out.
    pub absent: &'static [(&'static str, usize)],
    /// Default of `head_dim`; `None`: `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Defaults of transformers' configuration class: `rms_norm_eps`, and the next two keys.
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub tied: bool,
    /// `pad_token_id` of configurations without the key.
    pub pad: Option<u32>,
    /// Finds the object with the rotary keys; `None` if the configuration has none.
    pub rope_keys: for<'a> fn(&Keys<'a>) -> Result<Option<Keys<'a>>, ModelError>,
    /// Norms of the attention and the feed-forward branch.
    pub norms: [Norms; 2],
    /// If true, a norm's factors are its weights plus one.
    pub norms_add_one: bool,
    /// Key of the feed-forward branch's activation, and its default.
    pub activation: (&'static str, Activation),
    /// Normalisation of queries and keys before rotation.
    pub qk_norm: QkNorm,
    /// Projections of the attention's input: query, key and value, or one joint projection.
    pub qkv: &'static [&'static str],
    /// Projections of the feed-forward input: gate and up, or one joint projection.
    pub gate_up: &'static [&'static str],
    /// If true, each query head has a score of no key, which only takes probability.
    pub sinks: bool,
    /// If true, a query's projection has a second half: a gate of the head's output.
    pub gates_attention: bool,
    /// Share of a head's columns that is rotated, where `partial_rotary_factor` may say another one.
    pub partial_rotation: Option<f64>,
    /// Completes a configuration, read as Llama's, by the family's own keys.
    pub read: fn(&Keys, ModelConfig) -> Result<ModelConfig, ModelError>,
    /// Adds the family's own keys to a `config.json`.
    pub write: fn(&ModelConfig, &mut Map<String, Value>),
}

/// Names of a branch's norms.
#[derive(Clone, Copy)]
pub(super) struct Norms {
    /// Of its input.
    pub before: Option<&'static str>,
    /// Of its output.
    pub after: Option<&'static str>,
}

impl Norms {
    pub(super) const fn before(name: &'static str) -> Self {
        Norms { before: Some(name), after: None }
    }

    pub(super) const fn after(name: &'static str) -> Self {
        Norms { before: None, after: Some(name) }
    }
}

/// Extent of the RMS norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QkNorm {
    /// No norm.
    None,
    /// Each head separately.
    Heads,
    /// All heads of a token together.
    Tokens,
}

impl Family {
    /// `model_type` of its configurations.
    pub fn model_type(self) -> &'static str {
        self.definition().model_type
    }

    /// The family of a `model_type`.
    pub(super) fn named(model_type: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.model_type() == model_type)
    }

    /// Class in transformers.
    pub(super) fn architecture(self, scores: bool) -> String {
        let definition = self.definition();
        // Without "Text" the classifier is that of a model that also takes images.
        let text = if scores && definition.model_type.ends_with("_text") { "Text" } else { "" };
        format!("{}{text}{}", definition.class, if scores { CLASSIFIER } else { "ForCausalLM" })
    }
}

/// Validates the keys of sliding windows, also in families that ignore them.
pub(super) fn check_windows(keys: &Keys) -> Result<(), ModelError> {
    windows::sliding_window(keys, None)?;
    keys.optional::<Vec<String>>("layer_types", "a list of strings").map(drop)
}
