//! Data sets on disk: what is found, what it is taken for, what is left out, and how several become one stream.
//! Law C2: where a stream stands follows from a number, so that a run goes on where it was.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rollflow::data::source::{
    Columns, DataSet, DataSpec, Example, Hub, HubCache, Mixed, export_conversations, load_sft_dataset, load_sft_samples,
};
use rollflow::data::{DataError, Pair, Prompt, PromptText, Sample, Tokenizer};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder with these files.
pub fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

pub fn spec(path: &Path, split: &str) -> DataSpec {
    DataSpec {
        split: split.to_owned(),
        hub: Hub::at("http://127.0.0.1:9", HubCache::at("nowhere")).offline(true),
        ..DataSpec::new(path)
    }
}

pub fn prompts_of(spec: &DataSpec) -> Result<Vec<String>, DataError> {
    DataSet::<Prompt>::open(spec)?.iter().map(|prompt| Ok(prompt?.text.render())).collect()
}

pub fn prompts(path: &Path, split: &str) -> Vec<String> {
    prompts_of(&spec(path, split)).unwrap()
}

pub fn refusal(path: &Path, split: &str) -> String {
    prompts_of(&spec(path, split)).unwrap_err().to_string()
}

/// `{"prompt": "a"}` a line.
pub fn lines(prompts: &str) -> String {
    prompts.chars().map(|prompt| format!("{{\"prompt\": \"{prompt}\", \"answer\": 1}}\n")).collect()
}

/// The one record as prompt and as example.
fn read(record: Value) -> (Prompt, Example) {
    let folder = folder(&[("x.jsonl", &record.to_string())]);
    let spec = spec(&folder.path().join("x.jsonl"), "train");
    let prompt = DataSet::<Prompt>::open(&spec).unwrap().get(0).unwrap();
    (prompt, DataSet::<Example>::open(&spec).unwrap().get(0).unwrap())
}

fn pair(prompt: &str, completion: &str) -> Example {
    Example::Pair(Pair { prompt: prompt.into(), completion: completion.to_owned(), ..Pair::default() })
}

#[test]
fn one_shape_of_records_is_the_same_in_all_formats() {
    let folder = folder(&[
        ("lines.jsonl", "\u{feff}{\"prompt\":\"a\"}\r\n\n  \n{\"prompt\":\"b\"}"),
        ("lines.json", "{\"prompt\":\"a\"}\n{\"prompt\":\"b\"}\n"),
        ("list.json", "[\n {\"prompt\": \"a\"},\n {\"prompt\":\n \"b\"}\n]"),
        ("named.json", "{\"version\": 1, \"data\": [{\"prompt\": \"a\"}, {\"prompt\": \"b\"}], \"other\": [1]}"),
        ("text.txt", "a\r\n\nb\n"),
    ]);
    for file in ["lines.jsonl", "lines.json", "list.json", "named.json", "text.txt"] {
        assert_eq!(prompts(&folder.path().join(file), "train"), ["a", "b"], "{file}");
        assert_eq!(prompts(&folder.path().join(file), "train[1:]"), ["b"], "{file}");
    }
}

#[test]
fn a_folder_is_read_in_the_order_of_its_names_and_knows_splits_as_the_hub_does() {
    let folder = folder(&[
        ("README.md", "# about"),
        ("dataset_infos.json", "{}"),
        (".cache/old.jsonl", "{\"prompt\": \"never\"}"),
        ("data/train-00001-of-00002.jsonl", &lines("cd")),
        ("data/train-00000-of-00002.jsonl", &lines("ab")),
        ("data/dev-00000-of-00001.json", &lines("vw")),
        ("data/train_sft-00000-of-00001-a3ecf92756993583.jsonl", &lines("s")),
        ("data/train_gen-00000-of-00001-0b2d1f0e4c5a6978.jsonl", &lines("g")),
        ("test/part.txt", "t"),
    ]);
    let of = |split| prompts(folder.path(), split).concat();
    assert_eq!(
        (of("train"), of("validation"), of("train_sft"), of("test")),
        ("abcd".into(), "vw".into(), "s".into(), "t".into())
    );
    assert_eq!((of("train[1:3]"), of("train[:25%]"), of("train[-1:]")), ("bc".into(), "a".into(), "d".into()));
    assert!(refusal(folder.path(), "rest").contains("no split \"rest\"; it has: dev, test, train, train_gen, train_sft"));
}

#[test]
fn an_id_is_found_in_the_local_cache_and_not_fetched_offline() {
    let hub = folder(&[
        ("datasets--org--sums/refs/main", "abc\n"),
        ("datasets--org--sums/snapshots/abc/data/train-00000-of-00001.jsonl", &lines("new")),
        ("datasets--org--sums/snapshots/old/data/train-00000-of-00001.jsonl", &lines("old")),
        ("datasets--lone/snapshots/only/train.jsonl", &lines("one")),
    ]);
    let offline = Hub::at("http://127.0.0.1:9", HubCache::at(hub.path())).offline(true);
    let of = |id: &str| prompts_of(&DataSpec { hub: offline.clone(), ..DataSpec::new(id) });
    assert_eq!(of("org/sums").unwrap().concat(), "new");
    assert_eq!(of("org/sums@old").unwrap().concat(), "old");
    assert_eq!(of("lone").unwrap().concat(), "one");
    let missing = of("org/other").unwrap_err().to_string();
    for part in ["no data set `org/other`", "datasets--org--other", "hf download --repo-type dataset org/other"] {
        assert!(missing.contains(part), "{missing}");
    }
    assert!(of("./no/such.jsonl").unwrap_err().to_string().contains("relative to the folder"));
}

/// The first bad line is named, before anything is trained on.
#[test]
fn a_bad_line_names_file_and_line() {
    let cases = [
        ("a.jsonl", "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\"\n[1]\n", "a.jsonl:3: not JSON", "(and 1 more"),
        ("b.jsonl", "{\"prompt\": \"a\"}\n7", "b.jsonl:2: expected a JSON object", "found a number"),
        ("c.json", "[\n{\"prompt\": \"a\"},\n\n\"x\"]", "c.json:4: expected a JSON object", "found text"),
        ("d.json", "[{\"prompt\": }]", "d.json:1: not JSON", "column 13"),
        ("d2.json", "[{\"prompt\":\n}]", "d2.json:2: not JSON: expected value", "column 1"),
        ("d3.json", "[{\"prompt\": 1}\n{}]", "d3.json:2: not JSON: expected `,` or `]`", "column 1"),
        ("d4.json", "{\"data\":\n[{\"prompt\": \"a\"},", "d4.json:2: not JSON", "is all of it there?"),
        ("e.json", "{\"a\": 1, \"b\": 2}", "1 of no known shape", "Fields of the first: a, b"),
    ];
    for (name, text, start, detail) in cases {
        let folder = folder(&[(name, text)]);
        let error = refusal(&folder.path().join(name), "train");
        assert!(error.contains(start) && error.contains(detail), "{error}");
    }
}

#[test]
fn long_lines_and_many_lines_are_found_whatever_is_read_at_once() {
    let long = "x".repeat(9 << 20);
    let text: String = (0..70_000).map(|n| format!("{{\"prompt\": \"{n}\"}}\n")).collect();
    let folder = folder(&[("x.jsonl", &format!("{text}{{\"prompt\": \"{long}\"}}\n{{\"prompt\": \"last\"}}"))]);
    let data = DataSet::<Prompt>::open(&spec(folder.path(), "train")).unwrap();
    assert_eq!(data.len(), 70_002);
    let of = |at: usize| data.get(at).unwrap().text.render();
    assert_eq!((of(0), of(69_999), of(70_000).len(), of(70_001)), ("0".into(), "69999".into(), 9 << 20, "last".into()));
}

/// Of a table of Hugging Face's `datasets` (`scripts/golden_parquet.py`): three groups of rows, nested columns, both usual compressions.
#[cfg(feature = "parquet")]
#[test]
fn parquet_files_are_read_as_their_writer_meant() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/data");
    for compression in ["snappy", "zstd"] {
        let spec = spec(&golden.join(format!("{compression}.parquet")), "train");
        let data = DataSet::<Prompt>::open(&spec).unwrap();
        assert_eq!((data.len(), data.skips().to_string()), (4, "1 of no known shape".to_owned()));
        let prompts: Vec<Prompt> = data.iter().map(Result::unwrap).collect();
        let PromptText::Chat(turns) = &prompts[0].text else { panic!("{prompts:?}") };
        assert_eq!((turns[0].role.as_str(), turns[0].content.as_str(), prompts[0].answer()), ("user", "1+1?", Some("zwei: é漢")));
        assert_eq!(prompts[0].metadata["level"], json!(1));
        assert_eq!(prompts[0].metadata["scores"], json!([0.5, 1.0]));
        assert_eq!(prompts[3].metadata["level"], json!(5), "the fourth was left out");
    }
}

/// R037.
#[test]
fn shapes_are_recognised_for_prompts_and_for_examples() {
    let answer = |prompt: &Prompt| prompt.answer().map(str::to_owned);
    for (record, asked, learned, truth) in [
        (json!({"prompt": "q", "completion": "c"}), "q", "c", "c"),
        (json!({"question": "q", "answer": "a", "level": 3}), "q", "a", "a"),
        (json!({"instruction": "do", "input": "this", "output": "o"}), "do\n\nthis", "o", "o"),
        (json!({"instruction": "do", "input": "", "output": "o"}), "do", "o", "o"),
        (json!({"problem": "p", "solution": "s so 4", "answer": 4}), "p", "s so 4", "4"),
        (json!({"prompt": "q", "response": "r", "reward_model": {"ground_truth": "g"}}), "q", "r", "g"),
    ] {
        let (prompt, example) = read(record.clone());
        assert_eq!((prompt.text.render().as_str(), answer(&prompt).as_deref()), (asked, Some(truth)), "{record}");
        assert_eq!(example, pair(asked, learned), "{record}");
    }
    let (prompt, _) = read(json!({"question": "q", "answer": "a", "level": 3, "tags": ["x"]}));
    assert_eq!(json!(prompt.metadata), json!({"level": 3, "tags": ["x"], "answer": "a"}), "R005, R045");
    let (prompt, example) = read(json!({"text": "so it is"}));
    assert_eq!((prompt.text, example), ("so it is".into(), Example::Text("so it is".into())), "R049");
}

#[test]
fn conversations_are_read_in_both_spellings() {
    let plain = json!({"tools": [{"name": "t"}], "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": "a"}]});
    let share = json!({"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]});
    for (record, has_tools) in [(plain, true), (share, false)] {
        let (prompt, example) = read(record);
        let PromptText::Chat(asked) = &prompt.text else { panic!("{prompt:?}") };
        let said: Vec<_> = asked.iter().map(|turn| (turn.role.as_str(), turn.content.as_str())).collect();
        assert_eq!((said, prompt.answer()), (vec![("system", "s"), ("user", "q")], Some("a")));
        let Example::Chat { turns, tools, first: 0 } = example else { panic!("{example:?}") };
        assert_eq!((turns.len(), turns[2].role.as_str(), !tools.is_empty()), (3, "assistant", has_tools));
        assert_eq!(prompt.metadata.contains_key("tools"), has_tools);
    }
    let (user, assistant) = (json!({"role": "user", "content": "q"}), json!({"role": "assistant", "content": "a"}));
    // The completion may be the whole conversation.
    for completion in [json!([assistant]), json!([user, assistant])] {
        let (prompt, example) = read(json!({"prompt": [user], "completion": completion}));
        let Example::Chat { turns, first: 1, .. } = &example else { panic!("{example:?}") };
        assert_eq!((turns.len(), turns[1].content.as_str(), prompt.answer()), (2, "a", Some("a")));
    }
}

#[test]
fn columns_are_named_where_they_are_not_recognised() {
    let file = folder(&[
        ("empty.jsonl", ""),
        ("x.jsonl", "{\"q\": \"1+1\", \"meta\": {\"truth\": 2}, \"r\": \"two\"}\n{\"q\": \"2+2\", \"r\": \"four\"}\n"),
    ]);
    let columns = |answer: Option<&str>| Columns {
        prompt: Some("q".into()),
        completion: Some("r".into()),
        answer: answer.map(str::to_owned),
        ..Columns::default()
    };
    let open = |columns| DataSet::<Prompt>::open(&DataSpec { columns, ..spec(file.path(), "train") });
    let prompt = open(columns(Some("meta.truth"))).unwrap();
    assert_eq!(prompt.skips().iter().collect::<Vec<_>>(), [("without `meta.truth`", 1)]);
    assert_eq!((prompt.get(0).unwrap().text, prompt.get(0).unwrap().metadata["answer"].clone()), ("1+1".into(), json!("2")));
    assert_eq!(open(columns(None)).unwrap().get(1).unwrap().answer(), Some("four"));
    let error = open(Columns::default()).unwrap_err().to_string();
    for part in ["all records were skipped: 2 of no known shape", "Fields of the first: q, meta, r", "columns = {"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_is_skipped_is_counted_by_reason_and_the_rest_is_used() {
    let records = [
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
        json!({"messages": []}),
        json!({"messages": "q"}),
        json!({"messages": [{"role": "narrator", "content": "q"}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}),
        json!({"prompt": " "}),
        json!({"prompt": "q"}),
        json!({"text": ""}),
        json!({"other": 1}),
    ];
    let text: String = records.iter().map(|record| format!("{record}\n")).collect();
    let file = folder(&[("x.jsonl", &text)]);
    let data = DataSet::<Example>::open(&spec(file.path(), "train")).unwrap();
    let reasons: BTreeMap<&str, u64> = data.skips().iter().collect();
    assert_eq!((data.len(), data.skips().total(), reasons.len()), (1, 8, 8), "{reasons:?}");
    assert_eq!(reasons["with a turn of an unknown role"], 1);
    assert!(data.describe().contains("1 with a turn of an unknown role (as \"narrator\")"), "{}", data.describe());
    assert_eq!(DataSet::<Prompt>::open(&spec(file.path(), "train")).unwrap().len(), 2, "a question needs no answer");
}

#[test]
fn max_samples_counts_usable_records_and_reads_no_further() {
    let file = folder(&[("x.jsonl", &format!("{{\"x\": 1}}\n{}no\n", lines("abc")))]);
    let wanted = |max_samples| prompts_of(&DataSpec { max_samples: Some(max_samples), ..spec(file.path(), "train") });
    assert_eq!(wanted(2).unwrap(), ["a", "b"]);
    assert_eq!(wanted(3).unwrap(), ["a", "b", "c"]);
    assert!(wanted(4).unwrap_err().to_string().contains("x.jsonl:5: "));
}

#[test]
fn a_file_that_changes_under_a_run_is_an_error() {
    let file = folder(&[("x.jsonl", &lines("ab"))]);
    let data = DataSet::<Prompt>::open(&spec(file.path(), "train")).unwrap();
    fs::write(file.path().join("x.jsonl"), "no").unwrap();
    assert!(data.get(1).is_err());
}

fn tokenizer() -> Tokenizer {
    Tokenizer::characters("0123456789+=abcdefghijklmnopqrstuvwxyz: \n", 64).unwrap()
}

/// R036, R038, R041, R049.
#[test]
fn examples_become_samples_with_what_is_learned_marked_and_long_ones_counted() {
    let file = folder(&[(
        "x.jsonl",
        "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n{\"text\": \"abc\"}\n{\"question\": \"7+7=\", \"answer\": \"fourteen\"}\n",
    )]);
    let tokenizer = tokenizer();
    let samples = load_sft_samples(file.path().join("x.jsonl"), &tokenizer).unwrap();
    let learned = |sample: &Sample| {
        let tokens = sample.tokens.iter().zip(&sample.loss_mask).filter(|(_, mask)| **mask > 0.0);
        tokenizer.decode_all(&tokens.map(|(token, _)| *token).collect::<Vec<_>>()).unwrap()
    };
    let said: Vec<String> = samples.iter().map(learned).collect();
    assert_eq!(said, ["2<eos>", "abc<eos>", "fourteen<eos>"]);
    let (short, skips) = load_sft_dataset(&spec(file.path(), "train"), &tokenizer, Some(6)).unwrap();
    assert_eq!((short.len(), skips.to_string()), (2, "1 longer than 6 tokens".to_owned()));

    let exported = tempfile::tempdir().unwrap();
    export_conversations(&exported.path().join("train.jsonl"), &samples).unwrap();
    let again = load_sft_samples(exported.path(), &tokenizer).unwrap();
    assert_eq!(again.iter().map(learned).collect::<Vec<_>>(), said);
}

/// R047.
#[test]
fn batches_of_prompts_are_always_full_and_the_same_for_the_same_iteration() {
    let file = folder(&[("prompts.txt", "a\nb\nc\n")]);
    let open = || Mixed::<Prompt>::open(&[spec(&file.path().join("prompts.txt"), "train")], 7, true).unwrap();
    let texts = |batch: Vec<Prompt>| batch.iter().map(|prompt| prompt.text.render()).collect::<Vec<_>>();
    let mut data = open();
    let all: Vec<_> = (0..5).map(|iteration| texts(data.get_batch(5, iteration).unwrap())).collect();
    assert!(all.iter().all(|batch| batch.len() == 5));
    for iteration in [3, 0, 4, 2, 1] {
        assert_eq!(texts(open().get_batch(5, iteration).unwrap()), all[iteration as usize]);
    }
}

#[test]
fn a_stream_goes_on_after_its_state_and_refuses_other_data() {
    let files = folder(&[("a.jsonl", &lines("abcdefg")), ("b.jsonl", &lines("xyz"))]);
    let open = |weight: f64, seed| {
        let sets = [("a.jsonl", 1.0), ("b.jsonl", weight)];
        let sets = sets.map(|(file, weight)| DataSpec { weight: Some(weight), ..spec(&files.path().join(file), "train") });
        Mixed::<Prompt>::open(&sets, seed, true).unwrap()
    };
    let mut data = open(3.0, 5);
    let prompts: Vec<Prompt> = (0..40).map(|number| data.prompt(number).unwrap()).collect();
    assert!(prompts.iter().enumerate().all(|(at, prompt)| prompt.ordinal == at as u64));
    let of_b = prompts.iter().filter(|prompt| prompt.source == "b").count();
    assert!((29..=31).contains(&of_b), "{of_b} of 40");
    let mut again = open(3.0, 99);
    let next = again.resume(&data.state(17)).unwrap();
    assert_eq!((next, again.prompt(17).unwrap()), (17, prompts[17].clone()), "with the seed of the state");
    let refused = open(2.0, 5).resume(&data.state(17)).unwrap_err().to_string();
    assert!(refused.contains("another data set"), "{refused}");
    fs::write(files.path().join("b.jsonl"), lines("xyw")).unwrap();
    assert!(open(3.0, 5).resume(&data.state(17)).is_err());
}

/// Files of so many lines, each its own number, to be mixed by their repeats or weights.
fn numbered(sets: &[(usize, u64, Option<f64>)]) -> (TempDir, Vec<DataSpec>) {
    let folder = tempfile::tempdir().unwrap();
    let spec = |(set, (size, repeat, weight)): (usize, &(usize, u64, Option<f64>))| {
        let path = folder.path().join(format!("{set}.txt"));
        fs::write(&path, (0..*size).map(|record| format!("{record}\n")).collect::<String>()).unwrap();
        DataSpec { repeat: *repeat, weight: *weight, ..spec(&path, "train") }
    };
    let specs = sets.iter().enumerate().map(spec).collect();
    (folder, specs)
}

/// The set, the record and the pass of a number.
fn place(data: &mut Mixed<Prompt>, number: u64) -> (usize, usize, u64) {
    let prompt = data.prompt(number).unwrap();
    (prompt.source.parse().unwrap(), prompt.text.render().parse().unwrap(), prompt.epoch)
}

#[test]
fn shares_that_make_no_sense_are_refused() {
    for (sets, problem) in [
        (vec![], "nothing to mix"),
        (vec![(3, 1, Some(1.0)), (3, 1, None)], "all of them one, or none"),
        (vec![(3, 1, Some(0.0))], "above 0"),
        (vec![(3, 0, None)], "0 times"),
        (vec![(3, u64::MAX, None)], "can be counted"),
    ] {
        let error = Mixed::<Prompt>::open(&numbered(&sets).1, 0, true).unwrap_err().to_string();
        assert!(error.contains(problem), "{problem}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Every record so often as it is repeated, in every epoch, whatever the seed.
    #[test]
    fn an_epoch_of_repeats_holds_every_record_so_often(
        sets in prop::collection::vec((1_usize..30, 1_u64..4, Just(None)), 1..5), seed in any::<u64>(), shuffled in any::<bool>()
    ) {
        let (_folder, specs) = numbered(&sets);
        let mut data = Mixed::<Prompt>::open(&specs, seed, shuffled).unwrap();
        let len = data.len() as u64;
        for epoch in 0..3 {
            let mut counts = BTreeMap::new();
            for number in epoch * len..(epoch + 1) * len {
                let (set, record, of) = place(&mut data, number);
                prop_assert_eq!(of, epoch);
                *counts.entry((set, record)).or_insert(0_u64) += 1;
            }
            let each = |(set, (size, repeat, _)): (usize, &(usize, u64, _))| {
                let repeat = *repeat;
                (0..*size).map(move |record| ((set, record), repeat))
            };
            prop_assert_eq!(counts, sets.iter().enumerate().flat_map(each).collect::<BTreeMap<_, _>>());
        }
    }

    /// Law C2: any slicing, from anywhere, is the same stream, and so is one that is shuffled after it was opened.
    #[test]
    fn a_number_has_its_place_whatever_was_drawn_before(
        sizes in prop::collection::vec(1_usize..20, 1..4), weighted in any::<bool>(), seed in any::<u64>(),
        jumps in prop::collection::vec(0_u64..2500, 1..20)
    ) {
        let share = |at: usize| if weighted { (1, Some(1.0 + at as f64)) } else { (1 + at as u64, None) };
        let sets: Vec<_> = sizes.iter().enumerate().map(|(at, size)| (*size, share(at).0, share(at).1)).collect();
        let (_folder, specs) = numbered(&sets);
        let mut straight = Mixed::<Prompt>::open(&specs, seed, true).unwrap();
        let mut jumping = Mixed::<Prompt>::open(&specs, seed, false).unwrap().shuffled();
        prop_assert_eq!(jumping.state(0), straight.state(0));
        let all: Vec<_> = (0..2500).map(|number| straight.prompt(number).unwrap()).collect();
        for number in jumps {
            prop_assert_eq!(&jumping.prompt(number).unwrap(), &all[number as usize]);
        }
    }

    /// Shares hold everywhere, not only in the long run, and each set's epochs are whole.
    #[test]
    fn weights_are_kept_at_every_point_and_each_set_goes_through_whole_epochs(
        sets in prop::collection::vec((1_usize..40, 0.05_f64..10.0), 1..6), seed in any::<u64>()
    ) {
        let (_folder, specs) = numbered(&sets.iter().map(|(size, weight)| (*size, 1, Some(*weight))).collect::<Vec<_>>());
        let mut data = Mixed::<Prompt>::open(&specs, seed, true).unwrap();
        let sum: f64 = sets.iter().map(|(_, weight)| weight).sum();
        let mut counts = vec![0_u64; sets.len()];
        let mut seen = vec![Vec::new(); sets.len()];
        for number in 0..2500_u64 {
            let (set, record, epoch) = place(&mut data, number);
            counts[set] += 1;
            prop_assert_eq!(epoch, seen[set].len() as u64 / sets[set].0 as u64);
            seen[set].push(record);
            for (count, (_, weight)) in counts.iter().zip(&sets) {
                let fair = (number + 1) as f64 * weight / sum;
                // Two for the even steps, and what rounding to 1024ths can add up to.
                let slack = 3.0 + (number + 1) as f64 * 2.0 * sets.len() as f64 / 1024.0;
                prop_assert!((*count as f64 - fair).abs() <= slack, "{count} for {fair} of {number}");
            }
        }
        for (records, (size, _)) in seen.iter().zip(&sets) {
            for epoch in records.chunks_exact(*size) {
                let mut epoch = epoch.to_vec();
                epoch.sort_unstable();
                prop_assert_eq!(epoch, (0..*size).collect::<Vec<_>>());
            }
        }
    }

    /// Streamed from the disk: every usable row once an epoch, whatever lies between them and in however many files.
    #[test]
    fn a_streamed_epoch_holds_every_row_once(files in prop::collection::vec(prop::collection::vec(0_u8..4, 0..30), 1..4), seed in any::<u64>()) {
        let folder = tempfile::tempdir().unwrap();
        let mut expected = Vec::new();
        for (file, rows) in files.iter().enumerate() {
            let mut text = String::new();
            for (row, kind) in rows.iter().enumerate() {
                match kind {
                    0 => text += "\n",
                    1 => text += "{\"nothing\": 1}\r\n",
                    _ => {
                        expected.push(format!("{file}-{row}"));
                        text += &format!("{{\"prompt\": \"{file}-{row}\"}}\n");
                    }
                }
            }
            fs::write(folder.path().join(format!("{file}.jsonl")), text).unwrap();
        }
        expected.sort();
        let opened = Mixed::<Prompt>::open(&[spec(folder.path(), "train")], seed, true);
        if expected.is_empty() {
            prop_assert!(opened.is_err());
        } else {
            let mut data = opened.unwrap();
            for epoch in 0..2 {
                let len = expected.len() as u64;
                let mut drawn: Vec<String> = (0..len).map(|at| data.prompt(epoch * len + at).unwrap().text.render()).collect();
                drawn.sort();
                prop_assert_eq!(&drawn, &expected);
            }
        }
    }
}
