//! The page *Scaling* (`docs/explain/scaling.md`): its forecasts are what its commands print, and its tables are those of
//! the memory plan. `ROLLFLOW_WRITE_DOCS=1` writes both into the page.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rollflow::model::{Layout, ModelConfig};
use rollflow::recipe::{MemoryPlan, parse};
use serde_json::json;

use crate::running::rollflow;

/// Held while a test reads the page and writes it again. Otherwise tests would only wait for each other.
static PAGE: Mutex<()> = Mutex::new(());

fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/explain/scaling.md")
}

fn writes() -> bool {
    std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some()
}

/// The page, for this test alone if it is written.
fn taken() -> Option<MutexGuard<'static, ()>> {
    writes().then(|| PAGE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Holds the page to a text of it that was made again, or writes it.
fn hold(found: &str, made: &str) {
    if writes() {
        fs::write(page(), made).unwrap();
    }
    assert!(found == made || writes(), "run it with ROLLFLOW_WRITE_DOCS=1; it says\n{made}");
}

/// The words of a command line; an argument in quotes is one word.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for letter in line.chars() {
        match letter {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            _ => words.last_mut().unwrap().push(letter),
        }
    }
    words.into_iter().filter(|word| !word.is_empty()).collect()
}

/// Each command with a forecast is followed by what it prints.
#[test]
fn every_forecast_of_the_page_is_what_its_command_prints() {
    let _alone = taken();
    let found = fs::read_to_string(page()).unwrap();
    let (mut made, mut rest, mut commands) = (String::new(), found.as_str(), 0);
    while let Some((before, after)) = rest.split_once("```sh\nrollflow simulate pipelines/scaling/") {
        let (command, after) = after.split_once("\n```\n").unwrap();
        let command = format!("simulate pipelines/scaling/{command}");
        let joined = command.replace("\\\n", " ");
        let ended = rollflow(&words(&joined).iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(ended.code, Some(0), "{command}: {}", ended.err);
        let (between, after) = after.split_once("```text\n").unwrap();
        assert!(between.trim().is_empty(), "the output follows its command: {between}");
        let (_, after) = after.split_once("\n```").unwrap();
        made += &format!("{before}```sh\nrollflow {command}\n```\n```text\n{}\n```", ended.out.trim_end());
        (rest, commands) = (after, commands + 1);
    }
    assert!(commands >= 3, "{commands} commands");
    hold(&found, &(made + rest));
}

/// Models by size: vocabulary, width, layers, query heads, key and value heads, width of a head and of the feed-forward layer, tied head.
const MODELS: [(&str, &str, [usize; 7], bool); 7] = [
    ("0.5B", "qwen2", [151_936, 896, 24, 14, 2, 64, 4864], true),
    ("1.5B", "qwen2", [151_936, 1536, 28, 12, 2, 128, 8960], true),
    ("3B", "qwen2", [151_936, 2048, 36, 16, 2, 128, 11_008], true),
    ("7B", "qwen2", [152_064, 3584, 28, 28, 4, 128, 18_944], false),
    ("14B", "qwen2", [152_064, 5120, 48, 40, 8, 128, 13_824], false),
    ("32B", "qwen2", [152_064, 5120, 64, 40, 8, 128, 27_648], false),
    ("70B", "llama", [128_256, 8192, 80, 64, 8, 128, 28_672], false),
];

/// Numbers of a model, of its adapters of rank 16, and of its largest part that is gathered, or whose gradient comes, as a whole.
struct Size {
    parameters: f64,
    adapters: f64,
    unit: f64,
}

impl Size {
    fn of(config: &ModelConfig) -> Self {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let products = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, inner), (hidden, inner), (inner, hidden)];
        let adapters = config.layers() * products.iter().map(|(from, to)| 16 * (from + to)).sum::<usize>();
        let layer = products.iter().map(|(from, to)| from * to).sum::<usize>();
        let unit = layer.max(config.vocab_size * hidden);
        Size { parameters: Layout::new(config).total() as f64, adapters: adapters as f64, unit: unit as f64 }
    }

    /// Bytes of a trainer's state on one of `n` ranks in bf16, with checkpointed layers and several micro-batches.
    fn held(&self, shard: &str, n: f64) -> f64 {
        let p = self.parameters;
        match shard {
            // Masters 4, their copy to compute with 2, moments 8, the sum of gradients 4, to which each part's is added.
            "nothing" => 18.0 * p + 4.0 * self.unit,
            "optimizer" => (4.0 + 2.0 + 4.0) * p + 4.0 * self.unit + (8.0 + 4.0) * p / n,
            // A pass's whole gradient 4, and a part of the sum.
            "gradients" => (4.0 + 2.0 + 4.0) * p + (8.0 + 4.0) * p / n,
            "parameters" => (4.0 + 2.0 + 8.0 + 4.0) * p / n + (2.0 * 2.0 + 4.0) * self.unit,
            _ => 2.0 * p + 22.0 * self.adapters,
        }
    }

    /// Bytes that each of `n` ranks sends: per step, or with `parameters` per micro-batch.
    fn sent(&self, shard: &str, n: f64) -> f64 {
        let others = (n - 1.0) / n;
        match shard {
            // A sum of the gradient that all keep; or of parts, and the new parameters.
            "nothing" | "optimizer" => 8.0 * others * self.parameters,
            "parameters" => (2.0 * 2.0 + 4.0) * others * self.parameters,
            _ => 8.0 * others * self.adapters,
        }
    }
}

/// `16.8`, `0.12`.
fn gigabytes(bytes: f64) -> String {
    let size = bytes / 1e9;
    if size < 1.0 {
        format!("{size:.2}")
    } else if size < 100.0 {
        format!("{size:.1}")
    } else {
        format!("{size:.0}")
    }
}

#[test]
fn the_table_of_memory_and_traffic_is_that_of_the_memory_plan() {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = String::new();
    for (name, family, [vocab, hidden, layers, heads, kv_heads, head_dim, inner], tied) in MODELS {
        let model = folder.path().join(name);
        fs::create_dir(&model).unwrap();
        let config = json!({
            "model_type": family, "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": 32_768,
            "tie_word_embeddings": tied, "torch_dtype": "bfloat16",
        });
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        let size = Size::of(&ModelConfig::from_json(&model.join("config.json"), config.as_object().unwrap()).unwrap());
        for (shard, more) in [("nothing", ""), ("lora", "[lora]\nrank = 16\n")] {
            let text = format!(
                "pipeline = 'grpo'\n[model]\npath = {model:?}\ndevice = 'cuda:0'\n[task]\nkind = 'arithmetic'\n[batch]\ngroups = 64\n\
                 [train]\ngradient_checkpointing = true\nmicro_batch_tokens = 1024\n{more}"
            );
            let plan =
                parse("memory.toml", &text, &["model.check_memory=false".to_owned()]).unwrap_or_else(|errors| panic!("{errors}"));
            let memory = MemoryPlan::of(&plan).unwrap().remove(0);
            let state = memory.parts.iter().filter(|part| ["weights", "optimizer", "gradients"].contains(&part.what));
            let planned: u64 = state.map(|part| part.bytes).sum();
            let held = size.held(shard, 1.0);
            assert!((planned as f64 / held - 1.0).abs() < 1e-3, "{name}, {shard}: planned {planned}, here {held}: {memory}");
        }
        let both = |of: &dyn Fn(f64) -> f64| format!("{} / {}", gigabytes(of(8.0)), gigabytes(of(64.0)));
        let cells = [
            gigabytes(size.held("nothing", 1.0)),
            both(&|n| size.held("optimizer", n)),
            both(&|n| size.held("gradients", n)),
            both(&|n| size.held("parameters", n)),
            gigabytes(size.held("lora", 1.0)),
            both(&|n| size.sent("nothing", n)),
            both(&|n| size.sent("optimizer", n)),
            both(&|n| size.sent("parameters", n)),
            gigabytes(size.sent("lora", 64.0)),
        ];
        rows += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    let _alone = taken();
    let found = fs::read_to_string(page()).unwrap();
    let head =
        "| model | nothing | optimizer | gradients | parameters | LoRA | nothing | optimizer | parameters | LoRA |\n| --- |";
    let (before, after) = found.split_once(head).unwrap();
    let (rule, after) = after.split_once('\n').unwrap();
    let after = after.split_once("\n\n").map_or("", |(_, after)| after);
    hold(&found, &format!("{before}{head}{rule}\n{rows}\n{after}"));
}
