//! Recipes that are wrong: everything is named at once, with line and column and what to do.

use proptest::prelude::*;
use rollflow::recipe::{RecipeErrors, check_text, load, parse};

fn errors(text: &str, sets: &[&str]) -> RecipeErrors {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    parse("run.toml", text, &sets).expect_err("the recipe is wrong")
}

/// A sound beginning, so that a test shows only what it is about.
const SOUND: &str = "pipeline = \"grpo\"\nmodel = { kind = \"tiny\" }\ntask = { kind = \"arithmetic\" }\n";

fn also(text: &str) -> String {
    errors(&format!("{SOUND}{text}"), &[]).to_string()
}

/// Each case is rejected with an error that contains its text.
fn each_says(cases: &[(&str, &str)]) {
    for (case, text) in cases {
        let all = also(case);
        assert!(all.contains(text), "{case}: {all}");
    }
}

#[test]
fn all_problems_come_at_once_in_the_order_of_the_file() {
    let text = r#"
pipeline = "gpro"
sede = 1
micro_batch_tokens = 1

[model]
kind = "tiny"
hiden = 128
heads = 3

[task]
kind = "arithmetics"
digits = 1

[generate]
group_size = "eight"
max_new_tokens = 0
temprature = 1.0
top_p = 1.5

[reward]
kind = "regex"
pattern = "(unclosed"

[[filter]]
kind = "nonzero_std"

[[filter]]
kind = "min_reward"
treshold = 0.5

[[filter]]
threshold = 1

[train]
learning_rate = 1e-4
lr = -1
aggregation = "mean"
betas = [0.9]
schedule = { kind = "cosine", warmup = 1000 }

[flow]
window = 8

[observe]
metrics = "localhost"
"#;
    insta::assert_snapshot!(errors(text, &[]));
}

#[test]
fn syntax_errors_come_all_at_once() {
    insta::assert_snapshot!(errors("pipeline = \nseed = 01\n[model\nname = \"a\"\nname = \"b\"", &[]));
}

#[test]
fn an_empty_recipe_says_what_must_be_there() {
    insta::assert_snapshot!(errors("", &[]));
}

#[test]
fn overrides_are_named_as_they_were_typed() {
    let sets = ["train.lr=fast", "train.lrr=1", "generate.group_size=1", "nonsense", "pipeline.x=1", "stop=[", "=1"];
    let refused = errors(SOUND, &sets).to_string();
    let read = errors(SOUND, &sets[..3]).to_string();
    insta::assert_snapshot!(format!("{refused}\n\n{read}"));
}

#[test]
fn an_unreadable_key_is_not_reported_twice() {
    let errors = errors(&format!("{SOUND}[batch]\ngroups = 'many'\n[flow]\nwindow = 1"), &[]);
    assert_eq!(errors.iter().map(|error| error.key.as_str()).collect::<Vec<_>>(), ["batch.groups"]);
}

#[test]
fn keys_that_contradict_each_other_are_errors() {
    let cases = [
        "generate.group_size = 1\n[[filter]]\nkind = 'nonzero_std'",
        "generate.temperature = 0",
        "filter = [{ kind = 'length', min = 9, max = 3 }, { kind = 'length', min = 500 }]",
        "flow.window = 31",
        "flow = { window = 65 }",
        "batch.oversampling_factor = 0.5",
        "batch.oversampling_factor = 2.1",
        "batch.oversampling_factor = 1.5\nflow = { max_staleness = 0, window = 49 }",
        "batch.oversampling_factor = 1.5\nflow.window = 40",
        "generate.max_num_seqs = 0\nflow.max_staleness = 0",
        "sft = { steps = 5, schedule = { warmup = 6 } }",
        "train.proximal = 'behaviour'\ntrain.correction = { kind = 'truncated_is', min = 3, max = 2 }\ntrain.gap_warn = 4\ntrain.gap_halt = 3",
        "[[train.reject]]\ndivergence = 'k1'\nover = 'max'\nmin = 3\nmax = 2\n[[train.reject]]\nmin = 0.5\n[[train.reject]]\ndivergence = 'k1'",
        "train.correction = { level = 'token' }",
        "train.correction = { kind = 'ice_pop' }\ntrain.gap_halt = 0",
        "train = { top_entropy = 0.5, off_policy_threshold = 1, loss = { kind = 'geo_mean' } }",
        "train.loss = { kind = 'clip_cov', min = 2, max = 1, share = 0 }",
        "train.loss = { kind = 'gpg', epsilon = 0.2 }",
        "train.advantage = { kind = 'constant', std = 'group' }",
        "generate.group_size = 1\ntrain.advantage = { kind = 'constant', baseline = 0 }\n[[filter]]\nkind = 'nonzero_std'",
    ];
    insta::assert_snapshot!(cases.map(also).join("\n\n"));
}

#[test]
fn vespo_takes_importance_weights_by_token_alone() {
    let weights = |of: &str| format!("train = {{ loss = {{ kind = 'vespo' }}, correction = {{ {of} }} }}");
    let cases = ["kind = 'truncated_is', level = 'sequence'", "kind = 'masked_is', level = 'geometric'"].map(weights);
    each_says(&cases.each_ref().map(|case| (case.as_str(), "multiplies the weights of a completion's tokens itself")));
    assert!(parse("run.toml", &format!("{SOUND}{}", weights("kind = 'icepop'")), &[]).is_ok());
}

#[test]
fn what_leaves_nothing_to_learn_or_has_no_effect_is_an_error() {
    let correction = |of: &str| format!("train.correction = {{ {of} }}");
    let k1 = |of: &str| format!("[[train.reject]]\ndivergence = 'k1'\n{of}");
    let single = |of: &str| format!("generate.group_size = 1\nbatch.groups = 1\ntrain.advantage = {{ kind = '{of}' }}");
    let taught = |of: &str| format!("reference = {{ kind = 'frozen' }}\nteacher = {{ kind = 'frozen' }}\n{of}");
    let custom =
        "reference = { kind = 'frozen' }\ntrain = { kl_loss = { beta = 0.1 }, loss = { kind = 'custom', name = 'mine' } }";
    let cases = [
        (correction("kind = 'masked_is', min = 1.5"), "`train.correction.min` is 1.5, above 1, the ratio of a token on policy"),
        (correction("kind = 'masked_is', max = 0.9"), "`train.correction.max` is 0.9, below 1, the ratio of a token on policy"),
        (correction("kind = 'icepop', alpha = 1.5"), "`train.correction.alpha` is 1.5, above 1"),
        (correction("kind = 'icepop', beta = 0.9"), "`train.correction.beta` is 0.9, below 1"),
        (
            "filter_fallback = 'keep'\ntrain.mask_truncated = true".to_owned(),
            "`train.mask_truncated` leaves nothing to learn of groups of truncated completions",
        ),
        (k1("over = 'token'\nmin = 1.5\nmax = 2"), "`train.reject[0].min` is 1.5, above 1, the ratio of a token on policy"),
        (k1("over = 'sum'\nmin = 0.5\nmax = 0.9"), "`train.reject[0].max` is 0.9, below 1, the ratio of a token on policy"),
        (k1("over = 'sum'\nmax = 1.0"), "all but equal log-probabilities would be rejected"),
        (single("normalized"), "a single answer is the mean of its batch"),
        (single("reinforce_plus_plus"), "a single answer is the mean of its batch"),
        (taught("train.advantage = { kind = 'rank' }"), "`train.advantage`: the advantages of rewards are not trained on"),
        (taught("train.kl_reward = { beta = 0.1 }"), "`train.kl_reward`: the advantages of rewards are not trained on"),
        (custom.to_owned(), "`train.kl_loss` is set, but `train.loss.kind` is \"custom\""),
    ];
    each_says(&cases.each_ref().map(|(case, text)| (case.as_str(), *text)));
    let sound = [
        correction("kind = 'masked_is', min = 1.0, max = 1.0"),
        correction("kind = 'truncated_is', max = 0.9"),
        k1("min = 0.5\nmax = 1.0"),
        single("normalized").replace("batch.groups = 1", "batch.groups = 2"),
        single("normalized").replace("group_size = 1", "group_size = 2"),
        taught("train.kl_reward = { beta = 0.1 }\ntrain.advantage = { kind = 'rank' }")
            .replace("}\ntrain.kl", ", rewards = true }\ntrain.kl"),
    ];
    for case in sound {
        assert!(parse("run.toml", &format!("{SOUND}{case}"), &[]).is_ok(), "{case}");
    }
    // A registered loss may read the reference.
    let plan = parse("run.toml", &format!("{SOUND}{}", custom.replace("kl_loss = { beta = 0.1 }, ", "")), &[]).expect("sound");
    assert!(!check_text(&plan).contains("nothing uses it"));
}

#[test]
fn engines_that_can_not_be_or_can_not_do_what_is_asked_are_errors() {
    let cases = [
        ("engine.urls = ['http://127.0.0.1:8000']", "names servers, but `engine.kind` is \"local\""),
        ("engine.kind = 'vllm'", "there is no server"),
        ("engine = { launch = 'vllm', pause = 'recompute' }", "which vllm has no way of"),
        ("generate = { cache_tokens = 4096, on_new_weights = 'finish' }", "continue under the newest weights"),
        ("generate = { cache_tokens = 8, max_new_tokens = 8 }", "but a prompt and its answer may have more than 8"),
        ("engine = { launch = 'sglang', pause = 'finish' }", "which sglang has no way of"),
        ("engine = { kind = 'openai', urls = ['http://127.0.0.1:8000'] }", "can't be given weights"),
        ("engine = { kind = 'vllm', urls = ['ftp://example.com'] }", "write it as http://host:port"),
        ("engine = { kind = 'vllm', launch = 'sglang' }", "`engine.launch` is \"sglang\", but `engine.kind` is \"vllm\""),
        ("engine = { launch = 'vllm', cache = 'flush' }", "still use what would be forgotten"),
        ("engine = { launch = 'vllm', port = 65535, replicas = 3 }", "more than there are ports"),
        ("engine = { kind = 'vllm', urls = ['http://a:1', 'vllm+http://a:1/'] }", "a server that is there before"),
        ("engine = { launch = 'vllm', port = 8000, urls = ['http://127.0.0.1:8000'] }", "a server that the run starts"),
        ("engine.launch = 'sglang'\ngenerate.top_p = 0.9", "`generate.top_p` is set, but \"sglang\" servers"),
        ("engine = { launch = 'vllm', env = ['HOME'] }", "write it as NAME=value"),
        ("engine = { launch = 'vllm' }\nflow = { max_staleness = 0, window = 33 }", "groups would lag"),
        ("engine = { launch = 'vllm', devices = [0, 1] }", "names 2 GPUs for 1 of `engine.replicas`"),
        ("engine = { launch = 'vllm', replicas = 2, devices = [1, 1] }", "names GPU 1 twice"),
        ("engine = { launch = 'vllm', devices = [1], env = ['CUDA_VISIBLE_DEVICES=0'] }", "leave one of them out"),
        ("engine = { kind = 'vllm', urls = ['http://127.0.0.1:8000'], gpu_memory = 0.5 }", "the run starts no server"),
        ("engine = { launch = 'vllm', gpu_memory = 1.0 }", "above 0, below 1"),
        ("engine = { launch = 'vllm', pause = 'abort' }\nlora = { sync = 'adapter' }", "no server is paused"),
        ("engine = { launch = 'vllm', cache = 'keep' }\nlora = { sync = 'adapter' }", "each adapter has a cache of its own"),
        ("engine = { launch = 'vllm', carry = 'stream' }", "which vllm has no way of"),
        ("engine = { launch = 'sglang', carry = 'ipc' }", "which sglang has no way of"),
        ("engine = { launch = 'vllm', carry = 'ipc' }", "the trainer is on a processor"),
        ("engine = { launch = 'sglang', carry = 'broadcast' }\nlora = { sync = 'adapter' }", "travel in folders"),
        (
            "engine = { launch = 'sglang', carry = 'broadcast' }\nlora = {}\ntrainer = { backend = 'tinker', url = 'http://127.0.0.1:1' }",
            "that a Tinker server trains travel in folders",
        ),
        ("engine = { launch = 'sglang', carry = 'broadcast' }\nstore = { url = 'file:///store' }", "brings weights to servers"),
        ("engine = { launch = 'vllm' }\nlora = { base = 'nf4' }", "the servers' may be another"),
        ("lora = { base = 'nf4', sync = 'merged' }", "merged adapters are whole weights again"),
    ];
    each_says(&cases);
}

#[test]
fn what_a_tinker_server_decides_or_has_not_is_an_error_by_its_key() {
    let cases = [
        ("generate.threads = 2", "`generate.threads` has no effect: the server of [trainer] generates"),
        ("generate = { prefix_cache = 2, draft_tokens = 2 }", "`generate.draft_tokens` has no effect"),
        ("generate.devices = ['cuda:1']", "`generate.devices` has no effect"),
        ("generate.on_new_weights = 'abort'", "`generate.on_new_weights` has no effect"),
        ("eval.threads = 2", "`eval.threads` has no effect: servers answer"),
        ("eval.temperature = 0.5", "set it to 1, and leave eval.top_p out"),
        ("train.threads = 2", "`train.threads`: the server decides how it computes"),
        ("train.micro_batch_tokens = 64", "`train.micro_batch_tokens`: the server decides how it computes"),
        ("train.probe = false", "`train.probe`: generator and trainer are not compared"),
    ];
    let trainer = "lora = {}\ntrainer = { backend = 'tinker', url = 'http://127.0.0.1:1' }\n";
    let cases = cases.map(|(case, text)| (format!("{trainer}{case}"), text));
    each_says(&cases.each_ref().map(|(case, text)| (case.as_str(), *text)));
    let format = "checkpoint.dtype = 'bf16'\nlora = {}\n";
    each_says(&[(format, "`checkpoint.dtype` has no effect: adapters are saved in f32")]);
    let reward = "reward.kind = 'exact'\n";
    assert!(parse("run.toml", &format!("{SOUND}{reward}{format}critic = {{}}"), &[]).is_ok());
}

#[test]
fn servers_on_a_gpu_by_which_the_trainers_weights_can_not_reach_them_are_errors() {
    let cases = [
        ("launch = 'vllm', carry = 'ipc', replicas = 2", "cuda", "on the trainer's GPU, which has room for one"),
        ("launch = 'vllm', carry = 'ipc', devices = [1]", "cuda", "maps memory of the trainer's GPU, cuda:0"),
        ("launch = 'sglang', carry = 'broadcast', devices = [1]", "cuda:1", "NCCL joins no two processes on one"),
    ];
    for (engine, device, text) in cases {
        let all = errors(&format!("{SOUND}engine = {{ {engine} }}\n"), &[&format!("model.device={device}")]).to_string();
        assert!(all.contains(text), "{engine}: {all}");
    }
}

#[test]
fn a_learning_rate_of_a_part_that_is_not_trained_is_an_error_that_names_it() {
    let cases = [
        ("train.lr_scale = { adapters = 2 }", "there is no [lora]"),
        ("train.lr_scale = { score_head = 2 }", "a language model has no score head"),
        ("train.lr_scale = { embeddings = 2 }\nlora = {}", "adapters alone are trained"),
        ("critic.lr_scale = { head = 2 }", "use score_head"),
        ("train.lr_scale = { embeddings = -1 }", "0 or more"),
        ("train.decay = 'norms'", "matrices"),
    ];
    each_says(&cases);
}

#[test]
fn a_critic_beside_what_it_replaces_or_that_leaves_the_policy_no_step_is_an_error() {
    let cases = [
        "critic = { lr = 1e-3 }\ntrain.advantage = { kind = 'leave_one_out' }\ngenerate.group_size = 1",
        "train.steps = 10\ncritic = { warmup_steps = 10, schedule = { warmup = 11 } }",
        "critic = { value_clip = 0, gamma = 1.5, lambda = -1, advantage = 'gae' }",
        "generate.group_size = 1\n[critic]\n[[filter]]\nkind = 'nonzero_std'",
        "batch.groups = 4\ntrain.minibatches = 5",
        "train.kl_reward = { beta = 0.1 }\n[critic]",
    ];
    insta::assert_snapshot!(cases.map(also).join("\n\n"));
}

#[test]
fn parts_of_a_reward_that_make_no_sense_are_errors() {
    let cases = [
        "reward = { kind = 'parts' }",
        "[reward]\nkind = 'parts'\n[[reward.part]]\nkind = 'maths'\n[[reward.part]]\nname = 'a b'\nkind = 'exact'\nweigth = 2",
        "[reward]\nkind = 'parts'\n[[reward.part]]\nname = 'a'\nkind = 'exact'\n[[reward.part]]\nname = 'a'\nkind = 'overlong'\nbuffer = 999",
        "[reward]\nkind = 'parts'\ncombine = 'min'\n[[reward.part]]\nname = 'a'\nkind = 'length'\nmin = 9\nmax = 3\nweight = 2",
        "[reward]\nkind = 'parts'\n[[reward.part]]\nname = 'a'\nkind = 'format'\ntags = ['<a>']\n[[reward.part]]\nname = 'b'\nkind = 'keywords'",
        "[reward]\nkind = 'parts'\ncombine = 'lexicographic'\nlevels = 100000000\npart = [{ name = 'a', kind = 'math' }, { name = 'b', kind = 'math' }, { name = 'c', kind = 'math' }]",
        "reward = { kind = 'math', part = [] }",
    ];
    insta::assert_snapshot!(cases.map(also).join("\n\n"));
}

#[test]
fn services_and_parts_of_ones_own_that_make_no_sense_are_errors() {
    let cases = [
        "[reward]\nkind = 'http'\nurl = 'ftp://judge/score'\ntimeout = 0\nconcurrency = 0\nretry = 3",
        "reward = { kind = 'http' }",
        "reward = { kind = 'parts', combine = 'custom', part = [{ name = 'a', kind = 'custom', params = 3 }] }",
        "reward = { kind = 'parts', aggregator = 'mine', part = [{ name = 'a', kind = 'math' }] }",
        "train = { entropy_coef = 0.1, top_entropy = 0.5, loss = { kind = 'custom', name = 'mine' } }",
        "train.loss = { kind = 'custom', name = 'mine', epsilon = 0.1 }",
    ];
    insta::assert_snapshot!(cases.map(also).join("\n\n"));
}

#[test]
fn sections_that_mean_nothing_to_the_pipeline_are_errors() {
    let text = "pipeline = 'sft'\n[model]\nkind = 'tiny'\nhidden = 30\nkv_heads = 3\n[task]\nkind = 'arithmetic'\ndigits = 6\n[train]\nlr = 1";
    insta::assert_snapshot!(errors(text, &[]));
}

#[test]
fn a_task_of_data_needs_some_and_has_no_share_of_its_own_pairs() {
    let text = "pipeline = 'grpo'\n[model]\nkind = 'folder'\n[task]\nkind = 'data'\nmax_samples = 0\n[sft]\nfraction = 0.5\n\
                [eval.task]\nkind = 'data'\nsplit = 'test'";
    insta::assert_snapshot!(errors(text, &[]));
}

#[test]
fn whole_numbers_too_large_and_dates_are_refused_not_wrapped() {
    let text = "seed = 99999999999999999999\n[generate]\ntop_k = -1\nslots = 2.0\nstop = 'x'\n[checkpoint]\nkeep = 1979-05-27\nevery = inf";
    insta::assert_snapshot!(also(text));
}

#[test]
fn files_that_do_not_exist_are_named_where_they_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("run.toml");
    std::fs::write(
        &file,
        "pipeline = 'sft'\n[model]\nkind = 'folder'\npath = 'no/such/model'\n[task]\nkind = 'data'\ndata = 'no.jsonl'\n[sft]\n",
    )
    .expect("written");
    let errors = load(&file, &["sft.data=nowhere.jsonl".to_owned()]).expect_err("nothing is there").to_string();
    insta::assert_snapshot!(errors.replace(&folder.path().display().to_string(), ""));
    let missing = load("no/such.toml".as_ref(), &[]).expect_err("it is not there").to_string();
    assert!(missing.starts_with("no/such.toml:1:1: cannot read the recipe:"), "{missing}");
}

#[test]
fn columns_count_characters() {
    let errors = errors("name = \"é\" # ü\n'ключ' = 1", &[]);
    let places: Vec<String> = errors.iter().map(|error| error.place.to_string()).collect();
    assert!(places.contains(&"run.toml:2:1".to_owned()), "{places:?}");
    let inline =
        parse("run.toml", &format!("{SOUND}generate = {{ stop = ['éé'], top_p = 2 }}"), &[]).expect_err("top_p is wrong");
    assert_eq!(inline.iter().next().map(|error| error.place.to_string()), Some("run.toml:4:37".to_owned()));
}

proptest! {
    /// Whatever is typed, the answer is a plan or a list of problems, never a panic.
    #[test]
    fn a_damaged_recipe_never_panics(
        cut in 0_usize..900, take in 0_usize..20, insert in "[\\PC\n]{0,6}", set in "[a-z.]{0,9}=?\\PC{0,5}", huge in any::<bool>(),
    ) {
        let shipped = include_str!("../../pipelines/recipes/grpo.toml");
        let mut text: Vec<char> = shipped.chars().collect();
        let start = cut.min(text.len());
        let end = (start + take).min(text.len());
        text.splice(start..end, insert.chars());
        let text: String = text.into_iter().collect();
        let text = if huge { text.replace("= 1", "= 9223372036854775807") } else { text };
        for sets in [vec![], vec![set]] {
            if let Ok(plan) = parse("run.toml", &text, &sets) {
                prop_assert!(!check_text(&plan).is_empty());
            }
        }
    }
}

#[test]
fn what_is_held_to_a_reference_needs_one() {
    for key in ["kl_loss", "kl_reward"] {
        let found = also(&format!("[train.{key}]\ncoef = 0.1\n"));
        assert!(found.contains(&format!("`train.{key}`")) && found.contains("[reference]"), "{found}");
    }
    let found = also("[train.kl_loss]\nbeta = 0\nestimator = \"k4\"\n[reference]\nkind = \"ema\"\ndecay = 1\n");
    assert!(
        ["train.kl_loss.beta", "train.kl_loss.estimator", "reference.decay"].iter().all(|key| found.contains(key)),
        "{found}"
    );
}

#[test]
fn pairs_and_a_loss_of_pairs_go_together() {
    let found = also("[train.loss]\nkind = \"dpo\"\n");
    assert!(found.contains("no section [pairs]") && found.contains("no section [reference]"), "{found}");
    let found = also("[pairs]\nselect = \"all\"\n");
    assert!(found.contains("does not learn from pairs"), "{found}");
    let sound = "[pairs]\nselect = \"all\"\n[reference]\nkind = \"frozen\"\n[train.loss]\nkind = \"dpo\"\n";
    assert!(parse("run.toml", &format!("{SOUND}{sound}"), &[]).is_ok());
    assert!(also(&format!("{sound}pair_loss = \"exo_pair\"\n")).contains("`exo_pair` takes the logarithm"));
    let sets = [
        "train.kl_loss.beta=0.1",
        "train.entropy_coef=0.1",
        "train.loss_aggregation=token_sum",
        "generate.mask_older_versions=true",
    ];
    let found = errors(&format!("{SOUND}{sound}"), &sets).to_string();
    assert!(
        ["kl_loss", "entropy_coef", "loss_aggregation", "mask_older_versions"].iter().all(|key| found.contains(key)),
        "{found}"
    );
    assert!(errors(&format!("{SOUND}{sound}"), &["critic.lr=1e-3"]).to_string().contains("`critic` is set"));
    let free = sound.replace("[reference]\nkind = \"frozen\"\n", "") + "reference_free = true\n";
    assert!(parse("run.toml", &format!("{SOUND}{free}"), &[]).is_ok());
}

#[test]
fn rows_and_conversations_that_lack_what_they_need_are_errors() {
    let conversing = "[chat]\ndate = \"31 January\"\n";
    let packed = "[sft]\npacking = \"wrapped\"\non_overlong = \"drop\"\n";
    insta::assert_snapshot!([conversing, packed].map(also).join("\n"));
}

#[test]
fn an_environment_and_what_would_make_no_sense_with_it_are_errors() {
    let found = also(
        "[environment]\nkind = \"calculator\"\nmax_tokens = 200\n[generate]\nmax_new_tokens = 200\non_new_weights = \"finish\"\n[eval]\nmax_new_tokens = 250\n",
    );
    for part in
        ["`generate.max_new_tokens`: none would begin", "`eval.max_new_tokens`: none", "`generate.on_new_weights` is \"finish\""]
    {
        assert!(found.contains(part), "{part} is missing:\n{found}");
    }
    let found = also("[reward]\nkind = \"environment\"\n");
    assert!(found.contains("there is no section [environment]"), "{found}");
    assert!(also("[environment]\nkind = \"search\"\n").contains("corpus"));
    for kind in ["kind = 'agent'\nurl = 'http://a:1'", "kind = 'verifiers'\nname = 'x'"] {
        let found = also(&format!("[environment]\n{kind}\nmax_tool_calls = 2\n"));
        assert!(found.contains("`environment.max_tool_calls` has no effect: the agent calls its tools itself"), "{found}");
    }
    let hinted = "[environment]\nkind = \"calculator\"\n[teacher]\nkind = \"frozen\"\nhint = \"{answer} {prompt}\"\n";
    assert!(also(hinted).contains("`teacher.hint`: the hint replaces the policy's prompt"));
}

#[test]
fn a_setting_that_nothing_reads_is_an_error_that_names_it() {
    let keys = |pipeline: &str, sets: &[&str]| -> Vec<String> {
        let task = if pipeline == "grpo_offline" { "kind = 'rollouts', path = 'a.jsonl'" } else { "kind = 'arithmetic'" };
        let text = format!("pipeline = '{pipeline}'\nmodel.kind = 'tiny'\ntask = {{ {task} }}\n");
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let errors = parse("r.toml", &text, &sets).err();
        errors.iter().flat_map(RecipeErrors::iter).map(|error| error.key.clone()).collect()
    };
    let servers = "engine={kind=\"vllm\",urls=[\"http://127.0.0.1:1\"]}";
    let several = "engine={kind=\"vllm\",urls=[\"http://127.0.0.1:1\"],replicas=2}";
    let [mix, mixed] = ["mix={}", "sft={data=\"b.jsonl\",turns=\"apart\"}"];
    for (pipeline, sets, unread) in [
        ("grpo", &[servers][..], &[][..]),
        ("grpo", &[servers, "generate.on_new_weights=abort"], &["generate.on_new_weights"]),
        ("grpo", &[servers, "generate.threads=2"], &["generate.threads"]),
        ("grpo", &[several], &["engine.replicas"]),
        ("grpo", &["generate.on_new_weights=abort", "generate.threads=2"], &[]),
        ("grpo", &["engine.pause=abort"], &["engine.pause"]),
        ("grpo_offline", &["batch.oversampling_factor=1.5"], &["batch.oversampling_factor"]),
        ("grpo_offline", &["generate.workers=2"], &["generate.workers"]),
        ("grpo_offline", &["batch.groups=3"], &[]),
        ("grpo_offline", &[mix, mixed], &[]),
        ("grpo_offline", &[mix, mixed, "sft.steps=3", "sft.lr=1e-4"], &["sft.lr", "sft.steps"]),
    ] {
        assert_eq!(keys(pipeline, sets), unread, "{sets:?}");
    }
}

#[test]
fn secrets_are_found_in_every_kind_of_value_and_shown_nowhere() {
    const KEY: &str = "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH";
    let text = format!(
        "[engine]\nurls = ['http://127.0.0.1:1', 'http://me:hunter2@host:80']\nenv = ['OMP_NUM_THREADS=2', 'HF_TOKEN=hunter2']\n\
         flags = ['--dtype', 'float32', '--api-key', 'hunter2']\n[reward]\nurl = 'http://host/score?a=1&api_key=hunter2'\n\
         [environment]\ncommand = ['agent', '--token=hunter2', '{KEY}']\nurl = 'http://host/hunter2a1b2c3d4e5f6a7b8/x'\n\
         [chat]\nvariables = {{ api_key = 'hunter2', bos_token = '<s>', deep = {{ token = 'hunter2' }} }}"
    );
    let errors = errors(&text, &[]);
    let secrets: Vec<_> = errors.iter().filter(|error| error.help.contains("token_env")).collect();
    let mut found: Vec<&str> = secrets.iter().map(|error| error.key.as_str()).collect();
    found.sort_unstable();
    let expected = "chat.variables.api_key chat.variables.deep.token engine.env[1] engine.flags[2] engine.urls[1] \
                    environment.command[1] environment.command[2] environment.url reward.url";
    assert_eq!(found, expected.split(' ').collect::<Vec<_>>());
    assert!(secrets.iter().map(ToString::to_string).all(|error| !error.contains("hunter2") && !error.contains(KEY)));
}
