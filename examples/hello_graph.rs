//! A dataflow graph without any model: words are picked out, shouted by two workers, printed and counted.
//!
//! Ports are typed, so that wrong wiring does not compile; edges are bounded, so that a fast source waits for a slow sink; and the report
//! says where every nanosecond of every stage went. Ctrl-C drains it.
//!
//!     cargo run --example hello_graph

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use rollflow::flow::Capacity;
use rollflow::flow::filter;
use rollflow::flow::flat_map;
use rollflow::flow::from_iter;
use rollflow::prelude::*;

const TEXT: &str = "the tensors train the trainer\nwhile the sampler samples samples\nand the weights wait";

fn main() -> anyhow::Result<()> {
    let counts: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
    let totals = Arc::clone(&counts);

    let mut flow = Flow::new("hello");
    let lines = flow.source("lines", from_iter(TEXT.lines().map(str::to_owned)));
    let words = flow.stage("split", lines, flat_map(|line: String| line.split(' ').map(str::to_owned).collect::<Vec<_>>()));
    flow.edge(&words, Capacity::items(4));
    let long = flow.stage("long", words, filter(|word: &String| word.len() > 3));
    let shouted = flow.stage("shout", long, map(|word: String| word.to_uppercase()).workers(2).ordered());
    let mut both = flow.tee("tee", shouted, 2).into_iter();
    let (printed, counted) = both.next().zip(both.next()).expect("a tee of two has two branches");
    flow.sink("print", printed, |word: String| println!("{word}"));
    flow.sink("count", counted, move |word: String| {
        *totals.lock().expect("nobody panics while counting").entry(word).or_default() += 1;
    });

    println!("{}", flow.graph().to_mermaid());
    let report = flow.run(Until::finished())?;
    println!("\n{:?}\n\n{report}", counts.lock().expect("nobody panicked"));
    Ok(())
}
