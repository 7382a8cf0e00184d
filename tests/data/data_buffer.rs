//! The prompt stream: exact counts, orders that depend on seed and epoch alone, and resuming anywhere.

use std::collections::{BTreeSet, HashSet};

use proptest::prelude::*;
use rollflow::data::{BufferState, ChatMessage, DataBuffer, Pair, Prompt, PromptText, arithmetic};

fn numbered(len: usize, seed: u64) -> DataBuffer {
    DataBuffer::new((0..len).map(|number| format!("prompt {number}")), seed).unwrap()
}

fn texts(prompts: &[Prompt]) -> Vec<String> {
    prompts.iter().map(|prompt| prompt.text.render()).collect()
}

#[test]
fn an_empty_data_set_is_refused() {
    let error = DataBuffer::new(Vec::<String>::new(), 0).unwrap_err().to_string();
    assert!(error.contains("the data set holds no prompt"), "{error}");
}

#[test]
fn texts_conversations_and_prompts_are_accepted() {
    let turn = ChatMessage::new("user", "1+1?");
    let mut chats = DataBuffer::new([vec![turn.clone()]], 0).unwrap();
    assert_eq!(chats.get_prompts(1)[0].text, PromptText::Chat(vec![turn]));

    let ready: Vec<Prompt> = arithmetic::addition(1).iter().map(Prompt::from).collect();
    let prompt = DataBuffer::new(ready, 0).unwrap().get_prompts(100).pop().unwrap();
    assert_eq!((prompt.ordinal, prompt.answer()), (99, Some("18")));
}

#[test]
fn epoch_zero_keeps_the_given_order_unless_shuffled() {
    let given: Vec<String> = (0..50).map(|number| format!("prompt {number}")).collect();
    assert_eq!(texts(&numbered(50, 3).get_prompts(50)), given);
    let shuffled = texts(&numbered(50, 3).shuffled().get_prompts(50));
    assert_ne!(shuffled, given);
    assert_eq!(BTreeSet::from_iter(shuffled), BTreeSet::from_iter(given));
}

/// Recorded once. If this moves, every recorded run's order moves with it.
#[test]
fn the_order_of_an_epoch_is_the_same_in_every_release() {
    let order: Vec<String> = texts(&numbered(10, 42).shuffled().get_prompts(20));
    let order: Vec<&str> = order.iter().map(|text| text.trim_start_matches("prompt ")).collect();
    assert_eq!(order.join(" "), "4 5 8 3 7 6 2 1 9 0 3 4 9 5 0 8 1 7 6 2");
}

#[test]
fn epochs_and_seeds_differ() {
    let epochs = texts(&numbered(30, 1).shuffled().get_prompts(90));
    let orders: HashSet<&[String]> = epochs.chunks(30).collect();
    assert_eq!(orders.len(), 3);
    assert_ne!(epochs, texts(&numbered(30, 2).shuffled().get_prompts(90)));
}

#[test]
fn a_single_prompt_repeats_for_ever() {
    let prompts = numbered(1, 9).get_prompts(1000);
    assert!(prompts.iter().all(|prompt| prompt.text == "prompt 0".into()));
    assert_eq!(prompts.last().map(|prompt| (prompt.ordinal, prompt.epoch)), Some((999, 999)));
}

#[test]
fn a_state_of_another_data_set_is_refused_and_leaves_the_buffer_alone() {
    let state = numbered(10, 0).save_state();
    let mut other = numbered(11, 0);
    other.get_prompts(4);
    let before = other.save_state();
    let error = other.load_state(&state).unwrap_err();
    assert!(error.to_string().contains("10 prompts") && error.to_string().contains("this one has 11"), "{error}");
    assert_eq!(other.save_state(), before);

    let mut same_texts = DataBuffer::new(
        (0..10).map(|number| Prompt {
            metadata: [("answer".to_owned(), "changed".into())].into_iter().collect(),
            ..format!("prompt {number}").into()
        }),
        0,
    )
    .unwrap();
    assert!(same_texts.load_state(&state).is_err(), "metadata belongs to the data set too");
}

#[test]
fn drawn_sums_are_right_in_range_and_repeatable() {
    let drawn = arithmetic::drawn_addition(6, 500, 11);
    assert_eq!(drawn, arithmetic::drawn_addition(6, 500, 11));
    assert_ne!(drawn, arithmetic::drawn_addition(6, 500, 12));
    for Pair { prompt, completion, .. } in &drawn {
        let text = prompt.render();
        let (a, b) = text.trim_end_matches('=').split_once('+').unwrap();
        let (a, b): (u64, u64) = (a.parse().unwrap(), b.parse().unwrap());
        assert!(a < 1_000_000 && b < 1_000_000);
        assert_eq!((a + b).to_string(), *completion);
    }
}

#[test]
fn the_warm_up_share_is_a_fixed_subset_without_repeats() {
    let pairs = arithmetic::addition(1);
    let share = arithmetic::split(&pairs, 0.25, 5).0;
    assert_eq!(share.len(), 25);
    assert_eq!(share, arithmetic::split(&pairs, 0.25, 5).0);
    assert_eq!(share.iter().map(|pair| pair.prompt.render()).collect::<HashSet<_>>().len(), 25);
    assert_eq!(arithmetic::split(&pairs, 1.0, 5).0.len(), 100);
    assert!(arithmetic::split(&pairs, 0.0, 5).0.is_empty());
}

fn buffer() -> impl Strategy<Value = DataBuffer> {
    (1_usize..40, any::<u64>(), any::<bool>()).prop_map(|(len, seed, shuffled)| {
        let buffer = numbered(len, seed);
        if shuffled { buffer.shuffled() } else { buffer }
    })
}

proptest! {
    #[test]
    fn any_slicing_gives_exact_counts_and_the_same_stream(buffer in buffer(), sizes in prop::collection::vec(0_usize..100, 1..8)) {
        let mut sliced = buffer.clone();
        let mut parts = Vec::new();
        for size in &sizes {
            let part = sliced.get_prompts(*size);
            prop_assert_eq!(part.len(), *size);
            parts.extend(part);
        }
        prop_assert_eq!(&parts, &buffer.clone().get_prompts(parts.len()));
        for (at, prompt) in parts.iter().enumerate() {
            prop_assert_eq!((prompt.ordinal, prompt.epoch), (at as u64, (at / buffer.len()) as u64));
        }
        prop_assert_eq!((sliced.epoch(), sliced.offset()), ((parts.len() / buffer.len()) as u64, parts.len() % buffer.len()));
    }

    #[test]
    fn every_epoch_holds_every_prompt_once(mut buffer in buffer(), epochs in 1_usize..5) {
        let len = buffer.len();
        for _ in 0..epochs {
            let seen: BTreeSet<String> = texts(&buffer.get_prompts(len)).into_iter().collect();
            prop_assert_eq!(seen.len(), len);
        }
    }

    #[test]
    fn resuming_at_any_point_equals_the_uninterrupted_stream(
        buffer in buffer(), before in 0_usize..200, after in 1_usize..100, used in 0_usize..200, other_seed in any::<u64>(),
    ) {
        let mut uninterrupted = buffer.clone();
        uninterrupted.get_prompts(before);
        let saved = serde_json::to_string(&uninterrupted.save_state()).unwrap();
        let expected = uninterrupted.get_prompts(after);

        let state: BufferState = serde_json::from_str(&saved).unwrap();
        let mut another = numbered(buffer.len(), other_seed);
        another.get_prompts(used);
        another.load_state(&state).unwrap();
        prop_assert_eq!(another.get_prompts(after), expected);
    }
}
