//! Conversations become the tokens that the model was made to read, and only what the assistant says is trained. Templates here are made up; those of
//! real models are golden cases (`tests/golden_functions/chat.rs`).

use std::path::Path;

use proptest::prelude::*;
use rollflow::data::chat::{ChatTemplate, tokenize_conversation, tokenize_last_turn};
use rollflow::data::source::{Columns, Example, Shape, prepare_sft_sample, prepare_sft_turns};
use rollflow::data::{ChatMessage, DataError, Prompt, PromptText, Sample, Tokenizer};
use serde_json::{Value, json};

/// A usual template, with what the assistant says in a block of its own or not.
fn usual(marked: bool) -> String {
    let [begin, end] = if marked { ["{%- generation %}", "{%- endgeneration %}"] } else { [""; 2] };
    format!(
        "{{{{- '<|endoftext|>' }}}}
{{%- for message in messages %}}
    {{{{- '<|im_start|>' + message.role + '\\n' }}}}
    {{%- if message.role == 'assistant' %}}
        {begin}
        {{{{- message.content }}}}
        {{%- for call in message.tool_calls or [] %}}
            {{{{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}}}
        {{%- endfor %}}
        {{{{- '<|im_end|>' }}}}
        {end}
    {{%- else %}}
        {{{{- message.content + '<|im_end|>' }}}}
    {{%- endif %}}
    {{{{- '\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
{{%- endif %}}"
    )
}

/// A byte-level tokenizer with merges, so that pieces can tokenise otherwise than the whole.
fn tokenizer(template: &str) -> Tokenizer {
    let folder = Path::new("tests/golden/models/qwen2_tied");
    Tokenizer::from_dir(folder).unwrap().with_chat(ChatTemplate::new(template).unwrap())
}

fn turn(role: &str, content: &str) -> ChatMessage {
    ChatMessage::new(role, content)
}

fn tool_use() -> Vec<ChatMessage> {
    let call = json!([{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1.0, "é"]}}}]);
    vec![
        turn("system", "Be brief."),
        turn("user", "2+2?"),
        turn("assistant", "").with("tool_calls", call),
        turn("tool", "4").with("name", "add"),
        turn("assistant", "It is 4."),
    ]
}

/// The texts of runs of trained tokens.
fn trained(sample: &Sample, tokenizer: &Tokenizer) -> Vec<String> {
    let tokens: Vec<(u32, bool)> =
        sample.tokens.iter().copied().zip(sample.loss_mask.iter().map(|weight| *weight > 0.0)).collect();
    let runs = tokens.chunk_by(|(_, one), (_, other)| one == other).filter(|run| run[0].1);
    runs.map(|run| tokenizer.decode_all(&run.iter().map(|(token, _)| *token).collect::<Vec<_>>()).unwrap()).collect()
}

#[test]
fn only_what_the_assistant_says_is_trained_with_the_end_of_each_turn() {
    let said = ["<call>add {\"a\": 2, \"b\": [1.0, \"é\"]}</call><|im_end|>", "It is 4.<|im_end|>"];
    for marked in [true, false] {
        let tokenizer = tokenizer(&usual(marked));
        let conversation = tokenize_conversation(&tool_use(), &[], &tokenizer).unwrap();
        assert_eq!(trained(&conversation, &tokenizer), said, "marked: {marked}");
        let text = tokenizer.chat().unwrap().render(&tool_use(), &[], false).unwrap();
        assert_eq!(conversation.tokens, tokenizer.encode_bare(&text).unwrap(), "the text is tokenised whole");
        let last = tokenize_last_turn(&tool_use(), &[], &tokenizer).unwrap();
        assert_eq!((trained(&last, &tokenizer), last.tokens), (vec![said[1].to_owned()], conversation.tokens));
    }
}

#[test]
fn all_turns_of_a_completion_are_trained_and_none_of_its_prompt() {
    let (call, turns) = (tool_use()[2].clone(), tool_use());
    let asked = [turn("user", "1+1?"), turn("assistant", "2"), turn("user", "2+2?")];
    let record = json!({"prompt": asked, "completion": turns[2..]});
    let example = Example::read(record.as_object().unwrap().clone(), &Columns::default()).unwrap();
    let called =
        json!({"prompt": asked, "completion": [{"role": "assistant", "content": null, "tool_calls": call.more["tool_calls"]}]});
    let called = Example::read(called.as_object().unwrap().clone(), &Columns::default()).unwrap();
    let said = ["<call>add {\"a\": 2, \"b\": [1.0, \"é\"]}</call><|im_end|>", "It is 4.<|im_end|>"];
    for marked in [true, false] {
        let tokenizer = tokenizer(&usual(marked));
        let sample = |example| trained(&prepare_sft_sample(example, &tokenizer).unwrap(), &tokenizer);
        assert_eq!(
            (sample(&example), sample(&called)),
            (said.map(String::from).to_vec(), vec![said[0].to_owned()]),
            "marked: {marked}"
        );
        let apart = prepare_sft_turns(&example, &tokenizer).unwrap();
        assert_eq!(apart.iter().map(|one| trained(one, &tokenizer).concat()).collect::<Vec<_>>(), said);
    }
}

#[test]
fn all_blocks_of_the_last_turn_are_trained_and_none_of_the_turns_before_it() {
    let blocks = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}\
        {%- if m.role != 'assistant' %}{{- m.content + '<|im_end|>' }}{%- endif %}\
        {%- if m.reasoning_content %}{%- generation %}{{- m.reasoning_content }}{%- endgeneration %}{{- '<|im_end|>' }}{%- endif %}\
        {%- if m.role == 'assistant' and m.content %}{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{%- endif %}\
        {{- '\\n' }}{%- endfor %}";
    let tokenizer = tokenizer(blocks);
    let thought = |text: &str| turn("assistant", text).with("reasoning_content", "hm");
    let turns = [turn("user", "a"), thought("b"), turn("user", "c"), thought("d"), turn("user", "e"), turn("assistant", "")];
    let all = trained(&tokenize_conversation(&turns[..4], &[], &tokenizer).unwrap(), &tokenizer);
    assert_eq!(all, ["hm", "b<|im_end|>", "hm", "d<|im_end|>"]);
    assert_eq!(trained(&tokenize_last_turn(&turns[..4], &[], &tokenizer).unwrap(), &tokenizer), all[2..]);
    let error = tokenize_last_turn(&turns, &[], &tokenizer).unwrap_err().to_string();
    assert!(error.contains("nothing to learn"), "{error}");
    // The turns before it may be no conversation to the template: one block a turn is assumed.
    let unanswered = "{%- if messages[-1].role != 'assistant' %}{{ raise_exception('unanswered') }}{%- endif %}".to_owned();
    let tokenizer = self::tokenizer(&(unanswered + blocks));
    assert_eq!(trained(&tokenize_last_turn(&turns[..4], &[], &tokenizer).unwrap(), &tokenizer), all[3..]);
}

#[test]
fn a_conversation_without_an_answer_teaches_nothing() {
    let tokenizer = tokenizer(&usual(true));
    for error in [
        tokenize_conversation(&tool_use()[..2], &[], &tokenizer).unwrap_err(),
        tokenize_last_turn(&tool_use()[..4], &[], &tokenizer).unwrap_err(),
    ] {
        assert!(error.to_string().contains("nothing to learn"), "{error}");
    }
}

#[test]
fn a_template_that_rewrites_history_is_refused_by_prefixes_and_trained_turn_by_turn() {
    let forgets = "{%- for m in messages %}<|im_start|>{{ m.role }}\n\
        {%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n\
        {%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}";
    let turns =
        [turn("user", "a"), turn("assistant", "<think>hm</think>b"), turn("user", "c"), turn("assistant", "<think>so</think>d")];
    let tokenizer = tokenizer(forgets);
    let error = tokenize_conversation(&turns, &[], &tokenizer).unwrap_err().to_string();
    for part in ["turn 2", "<think>hm", "where it is the last", "generation", "apart"] {
        assert!(error.contains(part), "{error}");
    }
    let apart: Vec<_> = [2, 4].map(|end| tokenize_last_turn(&turns[..end], &[], &tokenizer).unwrap()).to_vec();
    assert_eq!(
        apart.iter().map(|one| trained(one, &tokenizer).concat()).collect::<Vec<_>>(),
        ["<think>hm</think>b<|im_end|>", "<think>so</think>d<|im_end|>"]
    );
    let opened = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}";
    let turns = [turn("user", "a"), turn("assistant", "b")];
    let error = tokenize_conversation(&turns, &[], &self::tokenizer(opened)).unwrap_err().to_string();
    assert!(error.contains("what asks for it ends") && error.contains("[assistant]<think>"), "{error}");
}

#[test]
fn a_prompt_is_what_the_template_writes_with_the_assistants_turn_opened() {
    let tokenizer = tokenizer(&usual(false));
    let mut prompt = Prompt { text: PromptText::Chat(tool_use()[..2].to_vec()), ..Prompt::default() };
    let text = "<|endoftext|><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(tokenizer.encode_prompt(&prompt).unwrap(), tokenizer.encode_bare(text).unwrap());
    prompt.text = PromptText::Chat(vec![turn("user", "2+2?"), turn("assistant", "It is ")]);
    let text = "<|endoftext|><|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nIt is ";
    assert_eq!(tokenizer.encode_prompt(&prompt).unwrap(), tokenizer.encode_bare(text).unwrap(), "a turn that was begun goes on");
    prompt.text = "2+2=".into();
    assert_eq!(tokenizer.encode_prompt(&prompt).unwrap(), tokenizer.encode("2+2=").unwrap());
}

#[test]
fn a_prompts_tools_reach_the_template_for_tools() {
    let sources = [("default", "{{ tools }}"), ("tool_use", "{{ tools | tojson }}{{ bos_token }}")];
    let sources = sources.map(|(name, text)| json!({"name": name, "template": text}));
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::characters("", 4).unwrap().save(folder.path()).unwrap();
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let config = json!({"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "chat_template": sources});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(folder.path()).unwrap();
    let (turns, tools) = ([turn("user", "?")], [json!({"name": "f"})]);
    let render = |tools: &[Value]| tokenizer.chat().unwrap().render_prompt(&turns, tools).unwrap();
    assert_eq!((render(&[]), render(&tools)), ("None".to_owned(), "[{\"name\": \"f\"}]<bos>".to_owned()));
}

#[test]
fn all_templates_of_a_folder_are_saved_with_its_tokenizer() {
    let (tools, turns) = ([json!({"name": "f"})], [turn("user", "?")]);
    let saved_as = |files: &[(&str, &str)]| {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        Tokenizer::characters("", 4).unwrap().save(from.path()).unwrap();
        std::fs::remove_file(from.path().join("chat_template.jinja")).unwrap();
        std::fs::create_dir(from.path().join("additional_chat_templates")).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(from.path().join(name), text).unwrap());
        Tokenizer::from_dir(from.path()).unwrap().save(to.path()).unwrap();
        let chat = Tokenizer::from_dir(to.path()).unwrap().chat().unwrap().clone();
        [&[][..], &tools].map(|tools| chat.render(&turns, tools, false).unwrap())
    };
    let named = [("chat_template.jinja", "plain"), ("additional_chat_templates/tool_use.jinja", "with {{ tools[0].name }}")];
    assert_eq!(saved_as(&named), ["plain", "with f"]);
    assert_eq!(saved_as(&[("chat_template.json", "{\"chat_template\": \"old\"}")]), ["old", "old"]);
}

#[test]
fn a_folder_without_a_template_says_what_to_do_where_a_conversation_comes() {
    let tokenizer = Tokenizer::from_dir(Path::new("tests/golden/models/qwen2_tied")).unwrap();
    let chat = Prompt::from(vec![turn("user", "hi")]);
    let error = tokenizer.encode_prompt(&chat).unwrap_err().to_string();
    assert!(error.contains("no chat template") && error.contains("[chat]"), "{error}");
    let plain = tokenizer.with_chat(ChatTemplate::plain());
    assert_eq!(plain.encode_prompt(&chat).unwrap(), plain.encode_bare("user: hi\nassistant: ").unwrap());
    let turns = [turn("user", "hi"), turn("assistant", "ho")];
    assert_eq!(
        trained(&tokenize_conversation(&turns, &[], &plain).unwrap(), &plain),
        ["ho<|im_end|>"],
        "with the tokenizer's end of text"
    );
}

#[test]
fn what_fails_names_file_line_and_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("chat_template.jinja");
    let render = |text: &str| {
        std::fs::write(&file, text).unwrap();
        ChatTemplate::from_dir(folder.path()).and_then(|chat| chat.unwrap().render(&tool_use(), &[], false)).unwrap_err()
    };
    let broken = render("a\n\n{% for m in messages %}{{ m.role }}").to_string();
    assert!(broken.starts_with(&format!("{}:3: syntax error", file.display())), "{broken}");
    let unknown = render("a\n{%- generation\n%}\nb{% endgeneration %}\n{{ messages[0].nothing.at_all }}").to_string();
    assert!(unknown.contains(":5: undefined value") && unknown.ends_with("{{ messages[0].nothing.at_all }}"), "{unknown}");
    let refused = render("\n{%- macro no() %}\n{{ raise_exception('no ' + 'tools') }}{% endmacro %}{{ no() }}");
    match &refused {
        DataError::Refused { message, place } => assert!(message == "no tools" && !place.ends_with(":1"), "{refused}"),
        other => panic!("{other}"),
    }
    let empty = ChatTemplate::plain().render(&[], &[], false).unwrap_err().to_string();
    assert!(empty.contains("needs at least one turn"), "{empty}");
}

#[test]
fn a_broken_template_stops_those_who_chat_and_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::characters("abc", 8).unwrap().save(folder.path()).unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), "{{").unwrap();
    let tokenizer = Tokenizer::from_dir(folder.path()).unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap().len(), 2);
    assert!(tokenizer.chat().unwrap_err().to_string().contains("chat_template.jinja:1: syntax error"));
}

#[test]
fn templates_know_pythons_words() {
    let one = [turn("user", " a b ").with("flag", true).with("empty", Value::Null)];
    let render =
        |source: &str| ChatTemplate::new(source).unwrap().dated("2024-07-06T08:05").unwrap().render(&one, &[], false).unwrap();
    for (source, expected) in [
        ("{{ messages[0].flag }} {{ none }} {{ messages[0].empty is defined }}", "True None False"),
        ("{{ messages[0].content.strip().split(' ')[::-1] }}", "['b', 'a']"),
        ("{{ strftime_now('%d %b %Y %H:%M') }}", "06 Jul 2024 08:05"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}\n", "13"),
        ("{{ {'b': [1, 2.5, true, none], 'a': '<é\"\\n'} | tojson }}", r#"{"b": [1, 2.5, true, null], "a": "<é\"\n"}"#),
        (
            "{{ {'b': [], 'a': {'c': 1}} | tojson(indent=2, sort_keys=true) }}",
            "{\n  \"a\": {\n    \"c\": 1\n  },\n  \"b\": []\n}",
        ),
        ("{{ ['é😀', 1e-7, 1e20] | tojson(ensure_ascii=true, separators=(',', ':')) }}", r#"["\u00e9\ud83d\ude00",1e-07,1e+20]"#),
        ("{{ {'é': [1, 2], 'b': []} | tojson(ensure_ascii=true, separators=('、', '：')) }}", r#"{"\u00e9"：[1、2]、"b"：[]}"#),
        (
            "{% set ns = namespace(x=1) %}{% generation %}{% set ns.x = 2 %}{% set y = 3 %}{% endgeneration %}{{ ns.x }}{{ y }}",
            "2",
        ),
    ] {
        assert_eq!(render(source), expected, "{source}");
    }
}

#[test]
fn what_was_thought_has_each_of_its_names() {
    for field in ["reasoning_content", "thinking", "reasoning"] {
        let turns = [turn("user", "?"), turn("assistant", "!").with(field, "hm")];
        let chat = ChatTemplate::new("{{ messages[1].reasoning_content }}{{ messages[1].thinking }}").unwrap();
        assert_eq!(chat.render(&turns, &[], false).unwrap(), "hmhm", "{field}");
    }
}

#[test]
fn contents_are_read_as_data_sets_spell_them() {
    let read = |content: Value| serde_json::from_value::<ChatMessage>(json!({"role": "user", "content": content, "name": "x"}));
    for content in [json!("ab"), json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])] {
        let message = read(content).unwrap();
        assert_eq!(message, turn("user", "ab").with("name", "x"));
        assert_eq!(serde_json::from_value::<ChatMessage>(serde_json::to_value(&message).unwrap()).unwrap(), message);
    }
    assert!(read(Value::Null).unwrap_err().to_string().contains("a message of the role \"user\" has no content"));
    let calling = json!({"role": "assistant", "content": null, "tool_calls": []});
    assert_eq!(serde_json::from_value::<ChatMessage>(calling).unwrap().content, "");
    assert!(read(json!([{"type": "image"}])).unwrap_err().to_string().contains("content"));
}

proptest! {
    /// Whatever is said, the same tokens are trained by blocks as by prefixes, and the whole text is tokenised in one piece.
    #[test]
    fn blocks_and_prefixes_train_the_same_tokens(
        contents in prop::collection::vec("[ -~é😀\n]{0,12}", 1..4), answers in prop::collection::vec("[ -~é😀\n]{0,12}", 3),
    ) {
        let turns: Vec<_> =
            contents.iter().zip(&answers).flat_map(|(asked, said)| [turn("user", asked), turn("assistant", said)]).collect();
        let tokenizers = [true, false].map(|marked| tokenizer(&usual(marked)));
        let [by_blocks, by_prefixes] =
            tokenizers.each_ref().map(|tokenizer| tokenize_conversation(&turns, &[], tokenizer).unwrap());
        prop_assert_eq!(&by_blocks, &by_prefixes);
        let said: Vec<String> = answers.iter().take(contents.len()).map(|said| format!("{said}<|im_end|>")).collect();
        // What opens a turn may have swallowed the beginning of what is said: that is not sampled, and not trained.
        for (found, said) in trained(&by_blocks, &tokenizers[0]).iter().zip(&said) {
            let found = found.trim_start_matches(char::REPLACEMENT_CHARACTER);
            prop_assert!(said.ends_with(found) && found.ends_with("<|im_end|>"), "{found:?} of {said:?}");
        }
        let text = tokenizers[0].chat().unwrap().render(&turns, &[], false).unwrap();
        prop_assert_eq!(by_blocks.tokens, tokenizers[0].encode_bare(&text).unwrap());
    }
}

/// What rendering a template comes to on a small stack, as threads of a pool have it.
fn rendered(source: String) -> Result<String, DataError> {
    let work = move || {
        let turns = [turn("user", "hello")];
        ChatTemplate::new(source)?.render(&turns, &[], false)
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(work).unwrap().join().unwrap()
}

#[test]
fn a_template_that_never_ends_is_stopped_by_its_instructions() {
    let range = "{% for a in range(100000) %}";
    let nested = format!("{}{}", range.repeat(4), "{% endfor %}".repeat(4));
    let error = rendered(nested).unwrap_err();
    assert!(matches!(error, DataError::Limit { of: "instructions", .. }), "{error}");
    assert!(
        error.to_string().contains("(chat template): the chat template exceeds its limit of 20000000 instructions"),
        "{error}"
    );
}

#[test]
fn a_template_that_writes_without_end_is_stopped_by_its_output() {
    let much = "{% set s = 'x' * 60000 %}{% for a in range(100000) %}{{ s }}{% endfor %}";
    let error = rendered(much.to_owned()).unwrap_err();
    assert!(matches!(error, DataError::Limit { of: "bytes of text", .. }), "{error}");
    let template = ChatTemplate::new("{{ messages[0].content * 3 }}").unwrap().limited(1000, 1000, 10).unwrap();
    assert_eq!(template.render(&[turn("user", "abc")], &[], false).unwrap(), "abcabcabc");
    let error = template.render(&[turn("user", "abcd")], &[], false).unwrap_err();
    assert!(matches!(error, DataError::Limit { limit: 10, .. }), "{error}");
}

#[test]
fn widths_in_a_template_are_bounded() {
    for source in [
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ messages | tojson(indent=' ' * 50000) }}",
        "{{ messages[0].content | indent(1000000000) }}",
        "{{ messages[0].content | indent(width=1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format('a') }}",
    ] {
        let error = rendered(source.to_owned()).unwrap_err();
        assert!(error.to_string().contains("at most 256 characters"), "{source}: {error}");
    }
    assert_eq!(rendered("{{ [1] | tojson(indent=2) }}".to_owned()).unwrap(), "[\n  1\n]");
}

#[test]
fn what_nests_too_deep_or_holds_itself_is_not_written_as_json() {
    let nested = |deep: usize, around: &str| {
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range({}) %}}{{% set ns.x = {around} %}}{{% endfor %}}{{{{ ns.x | tojson }}}}",
            deep - 1
        )
    };
    let (lists, maps) = ("[ns.x]", "{'a': ns.x}");
    assert_eq!(rendered(nested(128, lists)).unwrap(), "[".repeat(128) + &"]".repeat(128));
    assert_eq!(rendered(nested(128, maps)).unwrap(), "{\"a\": ".repeat(127) + "[]" + &"}".repeat(127));
    let itself = "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns | tojson }}".to_owned();
    for source in [nested(129, lists), nested(129, maps), itself] {
        let error = rendered(source).unwrap_err().to_string();
        assert!(error.contains("more than 128 lists and maps are inside each other"), "{error}");
    }
}

/// Each of these nests with every few bytes. Without a stack of their own they end the process.
#[test]
fn the_deepest_source_within_the_limit_ends_without_overflow() {
    let limit = 128 << 10;
    let fill = |begin: &str, repeated: &str, end: &str| {
        let times = (limit - begin.len() - end.len()) / repeated.len();
        format!("{begin}{}{end}", repeated.repeat(times))
    };
    for source in [
        fill("{{ ", "-", "1 }}"),
        fill("{{ ", "not ", "1 }}"),
        fill("{{ a", ".a", " }}"),
        fill("{{ 1", "+1", " }}"),
        fill("{{ 1", "~1", " }}"),
        fill("{{ 1", "**1", " }}"),
        fill("{{ 1", "|abs", " }}"),
        fill("{{ 1", " or 1", " }}"),
        fill("{{ 1", "<1", " }}"),
        fill("{{ 1", " if 1 else 1", " }}"),
        fill("{{ a", "[0]", " }}"),
        fill("{{ a", "()", " }}"),
        fill("{{ ", "(", "1 }}"),
        fill("{{ ", "[", "1 }}"),
        fill("", "{%if 1%}", ""),
        fill("{%if 0%}", "{%elif 0%}", "{%endif%}"),
        fill("", "{%for a in a%}", ""),
    ] {
        // An answer or an error, whichever.
        drop(rendered(source));
    }
    let error = rendered("x".repeat(limit + 1)).unwrap_err();
    assert!(matches!(error, DataError::Limit { of: "bytes of source", .. }), "{error}");
}
