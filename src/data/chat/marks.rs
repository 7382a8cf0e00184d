//! `{% generation %}` blocks, which say what the assistant wrote.
//!
//! The template language has no such statement. Each block becomes a scope with a variable printed
//! at its beginning and at its end. The variables are empty if only the text is wanted, and marks
//! if the block's position is wanted. Line numbers and the trimming of blanks around tags do not
//! change.

use std::ops::Range;

use regex::{Captures, Regex};

/// Printed where a block begins and ends.
pub(super) const VARIABLES: [&str; 2] = ["__generation_begins", "__generation_ends"];

/// Marks for a text that holds neither; characters that no text should hold.
pub(super) fn marks_for(text: &str) -> Option<[char; 2]> {
    let unused: Vec<char> = ('\u{fdd0}'..='\u{fdef}').filter(|mark| !text.contains(*mark)).take(2).collect();
    unused.try_into().ok()
}

/// The text without its marks, and where marked stretches lie in it, in bytes.
pub(super) fn unmark(marked: &str, [begins, ends]: [char; 2]) -> (String, Vec<Range<usize>>) {
    let (mut text, mut open, mut spans) = (String::with_capacity(marked.len()), Vec::new(), Vec::new());
    for c in marked.chars() {
        match c {
            c if c == begins => open.push(text.len()),
            c if c == ends => spans.extend(open.pop().map(|start| start..text.len())),
            c => text.push(c),
        }
    }
    (text, spans)
}

/// The template with its blocks rewritten.
pub(super) fn rewrite(source: &str) -> String {
    // Comments, expressions and raw text are matched whole, so that no tag is found in them. A text in
    // quotes may hold the end of a tag. Each matches up to the end of the source if its own end is missing:
    // nothing is read twice, and the work stays linear.
    let parts = r"(?s)\{#.*?(?:#\}|\z)|\{\{INNER(?:\}\}|\z)|\{%[-+]?\s*raw\s*[-+]?%\}.*?(?:endraw|\z)|\{%(INNER)(?:%\}|\z)";
    let inner = r#"(?:'(?:\\.|[^'\\])*(?:'|\\?\z)|"(?:\\.|[^"\\])*(?:"|\\?\z)|[^'"])*?"#;
    let parts = Regex::new(&parts.replace("INNER", inner)).expect("the pattern is fixed");
    let [begins, ends] = VARIABLES;
    let replace = |part: &Captures| {
        let inner = part.get(1).map_or("", |inner| inner.as_str());
        let trim = |at: Option<char>| at.filter(|c| matches!(c, '-' | '+')).map_or(String::new(), String::from);
        let (left, right) = (trim(inner.chars().next()), trim(inner.chars().next_back()));
        // Blank lines inside the tag stay, so that later lines keep their numbers.
        let lines = "\n".repeat(inner.matches('\n').count());
        let keyword = if part[0].ends_with("%}") { inner } else { "" };
        match keyword.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+')) {
            "generation" => format!("{{%{left} with {lines}%}}{{{{ {begins} }}}}{{% if true {right}%}}"),
            "endgeneration" => format!("{{%{left} endif {lines}%}}{{{{ {ends} }}}}{{% endwith {right}%}}"),
            _ => part[0].to_owned(),
        }
    };
    parts.replace_all(source, replace).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_where_they_are_statements_and_nowhere_else() {
        let untouched =
            "{# {% generation %} #}{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}{% if generation %}{% endif %}";
        assert_eq!(rewrite(untouched), untouched);
        assert_eq!(
            rewrite("a {%- generation -%} b\n{%endgeneration\n%}c"),
            "a {%- with %}{{ __generation_begins }}{% if true -%} b\n{% endif \n%}{{ __generation_ends }}{% endwith %}c"
        );
    }

    /// The template's parser refuses such a source. No part of it is searched twice.
    #[test]
    fn a_text_without_its_end_hides_all_tags_after_it() {
        for begin in ["{{ ' }}", "{% if \" %}", r"{%\'%}", r"{{ 'a\' }}", "{# ' ", "{% raw %} ' "] {
            let source = format!("{begin}{{% generation %}}{{% endgeneration %}}");
            assert_eq!(rewrite(&source), source);
        }
    }

    #[test]
    fn marks_are_taken_out_again() {
        let marks = marks_for("a\u{fdd0}").unwrap();
        assert_eq!(marks, ['\u{fdd1}', '\u{fdd2}']);
        let (text, spans) = unmark("a\u{fdd1}é\u{fdd2}\u{fdd1}\u{fdd2}b", marks);
        assert_eq!((text.as_str(), spans), ("aéb", vec![1..3, 3..3]));
    }
}
