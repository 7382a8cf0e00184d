use std::path::Path;

use super::*;
use crate::recipe::parse;

#[test]
fn a_gpu_s_plan_counts_what_only_a_gpu_holds_and_compares_with_what_is_free() {
    let text = "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n";
    let mut plan = parse("memory.toml", text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
    let parts =
        |plan: &Plan| -> Vec<&'static str> { MemoryPlan::of(plan).unwrap()[0].parts.iter().map(|part| part.what).collect() };
    let host = parts(&plan);
    assert!(host.contains(&"program") && !host.contains(&"context") && !host.contains(&"prefill"), "{host:?}");
    plan.model.device = DeviceName::Cuda(0);
    let gpu = parts(&plan);
    assert!(gpu.contains(&"context") && gpu.contains(&"prefill") && gpu.contains(&"sampling"), "{gpu:?}");
    let has = gpu_memory(0).map(|memory| memory.free);
    let all = MemoryPlan::of(&plan).unwrap();
    assert_eq!(all[0].has.is_some(), has.is_some());
}

/// In f32, which is published, they are no copies. The mapped memory has room for a piece.
#[test]
fn tensors_that_servers_take_are_counted_once_more_in_another_format_only() {
    let text = "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n\
                [engine]\nlaunch = 'vllm'\ncarry = 'ipc'\n";
    let parts = |format| {
        let sets = ["model.device=cuda", "model.dtype=f32", format].map(str::to_owned);
        let plan = parse("memory.toml", text, &sets).unwrap_or_else(|errors| panic!("{errors}"));
        let all = MemoryPlan::of(&plan).unwrap();
        ["for servers", "mapped"].map(|what| all[0].parts.iter().find(|part| part.what == what).map(|part| part.bytes))
    };
    let ([same, whole], [rounded, half]) = (parts("engine.dtype=f32"), parts("engine.dtype=bf16"));
    assert_eq!((same, rounded, whole), (None, whole, half.map(|half| 2 * half)));
}

/// Of a GPU's state, too, at the end of the run at the latest.
#[test]
fn the_copy_for_a_checkpoint_is_counted_in_host_memory() {
    let text = "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n";
    let mut plan = parse("memory.toml", text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
    let mut copy = |device, every| {
        (plan.model.device, plan.checkpoint.every) = (device, every);
        let all = MemoryPlan::of(&plan).unwrap();
        let of = |memory: &MemoryPlan| memory.parts.iter().find(|part| part.what == "checkpoint").map(|part| part.bytes);
        all.iter().filter_map(|memory| Some((memory.device.clone(), of(memory)?))).collect::<Vec<_>>()
    };
    let (host, gpu) = (copy(DeviceName::Cpu, 5), copy(DeviceName::Cuda(0), 5));
    assert!(host.len() == 1 && host[0].0 == "cpu" && host == gpu, "{host:?} {gpu:?}");
    assert_eq!((copy(DeviceName::Cpu, 0), copy(DeviceName::Cuda(0), 0)), (Vec::new(), gpu));
}

/// Sizes of Qwen2.5: hidden, feed-forward, layers, heads, key heads, and whether the head is tied.
const SIZES: [(&str, [usize; 5], bool); 6] = [
    ("0.5B", [896, 4864, 24, 14, 2], true),
    ("1.5B", [1536, 8960, 28, 12, 2], true),
    ("3B", [2048, 11008, 36, 16, 2], true),
    ("7B", [3584, 18944, 28, 28, 4], false),
    ("14B", [5120, 13824, 48, 40, 8], false),
    ("32B", [5120, 27648, 64, 40, 8], false),
];

/// A model folder with a configuration of Qwen2.5 in bf16, and no weights.
fn folder([hidden, inner, layers, heads, kv_heads]: [usize; 5], tied: bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = serde_json::json!({
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": tied, "hidden_act": "silu", "eos_token_id": 151_645, "torch_dtype": "bfloat16",
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// A GRPO run with 32 sequences of 256 + 1024 tokens on a GPU that needs not be there.
fn plan_of(folder: &Path, more: &str) -> Plan {
    let text = format!(
        "pipeline = 'grpo'\n[model]\nkind = 'folder'\npath = '{}'\n[task]\nkind = 'data'\ndata = 'train.jsonl'\n[reward]\nkind = 'exact'\n\
         [generate]\nmax_new_tokens = 1024\nmax_num_seqs = 32\n[train]\ngradient_checkpointing = true\nmicro_batch_tokens = 8192\n{more}",
        folder.display()
    );
    let mut plan = parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
    plan.model.device = DeviceName::Cuda(0);
    plan
}

/// The plan of its GPU, as rank 0 of so many.
fn on_gpu(plan: &Plan, ranks: Option<usize>) -> MemoryPlan {
    let all = MemoryPlan::of_ranks(plan, ranks).unwrap();
    all.into_iter().find(|memory| memory.device == "cuda:0").unwrap()
}

fn part<'a>(memory: &'a MemoryPlan, what: &str) -> &'a MemoryPart {
    memory.parts.iter().find(|part| part.what == what).unwrap_or_else(|| panic!("no {what}: {memory}"))
}

/// GPU memory of such a run, in bytes.
fn needed(shape: [usize; 5], tied: bool, lora: &str, change: fn(&mut Optimization)) -> u64 {
    let folder = folder(shape, tied);
    let mut plan = plan_of(folder.path(), lora);
    change(&mut plan.train.optimization);
    on_gpu(&plan, None).total()
}

const ADAPTERS: &str = "[lora]\nrank = 16\nsync = 'adapter'\n";
const OVER_4_BITS: &str = "[lora]\nrank = 16\nsync = 'adapter'\nbase = 'nf4'\n";

#[test]
fn adapters_of_a_7b_model_over_4_bits_fit_a_card_of_24_gb() {
    let [whole, stored] = [ADAPTERS, OVER_4_BITS].map(|lora| needed(SIZES[3].1, SIZES[3].2, lora, |_| ()));
    // What such a card has is 23.6 GiB.
    let card = (236 << 30) / 10;
    assert!(stored < 22 << 30 && whole > card, "{} and {}", size(stored), size(whole));
}

/// A run ends a rollout there, however many turns it might have.
#[test]
fn a_rollout_of_many_turns_is_as_long_as_model_and_environment_allow() {
    let folder = folder(SIZES[0].1, SIZES[0].2);
    for (limits, longest) in [("max_turns = 2", 2304), ("max_turns = 64", 32_768), ("max_turns = 64\nmax_tokens = 4096", 4096)] {
        let plan = plan_of(folder.path(), &format!("[environment]\nkind = 'calculator'\n{limits}\n"));
        let memory = on_gpu(&plan, None);
        assert!(part(&memory, "kv cache").why.contains(&format!("slots × {longest} tokens")), "{limits}: {memory}");
    }
}

#[test]
fn an_environment_is_refused_to_gpt_oss_unless_the_recipe_names_a_chat_template() {
    let keys = |model: &str, more: &str| -> Vec<String> {
        let text = format!(
            "pipeline = 'grpo'\n[model]\npath = 'tests/golden/models/{model}'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n\
             [generate]\nmax_new_tokens = 8\n{more}"
        );
        let plan = parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        limits(&plan).into_iter().map(|problem| problem.key).collect()
    };
    let environment = "[environment]\nkind = 'calculator'\n";
    assert_eq!(keys("gpt_oss", environment), ["environment"]);
    assert!(keys("gpt_oss", "").is_empty() && keys("qwen2_tied", environment).is_empty());
    assert!(keys("gpt_oss", &format!("{environment}[chat]\ntemplate = 'plain'\n")).is_empty());
}

/// With its engine, and with the models that judge.
#[test]
fn an_evaluation_is_counted_in_pipelines_that_generate_nothing_else() {
    let parts = |text: &str| {
        let text = format!("{text}[model]\nkind = 'tiny'\n[reward]\nkind = 'model'\npath = 'tests/golden/models/llama_tied'\n");
        let plan = parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"));
        let memory = MemoryPlan::of(&plan).unwrap().swap_remove(0);
        let found = ["published", "kv cache", "sampling", "reward model"];
        found.map(|what| memory.parts.iter().find(|part| part.what == what).map(|part| part.bytes))
    };
    let sft = "pipeline = 'sft'\nsft = {}\ntask = { kind = 'arithmetic' }\n";
    let offline = |rescore| {
        let task = format!("task = {{ kind = 'rollouts', path = 'rollouts.jsonl', rescore = {rescore} }}");
        format!("pipeline = 'grpo_offline'\n{task}\neval = {{ task = {{ kind = 'arithmetic' }}, every = 0 }}\n")
    };
    let evaluates = |text: &str| text.replace("every = 0", "every = 50");
    assert_eq!(parts(&format!("{sft}eval = {{ every = 0 }}\n")), [None; 4]);
    let [_, cache, _, judge] = parts(&format!("{sft}eval = {{}}\n"));
    assert!(cache > parts(&format!("{sft}eval = {{ max_num_seqs = 8 }}\n"))[1] && judge.is_some());
    let rescored = parts(&offline(true));
    assert!(rescored[..3].iter().all(Option::is_none) && rescored[3] == judge, "{rescored:?}");
    assert!(parts(&evaluates(&offline(false))).iter().all(Option::is_some));
}

/// Its trainer is gone when the policy's begins, so that the larger of both counts.
#[test]
fn a_supervised_phase_counts_where_it_takes_more_than_what_follows() {
    let folder = folder(SIZES[0].1, SIZES[0].2);
    let mut plan = plan_of(folder.path(), "[sft]\n");
    let small = |of: &mut Optimization| (of.moments, of.masters) = (MomentFormat::EightBit, MasterFormat::Bf16);
    small(&mut plan.train.optimization);
    for pipeline in [Pipeline::Grpo, Pipeline::SftThenGrpo] {
        plan.pipeline = pipeline;
        let (found, after) = (on_gpu(&plan, None), on_gpu(&Plan { sft: None, ..plan.clone() }, None));
        let alone = on_gpu(&Plan { pipeline: Pipeline::Sft, ..plan.clone() }, None).total();
        assert!(alone > after.total(), "{} and {}", size(alone), size(after.total()));
        assert_eq!((found.peak(), found.total()), (alone, after.total()), "{found}");
        assert_eq!(part(&found, "warm-up").taken, Taken::Before);
        assert!(found.to_string().contains("[sft] alone"), "{found}");
    }
    let sft = &mut plan.sft.as_mut().unwrap().optimization;
    small(sft);
    (sft.gradient_checkpointing, sft.micro_batch_tokens) = (true, 1024);
    let found = on_gpu(&plan, None);
    assert!(found.peak() == found.total() && found.parts.iter().all(|part| part.what != "warm-up"), "{found}");
}

#[test]
fn a_critic_is_whole_next_to_a_policy_over_4_bits() {
    let folder = folder(SIZES[0].1, SIZES[0].2);
    let critic = |lora: &str| {
        let memory = on_gpu(&plan_of(folder.path(), &format!("{lora}[critic]\n")), None);
        let names = ["critic weights", "its gradients", "its optimizer", "its activations"];
        names.map(|what| (part(&memory, what).bytes, part(&memory, what).why.clone()))
    };
    assert_eq!(critic(OVER_4_BITS), critic(ADAPTERS));
}

/// The folder's 4 bits are numbers in f32 below a new head, unless they are made 4 bits again.
#[test]
fn a_reward_model_over_4_bits_is_whole_unless_the_recipe_says_4_bits() {
    let plan = |base: &str| {
        let text = format!(
            "pipeline = 'reward_model'\n[model]\npath = 'tests/golden/bitsandbytes/qwen2'\n[lora]\nrank = 4\nbase = '{base}'\n\
             [task]\nkind = 'arithmetic'\ndigits = 1\n[reward_model]\nsteps = 1\n"
        );
        parse("memory.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"))
    };
    let whole = 4 * Layout::new(&shape(&plan("stored")).unwrap()).total() as u64;
    for (base, again) in [("stored", false), ("nf4", true)] {
        let memory = MemoryPlan::of_ranks(&plan(base), None).unwrap().swap_remove(0);
        assert_eq!(part(&memory, "first weights").bytes, whole, "{memory}");
        assert_eq!(memory.parts.iter().any(|part| part.what == "in 4 bits"), again, "{memory}");
        let kept = if again { "layers' inputs" } else { "every layer's" };
        assert!(part(&memory, "activations").why.contains(kept), "{memory}");
    }
}

/// Bytes of a trainer's state on a rank, of which `n` share a copy: those of the page *Scaling*.
#[test]
fn ranks_divide_what_their_division_says() {
    let folder = folder(SIZES[3].1, SIZES[3].2);
    let mut plan = plan_of(folder.path(), "[ranks]\n");
    let parameters = Layout::new(&shape(&plan).unwrap()).total() as f64;
    // The head, with the last norm.
    let unit = (151_936 * 3584 + 3584) as f64;
    for (shard, ranks, replicas) in [
        (Shard::Nothing, 8, 1),
        (Shard::Optimizer, 8, 1),
        (Shard::Gradients, 8, 1),
        (Shard::Parameters, 4, 1),
        (Shard::Parameters, 8, 2),
        (Shard::Optimizer, 8, 4),
    ] {
        (plan.ranks.shard, plan.ranks.replicas) = (shard, replicas);
        let (n, memory) = ((ranks / replicas) as f64, on_gpu(&plan, Some(ranks)));
        let found = ["weights", "optimizer", "gradients"].map(|what| part(&memory, what).bytes).into_iter().sum::<u64>();
        let expected = match shard {
            Shard::Nothing => 18.0 * parameters + 4.0 * unit,
            Shard::Optimizer => 10.0 * parameters + 4.0 * unit + 12.0 * parameters / n,
            Shard::Gradients => 10.0 * parameters + 12.0 * parameters / n,
            Shard::Parameters => 18.0 * parameters / n + 8.0 * unit,
        };
        assert!((found as f64 / expected - 1.0).abs() < 1e-3, "{shard:?}, {n}: {found}, expected {expected}: {memory}");
    }
    let of_80_gb = |memory: &MemoryPlan| memory.peak() < 80_000_000_000;
    (plan.ranks.shard, plan.ranks.replicas) = (Shard::Parameters, 1);
    let memory = on_gpu(&plan, Some(4));
    assert!(of_80_gb(&memory) && part(&memory, "weights").why.contains("one of 4 parts"), "{memory}");
    let open = on_gpu(&plan, None);
    assert!(!of_80_gb(&open) && part(&open, "weights").why.contains("ranks divide them"), "{open}");
}

/// Rank 0 sends the others their parts of the whole.
#[test]
fn a_rank_s_start_counts_where_its_part_is_small() {
    let folder = folder(SIZES[5].1, SIZES[5].2);
    let mut plan = plan_of(folder.path(), "[sft]\n[ranks]\nshard = 'parameters'\n");
    plan.pipeline = Pipeline::Sft;
    plan.sft.as_mut().unwrap().optimization.micro_batch_tokens = 1024;
    let memory = on_gpu(&plan, Some(64));
    let whole = 4 * Layout::new(&shape(&plan).unwrap()).total() as u64;
    assert!(memory.peak() > whole && memory.total() < whole / 2, "{memory}");
    assert_eq!(part(&memory, "start").taken, Taken::Before);
}

/// The memory plan reads whether a folder is in 4 bits, and the recipe's checks whatever needs no folder.
#[test]
fn inputs_that_wait_on_the_host_are_refused_where_no_layer_is_computed_again() {
    let refused = |model: &str, more: &str| {
        let text = format!(
            "pipeline = 'grpo'\n[model]\n{model}\ndevice = 'cuda'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n{more}"
        );
        let keys: Vec<String> = match parse("memory.toml", &text, &[]) {
            Ok(plan) => limits(&plan).into_iter().map(|problem| problem.key).collect(),
            Err(errors) => errors.iter().map(|error| error.key.clone()).collect(),
        };
        keys.into_iter().filter(|key| key.ends_with("activations_on_host")).collect::<Vec<_>>()
    };
    let of_train = "[train]\nactivations_on_host = true\n";
    let (stored, nf4) = ("[lora]\nrank = 4\n", "[lora]\nrank = 4\nbase = 'nf4'\n");
    let tiny = "kind = 'tiny'";
    let [in_4_bits, whole] = ["bitsandbytes/qwen2", "models/llama_tied"].map(|of| format!("path = 'tests/golden/{of}'"));
    let train = ["train.activations_on_host"];
    assert_eq!(refused(tiny, of_train), train);
    assert_eq!(refused(tiny, &format!("{of_train}{stored}")), train);
    assert!(refused(tiny, &format!("{of_train}{nf4}")).is_empty());
    assert!(refused(tiny, &format!("{of_train}[ranks]\nshard = 'parameters'\n")).is_empty());
    assert!(refused(&in_4_bits, &format!("{of_train}{stored}")).is_empty());
    assert_eq!(refused(&whole, &format!("{of_train}{stored}")), train);
    assert_eq!(refused(&in_4_bits, of_train), train);
    let of_critic = "[critic]\nactivations_on_host = true\n";
    assert_eq!(refused(tiny, &format!("{of_critic}{nf4}")), ["critic.activations_on_host"]);
}

/// More than any machine has.
#[test]
fn a_run_that_ranks_divide_is_refused_once_their_number_is_known() {
    let folder = folder([5120, 27_648, 640, 40, 8], false);
    let mut plan = plan_of(folder.path(), "");
    plan.model.device = DeviceName::Cpu;
    let has = machine_memory().is_some();
    assert!(beyond_one_process(&plan).is_empty());
    assert_eq!(problems_on(&plan, None).is_empty(), !has);
    plan.ranks.shard = Shard::Optimizer;
    assert!(problems_on(&plan, None).is_empty());
    assert_eq!(problems_on(&plan, Some(1)).is_empty(), !has);
    // What is run without a launcher is one process.
    let alone = beyond_one_process(&plan);
    assert!(!has || alone[0].help.contains("rollflow launch --ranks"), "{alone:?}");
    let refused = problems_on(&plan, Some(2));
    assert!(!has || refused[0].help.contains("with ranks.shard = \"parameters\" it takes"), "{refused:?}");
}

/// [`Decoder::shares_prompts`](crate::model::Decoder) and the experts' loss, which counts a prompt with each answer.
#[test]
fn prompts_are_planned_once_only_where_a_pass_computes_them_once() {
    let tokens = |head_dim: usize, router_aux_loss: f64| -> u64 {
        let folder = tempfile::tempdir().unwrap();
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "max_position_embeddings": 2048,
            "tie_word_embeddings": true, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "torch_dtype": "bfloat16",
        });
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let mut plan = plan_of(folder.path(), "");
        plan.train.optimization.router_aux_loss = router_aux_loss;
        let memory = on_gpu(&plan, None);
        let why = &part(&memory, "activations").why;
        why.split(" × ").nth(1).and_then(|of| of.split(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("{why}"))
    };
    assert!(tokens(32, 0.0) < 8192);
    assert_eq!((tokens(32, 0.01), tokens(20, 0.0)), (8192, 8192));
}

/// Groups that go ahead, and samples of `[mix]`: a sum next to a pass's gradient.
#[test]
fn a_batch_that_comes_in_several_calls_has_a_sum_of_gradients() {
    let folder = folder(SIZES[0].1, SIZES[0].2);
    let mut plan = plan_of(folder.path(), "");
    plan.train.optimization.gradient_checkpointing = false;
    (plan.batch.groups, plan.batch.oversampling_factor, plan.generate.group_size) = (2, 1.0, 2);
    let gradients = |plan: &Plan| part(&on_gpu(plan, None), "gradients").bytes;
    let ahead = gradients(&plan);
    plan.flow.max_staleness = 0;
    let at_once = gradients(&plan);
    plan.mix = Some(Default::default());
    let mixed = gradients(&plan);
    let sum = 4 * Layout::new(&shape(&plan).unwrap()).total() as u64;
    assert_eq!((ahead, mixed), (at_once + sum, at_once + sum));
}

#[test]
fn the_page_of_cards_is_what_the_plan_says() {
    let mut text = "# Memory of GPUs\n\nWhat `rollflow check` counts for trainer and generator of a GRPO run on one GPU: bf16, 32 sequences of 256 + 1024 tokens in flight, \
                    micro-batches of 8192 tokens, gradient checkpointing; shapes of Qwen2.5, in folders in bf16. Adapters are of rank 16, with `lora.sync = \"adapter\"`. In \
                    brackets the smallest card of 16, 24, 48, 80, 141 and 180 GB that has room. The page is generated: `ROLLFLOW_WRITE_DOCS=1 cargo test --workspace --lib memory`.\n\n\
                    | model | all weights | with moments in 8 bits | and parameters in bf16 alone | with moments and layers' inputs on the host | adapters | adapters over 4 bits |\n|---|---|---|---|---|---|---|\n"
        .to_owned();
    for (name, shape, tied) in SIZES {
        let cell = |lora: &str, change: fn(&mut Optimization)| {
            let bytes = needed(shape, tied, lora, change);
            // A twentieth is another program's, or lost between blocks.
            let card = [16, 24, 48, 80, 141, 180].into_iter().find(|gb| bytes as f64 * 1.05 < f64::from(*gb) * 1e9);
            format!("{} ({})", size(bytes), card.map_or_else(|| "none".to_owned(), |gb| format!("{gb} GB")))
        };
        let on_host = |of: &mut Optimization| (of.moments, of.activations_on_host) = (MomentFormat::Host, true);
        let in_8_bits = |of: &mut Optimization| of.moments = MomentFormat::EightBit;
        let small = |of: &mut Optimization| (of.moments, of.masters) = (MomentFormat::EightBit, MasterFormat::Bf16);
        let plain = |_: &mut Optimization| ();
        let whole = [cell("", plain), cell("", in_8_bits), cell("", small), cell("", on_host)];
        let cells = whole.into_iter().chain([cell(ADAPTERS, plain), cell(OVER_4_BITS, plain)]).collect::<Vec<_>>();
        let cells = cells.join(" | ");
        text += &format!("| {name} | {cells} |\n");
    }
    let page = "docs/reference/memory.md";
    if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
        std::fs::write(page, &text).unwrap();
    }
    assert_eq!(std::fs::read_to_string(page).unwrap_or_default(), text, "run it with ROLLFLOW_WRITE_DOCS=1");
}

/// Also alongside a device that is not there.
#[test]
fn texts_longer_than_the_model_reads_are_refused_by_their_keys() {
    let beyond = |pipeline: &str, sets: &[&str]| -> Vec<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        let sections = "task.kind = 'arithmetic'\nsft = {}\neval = {}\nmodel = { kind = 'tiny', device = 'cuda:63' }\n";
        std::fs::write(file.path(), format!("pipeline = '{pipeline}'\n{sections}")).unwrap();
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let errors = crate::recipe::load(file.path(), &sets).unwrap_err();
        errors.iter().map(|error| error.key.clone()).collect()
    };
    let most = ["generate.max_new_tokens=2047", "sft.max_length=2048", "eval.max_new_tokens=2047"];
    let one_more = ["generate.max_new_tokens=2048", "sft.max_length=2049", "eval.max_new_tokens=2048"];
    for (pipeline, sets, keys) in [
        ("grpo", &[][..], &["model.device"][..]),
        ("grpo", &most, &["model.device"]),
        ("grpo", &one_more, &["eval.max_new_tokens", "generate.max_new_tokens", "model.device", "sft.max_length"]),
        ("sft", &["sft.max_length=2049"], &["model.device", "sft.max_length"]),
    ] {
        let mut found = beyond(pipeline, sets);
        found.sort();
        assert_eq!(found, keys, "{pipeline} {sets:?}");
    }
}
