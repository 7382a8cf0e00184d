//! Recipes that are right: the shipped ones load, a resolved one loads again to the same plan, and the reference is up to date.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use rollflow::algo::rewards::Combine;
use rollflow::algo::{
    Advantage, Aggregation, Decay, Dpo, Grpo, Gspo, ImportanceChoice, KlCov, KlLoss, KlReward, Level, LossChoice, PairLoss,
    Proximal, Rejection, Select,
};
use rollflow::data::source::Columns;
use rollflow::recipe::{
    Composition, Computes, Custom, Fallback, Filter, Machine, ModelSource, OnStale, Params, PartRule, Pipeline, Plan,
    ReferencePolicy, RewardModel, RewardRule, Sft, Source, TaskData, Train, check_text_on, load, load_with, pages, parse,
};
use rollflow::stages::reward::ModelRule;
use rollflow::train::NonFinitePolicy;
use serde_json::Value as Json;

const MACHINE: Machine = Machine { threads: 2, gpus: 0, multiplies_bf16: false };

fn shipped() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines/recipes");
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder).expect("the recipes folder").map(|file| file.expect("a file").path()).collect();
    files.sort();
    files
}

/// A recipe's text, behind that of the recipes which it includes.
fn text_of(file: &Path) -> String {
    let text = fs::read_to_string(file).expect("the recipe");
    let included = text.lines().find_map(|line| line.strip_prefix("include = \"")?.strip_suffix('"'));
    included.map_or_else(String::new, |base| text_of(&file.with_file_name(base))) + &text
}

/// A model that reads as much as those that must be fetched.
static MODEL: LazyLock<PathBuf> = LazyLock::new(|| {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/qwen2_tied");
    let model = Path::new(env!("CARGO_TARGET_TMPDIR")).join("qwen2_that_reads_much");
    fs::create_dir_all(&model).expect("a folder");
    for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden.join(file), model.join(file)).expect("the golden model");
    }
    let config = fs::read_to_string(golden.join("config.json")).expect("the golden model");
    let config = config.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 32768");
    fs::write(model.join("config.json"), config).expect("its configuration");
    model
});

/// A folder with GSM8K's subset and splits, and two problems of our own in each.
static GSM8K: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gsm8k");
    fs::create_dir_all(folder.join("main")).expect("a folder");
    let problems = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines/data/word_problems.jsonl"));
    let two: String = problems.expect("the word problems").lines().take(2).map(|line| format!("{line}\n")).collect();
    for split in ["train", "test"] {
        fs::write(folder.join(format!("main/{split}-00000-of-00001.jsonl")), &two).expect("a file");
    }
    folder
});

/// A shipped recipe, with a model, a data set and rollouts that are here instead of those that must be fetched or made.
fn shipped_plan(file: &Path) -> Plan {
    let here = [
        ("path = \"Qwen/", format!("model.path={}", MODEL.display())),
        ("data = \"openai/gsm8k\"", format!("task.data={}", GSM8K.display())),
        ("task = { data = \"openai/gsm8k\"", format!("eval.task.data={}", GSM8K.display())),
        ("path = \"runs/teacher\"", format!("teacher.path={}", MODEL.display())),
        ("path = \"runs/gsm8k/", "task.path=pipelines/data/rollouts_addition.jsonl".to_owned()),
    ];
    let text = text_of(file);
    let sets: Vec<String> = here.into_iter().filter(|(sign, _)| text.contains(sign)).map(|(_, set)| set).collect();
    load(file, &sets).unwrap_or_else(|errors| panic!("{errors}"))
}

fn grpo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines/recipes/grpo.toml")
}

#[test]
fn the_format_and_what_follows_from_it_go_by_the_device_where_none_is_named() {
    let base = "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n";
    let plan = |set: &str| parse("formats.toml", base, &[set.to_owned()]).unwrap_or_else(|errors| panic!("{errors}"));
    let (host, half) = (plan("model.device=cpu"), plan("model.dtype=bf16"));
    assert_eq!((host.model.precision().word(), host.train.gap_limits(host.model.precision())), ("f32", [1.0, 3.0]));
    assert_eq!((half.model.precision().word(), half.train.gap_limits(half.model.precision())), ("bf16", [0.15, 1.0]));
    assert!(half.model.precision().agreement() > host.model.precision().agreement());
    let mut gpu = host.clone();
    gpu.model.device = "cuda".parse().unwrap();
    assert_eq!(gpu.model.precision().word(), "bf16");
    let told = |plan: &Plan| check_text_on(plan, MACHINE);
    assert!(told(&gpu).contains("bf16 on cuda:0: model.dtype is not set, and a GPU computes in bf16"), "{}", told(&gpu));
    assert!(told(&half).contains("bf16 on cpu: as model.dtype says, but this processor has no products of bf16 numbers"));
    let told = |plan: &Plan| check_text_on(plan, Machine { multiplies_bf16: true, ..MACHINE });
    assert!(told(&half).contains("bf16 on cpu: as model.dtype says\n"));
    assert!(told(&host).contains("a processor computes in f32; this one is faster with model.dtype = \"bf16\""));
    let halt = plan("train.gap_warn=5");
    assert_eq!(halt.train.gap_limits(halt.model.precision()), [5.0, 5.0], "a default never contradicts what is written");
}

#[test]
fn every_shipped_recipe_loads_and_is_without_warnings() {
    assert!(shipped().len() >= 3);
    for file in shipped() {
        let plan = shipped_plan(&file);
        // Each scorer takes a core of its own.
        let machine = Machine { threads: MACHINE.threads + plan.scoring_policies().count(), ..MACHINE };
        assert_eq!(plan.warnings(machine), Vec::<String>::new(), "{}", file.display());
    }
}

/// What is wrong with a recipe before its model was fetched is that, and nothing else.
#[test]
fn a_recipe_for_a_model_that_is_not_here_is_refused_for_the_model_alone() {
    let file = shipped().into_iter().find(|file| file.ends_with("word_problems.toml")).unwrap();
    let errors = load(&file, &["model.path=no/such/folder".to_owned()]).unwrap_err();
    assert_eq!(errors.iter().map(|error| error.key.as_str()).collect::<Vec<_>>(), ["model.path"], "{errors}");
}

#[test]
fn every_shipped_recipe_resolves_to_itself() {
    for file in shipped() {
        let plan = shipped_plan(&file);
        let resolved = plan.to_toml();
        assert_eq!(parse("resolved.toml", &resolved, &[]).unwrap_or_else(|errors| panic!("{errors}\n{resolved}")), plan);
    }
}

/// Whether a value fits a schema, of which only what ours uses is understood.
fn fits(value: &Json, schema: &Json) -> bool {
    let one = schema["oneOf"].as_array().is_none_or(|kinds| kinds.iter().filter(|kind| fits(value, kind)).count() == 1);
    let constant = schema.get("const").is_none_or(|constant| constant == value);
    let kind = match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("number") => value.is_number(),
        Some("integer") => value.as_i64().is_some_and(|number| number >= schema["minimum"].as_i64().unwrap_or(i64::MIN)),
        _ => true,
    };
    let keys = value.as_object().is_none_or(|keys| {
        keys.iter().all(|(key, value)| match &schema["properties"][key] {
            Json::Null => schema["additionalProperties"] != false,
            of => fits(value, of),
        })
    });
    let required = schema["required"]
        .as_array()
        .is_none_or(|keys| keys.iter().all(|key| key.as_str().is_some_and(|key| value.get(key).is_some())));
    let items = value.as_array().is_none_or(|items| items.iter().all(|item| schema.get("items").is_none_or(|of| fits(item, of))));
    one && constant && kind && keys && required && items
}

#[test]
fn the_schema_takes_every_shipped_recipe_resolved_or_not_and_no_misspelled_one() {
    let schema = rollflow::recipe::schema();
    // JSON has no infinity.
    let json = |text: &str| serde_json::to_value(text.replace("= inf", "= 1e300").parse::<toml::Table>().unwrap()).unwrap();
    for file in shipped() {
        let text = fs::read_to_string(&file).unwrap();
        assert!(fits(&json(&text), &schema), "{}", file.display());
        assert!(fits(&json(&shipped_plan(&file).to_toml()), &schema), "{}", file.display());
    }
    let sound = "pipeline = 'grpo'\nmodel = { kind = 'tiny' }\ntask = { kind = 'arithmetic' }\n";
    assert!(fits(&json(sound), &schema) && fits(&json(&format!("include = 'a.toml'\n{sound}")), &schema));
    for wrong in [
        "pipelin = 'grpo'",
        "pipeline = 'gpro'",
        "[model]\nkind = 'tiny'\nhiden = 1",
        "[train]\nsteps = -1",
        "[train]\nlr = 'fast'",
    ] {
        assert!(!fits(&json(wrong), &schema), "{wrong}");
    }
}

#[test]
fn the_schema_in_docs_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/recipe.schema.json");
    let text = format!("{:#}\n", rollflow::recipe::schema());
    if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
        fs::write(&path, &text).unwrap();
    }
    assert_eq!(fs::read_to_string(path).unwrap(), text, "write it anew: ROLLFLOW_WRITE_DOCS=1 cargo test --test recipes");
}

#[test]
fn a_resolved_recipe_spells_out_every_default() {
    let plan = parse("a.toml", "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'", &[]).unwrap();
    insta::assert_snapshot!(plan.to_toml());
}

#[test]
fn check_prints_derived_numbers_and_warnings() {
    let texts: Vec<String> = shipped().iter().map(|file| check_text_on(&shipped_plan(file), MACHINE)).collect();
    let texts: Vec<String> = texts.iter().map(|text| text.replace(&MODEL.display().to_string(), "…/qwen2")).collect();
    let mut odd = load(&grpo(), &[]).unwrap();
    odd.sft = None;
    odd.generate.threads = Some(8);
    odd.generate.max_new_tokens = 2;
    odd.train.optimization.micro_batch_tokens = 1;
    odd.sync.every = 1000;
    odd.flow.max_staleness = 0;
    let mut over_sampled = load(&grpo(), &["batch.oversampling_factor=1.5".to_owned()]).unwrap();
    over_sampled.flow.max_staleness = 3;
    let mut dropping = over_sampled.clone();
    (dropping.flow.on_stale, dropping.flow.window) = (OnStale::Drop, Some(200));
    let sft = |sets: [&str; 3]| load(&grpo().with_file_name("sft.toml"), &sets.map(str::to_owned)).unwrap();
    let packed = sft(["sft.max_length=512", "sft.packing=best_fit", "sft.batch_tokens=4096"]);
    let more = [odd, over_sampled, dropping, packed].map(|plan| check_text_on(&plan, MACHINE));
    insta::assert_snapshot!(format!("{}\n{}", texts.join("\n"), more.join("\n")));
}

#[test]
fn an_override_wins_over_the_file_and_needs_no_quotes() {
    let sets =
        ["train.lr=1e-5", "name=other", "task.digits=2", "filter=[]", "train.schedule.kind=cosine", "observe.progress=false"];
    let plan = load(&grpo(), &sets.map(str::to_owned)).unwrap();
    assert_eq!((plan.train.lr, plan.name.as_str(), plan.filter.len()), (1e-5, "other", 0));
    assert_eq!((plan.train.optimization.schedule.kind, plan.observe.progress), (Decay::Cosine, false));
    assert!(matches!(plan.task.data, TaskData::Arithmetic { digits: 2, .. }));
}

#[test]
fn dotted_keys_inline_tables_and_headings_are_the_same() {
    let headings = "pipeline='sft'\n[model]\nkind='tiny'\n[task]\nkind='arithmetic'\n[sft]\nsteps=5\n[sft.schedule]\nwarmup=2";
    let inline = "pipeline='sft'\nmodel={kind='tiny'}\ntask.kind='arithmetic'\nsft={steps=5, schedule.warmup=2}";
    assert_eq!(parse("a", headings, &[]).unwrap(), parse("b", inline, &[]).unwrap());
}

/// R013, R014: what code builds is held to the same ranges as what a file says.
#[test]
fn sections_made_in_rust_are_checked() {
    assert!(Sft::new(40, 64, 1e-3).is_ok());
    let errors = Sft::new(0, 0, f64::NAN).unwrap_err();
    assert_eq!(errors.iter().map(|error| error.key.as_str()).collect::<Vec<_>>(), ["batch", "lr", "steps"]);
    assert!(Train::new(10, 1e-6).is_ok() && Train::new(10, -1.0).is_err());
    let mut plan = Plan::default();
    assert!(plan.validate().is_ok());
    plan.generate.group_size = 1;
    assert!(plan.validate().unwrap_err().to_string().starts_with("plan: `generate.group_size` is 1"));
}

/// Laws V2 and V3: the window holds what the staleness allows, and no more.
#[test]
fn the_window_follows_from_staleness_batch_and_sync() {
    let mut plan = Plan::default();
    (plan.flow.max_staleness, plan.batch.groups, plan.sync.every) = (2, 8, 3);
    assert_eq!((plan.admission_window(), plan.worst_staleness()), (72, 2));
    plan.flow.window = Some(24);
    assert_eq!((plan.admission_window(), plan.worst_staleness()), (24, 0));
    plan.flow = Default::default();
    plan.flow.max_staleness = 0;
    assert_eq!((plan.admission_window(), plan.worst_staleness()), (24, 0));
}

/// By brute force over an adversary that admits as early and trains as late as the window lets it: the promised staleness is never
/// exceeded, and it is reached.
#[test]
fn worst_staleness_is_what_an_adversary_reaches() {
    for (staleness, groups, every) in [(0, 1, 1), (0, 4, 1), (1, 4, 1), (3, 2, 1), (1, 3, 2), (2, 5, 3)] {
        let mut plan = Plan::default();
        (plan.flow.max_staleness, plan.batch.groups, plan.sync.every) = (staleness, groups, every);
        let per_publish = groups * every as usize;
        let widest = (staleness as usize + 1) * per_publish;
        for window in per_publish..=widest {
            plan.flow.window = Some(window);
            assert!(plan.validate().is_ok());
            let lags = (0..10 * per_publish).map(|group| {
                // Admitted under the earliest version whose credit covers it, trained under the version of its turn.
                let sampled_by = (group + 1).saturating_sub(window).div_ceil(per_publish);
                group / per_publish - sampled_by
            });
            assert_eq!(lags.max().map(|lag| lag as u64), Some(plan.worst_staleness()), "{staleness} {groups} {every} {window}");
        }
        for impossible in [per_publish - 1, widest + 1] {
            plan.flow.window = Some(impossible);
            assert!(plan.validate().is_err(), "{impossible}");
        }
    }
}

/// Law V2: as many groups are let in as a step chooses from, and no more than the versions until they are due can train.
#[test]
fn over_sampling_lets_in_what_a_step_chooses_from_within_the_staleness() {
    let mut plan = Plan::default();
    (plan.flow.max_staleness, plan.batch.groups, plan.batch.oversampling_factor) = (1, 32, 1.5);
    assert_eq!((plan.groups_chosen_from(), plan.admission_window(), plan.worst_staleness()), (48, 48, 1));
    assert!(plan.validate().is_ok());
    plan.sync.every = 3;
    assert_eq!((plan.admission_window(), plan.worst_lag_in_turn()), (112, 1), "two steps before, and what the last chooses from");
    plan.sync.every = 1;
    plan.batch.oversampling_factor = 2.0;
    assert!(plan.validate().is_ok(), "all that the bound allows");
    plan.batch.oversampling_factor = 2.01;
    assert!(plan.validate().is_err());
    plan.flow.on_stale = OnStale::Mask;
    assert!(plan.validate().is_ok(), "older tokens do not count then");
}

/// Laws V2 and V3: a synchronous round has all that its steps choose from, in this process and on servers.
#[test]
fn a_synchronous_run_may_over_sample_and_may_generate_on_servers() {
    let sets = ["flow.max_staleness=0", "batch.groups=32", "batch.oversampling_factor=1.5"].map(str::to_owned);
    let mut plan = load(&grpo(), &sets).unwrap();
    assert_eq!((plan.groups_chosen_from(), plan.admission_window(), plan.worst_staleness()), (48, 48, 0));
    let text = check_text_on(&plan, MACHINE);
    assert!(text.contains("the oldest kept of 48") && text.contains("0 versions: what a round has beyond"), "{text}");
    plan.sync.every = 2;
    assert_eq!((plan.admission_window(), plan.validate().is_ok()), (80, true));
    let mut servers = vec!["engine.kind=vllm".to_owned(), "engine.urls=[\"http://127.0.0.1:8000\"]".to_owned()];
    servers.push("generate.max_num_seqs=0".to_owned());
    let plan = load(&grpo(), &[&sets[..], &servers].concat()).unwrap();
    assert!(plan.engine.is_remote() && plan.flow.max_staleness == 0);
}

#[test]
fn servers_get_all_that_may_be_in_flight_unless_the_recipe_says_how_many() {
    let text = |more: &str| {
        format!("pipeline = \"grpo\"\nmodel = {{ kind = \"tiny\" }}\ntask = {{ kind = \"arithmetic\" }}\neval = {{}}\n{more}")
    };
    let servers = "engine = { kind = \"vllm\", urls = [\"http://127.0.0.1:8000\"] }\n";
    let slots = |more: &str| {
        let plan = parse("recipe.toml", &text(more), &[]).unwrap();
        assert_eq!(parse("recipe.toml", &plan.to_toml(), &[]).unwrap(), plan);
        (plan.most_slots(), plan.eval.map(|eval| eval.max_num_seqs))
    };
    // A window of 64 groups.
    let large = "generate = { group_size = 16, max_num_seqs = 0 }\n";
    assert_eq!(slots(servers), (64 * 8, Some(64 * 8)));
    assert_eq!(slots(&(servers.to_owned() + "generate = { max_num_seqs = 24 }\n")), (24, Some(64 * 8)));
    assert_eq!(slots(&(servers.to_owned() + large)), (64 * 16, Some(64 * 16)));
    assert_eq!(slots(""), (64, Some(64)));
    assert_eq!(slots(large), (256, Some(64)), "a cache of this process has room for each");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("recipe.toml");
    fs::write(&file, text(servers)).unwrap();
    let (_, derived) = load_with(&file, &[], Computes::Here, |_| Vec::new()).unwrap();
    for key in ["generate.max_num_seqs", "eval.max_num_seqs"] {
        assert!(derived.iter().any(|of| of.key == key && of.value == "512"), "{key}: {derived:?}");
    }
}

#[test]
fn the_reference_is_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/recipe");
    let pages = pages();
    if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
        fs::remove_dir_all(&folder).unwrap();
        fs::create_dir(&folder).unwrap();
        pages.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }
    let read = |name: &String| (name.clone(), fs::read_to_string(folder.join(name)).unwrap_or_default());
    assert!(
        pages.keys().map(read).collect::<BTreeMap<_, _>>() == pages && fs::read_dir(&folder).unwrap().count() == pages.len(),
        "docs/reference/recipe differs from the declarations; run ROLLFLOW_WRITE_DOCS=1 cargo test --test recipes"
    );
}

fn data_sets(only: Source, several: Vec<Source>) -> TaskData {
    let mut data = TaskData::Data(Default::default());
    if let TaskData::Data(of) = &mut data {
        (of.only, of.sources) = (only, several);
    }
    data
}

fn any_plan() -> impl Strategy<Value = Plan> {
    let run = (any::<bool>(), "\\PC{1,12}", 0..=i64::MAX as u64, 1_usize..99, 2_usize..99);
    let numbers = (1e-12..1e3_f64, 0.0..=1.0_f64, any::<bool>(), 1_u64..999, prop::option::of(0_u16..9999));
    let words = (prop::collection::vec("[^\\x00]{0,6}", 0..3), "[a-z(){0,5}\"'\\\\]{1,8}", 0_usize..3);
    (run, numbers, words).prop_map(|((sft, name, seed, few, more), (real, share, flag, steps, port), (stop, pattern, choice))| {
        let mut plan = Plan { name: name.clone(), seed, ..Plan::default() };
        let data = flag.then(|| PathBuf::from("données/a b.jsonl"));
        plan.sft = (sft || flag).then(|| Sft { steps, batch: few, lr: real, data, ..Sft::default() });
        plan.task.shuffle = flag;
        if !flag {
            plan.model.source = ModelSource::Folder(Default::default());
            if let ModelSource::Folder(folder) = &mut plan.model.source {
                folder.path = "a \"b\"".into();
            }
            let only = Source { max_samples: Some(few), ..Source::of("c.jsonl") };
            plan.task.data = data_sets(only, Vec::new());
            if choice == 1 {
                let columns = Some(Columns { prompt: Some(pattern.clone()), ..Columns::default() });
                let first = Source { weight: Some(real), columns, subset: Some(name.clone()), ..Source::of("a b.jsonl") };
                let second =
                    Source { weight: Some(1.0), split: "test[-5:]".into(), max_samples: Some(few), ..Source::of("org/data") };
                plan.task.data = data_sets(Source::default(), vec![first, second]);
            }
        }
        if sft && choice == 2 {
            plan.pipeline = Pipeline::RewardModel;
            plan.sft = None;
            plan.reward_model = Some(RewardModel { steps, batch: few, lr: real, center: share, ..RewardModel::default() });
            return plan;
        }
        if sft {
            plan.pipeline = Pipeline::Sft;
            return plan;
        }
        plan.generate.group_size = more;
        plan.generate.stop = stop.clone();
        plan.generate.temperature = real;
        plan.generate.min_p = share;
        plan.batch.oversampling_factor = 1.0 + share / 2.0;
        plan.filter_fallback = if flag { Fallback::Keep } else { Fallback::Error };
        if regex_is_valid(&pattern) {
            plan.reward.rule = regex(&pattern);
        } else if choice > 1 {
            plan.reward.rule = RewardRule::Model(ModelRule { path: "a \"b\"".into(), missing_end_penalty: real, threads: few });
        } else if choice > 0 {
            let mut of = Composition { combine: Combine::Product, part: vec![Default::default()], ..Default::default() };
            of.part[0].rule = PartRule::Format { tags: vec!["think".to_owned()] };
            (of.part[0].name, of.part[0].at_least) = (format!("part_{few}"), flag.then_some(share));
            plan.reward.rule = RewardRule::Parts(of);
        }
        plan.filter = vec![Filter::Length { min: 0, max: few }, Filter::MinReward { threshold: -real }];
        plan.filter.truncate(choice);
        if flag {
            let nested = toml::Table::from_iter([(stop.concat(), real.into()), ("list".to_owned(), stop.clone().into())]);
            let params = Params::default().with(&pattern, nested).with("few", few as i64).with("flag", flag);
            plan.filter.push(Filter::Custom(Custom { name: pattern.clone(), params }));
        }
        plan.train.loss_aggregation =
            [Aggregation::TokenMean, Aggregation::SeqMeanTokenMean, Aggregation::DrGrpo { max_len: 0 }][choice];
        plan.train.entropy_coef = real;
        plan.train.loss = [
            LossChoice::Gspo(Gspo { epsilon: share / 2.0, epsilon_high: real, by_token: flag }),
            LossChoice::Grpo(Grpo { dual_clip: flag.then_some(3.0), level: Level::Geometric, ..Grpo::default() }),
            LossChoice::KlCov(KlCov { coef: real, ..KlCov::default() }),
        ][choice]
            .clone();
        plan.train.advantage = match choice {
            0 => Advantage::default(),
            1 => Advantage::LeaveOneOut { normalize: flag, epsilon: 1e-4 },
            _ => Advantage::Constant { baseline: -real },
        };
        if choice > 0 {
            let reference = plan.reference.get_or_insert_default();
            reference.threads = few;
            reference.policy = if choice == 1 { ReferencePolicy::Ema { decay: share / 2.0 } } else { ReferencePolicy::default() };
            plan.train.kl_loss = flag.then(|| KlLoss { beta: real, ..KlLoss::default() });
            plan.train.kl_reward = Some(KlReward { target: flag.then_some(real), ..KlReward::default() });
        }
        plan.train.proximal = [None, Some(Proximal::Recompute), Some(Proximal::LogLinear)][choice];
        plan.train.correction = match choice {
            0 => ImportanceChoice::default(),
            1 => ImportanceChoice::TruncatedIs { level: Level::Token, min: flag.then_some(0.5), max: 2.0, normalize: flag },
            _ => ImportanceChoice::MaskedIs { level: Level::Geometric, min: share, max: 2.0, normalize: false },
        };
        plan.train.reject = vec![Rejection { min: None, ..Rejection::default() }; choice];
        plan.train.ppo_epochs = steps;
        plan.train.minibatches = few;
        if choice == 0 {
            let critic = plan.critic.get_or_insert_default();
            (critic.lr, critic.value_clip, critic.lambda, critic.whiten) = (real, f64::INFINITY, share, flag);
            (critic.path, critic.warmup_steps) = (flag.then(|| "a \"b\"".into()), seed % steps);
        }
        plan.train.gap_halt = Some(f64::INFINITY);
        plan.train.optimization.on_nonfinite = NonFinitePolicy::Skip;
        plan.train.optimization.betas = [0.0, share / 2.0];
        if choice == 2 && !flag {
            let dpo =
                Dpo { pair_loss: PairLoss::Robust, label_smoothing: share / 3.0, tail_weight: Some(share), ..Dpo::default() };
            plan.pairs.get_or_insert_default().select = Select::All;
            plan.train = Train { loss: LossChoice::Dpo(dpo), lr: real, ..Train::default() };
            plan.filter_fallback = Fallback::Error;
        }
        plan.observe.metrics = port.map(|port| ([127, 0, 0, 1], port).into());
        plan
    })
}

fn regex(pattern: &str) -> RewardRule {
    RewardRule::Regex { pattern: pattern.to_owned() }
}

fn regex_is_valid(pattern: &str) -> bool {
    let mut plan = Plan::default();
    plan.reward.rule = regex(pattern);
    plan.validate().is_ok()
}

proptest! {
    #[test]
    fn any_plan_resolves_to_itself(plan in any_plan()) {
        prop_assume!(plan.validate().is_ok());
        let resolved = plan.to_toml();
        let again = parse("resolved.toml", &resolved, &[]);
        prop_assert_eq!(again.map_err(|errors| format!("{errors}\n{resolved}")), Ok(plan));
    }
}
