//! Laws: N1 (what a sequence contributes doesn't depend on what it is packed with).

use std::path::Path;

use proptest::prelude::*;
use rollflow::model::{Decoder, Packed, load_hf, log_probs_and_entropy};
use tch::{Kind, Tensor};

/// Log-probabilities of every sequence's own tokens and the flat gradient of their sum, over packs of these sequences.
fn scores(model: &str, packs: &[&[Vec<u32>]]) -> (Tensor, Tensor) {
    tch::set_num_threads(1);
    let (config, weights) = load_hf(&Path::new("tests/golden/models").join(model)).unwrap();
    let decoder = Decoder::new(&config, weights.layout.clone());
    let flat = weights.flat.set_requires_grad(true);
    let scored = packs.iter().map(|sequences| {
        let packed = Packed::new(sequences.iter().map(Vec::as_slice));
        let views = decoder.views(&flat);
        let logits = decoder.logits(&views, &decoder.hidden(&views, &packed));
        log_probs_and_entropy(&logits, &Tensor::from_slice(&packed.ids), 1.0).0
    });
    let log_probs = Tensor::cat(&scored.collect::<Vec<_>>(), 0);
    let gradient = Tensor::run_backward(&[log_probs.sum(Kind::Float)], &[&flat], false, false).remove(0);
    (log_probs.detach(), gradient)
}

fn assert_equal(what: &str, (found, expected): (&Tensor, &Tensor)) -> Result<(), TestCaseError> {
    let difference = (found - expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    prop_assert!(difference <= 1e-5 * scale.max(1.0), "{what} differ by {difference:e} at scale {scale}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn n1_packed_sequences_score_as_each_does_alone(
        sequences in prop::collection::vec(prop::collection::vec(0u32..380, 1..24), 1..7), same_length: bool, sliding: bool,
    ) {
        let longest = sequences.iter().map(Vec::len).max().unwrap();
        let fit = |sequence: &Vec<u32>| sequence.iter().cycle().take(longest).copied().collect();
        let sequences: Vec<Vec<u32>> = if same_length { sequences.iter().map(fit).collect() } else { sequences };
        let model = if sliding { "mistral_swa" } else { "qwen3_tied" };
        let together = scores(model, &[sequences.as_slice()]);
        let alone = scores(model, &sequences.chunks(1).collect::<Vec<_>>());
        assert_equal("log-probabilities", (&together.0, &alone.0))?;
        assert_equal("gradients", (&together.1, &alone.1))?;
    }
}
