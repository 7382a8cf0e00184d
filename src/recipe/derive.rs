//! Numbers that follow from a plan, and warnings about unusual values. Pure: the machine is an
//! argument.

use super::defaults::Derived;
use super::generate::Generate;
use super::model::{DeviceName, ModelSource};
use super::plan::{OnStale, Pipeline, Plan};
use super::practice;
use super::task::TaskData;
use super::train::Optimization;
use super::trainer::TrainerBackend;
use crate::algo::{LossChoice, Proximal};
use crate::model::Dtype;
use crate::rollout::{Pace, PaceRule};
use crate::stages::batch::over_sampled;
use crate::util::cores::{cores, multiplies_bf16};

/// A cache has room for the longest sequence in every slot.
const MOST_SLOTS_UNASKED: usize = 256;

/// Facts of the machine that warnings depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Threads that run at the same time.
    pub threads: usize,
    /// GPUs that `nvidia-smi` lists and `CUDA_VISIBLE_DEVICES` does not hide.
    pub gpus: usize,
    /// If true, the processor multiplies bf16 numbers.
    pub multiplies_bf16: bool,
}

impl Machine {
    /// This machine.
    pub fn here() -> Self {
        Machine { threads: cores(), gpus: gpus(), multiplies_bf16: multiplies_bf16() }
    }
}

fn gpus() -> usize {
    if std::env::var_os("CUDA_VISIBLE_DEVICES").is_some_and(|visible| visible.is_empty() || visible == "-1") {
        return 0;
    }
    let listed = std::process::Command::new("nvidia-smi").arg("--list-gpus").stdin(std::process::Stdio::null()).output();
    listed.map_or(0, |output| listed_gpus(&String::from_utf8_lossy(&output.stdout)))
}

/// The GPUs in the output of `nvidia-smi --list-gpus`. Parts of a GPU (MIG) are indented and not counted.
fn listed_gpus(output: &str) -> usize {
    output.lines().filter(|line| line.starts_with("GPU ")).count()
}

impl Plan {
    /// Samples that one optimizer step trains on.
    pub fn samples_per_step(&self) -> usize {
        match (self.pipeline, &self.sft, &self.reward_model) {
            (Pipeline::Sft, Some(sft), _) => sft.batch,
            (Pipeline::RewardModel, _, Some(of)) => of.batch.saturating_mul(2),
            (Pipeline::Dpo, ..) => self.batch.groups.saturating_mul(2),
            _ => self.batch.groups.saturating_mul(self.generate.group_size),
        }
    }

    /// Optimizer steps of the pipeline's last phase.
    pub fn steps(&self) -> u64 {
        match (self.pipeline, &self.sft, &self.reward_model) {
            (Pipeline::Sft, Some(sft), _) => sft.steps,
            (Pipeline::RewardModel, _, Some(of)) => of.steps,
            _ => self.train.steps,
        }
    }

    /// Optimizer steps of `[train]` that train the policy, without the critic's warm-up.
    pub fn policy_steps(&self) -> u64 {
        self.train.steps.saturating_sub(self.critic.as_ref().map_or(0, |critic| critic.warmup_steps))
    }

    /// Optimizer steps of one pass over the prompts (or pairs), if no filter drops any and the size
    /// of the data is known.
    pub fn steps_per_epoch(&self) -> Option<f64> {
        let prompts = match self.task.data {
            TaskData::Arithmetic { count: Some(count), .. } => count,
            TaskData::Arithmetic { digits, .. } => 100_usize.checked_pow(digits)?,
            _ => return None,
        } as f64;
        Some(match (self.pipeline, &self.sft) {
            (Pipeline::Sft, Some(sft)) if !sft.sources().is_empty() || sft.packs() => return None,
            (Pipeline::Sft, Some(sft)) => (prompts * sft.fraction).ceil() / sft.batch as f64,
            (Pipeline::RewardModel | Pipeline::Dpo, _) => return None,
            _ => prompts / self.batch.groups as f64,
        })
    }

    /// Groups that are trained from one publish of the weights to the next.
    pub fn groups_per_publish(&self) -> usize {
        self.pace().groups_per_version() as usize
    }

    /// The rule by which the window follows from staleness, batch and sync.
    pub(crate) fn pace(&self) -> PaceRule {
        let (groups, candidates) = (self.batch.groups as u64, self.groups_chosen_from() as u64);
        let (steps_per_version, max_staleness) = (self.sync.every, self.flow.max_staleness);
        PaceRule { groups, candidates, steps_per_version, max_staleness, steps: Some(self.train.steps) }
    }

    /// Groups that a step chooses from: ⌈`batch.oversampling_factor` × `batch.groups`⌉.
    pub fn groups_chosen_from(&self) -> usize {
        over_sampled(self.batch.groups, self.batch.oversampling_factor)
    }

    /// Returns true if steps take groups out of order.
    pub fn over_samples(&self) -> bool {
        self.groups_chosen_from() > self.batch.groups
    }

    /// Groups that may be between admission and training.
    pub fn admission_window(&self) -> usize {
        self.flow.window.unwrap_or_else(|| self.pace().window() as usize)
    }

    /// Largest lag, in versions, of a group that is trained in order ([`Pace::worst_lag`]): S for
    /// the full window, less for a narrower one.
    pub fn worst_lag_in_turn(&self) -> u64 {
        let (groups_per_version, in_flight) = (self.groups_per_publish() as u64, self.admission_window() as u64);
        Pace { groups_per_version, in_flight, total: None }.worst_lag()
    }

    /// Largest lag, in versions, of a trained token. In order it follows from the window. Out of
    /// order, W − 1 groups that overtake another add ⌈(W − 1) / P⌉. A straggler may be overtaken
    /// until it is due, so that they add all that `max_staleness` leaves. Older groups are waited
    /// for, dropped or masked.
    pub fn worst_staleness(&self) -> u64 {
        if self.over_samples() { self.flow.max_staleness } else { self.worst_lag_in_turn().min(self.flow.max_staleness) }
    }

    /// Returns the sections that train a model, with their settings of an optimizer step.
    pub fn optimizations(&self) -> impl Iterator<Item = (&'static str, &Optimization)> {
        let sft = self.sft.as_ref().map(|of| ("sft", &of.optimization));
        let reward_model = self.reward_model.as_ref().map(|of| ("reward_model", &of.optimization));
        let critic = self.critic.as_ref().map(|of| ("critic", &of.optimization));
        [Some(("train", &self.train.optimization)), sft, reward_model, critic].into_iter().flatten()
    }

    /// All devices that models compute on, with the keys that name them; the policy's first.
    pub fn devices(&self) -> Vec<(String, DeviceName)> {
        let mut all = vec![("model.device".to_owned(), self.model.device)];
        for (section, of) in self.optimizations() {
            all.extend(of.replica_devices.iter().map(|device| (format!("{section}.replica_devices"), *device)));
        }
        all.extend(self.generate.devices.iter().map(|device| ("generate.devices".to_owned(), *device)));
        all
    }

    /// Engines in parallel: one if the run must be bit for bit repeatable.
    pub fn generators(&self) -> usize {
        if self.flow.max_staleness == 0 { 1 } else { self.generate.workers }
    }

    /// Returns true if the policy is trained while it samples.
    pub fn overlaps(&self) -> bool {
        self.pipeline.reinforces() && self.flow.max_staleness > 0
    }

    /// Format of tensors that servers take out of the trainer's memory; `None` if they read a folder, in the
    /// model's format unless `engine.dtype` says otherwise.
    pub fn transfer_format(&self) -> Option<Dtype> {
        let transfers = self.engine.is_remote() && self.engine.sync.carry.is_from_memory();
        transfers.then(|| self.engine.dtype.unwrap_or(self.model.precision()))
    }

    /// Returns true if weights are published in the compute format, because every reader computes
    /// in it. Servers read a folder in the model's format, and a moving reference is a mean of f32
    /// parameters.
    pub fn publishes_rounded(&self) -> bool {
        let computes = !self.engine.is_remote() || self.transfer_format() == Some(self.model.precision());
        computes && self.scoring_policies().all(|(_, of)| !of.follows())
    }

    /// Completions that may be in flight at the same time: those of the admission window.
    pub fn most_in_flight(&self) -> usize {
        self.admission_window().saturating_mul(self.generate.group_size)
    }

    /// Largest number of sequences decoded at the same time: as many as can be in flight, and in this process at
    /// most the largest cache that is allocated without a setting.
    pub fn most_slots(&self) -> usize {
        match (self.generate.max_num_seqs, self.engine.is_remote()) {
            (0, true) => self.most_in_flight(),
            (0, false) => self.most_in_flight().min(MOST_SLOTS_UNASKED),
            (slots, _) => slots,
        }
    }

    /// Sequences for which the engines of this process have room beyond those that are decoded, and remember what
    /// they computed.
    pub fn remembered(&self) -> usize {
        let by_default = if self.environment.is_some() { self.most_slots().div_ceil(4) } else { 0 };
        self.generate.prefix_cache.unwrap_or(by_default)
    }

    /// Threads that the recipe asks to compute at the same time. What it leaves out shares the machine.
    pub fn threads(&self) -> usize {
        let set = |threads: Option<usize>| threads.unwrap_or(0);
        let warm_up = self.sft.as_ref().map_or(0, |sft| set(sft.optimization.threads));
        let reference = self.reference.as_ref().map_or(0, |of| of.threads);
        let scorers = reference.saturating_add(self.teacher.as_ref().map_or(0, |of| of.threads));
        // They take turns.
        let critic = self.critic.as_ref().map_or(0, |critic| set(critic.optimization.threads));
        let trainer = set(self.train.optimization.threads).max(critic);
        match self.pipeline {
            Pipeline::Sft => warm_up,
            Pipeline::RewardModel => self.reward_model.as_ref().map_or(0, |of| set(of.optimization.threads)),
            Pipeline::GrpoOffline | Pipeline::Dpo => trainer.saturating_add(scorers),
            Pipeline::Grpo | Pipeline::SftThenGrpo | Pipeline::Distill => warm_up
                .max(self.generators().saturating_mul(set(self.generate.threads)).saturating_add(trainer))
                .saturating_add(scorers)
                .saturating_add(self.reward.rule.threads()),
        }
    }

    /// Warnings about allowed but unusual values, on `machine`.
    pub fn warnings(&self, machine: Machine) -> Vec<String> {
        let mut warnings = Vec::new();
        let (threads, cores) = (self.threads(), machine.threads);
        if threads > cores {
            warnings.push(format!(
                "the stages take {threads} threads, the machine has {cores}: they will slow each other down; lower generate.workers, generate.threads, \
                 train.threads, critic.threads, sft.threads, reference.threads or teacher.threads"
            ));
        }
        if self.pipeline.reinforces() {
            self.grpo_warnings(&mut warnings);
        }
        warnings.extend(self.unused_gpu(machine));
        warnings.extend(practice::warnings(self));
        warnings.extend(self.begins_too_late());
        warnings
    }

    /// Returns a warning for each change and ramp that begins after the last step.
    fn begins_too_late(&self) -> Vec<String> {
        let epochs = match self.pipeline {
            Pipeline::Sft => self.sft.as_ref().and_then(|of| of.epochs),
            Pipeline::RewardModel => self.reward_model.as_ref().and_then(|of| of.epochs),
            _ => self.train.epochs,
        };
        // Epochs become steps when the data is read.
        if epochs.is_some() {
            return Vec::new();
        }
        let steps = self.steps();
        let changes = self.change.iter().enumerate().map(|(at, change)| (format!("change[{at}].at"), change.at));
        let ramps = self.ramp.iter().enumerate().map(|(at, ramp)| (format!("ramp[{at}].begin"), ramp.begin));
        let late = changes.chain(ramps).filter(|(_, step)| *step > steps);
        late.map(|(key, step)| format!("`{key}` is {step}, after the run's {steps} steps")).collect()
    }

    /// A tiny model is faster without a GPU.
    fn unused_gpu(&self, machine: Machine) -> Option<String> {
        let computes = self.trainer.backend == TrainerBackend::Local;
        let idle = computes && machine.gpus > 0 && self.devices().iter().all(|(_, device)| *device == DeviceName::Cpu);
        let has = if machine.gpus == 1 { "a GPU".to_owned() } else { format!("{} GPUs", machine.gpus) };
        (idle && matches!(self.model.source, ModelSource::Folder(_)))
            .then(|| format!("model.device is \"cpu\", and the machine has {has}; set model.device = \"cuda\""))
    }

    /// Values of keys that the recipe may leave out because they follow from others.
    pub(super) fn derived(&self) -> Vec<Derived> {
        let mut all = Vec::new();
        let ratios = self.pipeline.trains_by_train() && !matches!(self.train.loss, LossChoice::Dpo(_));
        if ratios && self.train.proximal.is_none() {
            let reason = if self.train.correction.is_some() { "train.correction weighs tokens" } else { "nothing is corrected" };
            all.push(Derived::of("train.proximal", format!("{:?}", self.train.centre().word()), reason));
        }
        if self.pipeline.reinforces() && self.flow.window.is_none() {
            let reason = if self.over_samples() {
                "(batch.oversampling_factor + sync.every - 1) * batch.groups"
            } else {
                "(flow.max_staleness + 1) * sync.every * batch.groups"
            };
            all.push(Derived::of("flow.window", self.admission_window(), reason));
        }
        let samples = !self.pipeline.evaluates_pairs();
        if self.eval.as_ref().is_some_and(|eval| samples && eval.max_new_tokens.is_none()) {
            all.push(Derived::of("eval.max_new_tokens", self.generate.max_new_tokens, "generate.max_new_tokens"));
        }
        all
    }

    fn grpo_warnings(&self, warnings: &mut Vec<String>) {
        let Generate { max_new_tokens, top_p, top_k, min_p, repetition_penalty, .. } = self.generate;
        let mut warn = |warning: &str| warnings.push(warning.to_owned());
        let random = matches!(self.model.source, ModelSource::Tiny(_)) && self.trainer.backend == TrainerBackend::Local;
        if random && self.sft.is_none() {
            warn("a tiny model starts random, and without [sft] it hardly ever earns a reward to learn from; add [sft]");
        }
        if let TaskData::Arithmetic { digits, .. } = self.task.data {
            // A sum has a digit more than its terms, and end of text is a token too.
            let longest = digits as usize + 1 + usize::from(self.reward.require_end_of_text);
            if max_new_tokens < longest {
                warn(&format!(
                    "answers end at {max_new_tokens} tokens, but the longest sums need {longest}; raise generate.max_new_tokens"
                ));
            }
        }
        let (window, widest) = (self.admission_window(), self.pace().widest_window() as usize);
        if self.flow.on_stale != OnStale::Wait && window > widest {
            let fate = if self.flow.on_stale == OnStale::Drop { "dropped" } else { "masked" };
            warn(&format!(
                "{window} groups may be under way, and more than {widest} become staler than flow.max_staleness allows: many will be {fate}"
            ));
        }
        // A registered loss may read the reference's log-probabilities.
        let registered = matches!(self.train.loss, LossChoice::Custom(_));
        if self.reference.is_some() && !self.train.uses_reference() && !registered {
            warn("[reference] scores every answer, and nothing uses it; set train.kl_loss, train.kl_reward or a loss of pairs");
        }
        if top_p < 1.0 || top_k > 0 || min_p > 0.0 || repetition_penalty != 1.0 {
            warn(
                "top_p, top_k, min_p and repetition_penalty make the generator's log-probabilities those of a changed distribution, while \
                 the trainer's are the model's: ratios are biased; switch them off for training",
            );
        }
        if self.train.centre() == Proximal::LogLinear && self.worst_staleness() < 2 {
            warn(
                "train.proximal = \"loglinear\" is the same as \"behaviour\" for tokens that lag by less than 2 versions, and no token lags \
                 more here: importance weights are all 1; raise flow.max_staleness, or use \"recompute\"",
            );
        }
        let micro_batch = self.train.optimization.micro_batch_tokens;
        if micro_batch < max_new_tokens && self.trainer.backend == TrainerBackend::Local {
            warn(&format!(
                "train.micro_batch_tokens is {micro_batch}, less than one answer of {max_new_tokens} tokens: long samples go alone and \
                 take more memory than that"
            ));
        }
        let (every, steps) = (self.sync.every, self.train.steps);
        if every > steps {
            warn(&format!("sync.every is {every}, more than the {steps} steps: the generator never sees new weights"));
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn gpus_are_counted_without_their_parts() {
        let listed =
            "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-2)\nGPU 1: NVIDIA H100 (UUID: GPU-3)\n";
        assert_eq!((super::listed_gpus(listed), super::listed_gpus("No devices found.\n")), (2, 0));
    }
}
