//! A port has one consumer; for two there is `tee`.
use rollflow::flow::{Flow, from_iter};

fn main() {
    let mut flow = Flow::new("twice");
    let numbers = flow.source("numbers", from_iter(0..3u64));
    flow.sink("first", numbers, |_: u64| {});
    flow.sink("second", numbers, |_: u64| {});
}
