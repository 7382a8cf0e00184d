//! Generation that a hand-written loop asks for and awaits.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rollflow::data::{Group, Prompt};
use rollflow::engine::{EngineError, LocalEngine, TokenEngine};
use rollflow::flow::{Flow, Until, WeightsTx, from_iter, weights};
use rollflow::model::{Family, FrozenWeights, Weights};
use rollflow::rollout::complete;
use rollflow::stages::generate::{Generator, RunningGenerator};
use rollflow::train::Policy;

use crate::generating::*;

type Tokens = Vec<Vec<u32>>;

fn policy() -> Policy {
    tch::set_num_threads(1);
    let config = config(Family::Qwen2, None);
    let weights = Weights::random(&config, 5);
    Policy::new(config, weights.freeze(), (*tokenizer()).clone()).unwrap()
}

fn generator(policy: &Policy) -> (WeightsTx<FrozenWeights>, Generator<LocalEngine>) {
    let (publisher, weights) = weights();
    publisher.publish(1, policy.frozen()).unwrap();
    (publisher, Generator::local(policy).weights(weights).group_size(3).slots(4).seed(11).sampling(params(12)))
}

fn running(policy: &Policy) -> (WeightsTx<FrozenWeights>, RunningGenerator) {
    let (publisher, generator) = generator(policy);
    (publisher, generator.start().unwrap())
}

fn prompts(ordinals: impl IntoIterator<Item = u64>) -> Vec<Prompt> {
    ordinals.into_iter().map(|ordinal| Prompt { ordinal, ..Prompt::from(format!("{ordinal}+(4)=")) }).collect()
}

fn tokens(groups: &[Group]) -> Tokens {
    groups.iter().flat_map(|group| &group.samples).map(|sample| sample.tokens.clone()).collect()
}

fn alone(policy: &Policy, prompts: &[Prompt]) -> Tokens {
    let mut engine = policy.engine(4, 11);
    tokens(&complete(&mut engine, policy.tokenizer(), prompts.to_vec(), 3, &params(12)).unwrap())
}

/// Law D2, law N2.
#[tokio::test]
async fn awaited_groups_are_whole_in_the_order_of_their_prompts_and_the_same_in_overlapping_calls() {
    let policy = policy();
    let (_publisher, generator) = running(&policy);
    let (first, second) = (prompts([9, 2, 5]), prompts([7, 1, 4, 3]));
    let both = tokio::join!(generator.generate_batch(&first), generator.generate_batch(&second));
    for (groups, prompts) in [(both.0.unwrap(), &first), (both.1.unwrap(), &second)] {
        let asked = prompts.iter().map(|prompt| (prompt, 3));
        assert!(groups.iter().map(|group| (&*group.prompt, group.samples.len())).eq(asked));
        assert_eq!(tokens(&groups), alone(&policy, prompts));
    }
    assert!(generator.generate_batch(&[]).await.unwrap().is_empty());
}

/// Law V1, law D3.
#[tokio::test]
async fn a_call_after_a_publish_is_sampled_by_the_published_weights() {
    let policy = policy();
    let (publisher, generator) = running(&policy);
    for version in 2..5 {
        let weights = Weights::random(policy.config(), version).freeze();
        publisher.publish(version, Arc::new(weights)).unwrap();
        for group in generator.generate_batch(&prompts([0, 1])).await.unwrap() {
            assert!(group.samples.iter().all(|sample| sample.versions.oldest() == Some(version)));
        }
    }
}

#[tokio::test]
async fn an_ordinal_in_flight_is_not_taken_twice() {
    let policy = policy();
    let (_publisher, generator) = running(&policy);
    let twice = generator.generate_batch(&prompts([3, 4, 3])).await.unwrap_err();
    assert!(matches!(twice, EngineError::Prompt { ordinal: 3, .. }), "{twice}");
    // A refused call leaves nothing in flight.
    assert_eq!(generator.generate_batch(&prompts([3, 4])).await.unwrap().len(), 2);
    let mut engine = policy.engine(4, 11);
    let twice = complete(&mut engine, policy.tokenizer(), prompts([3, 3]), 1, &params(4)).unwrap_err().to_string();
    assert!(twice.contains("prompt 3: another prompt has the same ordinal"), "{twice}");
    assert!(engine.is_idle(), "none is left in the engine");
}

/// Law N2.
#[test]
fn a_flow_ends_where_prompts_in_flight_have_one_ordinal() {
    let policy = policy();
    let (_publisher, generator) = generator(&policy);
    let mut flow = Flow::new("twice");
    let source = flow.source("prompts", from_iter(prompts([3, 3])));
    let groups = flow.stage("generate", source, generator);
    flow.sink("groups", groups, drop::<Group>);
    let twice = flow.run(Until::finished()).unwrap_err().to_string();
    assert!(twice.contains("prompt 3: another prompt has the same ordinal"), "{twice}");
}

#[tokio::test]
async fn a_dropped_call_leaves_the_others_whole() {
    let policy = policy();
    let (publisher, waiting) = weights();
    let generator =
        Generator::local(&policy).weights(waiting).group_size(3).slots(4).seed(11).sampling(params(12)).start().unwrap();
    let (given_up, kept) = (prompts(0..6), prompts(10..16));
    {
        // No weights yet: the call can't have ended.
        let mut call = pin!(generator.generate_batch(&given_up));
        assert!(matches!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
    }
    publisher.publish(1, policy.frozen()).unwrap();
    assert_eq!(tokens(&generator.generate_batch(&kept).await.unwrap()), alone(&policy, &kept));
    assert_eq!(tokens(&generator.generate_batch(&given_up).await.unwrap()), alone(&policy, &given_up), "its ordinals are free");
}

#[tokio::test]
async fn a_call_waits_for_the_ordinals_of_a_dropped_call_until_its_groups_end() {
    let policy = policy();
    let (_publisher, generator) = running(&policy);
    let prompts = prompts(0..6);
    for _ in 0..8 {
        // Dropped as soon as the generator has some of its prompts.
        let dropped = generator.generate_batch(&prompts);
        drop(tokio::time::timeout(Duration::from_millis(2), dropped).await);
        assert_eq!(tokens(&generator.generate_batch(&prompts).await.unwrap()), alone(&policy, &prompts));
    }
}

/// Law F3, law N4.
#[tokio::test]
async fn a_failure_reaches_every_call_and_names_its_sample() {
    let policy = policy();
    let (publisher, generator) = running(&policy);
    let mut broken = Weights::random(policy.config(), 5);
    broken.flat = broken.flat.fill(f64::NAN);
    publisher.publish(2, Arc::new(broken.freeze())).unwrap();
    let (first, second) = (prompts([0, 1]), prompts([2]));
    let both = tokio::join!(generator.generate_batch(&first), generator.generate_batch(&second));
    for error in [both.0.unwrap_err(), both.1.unwrap_err(), generator.generate_batch(&second).await.unwrap_err()] {
        let text = error.to_string();
        assert!(matches!(error, EngineError::Generator(_)) && text.contains("are not finite under weights version 2"), "{text}");
    }
}

#[test]
fn a_generator_without_weights_or_work_ends_when_it_is_dropped() {
    let policy = policy();
    let (publisher, waiting) = weights::<FrozenWeights>();
    drop(Generator::local(&policy).weights(waiting).start().unwrap());
    drop(publisher);
    drop(running(&policy));
}
