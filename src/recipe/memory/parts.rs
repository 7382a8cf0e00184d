//! Parts of the memory plan, one formula each: what all of them share, and how they come together.

use std::collections::BTreeSet;
use std::path::Path;

use super::ranks::Division;
use super::shape::{adapters, config_of, in_4_bits, shape};
use super::{MemoryPart, Taken, count, optimization};
use crate::model::{Dtype, Layout, ModelConfig, ModelError, quantised_bytes};
use crate::recipe::lora::BaseFormat;
use crate::recipe::model::{DeviceName, ModelSource};
use crate::recipe::plan::{Pipeline, Plan};
use crate::recipe::reference_policy::ReferencePolicy;
use crate::recipe::task::TaskData;
use trainer::Work;

mod engines;
mod trainer;

/// Code of the program and of libtorch, threads and allocators.
const PROGRAM: u64 = 150 << 20;
/// Freed memory that the allocator keeps after a warm-up; larger pieces return to the system.
const KEPT_OF_WARM_UP: u64 = 64 << 20;
/// GPU memory of a process before it computes: CUDA's context, kernels, and the libraries'
/// workspaces.
const GPU_CONTEXT: u64 = 700 << 20;
/// Assumed tokens of a prompt if the data is unread.
const PROMPT_ASSUMED: u64 = 256;

/// All parts of `plan`, with their devices, of rank 0 of this number of ranks.
pub(super) fn parts(plan: &Plan, ranks: Option<usize>) -> Result<Vec<(DeviceName, MemoryPart)>, ModelError> {
    let (model, at, all) = (shape(plan)?, plan.model.device, Vec::new());
    let gets_head = plan.pipeline == Pipeline::RewardModel && !model.scores;
    let in_4_bits = in_4_bits(plan) && !gets_head;
    let mut parts = Parts { plan, model, division: Division::of(plan, ranks), gets_head, in_4_bits, at, all };
    parts.collect()?;
    Ok(parts.all)
}

struct Parts<'a> {
    plan: &'a Plan,
    model: ModelConfig,
    /// What ranks divide.
    division: Division,
    /// If true, the model gets a score head, and its numbers are whole and in f32 after that.
    gets_head: bool,
    /// If true, the model's folder has it in 4 bits, and it stays so.
    in_4_bits: bool,
    /// Device of added parts.
    at: DeviceName,
    all: Vec<(DeviceName, MemoryPart)>,
}

impl Parts<'_> {
    fn add(&mut self, what: &'static str, bytes: u64, why: String) {
        if bytes > 0 {
            self.all.push((self.at, MemoryPart { what, bytes, why, taken: Taken::Always }));
        }
    }

    /// Adds a part that is taken only while a step is trained.
    fn add_in_steps(&mut self, what: &'static str, bytes: u64, why: String) {
        let before = self.all.len();
        self.add(what, bytes, why);
        self.all[before..].iter_mut().for_each(|(_, part)| part.taken = Taken::InSteps);
    }

    fn collect(&mut self) -> Result<(), ModelError> {
        let (plan, model) = (self.plan, self.model.clone());
        let (parameters, on_host) = (parameters(&model), plan.model.device == DeviceName::Cpu);
        if on_host {
            self.add("program", PROGRAM, "code, libtorch, threads".to_owned());
            let (bytes, format) = if self.keeps_format() { (self.bytes(), plan.model.precision().word()) } else { (4, "f32") };
            let stored = self.over_4_bits().then(|| quantised_bytes(&Layout::new(&model), bytes));
            // Of a folder, tensor by tensor.
            let at_once = matches!(plan.model.source, ModelSource::Folder(_)) && plan.pipeline != Pipeline::RewardModel;
            match stored.filter(|_| self.in_4_bits || at_once) {
                Some(stored) => self.add("first weights", stored, format!("{} in 4 bits", count(parameters))),
                None => {
                    self.add("first weights", bytes * parameters, format!("{} in {format}", count(parameters)));
                    let why = "the matrices of the layers, which are made of the first weights";
                    self.add("in 4 bits", stored.unwrap_or(0), why.to_owned());
                }
            }
        }
        let gpus: BTreeSet<DeviceName> = plan.devices().into_iter().map(|(_, device)| device).collect();
        for device in gpus.into_iter().filter(|device| *device != DeviceName::Cpu) {
            self.at = device;
            self.add("context", GPU_CONTEXT, "CUDA's own, and its libraries' working memory".to_owned());
        }
        self.at = plan.model.device;
        let longest = self.longest(self.answer());
        let sequences = plan.samples_per_step() as u64;
        let shared = match plan.pipeline {
            Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill => {
                let room = longest.saturating_sub(plan.generate.max_new_tokens as u64);
                (plan.generate.group_size as u64, self.prompt().min(room))
            }
            _ => (1, 0),
        };
        if let Some((_, of)) = optimization(plan) {
            let model = if plan.pipeline == Pipeline::RewardModel { model.scoring() } else { model.clone() };
            self.trainer(
                ["weights", "gradients", "optimizer", "activations", "logits"],
                &Work {
                    model: &model,
                    of,
                    sequences,
                    longest,
                    shared,
                    adapters: adapters(plan, &model)?,
                    quantised: self.over_4_bits(),
                    in_calls: plan.pipeline.trains_by_train() && self.comes_in_calls(),
                },
            );
        }
        let reinforces = plan.pipeline.reinforces();
        if let Some(sft) = plan.sft.as_ref().filter(|_| reinforces && on_host) {
            let longest = self.longest(self.pair_answer());
            let (of, sequences, adapters) = (&sft.optimization, sft.batch as u64, adapters(plan, &model)?);
            let quantised = self.over_4_bits();
            let work = Work { model: &model, of, sequences, longest, shared: (1, 0), adapters, quantised, in_calls: false };
            let kept = self.passes(&work).bytes.min(KEPT_OF_WARM_UP);
            self.add("warm-up", kept, "what its trainer freed, which the next does not reuse for certain".to_owned());
        }
        if plan.pipeline.trains_by_train() {
            if let Some(critic) = &plan.critic {
                let model = critic.path.as_deref().map_or_else(|| Ok(model.clone()), config_of)?.scoring();
                let names = ["critic weights", "its gradients", "its optimizer", "its activations", "its scores"];
                let of = &critic.optimization;
                // Its trunk is whole, whatever the policy's is.
                let (adapters, quantised, in_calls) = (None, false, false);
                self.trainer(names, &Work { model: &model, of, sequences, longest, shared, adapters, quantised, in_calls });
            }
            self.reference(parameters)?;
        }
        let evaluates = plan.eval.as_ref().filter(|eval| eval.every > 0 && !plan.pipeline.evaluates_pairs());
        match evaluates {
            _ if reinforces => self.served(&model, parameters, longest)?,
            Some(eval) => self.evaluated(eval, &model, parameters)?,
            None => {}
        }
        if reinforces || evaluates.is_some() || plan.rescores() {
            self.judges()?;
        }
        Ok(())
    }

    /// The models that judge.
    fn judges(&mut self) -> Result<(), ModelError> {
        for (_, path) in self.plan.models().into_iter().filter(|(key, _)| key.starts_with("reward")) {
            let scorer = parameters_of(&path)?;
            self.add("reward model", 8 * scorer, format!("{}: {} in f32, twice", path.display(), count(scorer)));
        }
        Ok(())
    }

    /// Bytes of a number that is computed with.
    fn bytes(&self) -> u64 {
        if self.plan.model.precision() == Dtype::F32 { 4 } else { 2 }
    }

    /// Bytes of a number that layers hand on, and of keys and values.
    fn activation_bytes(&self) -> u64 {
        if self.at == DeviceName::Cpu { 4 } else { self.bytes() }
    }

    /// Returns true if the model's folder is in the format of computation, so that its weights stay
    /// in that format.
    fn keeps_format(&self) -> bool {
        self.model.dtype.bytes() == 2 && self.model.dtype == self.plan.model.precision() && !self.gets_head
    }

    fn prompt(&self) -> u64 {
        match &self.plan.task.data {
            TaskData::Arithmetic { digits, .. } => 2 * u64::from(*digits) + 3,
            TaskData::Data(_) | TaskData::Environment { .. } | TaskData::Rollouts { .. } => PROMPT_ASSUMED,
        }
    }

    /// Tokens of the longest sequence with such an answer that model and environment allow.
    fn longest(&self, answer: u64) -> u64 {
        let most = self.plan.environment.as_ref().and_then(|environment| environment.limits.max_tokens);
        let most = most.unwrap_or(usize::MAX).min(self.model.max_positions);
        self.prompt().saturating_add(answer).min(most as u64)
    }

    fn answer(&self) -> u64 {
        match (&self.plan.task.data, self.plan.pipeline) {
            (_, Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill | Pipeline::GrpoOffline) => {
                let turns = self.plan.environment.as_ref().map_or(1, |environment| environment.limits.max_turns as u64);
                (self.plan.generate.max_new_tokens as u64).saturating_mul(turns)
            }
            _ => self.pair_answer(),
        }
    }

    /// Tokens of the completion in a supervised pair.
    fn pair_answer(&self) -> u64 {
        match &self.plan.task.data {
            TaskData::Arithmetic { digits, .. } => u64::from(*digits) + 2,
            TaskData::Data(_) | TaskData::Environment { .. } | TaskData::Rollouts { .. } => PROMPT_ASSUMED,
        }
    }

    /// Returns true if the weights below the policy's adapters are in 4 bits.
    fn over_4_bits(&self) -> bool {
        self.plan.lora.as_ref().is_some_and(|lora| self.in_4_bits || lora.base == BaseFormat::Nf4)
    }

    /// Numbers of the policy's weights that another format takes a copy of: all, or those that are not in 4
    /// bits.
    fn converted(&self, parameters: u64) -> u64 {
        let bytes = |kept| quantised_bytes(&Layout::new(&self.model), kept);
        if self.over_4_bits() { bytes(1) - bytes(0) } else { parameters }
    }

    /// Returns true if attention on this device is flash attention, on a GPU that has it.
    fn flashes(&self, model: &ModelConfig) -> bool {
        let takes_heads = model.head_dim.is_multiple_of(8) && model.head_dim <= 256;
        model.attention_cap.is_none() && takes_heads && self.is_half_on_gpu()
    }

    fn is_half_on_gpu(&self) -> bool {
        self.bytes() == 2 && self.at != DeviceName::Cpu
    }

    /// Whether a pass on this device is by flash attention and our kernels.
    fn by_kernels(&self, model: &ModelConfig) -> bool {
        self.flashes(model) && model.delta.is_none()
    }

    fn reference(&mut self, parameters: u64) -> Result<(), ModelError> {
        let copy = if self.bytes() == 4 { 0 } else { self.bytes() };
        let parts = self
            .plan
            .scoring_policies()
            .flat_map(|(section, of)| of.parts(section).into_iter().map(move |part| (section, part.1)));
        for (section, part) in parts {
            let (bytes, why) = match part {
                ReferencePolicy::Frozen { path: Some(path) } => ((4 + copy) * parameters_of(&path)?, "a folder's weights in f32"),
                ReferencePolicy::Frozen { path: None } => {
                    (copy * self.converted(parameters), "the first weights, to compute with")
                }
                ReferencePolicy::Server(_) | ReferencePolicy::Tinker(_) | ReferencePolicy::BySource { .. } => continue,
                ReferencePolicy::Ema { .. } | ReferencePolicy::Periodic { .. } => {
                    ((8 + copy) * parameters, "its weights in f32, and the next")
                }
            };
            self.add(section, bytes, why.to_owned());
        }
        Ok(())
    }
}

fn parameters(model: &ModelConfig) -> u64 {
    Layout::new(model).total() as u64
}

fn parameters_of(folder: &Path) -> Result<u64, ModelError> {
    Ok(parameters(&config_of(folder)?))
}
