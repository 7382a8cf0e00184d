//! Conversations as tokens, each trained or not.
//!
//! Trained are the assistant's text and its end-of-turn token. Not trained are the opening of its
//! turn, all other turns, tool output and text that the template adds. A text is always tokenised
//! whole, because pieces could tokenise differently; stretches of it are found by the tokens'
//! places.

use std::ops::Range;

use serde_json::Value;

use super::ChatTemplate;
use crate::data::{ChatMessage, DataError, PromptText, Sample, Status, Tokenizer};

const ASSISTANT: &str = "assistant";

/// Converts a whole conversation to a supervised sample: every turn of the assistant is trained. The
/// sample's prompt is all turns before the last, its response the last.
///
/// Turns are found by the template's `{% generation %}` blocks, if it has any. Otherwise the
/// conversation is rendered up to each turn of the assistant, with the generation prompt, and up to
/// its end: the turn lies between the two. A template that changes earlier turns when later ones
/// follow is an error.
pub fn tokenize_conversation(turns: &[ChatMessage], tools: &[Value], tokenizer: &Tokenizer) -> Result<Sample, DataError> {
    tokenize_from(turns, tools, tokenizer, 0)
}

/// Converts a conversation likewise, of which only the last turn, the assistant's, is trained. The
/// turns before it are rendered as in a prompt, because some templates drop the reasoning of earlier
/// turns.
pub fn tokenize_last_turn(turns: &[ChatMessage], tools: &[Value], tokenizer: &Tokenizer) -> Result<Sample, DataError> {
    tokenize_from(turns, tools, tokenizer, turns.len().saturating_sub(1))
}

/// Converts a conversation likewise, of which the assistant's turns from number `first` on are trained.
pub(crate) fn tokenize_from(
    turns: &[ChatMessage],
    tools: &[Value],
    tokenizer: &Tokenizer,
    first: usize,
) -> Result<Sample, DataError> {
    let Rendered { text, spans, marked } = render_from(turns, tools, tokenizer, first)?;
    let (tokens, places): (Vec<u32>, Vec<Range<usize>>) = tokenizer.encode_placed(&text)?.into_iter().unzip();
    let mut loss_mask = compute_loss_mask(&places, &spans);
    // Blanks after the last special token of a turn belong to the template: generation ends with that token.
    for span in spans.iter().filter(|_| !marked) {
        let within: Vec<usize> = (0..places.len()).filter(|&at| span.contains(&places[at].start)).collect();
        if let Some(end) = within.iter().rposition(|&at| !text[places[at].clone()].trim().is_empty())
            && tokenizer.is_special(tokens[within[end]])
        {
            within[end + 1..].iter().for_each(|&at| loss_mask[at] = 0.0);
        }
    }
    if !loss_mask.contains(&1.0) {
        return Err(nothing_said());
    }
    let (asked, said) = turns.split_at(turns.len() - 1);
    let (prompt, response) = (PromptText::Chat(asked.to_vec()), said[0].content.clone());
    Ok(Sample { prompt, response, tokens, loss_mask, status: Status::Completed, ..Sample::default() })
}

/// A conversation as text.
pub(crate) struct Rendered {
    pub(crate) text: String,
    /// Trained stretches of the text.
    spans: Vec<Range<usize>>,
    /// If true, `{% generation %}` blocks marked them.
    marked: bool,
}

/// Renders a conversation for [`tokenize_from`].
pub(crate) fn render_from(
    turns: &[ChatMessage],
    tools: &[Value],
    tokenizer: &Tokenizer,
    first: usize,
) -> Result<Rendered, DataError> {
    let said: Vec<usize> = (0..turns.len()).filter(|&turn| turns[turn].role == ASSISTANT).collect();
    let trained: Vec<usize> = said.iter().copied().filter(|turn| *turn >= first).collect();
    if trained.is_empty() {
        return Err(nothing_said());
    }
    let template = tokenizer.chat()?;
    let marked = template.marks_generation(tools);
    let (text, mut spans) =
        if marked { template.render_marked(turns, tools, false)? } else { by_prefixes(turns, tools, template, &trained)? };
    if marked && trained.len() < said.len() {
        match template.render(&turns[..trained[0]], tools, false) {
            Ok(before) if text.starts_with(&before) => spans.retain(|span| span.start >= before.len()),
            // The template changes earlier turns, or refuses to end with them: one block a turn is assumed.
            _ => drop(spans.drain(..spans.len().saturating_sub(trained.len()))),
        }
    }
    if spans.iter().all(Range::is_empty) {
        return Err(nothing_said());
    }
    Ok(Rendered { text, spans, marked })
}

fn nothing_said() -> DataError {
    let problem = "the conversation has no turn of the assistant, so that there is nothing to learn from it";
    DataError::Unusable(problem.to_owned())
}

/// Returns 1.0 for every token that begins inside one of the ordered ranges `trained`, and 0.0 for
/// all others. A token that begins before a range and reaches into it belongs to the opening of the
/// turn, which no policy samples.
///
/// ```
/// use rollflow::data::chat::compute_loss_mask;
///
/// // "user: hi", "bot:", " ok", "!"
/// let places = [0..8, 8..12, 12..15, 15..16];
/// assert_eq!(compute_loss_mask(&places, &[12..16]), [0.0, 0.0, 1.0, 1.0]);
/// ```
pub fn compute_loss_mask(places: &[Range<usize>], trained: &[Range<usize>]) -> Vec<f32> {
    let is_trained = |place: &Range<usize>| !place.is_empty() && trained.iter().any(|span| span.contains(&place.start));
    places.iter().map(|place| f32::from(u8::from(is_trained(place)))).collect()
}

/// The text, and the stretches of the assistant's turns `trained`.
fn by_prefixes(
    turns: &[ChatMessage],
    tools: &[Value],
    template: &ChatTemplate,
    trained: &[usize],
) -> Result<(String, Vec<Range<usize>>), DataError> {
    let up_to = |end: usize, open| template.render(&turns[..end], tools, open);
    let whole = up_to(turns.len(), false)?;
    let mut spans = Vec::new();
    for &turn in trained {
        let refuse = |why: String| {
            DataError::Unusable(format!(
                "turn {} of the conversation can't be told from the text before it: {why}. So what the assistant said can't be \
                 marked. Give a template with `{{% generation %}}` blocks around what the assistant says (`template` in [chat]), or \
                 train each turn in a sample of its own (`turns = \"apart\"` in [sft])",
                turn + 1
            ))
        };
        if turn == 0 {
            return Err(refuse("it is the first, and nothing asks for it".to_owned()));
        }
        let asked = up_to(turn, true)?;
        let said = if turn + 1 == turns.len() { whole.clone() } else { up_to(turn + 1, false)? };
        if let Some(differs) = difference(&asked, &said) {
            return Err(refuse(format!(
                "what asks for it ends {}, but once it is there the template writes {}",
                differs.0, differs.1
            )));
        }
        if let Some(differs) = difference(&said, &whole) {
            return Err(refuse(format!("it is written {} where it is the last, but {} once more follows", differs.0, differs.1)));
        }
        spans.push(asked.len()..said.len());
    }
    Ok((whole, spans))
}

/// Returns the differing ends of `begin` and `text`, from where `begin` is not a prefix of `text`.
fn difference(begin: &str, text: &str) -> Option<(String, String)> {
    if text.starts_with(begin) {
        return None;
    }
    let common: usize = begin.chars().zip(text.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum();
    let from = begin[..common].char_indices().rev().take(12).last().map_or(0, |(at, _)| at);
    let shown = |of: &str| format!("{:?}", of[from..].chars().take(40).collect::<String>());
    Some((shown(begin), shown(text)))
}
