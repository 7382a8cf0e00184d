//! Popular models by a short name: where they are and what their shape is.

use crate::settings::document::{Node, Value};
use crate::settings::section::{Findings, nearest};
use crate::settings::setting::{Setting, Written};

/// A popular model.
#[derive(Debug, PartialEq)]
pub struct Preset {
    /// Name that recipes use.
    pub name: &'static str,
    /// Id on the Hugging Face hub.
    pub id: &'static str,
    /// `model_type` of its `config.json`.
    pub family: &'static str,
    /// Chat template; the template itself is in the model's folder.
    pub template: Template,
    /// Rows of the embedding, width of the residual stream, layers, query heads, key and value heads,
    /// width of a head and of the feed-forward layer, as in its `config.json`.
    shape: [u64; 7],
    /// If true, the output head is the embedding.
    tied: bool,
}

/// Chat template of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Template {
    /// Name of the template.
    pub name: &'static str,
    /// Token that ends an answer. Folders name it among their end-of-text tokens, so that recipes need
    /// not.
    pub stop: &'static str,
}

impl Preset {
    /// Parameters.
    pub fn parameters(&self) -> u64 {
        let [vocab, hidden, layers, heads, kv_heads, head_dim, intermediate] = self.shape;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let more = match self.family {
            "qwen2" => q + 2 * kv,
            "qwen3" => 2 * head_dim,
            _ => 0,
        };
        let layer = hidden * (2 * q + 2 * kv + 3 * intermediate + 2) + more;
        vocab * hidden * if self.tied { 1 } else { 2 } + layers * layer + hidden
    }

    /// The preset of that name.
    pub fn named(name: &str) -> Option<&'static Preset> {
        PRESETS.iter().find(|preset| preset.name == name)
    }
}

impl Setting for &'static Preset {
    fn expects() -> String {
        "the name of a popular model, as `rollflow models` lists them".to_owned()
    }

    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
        let name = if let Value::Text(name) = &node.value { name.as_str() } else { "" };
        let preset = Preset::named(name);
        if preset.is_none() {
            let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
            let all = format!("presets are {}", names.join(", "));
            let help = nearest(name, &names).map_or(all.clone(), |near| format!("did you mean {near:?}? {all}"));
            findings.error(&node.place, path, format!("`{path}` is {}", node.value.describe()), help);
        }
        preset
    }

    fn write(&self) -> Written {
        self.name.to_owned().write()
    }
}

/// `model_type` of `config.json`, and the chat template of its instruction models.
type Family = (&'static str, Template);

const CHAT_ML: Template = Template { name: "ChatML", stop: "<|im_end|>" };
const QWEN2: Family = ("qwen2", CHAT_ML);
const QWEN3: Family = ("qwen3", CHAT_ML);
const LLAMA: Family = ("llama", Template { name: "Llama 3", stop: "<|eot_id|>" });
const SMOL: Family = ("llama", CHAT_ML);
const SMOL3: Family = ("smollm3", CHAT_ML);
const MISTRAL: Family = ("mistral", Template { name: "Mistral", stop: "</s>" });
const R1: Family = ("qwen2", Template { name: "DeepSeek", stop: "<｜end▁of▁sentence｜>" });

const fn preset(name: &'static str, id: &'static str, (family, template): Family, shape: [u64; 7], tied: bool) -> Preset {
    Preset { name, id, family, template, shape, tied }
}

/// Every preset.
pub const PRESETS: [Preset; 19] = [
    preset("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", QWEN2, [151_936, 896, 24, 14, 2, 64, 4864], true),
    preset("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", QWEN2, [151_936, 1536, 28, 12, 2, 128, 8960], true),
    preset("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", QWEN2, [151_936, 2048, 36, 16, 2, 128, 11_008], true),
    preset("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", QWEN2, [152_064, 3584, 28, 28, 4, 128, 18_944], false),
    preset("qwen2.5-math-1.5b", "Qwen/Qwen2.5-Math-1.5B", QWEN2, [151_936, 1536, 28, 12, 2, 128, 8960], true),
    preset("qwen3-0.6b", "Qwen/Qwen3-0.6B", QWEN3, [151_936, 1024, 28, 16, 8, 128, 3072], true),
    preset("qwen3-1.7b", "Qwen/Qwen3-1.7B", QWEN3, [151_936, 2048, 28, 16, 8, 128, 6144], true),
    preset("qwen3-4b", "Qwen/Qwen3-4B", QWEN3, [151_936, 2560, 36, 32, 8, 128, 9728], true),
    preset("qwen3-8b", "Qwen/Qwen3-8B", QWEN3, [151_936, 4096, 36, 32, 8, 128, 12_288], false),
    preset("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", LLAMA, [128_256, 2048, 16, 32, 8, 64, 8192], true),
    preset("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", LLAMA, [128_256, 3072, 28, 24, 8, 128, 8192], true),
    preset("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", LLAMA, [128_256, 4096, 32, 32, 8, 128, 14_336], false),
    preset("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", SMOL, [49_152, 576, 30, 9, 3, 64, 1536], true),
    preset("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", SMOL, [49_152, 960, 32, 15, 5, 64, 2560], true),
    preset("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", SMOL, [49_152, 2048, 24, 32, 32, 64, 8192], true),
    preset("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", SMOL3, [128_256, 2048, 36, 16, 4, 128, 11_008], true),
    preset("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", MISTRAL, [32_768, 4096, 32, 32, 8, 128, 14_336], false),
    preset(
        "deepseek-r1-qwen-1.5b",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        R1,
        [151_936, 1536, 28, 12, 2, 128, 8960],
        false,
    ),
    preset("deepseek-r1-qwen-7b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", R1, [152_064, 3584, 28, 28, 4, 128, 18_944], false),
];
