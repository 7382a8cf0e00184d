//! Conversations through the whole command: shown token by token, imitated, and asked in reinforcement, by the template of the model's folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::running::{GRPO, SFT, TINY, json_lines, plain_run_args, read, rollflow};

/// A golden model with a template of our own.
fn model(folder: &Path) -> PathBuf {
    let (from, to) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models/qwen2_tied"), folder.join("model"));
    fs::create_dir(&to).unwrap();
    for file in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    let template = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}\
        {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";
    fs::write(to.join("chat_template.jinja"), template).unwrap();
    to
}

fn data(folder: &Path) -> PathBuf {
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    let line = |n: usize| {
        let turns = [
            turn("user", format!("What is {n} and 1?")),
            turn("assistant", format!("It is {}.", n + 1)),
            turn("user", "Sure?".to_owned()),
            turn("assistant", "Yes.".repeat(1 + n % 3)),
        ];
        json!({"messages": turns, "ask": [turns[0]], "answer": (n + 1).to_string()}).to_string() + "\n"
    };
    let file = folder.join("chats.jsonl");
    fs::write(&file, (0..12).map(line).collect::<String>()).unwrap();
    file
}

fn run(recipe: &str, out: &Path, sets: &[String]) -> crate::running::Ended {
    // Rows are counted, or tokens are.
    let tokens = sets.iter().any(|set| set.starts_with("sft.batch_tokens="));
    let means = |set: &&&str| match recipe == SFT {
        true => set.starts_with("sft.") && !(tokens && set.starts_with("sft.batch=")),
        false => !set.starts_with("model."),
    };
    let sizes = TINY.iter().filter(means).chain(&["sft.schedule.warmup=0"]).map(|set| set.to_string());
    rollflow(&plain_run_args(recipe, out, &sizes.chain(sets.iter().cloned()).collect::<Vec<_>>()))
}

#[test]
fn tokens_are_shown_with_those_that_are_trained() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (model(folder.path()), data(folder.path()));
    let (model, data) = (model.to_str().unwrap(), data.to_str().unwrap());
    let shown = rollflow(&["tokens", model, data, "--limit", "1"]).ok();
    assert!(shown.out.starts_with("sample 1: "), "{}", shown.out);
    let trained: Vec<String> =
        shown.out.split('«').skip(1).map(|rest| rest.split('»').next().unwrap().replace('│', "")).collect();
    assert_eq!(trained, ["It is 1.<|im_end|>", "Yes.<|im_end|>"], "{}", shown.out);
    assert!(!shown.out.contains('\x1b'), "no colours where nobody sees them");

    let shown = rollflow(&["tokens", model, data, "--limit", "2", "--apart", "--json"]);
    let samples: Vec<Value> = shown.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(samples.len(), 4, "two conversations of two answers");
    let column = |name: &str| samples[0][name].as_array().unwrap();
    assert_eq!(
        column("pieces").iter().map(|piece| piece.as_str().unwrap()).collect::<String>(),
        samples[0]["text"].as_str().unwrap()
    );
    assert!(column("tokens").len() == column("trained").len() && column("trained").contains(&true.into()));

    let shown = rollflow(&["tokens", model, "--text", "[{\"role\": \"user\", \"content\": \"é😀?\"}]", "--json"]);
    let text = "<|im_start|>user\né😀?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(serde_json::from_str::<Value>(&shown.out).unwrap()["text"], text, "{}", shown.err);
    let refused =
        rollflow(&["tokens", model, "--text", "[{\"role\": \"user\", \"content\": \"?\"}]", "--template", "none.jinja"]);
    assert!(refused.code == Some(1) && refused.err.contains("none.jinja"), "{}", refused.err);
}

/// Records are what `[sft]` and `[task]` would take them for, in whatever format and under whatever names.
#[test]
fn tokens_are_shown_of_records_of_every_shape() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let shown = |records: Value, more: &[&str]| {
        let data = folder.path().join("records.json");
        fs::write(&data, records.to_string()).unwrap();
        let ended = rollflow(&[&["tokens", model.to_str().unwrap(), data.to_str().unwrap()][..], more].concat());
        let trained = |sample: &str| sample.split('«').nth(1).map(|rest| rest.split('»').next().unwrap().replace('│', ""));
        let learned: Vec<_> = ended.out.split("sample ").skip(1).map(trained).collect();
        (learned, ended.err)
    };
    let said = |text: &str| Some(format!("{text}<|im_end|>"));
    let records = json!([
        {"question": "1+1?", "answer": 2},
        {"instruction": "add", "input": "1, 1", "output": "two"},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "zwei"}]},
        {"prompt": "unanswered"},
        {"other": 1},
    ]);
    let (learned, err) = shown(records.clone(), &["--limit", "9"]);
    assert!(err.contains("records: 4 records; skipped: 1 of no known shape"), "{err}");
    let ends = [Some("2".to_owned()), Some("two".to_owned()), said("zwei"), None];
    for (learned, end) in learned.iter().zip(&ends) {
        assert_eq!(learned.is_some(), end.is_some(), "{learned:?}");
        assert!(end.as_ref().is_none_or(|end| learned.as_ref().unwrap().starts_with(end)), "{learned:?} {end:?}");
    }
    assert_eq!(learned.len(), 4);
    assert_eq!(shown(records, &["--split", "train[2:3]"]).0, [said("zwei")]);
    let (learned, _) = shown(json!([{"q": "1+1?", "r": {"text": "II"}}]), &["--columns", "prompt=q,completion=r.text"]);
    assert!(learned.len() == 1 && learned[0].as_ref().is_some_and(|said| said.starts_with("II")), "{learned:?}");
    let (_, err) = shown(json!([{"q": "1+1?"}]), &[]);
    assert!(err.contains("Fields of the first: q"), "{err}");
    assert!(shown(json!([]), &["--columns", "ask=q"]).1.contains("expected prompt, completion"));
}

#[test]
fn conversations_are_imitated_in_rows_and_asked_by_the_folders_template() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data, out) = (model(folder.path()), data(folder.path()), folder.path().join("sft"));
    let shared = [
        format!("model={{kind=\"folder\",path={:?}}}", model.display().to_string()),
        format!("task={{kind=\"data\",data={:?},columns={{prompt=\"ask\"}}}}", data.display().to_string()),
        format!("sft.sources=[{{data={:?},columns={{messages=\"messages\"}}}}]", data.display().to_string()),
    ];
    let packed =
        ["sft.max_length=160", "sft.packing=best_fit", "sft.batch_tokens=400", "sft.on_overlong=drop"].map(str::to_owned);
    let ended = run(SFT, &out, &[&shared[..], &packed].concat());
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    for line in ["Packed 12 samples into", "Rows: ", "Batch tokens: 400"] {
        assert!(ended.out.contains(line), "{line}: {}", ended.out);
    }
    let saved = out.join("checkpoints/step_000002/chat_template.jinja");
    assert_eq!(read(&saved), read(&model.join("chat_template.jinja")));

    let out = folder.path().join("grpo");
    let ended = run(GRPO, &out, &[&shared[..], &["observe.rollouts_every=1".to_owned()]].concat());
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    let rollouts = read(&out.join("rollouts.jsonl"));
    let first: Value = serde_json::from_str(rollouts.lines().next().unwrap()).unwrap();
    let asked = first["prompt"][0]["content"].as_str().unwrap();
    let chat = json!([{"role": "user", "content": asked}]).to_string();
    let shown = rollflow(&["tokens", model.to_str().unwrap(), "--text", &chat, "--json"]);
    let prompt = serde_json::from_str::<Value>(&shown.out).unwrap()["tokens"].as_array().unwrap().clone();
    assert_eq!(first["tokens"].as_array().unwrap()[..prompt.len()], prompt[..], "what was generated from is what is shown");
}

#[test]
fn a_model_without_a_template_is_told_of_where_a_conversation_comes() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (model(folder.path()), data(folder.path()));
    fs::remove_file(model.join("chat_template.jinja")).unwrap();
    let sets = [
        format!("model={{kind=\"folder\",path={:?}}}", model.display().to_string()),
        format!("task={{kind=\"data\",data={:?},columns={{prompt=\"ask\"}}}}", data.display().to_string()),
        format!("sft.sources=[{{data={:?},columns={{messages=\"messages\"}}}}]", data.display().to_string()),
    ];
    let refused = run(SFT, &folder.path().join("none"), &sets);
    assert!(refused.code == Some(1) && refused.err.contains("the model has no chat template"), "{}", refused.err);
    run(SFT, &folder.path().join("plain"), &[&sets[..], &["chat.template=plain".to_owned()]].concat()).ok();
}

/// The same questions as plain text under `[chat] ask = "user"`, and as conversations, are the same runs: imitation, reinforcement with some of it
/// mixed in, and evaluation.
#[test]
fn text_that_is_asked_as_the_user_is_the_conversation_that_it_means() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let write = |name: &str, line: &dyn Fn(&str, &str) -> Value| {
        let file = folder.path().join(name).join("questions.jsonl");
        fs::create_dir(file.parent().unwrap()).unwrap();
        let lines = (0..12).map(|n| line(&format!("What is {n} and 1?"), &format!("{}", n + 1)).to_string() + "\n");
        fs::write(&file, lines.collect::<String>()).unwrap();
        file
    };
    let text = write("text", &|question, answer| json!({"question": question, "completion": answer, "answer": answer}));
    let chats = write("chats", &|question, answer| {
        let turns = [json!({"role": "system", "content": "Be brief."}), json!({"role": "user", "content": question})];
        json!({"prompt": turns, "completion": answer, "answer": answer})
    });
    let ran = |file: &Path, name: &str, chat: &str| {
        let sets = [
            format!("model={{kind=\"folder\",path={:?}}}", model.display().to_string()),
            format!("task={{kind=\"data\",data={:?}}}", file.display().to_string()),
            format!("chat={chat}"),
            "eval={every=2,samples=2,limit=4}".to_owned(),
            "observe.rollouts_every=1".to_owned(),
            "mix={every=2,batch=4}".to_owned(),
        ];
        let out = folder.path().join(name);
        let ended = run("pipelines/recipes/sft_then_grpo.toml", &out, &sets);
        assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
        ["sft/metrics.jsonl", "metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl"].map(|file| read(&out.join(file)))
    };
    let asked = ran(&text, "asked", "{ask=\"user\",system=\"Be brief.\"}");
    assert_eq!(asked, ran(&chats, "conversations", "{}"));
    assert_ne!(asked[0], ran(&text, "as_written", "{}")[0], "text is text where nothing else is said");
}

/// So is it asked by `generate`.
#[test]
fn a_run_is_evaluated_with_the_template_and_the_variables_that_it_was_trained_with() {
    let folder = tempfile::tempdir().unwrap();
    let (model, out, template) = (model(folder.path()), folder.path().join("run"), folder.path().join("mine.jinja"));
    let strict = "{%- if thinking is not defined %}{{- raise_exception('thinking is not set') }}{%- endif %}";
    fs::write(&template, strict.to_owned() + &read(&model.join("chat_template.jinja"))).unwrap();
    let sets = [
        format!("model={{kind=\"folder\",path={:?}}}", model.display().to_string()),
        format!("chat={{ask=\"user\",template={:?},variables={{thinking=false}}}}", template.display().to_string()),
        "eval={every=3,samples=0,limit=4}".to_owned(),
    ];
    let ended = run(GRPO, &out, &sets);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    // The checkpoint has it.
    fs::remove_file(&template).unwrap();
    let path = out.to_str().unwrap();
    let evaluated = rollflow(&["eval", path, "--json"]).ok();
    let report: Value = serde_json::from_str(&evaluated.out).unwrap();
    let answers = |file: &Path| {
        let rows = json_lines(file);
        assert!(rows.len() == 4 && rows.iter().all(|row| row["reward"].is_number()), "{rows:?}");
        let mut said: Vec<_> = rows.iter().map(|row| (row["question"].as_u64(), row["response"].to_string())).collect();
        said.sort();
        said
    };
    let during = answers(&out.join("evaluations/step_000003.jsonl"));
    assert_eq!(answers(Path::new(report["answers"].as_str().unwrap())), during);
    rollflow(&["generate", path, "1+1=", "--chat", "--max-tokens", "2"]).ok();
    let gone = rollflow(&["eval", path, "--set", "chat.template=gone.jinja"]);
    assert!(gone.code == Some(1) && gone.err.contains("gone.jinja"), "{}", gone.err);
}
