//! What generation takes: published weights, engines, and their caches.

use super::super::per_token::{per_token_of_layer, per_token_of_read_scores, per_token_read, per_token_read_by_nets};
use super::super::shape::adapters;
use super::Parts;
use crate::engine::remote::sync::Carry;
use crate::model::{Entry, Layout, MOST_GATHERED, ModelConfig, ModelError, PAGE, PREFILL_CELLS};
use crate::recipe::eval::Eval;
use crate::recipe::generate::OnNewWeights;
use crate::recipe::model::DeviceName;
use crate::recipe::plan::Pipeline;
use crate::recipe::task::TaskData;
use crate::stages::sync::PIECE;

/// Bytes per logit while a GPU draws a token: f32 logits, scaled logits, log-probabilities,
/// probabilities and sums.
const DRAWN_ON_GPU: u64 = 20;

impl Parts<'_> {
    /// The engines that generate.
    pub(super) fn served(&mut self, model: &ModelConfig, parameters: u64, longest: u64) -> Result<(), ModelError> {
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
    pub(super) fn evaluated(&mut self, eval: &Eval, model: &ModelConfig, parameters: u64) -> Result<(), ModelError> {
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

    /// Returns true if adapters are published as they are. A supervised trainer merges none.
    pub(super) fn publishes_adapters(&self) -> bool {
        self.plan.lora.as_ref().is_some_and(|lora| self.plan.pipeline == Pipeline::Sft || !lora.merges())
    }

    /// Bytes of a published weight, and its format. A supervised trainer rounds none.
    pub(super) fn published(&self) -> (u64, &'static str) {
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
            let why =
                format!("{cells} tokens × {:.1} KiB: one layer's, of prompts that are read together", layer as f64 / 1024.0);
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
}
