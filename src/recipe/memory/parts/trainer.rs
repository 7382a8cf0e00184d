//! What a trainer takes: weights, gradients, moments, and the passes of its micro-batches.

use super::super::per_token::{LayerBytes, per_token_for_experts, per_token_of_layer, per_token_of_scores};
use super::super::{Taken, count};
use super::{Parts, parameters};
use crate::model::{Dtype, Layout, ModelConfig, Unit, fused, logits_chunk, quantised_bytes};
use crate::ranks::Shard;
use crate::recipe::lora::Target;
use crate::recipe::model::DeviceName;
use crate::recipe::plan::Pipeline;
use crate::recipe::train::Optimization;
use crate::stages::train::OnStale;
use crate::train::{MasterFormat, MomentFormat};
use crate::util::cores::cores;

/// Largest number of parameters for parallel micro-batches.
const SIDE_BY_SIDE: u64 = 1 << 24;

/// One trainer's work.
pub(super) struct Work<'a> {
    pub(super) model: &'a ModelConfig,
    pub(super) of: &'a Optimization,
    /// Sequences of a whole batch.
    pub(super) sequences: u64,
    /// Tokens of the longest sequence.
    pub(super) longest: u64,
    /// Number of neighbours with a common prompt, and its tokens.
    pub(super) shared: (u64, u64),
    /// Parameters of adapters, if they are what is trained.
    pub(super) adapters: Option<u64>,
    /// If true, the weights below adapters are in 4 bits.
    pub(super) quantised: bool,
    /// If true, a step's batch comes in several calls, whose gradients are summed.
    pub(super) in_calls: bool,
}

/// A trainer's forward and backward passes.
pub(super) struct Passes {
    /// Micro-batches that are computed in parallel.
    at_once: u64,
    /// Tokens of each.
    tokens: u64,
    /// If true, a batch is more than one micro-batch.
    several: bool,
    /// Memory of all parallel micro-batches between forward and backward pass.
    pub(super) bytes: u64,
    /// Bytes that wait in the host's memory in between.
    moved: u64,
    /// What a backward pass takes in addition, once the logits are freed.
    later: u64,
    why: String,
}

impl Parts<'_> {
    pub(super) fn trainer(&mut self, [weights, gradients, optimizer, activations, logits]: [&'static str; 5], work: &Work) {
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

    /// Returns true if a step's batch comes to the policy's trainer in several calls: groups go ahead, by
    /// [`StepConfig::takes_parts`](crate::stages::train::StepConfig::takes_parts), or `[mix]` adds samples.
    pub(super) fn comes_in_calls(&self) -> bool {
        let (plan, train) = (self.plan, &self.plan.train);
        let waits = plan.flow.max_staleness > 0 && plan.flow.on_stale == OnStale::Wait && !plan.over_samples();
        let by_group = train.kl_reward.is_none() && plan.teacher.is_none() && plan.pairs.is_none() && plan.critic.is_none();
        plan.mix.is_some() || plan.pipeline.reinforces() && waits && by_group && train.updates_a_step() == 1
    }

    /// Returns true if a trainer computes layers again in the backward pass.
    fn again(&self, work: &Work) -> bool {
        work.of.gradient_checkpointing || work.quantised || self.division.of_parameters()
    }

    pub(super) fn passes(&self, work: &Work) -> Passes {
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
