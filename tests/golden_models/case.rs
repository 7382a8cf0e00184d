//! The golden folders: reading them, and comparing with their tolerances.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use rollflow::data::ChatMessage;
use rollflow::model::{Compute, Decoder, Dtype, ModelConfig, Packed, Weights, load_hf};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

#[derive(Deserialize)]
pub struct Golden {
    pub tolerance: Tolerances,
    pub right: Padded,
    pub left: Padded,
    pub greedy: Greedy,
    pub sft: Sft,
    pub tokenizer: Vec<Text>,
    #[serde(default)]
    pub chat: Vec<Chat>,
}

#[derive(Deserialize)]
pub struct Chat {
    pub messages: Vec<ChatMessage>,
    pub add_generation_prompt: bool,
    pub text: String,
    pub ids: Vec<u32>,
}

#[derive(Deserialize)]
pub struct Greedy {
    pub max_new_tokens: usize,
    pub tokens: Vec<Vec<u32>>,
    pub logprobs: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
pub struct Text {
    pub text: String,
    pub ids: Vec<u32>,
    pub decoded: String,
}

#[derive(Deserialize)]
pub struct Tolerances {
    pub logits: Tolerance,
    pub after_steps: Tolerance,
}

#[derive(Clone, Copy, Deserialize)]
pub struct Tolerance {
    pub rtol: f64,
    pub atol: f64,
}

#[derive(Deserialize)]
pub struct Padded {
    pub input_ids: Vec<Vec<u32>>,
    pub attention_mask: Vec<Vec<u8>>,
}

#[derive(Deserialize)]
pub struct Sft {
    pub labels: Vec<Vec<i64>>,
    pub optimizer: AdamW,
    pub steps: Vec<SftStep>,
    pub loss_after_3_steps: f64,
}

#[derive(Deserialize)]
pub struct AdamW {
    pub lr: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    pub clip_norm: f64,
}

#[derive(Deserialize)]
pub struct SftStep {
    pub loss: f64,
    pub grad_norm: f64,
    #[serde(default)]
    pub grad_norm_per_param: HashMap<String, f64>,
}

pub struct Case {
    pub dir: PathBuf,
    pub golden: Golden,
    pub expected: HashMap<String, Tensor>,
    pub config: ModelConfig,
    pub weights: Weights,
}

/// A GPU where there is one (R112), else the processor.
pub fn device() -> Device {
    let required = std::env::var_os("ROLLFLOW_REQUIRE_GPU").is_some();
    assert!(!required || tch::Cuda::is_available(), "ROLLFLOW_REQUIRE_GPU is set, and libtorch finds no CUDA device");
    Device::cuda_if_available()
}

impl Case {
    fn load(dir: &Path) -> Case {
        let text = std::fs::read_to_string(dir.join("golden/golden.json")).unwrap();
        let expected = Tensor::read_safetensors(dir.join("golden/expected.safetensors")).unwrap();
        let (config, weights) = load_hf(dir).unwrap_or_else(|error| panic!("{error}"));
        let golden: Golden = serde_json::from_str(&text).unwrap();
        // transformers takes LongRoPE's factors for long contexts for batches with a sequence beyond that of pre-training.
        let longest = golden.right.input_ids[0].len();
        let context = config.contexts().filter(|(short, _)| longest > *short);
        let config = config.within(context.map(|(_, longest)| longest)).unwrap();
        Case {
            dir: dir.into(),
            golden,
            expected: expected.into_iter().collect(),
            config,
            weights: weights.on(Compute { device: device(), dtype: Dtype::F32 }),
        }
    }

    pub fn decoder(&self) -> Decoder {
        Decoder::new(&self.config, self.weights.layout.clone())
    }
}

impl Padded {
    /// The real tokens of each row.
    pub fn sequences(&self) -> Vec<Vec<u32>> {
        let real = |(ids, mask): (&Vec<u32>, &Vec<u8>)| {
            ids.iter().zip(mask).filter(|(_, mask)| **mask == 1).map(|(id, _)| *id).collect()
        };
        self.input_ids.iter().zip(&self.attention_mask).map(real).collect()
    }

    pub fn packed(&self) -> Packed {
        Packed::new(self.sequences().iter().map(Vec::as_slice))
    }

    /// Entries `[row, column, …]` at real positions, one after the other. A tensor with a column less speaks of pairs of neighbours:
    /// those count of which both are real.
    pub fn at_real_positions(&self, tensor: &Tensor) -> Tensor {
        let columns = tensor.size()[1] as usize;
        let pairs = columns + 1 == self.attention_mask[0].len();
        let real = |mask: &Vec<u8>| (0..columns).map(|at| mask[at] == 1 && (!pairs || mask[at + 1] == 1)).collect::<Vec<bool>>();
        let rows: Vec<Tensor> = self
            .attention_mask
            .iter()
            .enumerate()
            .map(|(row, mask)| tensor.get(row as i64).index(&[Some(Tensor::from_slice(&real(mask)))]))
            .collect();
        Tensor::cat(&rows, 0)
    }
}

/// Runs `check` on every folder and reports all that fail, by name.
pub fn for_every_model(check: impl Fn(&Case)) {
    // Tests run side by side, and teams of threads on the same cores spin against each other.
    tch::set_num_threads(1);
    let root = std::env::var_os("ROLLFLOW_GOLDEN_MODELS").map_or_else(|| "tests/golden/models".into(), PathBuf::from);
    let entries = std::fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    let mut dirs: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    dirs.sort();
    assert!(!dirs.is_empty(), "{} holds no model", root.display());
    let mut failed = Vec::new();
    for dir in dirs {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(&Case::load(&dir)))) {
            let message =
                panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            failed.push(format!("{}: {}", dir.display(), message.unwrap_or_default()));
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
}

pub fn assert_close(what: &str, found: &Tensor, expected: &Tensor, tolerance: Tolerance) {
    assert_close_but(what, found, expected, tolerance, &found.zeros_like());
}

/// With `more` allowed, by element.
pub fn assert_close_but(what: &str, found: &Tensor, expected: &Tensor, tolerance: Tolerance, more: &Tensor) {
    assert_eq!(found.size(), expected.size(), "{what}: shape");
    let [found, expected, more] = [found, expected, more].map(|tensor| tensor.to_device(Device::Cpu).to_kind(Kind::Double));
    let excess = ((&found - &expected).abs() - expected.abs() * tolerance.rtol - more).max();
    let excess = excess.double_value(&[]);
    assert!(excess <= tolerance.atol, "{what}: beyond rtol {} by {excess:e}, atol {:e}", tolerance.rtol, tolerance.atol);
}

pub fn assert_near(what: &str, found: f64, expected: f64, tolerance: Tolerance) {
    let allowed = tolerance.atol + tolerance.rtol * expected.abs();
    assert!((found - expected).abs() <= allowed, "{what}: {found}, expected {expected} ± {allowed:e}");
}
