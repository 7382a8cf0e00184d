//! Values that follow from a recipe: losses, phases, ramps, warnings, presets, pages of keys and pinned models.

use std::fs;
use std::path::Path;

use rollflow::algo::KlForm;
use rollflow::hub::Cache;
use rollflow::recipe::{
    Machine, ModelSource, PRESETS, Plan, Preset, RecipeErrors, TaskData, Timeline, Train, explain, load, pages, parse,
};

fn plan(rest: &str) -> Result<Plan, RecipeErrors> {
    let base = "pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\ntrain.steps = 300\ntrain.lr = 1e-3\n";
    parse("recipe.toml", &format!("{base}{rest}"), &[])
}

fn train(rest: &str) -> Train {
    plan(rest).unwrap_or_else(|errors| panic!("{rest}: {errors}")).train
}

#[test]
fn every_kind_of_policy_loss_has_defaults_that_go_together() {
    for kind in "grpo dapo gspo cispo sapo gpg dro dppo vespo geo_mean clip_cov kl_cov".split(' ') {
        let train = train(&format!("train.entropy_coef = 0.01\ntrain.loss.kind = '{kind}'"));
        let name = train.library_loss().unwrap().unwrap().name().to_owned();
        assert_eq!((name.as_str(), train.policy_loss().entropy_coef), (if kind == "dapo" { "grpo" } else { kind }, 0.01));
    }
}

#[test]
fn every_loss_of_pairs_has_settings_that_go_together() {
    let kinds = "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft \
                 sigmoid_norm";
    for kind in kinds.split(' ') {
        let loss = format!("train.loss = {{ kind = 'dpo', pair_loss = '{kind}', label_smoothing = 0.1 }}");
        let reference = if kind == "sft" { "" } else { "reference.kind = 'frozen'" };
        let loss = train(&format!("{loss}\npairs.select = 'all'\n{reference}")).library_loss().unwrap().unwrap();
        assert_eq!((loss.name(), loss.whole_batch()), ("dpo", ["aot", "aot_unpaired", "sft"].contains(&kind)));
    }
}

#[test]
fn a_kl_penalty_weighs_as_the_recipe_says_and_its_loss_reads_every_token() {
    let penalty = "beta = 0.2, estimator = 'k2', unbiased = false, truncate = 3";
    let held = train(&format!("reference.kind = 'ema'\ntrain.kl_loss = {{ {penalty} }}"));
    let of = held.policy_loss().kl_loss.unwrap();
    assert_eq!((of.beta, of.unbiased, of.truncate, of.estimator), (0.2, false, Some(3.0), KlForm::K2));
    let ignores = |train: &Train| train.library_loss().unwrap().unwrap().ignores_zero_advantage();
    assert!(!ignores(&held) && ignores(&train("")));
}

#[test]
fn a_change_holds_from_its_step_on_and_the_next_adds_to_it() {
    let changes = "[[change]]\nat = 201\nset = ['train.lr=2e-4']\n\
                   [[change]]\nat = 101\nset = [\"train.loss={ kind = 'dapo' }\", 'train.entropy_coef=0.01']";
    let timeline = Timeline::of(&plan(changes).unwrap()).unwrap();
    let kind = |step| format!("{:?}", timeline.at(step).unwrap().train.loss).split('(').next().unwrap().to_owned();
    assert_eq!([1, 100, 101, 300].map(kind), ["Grpo", "Grpo", "Dapo", "Dapo"]);
    let rates = [100, 200, 201].map(|step| timeline.at(step).unwrap().train.lr);
    assert_eq!(rates, [1e-3, 1e-3, 2e-4], "the order in the recipe does not matter");
    assert_eq!((timeline.begins(201), timeline.begins(202)), (vec!["train.lr=2e-4".to_owned()], Vec::new()));
    assert_eq!(timeline.settings(150)["setting_changes"], 1.0);
}

#[test]
fn a_ramp_rests_at_both_ends() {
    for (shape, middle) in [("linear", 0.505), ("cosine", 0.505), ("geometric", 0.1)] {
        let ramp = "[[ramp]]\nkey = 'generate.temperature'\nfrom = 1.0\nto = 0.01\nbegin = 11\nend = 31";
        let timeline = Timeline::of(&plan(&format!("{ramp}\nshape = '{shape}'")).unwrap()).unwrap();
        let at = |step| timeline.settings(step)["setting_generate_temperature"];
        assert_eq!([1, 11, 31, 99].map(at), [1.0, 1.0, 0.01, 0.01], "{shape}");
        assert!((at(21) - middle).abs() < 1e-12 && timeline.at(21).unwrap().generate.temperature == at(21), "{shape}");
        assert!(!timeline.is_constant());
    }
    assert!(Timeline::of(&plan("").unwrap()).unwrap().is_constant());
}

#[test]
fn phases_and_ramps_that_cannot_be_are_refused_with_their_place() {
    for (text, parts) in [
        ("[[change]]\nat = 9\nset = ['batch.groups=8']", ["recipe.toml:8:7", "`batch.groups` is the same in all steps"]),
        ("[[change]]\nat = 9\nset = ['train.lr=-1']", ["recipe.toml:6:1", "in a later step `train.lr` is -1"]),
        ("[[change]]\nat = 9\nset = ['train.loss.klip=1']", ["unknown key `klip`", "known keys here"]),
        ("[[ramp]]\nkey = 'train.lr'\nfrom = 1.0\nto = 0.0\nend = 50", ["recipe.toml:9:6", "in a later step `train.lr` is 0"]),
        (
            "ramp = [{ key = 'train.lr', from = 1e-3, to = 1e-4, end = 9 }, { key = 'train.lr', from = 1e-4, to = 1e-5, end = 20 }]",
            ["recipe.toml:6:", "`ramp[1].key` is \"train.lr\", as that of ramp 0 is"],
        ),
        (
            "ramp = [{ key = 'train.lr', from = 1e-3, to = 1e-4, end = 9 }]\n[[change]]\nat = 20\nset = ['train.lr=1e-5']",
            ["recipe.toml:9:7", "`train.lr` has its value of every step by [[ramp]]"],
        ),
        ("[[ramp]]\nkey = 'train.lr'\nto = 2.0\nbegin = 60\nend = 50", ["recipe.toml:10:7", "not after its begin 60"]),
    ] {
        let found = plan(text).unwrap_err().to_string();
        assert!(parts.iter().all(|part| found.contains(part)), "{text}: {found}");
    }
}

/// Also in a table. Other keys of the table may change.
#[test]
fn a_key_that_has_a_ramp_takes_no_change_during_the_run() {
    let ramp = "train.loss.kind = 'grpo'\nramp = [{ key = 'train.loss.epsilon', from = 0.2, to = 0.3, end = 9 }]";
    let timeline = Timeline::of(&plan(ramp).unwrap()).unwrap();
    let order = |set: &str| timeline.amend(vec![set.to_owned()], 0, |_| Ok::<(), RecipeErrors>(()));
    for set in ["train.loss.epsilon=0.1", "train.loss={ kind = 'grpo', epsilon = 0.1 }"] {
        assert!(order(set).unwrap_err().to_string().contains("`train.loss.epsilon` has its value of every step"), "{set}");
    }
    assert_eq!(order("train.loss={ kind = 'grpo', epsilon_high = 0.4 }").unwrap(), 2);
    assert!(timeline.is_ramped("train.loss.epsilon") && !timeline.is_ramped("train.loss.epsilon_high"));
}

fn warnings(gpus: usize, sets: &[&str]) -> Vec<String> {
    let recipe = "pipeline = 'grpo'\nmodel.path = 'models/mine'\ntask.data = 'x.jsonl'\nreward.kind = 'math'\n";
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    parse("recipe.toml", recipe, &sets).unwrap().warnings(Machine { threads: 8, gpus, multiplies_bf16: false })
}

#[test]
fn a_gpu_that_nothing_computes_on_and_values_far_from_practice_are_warned_about() {
    for (gpus, sets, part) in [
        (2, &[][..], "2 GPUs; set model.device = \"cuda\""),
        (0, &["train.lr=2e-4"], "train.lr is 0.0002, far from what is common: full fine-tuning"),
        (0, &["train.loss.kind=grpo", "train.loss.epsilon=0.9"], "train.loss.epsilon is 0.9"),
        (0, &["generate.temperature=2"], "generate.temperature is 2.0"),
        (0, &["generate.group_size=2"], "mostly noise"),
        (0, &["train.ppo_epochs=50"], "most ratios are clipped"),
        (0, &["flow.max_staleness=99"], "1 to 8 versions"),
    ] {
        let warned = warnings(gpus, sets);
        assert!(warned.iter().any(|warning| warning.contains(part)), "{sets:?}: {warned:?}");
    }
    let random = ["model={kind='tiny'}", "train.lr=2e-3", "sft={steps=1}"];
    for (gpus, sets) in [(0, &[][..]), (2, &["model.device=cuda"]), (0, &["lora.rank=8", "train.lr=2e-4"]), (0, &random)] {
        assert_eq!(warnings(gpus, sets), Vec::<String>::new(), "{sets:?}: adapters and random models take more");
    }
    let elsewhere = ["lora.rank=8", "trainer={backend=\"tinker\", url=\"http://a:1\"}", "generate.max_new_tokens=9000"];
    assert_eq!(warnings(2, &elsewhere), Vec::<String>::new(), "a server computes");
    let offline = "pipeline = 'grpo_offline'\nmodel.path = 'models/mine'\ntask = { kind = 'rollouts', path = 'x.jsonl' }\n\
                   sft.data = 'y.jsonl'\nmix = {}\n";
    let plan = parse("recipe.toml", offline, &[]).unwrap();
    let machine = Machine { threads: 8, gpus: 0, multiplies_bf16: false };
    assert_eq!(plan.warnings(machine), Vec::<String>::new(), "[mix] has no rate");
}

/// Shortened runs are common, so it is no error. Epochs are not known in steps.
#[test]
fn a_change_and_a_ramp_after_the_last_step_are_warned_about() {
    let late = ["change=[{at=500,set=[\"train.lr=1e-7\"]}]", "ramp=[{key=\"train.entropy_coef\",begin=501,end=600}]"];
    let with = |steps: &str| warnings(0, &[steps, late[0], late[1]]);
    let said = ["`change[0].at` is 500, after the run's 2 steps", "`ramp[0].begin` is 501, after the run's 2 steps"];
    assert_eq!(with("train.steps=2"), said);
    assert_eq!([with("train.steps=501"), with("train.epochs=1")], [Vec::<String>::new(), Vec::new()]);
}

#[test]
fn the_temperature_of_recorded_rollouts_is_the_same_in_all_steps() {
    let offline = "pipeline = 'grpo_offline'\nmodel.kind = 'tiny'\ntask = { kind = 'rollouts', path = 'x.jsonl' }\n";
    let change = "change=[{at=2,set=[\"generate.temperature=0.5\"]}]";
    for set in [change, "ramp=[{key=\"generate.temperature\",from=1.0,to=0.5,end=9}]"] {
        let found = parse("recipe.toml", offline, &[set.to_owned()]).unwrap_err().to_string();
        assert!(found.contains("`generate.temperature` is the same in all steps"), "{found}");
        assert!(!found.contains("generate.temperature,"), "the help leaves it out: {found}");
    }
}

/// Of the same section, kinds and lengths are those of the recipe that is laid over the others.
#[test]
fn an_including_recipe_displaces_another_kind_and_another_length() {
    let folder = tempfile::tempdir().unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/models/qwen2_tied");
    let (tiny, other) = ("[model]\nkind = 'tiny'\nhidden = 64\n", format!("[model]\npath = '{golden}'\n"));
    let base = "pipeline = 'grpo'\ntask.kind = 'arithmetic'\nreward.kind = 'exact'\ngenerate.max_new_tokens = 4\n";
    let file = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    let plan = |path: &Path| load(path, &[]).unwrap_or_else(|errors| panic!("{errors}"));
    for (under, over) in [(tiny, other.as_str()), (other.as_str(), tiny)] {
        file("base.toml", &format!("{base}{under}"));
        let found = plan(&file("mine.toml", &format!("include = 'base.toml'\n{over}"))).model.source;
        assert_eq!(matches!(found, ModelSource::Tiny(_)), over == tiny, "{found:?}");
    }
    file("steps.toml", &format!("{base}{tiny}[train]\nsteps = 5\n"));
    file("epochs.toml", "include = 'steps.toml'\n[train]\nepochs = 2\n");
    let found = plan(&file("mine.toml", "include = 'epochs.toml'\nname = 'mine'\n")).train.epochs;
    assert_eq!(found, Some(2.0));
    let found = plan(&file("again.toml", "include = 'epochs.toml'\n[train]\nsteps = 7\n")).train;
    assert_eq!((found.steps, found.epochs), (7, None));
}

/// A run whose model was found on the hub may find it elsewhere.
#[test]
fn a_path_that_is_set_displaces_preset_and_revision() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display();
    let name = |model: &str, set: &str| {
        let text = format!("pipeline = 'grpo'\ntask.kind = 'arithmetic'\nreward.kind = 'exact'\nmodel = {{ {model} }}");
        let set = Some(set.to_owned()).filter(|set| !set.is_empty());
        let plan = parse("recipe.toml", &text, set.as_slice()).unwrap_or_else(|errors| panic!("{errors}"));
        let ModelSource::Folder(model) = &plan.model.source else { panic!("{:?}", plan.model) };
        model.name().display().to_string()
    };
    let (set, variable) = (format!("model.path={here}"), format!("ROLLFLOW__MODEL__PATH={here}"));
    for model in ["path = 'org/thing', revision = 'abc'", "preset = 'qwen2.5-0.5b', revision = 'abc'"] {
        assert!(name(model, "").ends_with("@abc"));
        assert_eq!([&set, &variable].map(|set| name(model, set)), [here.to_string(), here.to_string()], "{model}");
    }
    assert_eq!(name("path = 'org/thing', revision = 'abc'", "model.path=org/other"), "org/other");
}

/// Figures are those of model cards and safetensors files.
#[test]
fn presets_have_as_many_parameters_as_the_published_models_and_names_of_their_own() {
    for (name, parameters) in [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("mistral-7b", 7_248_023_552),
    ] {
        assert_eq!(Preset::named(name).unwrap().parameters(), parameters, "{name}");
    }
    for of in [|preset: &Preset| preset.name, |preset: &Preset| preset.id] {
        let mut all: Vec<&str> = PRESETS.iter().map(of).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), PRESETS.len());
    }
}

#[test]
fn the_keys_that_most_recipes_set_are_keys() {
    let mut seen = 0;
    for (name, page) in pages() {
        let first = page.lines().find_map(|line| line.strip_prefix("Most recipes set ")?.strip_suffix('.'));
        for key in first.iter().flat_map(|first| first.split(", ")) {
            assert!(page.lines().any(|line| line.starts_with(&format!("| {key} "))), "{name}: {key}");
            seen += 1;
        }
    }
    assert!(seen > 50, "{seen} keys");
}

#[test]
fn a_key_has_a_page_with_its_type_default_pipelines_and_relatives() {
    let page = explain("train.lr").unwrap();
    for part in ["Peak learning rate", "a number, above 0", "0.0003", "grpo_offline, dpo\n", "sft.lr", "train.ppo_epochs"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains("pipelines  grpo, sft,"), "{page}");
    let renamed = explain("train.updates").unwrap();
    assert!(renamed.starts_with("train.ppo_epochs\n") && renamed.contains("formerly   updates"), "{renamed}");
    assert!(explain("filter").unwrap().contains("filter[].threshold"));
    assert!(explain("seed").unwrap().contains("a whole number"));
    let unknown = "`train.lrr` is not a key of recipes; the nearest are train.lr, critic.lr, sft.lr";
    assert_eq!(explain("train.lrr").unwrap_err(), unknown);
    assert!(explain("train.warmup").unwrap_err().contains("train.schedule.warmup"));
    let far = explain("train.zzzzzz").unwrap_err();
    assert!(far.starts_with("`train.zzzzzz` is not a key of recipes") && !far.contains("nearest"), "{far}");
}

#[test]
fn the_error_of_a_key_of_trl_or_verl_names_the_key_of_that_meaning() {
    for (key, value, meaning) in [
        ("train.beta", "0.1", "`beta` of TRL is `train.kl_loss.beta` or `train.loss.beta`"),
        ("train.learning_rate", "1e-6", "`learning_rate` of TRL is `train.lr`"),
        ("train.loss_type", "'dapo'", "`loss_type` of TRL is `train.loss.kind` or `train.loss_aggregation`"),
        ("generate.num_generations", "8", "`num_generations` of TRL is `generate.group_size`"),
        ("generate.max_response_length", "8", "`max_response_length` of verl is `generate.max_new_tokens`"),
    ] {
        let refused = plan(&format!("{key} = {value}")).unwrap_err().to_string();
        assert!(refused.contains(&format!("help: {meaning}\n")), "{refused}");
        assert_eq!(explain(key).unwrap_err(), format!("`{key}` is not a key of recipes; {meaning}"));
    }
}

#[test]
fn models_and_data_named_by_id_are_pinned_and_folders_are_left_alone() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let root = tempfile::tempdir().unwrap();
    for (kind, files) in [("models", &["config.json", "tokenizer.json", "model.safetensors"][..]), ("datasets", &["train.jsonl"])]
    {
        let home = root.path().join(format!("{kind}--org--thing"));
        let folder = home.join("snapshots").join(COMMIT);
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(home.join("refs")).unwrap();
        fs::write(home.join("refs/main"), COMMIT).unwrap();
        files.iter().for_each(|file| fs::write(folder.join(file), "{}").unwrap());
    }
    let text = "pipeline = 'grpo'\n[model]\nkind = 'folder'\npath = 'org/thing'\n[task]\nkind = 'data'\n\
                sources = [{ data = 'org/thing' }, { data = 'src' }, { data = 'org/other' }]\n\
                [reward]\nkind = 'parts'\npart = [{ name = 'right', kind = 'math' }, { name = 'liked', kind = 'model', path = 'org/thing' }]\n[generate]\nmax_new_tokens = 4";
    let pinned = parse("run.toml", text, &[]).unwrap().pinned(&Cache::at(root.path()));
    let thing = format!("org/thing@{COMMIT}");
    let ModelSource::Folder(model) = &pinned.model.source else { panic!("{:?}", pinned.model) };
    assert_eq!((model.path.to_str(), model.revision.as_deref()), (Some("org/thing"), Some(COMMIT)));
    assert_eq!(model.name(), Path::new(&thing));
    let TaskData::Data(task) = &pinned.task.data else { panic!("{:?}", pinned.task) };
    let named: Vec<&str> = task.sources.iter().map(|source| source.data.to_str().unwrap()).collect();
    assert_eq!(named, [thing.as_str(), "src", "org/other"]);
    assert_eq!(pinned.models(), [("reward.part[1].path".to_owned(), thing.into())]);
    let written = pinned.to_toml();
    assert!(written.contains(&format!("revision = \"{COMMIT}\"")), "{written}");
    // A pinned plan is the same when it is pinned again, and can be read.
    assert_eq!(pinned.pinned(&Cache::at(root.path())), pinned);
    assert_eq!(parse("recipe.toml", &written, &[]).unwrap(), pinned);
}
