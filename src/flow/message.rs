//! What may travel over an edge.

use std::sync::Arc;

/// What travels over an edge. Its weight in tokens counts against the edge's token capacity (law F1).
pub trait Message: Send + 'static {
    /// Weight in tokens; 0 for a message that holds none. Asked once per hop: keep it cheap, and let it not change in flight.
    fn tokens(&self) -> usize {
        0
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
