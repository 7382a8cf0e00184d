//! Messages: values that travel over edges.

use std::sync::Arc;

/// Value that travels over an edge. Its tokens count against the edge's token capacity (law F1).
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't travel over an edge: it is not a `Message`",
    label = "this type has no `impl Message`",
    note = "write `impl rollflow::flow::Message for {Self} {{}}` next to the type; it must be `Send` and own its data (`'static`)",
    note = "for a type of another crate, wrap it in a type of your own"
)]
pub trait Message: Send + 'static {
    /// Number of tokens, 0 by default. Called once per hop: keep it cheap, and constant while the
    /// message is in flight.
    fn tokens(&self) -> usize {
        0
    }

    /// Name in drawings of a graph. Default: the type's name without its path.
    fn label() -> String
    where
        Self: Sized,
    {
        short_type_name::<Self>()
    }
}

macro_rules! weightless {
    ($($kind:ty)*) => { $(impl Message for $kind {})* };
}

weightless!(() bool char u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64 String &'static str);

impl<T: Message> Message for Vec<T> {
    fn tokens(&self) -> usize {
        self.iter().map(Message::tokens).sum()
    }
}

impl<T: Message> Message for Option<T> {
    fn tokens(&self) -> usize {
        self.as_ref().map_or(0, Message::tokens)
    }
}

impl<T: Message> Message for Box<T> {
    fn tokens(&self) -> usize {
        (**self).tokens()
    }
}

impl<T: Message + Sync> Message for Arc<T> {
    fn tokens(&self) -> usize {
        (**self).tokens()
    }
}

impl<A: Message, B: Message> Message for (A, B) {
    fn tokens(&self) -> usize {
        self.0.tokens() + self.1.tokens()
    }
}

impl<A: Message, B: Message, C: Message> Message for (A, B, C) {
    fn tokens(&self) -> usize {
        self.0.tokens() + self.1.tokens() + self.2.tokens()
    }
}

/// Returns a type's name without its paths: `alloc::vec::Vec<my::Group>` becomes `Vec<Group>`.
pub(crate) fn short_type_name<T>() -> String {
    let (mut short, mut word) = (String::new(), String::new());
    for letter in std::any::type_name::<T>().chars() {
        match letter {
            ':' => word.clear(),
            letter if letter.is_alphanumeric() || letter == '_' => word.push(letter),
            letter => {
                short.push_str(&word);
                word.clear();
                short.push(letter);
            }
        }
    }
    short + &word
}

#[cfg(test)]
mod tests {
    use super::short_type_name;

    #[test]
    fn type_names_lose_their_paths() {
        assert_eq!(short_type_name::<u64>(), "u64");
        assert_eq!(short_type_name::<Vec<std::time::Duration>>(), "Vec<Duration>");
        assert_eq!(short_type_name::<(String, Option<&'static str>)>(), "(String, Option<&str>)");
    }
}
