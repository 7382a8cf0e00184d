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

use super::json;
use super::limits::{self, Bounded, Limits};
use super::marks::{self, VARIABLES, marks_for, unmark};
use crate::data::{ChatMessage, DataError, Metadata};
use crate::hub::{MORE_TEMPLATES, is_word};
use crate::util::reading;

/// The template called so is for conversations without tools, and for all where it is the only one.
const DEFAULT: &str = "default";
const TOOLS: &str = "tool_use";
const JINJA: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
const OLD: &str = "chat_template.json";

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
    setup: Setup,
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
    /// Result of `strftime_now`; if `None`, the clock's time.
    now: Option<DateTime>,
    limits: Limits,
}

/// Argument of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// One template, from its text.
    pub fn new(source: impl Into<String>) -> Result<Self, DataError> {
        Self::named("(chat template)", vec![(DEFAULT.to_owned(), source.into())], Metadata::new())
    }

    /// Makes a template of several named ones: `tool_use` is for conversations with tools,
    /// `default` for all others. `file` is the name in errors.
    fn named(file: &str, mut sources: Vec<(String, String)>, variables: Metadata) -> Result<Self, DataError> {
        if let [only] = &mut sources[..] {
            only.0 = DEFAULT.to_owned();
        }
        if !sources.iter().any(|(name, _)| name == DEFAULT) {
            let known = sources.iter().map(|(name, _)| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
            let problem = format!("there are templates {known}, but none called \"default\"; name a file with one template");
            return Err(DataError::Invalid { place: file.to_owned(), problem });
        }
        Self::compile(file.to_owned(), sources, variables, Setup::default())
    }

    /// From a file.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let text = reading::read_text(path).map_err(|error| DataError::invalid(path, error))?;
        Self::named(&path.display().to_string(), vec![(DEFAULT.to_owned(), text)], Metadata::new())
    }

    /// Reads the template of a model's folder: `chat_template.jinja` and those of
    /// `additional_chat_templates`, else `chat_template` in `tokenizer_config.json` (one template
    /// or a list of named ones), else `chat_template.json`. Special tokens of
    /// `tokenizer_config.json` become its variables.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, DataError> {
        let config = read_object(&dir.join(CONFIG))?;
        let variables = config.as_ref().map_or_else(Metadata::new, special_tokens);
        if let Some(text) = read_if_there(&dir.join(JINJA))? {
            let mut sources = vec![(DEFAULT.to_owned(), text)];
            let more = std::fs::read_dir(dir.join(MORE_TEMPLATES)).into_iter().flatten().flatten();
            let mut more: Vec<_> = more.map(|entry| entry.path()).collect();
            more.sort();
            for path in more.into_iter().filter(|path| path.extension().is_some_and(|end| end == "jinja")) {
                let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                sources.extend(read_if_there(&path)?.map(|text| (name, text)));
            }
            return Self::named(&dir.join(JINJA).display().to_string(), sources, variables).map(Some);
        }
        for (name, object) in [(CONFIG, config), (OLD, read_object(&dir.join(OLD))?)] {
            let path = dir.join(name);
            if let Some(found) = object.as_ref().and_then(|object| object.get("chat_template")).filter(|found| !found.is_null()) {
                let problem = "`chat_template` must be a text or a list of {\"name\": …, \"template\": …}";
                let sources = sources_in(found).ok_or_else(|| DataError::invalid(&path, problem))?;
                return Self::named(&format!("{} (chat_template)", path.display()), sources, variables).map(Some);
            }
        }
        Ok(None)
    }

    /// `role: content`, a turn a line.
    pub fn plain() -> Self {
        Self::named("(plain)", vec![(DEFAULT.to_owned(), PLAIN.to_owned())], Metadata::new())
            .expect("the plain template compiles")
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
    pub fn dated(self, when: &str) -> Result<Self, DataError> {
        let refuse = |_| DataError::Unusable(format!("{when:?} is no date; write it as 2026-01-31 or 2026-01-31T09:30"));
        let now = Some(when.parse().map_err(refuse)?);
        Self::compile(self.file, self.sources, self.variables, Setup { now, ..self.setup })
    }

    /// Sets limits far above the needs of known models' templates: bytes of the source (by default
    /// 128 KiB), and instructions (20 million: seconds) and bytes of text (32 MiB: about eight million
    /// tokens) of each rendering.
    pub fn limited(self, source: usize, instructions: u64, output: usize) -> Result<Self, DataError> {
        let limits = Limits { source, instructions, output };
        Self::compile(self.file, self.sources, self.variables, Setup { limits, ..self.setup })
    }

    fn compile(file: String, sources: Vec<(String, String)>, variables: Metadata, setup: Setup) -> Result<Self, DataError> {
        let Setup { now, limits } = setup;
        let bytes = sources.iter().map(|(_, source)| source.len()).max().unwrap_or(0);
        if bytes > limits.source {
            return Err(DataError::Limit { file, of: "bytes of source", limit: limits.source as u64 });
        }
        let parse = || {
            let mut compiled = environment(now);
            limits.set(&mut compiled);
            for (name, source) in &sources {
                let rewritten = marks::rewrite(source);
                compiled.add_template_owned(name.clone(), rewritten).map_err(|error| explain(&file, source, &error))?;
            }
            Ok::<_, DataError>(compiled)
        };
        let failed =
            |error| DataError::Invalid { place: file.clone(), problem: format!("the template can't be parsed: {error}") };
        let compiled = limits::with_stack(bytes, parse).map_err(failed)??;
        Ok(ChatTemplate { file, sources, variables, setup, compiled: Arc::new(compiled) })
    }

    /// Returns true if `{% generation %}` blocks of the template mark the assistant's text in a
    /// conversation with these tools.
    pub(super) fn marks_generation(&self, tools: &[Json]) -> bool {
        let template = self.compiled.get_template(&self.source_for(tools).0);
        template.is_ok_and(|template| template.source().contains(VARIABLES[0]))
    }

    /// The text of the template for conversations without tools.
    pub fn source(&self) -> &str {
        &self.source_for(&[]).1
    }

    /// Files of all its templates, by their paths in a model's folder, as [`ChatTemplate::from_dir`]
    /// reads them.
    pub(crate) fn files(&self) -> impl Iterator<Item = (String, Vec<u8>)> {
        let path = |name: &str| match name {
            DEFAULT => Some(JINJA.to_owned()),
            // A configuration may name a template as no file can be named.
            name => is_word(name).then(|| format!("{MORE_TEMPLATES}/{name}.jinja")),
        };
        self.sources.iter().filter_map(move |(name, source)| Some((path(name)?, source.as_bytes().to_vec())))
    }

    /// Returns true if the templates are the same.
    pub(crate) fn same_sources(&self, other: &ChatTemplate) -> bool {
        self.sources == other.sources
    }

    /// Name in errors.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The day that it was put to, if it was.
    pub fn date(&self) -> Option<String> {
        self.setup.now.map(|now| now.to_string())
    }

    fn source_for(&self, tools: &[Json]) -> &(String, String) {
        let named = |name: &str| self.sources.iter().find(|(known, _)| known == name);
        let for_tools = if tools.is_empty() { None } else { named(TOOLS) };
        for_tools.or_else(|| named(DEFAULT)).expect("there is always a default")
    }

    /// Renders a conversation. If `open` is true, the text ends with the opening of an assistant's
    /// turn. `tools` are JSON schemas of the tools that the assistant may call.
    pub fn render(&self, turns: &[ChatMessage], tools: &[Json], open: bool) -> Result<String, DataError> {
        self.run(turns, tools, open, None)
    }

    /// Renders a prompt: the assistant begins a turn, or continues the last turn if it is the
    /// assistant's.
    pub fn render_prompt(&self, turns: &[ChatMessage], tools: &[Json]) -> Result<String, DataError> {
        // The trailing blank shows whether the template trims messages.
        const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
        let Some(last) = turns.last().filter(|turn| turn.role == "assistant") else { return self.render(turns, tools, true) };
        let refuse = |why| DataError::Unusable(format!("the final message can't be continued: {why}"));
        if last.content.is_empty() {
            return Err(refuse("it has no content"));
        }
        let mut turns = turns.to_vec();
        turns.last_mut().into_iter().for_each(|last| last.content += TAG);
        let mut text = self.render(&turns, tools, false)?;
        match text.rfind(TAG.trim()).filter(|_| text.contains(last.content.trim())) {
            Some(at) if text[at..].starts_with(TAG) => text.truncate(at),
            Some(at) => text.truncate(text[..at].trim_end().len()),
            None => return Err(refuse("the template leaves it out of the text, or a part of it")),
        }
        Ok(text)
    }

    /// Renders the conversation, and returns the byte ranges of its `{% generation %}` blocks.
    pub fn render_marked(
        &self,
        turns: &[ChatMessage],
        tools: &[Json],
        open: bool,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        let text = self.render(turns, tools, open)?;
        let changed = || {
            let problem = "the text of a `{% generation %}` block is changed after the block, so that it can't be found";
            DataError::Invalid { place: self.file.clone(), problem: problem.to_owned() }
        };
        let marks = marks_for(&text).ok_or_else(changed)?;
        let marked = self.run(turns, tools, open, Some(marks))?;
        match unmark(&marked, marks) {
            (unmarked, spans) if unmarked == text => Ok((text, spans)),
            _ => Err(changed()),
        }
    }

    fn run(&self, turns: &[ChatMessage], tools: &[Json], open: bool, marks: Option<[char; 2]>) -> Result<String, DataError> {
        if turns.is_empty() {
            return Err(DataError::Unusable("the conversation is empty; it needs at least one turn".to_owned()));
        }
        let mut context = self.variables.clone();
        let (name, source) = self.source_for(tools);
        let tools = if tools.is_empty() { Json::Null } else { tools.into() };
        let marks = marks.map_or_else(Default::default, |marks| marks.map(String::from));
        context.extend(VARIABLES.into_iter().zip(marks).map(|(name, mark)| (name.to_owned(), mark.into())));
        context.entry("documents").or_insert(Json::Null);
        context.insert("messages".to_owned(), turns.iter().map(as_template_sees).collect());
        context.insert("tools".to_owned(), tools);
        context.insert("add_generation_prompt".to_owned(), open.into());
        let limits = self.setup.limits;
        let mut text = Bounded { text: Vec::new(), limit: limits.output, exceeded: false };
        let rendered =
            self.compiled.get_template(name).and_then(|template| template.render_captured_to(Serde(context), &mut text));
        let exceeded = |of, limit| DataError::Limit { file: self.file.clone(), of, limit };
        match rendered.map(drop) {
            Ok(()) => Ok(String::from_utf8_lossy(&text.text).into_owned()),
            Err(_) if text.exceeded => Err(exceeded("bytes of text", limits.output as u64)),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => Err(exceeded("instructions", limits.instructions)),
            Err(error) => Err(explain(&self.file, source, &error)),
        }
    }
}

/// Name and text of each template of a configuration.
fn sources_in(found: &Json) -> Option<Vec<(String, String)>> {
    let text = |value: &Json| value.as_str().map(str::to_owned);
    match found {
        Json::String(template) => Some(vec![(DEFAULT.to_owned(), template.clone())]),
        Json::Array(list) if !list.is_empty() => {
            list.iter().map(|one| Some((text(one.get("name")?)?, text(one.get("template")?)?))).collect()
        }
        _ => None,
    }
}

/// `bos_token` and its like, as the texts that templates print.
pub(crate) fn special_tokens(config: &Metadata) -> Metadata {
    let token = |(name, value): (&String, &Json)| {
        let text = value.get("content").unwrap_or(value).as_str()?;
        name.ends_with("_token").then(|| (name.clone(), text.into()))
    };
    config.iter().filter_map(token).collect()
}

/// The file's text, if there is one.
fn read_if_there(path: &Path) -> Result<Option<String>, DataError> {
    match reading::read_text(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        text => text.map(Some).map_err(|error| DataError::invalid(path, error)),
    }
}

fn read_object(path: &Path) -> Result<Option<Metadata>, DataError> {
    let Some(text) = read_if_there(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|error| DataError::invalid(path, format!("not a JSON object: {error}")))
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
fn explain(file: &str, source: &str, error: &Error) -> DataError {
    let line = error.line().unwrap_or(1);
    let place = format!("{file}:{line}");
    let raised = std::iter::successors(std::error::Error::source(error), |error| error.source());
    match raised.filter_map(|error| error.downcast_ref::<Raised>()).next() {
        Some(Raised(message)) => DataError::Refused { place, message: message.clone() },
        None => {
            let detail = error.detail().map_or_else(String::new, |detail| format!(": {detail}"));
            let problem = format!("{}{detail}", error.kind());
            let quoted = match source.lines().nth(line - 1).unwrap_or_default().trim() {
                "" => String::new(),
                text if text.chars().count() <= 120 => format!("\n    {text}"),
                text => format!("\n    {}…", text.chars().take(120).collect::<String>()),
            };
            DataError::Invalid { place, problem: problem + &quoted }
        }
    }
}
