use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::message::PassInput;

fn tensors() -> impl Strategy<Value = Tensor> {
    prop_oneof![
        prop::collection::vec(-1e6_f32..1e6, 0..6).prop_map(Tensor::Floats),
        prop::collection::vec(any::<i64>(), 0..6).prop_map(Tensor::Ints),
        (1_usize..4, 0_usize..4).prop_map(|(columns, rows)| {
            let flat = Tensor::Ints((0..columns * rows).map(|value| value as i64).collect());
            Tensor::shaped(flat, &[rows, columns]).unwrap()
        }),
    ]
}

proptest! {
    #[test]
    fn a_pass_is_read_as_it_was_written(
        data in prop::collection::vec((prop::collection::vec(0_i64..1 << 30, 0..9), tensors()), 0..5),
        seq_id in 0_u64..1 << 30,
        clip in prop::option::of(0.0_f64..2.0),
        forward_only: bool,
    ) {
        let data = data.into_iter().map(|(tokens, tensor)| Datum::new(tokens, [("weights", tensor)])).collect();
        let loss_fn_config = clip.map(|clip| ("clip".to_owned(), clip)).into_iter().collect();
        let pass = Pass { model_id: "m".into(), seq_id, data, loss_fn: "ppo".into(), loss_fn_config, forward_only };
        prop_assert_eq!(place_of_pass(&encode_pass(&pass)), Ok(("m".to_owned(), seq_id)));
        prop_assert_eq!(decode_pass(&encode_pass(&pass)), Ok(pass));
    }

    #[test]
    fn the_answer_to_a_pass_is_read_as_it_was_written(outputs in prop::collection::vec(prop::collection::vec(-9_f32..9.0, 0..7), 0..6)) {
        let outputs = outputs.into_iter().map(|floats| BTreeMap::from([("logprobs".to_owned(), Tensor::Floats(floats))]));
        let metrics = BTreeMap::from([("loss:sum".to_owned(), 0.5)]);
        let output = PassOutput { loss_fn_output_type: "Scores".into(), loss_fn_outputs: outputs.collect(), metrics };
        prop_assert_eq!(decode_output(&encode_output(&output)), Ok(output));
    }

    #[test]
    fn bytes_of_any_kind_are_read_or_refused(body: Vec<u8>) {
        drop((decode_pass(&body), place_of_pass(&body), decode_output(&body), decode_samples(&body)));
    }
}

/// A pass of a kilobyte would otherwise take gigabytes.
#[test]
fn sparse_tensors_of_a_message_have_one_bound_in_both_dialects() {
    let pass = |widths: &[usize]| {
        let datum = |width: &usize| {
            let crow_indices = bytes(&[0_i64, 0], |index| index.to_le_bytes());
            let sparse = Some(SparseCsr { crow_indices, ..SparseCsr::default() });
            let tensor = WireTensor { sparse, dtype: FLOAT32, shape: vec![1, *width as i64], ..WireTensor::default() };
            WireDatum { loss_fn_inputs: [("weights".to_owned(), tensor)].into(), ..WireDatum::default() }
        };
        decode_pass(&WirePass { data: widths.iter().map(datum).collect(), ..WirePass::default() }.encode_to_vec())
    };
    let tensors = |width: &usize| json!({"weights": {"data": [], "shape": [1, width], "sparse_crow_indices": [0, 0], "sparse_col_indices": []}});
    let input = |widths: &[usize]| {
        let datum = |width: &usize| json!({"model_input": {"chunks": []}, "loss_fn_inputs": tensors(width)});
        let data: Vec<_> = widths.iter().map(datum).collect();
        serde_json::from_value::<PassInput>(json!({"data": data, "loss_fn": "ppo"}))
    };
    let output = |widths: &[usize]| {
        let outputs: Vec<_> = widths.iter().map(tensors).collect();
        serde_json::from_value::<PassOutput>(json!({"loss_fn_outputs": outputs}))
    };
    assert!(pass(&[3, 4]).is_ok() && input(&[3, 4]).is_ok() && output(&[3, 4]).is_ok());
    for widths in [&[1 << 28; 12][..], &[1 << 24, (1 << 24) + 1]] {
        let why = [pass(widths).unwrap_err(), input(widths).unwrap_err().to_string(), output(widths).unwrap_err().to_string()];
        assert!(why.iter().all(|why| why.contains("`weights`: ") && why.contains("sparse tensors of this message")), "{why:?}");
    }
}

#[test]
fn samples_are_read_as_they_were_written() {
    let sequence = |stop_reason, logprobs| Sequence { stop_reason, tokens: vec![1, 2], logprobs, topk_logprobs: None };
    let topk_logprobs = Some(vec![Some(vec![(7, -0.25), (1, -0.5)]), Some(vec![(2, -1.5), (7, -2.5)])]);
    let samples = SampleResponse {
        sequences: vec![
            sequence(StopReason::Stop, Some(vec![-0.5, -1.5])),
            Sequence { topk_logprobs, ..sequence(StopReason::Length, None) },
        ],
        prompt_logprobs: Some(vec![None, Some(-2.0)]),
        topk_prompt_logprobs: Some(vec![None, Some(vec![(3, -0.5), (0, -1.5)])]),
    };
    assert_eq!(decode_samples(&encode_samples(&samples)), Ok(samples));
}
