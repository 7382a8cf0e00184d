//! `[model]`: where the first weights come from, and where and in which format models compute.

use std::path::PathBuf;
use std::str::FromStr;

use super::declare::{choices, section, tagged};
use super::document::{Node, Value};
use super::presets::Preset;
use super::section::Findings;
use super::setting::{Limit, Setting, Written};

const TINY: Limit<usize> = Limit { text: "1 to 65536", holds: |size| (1..=65536).contains(size) };

section! {
    /// The policy's first weights, and how all models of the run compute: trainer, generator, reference, critic and score models.
    pub struct Model {
        first source: ModelSource;
        /// Where models compute.
        device: DeviceName = DeviceName::Cpu;
        /// The format that models compute in. Trained parameters, sums of gradients and the optimizer are f32 all the same.
        dtype: Precision = Precision::default();
        /// Whether a run is refused that takes more memory than the device has, by an estimate that `rollflow check` prints.
        check_memory: bool = true;
    }
}

choices! {
    /// A format of numbers.
    pub enum Precision {
        /// 32 bits.
        "f32" => F32,
        /// 16 bits with the range of 32.
        "bf16" => Bf16,
        /// 16 bits with more precision and little range.
        "f16" => F16,
    }
}

#[cfg(feature = "torch")]
impl From<Precision> for crate::model::Dtype {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => Self::F32,
            Precision::Bf16 => Self::Bf16,
            Precision::F16 => Self::F16,
        }
    }
}

/// A device by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// This machine's processor.
    Cpu,
    /// A GPU of NVIDIA's, the first of which is 0.
    Cuda(usize),
}

impl DeviceName {
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

    /// What would be right instead, otherwise.
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
    /// Where the policy's first weights come from.
    pub enum ModelSource {
        /// a small random decoder with a character tokenizer, made from the run's seed.
        "tiny" => Tiny(TinyModel),
        /// a Hugging Face folder: `config.json`, safetensors and `tokenizer.json`.
        "folder" => Folder(ModelFolder),
    }
}

section! {
    /// A small decoder for experiments that take minutes: Llama's shape with a tied head.
    pub struct TinyModel {
        /// Width of the residual stream; a multiple of `heads`.
        hidden: usize = 128, TINY;
        /// Decoder layers.
        layers: usize = 4, TINY;
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
    /// A model on disk.
    pub struct ModelFolder {
        /// The folder, relative to where the command runs, or the id of a model that is in the Hugging Face hub's local cache, such as
        /// `Qwen/Qwen2.5-0.5B-Instruct` or, of one revision, `ORG/NAME@REVISION`. Nothing is downloaded.
        path: PathBuf = PathBuf::new();
        /// In the place of `path`, a popular model in that cache, which also has learning rates for recipes that name none.
        preset: Option<&'static Preset> = None;
    }
}

impl ModelFolder {
    /// What is looked for: a folder or an id.
    pub fn name(&self) -> PathBuf {
        self.preset.map_or_else(|| self.path.clone(), |preset| preset.id.into())
    }
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
