//! A trainer takes batches, not words.
use rollflow::flow::{Flow, Io, Stage, StageError, from_iter};

struct Train;

impl Stage for Train {
    type In = Vec<u64>;
    type Out = ();

    fn run(&mut self, _: &mut Io<Vec<u64>, ()>) -> Result<(), StageError> {
        Ok(())
    }
}

fn main() {
    let mut flow = Flow::new("wrong");
    let words = flow.source("words", from_iter([String::from("one")]));
    let steps = flow.stage("train", words, Train);
    flow.sink("sink", steps, |_: ()| {});
}
