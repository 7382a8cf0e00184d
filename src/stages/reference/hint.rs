//! A hint in the teacher's prompt: the same completion after another prompt.

use std::sync::Arc;

use regex::{Captures, Regex};

use super::BoxError;
use crate::data::{ChatMessage, Prompt, PromptText, Sample, Tokenizer, TopTokens};
use crate::util::untrusted;

/// Template of the teacher's prompt (self-distillation: Shenfeld et al., 2026).
///
/// `{prompt}` is the policy's prompt, and any other name in braces a field of the prompt's record, such
/// as `{answer}`. Of a conversation it replaces the user's last turn.
///
/// A sample's context must be its prompt alone: one that an environment opened otherwise, whose
/// conversation was rewritten, or whose recorded `prompt_tokens` are of another template, is an error.
#[derive(Clone)]
pub struct Hint {
    template: String,
    place: Regex,
    tokenizer: Arc<Tokenizer>,
}

const ANOTHER_CONTEXT: &str = "the policy read another context than its prompt, which `teacher.hint` would replace; \
                               leave out the hint, or what changes the context: [environment], or recorded `prompt_tokens` \
                               of another chat template";

/// Samples as the teacher reads them, with the lengths of the policy's prompt and the teacher's.
pub(super) struct Hinted {
    pub samples: Vec<Sample>,
    lengths: Vec<(usize, usize)>,
}

impl Hint {
    /// Makes a hint.
    pub fn new(template: impl Into<String>, tokenizer: &Arc<Tokenizer>) -> Self {
        let place = Regex::new(r"\{([A-Za-z_][A-Za-z0-9_]*)\}").expect("the pattern is constant");
        Hint { template: template.into(), place, tokenizer: tokenizer.clone() }
    }

    /// Returns the samples with the teacher's prompt instead of the policy's.
    pub(super) fn applied(&self, samples: &[Sample]) -> Result<Hinted, BoxError> {
        let mut hinted = Hinted { samples: Vec::new(), lengths: Vec::new() };
        for same in samples.chunk_by(|one, next| one.prompt == next.prompt && one.metadata == next.metadata) {
            let Some(first) = same.first() else { continue };
            let encoded = |text: PromptText| {
                let prompt = Prompt { text, metadata: first.metadata.clone(), ..Prompt::default() };
                self.tokenizer.encode_prompt(&prompt).map_err(|error| first.problem(&error.to_string()))
            };
            let text = self.text(first).map_err(|why| first.problem(&why))?;
            let (own_prompt, prompt) = (encoded(first.prompt.clone())?, encoded(text)?);
            for sample in same {
                let own = sample.versions.per_token().position(|version| version.is_some());
                let own = own.or_else(|| sample.loss_mask.iter().position(|weight| *weight > 0.0));
                let own = own.unwrap_or(sample.tokens.len());
                if sample.part > 0 || own_prompt != sample.tokens[..own] {
                    return Err(sample.problem(ANOTHER_CONTEXT).into());
                }
                let rest = |column: &[f32]| [&vec![0.0; prompt.len()], &column[own.min(column.len())..]].concat();
                hinted.samples.push(Sample {
                    tokens: [&prompt, &sample.tokens[own..]].concat(),
                    loss_mask: rest(&sample.loss_mask),
                    group_index: sample.group_index,
                    index: sample.index,
                    temperature: sample.temperature,
                    ..Sample::default()
                });
                hinted.lengths.push((own, prompt.len()));
            }
        }
        Ok(hinted)
    }

    fn text(&self, sample: &Sample) -> Result<PromptText, String> {
        let fill = |prompt: &str| {
            let mut missing = None;
            let text = self.place.replace_all(&self.template, |place: &Captures| match &place[1] {
                "prompt" => prompt.to_owned(),
                field => match sample.metadata.get(field) {
                    Some(serde_json::Value::String(text)) => text.clone(),
                    Some(value) => value.to_string(),
                    None => {
                        missing.get_or_insert(field.to_owned());
                        String::new()
                    }
                },
            });
            let why = |field: String| {
                format!("`teacher.hint` asks for {{{}}}, which its record does not have", untrusted::line_of(&field, 60))
            };
            missing.map_or(Ok(text.into_owned()), |field| Err(why(field)))
        };
        match &sample.prompt {
            PromptText::Text(text) => Ok(PromptText::Text(fill(text)?)),
            PromptText::Chat(turns) => {
                let mut turns = turns.clone();
                match turns.iter_mut().rfind(|turn| turn.role == "user") {
                    Some(turn) => turn.content = fill(&turn.content)?,
                    None => turns.push(ChatMessage::new("user", fill("")?)),
                }
                Ok(PromptText::Chat(turns))
            }
        }
    }
}

impl Hinted {
    /// Moves the teacher's scores to the samples' own positions.
    pub fn give_back(self, samples: &mut [Sample]) {
        for ((sample, hinted), (own, other)) in samples.iter_mut().zip(self.samples).zip(self.lengths) {
            let scored = &hinted.teacher_log_probs;
            sample.teacher_log_probs = [&vec![0.0; own], &scored[other.min(scored.len())..]].concat();
            sample.teacher = hinted.teacher.map(|mut top| {
                // Entries of a longer prompt than the sample's have no position in it.
                let cut = other.saturating_sub(own + top.first);
                let entries = (cut * top.k).min(top.ids.len());
                top.ids.drain(..entries);
                top.log_probs.drain(..entries);
                TopTokens { first: top.first + cut + own - other, ..top }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sample(prompt: PromptText, tokens: &[u32], answer: &str) -> Sample {
        let metadata = json!({"answer": answer, "level": 3}).as_object().unwrap().clone();
        let mut sample = Sample::begin(&Prompt { text: prompt, metadata, ..Prompt::default() }, 1, tokens);
        sample.push(5, -0.5, 1);
        sample.give(&[6]);
        sample.push(7, -0.25, 1);
        sample
    }

    #[test]
    fn scores_of_the_hinted_prompt_come_back_to_the_samples_own_positions() {
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+= ", 64).unwrap());
        let hint = Hint::new("{answer} {level} {prompt}", &tokenizer);
        let mut samples = [sample("3+4=".into(), &tokenizer.encode("3+4=").unwrap(), "7")];
        let mut hinted = hint.applied(&samples).unwrap();
        let longer = tokenizer.encode("7 3 3+4=").unwrap();
        assert_eq!(hinted.samples[0].tokens, [&longer[..], &[5, 6, 7]].concat());
        assert_eq!(hinted.samples[0].loss_mask[longer.len()..], [1.0, 0.0, 1.0]);
        let scored = &mut hinted.samples[0];
        scored.teacher_log_probs = (0..scored.tokens.len()).map(|at| at as f32).collect();
        let mut top = TopTokens::new(longer.len(), scored.tokens.len(), 1);
        top.set_all(longer.len() + 2, [(9, -1.0)], 64).unwrap();
        scored.teacher = Some(top);
        hinted.give_back(&mut samples);
        let first = longer.len() as f32;
        assert_eq!(samples[0].teacher_log_probs[4..], [first, first + 1.0, first + 2.0]);
        assert_eq!(samples[0].teacher.as_ref().unwrap().at(6), Some((&[9][..], &[-1.0][..])));
        samples[0].validate().unwrap();
    }

    #[test]
    fn a_teacher_that_lists_tokens_from_the_second_position_on_gives_those_of_the_completion_back() {
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+= ", 64).unwrap());
        // Longer than the policy's prompt, and shorter.
        for (template, prompt) in [("{answer} {level} {prompt}", "3+4="), ("{answer}=", "3+4=")] {
            let mut samples = [sample(prompt.into(), &tokenizer.encode(prompt).unwrap(), "7")];
            let mut hinted = Hint::new(template, &tokenizer).applied(&samples).unwrap();
            let (scored, own) = (&mut hinted.samples[0], samples[0].tokens.len());
            let tokens = scored.tokens.len();
            let mut top = TopTokens::new(1, tokens, 2);
            for at in 1..tokens {
                let from_end = (tokens - at) as u32;
                top.set_all(at, [(from_end, -1.0), (10 + from_end, -2.0)], 64).unwrap();
            }
            scored.teacher = Some(top);
            hinted.give_back(&mut samples);
            for from_end in 1..=3 {
                let found = samples[0].teacher.as_ref().unwrap().at(own - from_end as usize);
                assert_eq!(found, Some((&[from_end, 10 + from_end][..], &[-1.0, -2.0][..])), "{template}");
            }
        }
    }

    #[test]
    fn a_hint_goes_into_the_users_last_turn_and_a_missing_field_is_named() {
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+= ", 64).unwrap());
        let turns = vec![ChatMessage::new("system", "a"), ChatMessage::new("user", "3+4="), ChatMessage::new("tool", "b")];
        let hint = Hint::new("{prompt}{answer}", &tokenizer);
        let PromptText::Chat(hinted) = hint.text(&sample(PromptText::Chat(turns.clone()), &[1], "{level}")).unwrap() else {
            panic!("a conversation stays one")
        };
        let contents: Vec<&str> = hinted.iter().map(|turn| turn.content.as_str()).collect();
        assert_eq!(contents, ["a", "3+4={level}", "b"], "what a field holds is no placeholder");
        let missing = Hint::new("{solution} {prompt}", &tokenizer).applied(&[sample("3".into(), &[1], "7")]);
        let error = missing.err().unwrap().to_string();
        assert!(error.starts_with("sample 1 of group 0: `teacher.hint` asks for {solution}"), "{error}");
    }

    #[test]
    fn a_context_that_is_not_the_prompt_alone_is_an_error() {
        let tokenizer = Arc::new(Tokenizer::characters("0123456789+= ", 64).unwrap());
        let prompt = tokenizer.encode("3+4=").unwrap();
        let hint = Hint::new("{answer} {prompt}", &tokenizer);
        let first = sample("3+4=".into(), &prompt, "7");
        let opened = sample("3+4=".into(), &[&prompt[..], &[9]].concat(), "7");
        let rewritten = Sample { part: 1, ..first.clone() };
        assert!(hint.applied(std::slice::from_ref(&first)).is_ok());
        for other in [opened, rewritten] {
            let error = hint.applied(&[first.clone(), other]).err().unwrap().to_string();
            assert!(error.contains("another context than its prompt"), "{error}");
            assert!(error.contains("recorded `prompt_tokens` of another chat template"), "{error}");
        }
    }
}
