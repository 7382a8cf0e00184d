//! Parser of whole answers: values, lists, intervals, equations, matrices and words, without labels
//! and units.

use crate::expression::{Answer, Expr, ListKind, Reading, is_variable};
use crate::lexer::{Commas, tokens};
use crate::parser::Parser;
use crate::token::{Bracket, Relation, Token};
use crate::unit::unit;
use crate::work::Work;

/// Reads an answer, with or without its labels. `a ± b` is the list of both values.
pub(crate) fn read(text: &str, commas: Commas, keep_labels: bool, work: &mut Work) -> Option<Reading> {
    let tokens = tokens(text, commas, work)?;
    let mut read_tokens = |upper_signs| read_tokens(&mut Parser { keep_labels, ..Parser::new(&tokens, upper_signs, work) });
    let upper = read_tokens(true)?;
    if !tokens.iter().any(|token| matches!(token, Token::PlusMinus | Token::MinusPlus)) {
        return Some(upper);
    }
    let lower = items(read_tokens(false)?.answer);
    let mut both = items(upper.answer);
    // An item without `±` has one value.
    let other: Vec<Answer> = lower.into_iter().zip(&both).filter(|(low, high)| low != *high).map(|(low, _)| low).collect();
    both.extend(other);
    Some(Reading { answer: Answer::List(ListKind::Bare, both), unit: upper.unit })
}

fn items(answer: Answer) -> Vec<Answer> {
    match answer {
        Answer::List(ListKind::Bare | ListKind::Set, items) => items,
        Answer::Labelled(label, answer) => {
            items(*answer).into_iter().map(|item| Answer::Labelled(label.clone(), Box::new(item))).collect()
        }
        other => vec![other],
    }
}

fn read_tokens(parser: &mut Parser) -> Option<Reading> {
    let mut unit = None;
    let mut items = parser.items(&mut unit)?;
    if parser.peek().is_some() {
        return None;
    }
    let answer = if items.len() == 1 { items.swap_remove(0) } else { Answer::List(ListKind::Bare, items) };
    Some(Reading { answer, unit })
}

impl Parser<'_> {
    /// Parses one or more items with separators.
    fn items(&mut self, unit: &mut Option<String>) -> Option<Vec<Answer>> {
        let mut items = Vec::new();
        while !matches!(self.peek(), None | Some(Token::Close(_))) {
            items.push(self.item(unit)?);
            if !self.take(&Token::Separator) {
                break;
            }
            // `2, and 3`
            while self.take(&Token::Separator) {}
        }
        if items.is_empty() { None } else { Some(items) }
    }

    fn item(&mut self, unit: &mut Option<String>) -> Option<Answer> {
        let label = if self.keep_labels { Vec::new() } else { self.label_of_the_answer()? };
        let answer = self.unlabelled(unit)?;
        let labelled = !label.is_empty() && !matches!(answer, Answer::Words(_));
        Some(if labelled { Answer::Labelled(label, Box::new(answer)) } else { answer })
    }

    fn unlabelled(&mut self, unit: &mut Option<String>) -> Option<Answer> {
        self.deeper(|parser| {
            if let Some(words) = parser.words() {
                return Some(Answer::Words(words));
            }
            let mut answer = parser.part()?;
            if parser.peek() == Some(&Token::Union) {
                let mut parts = vec![answer];
                while parser.take(&Token::Union) {
                    parts.push(parser.part()?);
                }
                answer = Answer::List(ListKind::Set, parts);
            }
            if parser.take(&Token::Percent) {
                let Answer::Value(value) = answer else { return None };
                answer = Answer::Percent(value);
            }
            if let Some(found) = parser.unit() {
                if found == "%"
                    && let Answer::Value(value) = answer
                {
                    return Some(Answer::Percent(value));
                }
                *unit = Some(found).filter(|found| !found.is_empty()).or(unit.take());
            }
            Some(answer)
        })
    }

    /// Skips labels: `x =`, `(x, y) =`, `f(x) =`, `\text{Area} =` and `x \in`. Returns the variables
    /// before `=`, or no tokens: names of functions and words are no part of an answer. After a variable,
    /// `≈` is `=`; a constant before `≈` is the answer.
    fn label_of_the_answer(&mut self) -> Option<Vec<Token>> {
        use Token::{Close, In, Name, Open, Text, Under};
        let equal = Token::Relation(Relation::Equal);
        let equals = |token: &Token| matches!(token, Token::Relation(Relation::Equal | Relation::About));
        let rest = &self.tokens[self.at..];
        let texts = rest.iter().take_while(|token| matches!(token, Text(_))).count();
        let (length, variable) = match rest {
            _ if texts > 0 && rest.get(texts).is_some_and(equals) => (texts + 1, 0),
            [Name(name), next, ..] if *next == equal || equals(next) && is_variable(name) => (2, 1),
            [Name(_), In, ..] => (2, 0),
            [Name(_), Under, _, next, ..] if equals(next) => (4, 3),
            [Name(_), Open(Bracket::Round), Name(_), Close(Bracket::Round), next, ..] if equals(next) => (5, 0),
            [Open(Bracket::Round), Name(_), ..] => tuple_label(rest).map_or((0, 0), |length| (length, length - 1)),
            _ => (0, 0),
        };
        self.at += length;
        self.work.spend(1)?;
        Some(rest[..variable].to_vec())
    }

    /// Parses words, if the item has nothing else.
    fn words(&mut self) -> Option<String> {
        let rest = &self.tokens[self.at..];
        let length = rest.iter().take_while(|token| matches!(token, Token::Text(_))).count();
        if length == 0 || !matches!(rest.get(length), None | Some(Token::Separator | Token::Close(_))) {
            return None;
        }
        let words = rest[..length].iter().filter_map(|token| match token {
            Token::Text(text) => Some(text.to_lowercase()),
            _ => None,
        });
        self.at += length;
        Some(words.collect::<Vec<_>>().join(" "))
    }

    /// Parses the unit after a value to its common name, which is empty for other words.
    fn unit(&mut self) -> Option<String> {
        let start = self.at;
        let mut name = String::new();
        let gap = |name: &str| if name.is_empty() || name.ends_with('/') { "" } else { " " };
        loop {
            match self.peek() {
                Some(Token::Text(text)) => name += &format!("{}{text}", gap(&name)),
                Some(Token::Divide) if matches!(self.tokens.get(self.at + 1), Some(Token::Text(_))) => name.push('/'),
                Some(Token::Power) if self.at > start => {
                    let (value, length) = match &self.tokens[self.at + 1..] {
                        [Token::Open(Bracket::Group), Token::Number { value, .. }, ..] => (value, 3),
                        [Token::Number { value, .. }, ..] => (value, 1),
                        _ => break,
                    };
                    name += &format!("^{value}");
                    self.at += length;
                }
                _ => break,
            }
            self.at += 1;
        }
        (self.at > start).then(|| unit(&name).unwrap_or_default().to_owned())
    }

    fn part(&mut self) -> Option<Answer> {
        match self.peek() {
            Some(Token::Begin) => self.matrix(),
            Some(Token::Open(_)) if self.is_collection()? => self.collection(),
            _ => self.relation(),
        }
    }

    /// Returns true if the bracket holds several items and is the whole part.
    fn is_collection(&mut self) -> Option<bool> {
        let mut depth = 0_usize;
        let mut separated = self.peek() == Some(&Token::Open(Bracket::Set));
        for token in &self.tokens[self.at..] {
            self.work.spend(1)?;
            match token {
                Token::Open(_) => depth += 1,
                Token::Close(_) => depth -= 1,
                Token::Separator if depth == 1 => separated = true,
                _ => {}
            }
            if depth == 0 {
                return Some(separated);
            }
        }
        None
    }

    fn collection(&mut self) -> Option<Answer> {
        let Some(Token::Open(open)) = self.peek() else { return None };
        self.at += 1;
        let items = self.items(&mut None)?;
        let Some(Token::Close(close)) = self.peek() else { return None };
        self.at += 1;
        match (open, close) {
            (Bracket::Set, Bracket::Set) | (Bracket::Group, Bracket::Group) => Some(Answer::List(ListKind::Set, items)),
            (Bracket::Round, Bracket::Round) => Some(Answer::List(ListKind::Tuple, items)),
            (Bracket::Round | Bracket::Square, Bracket::Round | Bracket::Square) => {
                let closed = [*open == Bracket::Square, *close == Bracket::Square];
                match <[Answer; 2]>::try_from(items) {
                    Ok([Answer::Value(low), Answer::Value(high)]) => Some(Answer::Interval([low, high], closed)),
                    Ok(_) => None,
                    Err(items) if closed == [true, true] => Some(Answer::List(ListKind::Tuple, items)),
                    Err(_) => None,
                }
            }
            _ => None,
        }
    }

    fn matrix(&mut self) -> Option<Answer> {
        self.expect(&Token::Begin)?;
        let mut rows = vec![vec![self.sum()?]];
        loop {
            match self.peek() {
                Some(Token::Cell) => {
                    self.at += 1;
                    let cell = self.sum()?;
                    rows.last_mut()?.push(cell);
                }
                Some(Token::Row) => {
                    self.at += 1;
                    if self.peek() != Some(&Token::End) {
                        rows.push(vec![self.sum()?]);
                    }
                }
                _ => break,
            }
        }
        self.expect(&Token::End)?;
        Some(Answer::Matrix(rows))
    }

    /// Parses one value, or a relation of several.
    fn relation(&mut self) -> Option<Answer> {
        let (mut sides, mut relations) = (vec![self.sum()?], Vec::new());
        while let Some(Token::Relation(relation)) = self.peek() {
            self.at += 1;
            relations.push(*relation);
            sides.push(self.sum()?);
        }
        // The side before `≈` is exact.
        if let Some(about) = relations.iter().position(|relation| *relation == Relation::About) {
            relations.truncate(about);
            sides.truncate(about + 1);
        }
        related(sides, &relations)
    }
}

/// Returns the number of tokens of `(x, y) =`, if they are the first.
fn tuple_label(tokens: &[Token]) -> Option<usize> {
    let inside = |token: &&Token| matches!(token, Token::Name(_) | Token::Under | Token::Number { .. } | Token::Separator);
    let close = 1 + tokens.iter().skip(1).take_while(inside).count();
    let [Token::Close(Bracket::Round), Token::Relation(Relation::Equal), ..] = tokens.get(close..)? else { return None };
    tokens[..close].contains(&Token::Separator).then_some(close + 2)
}

fn related(mut sides: Vec<Expr>, relations: &[Relation]) -> Option<Answer> {
    if relations.iter().all(|relation| *relation == Relation::Equal) {
        let (right, left) = (sides.pop()?, sides.pop());
        return Some(match left {
            Some(left) if sides.is_empty() && (left.has_variables() || right.has_variables()) => Answer::Equation(left, right),
            // A chain of steps ends with its result.
            _ => Answer::Value(right),
        });
    }
    // From the lower end to the upper end: whether each is included.
    let rising = |relation: &Relation| if let Relation::Less { or_equal } = relation { Some(*or_equal) } else { None };
    let falling = |relation: &Relation| if let Relation::Greater { or_equal } = relation { Some(*or_equal) } else { None };
    let closed: Vec<bool> = match relations.iter().map(rising).collect() {
        Some(closed) => closed,
        None => {
            sides.reverse();
            relations.iter().rev().map(falling).collect::<Option<_>>()?
        }
    };
    let is_variable = |side: &Expr| matches!(side, Expr::Symbol(_));
    let (high, low) = (sides.pop()?, sides.swap_remove(0));
    match closed[..] {
        [closed] if is_variable(&low) => Some(Answer::Interval([Expr::Negative(Box::new(infinity())), high], [false, closed])),
        [closed] if is_variable(&high) => Some(Answer::Interval([low, infinity()], [closed, false])),
        [from, to] if sides.first().is_some_and(is_variable) => Some(Answer::Interval([low, high], [from, to])),
        _ => None,
    }
}

fn infinity() -> Expr {
    Expr::Symbol("∞".to_owned())
}
