//! Records as prompts, examples, pairs and recorded rollouts, and the reasons to skip them.

use rollflow::data::chat::ChatTemplate;
use rollflow::data::source::{Columns, DataSet, Example, Recorded, Shape, prepare_pair};
use rollflow::data::{ChatMessage, Pair, Prompt, PromptText, RankedPair, Tokenizer};
use serde_json::{Value, json};

use crate::data_sources::{folder, spec};

fn read<T: Shape>(record: &Value) -> Result<T, String> {
    T::read(record.as_object().unwrap().clone(), &Columns::default())
}

#[test]
fn tools_are_read_as_a_list_and_as_text_in_every_shape_and_reach_the_template() {
    let (tools, [user, assistant]) =
        (vec![json!({"name": "add"})], ["user", "assistant"].map(|role| json!({"role": role, "content": "c"})));
    for written in [Value::from(tools.clone()), Value::from(tools.clone()).to_string().into()] {
        for record in [
            json!({"prompt": "q", "completion": "c", "tools": written}),
            json!({"prompt": [user], "completion": [assistant], "tools": written}),
            json!({"messages": [user, assistant], "tools": written}),
        ] {
            assert_eq!(read::<Prompt>(&record).unwrap().tools(), tools, "{record}");
            let found = match read(&record).unwrap() {
                Example::Pair(pair) => pair.tools,
                Example::Chat { tools, .. } => tools,
                Example::Text(text) => panic!("{text}"),
            };
            assert_eq!(found, tools, "{record}");
        }
        let ranked = json!({"prompt": "q", "chosen": "a", "rejected": "b", "tools": written});
        assert_eq!(read::<RankedPair>(&ranked).unwrap().tools, tools);
    }
    let skipped = read::<Prompt>(&json!({"prompt": "q", "tools": "[{"})).unwrap_err();
    assert!(skipped.contains("`tools`"), "{skipped}");
    assert!(read::<Prompt>(&json!({"prompt": "q", "tools": ""})).unwrap().metadata.is_empty());

    let template = "{{ tools[0].name }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let tokenizer = Tokenizer::characters("abcdq", 16).unwrap().with_chat(ChatTemplate::new(template).unwrap());
    let pair = Pair { prompt: read::<Prompt>(&json!({"messages": [user]})).unwrap().text, completion: "b".to_owned(), tools };
    let sample = prepare_pair(&pair, &tokenizer).unwrap();
    assert_eq!(tokenizer.decode_all(&sample.tokens).unwrap(), "addcb");
}

#[test]
fn a_prompt_keeps_the_fields_that_its_answer_is_taken_from_and_their_types() {
    for (record, answer) in [
        (json!({"solution": "2"}), "2"),
        (json!({"solution": 2.5}), "2.5"),
        (json!({"ground_truth": "2", "target": "9"}), "2"),
        (json!({"solution": "long", "answer": "2"}), "2"),
        (json!({"solution": ["a", "b"]}), r#"["a","b"]"#),
        (json!({"completion": [{"role": "assistant", "content": "c"}]}), "c"),
        (json!({"ground_truth": {"target": ["a"]}}), r#"{"target":["a"]}"#),
        (json!({"reward_model": {"style": "rule", "ground_truth": {"target": ["a"]}}}), r#"{"target":["a"]}"#),
    ] {
        let mut prompt = json!({"prompt": "q"});
        prompt.as_object_mut().unwrap().extend(record.as_object().unwrap().clone());
        let found = read::<Prompt>(&prompt).unwrap();
        assert_eq!(found.answer(), Some(answer), "{record}");
        let mut expected = record.clone();
        expected["answer"] = answer.into();
        assert_eq!(json!(found.metadata), expected);
    }
    for (answer, text) in [(json!(2), "2"), (json!(["a", "b"]), r#"["a","b"]"#)] {
        let found = read::<Prompt>(&json!({"prompt": "q", "answer": answer})).unwrap();
        assert_eq!(json!(found.metadata), json!({"answer": text, "answer_of_record": answer}));
    }
    let columns = Columns { answer: Some("gold".into()), ..Columns::default() };
    let record = json!({"prompt": "q", "gold": 3, "answer": 2});
    let found = Prompt::read(record.as_object().unwrap().clone(), &columns).unwrap();
    assert_eq!(json!(found.metadata), json!({"gold": 3, "answer": "3"}));
    // A list is nothing to imitate.
    assert_eq!(read::<Example>(&json!({"prompt": "q", "answer": ["a"]})).unwrap_err(), "without a completion");
}

#[test]
fn an_instruction_has_its_input_also_where_a_column_names_it() {
    let columns = Columns { prompt: Some("instruction".into()), completion: Some("output".into()), ..Columns::default() };
    let record = json!({"instruction": "do", "input": "this", "output": "o"});
    let prompt = Prompt::read(record.as_object().unwrap().clone(), &columns).unwrap();
    assert_eq!((prompt.text, prompt.metadata.contains_key("input")), ("do\n\nthis".into(), false));
}

#[test]
fn a_system_field_is_the_first_turn_of_a_prompt_of_messages_and_of_the_common_beginning_of_a_pair() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let turns = |of: &[ChatMessage]| of.iter().map(|turn| format!("{} {}", turn.role, turn.content)).collect::<Vec<_>>();
    let told = |text: PromptText| match text {
        PromptText::Chat(found) => turns(&found),
        PromptText::Text(text) => panic!("{text}"),
    };
    let (asked, [a, b]) = (turn("user", "q"), ["a", "b"].map(|text| turn("assistant", text)));
    for completion in [json!("a"), json!([a]), json!([asked, a]), json!([turn("system", "s"), asked, a])] {
        let record = json!({"system": "s", "prompt": [asked], "completion": completion});
        assert_eq!(told(read::<Prompt>(&record).unwrap().text), ["system s", "user q"]);
        let Example::Chat { turns: found, first, .. } = read(&record).unwrap() else { panic!("{record}") };
        assert_eq!((turns(&found).join(", ").as_str(), first), ("system s, user q, assistant a", 2), "{record}");
    }
    for record in [
        json!({"system": "s", "prompt": [asked], "chosen": "a", "rejected": "b"}),
        json!({"system": "s", "chosen": [asked, a], "rejected": [asked, b]}),
    ] {
        let pair = read::<RankedPair>(&record).unwrap();
        assert_eq!(
            (told(pair.prompt), pair.chosen, pair.rejected),
            (vec!["system s".into(), "user q".into()], "a".into(), "b".into())
        );
    }
    let twice = json!({"system": "s", "prompt": [turn("system", "t"), asked], "completion": "a"});
    assert_eq!(told(read::<Prompt>(&twice).unwrap().text), ["system t", "user q"]);
}

#[test]
fn a_completion_of_more_than_one_text_is_no_text() {
    let call = |name: &str| json!([{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": name}}]}]);
    let text = |text: &str| json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": text, "tool_calls": null}]);
    let pair =
        |chosen: Value, rejected: Value| read::<RankedPair>(&json!({"prompt": "q", "chosen": chosen, "rejected": rejected}));
    assert_eq!(pair(call("a"), call("b")).unwrap_err(), "whose completion is more than one text");
    assert_eq!(pair(text("a"), text("b")).unwrap().chosen, "a", "the prompt once more, and a text");
    let implicit = |name: &str| {
        Value::from([vec![json!({"role": "user", "content": "q"})], call(name).as_array().unwrap().clone()].concat())
    };
    let skipped = read::<RankedPair>(&json!({"chosen": implicit("a"), "rejected": implicit("b")})).unwrap_err();
    assert_eq!(skipped, "whose completion is more than one text");
    assert_eq!(read::<Example>(&json!({"prompt": "q", "completion": call("a")})).unwrap_err(), skipped);
}

#[test]
fn reasons_to_skip_hold_no_data_of_records_but_for_an_example() {
    let role = |n: usize| json!({"messages": [{"role": format!("role{n}"), "content": "q"}]}).to_string() + "\n";
    let text = "{\"prompt\": \"q\"}\n".to_owned() + &(0..10_000).map(role).collect::<String>();
    let file = folder(&[("x.jsonl", &text)]);
    let data = DataSet::<Prompt>::open(&spec(file.path(), "train")).unwrap();
    assert_eq!(data.skips().iter().collect::<Vec<_>>(), [("with a turn of an unknown role", 10_000)]);
    assert!(data.describe().ends_with("skipped: 10000 with a turn of an unknown role (as \"role0\")"), "{}", data.describe());
}

#[test]
fn recorded_rollouts_may_hold_nulls_and_a_field_of_another_type_is_named() {
    let record =
        json!({"prompt": "q", "response": "r", "reward": 1, "tokens": null, "metadata": null, "part": null, "group": "5e0c"});
    read::<Recorded>(&record).unwrap();
    for (field, value) in [("reward", json!(true)), ("part", json!("x")), ("tokens", json!("y"))] {
        let mut record = record.clone();
        record[field] = value.clone();
        assert_eq!(read::<Recorded>(&record).unwrap_err(), format!("whose `{field}` is not of its type: {value}"));
    }
}
