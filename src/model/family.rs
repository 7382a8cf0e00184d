//! The families of decoders, and the few things in which they differ.

use super::Head;

/// The families of decoders that differ in biases, norms, windows, rotations and names only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 1 to 3, and what is built like it: Yi, SmolLM and SmolLM2, DeepSeek's distilled ones.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// Mistral.
    Mistral,
    /// Ministral: Mistral whose layers see windows in turns.
    Ministral,
    /// Phi-3: Llama with its joint projections stored as one tensor each.
    Phi3,
    /// Granite 3 and later, dense: Llama with four constant factors.
    Granite,
    /// SmolLM3: Llama in which every fourth layer knows no positions.
    SmolLm3,
    /// InternLM3: Llama under other names of its biases.
    InternLm3,
    /// OLMo 2: norms after each branch rather than before, and over all of a token's queries and keys.
    Olmo2,
    /// OLMo 3: OLMo 2 with windows, whose rotations are not stretched.
    Olmo3,
}

/// What queries and keys are normed over before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Nothing: they aren't.
    None,
    /// Each head by itself.
    Heads,
    /// All heads of a token at once.
    Tokens,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 11] = [
        Family::Llama,
        Family::Qwen2,
        Family::Qwen3,
        Family::Mistral,
        Family::Ministral,
        Family::Phi3,
        Family::Granite,
        Family::SmolLm3,
        Family::InternLm3,
        Family::Olmo2,
        Family::Olmo3,
    ];

    /// `model_type` of its configurations.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Mistral => "mistral",
            Family::Ministral => "ministral",
            Family::Phi3 => "phi3",
            Family::Granite => "granite",
            Family::SmolLm3 => "smollm3",
            Family::InternLm3 => "internlm3",
            Family::Olmo2 => "olmo2",
            Family::Olmo3 => "olmo3",
        }
    }

    /// Its class in transformers.
    pub(super) fn architecture(self, head: Head) -> String {
        let family = match self {
            // transformers computes InternLM3 by Llama's classes.
            Family::Llama | Family::InternLm3 => "Llama",
            Family::Qwen2 => "Qwen2",
            Family::Qwen3 => "Qwen3",
            Family::Mistral => "Mistral",
            Family::Ministral => "Ministral",
            Family::Phi3 => "Phi3",
            Family::Granite => "Granite",
            Family::SmolLm3 => "SmolLM3",
            Family::Olmo2 => "Olmo2",
            Family::Olmo3 => "Olmo3",
        };
        family.to_owned() + head.architecture()
    }

    /// What queries and keys are normed over.
    pub fn qk_norm(self) -> QkNorm {
        match self {
            Family::Qwen3 => QkNorm::Heads,
            Family::Olmo2 | Family::Olmo3 => QkNorm::Tokens,
            _ => QkNorm::None,
        }
    }

    /// Whether what a branch gives is normed, rather than what it gets.
    pub fn norms_after(self) -> bool {
        matches!(self, Family::Olmo2 | Family::Olmo3)
    }

    /// Whether its folders hold query, key and value projections as one tensor, and gate and up.
    pub fn stores_joint_projections(self) -> bool {
        self == Family::Phi3
    }

    /// Whether its configurations say of each layer whether it sees a window.
    pub(super) fn has_layer_types(self) -> bool {
        matches!(self, Family::Qwen2 | Family::Qwen3 | Family::Ministral | Family::SmolLm3 | Family::Olmo3)
    }

    /// Whether a bias on queries, keys and values, if there is one, is on the attention's output too.
    pub(super) fn biases_output(self) -> bool {
        !matches!(self, Family::Qwen2 | Family::Mistral | Family::Ministral | Family::Phi3)
    }

    /// Whether its feed-forward layers may have biases.
    pub(super) fn may_bias_mlp(self) -> bool {
        matches!(self, Family::Llama | Family::Granite | Family::SmolLm3 | Family::InternLm3)
    }
}
