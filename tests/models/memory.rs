//! The memory plan against what trainers take, and folders that are loaded without a second copy.
//!
//! Peaks are the process's own, so that one test runs here by default. The others take minutes and gigabytes: `make test-large`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::data::{Sample, Tokenizer};
use rollflow::engine::{LocalEngine, Request, SamplingParams, TokenEngine};
use rollflow::model::{
    Compute, Decoder, Dtype, Layout, Lora, ModelConfig, ModelError, Weights, load_hf, load_hf_for, load_hf_in_4_bits,
};
use rollflow::recipe::{MemoryPlan, Plan, parse};
use rollflow::train::{LocalBackend, LocalConfig, SaveCheckpoint, TrainingBackend, collate};
use safetensors::tensor::{self, View};
use serde_json::{Value, json};

use crate::stand_in::{bytes, kept};

/// Resident bytes of this process: now, or their peak since it was last forgotten.
fn resident(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

/// By how much this process's memory grew at most while `work` ran.
fn peak_of<T>(work: impl FnOnce() -> T) -> (u64, T) {
    // Forgets the peak so far.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = resident("VmRSS");
    let done = work();
    (resident("VmHWM").saturating_sub(before), done)
}

/// Supervised training on 128 sums of 32 tokens, all in one micro-batch.
fn plan(model: &str, checkpointing: bool) -> Plan {
    let text = format!(
        "pipeline = 'sft'\n[model]\nkind = 'tiny'\n{model}\n[task]\nkind = 'arithmetic'\ndigits = 9\ncount = 1000\n[sft]\nbatch = 128\n\
         micro_batch_tokens = 4096\ngradient_checkpointing = {checkpointing}"
    );
    parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"))
}

/// What the plan says of the trainer, and what it took for three steps.
fn trained(model: &str, shape: [usize; 5], checkpointing: bool) -> (u64, u64) {
    let memory = MemoryPlan::of(&plan(model, checkpointing)).unwrap().remove(0);
    let parts = ["weights", "gradients", "optimizer", "activations", "logits"];
    let expected = memory.parts.iter().filter(|part| parts.contains(&part.what)).map(|part| part.bytes).sum();

    let [hidden, layers, heads, inner, vocab] = shape;
    let config = json!({
        "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads / 2, "max_position_embeddings": 2048, "tie_word_embeddings": true,
    });
    let config = ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap()).unwrap();
    let weights = Weights::random(&config, 0);
    let sample =
        |n: usize| Sample::supervised(&[1], &(0..32).map(|at| ((n * 37 + at * 11) % vocab) as u32).collect::<Vec<u32>>());
    let batch = Arc::new(collate(&(0..128).map(sample).collect::<Vec<_>>(), Aggregation::TokenMean).unwrap());
    let settings = LocalConfig {
        threads: Some(1),
        gradient_checkpointing: checkpointing,
        micro_batch_tokens: 4096,
        compute: Compute::default(),
        ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-4))
    };
    let (peak, _) = peak_of(|| {
        let backend = LocalBackend::new(settings, config, weights).unwrap();
        for _ in 0..3 {
            backend.forward_backward(batch.clone()).wait().unwrap();
            backend.optim_step().wait().unwrap();
        }
    });
    (expected, peak)
}

/// `within` is what may be planned for each byte that is taken.
fn assert_predicted(what: &str, (expected, peak): (u64, u64), within: std::ops::Range<f64>) {
    let ratio = expected as f64 / peak as f64;
    println!("{what}: planned {:.0} MiB, took {:.0} MiB", expected as f64 / 1048576.0, peak as f64 / 1048576.0);
    assert!(within.contains(&ratio), "{what}: planned {expected}, took {peak}");
}

#[test]
fn a_trainer_takes_what_the_plan_says_within_a_third() {
    let tiny = [128, 4, 4, 384, 64];
    assert_predicted("tiny", trained("", tiny, false), 0.8..1.35);
}

#[test]
#[ignore = "takes a minute and 2 GiB"]
fn a_larger_trainer_takes_what_the_plan_says_and_less_with_layers_computed_anew() {
    let mid = "hidden = 512\nlayers = 8\nheads = 8\nkv_heads = 4\nintermediate = 1536\nvocab = 8192";
    let shape = [512, 8, 8, 1536, 8192];
    let anew = trained(mid, shape, true);
    let plain = trained(mid, shape, false);
    // Too much by a third, on the safe side: not all activations live at the same time.
    assert_predicted("mid, layers computed anew", anew, 0.8..1.35);
    assert_predicted("mid", plain, 0.8..1.35);
    assert!(anew.1 * 3 < plain.1 * 2, "less than two thirds: {} {}", anew.1, plain.1);
}

/// A folder that bitsandbytes quantised is read as it is, whether or not the recipe says so.
#[test]
fn a_folder_in_4_bits_is_planned_by_what_is_read_of_it() {
    const FOLDER: &str = "tests/golden/bitsandbytes/qwen2";
    let (config, weights) = load_hf(Path::new(FOLDER)).unwrap();
    let (kept, all) = (weights.flat.numel() as f64, Layout::new(&config).total() as f64);
    for base in ["stored", "nf4"] {
        let text = format!(
            "pipeline = 'sft'\n[model]\npath = '{FOLDER}'\n[lora]\nrank = 4\nbase = '{base}'\n[task]\nkind = 'arithmetic'\ndigits = 1\n[sft]\nsteps = 1\nlr = 1e-3"
        );
        let plan = parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        let memory = MemoryPlan::of(&plan).unwrap().swap_remove(0);
        let first: Vec<_> = memory.parts.iter().filter(|part| ["first weights", "in 4 bits"].contains(&part.what)).collect();
        let found = first.iter().map(|part| part.bytes as f64).sum::<f64>();
        // Each of a layer's seven matrices has tables of 16 and 256 levels.
        let expected = 4.0 * kept + 0.516 * (all - kept) + (7 * config.layers() * 4 * (16 + 256)) as f64;
        assert!(first.len() == 1 && (found / expected - 1.0).abs() < 0.02, "{base}: {found} bytes, expected {expected}");
    }
}

/// Models of other kinds, with what a dense one has.
struct Shapes {
    mixture: Value,
    nets: Value,
    nets_and_mixture: Value,
    normed_branches: Value,
    bounded_scores: Value,
    sinks: Value,
}

impl Shapes {
    /// With experts and delta nets of these widths.
    fn of(dense: &Value, expert: usize, net: usize) -> Self {
        let with = |model: &Value, more: Value| {
            let mut model = model.clone();
            model.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            model
        };
        let experts = json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": expert});
        let nets = json!({
            "model_type": "qwen3_5_text", "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": net, "linear_value_head_dim": net,
        });
        let normed = json!({"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32});
        let bounded = json!({"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0});
        let sinks = json!({
            "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": expert, "head_dim": 16,
            "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 16, "tie_word_embeddings": false,
        });
        let (nets, normed_branches) = (with(dense, nets), with(dense, normed));
        let shared = json!({"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": expert / 2});
        Shapes {
            mixture: with(&with(dense, experts.clone()), json!({"model_type": "qwen3_moe", "head_dim": 32})),
            nets_and_mixture: with(&with(&nets, experts), shared),
            bounded_scores: with(&normed_branches, bounded),
            sinks: with(dense, sinks),
            nets,
            normed_branches,
        }
    }
}

/// On a device that no other test has.
#[test]
fn a_trainer_on_a_gpu_takes_what_the_plan_says_within_a_tenth() {
    const DEVICE: usize = 4;
    if Compute::cuda(DEVICE, Dtype::Bf16).check().is_err() || bytes(DEVICE).is_none() {
        return eprintln!("skipped: only the stand-in of a GPU counts bytes");
    }
    let dense = json!({
        "model_type": "llama", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": true,
    });
    let Shapes { mixture, nets, nets_and_mixture, normed_branches, bounded_scores, sinks } = Shapes::of(&dense, 128, 32);
    let of_experts = "[lora]\nrank = 8\ntargets = ['all-linear', 'experts']\n";
    let (over_whole, over_4_bits) = ("[lora]\nrank = 8\n", "[lora]\nrank = 8\nbase = 'nf4'\n");
    let folder = tempfile::tempdir().unwrap();
    let (bf16, f32) = (Dtype::Bf16, Dtype::F32);
    for (config, adapters, checkpointing, dtype, more) in [
        (&dense, "", false, bf16, ""),
        (&dense, "", true, bf16, ""),
        (&dense, over_whole, false, bf16, ""),
        (&dense, over_whole, true, bf16, ""),
        (&dense, over_4_bits, false, bf16, ""),
        (&dense, over_4_bits, true, bf16, ""),
        (&sinks, over_4_bits, true, bf16, ""),
        (&dense, "", false, f32, ""),
        (&dense, "", true, f32, ""),
        (&mixture, "", false, bf16, ""),
        (&mixture, "", true, bf16, ""),
        (&mixture, over_whole, false, bf16, ""),
        (&mixture, of_experts, false, bf16, ""),
        (&mixture, "", false, f32, ""),
        (&nets, "", false, bf16, ""),
        (&nets, "", true, bf16, ""),
        (&nets, over_whole, false, bf16, ""),
        (&nets, "", false, f32, ""),
        (&nets, "", true, f32, ""),
        (&nets_and_mixture, "", false, bf16, ""),
        (&nets_and_mixture, "", true, bf16, ""),
        (&nets_and_mixture, over_whole, false, bf16, ""),
        (&normed_branches, "", false, bf16, ""),
        (&normed_branches, "", true, bf16, ""),
        (&normed_branches, over_whole, false, bf16, ""),
        (&normed_branches, "", false, f32, ""),
        (&bounded_scores, "", false, bf16, ""),
        (&bounded_scores, "", true, bf16, ""),
        (&sinks, "", false, bf16, ""),
        (&sinks, "", true, bf16, ""),
        (&sinks, over_whole, false, bf16, ""),
        (&dense, "", true, bf16, "activations_on_host = true\nmoments = 'host'"),
        (&dense, "", true, bf16, "moments = '8-bit'"),
        (&dense, "", true, bf16, "moments = '8-bit'\nmasters = 'bf16'"),
    ] {
        let lora = !adapters.is_empty();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let config = ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap()).unwrap();
        let text = format!(
            "pipeline = 'sft'\n[model]\npath = '{}'\ndevice = 'cuda:{DEVICE}'\ndtype = '{}'\n{adapters}[task]\nkind = 'arithmetic'\n\
             digits = 9\ncount = 1000\n[sft]\nbatch = 32\nmicro_batch_tokens = 1024\ngradient_checkpointing = {checkpointing}\n{more}",
            folder.path().display(),
            dtype.word()
        );
        let plan = parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        let of_device = |memory: &MemoryPlan| memory.device == format!("cuda:{DEVICE}");
        let memory = MemoryPlan::of(&plan).unwrap().into_iter().find(of_device).unwrap();
        let parts = ["weights", "gradients", "optimizer", "activations", "logits"];
        let planned: Vec<_> = memory.parts.iter().filter(|part| parts.contains(&part.what)).collect();
        let expected: u64 = planned.iter().map(|part| part.bytes).sum();

        let weights = Weights::random(&config, 0);
        let weights = if adapters == over_4_bits { weights.quantised() } else { weights };
        let targets = [Lora::ALL, Lora::EXPERTS];
        let targets = if adapters == of_experts { &targets[..] } else { &targets[..1] };
        let lora = lora.then(|| Lora::new(8, 16.0, targets).unwrap());
        let weights = lora.into_iter().fold(weights, |weights, lora| weights.adapted(&config, lora, 1));
        let sample =
            |n: usize| Sample::supervised(&[1], &(0..32).map(|at| ((n * 37 + at * 11) % 4096) as u32).collect::<Vec<u32>>());
        let batch = Arc::new(collate(&(0..32).map(sample).collect::<Vec<_>>(), Aggregation::TokenMean).unwrap());
        let of = &plan.sft.as_ref().unwrap().optimization;
        let settings = LocalConfig {
            gradient_checkpointing: checkpointing,
            activations_on_host: of.activations_on_host,
            masters: of.masters,
            moments: of.moments,
            micro_batch_tokens: 1024,
            compute: Compute::cuda(DEVICE, dtype),
            ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-4))
        };
        let (before, _) = bytes(DEVICE).unwrap();
        let backend = LocalBackend::new(settings, config.clone(), weights).unwrap();
        backend.forward_backward(batch.clone()).wait().unwrap();
        backend.optim_step().wait().unwrap();
        backend.forward_backward(batch.clone()).wait().unwrap();
        // Copies that a checkpoint makes are in the host's memory.
        let saved = tempfile::tempdir().unwrap();
        let save = SaveCheckpoint { run_folder: saved.path().to_owned(), step: 2, ..SaveCheckpoint::default() };
        backend.save_checkpoint(save).wait().unwrap();
        let most = bytes(DEVICE).unwrap().1 - before;
        planned.iter().for_each(|part| println!("  {} {:.1} MiB: {}", part.what, part.bytes as f64 / 1048576.0, part.why));
        let what = format!("{:?}, {adapters:?}, checkpointing {checkpointing}, {}, {more:?}", config.family, dtype.word());
        assert_predicted(&what, (expected, most), 0.9..1.1);
    }
}

/// On a device that no other test has: what an allocator keeps of a step is another process's between steps.
#[test]
fn a_trainer_whose_servers_sleep_keeps_nothing_of_a_step_on_its_gpu() {
    const DEVICE: usize = 6;
    if Compute::cuda(DEVICE, Dtype::Bf16).check().is_err() || kept(DEVICE).is_none() {
        return eprintln!("skipped: only the stand-in of a GPU counts bytes");
    }
    let config = ModelConfig { vocab_size: 512, ..crate::tiny::model() };
    let sample = |n: u32| Sample::supervised(&[1], &(0..48).map(|at| (n * 37 + at * 11) % 512).collect::<Vec<u32>>());
    let batch = Arc::new(collate(&(0..16).map(sample).collect::<Vec<_>>(), Aggregation::TokenMean).unwrap());
    for gives_back_memory in [false, true] {
        let compute = Compute::cuda(DEVICE, Dtype::Bf16);
        let settings = LocalConfig { gives_back_memory, compute, ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-4)) };
        let backend = LocalBackend::new(settings, config.clone(), Weights::random(&config, 0)).unwrap();
        backend.forward_backward(batch.clone()).wait().unwrap();
        backend.optim_step().wait().unwrap();
        let (now, kept) = kept(DEVICE).unwrap();
        println!("{gives_back_memory}: {now} bytes of tensors, {kept} kept");
        assert_eq!(now == kept, gives_back_memory, "{now} bytes of tensors, {kept} kept");
    }
}

/// On a device that no other test has. Prompts of 256 tokens, which the plan assumes of a file, fill one chunk of reading.
#[test]
fn a_generator_on_a_gpu_takes_what_the_plan_says_within_a_tenth() {
    const DEVICE: usize = 5;
    if Compute::cuda(DEVICE, Dtype::Bf16).check().is_err() || bytes(DEVICE).is_none() {
        return eprintln!("skipped: only the stand-in of a GPU counts bytes");
    }
    let dense = json!({
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048, "tie_word_embeddings": true,
    });
    let shapes = Shapes::of(&dense, 64, 64);
    let Shapes { mixture, mut nets, mut nets_and_mixture, normed_branches, bounded_scores, sinks } = shapes;
    for of in [&mut nets, &mut nets_and_mixture] {
        of["layer_types"] = json!(["linear_attention", "full_attention"]);
    }
    let folder = tempfile::tempdir().unwrap();
    for (config, remembered) in [
        (&dense, 0),
        (&dense, 32),
        (&mixture, 0),
        (&nets, 0),
        (&nets, 32),
        (&nets_and_mixture, 0),
        (&normed_branches, 0),
        (&bounded_scores, 0),
        (&sinks, 0),
    ] {
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let config = ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap()).unwrap();
        let text = format!(
            "pipeline = 'grpo'\n[model]\npath = '{}'\ndevice = 'cuda:{DEVICE}'\ndtype = 'bf16'\n[task]\nkind = 'data'\ndata = 'train.jsonl'\n\
             [reward]\nkind = 'exact'\n[generate]\nmax_new_tokens = 3\nmax_num_seqs = 64\nprefix_cache = {remembered}",
            folder.path().display()
        );
        let plan = parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        let memory = MemoryPlan::of(&plan).unwrap().into_iter().find(|of| of.device == format!("cuda:{DEVICE}")).unwrap();
        let parts = ["kv cache", "states", "sampling", "prefill"];
        let planned: Vec<_> = memory.parts.iter().filter(|part| parts.contains(&part.what)).collect();
        let expected: u64 = planned.iter().map(|part| part.bytes).sum();

        let weights = Weights::random(&config, 0);
        let decoder = Decoder::new(&config, weights.layout.clone());
        let tokenizer = Arc::new(Tokenizer::characters("0123456789", config.vocab_size).unwrap());
        let engine = LocalEngine::new(decoder, tokenizer, 64, 7).computing(Compute::cuda(DEVICE, Dtype::Bf16));
        let mut engine = engine.remembering(remembered);
        engine.set_weights(1, &weights);
        let (before, _) = bytes(DEVICE).unwrap();
        let params = Arc::new(SamplingParams { max_new_tokens: 3, ignore_eos: true, ..Default::default() });
        for ordinal in 0..64 {
            let prompt: Vec<u32> = (0..256).map(|at| ((ordinal * 37 + at * 11 + at * at) % 512) as u32).collect();
            engine.submit(Request::new(ordinal, prompt, 1, params.clone())).unwrap();
        }
        engine.run().unwrap();
        let most = bytes(DEVICE).unwrap().1 - before;
        planned.iter().for_each(|part| println!("  {} {:.1} MiB: {}", part.what, part.bytes as f64 / 1048576.0, part.why));
        let what = format!("{:?}, {remembered} remembered", config.family);
        assert_predicted(&what, (expected, most), 0.9..1.1);
    }
}

/// A tensor that is made when it is written.
struct Made(Vec<usize>, Dtype);

impl View for Made {
    fn dtype(&self) -> tensor::Dtype {
        if self.1 == Dtype::F32 { tensor::Dtype::F32 } else { tensor::Dtype::BF16 }
    }
    fn shape(&self) -> &[usize] {
        &self.0
    }
    fn data(&self) -> Cow<'_, [u8]> {
        vec![0x3c; self.data_len()].into()
    }
    fn data_len(&self) -> usize {
        self.0.iter().product::<usize>() * self.1.bytes()
    }
}

type Load = fn(&Path, Dtype) -> Result<(ModelConfig, Weights), ModelError>;

/// 1.1 times a folder's size, to be computed with in its own format; 4 bytes a parameter where a bf16 folder is computed with in f32. Into 4 bits, a few matrices more than the result.
#[test]
#[ignore = "writes and reads 5 GB"]
fn a_folder_of_three_gigabytes_is_loaded_without_a_second_copy() {
    let config = json!({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 11,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048, "tie_word_embeddings": true,
    });
    let layout = Layout::new(&ModelConfig::from_json(Path::new("config.json"), config.as_object().unwrap()).unwrap());
    // From little to much: what is freed is not given back yet.
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let mut names = BTreeMap::new();
        for (shard, entries) in layout.entries().chunks(20).enumerate() {
            let file = format!("model-{shard}.safetensors");
            let tensors = entries.iter().map(|entry| (entry.name.as_str(), Made(entry.shape.clone(), dtype)));
            safetensors::serialize_to_file(tensors, None, &folder.path().join(&file)).unwrap();
            names.extend(entries.iter().map(|entry| (entry.name.clone(), file.clone())));
        }
        std::fs::write(folder.path().join("model.safetensors.index.json"), json!({"weight_map": names}).to_string()).unwrap();
        let size = (layout.total() * dtype.bytes()) as f64;
        // Of the layers' numbers in 4 bits, and of the others.
        let of_embedding = (32000 * 2048 * dtype.bytes()) as f64;
        let in_4_bits = 0.52 * (size - of_embedding) / dtype.bytes() as f64 + of_embedding;
        for (what, most, load) in [(" in 4 bits", in_4_bits + 3e8, load_hf_in_4_bits as Load), ("", 1.1 * size, load_hf_for)] {
            let begun = Instant::now();
            let (peak, (config, weights)) = peak_of(|| load(folder.path(), dtype).unwrap());
            let (seconds, name) = (begun.elapsed().as_secs_f64(), dtype.name());
            println!("{name}{what}: {:.2} GB on disk, {:.2} GB in memory, {seconds:.1} s", size / 1e9, peak as f64 / 1e9);
            assert_eq!((config.dtype, weights.layout.total()), (dtype, layout.total()));
            assert!((peak as f64) <= most, "{name}{what}: {peak} of {most}");
        }
    }
}
