//! Parts of the memory plan, one formula each. Longer than most files, for all formulas share the plan's numbers.

use std::collections::BTreeSet;
use std::path::Path;

use super::per_token::{
    LayerBytes, per_token_for_experts, per_token_of_layer, per_token_of_read_scores, per_token_of_scores, per_token_read,
    per_token_read_by_nets,
};
use super::ranks::Division;
use super::shape::{adapters, config_of, in_4_bits, shape};
use super::{MemoryPart, Taken, count, optimization};
use crate::engine::remote::sync::Carry;
use crate::model::{
    Dtype, Entry, Layout, MOST_GATHERED, ModelConfig, ModelError, PAGE, PREFILL_CELLS, Unit, fused, logits_chunk, quantised_bytes,
};
use crate::ranks::Shard;
use crate::recipe::eval::Eval;
use crate::recipe::generate::OnNewWeights;
use crate::recipe::lora::{BaseFormat, Target};
use crate::recipe::model::{DeviceName, ModelSource};
use crate::recipe::plan::{Pipeline, Plan};
use crate::recipe::reference_policy::ReferencePolicy;
use crate::recipe::task::TaskData;
use crate::recipe::train::Optimization;
use crate::stages::sync::PIECE;
use crate::stages::train::OnStale;
use crate::train::{MasterFormat, MomentFormat};
use crate::util::cores::cores;

/// Code of the program and of libtorch, threads and allocators.
const PROGRAM: u64 = 150 << 20;
/// Largest number of parameters for parallel micro-batches.
const SIDE_BY_SIDE: u64 = 1 << 24;
/// Freed memory that the allocator keeps after a warm-up; larger pieces return to the system.
const KEPT_OF_WARM_UP: u64 = 64 << 20;
/// GPU memory of a process before it computes: CUDA's context, kernels, and the libraries'
/// workspaces.
const GPU_CONTEXT: u64 = 700 << 20;
/// Bytes per logit while a GPU draws a token: f32 logits, scaled logits, log-probabilities,
/// probabilities and sums.
const DRAWN_ON_GPU: u64 = 20;
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

/// One trainer's work.
struct Work<'a> {
    model: &'a ModelConfig,
    of: &'a Optimization,
    /// Sequences of a whole batch.
    sequences: u64,
    /// Tokens of the longest sequence.
    longest: u64,
    /// Number of neighbours with a common prompt, and its tokens.
    shared: (u64, u64),
    /// Parameters of adapters, if they are what is trained.
    adapters: Option<u64>,
    /// If true, the weights below adapters are in 4 bits.
    quantised: bool,
    /// If true, a step's batch comes in several calls, whose gradients are summed.
    in_calls: bool,
}

/// A trainer's forward and backward passes.
struct Passes {
    /// Micro-batches that are computed in parallel.
    at_once: u64,
    /// Tokens of each.
    tokens: u64,
    /// If true, a batch is more than one micro-batch.
    several: bool,
    /// Memory of all parallel micro-batches between forward and backward pass.
    bytes: u64,
    /// Bytes that wait in the host's memory in between.
    moved: u64,
    /// What a backward pass takes in addition, once the logits are freed.
    later: u64,
    why: String,
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

    /// The engines that generate.
    fn served(&mut self, model: &ModelConfig, parameters: u64, longest: u64) -> Result<(), ModelError> {
        let held = if self.plan.generate.on_new_weights == OnNewWeights::Finish { 3 } else { 2 };
        self.copies(held, "served, and on the way", model, parameters)?;
        // Servers have their own memory.
        if self.plan.engine.is_remote() {
            self.transferred(model, parameters);
        } else {
            self.generators(parameters, longest);
        }
        Ok(())
    }

    /// The engine of an evaluation in a pipeline without a generator.
    fn evaluated(&mut self, eval: &Eval, model: &ModelConfig, parameters: u64) -> Result<(), ModelError> {
        self.copies(2, "the evaluated, and the next", model, parameters)?;
        let bytes = self.bytes();
        let shares = if self.publishes_adapters() { bytes == 4 || self.keeps_format() } else { bytes == self.published().0 };
        if !shares {
            let why = format!("the evaluation's copy in {}", self.plan.model.precision().word());
            self.add("served", bytes * self.converted(parameters), why);
        }
        let answer = eval.max_new_tokens.unwrap_or(self.plan.generate.max_new_tokens);
        self.cache(0, 0, eval.max_num_seqs as u64 + 1, None, self.longest(answer as u64));
        Ok(())
    }

    /// Published weights, `held` at a time.
    fn copies(&mut self, held: u64, of: &str, model: &ModelConfig, parameters: u64) -> Result<(), ModelError> {
        if self.publishes_adapters() {
            let bytes = 4 * held * adapters(self.plan, model)?.unwrap_or(0);
            self.add("published", bytes, format!("{held} copies of the adapters in f32: {of}"));
        } else {
            let (bytes, format) = self.published();
            self.add("published", held * bytes * parameters, format!("{held} copies in {format}: {of}"));
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

    /// Tensors that servers take out of the trainer's memory.
    fn transferred(&mut self, model: &ModelConfig, parameters: u64) {
        let Some(format) = self.plan.transfer_format() else { return };
        let bytes = format.bytes() as u64;
        if self.plan.lora.is_some() || bytes != self.published().0 {
            let why = format!("2 copies in {}, which servers take: the newest, and the one before", format.word());
            self.add("for servers", 2 * bytes * parameters, why);
        }
        if self.plan.engine.sync.carry == Carry::Ipc {
            let largest = Layout::new(model).entries().iter().map(Entry::len).max().unwrap_or(0) as u64;
            let piece = (PIECE as u64).min(bytes * parameters).max(bytes * largest);
            self.add("mapped", piece, "a piece of the weights, which servers map".to_owned());
        }
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

    fn trainer(&mut self, [weights, gradients, optimizer, activations, logits]: [&'static str; 5], work: &Work) {
        let (model, of, bytes) = (work.model, work.of, self.bytes());
        let (first, whole, division) = (self.at, parameters(model), self.division);
        let rounds = of.masters == MasterFormat::Bf16;
        // Parameters that ranks divide are gathered while the masters change.
        let copies = division.of_parameters() || bytes != 4 && !rounds;
        let (copy, also) = if copies { (bytes, ", and a copy to compute with") } else { (0, "") };
        // Under adapters the weights are the first weights themselves.
        let parameters = work.adapters.unwrap_or(whole);
        let on_host = self.plan.model.device == DeviceName::Cpu;
        let kept = if self.keeps_format() { bytes } else { 4 + copy };
        let stored = work.quantised.then(|| quantised_bytes(&Layout::new(model), kept));
        let computed = match (work.adapters, stored) {
            // This layer's and the next.
            (None, _) if division.of_parameters() => 2 * bytes * largest_unit(model),
            (None, _) => 0,
            // A layer's numbers at a time, of this pass and of a generator's.
            (Some(_), Some(stored)) => {
                let layout = Layout::new(model);
                let layer = (0..model.layers()).map(|index| layout.unit(Unit::Layer(index)).len() as u64).max().unwrap_or(0);
                (if on_host { 0 } else { stored }) + 2 * bytes * layer
            }
            (Some(_), None) if on_host => {
                if self.keeps_format() {
                    0
                } else {
                    copy * whole
                }
            }
            // A GPU has them once more, in the folder's format and in that of computation.
            (Some(_), None) => whole * if self.keeps_format() { bytes } else { 4 + copy },
        };
        let what = if work.adapters.is_some() { "adapters: " } else { "" };
        let (master, format) = if rounds { (bytes, "bf16") } else { (4, "f32") };
        if division.of_parameters() && division.ranks() > 1 {
            // A critic's are made for it.
            let own = model.scores && self.plan.pipeline != Pipeline::RewardModel;
            let is_there = !own && first == DeviceName::Cpu && master == if self.keeps_format() { bytes } else { 4 };
            self.start(whole, if is_there { 0 } else { master }, copy);
        }
        let why = format!("the trainer's {what}{} in {format}{also}", count(parameters));
        let why = division.explained(why, division.of_parameters());
        self.add(weights, (master + copy) * division.held(parameters) + computed, why);
        let moments = division.of_moments(parameters);
        let in_f32 = || division.explained("two moments in f32".to_owned(), true);
        match of.moments {
            MomentFormat::F32 => self.add(optimizer, 8 * moments, in_f32()),
            MomentFormat::EightBit => {
                let why = "two moments in 8 bits, and two scales for 256 numbers".to_owned();
                self.add(optimizer, 2 * moments + moments / 32, division.explained(why, true));
            }
            MomentFormat::Host => self.on_host(optimizer, 8 * moments, in_f32()),
        }
        // Ranks that divide the state write a part of a checkpoint each.
        self.checkpoint(moments, work.adapters.is_some(), rounds);
        self.pass([gradients, activations, logits], parameters, work);
        for device in &of.replica_devices {
            self.at = *device;
            let below = match work.adapters.filter(|_| *device != first) {
                Some(_) if work.quantised => quantised_bytes(&Layout::new(model), bytes),
                Some(_) => bytes * whole,
                None => 0,
            };
            let why = format!("a copy of the trainer's, {} in {}", count(parameters), self.plan.model.precision().word());
            self.add(weights, bytes * parameters + below, why);
            self.pass([gradients, activations, logits], parameters, work);
        }
        self.at = first;
    }

    /// Adds what rank 0 takes while it sends the `whole` parameters to the ranks that divide them, from `made`
    /// bytes of each that it makes for that.
    fn start(&mut self, whole: u64, made: u64, copy: u64) {
        let there = self.all.iter().filter(|(device, part)| *device == self.at && part.taken == Taken::Always);
        let there: u64 = there.map(|(_, part)| part.bytes).sum();
        let bytes = there + made * whole + (4 + copy) * self.division.held(whole);
        let before = self.all.len();
        self.add("start", bytes, format!("rank 0 sends {} to the other ranks", count(whole)));
        self.all[before..].iter_mut().for_each(|(_, part)| part.taken = Taken::Before);
    }

    /// Adds a part in the host's memory.
    fn on_host(&mut self, what: &'static str, bytes: u64, why: String) {
        let device = std::mem::replace(&mut self.at, DeviceName::Cpu);
        self.add(what, bytes, why);
        self.at = device;
    }

    /// The copy of a trainer's state that is written while the next step trains, in host memory. Next
    /// to a GPU the host has room for it at the end of the run, too.
    fn checkpoint(&mut self, parameters: u64, adapted: bool, rounds: bool) {
        let device = std::mem::replace(&mut self.at, DeviceName::Cpu);
        if device != DeviceName::Cpu || self.plan.checkpoint.every > 0 {
            self.copied(device, parameters, adapted, rounds);
        }
        self.at = device;
    }

    fn copied(&mut self, device: DeviceName, parameters: u64, adapted: bool, rounds: bool) {
        let format = self.plan.checkpoint.dtype.unwrap_or(self.model.dtype);
        let exact = format == Dtype::F32 || adapted || rounds && format == Dtype::Bf16;
        let (rounded, also) = if exact { (0, "") } else { (format.bytes() as u64, ", and rounded") };
        let weights = if rounds && exact { format.bytes() as u64 } else { 4 };
        let of = if device == DeviceName::Cpu { String::new() } else { format!(" of the state on {}", device.word()) };
        let why = format!("a copy{of} that is written while training continues: weights{also}, two moments");
        self.add("checkpoint", (8 + weights + rounded) * parameters, why);
    }

    /// Memory of forward and backward passes on a device.
    fn pass(&mut self, [gradients, activations, logits]: [&'static str; 3], parameters: u64, work: &Work) {
        let (model, of, bytes) = (work.model, work.of, self.bytes());
        let Passes { at_once, tokens, several, bytes: held, moved, later, why: of_passes } = self.passes(work);
        let (division, part) = (self.division, 4 * self.division.of_moments(parameters));
        // A single pass that computes layers again adds each one's to the sum, but not in f16.
        let exact = self.plan.model.precision() != Dtype::F16;
        let alone = work.adapters.is_none() && at_once == 1 && of.replica_devices.is_empty();
        let adds = exact && of.gradient_checkpointing && alone && division.shard() != Shard::Gradients;
        // Pieces and their concatenation, unless they are written into place.
        let pass = if self.again(work) { 4 } else { 2 * bytes + if bytes == 4 { 0 } else { 4 } };
        let if_several = |bytes: u64| if several { bytes } else { 0 };
        let (of_pass, sum, why) = match (division.shard(), adds) {
            (Shard::Parameters, _) => (4 * largest_unit(model), part, "a layer's, and their sum".to_owned()),
            (_, true) => (4 * parameters, if_several(4 * largest_unit(model)), "their sum, and a layer's".to_owned()),
            (shard, false) => {
                let sum = if shard == Shard::Gradients { part } else { if_several(4 * parameters) };
                let why = format!("{at_once} at a time, {pass} bytes a parameter, and their sum");
                (at_once * pass * parameters, sum, why)
            }
        };
        // The part of the sum that a rank updates by.
        let own = if division.shard() == Shard::Optimizer { part } else { 0 };
        self.add_in_steps(gradients, of_pass + sum + own, division.explained(why, division.shard() != Shard::Optimizer));
        self.add_in_steps(activations, held, of_passes);
        if moved > 0 {
            self.on_host(activations, moved, "layers' inputs that wait for the backward pass".to_owned());
        }
        if !model.scores {
            let device = if self.at == DeviceName::Cpu { tch::Device::Cpu } else { tch::Device::Cuda(0) };
            let rows = tokens.min((logits_chunk(device) / model.vocab_size).max(1) as u64);
            // Our kernels hold them in f32, and their gradient in 16 bits.
            let each = if self.is_half_on_gpu() && model.logits_cap.is_none() { 4 + bytes } else { 16 };
            let vocabulary = model.vocab_size as u64;
            let why = format!("{rows} rows × {vocabulary} × {each} bytes, less the gradients that come after them");
            // Logits exist before any gradient, and are freed as the first gradients appear.
            let most = (at_once * rows * vocabulary * each).max(of_pass + later);
            self.add_in_steps(logits, most.saturating_sub(of_pass), why);
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

    /// Returns true if a step's batch comes to the policy's trainer in several calls: groups go ahead, by
    /// [`StepConfig::takes_parts`](crate::stages::train::StepConfig::takes_parts), or `[mix]` adds samples.
    fn comes_in_calls(&self) -> bool {
        let (plan, train) = (self.plan, &self.plan.train);
        let waits = plan.flow.max_staleness > 0 && plan.flow.on_stale == OnStale::Wait && !plan.over_samples();
        let by_group = train.kl_reward.is_none() && plan.teacher.is_none() && plan.pairs.is_none() && plan.critic.is_none();
        plan.mix.is_some() || plan.pipeline.reinforces() && waits && by_group && train.updates_a_step() == 1
    }

    /// Returns true if a trainer computes layers again in the backward pass.
    fn again(&self, work: &Work) -> bool {
        work.of.gradient_checkpointing || work.quantised || self.division.of_parameters()
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

    fn passes(&self, work: &Work) -> Passes {
        let (model, of, bytes) = (work.model, work.of, self.activation_bytes());
        let on_host = self.at == DeviceName::Cpu;
        let small = on_host && of.replica_devices.is_empty() && parameters(model) <= SIDE_BY_SIDE;
        let small = small && !self.division.of_parameters();
        // The experts' loss counts a prompt with each answer, and depends on the cuts, which devices shall not decide.
        let balanced = of.router_aux_loss > 0.0 && model.experts.is_some();
        // A batch is cut into as many micro-batches as are computed in parallel, or more.
        let sequences = work.sequences.div_ceil(self.division.ranks()).max(1);
        let at_once = if small { of.threads.unwrap_or_else(cores) as u64 } else { 1 }.clamp(1, sequences);
        let (batch_tokens, most) = (sequences * work.longest, (of.micro_batch_tokens as u64).max(work.longest));
        let pieces = if balanced { 1 } else { (at_once + of.replica_devices.len() as u64).min(sequences) };
        let at_once = if balanced { at_once.min(batch_tokens.div_ceil(most)) } else { at_once };
        let fused = on_host && work.longest as usize <= fused::LONGEST_FUSED_SEQUENCE;
        let kernels = self.by_kernels(model);
        // Flash attention on a GPU computes prompts once, too.
        let shares = (fused || self.flashes(model)) && !balanced;
        let tokens = work.computed(batch_tokens.div_ceil(pieces).min(most), shares);
        let adapts_experts = self.plan.lora.as_ref().is_some_and(|lora| lora.targets.contains(&Target::Experts));
        let fixed = work.adapters.filter(|_| !adapts_experts).map_or(0, |_| per_token_for_experts(model));
        let each = match &model.delta {
            Some(nets) => LayerBytes::with_nets(model, nets, work.longest, bytes, !on_host && bytes == 4, fixed),
            None => {
                let scores =
                    if fused || self.flashes(model) { 0 } else { per_token_of_scores(model, work.longest, bytes, on_host) };
                LayerBytes::alike(model, (per_token_of_layer(model, fused, kernels) - fixed) * bytes + scores)
            }
        };
        let lean = kernels || !on_host && (model.delta.is_some() || bytes == 4);
        let LayerBytes { all, largest, backward } = each;
        let (layers, stream) = (model.layers() as u64, model.hidden_size as u64 * bytes);
        // The last layer computed is the first differentiated: two layers are in memory, on a GPU after the logits.
        let moves = self.again(work) && of.activations_on_host && !on_host;
        let inputs = if moves { 0 } else { layers * stream };
        let (held, later, why) = match (self.again(work), lean) {
            (true, true) => (inputs, largest + backward, "layers' inputs"),
            (true, false) => (inputs + 2 * largest, 0, "layers' inputs, and one layer"),
            (false, true) => (all, backward, "every layer's"),
            (false, false) => (all + 2 * largest, 0, "every layer's"),
        };
        // Queries and keys are rotated in f32: as they are, turned, and the sum.
        let rotated = if on_host || lean { 0 } else { 4 * 3 * ((model.heads + model.kv_heads) * model.head_dim) as u64 };
        let held = held + rotated;
        let why = format!("{at_once} × {tokens} tokens × {:.1} KiB: {why}", held as f64 / 1024.0);
        let [bytes, later] = [held, later].map(|of| at_once * tokens * of);
        // libtorch takes pinned memory by powers of two.
        let moved = if moves { at_once * layers * (tokens * stream).next_power_of_two() } else { 0 };
        let several = pieces > 1 || batch_tokens > most || work.in_calls;
        Passes { at_once, tokens, several, bytes, moved, later, why }
    }

    /// Returns true if adapters are published as they are. A supervised trainer merges none.
    fn publishes_adapters(&self) -> bool {
        self.plan.lora.as_ref().is_some_and(|lora| self.plan.pipeline == Pipeline::Sft || !lora.merges())
    }

    /// Bytes of a published weight, and its format. A supervised trainer rounds none.
    fn published(&self) -> (u64, &'static str) {
        if self.plan.publishes_rounded() && self.plan.pipeline != Pipeline::Sft {
            (self.bytes(), self.plan.model.precision().word())
        } else {
            (4, "f32")
        }
    }

    /// Engines and their caches on each device, which share the slots. Evaluation runs on the
    /// policy's device.
    fn generators(&mut self, parameters: u64, longest: u64) {
        let (plan, policy) = (self.plan, self.plan.model.device);
        let named = &plan.generate.devices;
        let engines = plan.generators();
        let on: Vec<DeviceName> =
            (0..engines).map(|at| if named.is_empty() { policy } else { named[at % named.len()] }).collect();
        let mut devices = vec![policy];
        for device in &on {
            if !devices.contains(device) {
                devices.push(*device);
            }
        }
        for device in devices {
            let here = on.iter().filter(|on| **on == device).count() as u64;
            let evaluated = plan.eval.as_ref().filter(|eval| eval.every > 0 && device == policy);
            let evaluated = evaluated.map_or(0, |eval| eval.max_num_seqs as u64 + 1);
            let share = |all: usize| (all as u64 * here).div_ceil(engines as u64);
            self.at = device;
            if self.bytes() != self.published().0 || device != policy {
                let why = format!("{here} × the generator's copy in {}", plan.model.precision().word());
                self.add("served", here * self.bytes() * self.converted(parameters), why);
            }
            let slots = share(plan.most_slots()) + here;
            self.cache(slots, share(plan.remembered()), evaluated, plan.generate.cache_tokens.map(share), longest);
        }
        self.at = policy;
    }

    /// Sequences that are decoded, remembered and evaluated, and a limit of tokens of those of the run.
    fn cache(&mut self, slots: u64, remembered: u64, evaluated: u64, limit: Option<u64>, longest: u64) {
        let positions = longest.next_multiple_of(PAGE as u64);
        let all = (slots + remembered) * positions;
        let (tokens, slots) = (limit.unwrap_or(all).min(all) + evaluated * positions, slots + evaluated);
        let (states, width) = (self.model.delta.clone(), (self.model.kv_heads * self.model.head_dim) as u64);
        let layers = (self.model.layers() - states.as_ref().map_or(0, |of| of.layers.len())) as u64;
        let known = matches!(self.plan.task.data, TaskData::Arithmetic { .. });
        let assumed = if known { "" } else { " (prompts of 256 assumed)" };
        let of = match limit.is_some_and(|limit| limit < all) {
            true => format!("{tokens} tokens"),
            false => format!("{} slots × {positions} tokens", slots + remembered),
        };
        let why = format!("{of} × {layers} layers × {} numbers{assumed}", 2 * width);
        self.add("kv cache", tokens * layers * 2 * width * self.activation_bytes(), why);
        if let Some(of) = states {
            let ([conv, heads], layers) = (of.state_sizes().map(|size| size as u64), of.layers.len() as u64);
            let states = slots + remembered;
            let why = format!("{states} sequences × {layers} layers × ({conv} numbers, and {heads} in f32)");
            self.add("states", states * layers * (conv * self.activation_bytes() + heads * 4), why);
        }
        let vocab = self.model.vocab_size as u64;
        let on_gpu = self.at != DeviceName::Cpu;
        let numbers = if on_gpu { DRAWN_ON_GPU / 4 } else { 4 };
        self.add("sampling", slots * vocab * 4 * numbers, format!("{slots} rows × {vocab} × {numbers} in f32"));
        if on_gpu {
            // Padding of a rectangle is computed, too. A prompt longer than a chunk is read alone.
            let cells = (PREFILL_CELLS as u64).max(positions).min(slots * positions);
            let layer = match (&self.model.delta, self.by_kernels(&self.model)) {
                (Some(nets), _) => per_token_read_by_nets(&self.model, nets, self.bytes()),
                (None, true) => per_token_read(&self.model, self.bytes()),
                (None, false) if self.is_half_on_gpu() => {
                    per_token_read(&self.model, self.bytes()) + per_token_of_read_scores(&self.model, positions)
                }
                (None, false) => per_token_of_layer(&self.model, false, false) * self.bytes(),
            };
            let why = format!("{cells} tokens × {:.1} KiB: one layer's, of prompts that are read at once", layer as f64 / 1024.0);
            self.add("prefill", cells * layer, why);
            if remembered > 0 {
                // Keys and values of whole sequences, of which ends are read, and the place of each.
                let (rows, each) =
                    ((MOST_GATHERED as u64).max(positions).min(slots * positions), 2 * width * self.activation_bytes());
                let why = format!(
                    "{rows} tokens of remembered sequences × {:.1} KiB: one layer's, to read their ends",
                    each as f64 / 1024.0
                );
                self.add("remembered", rows * (each + 8), why);
            }
        }
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

impl Work<'_> {
    /// Tokens computed in a micro-batch of `tokens`: if it `shares` prompts, neighbours compute a
    /// common one once.
    fn computed(&self, tokens: u64, shares: bool) -> u64 {
        let (group, prompt) = self.shared;
        if !shares || prompt == 0 {
            return tokens;
        }
        let (apart, together) = (group * self.longest, prompt + group * (self.longest - prompt));
        // The first group may have begun in the micro-batch before.
        ((tokens * together).div_ceil(apart) + prompt).min(tokens)
    }
}

/// Numbers of the largest part of a model that gradients come for at a time.
fn largest_unit(model: &ModelConfig) -> u64 {
    let layout = Layout::new(model);
    layout.unit_list().map(|unit| layout.unit(unit).len() as u64).max().unwrap_or(0)
}

fn parameters(model: &ModelConfig) -> u64 {
    Layout::new(model).total() as u64
}

fn parameters_of(folder: &Path) -> Result<u64, ModelError> {
    Ok(parameters(&config_of(folder)?))
}
