//! Models computed by transformers, and by this library: the same numbers.
//!
//! Reads every folder under `$ROLLFLOW_GOLDEN_MODELS` where that is set, else `tests/golden/models`. A folder that can't be loaded
//! fails by name; none is skipped.
#![cfg(feature = "torch")]
#![allow(clippy::unwrap_used)]

mod case;

use std::path::Path;
use std::sync::Arc;

use case::{AdamW, Case, Padded, assert_close, assert_close_but, assert_near, device, for_every_model};

use rollflow::data::Tokenizer;
use rollflow::data::chat::ChatTemplate;
use rollflow::engine::{LocalEngine, Request, SamplingParams, TokenEngine};
use rollflow::model::{Decoder, Layout, ModelConfig, load_hf, log_probs_and_entropy, save_hf};
use tch::{Device, Tensor};

#[test]
fn logits_of_packed_sequences_equal_those_of_padded_batches() {
    for_every_model(|case| {
        let (decoder, _guard) = (case.decoder(), tch::no_grad_guard());
        let views = decoder.views(&case.weights.flat);
        for (side, batch) in [("right", &case.golden.right), ("left", &case.golden.left)] {
            let logits = decoder.logits(&views, &decoder.hidden(&views, &batch.packed()));
            let expected = batch.at_real_positions(&case.expected[&format!("{side}.logits")]);
            assert_close(&format!("{side}.logits"), &logits, &expected, case.golden.tolerance.logits);
        }
    });
}

#[test]
fn token_log_probs_and_entropies_are_those_of_the_reference() {
    for_every_model(|case| {
        let (decoder, batch) = (case.decoder(), &case.golden.right);
        let views = decoder.views(&case.weights.flat);
        let packed = batch.packed();
        let hidden = decoder.hidden(&views, &packed);
        // The last token of a sequence has no successor; it is put to any target and left out.
        let targets = Tensor::from_slice(&packed.ids).roll([-1], [0]).to_device(device());
        let has_next: Vec<bool> = packed.lens.iter().flat_map(|&len| (0..len).map(move |at| at + 1 < len)).collect();
        let has_next = Tensor::from_slice(&has_next).to_device(device());
        for temperature in [1.0, 0.7] {
            let (log_probs, entropies) = log_probs_and_entropy(&decoder.logits(&views, &hidden), &targets, temperature);
            let expected = |what: &str| batch.at_real_positions(&case.expected[&format!("right.{what}_T{temperature:.1}")]);
            let tolerance = case.golden.tolerance.logits;
            assert_close("log-probabilities", &log_probs.index(&[Some(&has_next)]), &expected("token_logprobs"), tolerance);
            assert_close("entropies", &entropies, &expected("entropy"), tolerance);
        }
    });
}

#[test]
fn greedy_continuations_and_their_log_probs_are_those_of_the_reference() {
    for_every_model(|case| {
        let (greedy, prompts) = (&case.golden.greedy, case.golden.right.sequences());
        let params =
            SamplingParams { temperature: 0.0, max_new_tokens: greedy.max_new_tokens, ignore_eos: true, ..Default::default() };
        let tokenizer = Arc::new(Tokenizer::from_dir(&case.dir).unwrap());
        // Fewer slots than prompts: the last one enters while the others are under way.
        let mut engine = LocalEngine::new(case.decoder(), tokenizer, prompts.len() - 1, 0);
        engine.set_weights(0, &case.weights);
        let params = Arc::new(params);
        for (ordinal, prompt) in (0..).zip(&prompts) {
            engine.submit(Request::new(ordinal, prompt.as_slice(), 1, params.clone())).unwrap();
        }
        for answer in engine.run().unwrap() {
            let row = answer.ordinal as usize;
            assert_eq!(answer.tokens, greedy.tokens[row], "tokens of row {row}");
            let [found, expected] = [answer.log_probs.iter().map(|&log| f64::from(log)).collect(), greedy.logprobs[row].clone()]
                .map(|v: Vec<f64>| Tensor::from_slice(&v));
            assert_close("log-probabilities", &found, &expected, case.golden.tolerance.logits);
        }
    });
}

/// A second request that begins with half of the answer computes only that, and drafts are checked against what the model says.
#[test]
fn greedy_continuations_of_what_is_remembered_and_drafted_are_those_of_the_reference() {
    for_every_model(|case| {
        let (greedy, prompts) = (&case.golden.greedy, case.golden.right.sequences());
        let tokenizer = Arc::new(Tokenizer::from_dir(&case.dir).unwrap());
        let engine = LocalEngine::new(case.decoder(), tokenizer, prompts.len(), 0);
        let mut engine = engine.remembering(2 * prompts.len()).drafting(3);
        engine.set_weights(0, &case.weights);
        for begun in [0, greedy.max_new_tokens / 2] {
            let params = SamplingParams {
                temperature: 0.0,
                max_new_tokens: greedy.max_new_tokens - begun,
                ignore_eos: true,
                ..Default::default()
            };
            let params = Arc::new(params);
            for (ordinal, (prompt, answer)) in (0..).zip(prompts.iter().zip(&greedy.tokens)) {
                engine.submit(Request::new(ordinal, [prompt, &answer[..begun]].concat(), 1, params.clone())).unwrap();
            }
            let mut reused = 0;
            while !engine.is_idle() {
                for answer in engine.step().unwrap() {
                    let row = answer.ordinal as usize;
                    assert_eq!(answer.tokens, greedy.tokens[row][begun..], "tokens of row {row} from {begun} on");
                    let found: Vec<f64> = answer.log_probs.iter().map(|&log| f64::from(log)).collect();
                    let [found, expected] = [&found, &greedy.logprobs[row][begun..]].map(Tensor::from_slice::<f64>);
                    assert_close("log-probabilities", &found, &expected, case.golden.tolerance.logits);
                }
                reused += engine.load().reused;
            }
            assert_eq!(reused > 0, begun > 0, "tokens reused: {reused}");
        }
    });
}

#[test]
fn texts_become_the_tokens_of_the_reference_and_back() {
    for_every_model(|case| {
        let tokenizer = Tokenizer::from_dir(&case.dir).unwrap();
        tokenizer.check_model(case.config.vocab_size).unwrap();
        assert!(case.config.eos_token_ids.iter().all(|id| tokenizer.eos_token_ids().contains(id)));
        for expected in &case.golden.tokenizer {
            assert_eq!(tokenizer.encode(&expected.text).unwrap(), expected.ids, "{:?}", expected.text);
            assert_eq!(tokenizer.decode_all(&expected.ids).unwrap(), expected.decoded, "{:?}", expected.text);
        }
    });
}

/// The template that rendered the cases is another's file, and is where `$ROLLFLOW_GOLDEN` says.
#[test]
fn conversations_become_the_text_and_the_tokens_of_the_reference() {
    let template = std::env::var_os("ROLLFLOW_GOLDEN").map(|folder| Path::new(&folder).join("chat_templates/qwen2_5.jinja"));
    let template = template.map(|file| ChatTemplate::from_file(&file).unwrap());
    let seen = std::cell::Cell::new(0);
    for_every_model(|case| {
        let tokenizer = Tokenizer::from_dir(&case.dir).unwrap();
        seen.set(seen.get() + case.golden.chat.len());
        for expected in &case.golden.chat {
            assert_eq!(tokenizer.encode_bare(&expected.text).unwrap(), expected.ids, "{:?}", expected.text);
            if let Some(template) = &template {
                let rendered = template.render(&expected.messages, &[], expected.add_generation_prompt).unwrap();
                assert_eq!(rendered, expected.text);
            }
        }
    });
    assert!(seen.get() > 0, "no folder has a conversation");
}

/// The supervised loss of the golden batch: mean over all labelled tokens.
fn sft_loss(decoder: &Decoder, flat: &Tensor, batch: &Padded, labels: &[Vec<i64>]) -> Tensor {
    let packed = batch.packed();
    let views = decoder.views(flat);
    let (mut rows, mut targets) = (Vec::new(), Vec::new());
    let mut row = 0;
    for (mask, labels) in batch.attention_mask.iter().zip(labels) {
        let real: Vec<i64> = labels.iter().zip(mask).filter(|(_, mask)| **mask == 1).map(|(label, _)| *label).collect();
        for (at, &target) in real.iter().enumerate().skip(1).filter(|(_, label)| **label >= 0) {
            rows.push(row + at as i64 - 1);
            targets.push(target);
        }
        row += real.len() as i64;
    }
    let hidden = decoder.hidden(&views, &packed).index_select(0, &Tensor::from_slice(&rows).to_device(device()));
    let logits = decoder.logits(&views, &hidden);
    -log_probs_and_entropy(&logits, &Tensor::from_slice(&targets).to_device(device()), 1.0).0.mean(None)
}

/// Three steps of AdamW with clipping: the losses, the gradients before clipping, and the weights in the end.
fn adamw_three_steps(case: &Case) -> (Vec<f64>, Vec<Tensor>, Tensor) {
    let (decoder, settings) = (case.decoder(), &case.golden.sft.optimizer);
    let flat = case.weights.copy().flat.set_requires_grad(true);
    let (mut first, mut second) = (flat.zeros_like().detach(), flat.zeros_like().detach());
    let (mut losses, mut gradients) = (Vec::new(), Vec::new());
    for step in 1..=3 {
        let loss = sft_loss(&decoder, &flat, &case.golden.right, &case.golden.sft.labels);
        losses.push(loss.double_value(&[]));
        let gradient = Tensor::run_backward(&[&loss], &[&flat], false, false).remove(0);
        gradients.push(gradient.copy());
        let _guard = tch::no_grad_guard();
        let norm = gradient.norm().double_value(&[]);
        let gradient = gradient * (settings.clip_norm / (norm + 1e-6)).min(1.0);
        let [b1, b2] = settings.betas;
        first = first * b1 + &gradient * (1.0 - b1);
        second = second * b2 + gradient.square() * (1.0 - b2);
        let (corrected, scale) = (&first / (1.0 - b1.powi(step)), (&second / (1.0 - b2.powi(step))).sqrt() + settings.eps);
        let mut flat = flat.detach();
        let _decayed = flat.g_mul_scalar_(1.0 - settings.lr * settings.weight_decay);
        let _moved = flat.g_sub_(&(corrected / scale * settings.lr));
    }
    (losses, gradients, flat.detach())
}

/// AdamW moves a weight by `lr · g / (|g| + eps)` at first: where a gradient is as small as `eps`, the rounding of the products behind
/// it decides, in the reference as here. How far that moves each weight: the derivative of that step times one f32 rounding of the
/// largest gradient anywhere, at most one whole step.
fn adamw_rounding(gradient: &Tensor, largest: f64, clip: f64, settings: &AdamW) -> Tensor {
    let rounding = largest * clip * f64::from(f32::EPSILON);
    let moved = rounding * settings.lr * settings.eps / (gradient.abs() * clip + settings.eps).square();
    moved.clamp_max(settings.lr)
}

/// Where a parameter of transformers begins, and its shape. Experts are one parameter there, and tensors of
/// their own in a folder.
fn place(layout: &Layout, name: &str) -> Option<(i64, Vec<i64>)> {
    let shape = |of: &[usize]| of.iter().map(|&size| size as i64).collect::<Vec<_>>();
    if let Some(entry) = layout.find(name) {
        return Some((entry.offset as i64, shape(&entry.shape)));
    }
    let (module, parameter) = name.split_once(".experts.")?;
    let (first, matrices) = if parameter == "gate_up_proj" { ("gate_proj", 2) } else { ("down_proj", 1) };
    let of = |expert: usize| layout.find(&format!("{module}.experts.{expert}.{first}.weight"));
    let (begin, count) = (of(0)?, (0..).take_while(|&expert| of(expert).is_some()).count());
    Some((begin.offset as i64, shape(&[count, matrices * begin.shape[0], begin.shape[1]])))
}

#[test]
fn loss_gradients_and_weights_after_three_adamw_steps_are_those_of_pytorch() {
    for_every_model(|case| {
        let (losses, gradients, after) = adamw_three_steps(case);
        let (sft, tolerance) = (&case.golden.sft, case.golden.tolerance.logits);
        let slice = |flat: &Tensor, name: &str| {
            let (begin, shape) = place(&case.weights.layout, name).unwrap_or_else(|| panic!("no parameter {name}"));
            flat.narrow(0, begin, shape.iter().product()).view(shape.as_slice())
        };
        for (step, expected) in sft.steps.iter().enumerate() {
            assert_near(&format!("loss of step {step}"), losses[step], expected.loss, tolerance);
            assert_near(
                &format!("gradient norm of step {step}"),
                gradients[step].norm().double_value(&[]),
                expected.grad_norm,
                tolerance,
            );
            for (name, &norm) in &expected.grad_norm_per_param {
                assert_near(
                    &format!("gradient norm of {name}"),
                    slice(&gradients[step], name).norm().double_value(&[]),
                    norm,
                    tolerance,
                );
            }
        }
        let largest = gradients[0].abs().max().double_value(&[]);
        let clip = (sft.optimizer.clip_norm / sft.steps[0].grad_norm).min(1.0);
        let mut compared = 0;
        for (name, expected) in &case.expected {
            if let Some(name) = name.strip_prefix("grad0.") {
                assert_close(&format!("gradient of {name}"), &slice(&gradients[0], name), expected, tolerance);
            }
            if let Some(name) = name.strip_prefix("after3.") {
                let rounding = adamw_rounding(&slice(&gradients[0], name), largest, clip, &sft.optimizer);
                let (what, tolerance) = (format!("{name} after three steps"), case.golden.tolerance.after_steps);
                assert_close_but(&what, &slice(&after, name), expected, tolerance, &rounding);
                compared += expected.numel();
            }
        }
        assert_eq!(compared, case.weights.layout.total(), "every parameter is compared");
        let last = sft_loss(&case.decoder(), &after, &case.golden.right, &sft.labels);
        assert_near("loss after three steps", last.double_value(&[]), sft.loss_after_3_steps, tolerance);
    });
}

#[test]
fn a_saved_folder_loads_to_the_same_bits_and_the_same_configuration() {
    for_every_model(|case| {
        let dir = tempfile::tempdir().unwrap();
        save_hf(dir.path(), &case.config, &case.weights).unwrap();
        let (config, weights) = load_hf(dir.path()).unwrap_or_else(|error| panic!("{error}"));
        let config = config.within(case.config.contexts().map(|_| case.config.max_positions)).unwrap();
        assert_eq!(config.to_json(), case.config.to_json());
        assert_eq!(
            ModelConfig { other: Default::default(), ..config },
            ModelConfig { other: Default::default(), ..case.config.clone() }
        );
        assert!(weights.flat == case.weights.flat.to_device(Device::Cpu), "weights differ");
    });
}
