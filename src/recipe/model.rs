//! `[model]`: source of the first weights, device and format of all models.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::presets::Preset;
use crate::model::Dtype;
use crate::settings::declare::{section, tagged};
use crate::settings::document::{Node, Value};
use crate::settings::section::Findings;
use crate::settings::setting::{Limit, Setting, Written};

const TINY: Limit<usize> = Limit { text: "1 to 65536", holds: |size| (1..=65536).contains(size) };
const LAYERS: Limit<usize> = Limit { text: "1 to 4096", holds: |layers| (1..=4096).contains(layers) };

section! {
    /// Source of the policy's first weights, and how all models of the run compute: trainer,
    /// generator, reference, critic and reward models.
    pub struct Model {
        first source: ModelSource;
        /// Device: `"cpu"`, `"cuda"` or `"cuda:1"`.
        device: DeviceName = DeviceName::Cpu;
        /// Format that models compute in. Trained parameters, gradient sums and the optimizer are
        /// f32 in any case. Left out: `"bf16"` on a GPU, where f32 takes about ten times as long,
        /// and `"f32"` on a CPU.
        dtype: Option<Dtype> = None;
        /// Longest sequence, in tokens, of a model with LongRoPE. Beyond the context of pre-training, the
        /// factors for long contexts rotate all sequences. Left out: the context of pre-training. Other
        /// models have one context, and take none here.
        context: Option<usize> = None;
        /// If true, a run that needs more memory than the device has is rejected, by an estimate
        /// that `rollflow check` prints.
        check_memory: bool = true;
    }
}

impl Model {
    /// The format that models compute in.
    pub fn precision(&self) -> Dtype {
        self.dtype.unwrap_or(self.device.precision())
    }

    /// These settings for the model in another folder.
    pub fn of_folder(&self, path: PathBuf) -> Model {
        let source = ModelSource::Folder(ModelFolder { path, preset: None, revision: None });
        Model { source, ..self.clone() }
    }
}

/// A device by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceName {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU; indices start at 0.
    Cuda(usize),
}

impl DeviceName {
    /// The format that models compute in there, where none is named.
    pub fn precision(self) -> Dtype {
        match self {
            DeviceName::Cpu => Dtype::F32,
            DeviceName::Cuda(_) => Dtype::Bf16,
        }
    }

    /// The name that recipes use.
    pub fn word(self) -> String {
        match self {
            DeviceName::Cpu => "cpu".to_owned(),
            DeviceName::Cuda(index) => format!("cuda:{index}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    /// Parses a name. The error lists the valid ones.
    fn from_str(word: &str) -> Result<Self, String> {
        let device = match word.split_once(':') {
            None if word == "cpu" => Some(DeviceName::Cpu),
            None if word == "cuda" => Some(DeviceName::Cuda(0)),
            Some(("cuda", index)) => index.parse().ok().map(DeviceName::Cuda),
            _ => None,
        };
        device.ok_or_else(|| match word.split(':').next() {
            Some("mps" | "metal" | "rocm" | "hip" | "xpu" | "tpu" | "npu") => {
                format!("models compute on processors and on GPUs of NVIDIA's only; it takes {}", DeviceName::expects())
            }
            _ => format!("it takes {}", DeviceName::expects()),
        })
    }
}

impl Setting for DeviceName {
    fn expects() -> String {
        "a device: \"cpu\", \"cuda\" or \"cuda:1\"".to_owned()
    }

    fn read(node: &Node, path: &str, findings: &mut Findings) -> Option<Self> {
        let word = if let Value::Text(word) = &node.value { word.as_str() } else { "" };
        let refuse = |help| findings.error(&node.place, path, format!("`{path}` is {}", node.value.describe()), help);
        word.parse().map_err(refuse).ok()
    }

    fn write(&self) -> Written {
        Setting::write(&self.word())
    }
}

tagged! {
    /// Source of the policy's first weights.
    pub enum ModelSource {
        /// a small random decoder with a character tokenizer, drawn by the run's seed.
        "tiny" => Tiny(TinyModel),
        /// a Hugging Face folder: `config.json`, safetensors and `tokenizer.json`.
        "folder" => Folder(ModelFolder) by [path, preset],
    }
}

section! {
    /// A small decoder for experiments that take minutes: Llama's architecture with a tied head.
    pub struct TinyModel {
        /// Width of the residual stream; a multiple of `heads`.
        hidden: usize = 128, TINY;
        /// Decoder layers.
        layers: usize = 4, LAYERS;
        /// Query heads; their width, `hidden / heads`, must be even.
        heads: usize = 4, TINY;
        /// Key and value heads; divides `heads`.
        kv_heads: usize = 2, TINY;
        /// Width of the feed-forward layer.
        intermediate: usize = 384, TINY;
        /// Size of the vocabulary.
        vocab: usize = 64, TINY;
    }
}

section! {
    /// A model in a folder or on the hub.
    pub struct ModelFolder {
        /// Folder, relative to where the command runs, or id of a model on the Hugging Face hub,
        /// such as `Qwen/Qwen2.5-0.5B-Instruct`, which is fetched on first use.
        path: PathBuf = PathBuf::new();
        /// A popular model of the hub, instead of `path`, with its own default learning rates.
        preset: Option<&'static Preset> = None;
        /// Branch, tag or commit of a model of the hub. Left out: `main`. The run's `recipe.toml`
        /// records the commit.
        revision: Option<String> = None;
    }
}

impl ModelFolder {
    /// Folder or id to load.
    pub fn name(&self) -> PathBuf {
        let name = self.preset.map_or_else(|| self.path.clone(), |preset| preset.id.into());
        match &self.revision {
            Some(revision) => with_revision(&name, revision),
            None => name,
        }
    }
}

/// Replaces the revision of an id.
pub(crate) fn with_revision(name: &Path, revision: &str) -> PathBuf {
    let name = name.to_string_lossy();
    format!("{}@{revision}", name.split('@').next().unwrap_or(&name)).into()
}

impl TinyModel {
    /// Trainable parameters.
    pub fn parameters(&self) -> u64 {
        let head_width = self.hidden / self.heads.max(1);
        let kv_width = head_width * self.kv_heads;
        let attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv_width;
        let layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden;
        (self.vocab * self.hidden + self.layers * layer + self.hidden) as u64
    }
}
