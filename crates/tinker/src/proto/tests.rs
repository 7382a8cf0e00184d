use proptest::prelude::*;

use super::*;

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

#[test]
fn a_sparse_tensor_is_made_dense_and_wrong_indices_are_refused() {
    let values = || Tensor::Floats(vec![1.0, 2.0, 3.0]);
    let dense = Tensor::sparse(values(), &[3, 2], &[0, 1, 1, 3], &[1, 0, 1]).unwrap();
    assert_eq!(dense, Tensor::Rows(2, Box::new(Tensor::Floats(vec![0.0, 1.0, 0.0, 0.0, 2.0, 3.0]))));
    let cases: [(&[usize], &[i64], &[i64]); 5] = [
        (&[3], &[0, 1, 1, 3], &[1, 0, 1]),
        (&[3, 2], &[0, 1, 3], &[1, 0, 1]),
        (&[3, 2], &[0, 1, 1, 3], &[1, 0, 2]),
        (&[3, 2], &[0, 4, 1, 3], &[1, 0, 1]),
        (&[usize::MAX, 2], &[0, 1, 1, 3], &[1, 0, 1]),
    ];
    for (shape, rows, columns) in cases {
        assert!(Tensor::sparse(values(), shape, rows, columns).unwrap_err().contains("do not fit"));
    }
    let json = r#"{"data": [5.0], "dtype": "int64", "shape": [1, 2], "sparse_crow_indices": [0, 1], "sparse_col_indices": [1]}"#;
    assert_eq!(serde_json::from_str::<Tensor>(json).unwrap(), Tensor::Rows(2, Box::new(Tensor::Ints(vec![0, 5]))));
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
