//! `{% generation %}` blocks, which say what the assistant wrote.
//!
//! The template language has no such statement. Each block becomes a scope with a variable printed
//! at its beginning and at its end. The variables are empty if only the text is wanted, and marks
//! if the block's position is wanted. Line numbers and the trimming of blanks around tags do not
//! change.

use std::borrow::Cow;
use std::ops::Range;

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

/// The template with its blocks rewritten; borrowed where it has none.
pub(super) fn rewrite(source: &str) -> Cow<'_, str> {
    let (mut written, mut copied) = (String::new(), 0);
    for tag in tags(source) {
        let inner = &source[tag.start + 2..tag.end - 2];
        let trim = |at: Option<char>| at.filter(|c| matches!(c, '-' | '+')).map_or("", |c| if c == '-' { "-" } else { "+" });
        let (left, right) = (trim(inner.chars().next()), trim(inner.chars().next_back()));
        let [begins, ends] = VARIABLES;
        // Blank lines inside the tag stay, so that later lines keep their numbers.
        let lines = "\n".repeat(inner.matches('\n').count());
        let replaced = match keyword(inner) {
            "generation" => format!("{{%{left} with {lines}%}}{{{{ {begins} }}}}{{% if true {right}%}}"),
            "endgeneration" => format!("{{%{left} endif {lines}%}}{{{{ {ends} }}}}{{% endwith {right}%}}"),
            _ => continue,
        };
        written.push_str(&source[copied..tag.start]);
        written.push_str(&replaced);
        copied = tag.end;
    }
    if copied == 0 {
        return Cow::Borrowed(source);
    }
    written.push_str(&source[copied..]);
    Cow::Owned(written)
}

fn keyword(inner: &str) -> &str {
    inner.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'))
}

/// Statement tags, `{% … %}`: not in comments, expressions or raw text.
fn tags(source: &str) -> Vec<Range<usize>> {
    let (mut tags, mut at) = (Vec::new(), 0);
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let after = start + 1;
        at = match source.as_bytes().get(after) {
            Some(b'#') => source[after..].find("#}").map_or(source.len(), |end| after + end + 2),
            Some(b'{') => end_of(source, after + 1, "}}"),
            Some(b'%') => {
                let end = end_of(source, after + 1, "%}");
                if end < start + 4 || !source[..end].ends_with("%}") {
                    return tags;
                }
                tags.push(start..end);
                match keyword(&source[start + 2..end - 2]) {
                    "raw" => source[end..].find("endraw").map_or(source.len(), |raw| end + raw),
                    _ => end,
                }
            }
            _ => after,
        };
    }
    tags
}

/// Returns the position after the next `close` that is outside of a string.
fn end_of(source: &str, from: usize, close: &str) -> usize {
    let bytes = source.as_bytes();
    let (mut at, mut quote) = (from, None);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (None, byte @ (b'\'' | b'"')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(close.as_bytes()) => return at + close.len(),
            _ => {}
        }
        at += 1;
    }
    source.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_where_they_are_statements_and_nowhere_else() {
        let untouched =
            "{# {% generation %} #}{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}{% if generation %}{% endif %}";
        assert!(matches!(rewrite(untouched), Cow::Borrowed(_)));
        assert_eq!(
            rewrite("a {%- generation -%} b\n{%endgeneration\n%}c"),
            "a {%- with %}{{ __generation_begins }}{% if true -%} b\n{% endif \n%}{{ __generation_ends }}{% endwith %}c"
        );
    }

    #[test]
    fn marks_are_taken_out_again() {
        let marks = marks_for("a\u{fdd0}").unwrap();
        assert_eq!(marks, ['\u{fdd1}', '\u{fdd2}']);
        let (text, spans) = unmark("a\u{fdd1}é\u{fdd2}\u{fdd1}\u{fdd2}b", marks);
        assert_eq!((text.as_str(), spans), ("aéb", vec![1..3, 3..3]));
    }
}
