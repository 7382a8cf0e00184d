//! Causes of errors.

use std::error::Error;
use std::io;

/// The error and its causes, the outermost first. Errors inside of `io::Error` are among them.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> Vec<&'a (dyn Error + 'static)> {
    let (mut causes, mut next) = (Vec::new(), Some(error));
    while let Some(error) = next {
        causes.push(error);
        next = match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    causes
}

/// The message of an error, followed by those of its causes that it does not contain.
pub fn full_message(error: &(dyn Error + 'static)) -> String {
    let mut message = error.to_string();
    for cause in causes(error).iter().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message += &format!(": {cause}");
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Wrapped(&'static str, io::Error);

    impl std::fmt::Display for Wrapped {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Wrapped {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.1)
        }
    }

    #[test]
    fn a_message_contains_each_cause_once() {
        let full = |message| full_message(&Wrapped(message, io::Error::other("no space")));
        assert_eq!(full("cannot write a.json"), "cannot write a.json: no space");
        assert_eq!(full("cannot write a.json: no space; free some"), "cannot write a.json: no space; free some");
    }
}
