//! `[model]`: where the first weights come from.

use std::path::PathBuf;

use super::declare::{section, tagged};
use super::setting::{Limit, PATH_GIVEN};

const TINY: Limit<usize> = Limit { text: "1 to 65536", holds: |size| (1..=65536).contains(size) };

tagged! {
    /// Where the policy's first weights come from.
    pub enum Model {
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
        /// The folder, relative to where the command runs.
        path: PathBuf = PathBuf::new(), PATH_GIVEN;
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
