//! Texts as tokens, and the folders that tokenizers are read from.

use std::sync::Arc;

use rollflow::data::Tokenizer;

const CHARACTERS: &str = "0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n";

#[test]
fn characters_become_ids_in_order_after_the_special_tokens() {
    let tokenizer = Tokenizer::characters(CHARACTERS, 64).unwrap();
    assert_eq!(tokenizer.encode("1+2=3").unwrap(), [5, 14, 6, 18, 7]);
    assert_eq!(tokenizer.encode("0\né<eos>").unwrap(), [4, 60, 3, 1]);
    assert_eq!(tokenizer.decode(&[2, 5, 14, 6, 1, 0]).unwrap(), "1+2");
    assert_eq!(tokenizer.decode_all(&[5, 1]).unwrap(), "1<eos>");
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_token_ids(), tokenizer.pad_token_id()), (64, &[1][..], Some(0)));
}

#[test]
fn a_saved_tokenizer_is_the_same_again() {
    let tokenizer = Tokenizer::characters(CHARACTERS, 64).unwrap();
    let dir = tempfile::tempdir().unwrap();
    tokenizer.save(dir.path()).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [1, 17]}"#).unwrap();
    let again = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(again.encode("12+34").unwrap(), tokenizer.encode("12+34").unwrap());
    assert_eq!(again.eos_token_ids(), [1, 17], "the tokenizer's own first, then the model's");
}

/// transformers saves what the last call asked for, and applies it to no other.
#[test]
fn texts_are_neither_cut_nor_padded_by_what_a_file_asks_for() {
    let (tokenizer, dir) = (Tokenizer::characters(CHARACTERS, 64).unwrap(), tempfile::tempdir().unwrap());
    tokenizer.save(dir.path()).unwrap();
    let path = dir.path().join("tokenizer.json");
    let mut file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    file["truncation"] = serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = serde_json::json!({"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<pad>"});
    std::fs::write(&path, file.to_string()).unwrap();
    let cut = Tokenizer::from_dir(dir.path()).unwrap();
    for text in ["1", "12+34=46"] {
        assert_eq!(cut.encode(text).unwrap(), tokenizer.encode(text).unwrap());
        assert_eq!(cut.encode_bare(text).unwrap(), tokenizer.encode_bare(text).unwrap());
    }
}

#[test]
fn a_model_with_too_small_an_embedding_is_refused() {
    let tokenizer = Tokenizer::characters(CHARACTERS, 64).unwrap();
    assert!(tokenizer.check_model(64).is_ok() && tokenizer.check_model(128).is_ok());
    let error = tokenizer.check_model(63).unwrap_err().to_string();
    assert!(error.contains("ids up to 63") && error.contains("ids below 63"), "{error}");
}

/// As in all Gemma 3 models: the token of an image is the first beyond the embedding.
#[test]
fn an_added_token_beyond_the_embedding_is_refused_in_texts_alone() {
    let (tokenizer, dir) = (Tokenizer::characters(CHARACTERS, 64).unwrap(), tempfile::tempdir().unwrap());
    tokenizer.save(dir.path()).unwrap();
    let path = dir.path().join("tokenizer.json");
    let mut file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    file["added_tokens"].as_array_mut().unwrap().push(serde_json::json!({"id": 64, "content": "<image>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}));
    std::fs::write(&path, file.to_string()).unwrap();
    let with_image = Arc::new(Tokenizer::from_dir(dir.path()).unwrap());
    let of_text = with_image.clone().of_model(64).unwrap();
    assert_eq!(of_text.encode("1+2=3").unwrap(), tokenizer.encode("1+2=3").unwrap());
    for error in [of_text.encode("1<image>").unwrap_err(), of_text.encode_bare("<image>").unwrap_err()] {
        assert!(error.to_string().contains("\"<image>\" of id 64"), "{error}");
    }
    // A model that takes images has the row.
    let of_images = of_text.of_model(65).unwrap();
    assert_eq!((of_images.encode("<image>").unwrap(), with_image.encode("<image>").unwrap()), (vec![64], vec![64]));
    assert!(with_image.of_model(63).is_err());
}

/// transformers 5 ignores these flags where there is a tokenizer.json; version 4 obeyed them in some classes.
#[test]
fn tokens_around_a_text_are_those_of_tokenizer_json() {
    let (tokenizer, dir) = (Tokenizer::characters(CHARACTERS, 64).unwrap(), tempfile::tempdir().unwrap());
    tokenizer.save(dir.path()).unwrap();
    let config =
        r#"{"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": true, "bos_token": "<bos>", "eos_token": "<eos>"}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let flagged = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(flagged.encode("12").unwrap(), tokenizer.encode_bare("12").unwrap());
    assert_eq!(flagged.encode("<bos>12").unwrap()[0], 2, "a prompt may begin with it");
}

#[test]
fn a_broken_folder_is_named_with_file_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let error = || Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
    assert!(error().contains("tokenizer.json"), "{}", error());
    Tokenizer::characters(CHARACTERS, 64).unwrap().save(dir.path()).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"eos_token": "<end>"}"#).unwrap();
    assert!(error().contains("tokenizer_config.json") && error().contains("`eos_token` is \"<end>\""), "{}", error());
}
