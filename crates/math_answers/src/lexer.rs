//! Tokens of LaTeX or plain text, in one pass. Spacing, fonts and dollars are dropped.

use crate::expression::function;
use crate::token::{Bracket, Relation, Token, number};
use crate::unit::unit;
use crate::work::Work;

/// Meaning of a comma before three digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Commas {
    /// Groups thousands.
    Thousands,
    /// Separates items.
    Separators,
}

/// Returns the tokens of `text`.
pub(crate) fn tokens(text: &str, commas: Commas, work: &mut Work) -> Option<Vec<Token>> {
    work.spend(text.len() as u64)?;
    let mut lexer = Lexer { text, at: 0, commas, tokens: Vec::new(), groups: Vec::new() };
    while let Some(next) = lexer.peek() {
        lexer.one(next)?;
    }
    Some(lexer.tokens)
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    commas: Commas,
    tokens: Vec<Token>,
    /// Open groups.
    groups: Vec<Group>,
}

/// Braces that group.
enum Group {
    /// A second argument may follow.
    FirstOfTwo,
    /// The braces of `\boxed{…}` and `\text{10 cm}`, which mean nothing.
    Transparent,
    Other,
}

/// Returns the command of a Greek letter.
fn greek(letter: char) -> Option<String> {
    const LETTERS: &str = "αβγδεϵζηθικλμνξρστυφϕχψωΓΔΘΛΞΠΣΥΦΨΩ";
    const NAMES: &str = "alpha beta gamma delta epsilon epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau \
                         upsilon phi phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega";
    let name = LETTERS.chars().zip(NAMES.split(' ')).find(|(other, _)| *other == letter);
    name.map(|(_, name)| format!("\\{name}"))
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self, text: &str) -> bool {
        let there = self.rest().starts_with(text);
        self.at += if there { text.len() } else { 0 };
        there
    }

    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let length = rest.find(|c| !wanted(c)).unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    fn skip_blanks(&mut self) {
        self.take_while(char::is_whitespace);
    }

    fn push(&mut self, token: Token) -> Option<()> {
        self.tokens.push(token);
        Some(())
    }

    fn name(&mut self, name: &str) -> Option<()> {
        self.push(Token::Name(name.to_owned()))
    }

    fn one(&mut self, next: char) -> Option<()> {
        let after = self.rest()[next.len_utf8()..].chars().next();
        if next.is_ascii_digit() || next == '.' && after.is_some_and(|c| c.is_ascii_digit()) {
            return self.number();
        }
        if next.is_ascii_alphabetic() {
            return self.word();
        }
        self.at += next.len_utf8();
        match next {
            '\\' => self.command(),
            '{' => self.open_group(Group::Other),
            '}' => self.close_group(),
            '(' => self.push(Token::Open(Bracket::Round)),
            ')' => self.push(Token::Close(Bracket::Round)),
            '[' => self.push(Token::Open(Bracket::Square)),
            ']' => self.push(Token::Close(Bracket::Square)),
            ',' | ';' => self.push(Token::Separator),
            '+' => self.push(Token::Plus),
            '-' | '−' | '–' => self.push(Token::Minus),
            '±' => self.push(Token::PlusMinus),
            '*' if self.take("*") => self.push(Token::Power),
            '*' | '×' | '·' | '⋅' => self.push(Token::Times),
            // 3:2 is a ratio.
            '/' | '÷' | ':' => self.push(Token::Divide),
            '^' => self.power(),
            '²' => self.small_power(2),
            '³' => self.small_power(3),
            '_' => self.push(Token::Under),
            '!' if self.take("=") => self.push(Token::Relation(Relation::Not)),
            '!' => self.push(Token::Bang),
            '%' => self.push(Token::Percent),
            '°' => self.push(Token::Degree),
            '|' => self.push(Token::Bar),
            '=' => self.push(Token::Relation(Relation::Equal)),
            '≈' => self.push(Token::Relation(Relation::About)),
            '≠' => self.push(Token::Relation(Relation::Not)),
            '<' | '≤' => {
                let or_equal = next == '≤' || self.take("=");
                self.push(Token::Relation(Relation::Less { or_equal }))
            }
            '>' | '≥' => {
                let or_equal = next == '≥' || self.take("=");
                self.push(Token::Relation(Relation::Greater { or_equal }))
            }
            '∪' => self.push(Token::Union),
            '∈' => self.push(Token::In),
            '&' => self.push(Token::Cell),
            // √13 has the whole number as its argument.
            '√' => self.push(Token::Sqrt),
            '½' => self.small_fraction(1, 2),
            '⅓' => self.small_fraction(1, 3),
            '⅔' => self.small_fraction(2, 3),
            '¼' => self.small_fraction(1, 4),
            '¾' => self.small_fraction(3, 4),
            '$' | '€' | '£' | '~' | '\u{200b}' => Some(()),
            '.' if self.rest().trim_matches(['$', '}', ' ', '\n', '\\', ')', ']']).is_empty() => Some(()),
            c if c.is_whitespace() => Some(()),
            c if c.is_alphabetic() || c == '∞' => self.name(&greek(c).unwrap_or_else(|| c.to_string())),
            _ => None,
        }
    }

    fn number(&mut self) -> Option<()> {
        let digit = |c: char| c.is_ascii_digit();
        let mut whole = self.take_while(digit).to_owned();
        // `\log_2 100`: subscripts and superscripts are short.
        let small = matches!(self.tokens.last(), Some(Token::Under | Token::Power));
        if (1..=3).contains(&whole.len()) && !small {
            while let Some(group) = self.thousands() {
                whole += group;
            }
        }
        let (mut fraction, mut repeating) = ("", "");
        let point = self.rest().strip_prefix('.');
        let mut decimal = point.is_some_and(|rest| rest.starts_with(digit) || rest.starts_with("\\overline{"));
        if decimal {
            self.at += 1;
            fraction = self.take_while(digit);
            if self.take("\\overline{") {
                repeating = self.take_while(digit);
                if repeating.is_empty() || !self.take("}") {
                    return None;
                }
                // A period is exact.
                decimal = false;
            }
        }
        let exponent = self.exponent()?;
        let value = number(&whole, fraction, repeating, exponent)?;
        self.push(Token::Number { value, decimal })
    }

    /// Reads three more digits after a thousands separator.
    fn thousands(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let marks: &[&str] = match self.commas {
            Commas::Thousands => &["{,}", ",\\!", ",", "\\,", "\\ ", "\\:", "~", "\u{a0}", "\u{202f}", " "],
            Commas::Separators => &["{,}", "\\,", "\\ ", "\\:", "~", "\u{a0}", "\u{202f}", " "],
        };
        let (mark, after) = marks.iter().find_map(|mark| Some((mark, rest.strip_prefix(mark)?)))?;
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        // `3 100/200` is a mixed number.
        if digits != 3 || *mark == " " && after[digits..].starts_with('/') {
            return None;
        }
        self.at += mark.len() + digits;
        Some(&after[..digits])
    }

    /// Reads the exponent after the `e` of `1.5e-3`; 0 if there is none.
    fn exponent(&mut self) -> Option<i32> {
        let rest = self.rest();
        let Some(signed) = rest.strip_prefix(['e', 'E']) else { return Some(0) };
        let unsigned = signed.strip_prefix(['-', '+']).unwrap_or(signed);
        let digits = unsigned.find(|c: char| !c.is_ascii_digit()).unwrap_or(unsigned.len());
        if digits == 0 {
            return Some(0);
        }
        let text = &signed[..signed.len() - unsigned.len() + digits];
        self.at += 1 + text.len();
        text.trim_start_matches('+').parse().ok()
    }

    fn word(&mut self) -> Option<()> {
        const SPEEDS: [&str; 5] = ["km/h", "m/s", "mi/h", "ft/s", "km/s"];
        let after_a_number = self.text[..self.at].ends_with(' ') && matches!(self.tokens.last(), Some(Token::Number { .. }));
        if after_a_number && let Some(speed) = SPEEDS.iter().find(|speed| self.take(speed)) {
            return self.push(Token::Text((*speed).to_owned()));
        }
        let word = self.take_while(|c| c.is_ascii_alphabetic());
        let followed = self.rest().trim_start().starts_with(|c: char| c == '(' || c.is_ascii_alphanumeric());
        let lower = word.to_ascii_lowercase();
        match lower.as_str() {
            "or" | "and" => return self.push(Token::Separator),
            "per" => return self.push(Token::Text(lower)),
            "pi" => return self.name("π"),
            "oo" | "inf" | "infinity" => return self.name("∞"),
            "sqrt" => return self.push(Token::Sqrt),
            "log" => return self.push(Token::Log),
            _ => {}
        }
        match function::named(word) {
            // `5 sec` is a time.
            Some(_) if unit(word).is_some() && !followed => self.push(Token::Text(lower)),
            Some(function) => self.push(Token::Function(function)),
            None if word.len() >= 4 || word.len() >= 2 && unit(word).is_some() => self.push(Token::Text(word.to_owned())),
            None => word.chars().try_for_each(|c| self.name(&c.to_string())),
        }
    }

    fn command(&mut self) -> Option<()> {
        let word = self.take_while(|c| c.is_ascii_alphabetic());
        if word.is_empty() {
            let Some(symbol) = self.peek() else { return Some(()) };
            self.at += symbol.len_utf8();
            return match symbol {
                '{' => self.push(Token::Open(Bracket::Set)),
                '}' => self.push(Token::Close(Bracket::Set)),
                '%' => self.push(Token::Percent),
                '\\' => self.push(Token::Row),
                '|' => self.push(Token::Bar),
                '$' | ',' | '!' | ';' | ':' | ' ' | '\n' | '(' | ')' | '[' | ']' | '#' => Some(()),
                _ => None,
            };
        }
        if let Some(function) = function::named(word).filter(|_| word != "log") {
            return self.push(Token::Function(function));
        }
        match word {
            "frac" | "dfrac" | "tfrac" | "cfrac" => self.two_arguments(Token::Frac),
            "binom" | "dbinom" | "tbinom" => self.two_arguments(Token::Binom),
            "sqrt" => {
                self.push(Token::Sqrt)?;
                self.single_argument()
            }
            "log" => self.push(Token::Log),
            "left" | "right" => {
                self.skip_blanks();
                self.take(".");
                Some(())
            }
            "text" | "mbox" | "textrm" | "textnormal" | "textbf" | "textit" | "mathrm" | "operatorname" | "mathsf" => self.text(),
            "cdot" | "times" | "ast" => self.push(Token::Times),
            "div" => self.push(Token::Divide),
            "pm" => self.push(Token::PlusMinus),
            "mp" => self.push(Token::MinusPlus),
            "approx" | "simeq" | "sim" => self.push(Token::Relation(Relation::About)),
            "ne" | "neq" => self.push(Token::Relation(Relation::Not)),
            "lt" => self.push(Token::Relation(Relation::Less { or_equal: false })),
            "gt" => self.push(Token::Relation(Relation::Greater { or_equal: false })),
            "le" | "leq" | "leqslant" => self.push(Token::Relation(Relation::Less { or_equal: true })),
            "ge" | "geq" | "geqslant" => self.push(Token::Relation(Relation::Greater { or_equal: true })),
            "cup" => self.push(Token::Union),
            "in" => self.push(Token::In),
            "pi" => self.name("π"),
            "infty" => self.name("∞"),
            "circ" | "degree" => self.push(Token::Degree),
            "lvert" | "rvert" | "vert" | "mid" => self.push(Token::Bar),
            "lbrace" => self.push(Token::Open(Bracket::Set)),
            "rbrace" => self.push(Token::Close(Bracket::Set)),
            "lfloor" | "lceil" => {
                self.push(Token::Function(if word == "lfloor" { "floor" } else { "ceil" }))?;
                self.push(Token::Open(Bracket::Round))
            }
            "rfloor" | "rceil" => self.push(Token::Close(Bracket::Round)),
            "boxed" | "fbox" => {
                self.skip_blanks();
                if self.take("{") {
                    self.groups.push(Group::Transparent);
                }
                Some(())
            }
            "begin" => self.environment(Token::Begin),
            "end" => self.environment(Token::End),
            "big" | "Big" | "bigg" | "Bigg" | "bigl" | "bigr" | "Bigl" | "Bigr" | "biggl" | "biggr" | "mathbf" | "boldsymbol"
            | "bm" | "mathit" | "mathbb" | "mathcal" | "displaystyle" | "textstyle" | "limits" | "quad" | "qquad"
            | "overline" | "vec" | "rm" | "bf" | "it" | "hspace" | "ensuremath" => Some(()),
            // Greek letters and other symbols.
            other => self.name(&format!("\\{other}")),
        }
    }

    /// Reads `\text{…}`: words and units unchanged; a text with a digit is mathematics.
    fn text(&mut self) -> Option<()> {
        self.skip_blanks();
        let Some(inside) = self.rest().strip_prefix('{') else { return Some(()) };
        let Some(end) = inside.find(['}', '{']).filter(|end| inside[*end..].starts_with('}')) else { return Some(()) };
        let words = inside[..end].trim();
        if words.contains(|c: char| c.is_ascii_digit() || c == '\\') {
            use Token::{Binom, Frac, Power, Sqrt, Under};
            // An index, an exponent or an argument is one group.
            if !matches!(self.tokens.last(), Some(Binom | Frac | Power | Sqrt | Under)) {
                self.at += 1;
                self.groups.push(Group::Transparent);
            }
            return Some(());
        }
        self.at += end + 2;
        match words.trim_matches([' ', ',', '.', ';', ':', '~']).to_lowercase().as_str() {
            "" if words.contains([',', ';']) => self.push(Token::Separator),
            "" => Some(()),
            "or" | "and" => self.push(Token::Separator),
            lower => match function::named(lower) {
                Some(function) if unit(lower).is_none() => self.push(Token::Function(function)),
                _ => self.push(Token::Text(words.to_owned())),
            },
        }
    }

    fn environment(&mut self, token: Token) -> Option<()> {
        const MATRICES: [&str; 6] = ["{pmatrix}", "{bmatrix}", "{matrix}", "{vmatrix}", "{Bmatrix}", "{smallmatrix}"];
        self.skip_blanks();
        if MATRICES.iter().any(|name| self.take(name)) { self.push(token) } else { None }
    }

    fn power(&mut self) -> Option<()> {
        const DEGREES: [&str; 6] = ["\\circ", "{\\circ}", "{ \\circ }", "\\degree", "{\\degree}", "{\\circ }"];
        self.skip_blanks();
        if DEGREES.iter().any(|degree| self.take(degree)) { self.push(Token::Degree) } else { self.push(Token::Power) }
    }

    fn small_power(&mut self, exponent: u32) -> Option<()> {
        self.push(Token::Power)?;
        self.whole(exponent)
    }

    fn small_fraction(&mut self, top: u32, bottom: u32) -> Option<()> {
        self.push(Token::Frac)?;
        self.whole(top)?;
        self.whole(bottom)
    }

    /// Adds a number as a group.
    fn whole(&mut self, value: u32) -> Option<()> {
        let value = number(&value.to_string(), "", "", 0)?;
        self.tokens.extend([Token::Open(Bracket::Group), Token::Number { value, decimal: false }, Token::Close(Bracket::Group)]);
        Some(())
    }

    /// Reads an argument without braces, which is a single digit: `\frac12` is a half.
    fn single_argument(&mut self) -> Option<()> {
        self.skip_blanks();
        let Some(digit) = self.peek().and_then(|c| c.to_digit(10)) else { return Some(()) };
        self.at += 1;
        self.whole(digit)
    }

    fn two_arguments(&mut self, command: Token) -> Option<()> {
        self.push(command)?;
        self.skip_blanks();
        if self.take("{") {
            return self.open_group(Group::FirstOfTwo);
        }
        let before = self.at;
        self.single_argument()?;
        if self.at > before && self.peek() != Some('{') { self.single_argument() } else { Some(()) }
    }

    fn open_group(&mut self, group: Group) -> Option<()> {
        self.groups.push(group);
        self.push(Token::Open(Bracket::Group))
    }

    fn close_group(&mut self) -> Option<()> {
        match self.groups.pop() {
            Some(Group::Transparent) => Some(()),
            Some(Group::FirstOfTwo) => {
                self.push(Token::Close(Bracket::Group))?;
                self.single_argument()
            }
            _ => self.push(Token::Close(Bracket::Group)),
        }
    }
}
