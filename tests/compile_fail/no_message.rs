//! A type travels over an edge only if it is a `Message`, and the compiler says how to make it one.
use rollflow::flow::from_iter;
use rollflow::prelude::*;

struct Word(String);

fn main() {
    let mut flow = Flow::new("words");
    let lines = flow.source("lines", from_iter(["one".to_owned()]));
    let words = flow.stage("split", lines, map(|line: String| Word(line)));
    flow.sink("print", words, |word: Word| println!("{}", word.0));
}
