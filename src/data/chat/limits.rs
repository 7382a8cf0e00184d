//! Limits on the cost of a chat template, which is a foreign program: it comes with a model or a
//! data set. They stop mistakes and known attacks, but not every hostile template: no limit bounds
//! the memory of a value, or its nesting.

use std::io::{self, ErrorKind, Write};

use minijinja::{Environment, Error, Value};

/// Bounds on a template and on each rendering.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of the template's source; known templates have up to 30 KiB.
    pub source: usize,
    /// Instructions of one rendering, of which a turn takes some hundreds.
    pub instructions: u64,
    /// Bytes of the rendered text.
    pub output: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { source: 128 << 10, instructions: 20_000_000, output: 32 << 20 }
    }
}

impl Limits {
    /// Sets the limits that an environment keeps itself.
    pub fn set(&self, environment: &mut Environment) {
        environment.set_fuel(Some(self.instructions));
        environment.set_recursion_limit(DEPTH);
    }
}

/// The largest indentation, and the largest width and precision of a formatted value, in characters.
const WIDTH: usize = 256;
/// Calls inside calls of macros, so that rendering fits the stack of any thread.
const DEPTH: usize = 200;
/// Stack for parsing, plus an amount per byte of the source. Some expressions nest once per byte
/// (`- - - x`, `a.a.a`), and the parser, the compiler and the tree's destructor recurse over them.
const STACK: usize = 8 << 20;
const STACK_PER_BYTE: usize = 4 << 10;

/// Checks an indentation, or a width, that a template gives.
pub(super) fn width(of: &str, width: usize) -> Result<usize, Error> {
    if width <= WIDTH {
        return Ok(width);
    }
    let problem = format!("{of} is {width}; at most {WIDTH} characters are written");
    Err(Error::new(minijinja::ErrorKind::InvalidOperation, problem))
}

/// Checks the widths and precisions of a format string: `%1000000000d` would allocate as many bytes.
pub(super) fn widths_in(format: &Value) -> Result<(), Error> {
    let Some(text) = format.as_str() else { return Ok(()) };
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers
        .map(|digits| digits.parse().unwrap_or(usize::MAX))
        .try_for_each(|number| width("a number in a format", number).map(drop))
}

/// Runs `parse` on a thread with enough stack for any source of `bytes` bytes. Untouched pages of
/// the stack cost no memory.
pub(super) fn with_stack<T: Send>(bytes: usize, parse: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let stack = STACK + bytes * STACK_PER_BYTE;
        let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(stack).spawn_scoped(scope, parse)?;
        thread.join().map_err(|panic| io::Error::other(crate::flow::panic_message(panic.as_ref())))
    })
}

/// Text that is cut off by an error at its limit.
pub(super) struct Bounded {
    pub text: Vec<u8>,
    pub limit: usize,
    /// If true, more was written than the limit allows.
    pub exceeded: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.text.len() {
            self.exceeded = true;
            return Err(io::Error::new(ErrorKind::FileTooLarge, format!("more than {} bytes of text", self.limit)));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
