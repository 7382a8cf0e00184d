//! A model's chat template: renders conversations as text, byte for byte as transformers'
//! `apply_chat_template`.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, StringInput, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;
use serde_json::Value as Json;

use super::limits::{self, Bounded, TemplateLimits};
use super::marks::{self, VARIABLES, marks_for, unmark};
use super::{ChatError, json};
use crate::data::{ChatMessage, Metadata};
use crate::util::reading;

/// The template called so is for conversations without tools, and for all where it is the only one.
const DEFAULT: &str = "default";
const TOOLS: &str = "tool_use";

/// Template of `template = "plain"`, for models without one: one line per turn, and the end-of-text
/// token after an assistant's turn.
const PLAIN: &str = "\
{%- for message in messages %}
    {{- message.role + ': ' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + (eos_token or '') }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
{%- endif %}
";

/// A compiled template, with the variables that it always gets. Cloning is cheap.
#[derive(Clone)]
pub struct ChatTemplate {
    /// Name in errors.
    file: String,
    /// Name and text of each template.
    sources: Vec<(String, String)>,
    variables: Metadata,
    /// Result of `strftime_now`; if `None`, the clock's time.
    now: Option<DateTime>,
    limits: TemplateLimits,
    compiled: Arc<Environment<'static>>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("file", &self.file).field("variables", &self.variables).finish_non_exhaustive()
    }
}

/// Inputs of a template's compilation.
#[derive(Clone, Copy, Default)]
struct Setup {
    now: Option<DateTime>,
    limits: TemplateLimits,
}

/// Input of a rendering.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatInput<'a> {
    /// The turns.
    pub messages: &'a [ChatMessage],
    /// JSON schemas of the tools that the assistant may call.
    pub tools: &'a [Json],
    /// If true, the text ends with the opening of an assistant's turn.
    pub add_generation_prompt: bool,
    /// If true, the text ends inside the last message, so that the assistant continues it.
    pub continue_final_message: bool,
}

impl<'a> ChatInput<'a> {
    /// These turns and nothing else.
    pub fn new(messages: &'a [ChatMessage]) -> Self {
        ChatInput { messages, ..ChatInput::default() }
    }

    /// Renders the turns as a prompt: the assistant begins a turn, or continues the last turn if it
    /// is the assistant's.
    pub fn prompt(messages: &'a [ChatMessage]) -> Self {
        let continued = messages.last().is_some_and(|turn| turn.role == "assistant");
        ChatInput { messages, add_generation_prompt: !continued, continue_final_message: continued, tools: &[] }
    }

    /// With tools.
    pub fn tools(self, tools: &'a [Json]) -> Self {
        ChatInput { tools, ..self }
    }
}

/// Argument of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// One template, from its text.
    pub fn new(source: impl Into<String>) -> Result<Self, ChatError> {
        Self::compile("(chat template)".to_owned(), vec![(DEFAULT.to_owned(), source.into())], Metadata::new(), Setup::default())
    }

    /// Makes a template of several named ones: `tool_use` is for conversations with tools,
    /// `default` for all others. `file` is the name in errors.
    pub fn named(file: &str, sources: Vec<(String, String)>, variables: Metadata) -> Result<Self, ChatError> {
        let mut sources = sources;
        if let [only] = &mut sources[..] {
            only.0 = DEFAULT.to_owned();
        }
        if !sources.iter().any(|(name, _)| name == DEFAULT) {
            let known = sources.iter().map(|(name, _)| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
            return Err(ChatError::NoDefault { file: file.to_owned(), known });
        }
        Self::compile(file.to_owned(), sources, variables, Setup::default())
    }

    /// From a file.
    pub fn from_file(path: &Path) -> Result<Self, ChatError> {
        let text = reading::read_text(path);
        let text = text.map_err(|error| ChatError::File { path: path.to_owned(), reason: error.to_string() })?;
        Self::named(&path.display().to_string(), vec![(DEFAULT.to_owned(), text)], Metadata::new())
    }

    /// `role: content`, a turn a line.
    pub fn plain() -> Self {
        let sources = vec![(DEFAULT.to_owned(), PLAIN.to_owned())];
        Self::compile("(plain)".to_owned(), sources, Metadata::new(), Setup::default()).expect("the plain template compiles")
    }

    /// With one more variable, as `enable_thinking`, over one of that name that was there.
    pub fn with(mut self, name: &str, value: impl Into<Json>) -> Self {
        self.variables.insert(name.to_owned(), value.into());
        self
    }

    /// With these where it has none of that name.
    pub(crate) fn with_defaults(mut self, variables: Metadata) -> Self {
        for (name, value) in variables {
            self.variables.entry(name).or_insert(value);
        }
        self
    }

    /// Fixes the date, as `2026-01-31` or `2026-01-31T09:30`, so that templates that print the date
    /// render reproducibly.
    pub fn dated(self, when: &str) -> Result<Self, ChatError> {
        let now = when.parse().map_err(|_| ChatError::Date { given: when.to_owned() })?;
        let setup = Setup { now: Some(now), limits: self.limits };
        Self::compile(self.file, self.sources, self.variables, setup)
    }

    /// With other limits on the source and on each rendering.
    pub fn limited(self, limits: TemplateLimits) -> Result<Self, ChatError> {
        Self::compile(self.file, self.sources, self.variables, Setup { now: self.now, limits })
    }

    fn compile(file: String, sources: Vec<(String, String)>, variables: Metadata, setup: Setup) -> Result<Self, ChatError> {
        let Setup { now, limits } = setup;
        let bytes = sources.iter().map(|(_, source)| source.len()).max().unwrap_or(0);
        if bytes > limits.source {
            return Err(ChatError::Limit { file, of: "bytes of source", limit: limits.source as u64 });
        }
        let parse = || {
            let mut compiled = environment(now);
            limits::limit(&mut compiled, &limits);
            for (name, source) in &sources {
                let rewritten = marks::rewrite(source).into_owned();
                compiled.add_template_owned(name.clone(), rewritten).map_err(|error| explain(&file, source, &error))?;
            }
            Ok::<_, ChatError>(compiled)
        };
        let compiled = match limits::with_stack(bytes, parse) {
            Ok(compiled) => compiled?,
            Err(error) => {
                return Err(ChatError::File { path: file.into(), reason: format!("the template can't be parsed: {error}") });
            }
        };
        Ok(ChatTemplate { file, sources, variables, now, limits, compiled: Arc::new(compiled) })
    }

    /// Returns true if `{% generation %}` blocks of the template mark the assistant's text in such
    /// a conversation.
    pub fn marks_generation(&self, input: &ChatInput) -> bool {
        let (_, source) = self.source_for(input.tools);
        matches!(marks::rewrite(source), std::borrow::Cow::Owned(_))
    }

    /// The text of the template for conversations without tools.
    pub fn source(&self) -> &str {
        &self.source_for(&[]).1
    }

    /// Name in errors.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The day that it was put to, if it was.
    pub fn date(&self) -> Option<String> {
        self.now.map(|now| now.to_string())
    }

    fn source_for(&self, tools: &[Json]) -> &(String, String) {
        let named = |name: &str| self.sources.iter().find(|(known, _)| known == name);
        let for_tools = if tools.is_empty() { None } else { named(TOOLS) };
        for_tools.or_else(|| named(DEFAULT)).expect("there is always a default")
    }

    /// The conversation as text.
    pub fn render(&self, input: &ChatInput) -> Result<String, ChatError> {
        if input.messages.is_empty() {
            return Err(ChatError::Empty);
        }
        let mut messages: Vec<Json> = input.messages.iter().map(as_template_sees).collect();
        if !input.continue_final_message {
            return self.run(messages, input, None);
        }
        // The trailing blank shows whether the template trims messages.
        const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
        let last = messages.last_mut().and_then(|last| last.get_mut("content"));
        let Some(Json::String(content)) = last.filter(|content| !content.as_str().unwrap_or("").is_empty()) else {
            return Err(ChatError::Continue("it has no content"));
        };
        let said = content.trim().to_owned();
        content.push_str(TAG);
        let mut text = self.run(messages, input, None)?;
        match text.rfind(TAG.trim()).filter(|_| text.contains(&said)) {
            Some(at) if text[at..].starts_with(TAG) => text.truncate(at),
            Some(at) => text.truncate(text[..at].trim_end().len()),
            None => return Err(ChatError::Continue("the template leaves it out of the text, or a part of it")),
        }
        Ok(text)
    }

    /// Renders the conversation, and returns the byte ranges of its `{% generation %}` blocks.
    pub fn render_marked(&self, input: &ChatInput) -> Result<(String, Vec<Range<usize>>), ChatError> {
        let text = self.render(input)?;
        let changed = || ChatError::Marks { file: self.file.clone() };
        let marks = marks_for(&text).ok_or_else(changed)?;
        let marked = self.run(input.messages.iter().map(as_template_sees).collect(), input, Some(marks))?;
        match unmark(&marked, marks) {
            (unmarked, spans) if unmarked == text => Ok((text, spans)),
            _ => Err(changed()),
        }
    }

    fn run(&self, messages: Vec<Json>, input: &ChatInput, marks: Option<[char; 2]>) -> Result<String, ChatError> {
        let mut context = self.variables.clone();
        let tools = if input.tools.is_empty() { Json::Null } else { input.tools.into() };
        let marks = marks.map_or_else(Default::default, |marks| marks.map(String::from));
        context.extend(VARIABLES.into_iter().zip(marks).map(|(name, mark)| (name.to_owned(), mark.into())));
        context.entry("documents").or_insert(Json::Null);
        context.insert("messages".to_owned(), messages.into());
        context.insert("tools".to_owned(), tools);
        context.insert("add_generation_prompt".to_owned(), input.add_generation_prompt.into());
        let (name, source) = self.source_for(input.tools);
        let mut text = Bounded::new(self.limits.output);
        let rendered =
            self.compiled.get_template(name).and_then(|template| template.render_captured_to(Serde(context), &mut text));
        let exceeded = |of, limit| ChatError::Limit { file: self.file.clone(), of, limit };
        match rendered.map(drop) {
            Ok(()) => Ok(String::from_utf8_lossy(&text.text).into_owned()),
            Err(_) if text.exceeded => Err(exceeded("bytes of text", self.limits.output as u64)),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => Err(exceeded("instructions", self.limits.instructions)),
            Err(error) => Err(explain(&self.file, source, &error)),
        }
    }
}

/// Converts a message for templates: without null fields, and with the reasoning under each name
/// that templates read.
fn as_template_sees(message: &ChatMessage) -> Json {
    const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
    let mut seen = Metadata::new();
    seen.insert("role".to_owned(), message.role.as_str().into());
    seen.insert("content".to_owned(), message.content.as_str().into());
    seen.extend(message.more.iter().filter(|(_, value)| !value.is_null()).map(|(field, value)| (field.clone(), value.clone())));
    if let Some(reasoning) = REASONING.into_iter().find_map(|field| seen.get(field)).cloned() {
        seen.entry("thinking").or_insert_with(|| reasoning.clone());
        seen.insert(REASONING[0].to_owned(), reasoning);
    }
    seen.into()
}

/// The template language as transformers sets it up.
fn environment(now: Option<DateTime>) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the usual delimiters, and blanks around tags left out"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(|state, value, method, args| {
        if method == "format" {
            limits::widths_in(value)?;
        }
        pycompat::unknown_method_callback(state, value, method, args)
    });
    environment.add_filter("format", format);
    environment.add_filter("indent", indent);
    environment.add_filter("tojson", |value: Value, options: Kwargs| json::to_json(&value, options));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment.add_function("strftime_now", move |format: String| -> Result<String, Error> {
        let now = now.unwrap_or_else(|| jiff::Zoned::now().datetime());
        let mut text = String::new();
        let written = jiff::fmt::strtime::BrokenDownTime::from(now).format(&format, &mut text);
        written.map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))?;
        Ok(text)
    });
    environment
}

/// The built-in filter, of bounded widths.
fn format(state: &mut State, format: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    limits::widths_in(format)?;
    filters::format(state, format, args)
}

/// The built-in filter, of a bounded width.
fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    more: Kwargs,
) -> Result<Value, Error> {
    for width in [width, more.peek::<Option<usize>>("width").ok().flatten()].into_iter().flatten() {
        limits::width("the indentation", width)?;
    }
    filters::indent(text, width, first, blank, more)
}

/// The template's line and what is wrong there.
fn explain(file: &str, source: &str, error: &Error) -> ChatError {
    let line = error.line().unwrap_or(1);
    let raised = std::iter::successors(std::error::Error::source(error), |error| error.source());
    let raised = raised.filter_map(|error| error.downcast_ref::<Raised>()).next();
    match raised {
        Some(Raised(message)) => ChatError::Refused { file: file.to_owned(), line, message: message.clone() },
        None => {
            let detail = error.detail().map_or_else(String::new, |detail| format!(": {detail}"));
            let problem = format!("{}{detail}", error.kind());
            let source_line = source.lines().nth(line - 1).unwrap_or_default().to_owned();
            ChatError::Template { file: file.to_owned(), line, problem, source_line }
        }
    }
}
