//! Text to tokens and back, from and to a Hugging Face folder.
//!
//! Sampled tokens are never decoded on their way to the trainer (law D1). Decoding serves rewards,
//! logs and stop strings.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::chat::{ChatTemplate, special_tokens};
use super::{DataError, Metadata, Prompt, PromptText};
use crate::hub::MORE_TEMPLATES;
use crate::util::reading;
use crate::util::untrusted;

/// Text to tokens and back, which tokens end a text or pad one, and how the model reads conversations.
#[derive(Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    eos: Vec<u32>,
    pad: Option<u32>,
    /// The model's template, or its error, which is returned when a conversation is rendered, since
    /// many runs have none.
    chat: Result<Option<ChatTemplate>, String>,
    special: Metadata,
    /// The folder's files, byte for byte, to be saved with a checkpoint.
    files: Vec<(String, Vec<u8>)>,
    /// Rows of the model's embedding, if the tokenizer has added tokens beyond them.
    rows: Option<usize>,
}

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// The largest file of a tokenizer that is read, in bytes: 1 GiB.
const FILE_LIMIT: u64 = 1 << 30;
const OPTIONAL: [&str; 6] =
    [CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenizer.model", CHAT_TEMPLATE, "chat_template.json"];
/// Files with ids of end tokens, in addition to the tokenizer's configuration.
const MODEL_CONFIGS: [&str; 2] = ["generation_config.json", "config.json"];

impl Tokenizer {
    /// Reads `tokenizer.json` of `dir`. End tokens are `eos_token` of `tokenizer_config.json` and
    /// `eos_token_id` of `generation_config.json`, else of `config.json`.
    pub fn from_dir(dir: &Path) -> Result<Self, DataError> {
        let read = |name: &str| {
            let path = dir.join(name);
            reading::read(&path, FILE_LIMIT).map_err(DataError::read(&path))
        };
        let mut files = vec![(TOKENIZER.to_owned(), read(TOKENIZER)?)];
        for name in OPTIONAL {
            if dir.join(name).exists() {
                files.push((name.to_owned(), read(name)?));
            }
        }
        let chat = ChatTemplate::from_dir(dir);
        if let (Ok(Some(chat)), true) = (&chat, dir.join(CHAT_TEMPLATE).exists()) {
            files.extend(chat.files().filter(|(name, _)| name != CHAT_TEMPLATE));
        }
        let mut configs = Vec::new();
        for name in MODEL_CONFIGS {
            if dir.join(name).exists() {
                configs.push(parse(&dir.join(name), &read(name)?)?);
            }
        }
        let tokenizer = Self::from_files(dir, files, &configs)?;
        Ok(Tokenizer { chat: chat.map_err(|error| error.to_string()), ..tokenizer })
    }

    /// Makes a tokenizer of single characters, for tiny models: 0 `<pad>`, 1 `<eos>`, 2 `<bos>`, 3
    /// `<unk>`, then `characters` in order, then unused `<extra_i>` up to `vocab_size`.
    pub fn characters(characters: &str, vocab_size: usize) -> Result<Self, DataError> {
        let special = ["<pad>", "<eos>", "<bos>", "<unk>"];
        let mut vocabulary = Map::new();
        let tokens = special.iter().map(|token| token.to_string()).chain(characters.chars().map(String::from));
        for token in tokens.chain((0..).map(|extra| format!("<extra_{extra}>"))) {
            if vocabulary.len() >= vocab_size.max(special.len() + characters.chars().count()) {
                break;
            }
            let id = vocabulary.len();
            vocabulary.entry(token).or_insert(id.into());
        }
        let added = special.iter().enumerate().map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true})
        });
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(), "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocabulary, "merges": []},
        });
        let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
            "bos_token": "<bos>", "unk_token": "<unk>", "padding_side": "left", "clean_up_tokenization_spaces": false});
        let text = |value: Value| format!("{value:#}\n").into_bytes();
        let files = vec![(TOKENIZER.to_owned(), text(tokenizer)), (CONFIG.to_owned(), text(config))];
        Ok(Self::from_files(Path::new("(characters)"), files, &[])?.with_chat(ChatTemplate::plain()))
    }

    fn from_files(dir: &Path, files: Vec<(String, Vec<u8>)>, configs: &[Metadata]) -> Result<Self, DataError> {
        let file = |name: &str| files.iter().find(|(known, _)| known == name).map(|(_, bytes)| bytes);
        let wrong = |name: &str, reason: String| DataError::invalid(&dir.join(name), reason);
        let mut inner = tokenizers::Tokenizer::from_bytes(file(TOKENIZER).map_or(&[][..], Vec::as_slice))
            .map_err(|error| wrong(TOKENIZER, error.to_string()))?;
        // A file keeps what was asked for once, as transformers saves it; it applies to no other text.
        inner.with_padding(None).with_truncation(None).map_err(|error| wrong(TOKENIZER, error.to_string()))?;
        let config = file(CONFIG).map(|bytes| parse(&dir.join(CONFIG), bytes)).transpose()?.unwrap_or_default();
        let named = |key: &str| match config.get(key).map(|token| token.get("content").unwrap_or(token)) {
            None | Some(Value::Null) => Ok(None),
            Some(token) => {
                let id = token.as_str().and_then(|token| inner.token_to_id(token));
                id.map(Some).ok_or_else(|| wrong(CONFIG, format!("key `{key}` is {token}, which is no token of {TOKENIZER}")))
            }
        };
        let mut eos: Vec<u32> = named("eos_token")?.into_iter().collect();
        eos.extend(configs.iter().map(|config| ids(config, "eos_token_id")).find(|ids| !ids.is_empty()).unwrap_or_default());
        let mut seen = BTreeSet::new();
        eos.retain(|id| seen.insert(*id));
        let pad = match named("pad_token")? {
            Some(pad) => Some(pad),
            None => configs.iter().find_map(|config| ids(config, "pad_token_id").first().copied()),
        };
        Ok(Tokenizer { inner, eos, pad, chat: Ok(None), special: special_tokens(&config), files, rows: None })
    }

    /// Tokens of a whole text, with whatever the tokenizer puts around one (a beginning-of-text token, often).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.encoding(text, true)?.get_ids().to_vec())
    }

    /// Tokens of a piece of text and nothing around them: completions, rendered conversations.
    pub fn encode_bare(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.encoding(text, false)?.get_ids().to_vec())
    }

    /// Encodes a text without special tokens around it, and returns the byte range of each token.
    /// Several tokens of one character share its range. Text that a tokenizer drops, such as a
    /// blank, belongs to the token after it.
    pub(crate) fn encode_placed(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, DataError> {
        let encoding = self.encoding(text, false)?;
        let mut reached = 0;
        let place = |(&token, &(start, end)): (&u32, &(usize, usize))| {
            // Offsets may leave out a blank that is part of the token.
            let place = start.min(reached)..end;
            reached = end;
            (token, place)
        };
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(place).collect())
    }

    /// Encodes a prompt. A text gets the tokenizer's special tokens; a conversation is rendered by
    /// the chat template, with the assistant's turn opened. Tools of a conversation are the list
    /// `tools` in its metadata.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, DataError> {
        match &prompt.text {
            PromptText::Text(text) => self.encode(text),
            PromptText::Chat(turns) => self.encode_bare(&self.chat()?.render_prompt(turns, prompt.tools())?),
        }
    }

    /// Tokens of a completion: of a piece of text, ended by the end-of-text token.
    pub fn completion(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let mut tokens = self.encode_bare(text)?;
        tokens.extend(self.eos.first());
        Ok(tokens)
    }

    fn encoding(&self, text: &str, around: bool) -> Result<tokenizers::Encoding, DataError> {
        let failed =
            |error| DataError::Unusable(format!("can't encode {:?}: {error}", text.chars().take(40).collect::<String>()));
        let encoding = self.inner.encode(text, around).map_err(failed)?;
        match self.rows.and_then(|rows| encoding.get_ids().iter().position(|id| *id as usize >= rows)) {
            None => Ok(encoding),
            Some(at) => Err(DataError::Unusable(format!(
                "a text has the token {:?} of id {}, for which the model has no embedding; take it out of the text",
                encoding.get_tokens()[at],
                encoding.get_ids()[at]
            ))),
        }
    }

    /// Returns the chat template, or the reason why there is none.
    pub fn chat(&self) -> Result<&ChatTemplate, DataError> {
        let none = || {
            DataError::Unusable(
                "the model has no chat template (no chat_template.jinja in its folder, no `chat_template` in tokenizer_config.json), \
                 so that a conversation has no text; name a template file, or \"plain\" for `role: content` lines, as `template` in \
                 [chat]"
                    .to_owned(),
            )
        };
        match &self.chat {
            Ok(template) => template.as_ref().ok_or_else(none),
            Err(error) => Err(DataError::Unusable(error.clone())),
        }
    }

    /// Replaces the chat template, which is also saved with checkpoints. Special tokens become its
    /// variables, unless it has variables of these names.
    pub fn with_chat(mut self, template: ChatTemplate) -> Self {
        if !matches!(&self.chat, Ok(Some(own)) if own.same_sources(&template)) {
            self.files.retain(|(name, _)| name != CHAT_TEMPLATE && !name.starts_with(MORE_TEMPLATES));
            self.files.extend(template.files());
        }
        self.chat = Ok(Some(template.with_defaults(self.special.clone())));
        self
    }

    /// Returns true if the token is special, such as the end of a turn, and no text.
    pub fn is_special(&self, token: u32) -> bool {
        self.eos.contains(&token)
            || self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&token).is_some_and(|token| token.special)
    }

    /// The text of tokens, special ones left out.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        self.decode_with(tokens, true)
    }

    /// The text of tokens, special ones spelled out.
    pub fn decode_all(&self, tokens: &[u32]) -> Result<String, DataError> {
        self.decode_with(tokens, false)
    }

    fn decode_with(&self, tokens: &[u32], skip_special: bool) -> Result<String, DataError> {
        let failed = |error| DataError::Unusable(format!("can't decode {:?}: {error}", &tokens[..tokens.len().min(16)]));
        self.inner.decode(tokens, skip_special).map_err(failed)
    }

    /// Number of tokens, including added ones.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Tokens that end a text; the first is the one to write after a completion.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The token that pads.
    pub fn pad_token_id(&self) -> Option<u32> {
        self.pad
    }

    /// The tokenizer of a model with an embedding of `vocab_size` rows. A text with an added token beyond
    /// them is an error.
    ///
    /// # Errors
    /// Those of [`Tokenizer::check_model`].
    pub fn of_model(self: Arc<Self>, vocab_size: usize) -> Result<Arc<Self>, DataError> {
        self.check_model(vocab_size)?;
        let is_beyond = |id: &u32| *id as usize >= vocab_size;
        let rows = self.inner.get_added_vocabulary().get_vocab().values().any(is_beyond).then_some(vocab_size);
        Ok(if self.rows == rows { self } else { Arc::new(Tokenizer { rows, ..Arc::unwrap_or_clone(self) }) })
    }

    /// Returns an error if the model's embedding has no row for an id of the vocabulary, of an end token or of
    /// padding. Added tokens may be beyond it: all Gemma 3 models have one for images, also those that take
    /// none. A larger embedding is common: rows are padded for speed.
    pub fn check_model(&self, vocab_size: usize) -> Result<(), DataError> {
        let own = self.inner.get_vocab(false).into_values();
        let largest = own.chain(self.eos.iter().copied()).chain(self.pad).max().unwrap_or(0);
        if (largest as usize) < vocab_size {
            return Ok(());
        }
        Err(DataError::Unusable(format!(
            "the tokenizer has ids up to {largest}, the model an embedding for ids below {vocab_size}: they don't belong together; \
             use the tokenizer of the model's own folder"
        )))
    }

    /// Returns an error with a token that the two give different ids, or of which one has none. Ids that no
    /// token has, with which models pad their vocabularies, do not matter.
    pub fn check_same_tokens(&self, other: &Tokenizer) -> Result<(), DataError> {
        let (own, others) = (self.inner.get_vocab(true), other.inner.get_vocab(true));
        let differs = |(token, id): (&String, &u32)| (others.get(token) != Some(id)).then(|| (*id, token.clone()));
        let first = own.iter().filter_map(differs).min();
        let more = || others.iter().filter(|(token, _)| !own.contains_key(*token)).map(|(token, id)| (*id, token.clone())).min();
        let Some((id, token)) = first.or_else(more) else { return Ok(()) };
        let theirs = others.get(&token).map_or("none".to_owned(), u32::to_string);
        let ours = own.get(&token).map_or("none".to_owned(), |_| id.to_string());
        Err(DataError::Unusable(format!(
            "the tokenizers differ: the token {} has the id {ours} in one and {theirs} in the other",
            untrusted::line_of(&format!("{token:?}"), 60)
        )))
    }

    /// The tokenizer's files, by their paths in a model's folder.
    pub fn files(&self) -> &[(String, Vec<u8>)] {
        &self.files
    }

    /// Writes the tokenizer's files into `dir`, which exists.
    pub fn save(&self, dir: &Path) -> Result<(), DataError> {
        for (name, bytes) in &self.files {
            let path = dir.join(name);
            let folder = path.parent().unwrap_or(dir);
            std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, bytes)).map_err(DataError::write(&path))?;
        }
        Ok(())
    }
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Metadata, DataError> {
    serde_json::from_slice(bytes).map_err(|error| DataError::invalid(path, format!("not a JSON object: {error}")))
}

/// One id or a list of them; anything else is the model configuration's to complain about.
fn ids(config: &Metadata, key: &str) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match config.get(key) {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}
