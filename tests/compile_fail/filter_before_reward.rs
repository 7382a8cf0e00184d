//! A filter judges rewards, so it takes scored groups only: before the reward it does not compile.
use rollflow::flow::from_iter;
use rollflow::prelude::*;

fn main() {
    let mut flow = Flow::new("hasty");
    let groups = flow.source("groups", from_iter([Group::default()]));
    let kept = flow.stage("filter", groups, Filter::by(filters::nonzero_std));
    let scored = flow.stage("reward", kept, Reward::each(|_: &Sample| 1.0));
    flow.sink("sink", scored, |_: Scored| {});
}
