//! Text of foreign origin, made safe to show: what models, services, data sets, folders and recipes
//! say.
//!
//! A terminal obeys control characters, Markdown and HTML obey marks. One escaper makes the first
//! visible; [`markdown`] and [`html`] add their own marks to it. All of them bound the length.
//! Files of data (JSON) hold texts as they are and need none of this.

use std::fmt::Write as _;

/// Characters of a line that are shown.
pub const LINE: usize = 4_000;
/// Characters of a text of several lines that are shown.
pub const BLOCK: usize = 400_000;

/// One line for a terminal or a log: control characters, line breaks and marks that reorder text
/// are shown as escapes.
pub fn line(text: &str) -> String {
    line_of(text, LINE)
}

/// [`line()`] of at most `limit` characters, and how many there are if there are more.
pub fn line_of(text: &str, limit: usize) -> String {
    escaped(text, limit, |_| false)
}

/// Lines for a terminal: as [`line()`], but line feeds and tabs stay.
pub fn block(text: &str) -> String {
    block_of(text, BLOCK)
}

/// [`block`] of at most `limit` characters.
pub fn block_of(text: &str, limit: usize) -> String {
    escaped(text, limit, |c| matches!(c, '\n' | '\t'))
}

/// One line for a terminal or a log, of a path.
pub fn path(path: &std::path::Path) -> String {
    line(&path.to_string_lossy())
}

/// One line of Markdown, in a cell of a table too: shown literally, without markup, links or HTML.
pub fn markdown(text: &str) -> String {
    marked(&line(text), |c| match c {
        '&' | '<' | '>' => entity(c),
        '\\' | '`' | '*' | '_' | '[' | ']' | '|' => Some(format!("\\{c}")),
        _ => None,
    })
}

/// Text for HTML, between tags and in quoted attributes. Line feeds and tabs stay.
pub fn html(text: &str) -> String {
    marked(&block(text), entity)
}

fn entity(c: char) -> Option<String> {
    let name = match c {
        '&' => "amp",
        '<' => "lt",
        '>' => "gt",
        '"' => "quot",
        '\'' => "#39",
        _ => return None,
    };
    Some(format!("&{name};"))
}

fn marked(text: &str, mark: impl Fn(char) -> Option<String>) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match mark(c) {
            Some(mark) => safe += &mark,
            None => safe.push(c),
        }
    }
    safe
}

fn escaped(text: &str, limit: usize, stays: impl Fn(char) -> bool) -> String {
    let mut safe = String::with_capacity(text.len().min(limit));
    let mut characters = text.chars();
    for c in characters.by_ref().take(limit) {
        match c {
            c if stays(c) => safe.push(c),
            '\n' => safe.push_str("\\n"),
            '\r' => safe.push_str("\\r"),
            '\t' => safe.push_str("\\t"),
            c if is_hidden(c) => write!(safe, "\\u{{{:x}}}", u32::from(c)).expect("a string takes everything"),
            c => safe.push(c),
        }
    }
    let more = characters.count();
    if more > 0 {
        write!(safe, "… ({more} more characters)").expect("a string takes everything");
    }
    safe
}

/// Characters that command a terminal, reorder what follows or show nothing. Joiners stay, which
/// scripts and emoji need.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
        || matches!(c, '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_commands_a_terminal_is_shown_and_not_obeyed() {
        assert_eq!(line("a\x1b[2Jb\r\nc\u{9b}31m\x07\u{202e}d"), "a\\u{1b}[2Jb\\r\\nc\\u{9b}31m\\u{7}\\u{202e}d");
        assert_eq!(block("one\n\ttwo\x1b]0;title\x07"), "one\n\ttwo\\u{1b}]0;title\\u{7}");
        assert_eq!(line("Grüße 你好 👩‍🔬"), "Grüße 你好 👩‍🔬", "what people write is shown as it is");
        assert_eq!(line_of("abcdef", 4), "abcd… (2 more characters)");
    }

    #[test]
    fn markup_is_text() {
        assert_eq!(markdown("<b>|`x`|[a](javascript:0)\n# h"), r"&lt;b&gt;\|\`x\`\|\[a\](javascript:0)\\n# h");
        assert_eq!(html("<img src='x' onerror=\"a&b\">\n"), "&lt;img src=&#39;x&#39; onerror=&quot;a&amp;b&quot;&gt;\n");
    }

    proptest! {
        #[test]
        fn nothing_hidden_and_no_mark_is_left_of_any_text(text in any::<String>()) {
            prop_assert!(!line(&text).chars().any(is_hidden));
            prop_assert!(!block(&text).chars().any(|c| is_hidden(c) && c != '\n' && c != '\t'));
            prop_assert!(!html(&text).contains(['<', '>', '"', '\'']));
            prop_assert!(!markdown(&text).contains(['<', '>', '\n']));
        }
    }
}
