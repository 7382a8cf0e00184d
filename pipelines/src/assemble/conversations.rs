//! `[chat]`, and the samples, rows and steps of `[sft]`.

use std::path::Path;

use anyhow::{Context, Result};
use rollflow::data::chat::ChatTemplate;
use rollflow::data::{ChatMessage, PromptText, RankedPair};
use rollflow::prelude::*;
use rollflow::recipe::{Ask, Chat, Derived, ModelSource, PLAIN};
use rollflow::train::tokenizer_folder;
use rollflow::util::reading;

use crate::assemble::models;
use crate::run::RECIPE;

/// The tokenizer with the recipe's chat template, and with what the recipe tells it.
pub fn tokenizer(chat: &Chat, tokenizer: Tokenizer) -> Result<Tokenizer> {
    if *chat == (Chat { ask: chat.ask, system: chat.system.clone(), ..Chat::default() }) {
        return Ok(tokenizer);
    }
    let template = match chat.template.as_deref() {
        None => tokenizer.chat().cloned().context("[chat]")?,
        Some(PLAIN) => ChatTemplate::plain(),
        Some(file) => ChatTemplate::from_file(file.as_ref())?,
    };
    let variables: serde_json::Map<String, serde_json::Value> = chat.variables.read().context("[chat] variables")?;
    let template = variables.into_iter().fold(template, |template, (name, value)| template.with(&name, value));
    Ok(tokenizer.with_chat(match &chat.date {
        Some(date) => template.dated(date)?,
        None => template,
    }))
}

/// Decides `chat.ask = "auto"` by the model: as the run that trained it did, or as a user's turn if
/// there is a chat template. Returns the decision with its reason.
pub fn decide(chat: &mut Chat, model: &ModelSource) -> Option<Derived> {
    let (ask, reason) = match &chat.template {
        _ if chat.ask != Ask::Auto => return None,
        Some(_) => (Ask::User, "chat.template names a chat template"),
        None => of_model(model),
    };
    chat.ask = ask;
    Some(Derived::of("chat.ask", format!("{:?}", ask.word()), reason))
}

/// Decides how the model is prompted, with the reason. A template that cannot be read counts as one:
/// its use reports the error.
fn of_model(model: &ModelSource) -> (Ask, &'static str) {
    let ModelSource::Folder(folder) = model else { return NO_TEMPLATE };
    let Ok(folder) = models::model_folder(&folder.name()) else { return NO_TEMPLATE };
    let template = |folder| ChatTemplate::from_dir(&tokenizer_folder(folder).ok()?).ok();
    match asked_by_run(&folder) {
        Some(ask) => (ask, "so did the run that trained the model"),
        None if matches!(template(folder), Some(None)) => NO_TEMPLATE,
        None => (Ask::User, "the model has a chat template"),
    }
}

const NO_TEMPLATE: (Ask, &str) = (Ask::AsWritten, "the model has no chat template");

/// Reads `chat.ask` from the recipe of the run that saved this checkpoint. `None` if no run saved it.
fn asked_by_run(checkpoint: &Path) -> Option<Ask> {
    let recipe = reading::read_text(&models::run_of(checkpoint)?.join(RECIPE)).ok()?;
    let recipe: toml::Table = recipe.parse().ok()?;
    let word = recipe.get("chat")?.get("ask")?.as_str()?;
    [Ask::AsWritten, Ask::User].into_iter().find(|ask| ask.word() == word)
}

/// A prompt as `chat`, which was [decided](decide), has it asked.
pub fn asked(chat: &Chat, prompt: PromptText) -> PromptText {
    match prompt {
        PromptText::Text(text) if chat.ask != Ask::User => PromptText::Text(text),
        PromptText::Text(text) => opened(chat, vec![ChatMessage::new("user", text)]).into(),
        PromptText::Chat(turns) => opened(chat, turns).into(),
    }
}

/// A pair of completions whose prompt is as `chat` has it asked.
pub fn asked_pair(chat: &Chat, pair: RankedPair) -> RankedPair {
    RankedPair { prompt: asked(chat, pair.prompt), ..pair }
}

/// The conversation with the recipe's system turn first, unless it has one.
pub fn opened(chat: &Chat, turns: Vec<ChatMessage>) -> Vec<ChatMessage> {
    match &chat.system {
        Some(words) if turns.iter().all(|turn| turn.role != "system") => {
            [ChatMessage::new("system", words)].into_iter().chain(turns).collect()
        }
        _ => turns,
    }
}
