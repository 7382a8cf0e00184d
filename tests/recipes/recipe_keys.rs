//! Every key of a recipe in every pipeline: it is accepted where [`READ`] says what reads it, and rejected by name everywhere else. Nothing is ignored silently.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rollflow::recipe::{Plan, RecipeError, RecipeErrors, parse, schema};
use serde_json::Value;

/// The pipelines, each with the smallest recipe that it takes, but for the model.
const PIPELINES: [(&str, &[&str]); 7] = [
    ("grpo", &["task.kind='arithmetic'", "reward.kind='exact'"]),
    ("sft", &["task.kind='arithmetic'", "sft={}"]),
    ("sft_then_grpo", &["task.kind='arithmetic'", "reward.kind='exact'", "sft={}"]),
    ("reward_model", &["task.kind='arithmetic'", "reward_model={}"]),
    ("distill", &["task.kind='arithmetic'", "reward.kind='exact'", "teacher={kind='frozen',path='m'}"]),
    ("grpo_offline", &["task={kind='rollouts',path='a.jsonl'}"]),
    ("dpo", &["task={kind='data',data='a.jsonl'}"]),
];

const ALL: &str = "grpo sft sft_then_grpo distill reward_model grpo_offline dpo";
const POLICY: &str = "grpo sft_then_grpo distill grpo_offline dpo";
const REINFORCED: &str = "grpo sft_then_grpo distill grpo_offline";
const CRITICISED: &str = "grpo sft_then_grpo grpo_offline";
const GENERATED: &str = "grpo sft_then_grpo distill";
const SAMPLED: &str = "grpo sft sft_then_grpo distill grpo_offline";
const PAIRED: &str = "grpo sft_then_grpo dpo";
const DATA: &str = "grpo sft sft_then_grpo distill reward_model dpo";
const SFT: &str = "grpo sft sft_then_grpo distill";

/// What reads a key, and in which pipelines; of several lines the longest that the key begins with counts. In every other pipeline the key is
/// an error that names it or its section.
const READ: &[(&str, &str, &str)] = &[
    ("name", ALL, "the flow, the run's folder and its record"),
    ("seed", ALL, "every draw"),
    ("filter_fallback", GENERATED, "grpo::declare"),
    ("model.", ALL, "policy::base, policy::compute"),
    ("lora.", ALL, "origin::policy, origin::score_model"),
    ("lora.sync", POLICY, "trainers::backend: the weights that are published, for a generator or an evaluation"),
    ("chat.", ALL, "conversations: prompts, examples, pairs, and those of [eval] and [mix]"),
    ("task.", DATA, "data::prompts, supervised::batches, preferences::divided, preferences::batches"),
    ("task.shuffle", "grpo sft_then_grpo distill dpo", "data::prompts, preferences::batches; others draw by the seed"),
    ("task.weight", "grpo sft sft_then_grpo distill dpo", "Mixed; a reward model meets every pair"),
    ("task.sources", DATA, "as task.data"),
    ("task.path", "grpo_offline", "grpo_offline::groups"),
    ("task.limit", REINFORCED, "grpo_offline::groups, environments::tasks"),
    ("task.rescore", "grpo_offline", "Plan::rescores"),
    ("curriculum.", GENERATED, "data::training_prompts"),
    ("sft.", SFT, "sft::train, supervised::batches"),
    ("sft.data", SAMPLED, "supervised::batches, of [mix] too"),
    ("sft.sources", SAMPLED, "supervised::batches, of [mix] too"),
    ("sft.max_length", SAMPLED, "supervised::batches, of [mix] too"),
    ("sft.on_overlong", SAMPLED, "supervised::batches, of [mix] too"),
    ("sft.packing", SAMPLED, "supervised::batches, of [mix] too"),
    ("sft.turns", SAMPLED, "supervised::prepare, of [mix] too"),
    ("trainer.", "grpo distill", "tinker::open"),
    ("sft.lr_scale.score_head", "", "a language model has none"),
    ("mix.", REINFORCED, "steps::Mixture"),
    ("reward_model.", "reward_model", "reward_model::declare, trainers::reward_model_config"),
    ("reward_model.lr_scale.head", "", "its head gives a score"),
    ("generate.", GENERATED, "rollout::generator_by, rollout::sampling"),
    ("generate.max_new_tokens", SAMPLED, "evaluation::eval_spec, and Plan::aggregation"),
    ("generate.stop", SAMPLED, "evaluation::eval_spec"),
    ("generate.temperature", REINFORCED, "trainers::backend divides logits by it"),
    ("generate.group_size", REINFORCED, "Plan::samples_per_step: the memory plan of recorded groups"),
    ("engine.", GENERATED, "engines, servers"),
    ("environment.", GENERATED, "environments::agent"),
    ("reward.", SAMPLED, "rewards::Scoring, of evaluations and of recorded rollouts too"),
    ("reward.on_failure", REINFORCED, "rewards::Scoring, grpo_offline::rescored"),
    ("reward.max_poisoned", GENERATED, "rewards::Scoring"),
    ("filter", REINFORCED, "rollout::filter"),
    ("pairs.", "grpo sft_then_grpo", "Plan::pairing"),
    ("reference.", POLICY, "references"),
    ("reference.decay", GENERATED, "references: follows what is published"),
    ("reference.every", GENERATED, "references: follows what is published"),
    ("teacher.", REINFORCED, "references, Distill::apply; a loss of pairs reads no advantages"),
    ("teacher.decay", GENERATED, "references: follows what is published"),
    ("teacher.every", GENERATED, "references: follows what is published"),
    ("batch.groups", POLICY, "Batcher, RecordedGroups::batches, preferences::batches"),
    ("batch.oversampling_factor", GENERATED, "Batcher::over_sample"),
    ("train.", POLICY, "trainers::trainer, trainers::backend, steps::step_config"),
    ("train.probe", GENERATED, "grpo::reinforce"),
    ("train.router_replay", GENERATED, "rollout::local_generator, trainers::backend"),
    ("train.gap_warn", REINFORCED, "Trainer::gap_limits; pairs of a data set were sampled by nobody"),
    ("train.gap_halt", REINFORCED, "Trainer::gap_limits; pairs of a data set were sampled by nobody"),
    ("train.target_reward", REINFORCED, "Trainer::target_reward; pairs have no reward"),
    ("train.minibatches", REINFORCED, "steps::step_config; pairs are laid out over a whole batch"),
    ("train.advantage.", REINFORCED, "Registry::estimator_of; pairs have no reward"),
    ("train.loss_aggregation", REINFORCED, "Plan::aggregation; all pairs of a step count alike"),
    ("train.kl_loss.", REINFORCED, "Train::library_loss; a loss of pairs has its own beta"),
    ("train.kl_reward.", REINFORCED, "Train::library_loss; pairs have no reward"),
    ("train.correction.", REINFORCED, "Train::off_policy; a loss of pairs has no ratio"),
    ("train.reject", REINFORCED, "Train::off_policy; a loss of pairs has no ratio"),
    ("train.proximal", REINFORCED, "Train::off_policy; a loss of pairs has no ratio"),
    ("train.entropy_coef", REINFORCED, "Train::library_loss; a loss of pairs has no such term"),
    ("train.top_entropy", REINFORCED, "Train::library_loss; a loss of pairs judges whole answers"),
    ("train.off_policy_threshold", REINFORCED, "Train::library_loss; a loss of pairs has no ratio"),
    ("train.mask_truncated", REINFORCED, "Trainer::mask_truncated; a loss of pairs judges whole answers"),
    ("train.loss.", REINFORCED, "Registry::loss_of"),
    ("train.loss.pair_loss", PAIRED, "Train::library_loss: a loss of pairs"),
    ("train.loss.beta", POLICY, "Train::library_loss: a loss of pairs, and others"),
    ("train.loss.label_smoothing", PAIRED, "Train::library_loss: a loss of pairs"),
    ("train.loss.reference_free", PAIRED, "Train::library_loss: a loss of pairs"),
    ("train.loss.tail_weight", PAIRED, "Train::library_loss: a loss of pairs"),
    ("train.loss.tau", PAIRED, "Train::library_loss: a loss of pairs"),
    ("train.lr_scale.score_head", "", "a language model has none"),
    ("critic.", CRITICISED, "trainers::critic_config"),
    ("critic.lr_scale.adapters", "", "a critic is trained whole"),
    ("critic.lr_scale.head", "", "its head gives a score"),
    ("change", ALL, "Timeline"),
    ("ramp", ALL, "Timeline"),
    ("sync.", GENERATED, "Trainer::sync_every"),
    ("flow.", GENERATED, "grpo::declare, Admission, Batcher::on_stale, rewards::Scoring"),
    ("eval.", SAMPLED, "evaluation::eval_spec, evaluation::evaluator"),
    ("eval.every", ALL, "the stage `evaluate`"),
    ("eval.limit", ALL, "the stage `evaluate`"),
    ("eval.threads", ALL, "the stage `evaluate`"),
    ("eval.task.", ALL, "evaluation::eval_spec, preferences::held_out"),
    ("eval.task.shuffle", "", "prompts are asked in their order"),
    ("eval.task.weight", "", "every record is asked"),
    ("eval.task.path", "", "rollouts are answered already"),
    ("eval.task.limit", "", "rollouts are answered already"),
    ("eval.task.rescore", "", "rollouts are answered already"),
    ("checkpoint.", ALL, "trainers::checkpointed, trainers::local_config"),
    ("observe.", ALL, "RunFolder"),
    ("ranks.", ALL, "Member::join"),
    ("store.", ALL, "serving: weights, run::upload: checkpoints"),
    ("net.", ALL, "Hub and every client, MetricsServer"),
];

/// What else may stand in a recipe, so that keys which mean something only beside it find it there. A context is tried for keys of the sections that
/// it names.
const CONTEXTS: [&[&str]; 48] = [
    &["lora={}", "trainer={backend='tinker',url='http://a:1'}"],
    &["lora={}", "trainer={backend='tinker',url='http://a:1'}", "teacher={kind='server',url='http://a:1'}"],
    &["ranks.shard='optimizer'"],
    &["store.url='file:///store'"],
    &[],
    &["sft={}"],
    &["sft={data='b.jsonl'}", "mix={}"],
    &["sft={max_length=64,packing='best_fit'}"],
    &["critic={}"],
    &["lora={}"],
    &["lora={}", "eval={}"],
    &["lora={}", "train={}"],
    &["lora={}", "sft={}"],
    &["lora={}", "reward_model={}"],
    &["train={gradient_checkpointing=true}", "model={kind='tiny',device='cuda'}"],
    &["sft={gradient_checkpointing=true}", "model={kind='tiny',device='cuda'}"],
    &["reward_model={gradient_checkpointing=true}", "model={kind='tiny',device='cuda'}"],
    &["critic={gradient_checkpointing=true}", "model={kind='tiny',device='cuda'}"],
    &["eval={}", "generate={}"],
    &["eval={task={kind='arithmetic'}}", "reward={kind='exact'}", "lora={}"],
    &["sft={data='b.jsonl',max_length=64}", "mix={}"],
    &["sft={data='b.jsonl'}"],
    &["sft={}", "mix={}"],
    &["model={kind='folder'}"],
    &["eval={}", "reward={kind='exact'}"],
    &["engine={kind='vllm',urls=['http://a:1']}"],
    &["engine={kind='rollflow',urls=['http://a:1']}"],
    &["engine={kind='vllm',urls=['http://a:1']}", "flow={max_staleness=0}"],
    &["engine={launch='vllm'}"],
    &["engine={launch='vllm',replicas=2}"],
    &["reference={kind='frozen'}", "train.kl_loss={beta=0.1}"],
    &["reference={kind='frozen'}", "train.kl_reward={beta=0.1}"],
    &["teacher={kind='frozen',path='m'}"],
    &["teacher={kind='frozen',path='m',top_k=4}"],
    &["teacher={kind='frozen',path='m',rewards=true}", "reference={kind='frozen'}", "train.kl_reward={beta=0.1}"],
    &["teacher={kind='ema'}"],
    &["teacher={kind='periodic'}"],
    &["reference={kind='ema'}", "train.kl_loss={beta=0.1}"],
    &["reference={kind='periodic'}", "train.kl_loss={beta=0.1}"],
    &["pairs={select='all'}", "train.loss={kind='dpo'}", "reference={kind='frozen'}"],
    &["environment={kind='calculator'}", "reward={kind='environment'}"],
    &["task={kind='data',data='a.jsonl'}", "reward={kind='exact'}"],
    &["task={kind='data',data='a.jsonl'}", "reward={kind='exact'}", "curriculum={}"],
    &["task={kind='rollouts',path='a.jsonl',rescore=true}", "reward={kind='exact'}"],
    &["model={kind='folder',path='m'}"],
    &["train.correction={kind='truncated_is'}"],
    &["sft={sources=[{data='b.jsonl'}]}", "mix={}"],
    &[
        "eval={task={kind='arithmetic'}}",
        "reward={kind='parts',combine='custom',aggregator='a',part=[{kind='exact',name='a'},{kind='length',name='b',min=0,max=9}]}",
    ],
];

/// What a kind needs beside it, in the words that name it.
const COMPANIONS: [(&str, &[&str]); 22] = [
    ("task.kind='data'", &["task.data='a.jsonl'"]),
    ("task.kind='environment'", &["environment={kind='verifiers',name='x'}", "sft.data='a.jsonl'"]),
    ("eval.task.kind='data'", &["eval.task.data='a.jsonl'"]),
    ("model.kind='folder'", &["model.path='m'"]),
    ("reward.kind='model'", &["reward.path='m'"]),
    ("reward.kind='http'", &["reward.url='http://a:1'"]),
    ("reward.kind='judge'", &["reward.url='http://a:1'", "reward.model='m'"]),
    ("reward.kind='custom'", &["reward.name='x'"]),
    ("reward.kind='parts'", &["reward.part=[{kind='exact',name='a'},{kind='length',name='b',min=0,max=9}]"]),
    ("reference.kind='server'", &["reference.url='http://a:1'"]),
    ("reference.kind='tinker'", &["reference.url='http://a:1'"]),
    ("teacher.kind='server'", &["teacher.url='http://a:1'"]),
    ("teacher.kind='tinker'", &["teacher.url='http://a:1'"]),
    ("environment.kind='search'", &["environment.corpus='a.jsonl'"]),
    ("reward.kind='python'", &["reward.file='x.py'"]),
    ("environment.kind='python'", &["environment.file='x.py'", "environment.environment='X'"]),
    ("environment.kind='verifiers'", &["environment.name='x'"]),
    ("environment.kind='openenv'", &["environment.url='http://a:1'"]),
    ("environment.kind='http'", &["environment.url='http://a:1'"]),
    ("environment.kind='agent'", &["environment.url='http://a:1'"]),
    ("train.loss.kind='custom'", &["train.loss.name='x'"]),
    ("train.advantage.kind='custom'", &["train.advantage.name='x'"]),
];

/// Values that no type tells.
const VALUES: [(&str, &str); 21] = [
    ("model.device", "'cuda'"),
    ("model.preset", "'qwen2.5-0.5b'"),
    ("reward.prompt", "'Grade {response} to {prompt}.'"),
    ("reward.template", "'x={code}'"),
    ("reward.part", "[{kind='exact',name='a'},{kind='length',name='b',min=0,max=9}]"),
    ("change", "[{at=2,set=['observe.log_every=3']}]"),
    ("change", "[{at=2,set=['train.lr=1e-4']}]"),
    ("ramp", "[{key='train.lr',from=1e-4,to=1e-5,end=9}]"),
    ("ramp", "[{key='sft.lr',from=1e-4,to=1e-5,end=9}]"),
    ("ramp", "[{key='reward_model.lr',from=1e-4,to=1e-5,end=9}]"),
    ("change", "[{at=2,set=['sft.lr=1e-4']}]"),
    ("change", "[{at=2,set=['reward_model.lr=1e-4']}]"),
    ("filter", "[{kind='nonzero_std'}]"),
    ("train.reject", "[{max=2.0}]"),
    ("task.sources", "[{data='a.jsonl'}]"),
    ("sft.sources", "[{data='c.jsonl'}]"),
    ("eval.task.sources", "[{data='a.jsonl'}]"),
    ("store.url", "'file:///store'"),
    ("curriculum.source", "[{name='a',from=0.5}]"),
    ("reference.part", "[{kind='frozen',path='m'}]"),
    ("teacher.part", "[{kind='frozen',path='m'}]"),
];

/// A key, and what to write for it: of each kind that has it, alternatives.
struct Key {
    path: String,
    kinds: Vec<(Vec<String>, Vec<String>)>,
}

fn section(key: &str) -> &str {
    key.split(['.', '=', '[']).next().unwrap()
}

fn read(pipeline: &str, base: &[&str], sets: &[String]) -> Result<Plan, RecipeErrors> {
    let given = |line: &&&str| {
        !sets
            .iter()
            .any(|set| set.starts_with(&format!("{}=", section(line))) || set.starts_with(&format!("{}.kind=", section(line))))
    };
    let model = ["model.kind='tiny'"];
    let lines: Vec<&str> = base.iter().chain(&model).filter(given).copied().collect();
    parse("keys.toml", &format!("pipeline='{pipeline}'\n{}\n", lines.join("\n")), sets)
}

/// Values of a key's type, other than its default.
fn values(path: &str, schema: &Value) -> Vec<String> {
    let named: Vec<String> = VALUES.iter().filter(|(key, _)| *key == path).map(|(_, value)| (*value).to_owned()).collect();
    if !named.is_empty() {
        return named;
    }
    if let Some(words) = schema["oneOf"].as_array() {
        let others = words.iter().filter(|word| word["const"] != schema["default"]);
        return others.map(|word| format!("'{}'", word["const"].as_str().unwrap_or(""))).collect();
    }
    let all: &[&str] = match schema["type"].as_str() {
        Some("boolean") => &["true", "false"],
        Some("integer") => &["2", "3", "1", "64", "1000"],
        Some("number") => &["0.5", "2.0", "0.25", "1.0"],
        Some("string") => &["'x'", "'cpu'", "'train[:50%]'", "'127.0.0.1:0'", "'http://a:1'", "'2024-01-01'"],
        Some("array") if schema["items"]["type"] == "number" => &["[0.8,0.9]"],
        _ => &["['x']", "['q_proj']", "['A=b']", "['cpu']", "[1]", "['http://a:1']", "{x=1}", "'x'"],
    };
    let default = schema["default"].to_string().replace('"', "'");
    all.iter().filter(|value| **value != default).map(|value| (*value).to_owned()).collect()
}

fn collect(schema: &Value, path: &str, before: &[String], all: &mut BTreeMap<String, Key>) {
    for (key, of) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        // A kind and a pipeline decide about other keys; `aliases.rs` tests old names.
        if of["deprecated"] == true || path == "include" || path == "pipeline" || key == "kind" && !of["const"].is_null() {
            continue;
        }
        if let Some(kinds) = of["oneOf"].as_array().filter(|kinds| kinds[0]["properties"].is_object()) {
            for kind in kinds {
                let word = kind["properties"]["kind"]["const"].as_str().map(|word| format!("{path}.kind='{word}'"));
                collect(kind, &path, &before.iter().cloned().chain(word).collect::<Vec<_>>(), all);
            }
        } else if of["properties"].is_object() {
            collect(of, &path, before, all);
        } else {
            let values = values(&path, of).into_iter().map(|value| format!("{path}={value}")).collect();
            all.entry(path.clone()).or_insert_with(|| Key { path, kinds: Vec::new() }).kinds.push((before.to_vec(), values));
        }
    }
}

/// A recipe that keys are tried in.
struct Context {
    pipeline: &'static str,
    base: &'static [&'static str],
    sets: Vec<String>,
    /// Whether it is a recipe without them.
    whole: bool,
}

/// Where the key is accepted, and rejections elsewhere that do not name it.
fn judge(key: &Key, contexts: &[Context]) -> (BTreeSet<&'static str>, Vec<String>) {
    let (mut accepted, mut unnamed) = (BTreeSet::new(), Vec::new());
    let of = section(&key.path);
    let last = key.path.rsplit('.').next().unwrap();
    let relevant = |context: &&Context| context.sets.is_empty() || context.sets.iter().any(|set| section(set) == of);
    let relevant: Vec<&Context> = contexts.iter().filter(relevant).collect();
    for (kind, values) in &key.kinds {
        let beside = COMPANIONS.iter().filter(|(of, _)| kind.iter().any(|set| set == of)).flat_map(|(_, sets)| *sets);
        let beside: Vec<String> = beside.map(|set| (*set).to_owned()).collect();
        for value in values {
            let before = accepted.len();
            for Context { pipeline, base, sets, whole } in &relevant {
                for beside in [&beside[..], &[]].into_iter().take(1 + usize::from(!beside.is_empty())) {
                    if accepted.contains(pipeline) {
                        break;
                    }
                    let written = [&sets[..], kind, beside, std::slice::from_ref(value)].concat();
                    let names = |error: &RecipeError| section(&error.key) == of || error.message.contains(last);
                    match read(pipeline, base, &written) {
                        Ok(_) => drop(accepted.insert(*pipeline)),
                        Err(errors) if *whole && !errors.iter().any(names) => {
                            unnamed.push((*pipeline, format!("{written:?}: {errors}")))
                        }
                        Err(_) => {}
                    }
                }
            }
            // A value that makes sense anywhere is the one that all are judged by, but for those that name a section of their own.
            if accepted.len() > before && !VALUES.iter().any(|(named, _)| *named == key.path) {
                break;
            }
        }
    }
    let unnamed = unnamed.into_iter().filter(|(pipeline, _)| !accepted.contains(pipeline)).map(|(_, told)| told).collect();
    (accepted, unnamed)
}

#[test]
fn every_key_is_read_by_a_pipeline_or_rejected_there_by_name() {
    let mut keys = BTreeMap::new();
    collect(&schema(), "", &[], &mut keys);
    assert!(keys.len() > 330, "{} keys", keys.len());
    let in_all = |(pipeline, base): (&'static str, &'static [&'static str])| {
        CONTEXTS.iter().map(move |context| {
            let sets: Vec<String> = context.iter().map(|set| (*set).to_owned()).collect();
            Context { whole: read(pipeline, base, &sets).is_ok(), pipeline, base, sets }
        })
    };
    let contexts: Vec<Context> = PIPELINES.into_iter().flat_map(in_all).filter(|context| context.whole).collect();
    let (keys, next, wrong) = (Vec::from_iter(keys.into_values()), AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = &|| {
        while let Some(key) = keys.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (accepted, unnamed) = judge(key, &contexts);
            let line = READ.iter().filter(|(read, ..)| key.path == *read || read.ends_with('.') && key.path.starts_with(read));
            let read = line.max_by_key(|(read, ..)| read.len());
            let declared: BTreeSet<&str> = read.map_or("", |(_, pipelines, _)| *pipelines).split_whitespace().collect();
            let mut wrong = wrong.lock().unwrap();
            if read.is_none() {
                wrong.push(format!("{}: no line of READ says what reads it", key.path));
            } else if accepted != declared {
                wrong.push(format!("{}: accepted by {accepted:?}, and read by {declared:?}", key.path));
            }
            wrong.extend(unnamed.into_iter().take(1).map(|error| format!("{}: rejected without its name: {error}", key.path)));
        }
    };
    std::thread::scope(|scope| {
        (0..std::thread::available_parallelism().map_or(1, usize::from)).for_each(|_| drop(scope.spawn(work)))
    });
    let mut wrong = wrong.into_inner().unwrap();
    wrong.sort();
    assert!(wrong.is_empty(), "{} keys:\n{}", wrong.len(), wrong.join("\n"));
}
